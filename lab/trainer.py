"""
python -m lab.bench gap | train | batching | traces: what the trainer sees against what the sampler saw, its
memory against length, batches that are refilled, and the embedded task at traces of up to 100,000 tokens.
"""
import time
import types

import torch

import train_rl
import training
from device import device_and_dtype
from engine import generate
from evals.table import print_table
from lab.measure import are_counts, name_of, note, peak_bytes, rounded
from model import GPT
from tasks import load_task
from tokenizer import load_tokenizer

QUESTIONS = ("Why is the sky blue?", "How does a lighthouse work?", "Write a story about two rivers.",
             "What is a prime number?")


def set_trainer(**keys):
    """The keys of train_rl.py that update_policy reads."""
    vars(train_rl).update(dict(loss_on="tail", temperature=1.0, rope="continue", prefix_len=None) | keys)


def window_and_rows(keys, window, rows):
    """Those of the keys, or these. ValueError if they are no numbers."""
    window, rows = keys.windows[0] if keys.windows else window, rows if keys.rows is None else keys.rows
    if not are_counts(window, rows):
        raise ValueError(f"windows=({window!r},) and rows={rows} are whole numbers of at least 1")
    return window, rows


def gap(keys):
    """The trainer's log-probabilities against those that the sampler recorded, on the last window of the same
    rollouts."""
    device, _ = device_and_dtype(keys.device)
    window, rows = window_and_rows(keys, 64, 4)
    n_new = keys.lengths[0] if keys.lengths else 16 * window
    if not are_counts(n_new) or n_new < 12 * window:
        raise ValueError(f"lengths=({n_new!r},) is a whole number of at least 12 windows of {window}")
    tokenizer, table = load_tokenizer(keys.init_from), []
    prompts = []
    for i in range(rows):
        prompts.append(tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]))
    for name in ("float32", "bfloat16") if keys.dtype == "auto" else (keys.dtype,):
        _, dtype = device_and_dtype(keys.device, name)
        model = GPT.from_pretrained(keys.init_from, dtype=dtype, device=device)
        note(f"sampling {rows} x {n_new} tokens in {name}")
        done = generate(
            model, prompts, n_new, window=window, temperature=1.0, top_p=1.0, n_vocab=tokenizer.n_vocab)
        episodes = [train_rl.Episode(**vars(completion), advantage=1.0) for completion in done]
        for carry in (False, True):
            for context_mult in (1, 2, 4, 8):
                note(f"{name}, carry={carry}, context_mult={context_mult}")
                got = differences(model, episodes, window, carry, context_mult)
                table.append(rounded(dtype=name, carry=carry, context_mult=context_mult,
                                     mismatch_kl=got["gap_k3"], max_difference=got["gap_max"]))
    note()
    print(f"{keys.init_from} on {device}: {rows} rollouts of {n_new} tokens with W={window}, "
          f"the last {window} tokens of each")
    print_table(table)
    return dict(init_from=keys.init_from, W=window, tokens_per_rollout=n_new, rows=rows, table=table)


def differences(model, episodes, window, carry, context_mult):
    """The metrics of a step of the trainer that changes nothing."""
    set_trainer(window=window, context_mult=context_mult, carry=carry, micro_batch=1)
    no_optimizer = types.SimpleNamespace(step=lambda rate, clip: 0.0)
    metrics = train_rl.update_policy(model, no_optimizer, episodes, 0.0)
    model.zero_grad()
    return metrics


def train(keys):
    """One step of train_rl.py on one rollout of each length, with carry and without, passing one window of
    context or four: peak memory above the level before, and the tokens of the rollout over the seconds."""
    device, dtype = device_and_dtype(keys.device, keys.dtype)
    (window, _), P = window_and_rows(keys, 512, 1), keys.prefix_len
    lengths = (4096, 16384) if keys.lengths is None else keys.lengths
    if not lengths or not are_counts(*lengths) or min(lengths) <= P:
        raise ValueError(f"lengths={lengths} are whole numbers above prefix_len={P}")
    model = GPT.from_pretrained(keys.init_from, dtype=dtype, device=device)
    optimizer = training.Optimizer(model, lr=1e-6)
    cases = [(carry, m, n) for carry in (True, False) for m in (1, 4) for n in lengths]
    table = []
    for carry, context_mult, n in [(True, 1, min(lengths)), *cases]:  # first: the optimizer's moments
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (n,), generator=generator).tolist()
        episode = train_rl.Episode(tokens[:P], tokens, [-9.0] * n, [True] * n, "length", advantage=1.0)
        set_trainer(window=window, context_mult=context_mult, carry=carry, micro_batch=1)
        note(f"{n} tokens, carry={carry}, context_mult={context_mult}")
        began = time.perf_counter()
        peak = peak_bytes(lambda e=episode: train_rl.update_policy(model, optimizer, [e], 1e-6), device)
        s = time.perf_counter() - began
        table.append(rounded(carry=carry, context_mult=context_mult, tokens=n, peak_mb=peak / 1e6, s=s,
                             tokens_per_s=n / s))
    note()
    print(f"{keys.init_from} on {device}, {name_of(dtype)}: one training step, P={P}, W={window}, "
          f"loss on the last {window} tokens")
    print_table(table[1:])
    return dict(init_from=keys.init_from, P=P, W=window, table=table[1:])


