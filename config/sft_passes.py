# The warm start of the embedded task (data/passes): a three-layer model from scratch learns to pass the ball, and to give up early.
#     python train_sft.py config/sft_passes.py
# Hardware: a CPU. Time: about 6 minutes. Expected: eval_right 0.98 (what is missing are the random moments of giving up).
out_dir = "out-sft-passes"
init_from = "scratch"
task = "py:data/passes/task.py?impatient=True"
n_layer, n_head, n_embd = 3, 4, 64
window, rope = 12, "reset"       # three steps of a trace; three layers reach back 33 tokens, and a throw comes again after 44
batch_size, micro_batch = 64, 16
lr, warmup_steps, max_steps = 5e-3, 20, 1300
