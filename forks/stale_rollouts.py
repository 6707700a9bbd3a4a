"""
What rollouts of an older policy do to learning: train_rl.py on batches that were sampled async_level steps
ago.

    python -m forks.stale_rollouts config/rl_passes.py --async_level=2

Asynchronous trainers (INTELLECT-2, arXiv 2505.07291) sample with old weights so that nobody waits. Here
nothing runs at the same time: batches wait in a queue, which is the same staleness without copies of old
weights. A checkpoint keeps the queue.
"""
from dataclasses import asdict

import train_rl
from configurator import configure, run
from train_rl import Episode

async_level = 1  # how many steps old the sampling policy is, at least 0

plain_collect = train_rl.collect


def collect(model, tokenizer, source, state):
    """The groups that were sampled async_level steps ago, and all that were drawn now."""
    queue = state.setdefault("queue", [])
    drawn = []
    while len(queue) <= async_level:
        kept, new = plain_collect(model, tokenizer, source, state)
        queue.append([[asdict(episode) for episode in group] for group in kept])  # as JSON gives it back
        drawn += new
    return [[Episode(**episode) for episode in group] for group in queue.pop(0)], drawn


if __name__ == "__main__":
    configure(globals(), train_rl)
    train_rl.collect = collect
    run(train_rl.main)