def passes(n_steps):
    """The embedded task with traces of so many steps."""
    return load_task(f"py:data/passes/task.py?low={n_steps}&high={n_steps}", held_out=True)


def traces(keys):
    """A model of the embedded task (init_from) on problems that take so and so many tokens: how many it gets
    right."""
    device, dtype = device_and_dtype(keys.device, keys.dtype)
    window, rows = window_and_rows(keys, 12, 16)
    lengths, longest = keys.lengths or (1000, 10000, 100000), 4 * 24 * 60 * 60 - 1    # a day on the clock
    if not are_counts(*lengths) or min(lengths) < 8 or max(lengths) > longest:
        raise ValueError(f"lengths={lengths} are whole numbers of 8 to {longest}")
    model = GPT.from_pretrained(keys.init_from, dtype=dtype, device=device)
    tokenizer, table = load_tokenizer(keys.init_from), []
    for n in lengths:
        source = passes(n // 4)    # a step is four tokens
        problems = [source.problem(i) for i in range(rows)]
        prompts = [tokenizer.encode_chat([{"role": "user", "content": p.prompt}]) for p in problems]
        for temperature in (0.0, 1.0):
            note(f"{n} tokens at temperature {temperature:g}")
            began = time.perf_counter()
            done = generate(
                model, prompts, n + n // 4 + 40, window=window, rope="reset", temperature=temperature,
                top_p=1.0, stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab)
            s, n_right = time.perf_counter() - began, 0
            for problem, completion in zip(problems, done, strict=True):
                tokens = completion.tokens[:-1]
                right = source.score(problem, tokenizer.decode(tokens), tokens, completion.finish_reason)
                # Giving up early is right by chance, once in 11.
                n_right += int(right) if len(completion.tokens) > 0.9 * n else 0
            table.append(rounded(
                tokens=n, temperature=temperature, problems=rows, right=n_right,
                mean_tokens=sum(len(completion.tokens) for completion in done) / rows, s=s,
                P_plus_W=max(map(len, prompts)) + window))
    note()
    print(f"{keys.init_from} on {device}")
    print_table(table)
    return dict(init_from=keys.init_from, table=table)


def batching(keys):
    """Sequences whose lengths are log-uniform over a factor of ten: rows that are refilled as they finish,
    against batches of as many rows that all run until the longest of them is done."""
    device, dtype = device_and_dtype(keys.device, keys.dtype)
    window, rows = window_and_rows(keys, 256, 8)
    model = GPT.from_pretrained(keys.init_from, dtype=dtype, device=device)
    n, generator = 8 * rows, torch.Generator().manual_seed(0)
    limits = [int(16 * 10**u) for u in torch.rand(n, generator=generator).tolist()]
    prompts = torch.randint(model.config.vocab_size, (n, 16), generator=generator).tolist()

    def steps_and_seconds(prompts, limits):
        stats, began = {}, time.perf_counter()
        generate(model, prompts, limits, window=window, rows=rows, stats=stats)
        return stats["decode_steps"], time.perf_counter() - began

    static_steps, static_s = 0, 0.0
    for first in range(0, n, rows):
        note(f"static batches: {first} of {n} done")
        batch = slice(first, first + rows)
        steps, s = steps_and_seconds(prompts[batch], max(limits[batch]))
        static_steps, static_s = static_steps + steps, static_s + s
    steps, s = steps_and_seconds(prompts, limits)
    table = []
    for name, steps_of, s_of in (("static", static_steps, static_s), ("continuous", steps, s)):
        table.append(rounded(batches=name, useful_tokens=sum(limits), steps=steps_of, s=s_of,
                             tokens_per_s=sum(limits) / s_of))
    note()
    print(f"{keys.init_from} on {device}, {name_of(dtype)}: {n} sequences of {min(limits)} to {max(limits)} "
          f"new tokens, {rows} rows, W={window}")
    print_table(table)
    print(f"continuous batching gives {static_s / s:.2f} times the tokens/s of static batches")
    times_faster = round(static_s / s, 3)
    return dict(init_from=keys.init_from, rows=rows, sequences=n, times_faster=times_faster, table=table)
