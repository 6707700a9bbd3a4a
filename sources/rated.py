r"""
Problems that are worth training on, as a source of tasks.py: rated:<path>?min_pass=0.1&max_pass=0.9, those of
another task that a model solves at these rates. path: a file of pass_rates/, which eval.py writes.
"""
import re
from dataclasses import replace
from numbers import Real
from pathlib import Path

from checkpoint import read_json
from tasks import check_known, load_task


def load(name, path, settings, seed, held_out, longer):
    """The problems of the task that a file of pass rates names, {"task": ..., "seed": ..., "held_out": ...,
    "rates": {"0": 0.5}}, by the numbers i of its problem(i); those without a rate are left out. What the task
    holds out for the evaluation of a run is not chosen by rates.

    Two criteria of the paper come down to it. Difficulty: neither never nor nearly always solved in 16
    samples, min_pass=1/16 and max_pass=14/16. Answers that are guessed without thinking in at least one of 8
    samples: the rates of 8 samples without thinking, and max_pass=0."""
    check_known(name, "setting", settings, ("min_pass", "max_pass"))
    min_pass, max_pass = settings.get("min_pass", 0), settings.get("max_pass", 1)
    if not all(isinstance(rate, Real) for rate in (min_pass, max_pass)) or not 0 <= min_pass <= max_pass <= 1:
        raise ValueError(f"task={name!r}: min_pass and max_pass are 0 to 1, the first not above the second")
    found = read_json(Path(path))
    rates = found.get("rates")
    if not isinstance(rates, dict) or not all(is_rate(i, rate) for i, rate in rates.items()):
        raise ValueError(f'{path}: "rates" must map numbers of problems to rates from 0 to 1: {{"0": 0.5}}')
    if not isinstance(found.get("task"), str):
        raise ValueError(f"{path} does not say of which task these pass rates are")
    source = load_task(found["task"], seed, held_out, longer)
    if held_out:
        return source
    for key, value in (("seed", seed), ("held_out", held_out)):
        if key not in found or found[key] != value:
            rated_at = found.get(key, "missing")
            raise ValueError(f"{path} has the pass rates of {key}={rated_at!r}, not of {value!r}")
    last = max(map(int, rates), default=0)
    if source.size is not None and last >= source.size:
        raise ValueError(f"{path} has a rate of problem {last}, but the last is {source.size - 1}")
    numbers = sorted(int(i) for i, rate in rates.items() if min_pass <= rate <= max_pass)
    if not numbers:
        raise ValueError(
            f"{path}: none of {len(rates)} problems has a pass rate from {min_pass} to {max_pass}")
    return replace(source, name=name, problem=lambda i: source.problem(numbers[i]), size=len(numbers))


def is_rate(i, rate):
    return re.fullmatch("0|[1-9][0-9]{0,8}", i) and type(rate) in (int, float) and 0 <= rate <= 1
