"""
Where the memory of a configuration of train_rl.py goes, and one step to prove it.

    python -m lab.plan config/rl_qwen3_1p7b_80gb.py
    python -m lab.plan config/rl_r1_distill_1p5b_24gb.py --micro_batch=2      # keys as for train_rl.py

Prints the bytes of weights, optimizer, caches and activations, then samples a token with a full cache and trains a step on
completions of max_new_tokens: what does not fit fails now. The last line is JSON.
"""
import json

import torch

import train_rl
import training
from configurator import configure, run
from device import free_bytes, peak_bytes
from sliding_cache import SlidingCache, layer_windows, row_bytes
from tasks import load_task, prompt_ids


def saved_bytes(model, n_tokens):
    """Bytes that the backward of a sequence of n_tokens needs: measured, weights not counted."""
    storages = {}
    of_weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    idx = torch.zeros(1, n_tokens, dtype=torch.long, device=model.lm_head.weight.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = model.features(idx, 0, train_rl.window, rope=train_rl.rope)
    return sum(storages.values()) + x.nbytes


def rows_of(model, prompt, optimizer):
    """The rows of the plan, [(name, bytes, device, what)], and the cache of the sampler, (rows, prefix, windows)."""
    config, weight = model.config, model.lm_head.weight
    longest = len(prompt) + train_rl.max_new_tokens
    P = len(prompt) if train_rl.prefix_len is None else min(train_rl.prefix_len, longest)
    windows = [w and min(w, train_rl.max_new_tokens) for w in layer_windows(config, train_rl.window)]
    row = row_bytes(config, windows, P, longest, weight.dtype)
    fit = max(int(0.8 * free_bytes(weight.device) / row), 1)
    n_rows = min(train_rl.batch_prompts * train_rl.group_size, train_rl.rows or fit)

    W = train_rl.training_window(config)
    cut = train_rl.segments(len(prompt), train_rl.max_new_tokens, P, W,
                            train_rl.context_mult, train_rl.carry, train_rl.loss_on)
    longest_segment = max(cut, key=lambda segment: segment.end - segment.start)
    passed = longest_segment.end - 1 - longest_segment.start
    if longest_segment.start and not train_rl.carry:
        passed += P
    n_targets = min(longest_segment.end - longest_segment.first, passed) * train_rl.micro_batch
    per_token = (saved_bytes(model, 256) - saved_bytes(model, 128)) / 128
    logits = 12 * min(n_targets * config.vocab_size, max(training.LOGITS, config.vocab_size))

    here, there = str(weight.device), str(next(iter(optimizer.masters.values())).device)
    n_masters = sum(p.nbytes for p in optimizer.masters.values())
    most_keys = max(P + w if w else longest for w in windows)
    carried = train_rl.micro_batch * row if any(segment.carried for segment in cut) else 0
    plan = [
        ("weights", sum(p.nbytes for p in model.parameters()), here, ""),
        ("masters", n_masters if optimizer.has_masters else 0, there, "in float32"),
        ("gradients", n_masters, there, ""),
        ("moments", 2 * n_masters, there, "of AdamW"),
        ("sampling_cache", n_rows * row, here, f"{n_rows} rows of up to {most_keys:,} tokens"),
        ("carried_cache", carried, here, f"{train_rl.micro_batch} rows"),
        ("activations", int(train_rl.micro_batch * passed * per_token), here,
         f"{train_rl.micro_batch} x {passed:,} tokens"),
        ("logits", logits, here, f"{n_targets:,} targets, some at a time")]
    return plan, (n_rows, P, windows, longest)


def prove(model, tokenizer, optimizer, prompt, cache_size):
    """Sample a token with a full cache, and train one step on completions of max_new_tokens."""
    n_rows, P, windows, longest = cache_size
    weight = model.lm_head.weight
    cache = SlidingCache(model.config, n_rows, P, windows, max_len=longest, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        idx = torch.zeros(n_rows, 1, dtype=torch.long, device=weight.device)
        model.features(idx, rope=train_rl.rope, cache=cache)
    del cache
    n, vocab = train_rl.max_new_tokens, min(tokenizer.n_vocab, model.config.vocab_size)
    tokens = [(7 * i) % vocab for i in range(n)]
    episodes = [train_rl.Episode(prompt, tokens, [-1.0] * n, [True] * n, "stop", advantage=1.0 - 2 * (i % 2))
                for i in range(train_rl.micro_batch)]
    train_rl.update_policy(model, optimizer, episodes, 0.0)


def main():
    train_rl.check()
    source = load_task(train_rl.task, train_rl.seed)
    model, tokenizer, optimizer = train_rl.load(train_rl.init_from, train_rl.device)
    prompt = prompt_ids(source.draw(0), tokenizer, train_rl.system, train_rl.template_args)
    plan, cache_size = rows_of(model, prompt, optimizer)
    for name, n, location, what in plan:
        if n:
            print(f"{name:16}{n / 1e9:10.3f} GB  {location}  {what}")
    print("the sampling cache is freed before the gradients and what stands below it are needed; rows=None takes as many "
          "rows as fit")
    prove(model, tokenizer, optimizer, prompt, cache_size)
    peak, memory = peak_bytes(model.lm_head.weight.device)
    print(f"{'peak':16}{peak / 1e9:10.3f} GB  {memory}, of one step on completions of {train_rl.max_new_tokens:,} tokens")
    print(json.dumps({f"{name}_bytes": n for name, n, _, _ in plan} | dict(peak_memory_bytes=peak)))


if __name__ == "__main__":
    configure(globals(), train_rl)
    run(main)
