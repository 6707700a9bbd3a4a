# GRPO for Qwen3-1.7B, the paper's main model, on one GPU of 80 GB: window 2048, four windows passed. Not run at full size yet.
#     python train_rl.py config/rl_qwen3_1p7b_80gb.py --task=jsonl:problems.jsonl
#     torchrun --nproc_per_node=4 train_rl.py config/rl_qwen3_1p7b_80gb.py     # the same batch over four GPUs
# 1.72 B parameters. Weights 3.4 GB (bfloat16), float32 masters 6.9 GB, moments 13.8 GB: 24 GB that stay. While sampling, 115 KB of
# cache per token and row, 258 MB per row of P = 200 and W = 2048: 128 rows take 33 GB. While training, instead of that cache,
# float32 gradients 6.9 GB, 4 x 8,400 tokens with the layers computed anew (3.9 GB), logits 0.8 GB.
init_from = "Qwen/Qwen3-1.7B"
out_dir = "out-rl-qwen3-1p7b"
task = "reasoning_gym:countdown"
window, max_new_tokens = 2048, 32768
batch_prompts, group_size = 16, 8
temperature = 0.6
context_mult, carry, loss_on = 4, False, "tail"
micro_batch, checkpointing = 4, True
lr, warmup_steps, eps_high = 1e-6, 10, 0.26
dtype = "bfloat16"
eval_every, eval_size = 50, 32
