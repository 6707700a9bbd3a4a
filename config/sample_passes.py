# One trace of the embedded task, by a model that config/rl_passes.py has trained.
#     python sample.py config/sample_passes.py --init_from=out-rl-passes/last
init_from = "out-rl-passes/last"
start = "Passes CG AF KB DI EH FJ GK BD HC IA JE from 00 01 04 A"
window, rope = 12, "reset"
temperature = 0.0
max_new_tokens = 400
