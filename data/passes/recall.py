"""
Passes with a question about the past: where a window has to fail, unless the model repeats what it will need.

    python tasks.py "py:data/passes/recall.py?low=16&high=32"

The prompt names a moment in the first third of the trace, and the answer has to say who had the ball then. The trace tells
that once, and when it is needed, it has long left the window, and the reach of three layers of windows.

    Passes CG AF [...] answer 00 00 15 from 00 00 20 A        who has the ball at the end, and who had it at 15?
    00 00 19 F [...] 00 00 15 H 00 00 14 C [...] 00 00 00 E answer E H
    00 00 19 F [...] 00 00 15 H H 00 00 14 C H [...] 00 00 00 E H answer E H

Of the worked solutions half (REHEARSES) repeat the name at every step, as in the last line. The others just walk on.
"""
from data.passes.task import DAY, PEOPLE, clock, score  # noqa: F401  (score: part of the task)
from tasks import Problem, numbered

REHEARSES = 0.5         # share of the solutions that repeat the name that is asked for


def problem(i, seed, *, low=16, high=32, held_out=False, longer=1):
    """Problem number i, with low to high seconds on the clock; `longer` times as many in the evaluation of longer traces."""
    rng = numbered("recall", seed, held_out, i)
    low, high = longer * low, longer * high
    if not 16 <= low <= high < DAY:
        raise ValueError(f"low={low} and high={high}: numbers of seconds from 16 to {DAY - 1}")
    ring = rng.sample(PEOPLE, len(PEOPLE))
    throws = dict(zip(ring, ring[1:] + ring[:1], strict=True))
    seconds = rng.randint(low, high)
    asked = rng.randint(1, seconds // 3)                 # the step whose holder is asked for
    order = rng.sample(ring, len(ring))
    prompt = (f"Passes {' '.join(person + throws[person] for person in order)} answer {clock(seconds - asked)} "
              f"from {clock(seconds)} {ring[0]}")
    note = f" {ring[asked % len(ring)]}"
    rehearsed = note if rng.random() < REHEARSES else ""
    steps = [f" {clock(seconds - n)} {ring[n % len(ring)]}{rehearsed if n >= asked else ''}" for n in range(1, seconds + 1)]
    answer = f"{ring[seconds % len(ring)]}{note}"
    return Problem(prompt, answer, f"{''.join(steps)} answer {answer}")
