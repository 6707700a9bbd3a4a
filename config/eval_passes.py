# Every policy on the embedded task, after make demo-rl, at traces of 20 to 1,000 tokens: what make demo-eval runs.
#     python eval.py config/eval_passes.py
# The same problems with random eviction, into the same folder:
#     python -m forks.random_eviction eval.py config/eval_passes.py --policies=full@full,prefix_sliding,random
# Hardware: a CPU. Time: about 5 minutes. Expected: prefix_sliding right nearly always at any length, sliding once in eleven.
init_from = "out-demo-rl/seed1/rl/last"            # trained with P = the prompt, W = 12, on traces of up to 240 tokens
models = {"full": "out-demo-rl/seed1/full/last"}   # the same, trained with full attention, on whole solutions
out_dir = "out-demo-rl/seed1/eval"
task = [f"py:data/passes/task.py?low={n}&high={n}" for n in (5, 10, 20, 40, 60, 250)]
n_problems, samples_per_problem = 100, 1
policies = "full@full,prefix_sliding,full,prefix_sliding@full,sliding,streaming,full_stop,last_k"   # summary needs words
baseline = "full@full"
windows, rope = 12, "reset"
max_new_tokens = 1100
cue, answer_tokens = " answer", 2
carry_last = 8                                     # two steps of a trace; 4 fail wherever a restart falls just before the answer
