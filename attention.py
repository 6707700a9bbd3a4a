"""
Attention over a prefix and a sliding window: the definition.

    python attention.py 40 8 12     # print the mask and the tile map for 40 tokens, prefix 8, window 12

A token attends to the prefix, the first P tokens of its sequence, and to the window, the last W tokens up to
and including itself. What lies between the two is never looked at again. One predicate, `visible`, says so.
Everything below it is a way to compute softmax(q k^T / sqrt(D)) v under it:

    dense_attention         The reference: one (Tq, Tk) mask. Time and memory grow with the length squared.
    block_sparse_attention  Queries go a tile at a time. A tile meets the keys of the prefix and of its window
                            and no others, so time and memory grow linearly. Any device and dtype.
    decode_in_torch         One query per row against a cache. It needs no mask: sliding_cache.py keeps no key
                            that is not visible, and softmax does not care about the order of the keys.

All three end in `grouped_scores` and `softmax_values`, which are the whole of the mathematics. attn_kernel.py
does the same on a GPU in fused kernels, into which it compiles `visible` and `key_tiles`, and chooses among
all of them.

Shapes: q is (B, H, Tq, D), k and v are (B, Hkv, Tk, D); query head h reads key head h // (H // Hkv).
Letters: i and j are the indices of queries and keys in the sequence, P the prefix length, W the window.
"""
import sys

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

TILE = 128     # queries and keys per tile of the block-sparse path


# ------------------------------------------------------------------------------------------------------------
# who sees whom

def visible(i, j, P, W):
    """Whether the query at index i sees the key at index j. W = None is full attention.

    i, j, P and W are integers, or integer tensors that broadcast. Source: arXiv 2608.26070, section 2."""
    past = j <= i
    if W is None:
        return past
    return past & ((i - j < W) | (j < P))


def key_tiles(first, last, P, W, tile):
    """The tiles of keys that the queries first..last can see, as (prefix_end, window_start, window_end).

    The tiles 0..prefix_end-1 hold the prefix and window_start..window_end-1 the window. prefix_end is at most
    window_start, so that no tile comes twice where the two meet."""
    window_end = last // tile + 1
    window_start = 0 if W is None else max(first - W + 1, 0) // tile
    prefix_end = min((P + tile - 1) // tile, window_start)
    return prefix_end, window_start, window_end


def is_inner(first, last, tile_start, P, W, tile):
    """Whether all queries first..last see all keys of the tile at tile_start, so that it needs no mask."""
    newest = tile_start + tile - 1
    oldest_outside_prefix = max(tile_start, min(P, newest))
    return visible(first, newest, P, W) and visible(last, oldest_outside_prefix, P, W)


def check_window(window, name="window"):
    """Raise ValueError unless window is None or an int >= 1."""
    if window is None:
        return
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(f"{name}={window!r}: a window is None (full attention) or an integer, at least 1")


# ------------------------------------------------------------------------------------------------------------
# the mathematics

def upcast(x):
    """x in float32, or as it is in float64. In half precision, scores and log-probabilities lose digits."""
    return x if x.dtype == torch.float64 else x.float()


def grouped_scores(q, k, j, P, q_prefix=None):
    """q k^T in float32. The keys at indices j (Tk,) below P (B | 1,) meet q_prefix, if there is one.

    The query heads of one key head are stacked as rows, and below them those of q_prefix, so that keys are
    neither repeated nor read twice. -> (B, Hkv, H // Hkv, Tq, Tk)"""
    B, H, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    group = H // Hkv
    rows = upcast(q).reshape(B, Hkv, group * Tq, D)
    if q_prefix is not None:
        rows_prefix = upcast(q_prefix).reshape(rows.shape)
        rows = torch.cat([rows, rows_prefix], 2)
    scores = rows @ upcast(k).transpose(-1, -2)
    scores = scores.view(B, Hkv, -1, group, Tq, Tk)                         # -1 is 1, or 2 with q_prefix
    if q_prefix is None:
        return scores.squeeze(2)
    scores, scores_prefix = scores.unbind(2)
    in_prefix = j < P[:, None, None, None, None]                            # (B | 1, 1, 1, 1, Tk)
    return torch.where(in_prefix, scores_prefix, scores)


def softmax_values(scores, mask, v):
    """softmax(scores / sqrt(D)) v over the keys where mask is true. -> (B, H, Tq, D)"""
    B, Hkv, group, Tq, Tk = scores.shape
    D = v.size(3)
    scores = scores * D ** -0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, -1).to(v.dtype)
    out = weights.view(B, Hkv, group * Tq, Tk) @ v
    return out.view(B, Hkv * group, Tq, D)


def attend(i, j, P, W, q, k, v, q_prefix=None):
    """Attention of the queries at indices i (B | 1, Tq) to the keys at indices j (Tk,). P is (B | 1,)."""
    mask = visible(i[:, :, None], j, P[:, None, None], W)                   # (B | 1, Tq, Tk)
    mask = mask[:, None, None]                                              # for all heads
    scores = grouped_scores(q, k, j, P, q_prefix)
    return softmax_values(scores, mask, v)


# ------------------------------------------------------------------------------------------------------------
# many queries: prefill and training

def dense_attention(q, k, v, prefix_len, window, q_start, q_prefix=None):
    """Every query against every key, under one mask. -> (B, H, Tq, D)

    Arguments as in attn_kernel.prefix_sliding_attention; prefix_len and q_start are tensors, (B,) or (1,)."""
    i = q_start[:, None] + torch.arange(q.size(2), device=q.device)         # (B | 1, Tq)
    j = torch.arange(k.size(2), device=q.device)                            # (Tk,)
    return attend(i, j, prefix_len, window, q, k, v, q_prefix)


