# SmolLM2-135M-Instruct on a laptop's CPU, far past its window.
# Hardware: 2 cores, 2 GB of memory. Time: about 30 seconds for 1,536 tokens in float32 after data/smollm2/prepare.py.
# Expected: a story that drifts (it is a small model), and 14 MB of cache from the first token to the last.
init_from = "data/smollm2"
start = "Write a very long story about a lighthouse keeper who finds an old map. Tell it in many chapters."
window = 256
max_new_tokens = 1536
min_new_tokens = 1536
temperature = 0.9
dtype = "float32"
device = "cpu"
compile = True
