"""
Which tokens stay in memory: the first P of a sequence and the last W, in a buffer that never grows.

A row of the cache is a row of P + W slots per layer and key head. The token at position pos goes to

    slot(pos) = pos                      while pos < P + W
                P + (pos - P) mod W      afterwards, over the oldest token of the window

so the slots 0..P-1 hold the prefix for good, and the others are a ring. Attention does not care about the order of the slots;
keys are stored after RoPE, each at its own absolute position, and are never touched again.

Rows are independent of each other: each has its own prefix length and its own number of tokens, and can be reset, copied and
refilled while the others go on. That is what continuous batching in engine.py rests on.

Left out on purpose: paging. A row costs (P + W) slots from its first token on, however few it uses.
"""
import torch

from attention import check_window
from device import free_bytes


def layer_windows(config, window):
    """One window per layer from an int, None (full attention) or a list. Where the model itself was trained with windows in some
    layers (config.windows), the narrower of the two holds. Raises ValueError for windows below 1 or a list of the wrong length."""
    windows = list(window) if isinstance(window, list | tuple) else [window] * config.n_layer
    if len(windows) != config.n_layer:
        raise ValueError(f"window has {len(windows)} entries, the model {config.n_layer} layers")
    for w in windows:
        check_window(w)
    return [min((w for w in pair if w is not None), default=None) for pair in zip(windows, config.windows, strict=True)]


def uniform(stream, *counters):
    """One number in [0, 1) for each element of the int64 tensors `stream` and `counters` (broadcast): a hash, so that the number
    does not depend on what was drawn before or beside it. The mixing is that of splitmix64 (Steele, Lea and Flood 2014)."""
    for counter in counters:
        stream = mix(stream, counter)
    bits, dtype = (24, torch.float32) if stream.device.type == "mps" else (53, torch.float64)      # no float64 on mps
    return ((stream >> (64 - bits)) & ((1 << bits) - 1)).to(dtype) / (1 << bits)


def mix(x, counter):
    """Hash the int64 tensor x and counter (a tensor or an int) into one int64 tensor; products wrap around."""
    x = x + (torch.as_tensor(counter, device=x.device) + 1) * -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor                 # torch shifts in the sign bit: mask it off
    return x


def hashed(seed, *numbers):
    """An int to seed the stream with that belongs to these numbers: another seed gives another one for each of them."""
    x = mix(torch.tensor(seed), 0)
    for n in numbers:
        x = mix(x, n)
    return int(x)


def row_bytes(config, windows, max_prefix, max_len, dtype):
    """Bytes of one row of a cache: keys and values of every layer, max_prefix + W slots each, max_len where there is no window."""
    slots = sum(max_len if w is None else max_prefix + w for w in windows)
    return 2 * slots * config.n_kv_head * config.head_dim * dtype.itemsize


