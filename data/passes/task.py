"""
Eleven people pass a ball: a task for models from scratch, made to need what Prefix Sliding keeps. It is an ordinary task
of a user, to be copied:

    python tasks.py "py:data/passes/task.py?low=4&high=60"                   # print some problems
    python data/passes/prepare.py                                            # its tokenizer
    python train_sft.py config/sft_passes.py                                 # the warm start
    python train_rl.py config/rl_passes.py                                   # what is left for RL

One pass a second; the prompt says who throws to whom, and is the only place that does:

    Passes CG AF KB DI EH FJ GK BD HC IA JE from 00 01 02 A    A throws to F, B to D, ...; A has the ball, for 1 min 2 s
    00 01 01 F 00 01 00 J 00 00 59 E 00 00 58 H [...] answer K

Every step looks up one word of the prompt and otherwise needs only the step before it. Everybody has the ball once in
eleven passes (the throws are one ring), so a window of fewer than eleven steps never shows the throw that is needed next.
A trace is as long as its clock says, and only the answer is checked.

The worked solutions for the warm start (impatient=True) show clocks of up to 24 hours, but at every step, with a small
probability, they stop and answer with whoever has the ball. Patience is what is left for reinforcement learning. (Were
there ten people, every minute could be skipped and the answer stay the same; RL found that out at once.)
"""
import re

from tasks import Problem, numbered

PEOPLE = "ABCDEFGHIJK"
DAY = 24 * 60 * 60      # seconds: the longest clock is 23 59 59
IMPATIENCE = 0.06       # chance, at every step of an impatient solution, to stop there
LONGEST_SOLUTION = 40   # steps of an impatient solution


def problem(i, seed, *, low=4, high=60, impatient=False, held_out=False, longer=1):
    """Problem number i, with low to high seconds on the clock; `longer` times as many in the evaluation of longer traces."""
    rng = numbered("passes", seed, held_out, i)
    low, high = longer * low, longer * high
    if not 1 <= low <= high < DAY:
        raise ValueError(f"low={low} and high={high}: numbers of seconds from 1 to {DAY - 1}")
    size = ring_size(rng) if impatient else len(PEOPLE)
    ring = rng.sample(PEOPLE, size)
    order = rng.sample(ring, size)
    throws = dict(zip(ring, ring[1:] + ring[:1], strict=True))
    seconds = any_clock(rng) if impatient else rng.randint(low, high)
    n_steps = seconds
    if impatient:
        stops = (n for n in range(1, LONGEST_SOLUTION) if rng.random() < IMPATIENCE)
        n_steps = min(next(stops, LONGEST_SOLUTION), seconds)
    prompt = f"Passes {' '.join(person + throws[person] for person in order)} from {clock(seconds)} {ring[0]}"
    steps = [f" {clock(seconds - n)} {ring[n % size]}" for n in range(1, n_steps + 1)]
    holder = steps[-1][-1]
    return Problem(prompt, ring[seconds % size], f"{''.join(steps)} answer {holder}")


def ring_size(rng):
    """Small rings soon teach that the next holder is somebody who stands in the prompt; whole ones, to look everywhere."""
    return rng.choice((rng.randint(3, 5), rng.randint(3, len(PEOPLE)), len(PEOPLE)))


def any_clock(rng):
    """Short clocks, any, and those whose minutes or hours are about to end."""
    return rng.choice((
        rng.randint(1, 80), rng.randint(1, DAY - 1),
        rng.randrange(0, DAY, 60) + rng.randint(1, 12), rng.randrange(0, DAY, 3600) + rng.randint(1, 12)))


def clock(seconds):
    return f"{seconds // 3600:02d} {seconds // 60 % 60:02d} {seconds % 60:02d}"


def score(problem, text, tokens, finish_reason):
    """1 if the text ends with the only answer that it gives, and it is right."""
    found = re.fullmatch(rf"[^a-z]* answer ([{PEOPLE}](?: [{PEOPLE}])?)", text)
    return float(finish_reason == "stop" and found is not None and found[1] == problem.answer)
