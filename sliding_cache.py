"""
Which tokens stay in memory: the first P of a sequence and the last W, in a buffer that never grows.

A row of the cache holds one sequence: P + W slots per layer and key head. The slot rule below says where a
token goes: the slots 0..P-1 hold the prefix for good, and the W others are a ring, in which a new token
overwrites the oldest. Attention does not care about the order of the slots. Keys are stored after RoPE, each
at its own absolute position, and are never touched again.

Rows are independent of each other: each has its own prefix length and its own number of tokens, and can be
reset, copied and refilled while the others go on. That is what continuous batching in engine.py rests on.

A forward pass calls `advance` once, and gives the plan that it returns to `append` or `extend` in each layer.

Left out on purpose: paging. A row costs P + W slots from its first token on, however few it uses.
Another rule of eviction is a subclass: forks/random_eviction.py.
"""
from dataclasses import dataclass, field

import torch

from attention import check_window, visible
from device import free_bytes


def slot_of(position, prefix_len, window):
    """The slot of the token at a position (int64 tensors): its own number in the prefix, behind it a place in
    the ring. So the first P + W tokens lie in order. Without a window (None) all tokens do."""
    if window is None:
        return position
    ring = prefix_len + (position - prefix_len) % window
    return torch.where(position < prefix_len, position, ring)


def n_held(n_seen, prefix_len, window):
    """How many of the n_seen tokens of a row are still there: they fill the slots 0 to n_held - 1."""
    return n_seen if window is None else torch.minimum(n_seen, prefix_len + window)


def layer_windows(config, window):
    """One window per layer from an int, None (full attention) or a list. Where the model itself was trained
    with windows in some layers (config.windows), the narrower of the two holds. Raises ValueError for windows
    below 1 or a list of the wrong length."""
    asked = list(window) if isinstance(window, list | tuple) else [window] * config.n_layer
    if len(asked) != config.n_layer:
        raise ValueError(f"window has {len(asked)} entries, the model {config.n_layer} layers")
    windows = []
    for pair in zip(asked, config.windows, strict=True):
        check_window(pair[0])
        windows.append(min((w for w in pair if w is not None), default=None))
    return windows


def row_bytes(config, windows, max_prefix, max_len, dtype):
    """Bytes of one row: keys and values, in max_prefix + W slots per layer, in max_len without a window."""
    slots = sum(max_len if w is None else max_prefix + w for w in windows)
    return 2 * slots * config.n_kv_head * config.head_dim * dtype.itemsize


@dataclass
class Plan:
    """What one forward pass adds to some rows of the cache. It holds for all layers."""
    rows: slice | list             # of the cache: a slice gives views of it, a list gives copies
    row_ids: torch.Tensor          # (rows,) the same as numbers
    prefix_len: torch.Tensor       # (rows,)
    positions: torch.Tensor        # (rows, T) of the new tokens, and of the padding behind them
    end: torch.Tensor              # (rows,) tokens seen by each row, the new ones included
    longest: int                   # the largest of them
    decoding: bool                 # one new token per row and no gradients: append; else extend
    writing: bool                  # no gradients
    slots: dict = field(default_factory=dict)    # {window: Slots}


@dataclass
class Slots:
    """Where the new tokens go and what they meet, in the layers that have the same window."""
    n_held: torch.Tensor           # (rows,) tokens in the slots: for append with the new one, else before
    target: tuple                  # of a layer's keys (B, Hkv, slots, D), what is overwritten
    source: tuple                  # of the new keys (rows, Hkv, T, D), what is written there
    order: torch.Tensor | None = None    # for extend: (rows, C + T), see _place_many


