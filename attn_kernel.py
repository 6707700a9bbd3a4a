"""
Attention over a prefix and a sliding window.

    python attn_kernel.py 40 8 12        # print the mask and the tile map for T=40 tokens, prefix P=8, window W=12

One predicate, `visible`, says who sees whom. Everything else here is a way to compute softmax(q k^T) v under it:

    dense     the definition: one (Tq, Tk) mask. The reference, for tests and short sequences.
    torch     block-sparse: a tile of queries meets the tiles of the prefix and the tiles of its window and no other, so time
              and memory grow linearly with T. Any device, any dtype, differentiable.

Both call `_attend`, which is the whole of the mathematics, on the indices they choose. Decoding has one query per row and no
mask: every key that is still in the cache is visible (sliding_cache.py sees to that), in whatever order the slots are.

Shapes: q (B, H, Tq, D), k and v (B, Hkv, Tk, D); query head h reads key head h // (H // Hkv). scale = D ** -0.5.
"""
import sys

import torch

TILE = 128  # queries and keys per tile of the block-sparse path


# ---------------------------------------------------------------------------------------------------------------------
# who sees whom

def visible(i, j, P, W):
    """Whether the query at index i sees the key at index j, for prefix length P and window W (None = full attention): the past
    within the last W tokens, the current one included, and all of the past prefix. Integers or broadcastable integer tensors.
    Source: arXiv 2608.26070, section 2."""
    return (j <= i) if W is None else (j <= i) & ((i - j < W) | (j < P))