def block_sparse_attention(q, k, v, prefix_len, window, q_start, q_prefix=None):
    """The same, a tile of queries at a time. -> (B, H, Tq, D)"""
    H, Tq = q.shape[1:3]
    Hkv, Tk = k.shape[1:3]
    # While every token of a prefill is in the window or the prefix, the mask is the causal one, which
    # PyTorch's own attention does faster.
    all_visible = window is None or Tk <= window or int(prefix_len.min()) >= Tk
    if all_visible and Tq == Tk and q_prefix is None and not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != Hkv)
    return BlockSparse.apply(q, k, v, prefix_len, window, q_start, q_prefix)


class BlockSparse(torch.autograd.Function):
    """Nothing but the inputs is kept for the backward, which computes each tile anew."""

    @staticmethod
    def forward(ctx, q, k, v, prefix_len, window, q_start, q_prefix):
        ctx.save_for_backward(q, k, v, prefix_len, q_start, q_prefix)
        ctx.window = window
        out = torch.empty_like(q)
        for rows, i, j in query_tiles(q, k, prefix_len, window, q_start):
            inputs = tile_inputs(rows, j, q, k, v, q_prefix)
            out[:, :, rows] = attend(i, j, prefix_len, window, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, prefix_len, q_start, q_prefix = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        dq_prefix = None if q_prefix is None else torch.empty_like(q)
        for rows, i, j in query_tiles(q, k, prefix_len, ctx.window, q_start):
            inputs = tile_inputs(rows, j, q, k, v, q_prefix)
            inputs = [x.detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                out = attend(i, j, prefix_len, ctx.window, *inputs)
            grads = torch.autograd.grad(out, inputs, grad_out[:, :, rows])
            dq[:, :, rows] = grads[0]
            dk.index_add_(2, j, grads[1])       # a key collects from every tile that sees it
            dv.index_add_(2, j, grads[2])
            if q_prefix is not None:
                dq_prefix[:, :, rows] = grads[3]
        return dq, dk, dv, None, None, None, dq_prefix


def query_tiles(q, k, P, W, start):
    """For each tile of queries: its rows in q, their indices i (B | 1, rows), and the indices j of its keys.

    Rows of the batch may differ in prefix and start. All of them get the keys of the widest, and `visible`
    hides from each what is not its own."""
    Tq, Tk = q.size(2), k.size(2)
    row = torch.arange(Tq, device=q.device)
    key = torch.arange(Tk, device=q.device)
    longest_prefix = int(P.max())
    earliest, latest = int(start.min()), int(start.max())
    for tile_start in range(0, Tq, TILE):
        tile_end = min(tile_start + TILE, Tq)
        rows = slice(tile_start, tile_end)
        i = start[:, None] + row[rows]
        first = earliest + tile_start
        last = latest + tile_end - 1
        prefix_end, window_start, window_end = key_tiles(first, last, longest_prefix, W, TILE)
        prefix = key[:prefix_end * TILE]
        window = key[window_start * TILE:window_end * TILE]
        j = torch.cat([prefix, window])
        yield rows, i, j


def tile_inputs(rows, j, q, k, v, q_prefix):
    """The tensors of one tile, as attend takes them."""
    inputs = [q[:, :, rows], k.index_select(2, j), v.index_select(2, j)]
    if q_prefix is not None:
        inputs.append(q_prefix[:, :, rows])
    return inputs


# ------------------------------------------------------------------------------------------------------------
# one query per row: decoding

def decode_in_torch(q, k_cache, v_cache, lengths, prefix_len, q_prefix=None):
    """Each query against the first lengths[b] slots of its cache. -> (B, H, 1, D), zeros where length is 0

    Arguments as in attn_kernel.decode_attention; lengths and prefix_len are tensors, (B,) or (1,)."""
    slot = torch.arange(k_cache.size(2), device=q.device)
    mask = slot < lengths[:, None, None, None, None]                        # (B | 1, 1, 1, 1, S)
    scores = grouped_scores(q, k_cache, slot, prefix_len, q_prefix)
    out = softmax_values(scores, mask, v_cache)
    is_empty = lengths[:, None, None, None] == 0
    return out.masked_fill(is_empty, 0)                                     # no keys, no softmax: it is NaN


# ------------------------------------------------------------------------------------------------------------
# the printed map

def print_map(T, P, W, tile=8):
    """Print the mask of T tokens, and which tiles of keys (columns) each tile of queries (rows) visits."""
    print(f"T={T} P={P} W={W}: query i (down) sees key j (across)")
    for i in range(T):
        marks = ["#" if visible(i, j, P, W) else "." for j in range(T)]
        print(f"{i:4} " + "".join(marks))

    print(f"tiles of {tile}: '.' skipped, '+' edge (masked inside), '#' inner (no mask)")
    n_tiles = -(-T // tile)
    visited = 0
    for first in range(0, T, tile):
        last = min(first + tile, T) - 1
        prefix_end, window_start, window_end = key_tiles(first, last, P, W, tile)
        marks = ["."] * n_tiles
        for t in [*range(prefix_end), *range(window_start, window_end)]:
            marks[t] = "#" if is_inner(first, last, t * tile, P, W, tile) else "+"
            visited += 1
        print(f"{first:4} " + "".join(marks))
    print(f"{visited} of {n_tiles ** 2} tiles visited")


def main():
    try:
        T, P, W, *tile = map(int, sys.argv[1:])
        good = min(T, W, *tile) >= 1 and P >= 0 and len(tile) <= 1
    except ValueError:
        good = False
    if not good:
        print("usage: python attention.py T P W [tile], integers; T, W and tile at least 1", file=sys.stderr)
        sys.exit(2)
    print_map(T, P, W, *tile)


if __name__ == "__main__":
    main()
