# Seconds per token along traces of 16,384 tokens, by the model of make demo-rl, whatever it says: flat, growing, or a saw.
#     python eval.py config/eval_times.py
#     python -m lab.figures times --data=out-times/samples.jsonl
# Hardware: a CPU. Time: 6 minutes of one core (OMP_NUM_THREADS=1). Expected: full attention takes 3.5 times as long as prefix_sliding.
init_from = "out-demo-rl/seed1/rl/last"
out_dir = "out-times"
task = "py:data/passes/task.py?low=60&high=60"
n_problems, samples_per_problem = 4, 1
policies = "full,prefix_sliding,last_k,summary"
windows, rope = 1024, "reset"
min_new_tokens = max_new_tokens = 16384
carry_last = 256
summary_prompt, summary_form, summary_tokens = "", "{}", 64   # the model knows no words: its notes are what it would have said next