def key_tiles(first, last, P, W, tile):
    """The key tiles that the queries first..last can see, as (a, b, c): the tiles 0..a-1 hold the prefix, b..c-1 the window, and
    a <= b <= c, so that no tile comes twice where the two ranges meet."""
    c = last // tile + 1
    b = 0 if W is None else max(first - W + 1, 0) // tile
    a = min(-(-P // tile), b)
    return a, b, c


def is_inner(first, last, tile_start, P, W, tile):
    """Whether every query first..last sees every key of the tile that begins at tile_start, so that it needs no mask."""
    oldest_outside_prefix = max(tile_start, P)
    return tile_start + tile - 1 <= first and (W is None or last - oldest_outside_prefix < W or tile_start + tile <= P)


# ---------------------------------------------------------------------------------------------------------------------
# training and prefill: many queries

def prefix_sliding_attention(q, k, v, prefix_len, window, *, q_start=None, q_prefix=None, impl="auto"):
    """Attention in which query i sees key j iff visible(i, j, prefix_len, window). Differentiable in q, k, v and q_prefix.

    q (B, H, Tq, D), k and v (B, Hkv, Tk, D); any strides. prefix_len: int or (B,). window: int >= 1, or None for full attention.
    q_start: the key index of query 0, int or (B,), default Tk - Tq. Keys are padded on the right: causality hides the padding.
    q_prefix (B, H, Tq, D): the query that meets the keys j < prefix_len, for rope="reset"; default q.
    impl: "auto" | "torch" | "dense". Returns (B, H, Tq, D). Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    _check(q, k, v, window, q_prefix)
    Tq, Tk = q.size(2), k.size(2)
    P = _per_row(prefix_len, q, "prefix_len", 0)                                      # (B,) or (1,)
    start = _per_row(Tk - Tq if q_start is None else q_start, q, "q_start", 0, Tk - Tq)  # (B,) or (1,)
    if impl == "dense":
        i = start[:, None] + torch.arange(Tq, device=q.device)                        # (B | 1, Tq)
        return _attend(q, k, v, q_prefix, i, torch.arange(Tk, device=q.device), P, window)
    if impl not in ("auto", "torch"):
        raise ValueError(f"impl={impl!r}: attention has 'auto', 'torch' and 'dense'")
    return _BlockSparse.apply(q, k, v, q_prefix, P, window, start)


def _attend(q, k, v, q_prefix, i, j, P, W):
    """The definition, for the queries at indices i (B | 1, Tq) and the keys at indices j (Tk,). -> (B, H, Tq, D)"""
    B, H, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]

    def scores(q):  # the query heads of one key head are stacked as rows, so that keys are not repeated
        return (q.reshape(B, Hkv, -1, D) @ k.transpose(-1, -2)).view(B, Hkv, H // Hkv, Tq, Tk)

    s = scores(q)
    if q_prefix is not None:
        s = torch.where(j < P.view(-1, 1, 1, 1, 1), scores(q_prefix), s)
    mask = visible(i[:, :, None], j, P[:, None, None], W)[:, None, None]              # (B | 1, 1, 1, Tq, Tk)
    p = _softmax(s, mask, D).to(v.dtype)
    return (p.view(B, Hkv, -1, Tk) @ v).view(B, H, Tq, D)


def _softmax(s, mask, D):
    """Softmax over the last dimension of s / sqrt(D) where mask is True, at least in float32."""
    s = s if s.dtype == torch.float64 else s.float()
    return torch.softmax((s * D ** -0.5).masked_fill(~mask, float("-inf")), -1)


class _BlockSparse(torch.autograd.Function):
    """One tile of queries at a time. Nothing but the inputs is kept for the backward, which computes each tile anew."""

    @staticmethod
    def forward(ctx, q, k, v, q_prefix, P, W, start):
        ctx.save_for_backward(q, k, v, q_prefix, P, start)
        ctx.window = W
        out = torch.empty_like(q)
        for rows, keys, i, j in _tiles(q, k, P, W, start):
            out[:, :, rows] = _attend(q[:, :, rows], _take(k, keys), _take(v, keys), _take(q_prefix, [rows]), i, j, P, W)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, q_prefix, P, start = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dq_prefix = None if q_prefix is None else torch.zeros_like(q_prefix)
        for rows, keys, i, j in _tiles(q, k, P, ctx.window, start):
            with torch.enable_grad():
                args = [t if t is None else t.detach().requires_grad_()
                        for t in (q[:, :, rows], _take(k, keys), _take(v, keys), _take(q_prefix, [rows]))]
                y = _attend(*args, i, j, P, ctx.window)
            grads = torch.autograd.grad(y, [t for t in args if t is not None], dout[:, :, rows])
            for total, ranges, grad in zip((dq, dk, dv, dq_prefix), ([rows], keys, keys, [rows]), grads, strict=False):
                for part, piece in zip(ranges, grad.split([r.stop - r.start for r in ranges], 2), strict=True):
                    total[:, :, part] += piece                                        # a key collects from every tile that saw it
        return dq, dk, dv, dq_prefix, None, None, None


def _tiles(q, k, P, W, start):
    """For each tile of queries: its rows in q, the ranges of keys it can see, and the indices of both. Rows of the batch with
    different prefixes or starts share the ranges of the widest; the predicate does the rest."""
    Tq, Tk = q.size(2), k.size(2)
    p_max, first, last = int(P.max()), int(start.min()), int(start.max())
    for a in range(0, Tq, TILE):
        rows = slice(a, min(a + TILE, Tq))
        prefix, lo, hi = key_tiles(first + rows.start, last + rows.stop - 1, p_max, W, TILE)
        keys = [slice(x * TILE, min(y * TILE, Tk)) for x, y in ((0, prefix), (lo, hi)) if x < y]
        i = start[:, None] + torch.arange(rows.start, rows.stop, device=q.device)     # (B | 1, rows)
        j = torch.cat([torch.arange(r.start, r.stop, device=q.device) for r in keys])
        yield rows, keys, i, j


def _take(x, ranges):
    """The given ranges of dimension 2, one behind the other; without a copy where there is one range."""
    if x is None:
        return None
    return x[:, :, ranges[0]] if len(ranges) == 1 else torch.cat([x[:, :, r] for r in ranges], 2)


# ---------------------------------------------------------------------------------------------------------------------
# decoding: one query per row, against the cache

def decode_attention(q, k_cache, v_cache, lengths, *, prefix_len=None, q_prefix=None, impl="auto"):
    """One query per row against the first lengths[b] slots of a cache, in whatever order they are. Not differentiable.

    q (B, H, 1, D), k_cache and v_cache (B, Hkv, S, D), lengths (B,). With q_prefix (B, H, 1, D), the slots below prefix_len
    (int or (B,)) meet q_prefix instead of q (rope="reset"); both queries are scored in the same pass over the keys.
    impl: "auto" | "torch". Returns (B, H, 1, D), zeros for rows of length 0. Raises ValueError for shapes that do not fit.
    """
    _check(q, k_cache, v_cache, None, q_prefix)
    B, H, Tq, D = q.shape
    Hkv, S = k_cache.shape[1:3]
    if Tq != 1:
        raise ValueError(f"decode_attention takes one query per row, q has {Tq}")
    if impl not in ("auto", "torch"):
        raise ValueError(f"impl={impl!r}: decode_attention has 'auto' and 'torch'")
    if q_prefix is not None and prefix_len is None:
        raise ValueError("q_prefix needs prefix_len: the slots that it is for")
    lengths = _per_row(lengths, q, "lengths", 0, S).view(-1, 1, 1, 1)
    slot = torch.arange(S, device=q.device)
    queries = [x.reshape(B, Hkv, H // Hkv, D) for x in (q, q_prefix) if x is not None]
    s = (torch.cat(queries, 2) @ k_cache.transpose(-1, -2)).split(H // Hkv, 2)        # (B, Hkv, H // Hkv, S), once or twice
    s = s[0] if q_prefix is None else torch.where(slot < _per_row(prefix_len, q, "prefix_len", 0).view(-1, 1, 1, 1), s[1], s[0])
    p = _softmax(s, slot < lengths, D).to(v_cache.dtype)
    y = torch.where(lengths > 0, p @ v_cache, 0)                                      # a row without keys has no softmax
    return y.view(B, H, 1, D)


# ---------------------------------------------------------------------------------------------------------------------
# checks

def check_window(window, name="window"):
    """Raise ValueError unless window is None or an int >= 1."""
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"{name}={window!r}: a window is None (full attention) or at least 1, the current token")


def _check(q, k, v, window, q_prefix):
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"attention wants q (B, H, Tq, D) and k, v (B, Hkv, Tk, D), not {_shapes(q=q, k=k, v=v)}")
    if q.size(0) != k.size(0) or q.size(3) != k.size(3) or q.size(1) % k.size(1):
        raise ValueError(f"batch and head size must agree, and H be a multiple of Hkv: {_shapes(q=q, k=k)}")
    if q_prefix is not None and q_prefix.shape != q.shape:
        raise ValueError(f"q_prefix is shaped as q: {_shapes(q=q, q_prefix=q_prefix)}")
    for name, t in (("k", k), ("v", v), ("q_prefix", q_prefix)):
        if t is not None and (t.dtype, t.device) != (q.dtype, q.device):
            raise ValueError(f"{name} is {t.dtype} on {t.device}, q is {q.dtype} on {q.device}")
    check_window(window)


def _shapes(**tensors):
    return ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())


def _per_row(value, q, name, low, high=None):
    """An int or a (B,) tensor, as a (1,) or (B,) tensor on q's device. Values are checked where that costs no synchronisation."""
    value = torch.as_tensor(value)
    if value.dim() > 1 or value.numel() not in (1, q.size(0)) or value.is_floating_point():
        raise ValueError(f"{name} is an int or {q.size(0)} ints, one per row of q, not {tuple(value.shape)} of {value.dtype}")
    if value.device.type == "cpu" and (value.min() < low or high is not None and value.max() > high):
        raise ValueError(f"{name} must be at least {low}" + ("" if high is None else f" and at most {high}") + f": {value.tolist()}")
    return value.reshape(-1).to(q.device)


def print_map(T, P, W, tile=8):
    """Print the mask of T tokens, and which tiles of keys (columns) each tile of queries (rows) visits."""
    print(f"T={T} P={P} W={W}: query i (down) sees key j (across)")
    for i in range(T):
        print(f"{i:4} " + "".join("#" if visible(i, j, P, W) else "." for j in range(T)))
    print(f"tiles of {tile}: '.' skipped, '+' edge (masked inside), '#' inner (no mask)")
    visited = 0
    for first in range(0, T, tile):
        last = min(first + tile, T) - 1
        a, b, c = key_tiles(first, last, P, W, tile)
        visits = [*range(a), *range(b, c)]
        visited += len(visits)
        inner = [is_inner(first, last, t * tile, P, W, tile) for t in range(-(-T // tile))]
        print(f"{first:4} " + "".join(("#" if full else "+") if t in visits else "." for t, full in enumerate(inner)))
    print(f"{visited} of {(-(-T // tile)) ** 2} tiles visited")


if __name__ == "__main__":
    try:
        numbers = [int(x) for x in sys.argv[1:]]
        if len(numbers) not in (3, 4) or min(numbers) < 0 or 0 in (numbers[0], *numbers[2:]):
            raise ValueError
    except ValueError:
        print("usage: python attn_kernel.py T P W [tile], whole numbers; T, W and tile at least 1", file=sys.stderr)
        sys.exit(2)
    print_map(*numbers)
