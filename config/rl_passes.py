# GRPO on the embedded task (data/passes), after config/sft_passes.py: the model learns not to give up.
#     python train_rl.py config/rl_passes.py
# Hardware: a CPU. Time: about 2 minutes. Expected: held-out problems solved from 0.27 to 0.98 (seed 2: 0.82), traces twice as long.
out_dir = "out-rl-passes"
init_from = "out-sft-passes/last"
task = "py:data/passes/task.py?low=4&high=60"
window, rope = 12, "reset"
max_new_tokens = 300             # 60 steps of 4 tokens, and room for walking too far
batch_prompts, group_size, max_draws = 16, 8, 2
context_mult, carry, loss_on = 4, True, "all"     # loss_on = "tail" sees a trace that went too far only where it ends
lr, warmup_steps, max_steps = 5e-4, 5, 30
schedule = "linear"              # constant goes on moving when nearly all is solved, and forgets the hours that no rollout shows
micro_batch = 32
eval_every, eval_size, save_every = 15, 128, 15
