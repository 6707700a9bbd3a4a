# The form of an answer for SmolLM2-135M-Instruct, which does not write <answer></answer> by itself: a few steps, then RL can begin.
#     python train_sft.py config/sft_smollm2_cpu.py
# Hardware: two cores of a CPU, 6 GB of memory. Time: about 3 minutes.
init_from = "data/smollm2"
out_dir = "out-sft-smollm2"
task = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
window, rope = 8, "continue"
batch_size, micro_batch = 16, 8
lr, warmup_steps, max_steps = 2e-5, 2, 12
eval_every, eval_size, save_every = 6, 32, 12
