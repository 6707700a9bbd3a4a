# GRPO for DeepSeek-R1-Distill-Qwen-1.5B on one GPU of 24 GB and 32 GB of RAM, traces of up to 32K tokens. Not run at full size yet.
#     python train_rl.py config/rl_r1_distill_1p5b_24gb.py --task=jsonl:problems.jsonl
#     python -m lab.plan config/rl_r1_distill_1p5b_24gb.py         # first: where the memory goes, and one longest step
# 1.78 B parameters. On the GPU: weights 3.6 GB (bfloat16); while sampling, 28.7 KB of cache per token and row, 123 MB per row of
# P = 200 and W = 4096, so 16 GB hold 128 rows at once; while training, instead of that cache, 1 x 4,096 tokens with the layers
# computed anew (0.4 GB), logits 0.8 GB, one weight's gradient at a time (0.5 GB). On the CPU: float32 masters 7.1 GB, moments
# 14.2 GB, gradients 7.1 GB. carry = True makes one window of context exact, where the paper needs four and is not.
init_from = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
out_dir = "out-rl-r1-distill-1p5b"
task = "reasoning_gym:countdown"
window, max_new_tokens = 4096, 32768
batch_prompts, group_size = 16, 8
temperature = 0.6
context_mult, carry, loss_on = 1, True, "tail"
micro_batch, checkpointing, master_device = 1, True, "cpu"
lr, warmup_steps, eps_high = 1e-6, 10, 0.26
dtype = "bfloat16"
eval_every, eval_size = 50, 32