class SlidingCache:
    """Keys and values of B = batch_size rows: k[layer] and v[layer] (B, Hkv, max(P) + W, D), allocated once.

    prefix_len: int or (B,), each row's P. window: int, None or one per layer. A layer without a window keeps
    everything, in max_len slots, and needs max_len. Raises ValueError for bad arguments, and for a cache that
    is larger than the free memory.
    """

    def __init__(self, config, batch_size, prefix_len, window, *, max_len=None,
                 dtype=torch.float32, device="cpu"):
        prefix_len = torch.as_tensor(prefix_len, dtype=torch.int64).expand(batch_size)
        if prefix_len.min() < 0:
            raise ValueError(f"prefix_len={int(prefix_len.min())}: a prefix has at least 0 tokens")
        self.batch_size, self.max_prefix = batch_size, int(prefix_len.max())
        self.windows, self.max_len = layer_windows(config, window), max_len
        if max_len is None and None in self.windows:
            raise ValueError("window=None keeps every token: max_len must say how many slots to allocate")
        need = batch_size * row_bytes(config, self.windows, self.max_prefix, max_len, dtype)
        free = free_bytes(device)
        if need > free:
            raise ValueError(f"the cache needs {need / 1e9:.2f} GB ({batch_size} rows), {free / 1e9:.2f} GB "
                             "are free: fewer rows, or a smaller window or prefix")
        # Empty slots hold zeros: their weight is 0, and 0 times what happens to lie in memory may be NaN.
        self.k, self.v = [], []
        for w in self.windows:
            n_slots = max_len if w is None else self.max_prefix + w
            shape = batch_size, config.n_kv_head, n_slots, config.head_dim
            self.k.append(torch.zeros(shape, dtype=dtype, device=device))
            self.v.append(torch.zeros(shape, dtype=dtype, device=device))
        self.prefix_len = prefix_len.clone().to(device)
        self.length = torch.zeros_like(self.prefix_len)      # (B,) tokens seen by each row so far
        self.lengths = [0] * batch_size                      # the same, where reading costs nothing
        self.streams = torch.arange(batch_size, device=device)    # (B,) what a subclass may draw numbers from
        self.state = [self.length]       # (B, ...) each: what advance changes; a subclass may have more
        self.fixed_shapes = False        # append returns the empty slots, too (a CUDA graph needs that)

    @property
    def nbytes(self):
        """Bytes really allocated for keys and values; never changes."""
        return sum(t.nbytes for t in self.k + self.v)

    def reset(self, row, prefix_len):
        """Empty a row for a new sequence, whose prefix may be no longer than the longest at first."""
        if not 0 <= prefix_len <= self.max_prefix:
            raise ValueError(f"prefix_len={prefix_len}: the room is for prefixes of 0 to {self.max_prefix}")
        for t in self.k + self.v:
            t[row] = 0
        self.prefix_len[row] = prefix_len
        self.length[row] = self.lengths[row] = 0

    def copy(self, source, row, n_tokens=None):
        """Make `row` hold what `source` holds: all of it, or its first n_tokens, which must still be there.
        They may be the same row."""
        n = self.lengths[source] if n_tokens is None else n_tokens
        if n_tokens is not None and not self.holds_first(source, n):
            raise ValueError(f"row {source} no longer holds its first {n} tokens")
        for t in self.k + self.v:
            t[row, :, :n] = t[source, :, :n]                 # n beyond the slots is all of them
            t[row, :, n:] = 0
        for t in (self.prefix_len, self.streams, *self.state):
            t[row] = t[source]
        self.length[row] = self.lengths[row] = n

    def holds_first(self, row, n):
        """Whether the first n tokens of a row are there in every layer: prefix, or nothing was evicted."""
        P, length = int(self.prefix_len[row]), self.lengths[row]
        return n <= length and all(n <= P or length <= P + w for w in self.windows if w is not None)

    def positions(self, row, layer=0):
        """The absolute positions that a row holds in a layer, sorted: what its newest token sees."""
        P, n = int(self.prefix_len[row]), self.lengths[row]
        return [i for i in range(n) if visible(n - 1, i, P, self.windows[layer])]

    def count(self, n_new, rows):
        """Check and count n_new more tokens of the rows in Python: all of `advance` that a replayed CUDA
        graph leaves to do. -> tokens of the longest of the rows"""
        numbers = range(self.batch_size)[rows] if isinstance(rows, slice) else rows
        counts = [n_new] * len(numbers) if isinstance(n_new, int) else n_new
        if len(counts) != len(numbers) or min(counts) < 1:
            raise ValueError(f"n_new={n_new}: at least one new token for each of {len(numbers)} rows")
        lengths = [self.lengths[row] + n for row, n in zip(numbers, counts, strict=True)]
        longest = max(lengths)
        if None in self.windows and longest > self.max_len:
            raise ValueError(f"a row reaches {longest} tokens, and max_len={self.max_len} is its room")
        if not torch.is_grad_enabled():
            for row, length in zip(numbers, lengths, strict=True):
                self.lengths[row] = length
        return longest

    def advance(self, n_new=1, rows=slice(None)):
        """Count n_new more tokens (int or one per row) of the given rows, a slice or a list. -> Plan

        Where gradients are recorded, a pass only reads: what it adds lives in its graph, and the rows stay as
        they were. So such a pass may be repeated, which activation checkpointing does."""
        longest, device = self.count(n_new, rows), self.length.device
        T = n_new if isinstance(n_new, int) else max(n_new)
        n_new = n_new if isinstance(n_new, int) else torch.as_tensor(n_new, device=device)
        begin, writing = self.length[rows, None], not torch.is_grad_enabled()
        plan = Plan(
            rows=rows,
            row_ids=torch.arange(self.batch_size, device=device)[rows],
            prefix_len=self.prefix_len[rows],
            positions=begin + torch.arange(T, device=device),
            end=begin[:, 0] + n_new,
            longest=longest,
            decoding=writing and T == 1,
            writing=writing)
        place = self._place_one if plan.decoding else self._place_many
        for window in set(self.windows):
            plan.slots[window] = place(plan, window)
        if writing:
            self.length[rows] = plan.end
        return plan

    def next_slot(self, plan, window):
        """The slot that each row's new token takes, (rows, 1), or (rows, Hkv) where key heads differ: the
        rule of eviction, for one new token per row."""
        return slot_of(plan.positions, plan.prefix_len[:, None], window)

    def _place_one(self, plan, window):
        heads = torch.arange(self.k[0].size(1), device=plan.end.device)
        target = plan.row_ids[:, None], heads, self.next_slot(plan, window)
        source = slice(None), slice(None), 0
        return Slots(n_held(plan.end, plan.prefix_len, window), target, source)

    def _place_many(self, plan, window):
        """The first new tokens see keys that the last ones push out. So attention gets what a row held
        before, in order of position, then the T new tokens, then padding: C + T keys, where C is the most
        that a row held. `order` finds them among the first C slots with the new keys behind them."""
        P, positions = plan.prefix_len[:, None], plan.positions
        begin = positions[:, :1]                                              # (rows, 1)
        held = n_held(begin, P, window)                                       # (rows, 1)
        C, T = int(held.max()), positions.size(1)
        i = torch.arange(C + T, device=held.device)
        old = slot_of(torch.where(i < P, i, begin - held + i), P, window)     # (rows, C + T)
        new = (C + i - held).clamp(max=C + T - 1)                             # (rows, C + T)
        kept = visible(plan.end[:, None] - 1, positions, P, window)           # what the newest token sees
        row, token = kept.nonzero(as_tuple=True)
        target = plan.row_ids[row], slice(None), slot_of(positions, P, window)[row, token]
        source = row, slice(None), token
        return Slots(held[:, 0], target, source, torch.where(i < held, old, new))

    def append(self, plan, layer, k, v):
        """Write one token per row, k and v (rows, Hkv, 1, D). -> keys and values (rows, Hkv, S, D), and how
        many of their slots are valid (rows,)."""
        slots, found = plan.slots[self.windows[layer]], []
        used = None if self.fixed_shapes else plan.longest   # until they are full, read no further
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            cache[slots.target] = new[slots.source]
            found.append(cache[plan.rows, :, :used])
        return *found, slots.n_held

    def extend(self, plan, layer, k, v):
        """Write any number of tokens per row, k and v (rows, Hkv, T, D), padded on the right. -> keys and
        values (rows, Hkv, C + T, D) in order, and the index (rows,) of each row's first new token among
        them. By index in this order the mask is what it is by position. Gradients flow to the new keys and
        values only."""
        slots, found = plan.slots[self.windows[layer]], []
        C = slots.order.size(1) - k.size(2)
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            both = torch.cat([cache[plan.rows, :, :C], new], 2)               # (rows, Hkv, C + T, D)
            index = slots.order[:, None, :, None].expand_as(both)
            found.append(both.gather(2, index) if C else new)
            if plan.writing:
                cache[slots.target] = new[slots.source]
        return *found, slots.n_held
