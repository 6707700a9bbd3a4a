# GRPO on real weights and two cores of a CPU: SmolLM2-135M-Instruct learns a small arithmetic task of reasoning-gym.
#     python train_rl.py config/rl_smollm2_cpu.py
init_from = "data/smollm2"
out_dir = "out-rl-smollm2"
task = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
window, max_new_tokens = 32, 64
batch_prompts, group_size = 4, 8
max_draws = 1                    # a batch that is not full trains on what it has
context_mult, loss_on = 2, "all"
lr, micro_batch, max_steps = 1e-5, 8, 30
eval_every, save_every = 0, 10
