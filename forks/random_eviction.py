"""
Instead of the oldest token of the window, overwrite a random one among its older three quarters.

    python -m forks.random_eviction sample.py config/sample_smollm2_cpu.py --policy=random
    python -m forks.random_eviction eval.py config/eval_passes.py --policies=prefix_sliding,random

The null hypothesis of arXiv 2609.03430, which finds that a random token does as well as the oldest. One draw
per row, token and key head, shared by the layers; for sampling only. What came out here is not so: on
counted passes (docs/eval.md), with traces of 20 to 1,000 tokens, 0.95, 0.58, 0.22, 0.17, 0.04 and 0.05 of the
problems are solved, and 1.00 of each with the ring. Every step needs the one before it, and the model was not
trained so.

Another rule is another `next_slot` in a subclass of TrackedCache.
"""
import runpy
import sys

import torch

import engine
from sliding_cache import SlidingCache


class TrackedCache(SlidingCache):
    """A cache that knows what each slot holds, which no formula says if the rule is not the ring's.

    held: {window: (B, Hkv, slots)} the positions. Slots beyond the number of valid ones mean nothing."""

    def __init__(self, config, batch_size, prefix_len, window, **how):
        super().__init__(config, batch_size, prefix_len, window, **how)
        self.held = {}
        for w, keys in zip(self.windows, self.k, strict=True):
            self.held[w] = torch.zeros(keys.shape[:3], dtype=torch.int64, device=keys.device)
        self.state.extend(self.held.values())

    def advance(self, n_new=1, rows=slice(None)):
        one_each = n_new == 1 and not torch.is_grad_enabled()
        numbers = range(self.batch_size)[rows] if isinstance(rows, slice) else rows
        if not one_each and not all(self.holds_first(row, self.lengths[row]) for row in numbers):
            raise ValueError("a row whose window has filled takes one token at a time, without gradients, "
                             f"in a {type(self).__name__}")
        plan = super().advance(n_new, rows)
        if plan.writing:
            for window, held in self.held.items():
                slots = plan.slots[window]
                positions = plan.positions[:, None].expand(-1, held.size(1), -1)     # (rows, Hkv, T)
                held[slots.target] = positions[slots.source]
        return plan

    def positions(self, row, layer=0, head=0):
        """The absolute positions that a row holds in a layer for a key head, sorted."""
        n_valid = len(super().positions(row, layer))
        return sorted(self.held[self.windows[layer]][row, head, :n_valid].tolist())


class RandomEvictionCache(TrackedCache):
    """`streams` (B,) int64 seeds the draws of each row."""

    def next_slot(self, plan, window):
        slot = super().next_slot(plan, window)                          # (rows, 1)
        if window is None:
            return slot
        held = self.held[window][plan.rows]                             # (rows, Hkv, slots)
        P, position = plan.prefix_len[:, None, None], plan.positions[:, None]  # (rows, 1, 1)
        n_old = max(3 * window // 4, 1)
        index = torch.arange(held.size(2), device=held.device)
        in_window = (index >= P) & (index < P + window)
        is_old = in_window & (held < position - (window - n_old))       # n_old slots of each head
        heads = torch.arange(held.size(1), device=held.device)
        draw = engine.uniform(self.streams[plan.rows, None], plan.positions, heads + 1)
        nth = (draw * n_old).long()[:, :, None]                         # (rows, Hkv, 1), below n_old
        chosen = (is_old.cumsum(2) > nth).int().argmax(2)               # (rows, Hkv)
        return torch.where(plan.positions < P[:, 0] + window, slot, chosen)


def main():
    if not sys.argv[1:]:
        raise SystemExit("usage: python -m forks.random_eviction sample.py|eval.py ARGUMENTS...")
    engine.POLICIES["random"] = dict(cache_class=RandomEvictionCache)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
