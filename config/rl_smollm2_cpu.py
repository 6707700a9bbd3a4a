# GRPO on real weights and two cores of a CPU: SmolLM2-135M-Instruct adds and subtracts digits, after config/sft_smollm2_cpu.py.
#     python train_rl.py config/rl_smollm2_cpu.py
# Hardware: two cores, 6 GB of memory. Time: about 16 minutes. Expected: mean reward of five steps from 0.37 to 0.79.
init_from = "out-sft-smollm2/last"
out_dir = "out-rl-smollm2"
task = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
window, max_new_tokens = 8, 24
batch_prompts, group_size = 6, 8
max_draws = 1                    # the groups without signal are dropped, and not replaced
context_mult, carry, loss_on = 4, True, "all"
lr, warmup_steps, micro_batch, max_steps = 2e-5, 3, 8, 40
eval_every, save_every = 0, 10
