"""
One prompt under several policies, side by side: who still knows the names when the prompt has left the window?

    python -m lab.compare                                              # after: python data/smollm2/prepare.py
    python -m lab.compare --policies=prefix_sliding,sliding --window=128 --max_new_tokens=2000
    python -m lab.compare --start="Tell me about the wizard Osric and his owl." --names=Osric,owl

Every policy samples the same number of completions from the same random streams; engine.POLICIES says what each is.
The names stand in the prompt, which the window leaves behind after `window` tokens. A completion that still uses them
in its last tokens has remembered them. How often it does says little, because a small model repeats itself: the
number of completions that do is what to compare.

Printed: for each policy the last mention of a name in the first completion that has one, or else how the first
completion ends; then a table, then one line of JSON.
"""
init_from = "data/smollm2"        # a Hugging Face folder or a hub name
start = (                         # the prompt, a user message
    "Write a very long story in many chapters. The hero is a lighthouse keeper named Marlow. "
    "His dog is called Biscuit. Together they look for the harbour of Port Ellery.")
names = "Marlow,Biscuit,Ellery"   # what is counted, separated by commas
policies = "sliding,streaming,full,prefix_sliding"  # separated by commas
window = 64                       # tokens, the current one included; full attention has none
num_samples = 8                   # completions per policy, side by side
max_new_tokens = 400              # tokens per completion, all of them: end tokens are not drawn before
last = 300                        # count in the last so many tokens of each completion
temperature = 0.7                 # >= 0; 0 = always the most probable token
top_p = 0.95                      # 0 < top_p <= 1
excerpt = 300                     # characters of a completion to print
seed = 1337                       # any int; completion i draws from the stream (seed, i), whatever the policy
compile = False                   # True: faster steps, after some seconds of compiling
device = "auto"                   # auto (cuda, then mps, then cpu) | cpu | cuda | cuda:1 | mps
dtype = "bfloat16"                # bfloat16 | float32 | float16 | auto (see device.py)

from configurator import configure, run

configure(globals())

import json
import sys
import textwrap
import time

from device import device_and_dtype
from engine import POLICIES, generate
from model import GPT
from tokenizer import load_tokenizer


def main():
    wanted = policies.split(",")
    for policy in wanted:
        if policy not in POLICIES:
            raise ValueError(f"policies={policies!r}: there is no {policy!r}, only {', '.join(POLICIES)}")
    if num_samples < 1 or last < 1:
        raise ValueError(f"num_samples={num_samples}, last={last}: at least 1 each")
    tokenizer = load_tokenizer(init_from)
    torch_device, torch_dtype = device_and_dtype(device, dtype)
    model = GPT.from_pretrained(init_from, dtype=torch_dtype, device=torch_device)
    prompt = tokenizer.encode_chat([{"role": "user", "content": start}])
    table = []
    for policy in wanted:
        texts, row = sample_policy(model, tokenizer, prompt, policy)
        table.append(row)
        print(f"--- {policy}: {passage(texts)}\n", flush=True)
    print_counts(table, len(prompt))
    print(json.dumps(dict(prompt_tokens=len(prompt), names=names.split(","), table=table)))


def sample_policy(model, tokenizer, prompt, policy):
    """Completions of the prompt under one policy. -> (the text of the last tokens of each, a row of the table)"""
    settings = dict(window=window) | POLICIES[policy]
    stats = {}
    done = generate(
        model, [prompt] * num_samples, max_new_tokens, **settings, min_new_tokens=max_new_tokens,
        temperature=temperature, top_p=top_p, seed=seed, stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab,
        on_token=progress(policy), stats=stats, compile=compile)
    texts = [tokenizer.decode(completion.tokens[-last:]) for completion in done]
    decoded = num_samples * (max_new_tokens - 1)             # the first tokens come from the prefill
    return texts, dict(
        policy=policy,
        remembered=sum(count_names(text) > 0 for text in texts),
        names=sum(count_names(text) for text in texts),
        cache_bytes=stats["cache_bytes"],
        tokens_per_s=round(decoded / max(stats["decode_s"], 1e-9), 1))


def progress(policy):
    """What generate() calls for each token: a line on standard error for every 100 tokens of each completion."""
    began = time.perf_counter()
    n_tokens, total = 0, num_samples * max_new_tokens

    def on_token(i, token):
        nonlocal n_tokens
        n_tokens += 1
        if n_tokens % (100 * num_samples) == 0:
            seconds = time.perf_counter() - began
            left = seconds / n_tokens * (total - n_tokens)
            print(f"{policy}: {n_tokens}/{total} tokens, {left:.0f} s left", file=sys.stderr, flush=True)

    return on_token


def count_names(text):
    """How often one of the names stands in the text."""
    return sum(text.count(name) for name in names.split(","))


def passage(texts):
    """A few lines of one of the texts, and which: around the last name in the first text that has one, else an end."""
    for number, text in enumerate(texts, 1):
        if count_names(text):
            text = " ".join(text.split())
            mention = max(text.rfind(name) for name in names.split(","))
            words = text[max(mention - excerpt // 2, 0):mention + excerpt // 2]
            return f"the last mention in completion {number}\n{paragraph(words + ' [...]')}"
    words = " ".join(texts[0].split())[-excerpt:]
    return f"no mention, this is how completion 1 ends\n{paragraph(words)}"


def paragraph(words):
    wrapped = textwrap.wrap("[...] " + words, 104)
    return textwrap.indent("\n".join(wrapped), "    ")


def print_counts(table, prompt_tokens):
    """The table for people."""
    print(f"prompt {prompt_tokens} tokens, window {window}, {num_samples} completions of {max_new_tokens} tokens")
    print(f"names {names.replace(',', ', ')} in the last {last} of them\n")
    print(f"{'policy':<16}{'completions with names':>24}{'names':>8}{'cache':>12}{'tokens/s':>11}")
    for row in table:
        remembered = f"{row['remembered']} of {num_samples}"
        cache = f"{row['cache_bytes'] / 1e6:,.1f} MB"
        print(f"{row['policy']:<16}{remembered:>24}{row['names']:>8}{cache:>12}{row['tokens_per_s']:>11.1f}")


if __name__ == "__main__":
    run(main)
