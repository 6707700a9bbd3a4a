r"""
The table of eval.py: what is said of the samples of an arm under a budget, and of two arms.
"""
import csv

import numpy as np

from checkpoint import replacing
from engine import POLICIES
from sliding_cache import layer_windows, row_bytes


def cache_bytes(arm, sample):
    """Bytes of the keys and values that a sample holds at its end; restarts: in its largest context."""
    prefix_len = POLICIES.get(arm.policy, {}).get("prefix_len", sample.prefix_tokens)
    length = sample.prompt_tokens + sample.n_tokens
    room = max(length - prefix_len, 1)
    windows = [w and min(w, room) for w in layer_windows(arm.weights.config, arm.window)]
    return row_bytes(arm.weights.config, windows, min(prefix_len, length), length, arm.weights.dtype)


def table_rows(drawn, k, baseline):
    """The rows of one task. drawn: {(arm, budget): its samples, k of each problem in a row}; baseline: what
    the others are compared with, "" = the first arm."""
    rows, arms = [], list(dict.fromkeys(arm for arm, _ in drawn))
    for (arm, budget), samples in drawn.items():
        row = table_row(arm, budget, samples, k)
        base = base_of(arm, arms, baseline)
        if base != arm:
            row["against"] = str(base)
            other = scores(drawn[base, budget], k)
            row["difference"], row["low"], row["high"] = paired(scores(samples, k), other)
        rows.append(row)
    return rows


def table_row(arm, budget, samples, k):
    score = scores(samples, k)
    n_tokens = [sample.n_tokens for sample in samples]
    seconds = [sample.s for sample in samples]
    return dict(
        task=samples[0].task, arm=str(arm), policy=arm.policy, window=arm.window, prefix=arm.prefix,
        budget=budget, problems=len(score), samples=k,
        accuracy=mean(score),
        pass_at_k=mean(score.max(1)),
        mean_tokens=mean(n_tokens),
        p90_tokens=float(np.percentile(n_tokens, 90)),
        cut=mean([sample.finish_reason == "length" for sample in samples]),
        s_per_sample=mean(seconds),
        tokens_per_s=sum(n_tokens) / max(sum(seconds), 1e-9),
        cache_mb=mean([cache_bytes(arm, sample) for sample in samples]) / 1e6,
        against=None, difference=None, low=None, high=None)


def scores(samples, k):
    """(problems, k)"""
    return np.reshape([sample.score for sample in samples], (-1, k))


def mean(values):
    return float(np.mean(values))


def base_of(arm, arms, baseline):
    """What an arm is compared with: the baseline, where it has a window with the same one; else itself."""
    name = baseline or arms[0].name
    for other in arms:
        same_window = other.window == arm.window or None in (other.window, arm.window)
        if name == str(other) or name == other.name and same_window:
            return other
    return arm


def paired(a, b):
    """The mean difference of two arms with scores (problems, samples of each), and its 95 % bootstrap
    interval over the problems."""
    differences = a.mean(1) - b.mean(1)
    draws = np.random.default_rng(0).choice(differences, (10000, len(differences)))
    low, high = np.percentile(draws.mean(1), (2.5, 97.5))
    return mean(differences), float(low), float(high)


def write_table(path, table):
    """The table as a file and, without the columns that say the same everywhere, on the terminal."""
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    hidden = {"policy", "window", "prefix", "samples"}
    for key in ("task", "budget", "problems"):
        if len({row[key] for row in table}) == 1:
            hidden.add(key)
    print(f"{table[0]['samples']} samples of each problem; differences are from the arm in `against`, "
          "with 95 % intervals")
    print_table([{key: value for key, value in row.items() if key not in hidden} for row in table])


def print_table(table):
    """Rows that have the same keys, for a terminal: floats to four digits."""
    lines = [list(table[0]), *([cell(value) for value in row.values()] for row in table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.rjust, line, widths)))


def cell(value):
    if isinstance(value, float):
        return f"{float(f'{value:.4g}'):g}"
    return "-" if value is None else str(value)
