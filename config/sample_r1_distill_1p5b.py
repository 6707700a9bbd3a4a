# DeepSeek-R1-Distill-Qwen-1.5B thinking for up to 32,768 tokens with a window of 4,096, on one GPU. Its chat template ends in <think>.
# Hardware: one GPU with 8 GB or more: 3.6 GB of weights in bfloat16, and 0.1 GB of cache, which does not grow.
# Time and text: not measured yet.
init_from = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
start = "Prime factorize 806917567. Put the factors into \\boxed{}."
window = 4096
max_new_tokens = 32768
temperature = 0.6
top_p = 0.95
device = "cuda"
