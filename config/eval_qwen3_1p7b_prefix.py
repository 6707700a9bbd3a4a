# Which part of the prefix matters? Qwen3-1.7B on AIME 2025 with W = 4,096, where 4 tokens, the question, the whole prompt, or the prompt
# and the first 100 tokens of thinking are kept. One GPU. Not run at full size yet.
#     python eval.py config/eval_qwen3_1p7b_prefix.py
# Time: 960 samples, about 30 million tokens: 4 hours at 2,000 tokens/s, a rate that is a guess.
init_from = "Qwen/Qwen3-1.7B"
task = "jsonl:data/aime25/aime25.jsonl"
out_dir = "out-eval-prefix"
n_problems, samples_per_problem = 30, 8
policies, prefixes, windows = "prefix_sliding", "whole,4,question,whole+100", 4096
baseline = "prefix_sliding"
max_new_tokens = 131072
dtype = "bfloat16"
