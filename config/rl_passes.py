# GRPO on the embedded task (tasks.py), after config/sft_passes.py: the model learns not to give up.
#     python train_rl.py config/rl_passes.py
init_from = "out-sft-passes/last"
out_dir = "out-rl-passes"
task = "passes:4-60"
window, rope = 12, "reset"
max_new_tokens = 300             # 60 steps of 4 tokens, and room for walking too far
batch_prompts, group_size = 16, 8
context_mult, carry, loss_on = 4, False, "tail"                                       # the paper's
lr, warmup_steps, max_steps = 1e-3, 5, 60
micro_batch = 32
eval_every, eval_size, save_every = 20, 128, 20