class SlidingCache:
    """Keys and values of `batch_size` rows: k[layer] and v[layer] are (B, Hkv, max(P) + W, D), allocated once.

    prefix_len: int or (B,), each row's P. window: int, None or one per layer. A layer without a window keeps everything, in
    max_len slots, and needs max_len. evict="oldest" is the ring above. evict="random" overwrites a random slot among the older
    three quarters of the window instead, drawn per row, token and key head and shared by the layers (arXiv 2609.03430); `streams`
    (B,) int64 seeds the draws. Raises ValueError for bad arguments and for a cache larger than the free memory.
    """

    def __init__(self, config, batch_size, prefix_len, window, *, evict="oldest", max_len=None, dtype=torch.float32, device="cpu"):
        if evict not in ("oldest", "random"):
            raise ValueError(f"evict={evict!r}: a cache evicts the 'oldest' or a 'random' token")
        self.batch_size, self.heads = batch_size, config.n_kv_head
        self.windows, self.max_len = layer_windows(config, window), max_len
        self.prefix_len = torch.as_tensor(prefix_len, dtype=torch.int64).expand(batch_size).clone().to(device)
        self.max_prefix = int(self.prefix_len.max())
        if int(self.prefix_len.min()) < 0:
            raise ValueError(f"prefix_len={int(self.prefix_len.min())}: a prefix has at least 0 tokens")
        if max_len is None and None in self.windows:
            raise ValueError("window=None keeps every token: max_len must say how many slots to allocate")
        slots = [max_len if w is None else self.max_prefix + w for w in self.windows]
        need, free = batch_size * row_bytes(config, self.windows, self.max_prefix, max_len, dtype), free_bytes(device)
        if need > free:
            raise ValueError(f"the cache needs {need / 1e9:.2f} GB ({batch_size} rows, {max(slots)} slots per layer), but only "
                             f"{free / 1e9:.2f} GB of memory are free: fewer rows, or a smaller window or prefix")
        # Empty slots hold zeros: their weight is 0, and 0 times what happens to lie in memory may be NaN.
        self.k = [torch.zeros(batch_size, self.heads, n, config.head_dim, dtype=dtype, device=device) for n in slots]
        self.v = [torch.zeros_like(k) for k in self.k]
        self.length = torch.zeros(batch_size, dtype=torch.int64, device=device)       # tokens seen by each row so far
        self.lengths = [0] * batch_size                                               # the same, where reading costs nothing
        self.streams = torch.arange(batch_size, dtype=torch.int64, device=device)
        self.fixed_shapes = False                                                     # whether decoding reads the empty slots, too
        # With random eviction no formula gives what a slot holds: a table per distinct window says it, for every key head.
        self.held = {w: torch.full((batch_size, self.heads, n), -1, dtype=torch.int64, device=device)
                     for w, n in zip(self.windows, slots, strict=True)} if evict == "random" else {}

    @property
    def nbytes(self):
        """Bytes really allocated for keys and values; never changes."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    def reset(self, row, prefix_len):
        """Empty a row for a new sequence. Its prefix may be no longer than the longest that the cache was made for."""
        if not 0 <= prefix_len <= self.max_prefix:
            raise ValueError(f"prefix_len={prefix_len}: this cache has room for prefixes of 0 to {self.max_prefix} tokens")
        self.prefix_len[row], self.length[row], self.lengths[row] = prefix_len, 0, 0
        for t in (*self.k, *self.v):
            t[row] = 0
        for held in self.held.values():
            held[row] = -1

    def copy(self, source, row, n_tokens=None):
        """Make `row` hold what `source` holds: everything, or only its first n_tokens, which must still be there."""
        n = self.lengths[source] if n_tokens is None else n_tokens
        if not self.holds_first(source, n) and n_tokens is not None:
            raise ValueError(f"row {source} no longer holds its first {n} tokens")
        for t in (*self.k, *self.v, *self.held.values()):
            t[row, :, :n] = t[source, :, :n]                                          # n beyond the slots is all of them
        for t in (*self.k, *self.v):
            t[row, :, n:] = 0
        for held in self.held.values():
            held[row, :, n:] = -1
        self.prefix_len[row], self.streams[row] = self.prefix_len[source], self.streams[source]
        self.length[row], self.lengths[row] = n, n

    def holds_first(self, row, n):
        """Whether the first n tokens of a row are all still in every layer: they are prefix, or nothing was evicted yet."""
        P, length = int(self.prefix_len[row]), self.lengths[row]
        return n <= length and all(n <= P or length <= P + w for w in self.windows if w is not None)

    def positions(self, row, layer=0, head=0):
        """The absolute positions that a row holds in a layer, sorted. All heads agree unless eviction is random."""
        if self.held:
            return sorted(p for p in self.held[self.windows[layer]][row, head].tolist() if p >= 0)
        P, w, n = int(self.prefix_len[row]), self.windows[layer], self.lengths[row]
        return list(range(n)) if w is None or n <= P + w else [*range(P), *range(n - w, n)]

    # A forward pass calls advance once, then in every layer append if `decoding` says so (one token per row, no gradients), else
    # extend (any number). Where gradients are recorded, the pass only reads: what it adds lives in its graph, and the rows stay as
    # they were (so that a pass may be repeated, which activation checkpointing does).

    def count(self, n_new=1, rows=slice(None)):
        """The part of `advance` that Python does: check and count n_new more tokens for the given rows. -> a count per row"""
        index = range(self.batch_size)[rows] if isinstance(rows, slice) else rows
        counts = [n_new] * len(index) if isinstance(n_new, int) else list(n_new)
        if len(counts) != len(index) or min(counts) < 1:
            raise ValueError(f"n_new={n_new}: at least one new token for each of {len(index)} rows")
        self.longest = max(self.lengths[row] + count for row, count in zip(index, counts, strict=True))
        if None in self.windows and self.longest > self.max_len:
            raise ValueError(f"a row reaches {self.longest} tokens, but this cache without a window was made for {self.max_len}")
        self.decoding = max(counts) == 1 and not torch.is_grad_enabled()
        if not self.decoding and any(w is not None and self.lengths[row] > int(self.prefix_len[row]) + w
                                     for w in self.held for row in index):
            raise ValueError("with random eviction a row takes one token at a time, without gradients, once its window has filled")
        self.writing = not torch.is_grad_enabled()
        if self.writing:
            for row, count in zip(index, counts, strict=True):
                self.lengths[row] += count
        return counts

    def advance(self, n_new=1, rows=slice(None)):
        """Count n_new more tokens (int or one per row) for the given rows, a slice or a list, and return the positions of the new
        tokens, (rows, max(n_new)) int64. Works out, for every window among the layers, where they go. (Where gradients are recorded,
        they are not counted.)"""
        counts = self.count(n_new, rows)
        # `rows` stays a slice where it came as one: slicing gives views of the cache, a list gives copies.
        self.rows, self.row_ids = rows, torch.arange(self.batch_size, device=self.length.device)[rows]
        old = self.length[rows].clone()                                               # (rows,)
        if self.writing:
            self.length[rows] += n_new if isinstance(n_new, int) else torch.as_tensor(counts, device=old.device)
        P, T = self.prefix_len[rows], max(counts)
        pos = old[:, None] + torch.arange(T, device=old.device)                       # (rows, T)
        plan = self._plan_append if self.decoding else self._plan_extend
        self.plans = {w: plan(P, w, old, pos) for w in set(self.windows)}
        return pos

    def append(self, layer, k, v):
        """Write one token per row, k and v (rows, Hkv, 1, D). -> keys, values (rows, Hkv, S, D) and how many slots are valid (rows,)."""
        slot, valid = self.plans[self.windows[layer]]
        heads = torch.arange(self.heads, device=slot.device)
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            cache[self.row_ids[:, None], heads, slot] = new[:, :, 0]
        used = self.k[layer].size(2)
        used = used if self.fixed_shapes else min(self.longest, used)                 # before the buffer is full, read no further
        return self.k[layer][self.rows, :, :used], self.v[layer][self.rows, :, :used], valid

    def extend(self, layer, k, v):
        """Write any number of tokens per row, k and v (rows, Hkv, T, D), padded on the right. The window needs keys that the new
        tokens push out, so attention gets them in order: what the row held before, then the new ones. -> keys, values
        (rows, Hkv, C + T, D), and the index (rows,) of each row's first new token among them. By index in this compacted order
        the mask is what it is by position. Gradients flow to the new keys and values, not to the held ones."""
        order, index, start, keep = self.plans[self.windows[layer]]
        out = []
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            held = cache[self.row_ids[:, None], :, order].transpose(1, 2)             # (rows, Hkv, C, D), a copy
            both = torch.cat([held, new], 2)
            out.append(both.gather(2, index[:, None, :, None].expand_as(both)) if order.size(1) else new)
            if self.writing:
                row, token, slot = keep
                cache[self.row_ids[row], :, slot] = new[row, :, token]
        return *out, start

    def _plan_append(self, P, w, old, pos):
        """Where one new token per row goes: (rows, 1) slots, or (rows, Hkv) if eviction is random, and the valid slots after it."""
        slot = pos if w is None else self._slot(pos, P[:, None], w)
        if self.held:
            held = self.held[w][self.rows]                                            # (rows, Hkv, slots)
            if w is not None:
                slot = torch.where(pos < P[:, None] + w, pos, self._random_slot(held, P, w, pos))
            held = held.scatter(2, slot.expand(-1, self.heads)[:, :, None], pos[:, :, None].expand(-1, self.heads, 1))
            self.held[w][self.rows] = held
        return slot, (old + 1) if w is None else torch.minimum(old + 1, P + w)

    def _random_slot(self, held, P, w, pos):
        """A slot per row and key head, uniform among those of the window that are not among its newest quarter. -> (rows, Hkv)"""
        n_old = max(3 * w // 4, 1)
        heads = torch.arange(self.heads, device=pos.device)
        draw = (uniform(self.streams[self.rows][:, None], pos, heads + 1) * n_old).long()          # (rows, Hkv) in 0..n_old-1
        index = torch.arange(held.size(2), device=pos.device)
        window = (index >= P[:, None, None]) & (index < P[:, None, None] + w)
        old = window & (held < (pos - (w - n_old))[:, :, None])                       # the newest are always the last positions
        return (old.cumsum(2) > draw[:, :, None]).int().argmax(2)

    def _plan_extend(self, P, w, old, pos):
        """How to lay out what the rows hold before the new tokens, and which new tokens to keep where."""
        P, T, old = P[:, None], pos.size(1), old[:, None]
        count = old if w is None else torch.minimum(old, P + w)                       # (rows, 1) tokens held
        C = int(count.max())
        x = torch.arange(C + T, device=pos.device)
        held_pos = torch.where(x[:C] < P, x[:C], old - count + x[:C])                 # (rows, C) in order of position
        order = held_pos if w is None else self._slot(held_pos, P, w)                 # beyond count: any slot
        index = torch.where(x < count, x, (x - count + C).clamp(max=C + T - 1))       # (rows, C + T) into [held, new]
        end = self.length[self.rows][:, None]                                         # (rows, 1) tokens seen after this step
        keep = pos < end if w is None else (pos < end) & ((pos < P) | (pos >= end - w))
        row, token = keep.nonzero(as_tuple=True)
        slot = (pos if w is None else self._slot(pos, P, w))[row, token]
        if self.held and self.writing:
            self.held[w][self.row_ids[row], :, slot] = pos[row, token][:, None]
        return order, index, count[:, 0], (row, token, slot)

    @staticmethod
    def _slot(pos, P, w):
        return torch.where(pos < P + w, pos, P + (pos - P) % w)
