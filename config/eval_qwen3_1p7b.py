# Qwen3-1.7B on AIME 2025 (avg@8): the paper's Table 1 and Figures 1 and 9. One GPU. Not run at full size yet.
#     python data/aime25/prepare.py
#     python eval.py config/eval_qwen3_1p7b.py
#     python -m forks.random_eviction eval.py config/eval_qwen3_1p7b.py --policies=full,random
#     python eval.py config/eval_qwen3_1p7b.py --task=jsonl:data/gpqa/gpqa.jsonl --n_problems=198 --out_dir=out-eval-gpqa
#     python eval.py config/eval_qwen3_1p7b.py --task=jsonl:data/math500/math500.jsonl --n_problems=500 --out_dir=out-eval-math500
# Hardware: one GPU of 80 GB: 115 KB of cache per token and row, so a full-attention sample of 131,072 tokens takes 15 GB.
# Time: 240 samples of 20,000 to 50,000 tokens in the mean for each of 13 arms (paper, Table 1), about 90 million tokens: 13 hours at
# 2,000 tokens/s, a rate that is a guess. A killed evaluation goes on.
# Expected (paper, avg@64, up to 524,288 tokens): full 34.2, W = 2,048 27.7, 4,096 33.9, 8,192 35.8.
init_from = "Qwen/Qwen3-1.7B"
task = "jsonl:data/aime25/aime25.jsonl"
out_dir = "out-eval-aime25"
n_problems, samples_per_problem = 30, 8
policies = "full,prefix_sliding,sliding,streaming,full_stop,last_k,summary"
windows = (2048, 4096)
max_new_tokens = 131072
budgets = (4096, 8192, 16384, 32768, 65536)
dtype = "bfloat16"
