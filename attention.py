"""
Attention over a prefix and a sliding window: the definition.

    python attention.py 40 8 12        # print the mask and the tile map for T=40 tokens, prefix P=8, window W=12
"""
import sys

import torch
from torch.autograd.function import once_differentiable

TILE = 128     # queries and keys per tile of the block-sparse path


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
    a = min((P + tile - 1) // tile, b)
    return a, b, c


def is_inner(first, last, tile_start, P, W, tile):
    """Whether every query first..last sees every key of the tile that begins at tile_start, so that it needs no mask."""
    oldest_outside_prefix = max(tile_start, P)
    return tile_start + tile - 1 <= first and (W is None or last - oldest_outside_prefix < W or tile_start + tile <= P)


# ---------------------------------------------------------------------------------------------------------------------
# attention under it

def _attend(q, k, v, q_prefix, i, j, P, W):
    """The definition, for the queries at indices i (B | 1, Tq) and the keys at indices j (Tk,). -> (B, H, Tq, D)"""
    B, H, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]

    def scores(q):  # the query heads of one key head are stacked as rows, so that keys are not repeated
        return (upcast(q).reshape(B, Hkv, -1, D) @ upcast(k).transpose(-1, -2)).view(B, Hkv, H // Hkv, Tq, Tk)

    s = scores(q)
    if q_prefix is not None:
        s = torch.where(j < P.view(-1, 1, 1, 1, 1), scores(q_prefix), s)
    mask = visible(i[:, :, None], j, P[:, None, None], W)[:, None, None]              # (B | 1, 1, 1, Tq, Tk)
    p = _softmax(s, mask, D).to(v.dtype)
    return (p.view(B, Hkv, -1, Tk) @ v).view(B, H, Tq, D)


def upcast(x):
    """x in float32, or as it is in float64. Scores, norms and log-probabilities in half precision lose digits, or overflow."""
    return x if x.dtype == torch.float64 else x.float()


def _softmax(s, mask, D):
    """Softmax over the last dimension of s / sqrt(D) where mask is True."""
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
    @once_differentiable
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

def check_window(window, name="window"):
    """Raise ValueError unless window is None or an int >= 1."""
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"{name}={window!r}: a window is None (full attention) or at least 1, the current token")


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
        print("usage: python attention.py T P W [tile], whole numbers; T, W and tile at least 1", file=sys.stderr)
        sys.exit(2)
    print_map(*numbers)
