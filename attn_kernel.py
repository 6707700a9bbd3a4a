"""
Attention over a prefix and a sliding window.

    python attention.py 40 8 12        # print the mask and the tile map for T=40 tokens, prefix P=8, window W=12

One predicate, `visible`, says who sees whom. Everything else here is a way to compute softmax(q k^T) v under it:

    dense     the definition: one (Tq, Tk) mask. The reference, for tests and short sequences.
    torch     block-sparse: a tile of queries meets the tiles of the prefix and the tiles of its window and no other, so time
              and memory grow linearly with T. Any device, any dtype, differentiable. Without gradients, while every token is
              in the window or the prefix, the mask is the causal one, and PyTorch's own attention takes it.
    triton    the same tiles as fused kernels, from Ampere to Blackwell, with their own backward. float16, bfloat16, float32.
    flex      PyTorch's FlexAttention with the same predicate, as a peer to compare with. CUDA.

The first two call `_attend`, which is the whole of the mathematics, on the indices they choose. Decoding has one query per row
and no mask: every key that is still in the cache is visible (sliding_cache.py sees to that), in whatever order the slots are.

Shapes: q (B, H, Tq, D), k and v (B, Hkv, Tk, D); query head h reads key head h // (H // Hkv). scale = D ** -0.5.
"""
import functools
import types

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from attention import _attend, _BlockSparse, _softmax, check_window, key_tiles, upcast, visible

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:  # the kernels below stay plain functions that nobody calls
    triton, tl = None, types.SimpleNamespace(constexpr=lambda x: x)

    def jit(f=None, **options):
        return f or jit

PIECES = 1024  # programs that share the gradient of the prefix keys, in all: enough to fill any GPU

# ---------------------------------------------------------------------------------------------------------------------
# training and prefill: many queries

def prefix_sliding_attention(q, k, v, prefix_len, window, *, q_start=None, q_prefix=None, impl="auto"):
    """Attention in which query i sees key j iff visible(i, j, prefix_len, window). Differentiable in q, k, v and q_prefix.

    q (B, H, Tq, D), k and v (B, Hkv, Tk, D); any strides. prefix_len: int or (B,). window: int >= 1, or None for full attention.
    q_start: the key index of query 0, int or (B,), default Tk - Tq. Keys are padded on the right: causality hides the padding.
    q_prefix (B, H, Tq, D): the query that meets the keys j < prefix_len, for rope="reset"; default q.
    impl: "auto" (triton on CUDA, else torch) | "triton" | "torch" | "dense" | "flex" (CUDA, no q_prefix). Returns (B, H, Tq, D).
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    _check(q, k, v, window, q_prefix)
    impl = _choose(impl, q, q_prefix, ("triton", "torch", "dense", "flex"))
    Tq, Tk = q.size(2), k.size(2)
    P = _per_row(prefix_len, q, "prefix_len", 0)                                      # (B,) or (1,)
    start = _per_row(Tk - Tq if q_start is None else q_start, q, "q_start", 0, Tk - Tq)  # (B,) or (1,)
    if impl == "dense":
        i = start[:, None] + torch.arange(Tq, device=q.device)                        # (B | 1, Tq)
        return _attend(q, k, v, q_prefix, i, torch.arange(Tk, device=q.device), P, window)
    if impl == "flex":
        return _flex(q, k, v, P, window, start)
    if impl == "triton":
        return _Triton.apply(q, k, v, q_prefix, P.expand(q.size(0)).contiguous(), FULL if window is None else min(window, FULL),
                             start.expand(q.size(0)).contiguous())
    everything = Tq == Tk and q_prefix is None and (window is None or Tk <= window or int(P.min()) >= Tk)
    if everything and not torch.is_grad_enabled():                                    # a prefill: the mask is the causal one
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
    return _BlockSparse.apply(q, k, v, q_prefix, P, window, start)


# ---------------------------------------------------------------------------------------------------------------------
# decoding: one query per row, against the cache

def decode_attention(q, k_cache, v_cache, lengths, *, prefix_len=None, q_prefix=None, impl="auto"):
    """One query per row against the first lengths[b] slots of a cache, in whatever order they are. Not differentiable.

    q (B, H, 1, D), k_cache and v_cache (B, Hkv, S, D), lengths (B,). With q_prefix (B, H, 1, D), the slots below prefix_len
    (int or (B,)) meet q_prefix instead of q (rope="reset"); both queries are scored in the same pass over the keys.
    impl: "auto" (triton on CUDA, else torch) | "triton" | "torch". Returns (B, H, 1, D), zeros for rows of length 0. Raises
    ValueError for shapes, dtypes or devices that do not fit.
    """
    _check(q, k_cache, v_cache, None, q_prefix)
    B, H, Tq, D = q.shape
    Hkv, S = k_cache.shape[1:3]
    if Tq != 1:
        raise ValueError(f"decode_attention takes one query per row, q has {Tq}")
    impl = _choose(impl, q, q_prefix, ("triton", "torch"))
    if q_prefix is not None and prefix_len is None:
        raise ValueError("q_prefix needs prefix_len: the slots that it is for")
    lengths = _per_row(lengths, q, "lengths", 0, S)
    P = lengths if q_prefix is None else _per_row(prefix_len, q, "prefix_len", 0)
    if impl == "triton":
        return _triton_decode(q, k_cache, v_cache, lengths.expand(B).contiguous(), P.expand(B).contiguous(), q_prefix)
    lengths, P = lengths.view(-1, 1, 1, 1), P.view(-1, 1, 1, 1)
    slot = torch.arange(S, device=q.device)
    queries = [x.reshape(B, Hkv, H // Hkv, D) for x in (q, q_prefix) if x is not None]
    s = (upcast(torch.cat(queries, 2)) @ upcast(k_cache).transpose(-1, -2)).split(H // Hkv, 2)  # (B, Hkv, H // Hkv, S), once or twice
    s = s[0] if q_prefix is None else torch.where(slot < P, s[1], s[0])
    p = _softmax(s, slot < lengths, D).to(v_cache.dtype)
    y = torch.where(lengths > 0, p @ v_cache, 0)                                      # a row without keys has no softmax
    return y.view(B, H, 1, D)


# ---------------------------------------------------------------------------------------------------------------------
# Triton: the same tiles, each program its own
#
# The kernels call the functions above, compiled: `visible` and those that count tiles say who sees whom, for them as for PyTorch.
# A program visits the tiles of the prefix and of the window and no other, first those that need no mask, then those that a boundary
# cuts. Statistics and sums are float32 whatever the inputs are. An invisible score is -inf and no large number in its place: rows
# may have scores of any size, and one that sees nothing gives 0. Offsets are 64 bits wide. Dots of float32 inputs run in float32
# ("ieee") and not in TF32, whose errors near 2e-2 nobody who asks for float32 expects.
#
# In the signatures: capitals are pointers and compile-time sizes, M queries by N keys a tile, D padded to PAD, a power of two;
# s* are tuples of four strides; TWO says that q_prefix is there.

def inner_tiles(first, last, P, W, tile, a, b, c):
    """Of the tiles 0..a-1 and b..c-1 of key_tiles, those that need no mask, as (p, d, e): 0..p-1 and d..e-1. The others, p..a-1,
    b..d-1 and e..c-1, may be cut by a boundary."""
    # where the window of the last query begins inside the prefix, no key between prefix and window is hidden from anyone
    d = b if W is None or P > last - W else max((last - W + tile) // tile, b)
    return min(P // tile, a), d, max((first + 1) // tile, d)


def key_tiles_apart(P, tile, b, c):
    """(n, m): with q_prefix, the tiles 0..n-1 are visited for it and m..c-1 for q, each masked to its own side of P. One tile, that
    which P cuts, may be visited for both: its keys need both queries."""
    return min((P + tile - 1) // tile, c), min(max(b, P // tile), c)


def query_tiles(first, last, start, Tq, W, tile):
    """Seen from the keys first..last, where query 0 has the index start: (lo, d, e, hi), the tiles lo..hi-1 of the queries that see
    any of them, of which d..e-1 need no mask. A query sees a key from its own index on, for W tokens, or for ever (W = None)."""
    end = Tq if W is None else min(max(last + W - start, 0), Tq)
    hi = (end + tile - 1) // tile
    lo = min(max(first - start, 0) // tile, hi)
    d = min(max(last - start + tile - 1, 0) // tile, hi)
    e = hi if W is None else min(max(first + W - start, 0) // tile, hi)
    return lo, d, max(d, e), hi


def n_tiles(edge, p, a, b, d, e, c):
    """How many tiles there are in the ranges p..a-1, b..d-1 and e..c-1 (edge), or in 0..p-1 and d..e-1."""
    return a - p + d - b + c - e if edge else p + e - d


def nth_tile(x, edge, p, a, b, d, e, c):
    """Tile number x of those."""
    if edge:
        x = x + p
        x = x if x < a else x + b - a
        return x if x < d else x + e - d
    return x if x < p else x + d - p


def prefix_pieces(key_tiles, slots, query_tiles):
    """Into how many pieces the queries of one prefix tile are divided, so that all pieces fit into the slots and each has at least
    four tiles of queries."""
    return max(min(slots // max(key_tiles, 1), (query_tiles + 3) // 4), 1)


FULL = 2**30  # the window that stands for None in a kernel: longer than any sequence, and twice of it still fits 32 bits
LOG2E = tl.constexpr(1.4426950408889634)
_visible, _key_tiles, _inner_tiles, _key_tiles_apart, _query_tiles, _n_tiles, _nth_tile, _prefix_pieces = map(
    jit, (visible, key_tiles, inner_tiles, key_tiles_apart, query_tiles, n_tiles, nth_tile, prefix_pieces))


@jit
def _tile(X, stride, b, h, start, n, SIZE: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """Pointers and mask of the SIZE rows from `start` on of X[b, h], which has n rows.  (SIZE, PAD) both"""
    row, d = tl.arange(0, SIZE)[:, None], tl.arange(0, PAD)[None, :]
    mask = row < n - start
    if D != PAD:
        mask = mask & (d < D)
    X += b.to(tl.int64) * stride[0] + h.to(tl.int64) * stride[1] + tl.cast(start, tl.int64) * stride[2]
    return X + (row.to(tl.int64) * stride[2] + d.to(tl.int64) * stride[3]), mask


@jit
def _load(X, stride, b, h, start, n, SIZE: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """Those rows, zeros where there are none.  (SIZE, PAD)"""
    pointers, mask = _tile(X, stride, b, h, start, n, SIZE, D, PAD)
    return tl.load(pointers, mask=mask, other=0.0)


@jit
def _query_tile(P, START, B, H, Tq, Tk, M: tl.constexpr):
    """Which tile of queries this program has: batch row b, head h, first row; the indices of its first and last query; its prefix
    length. The last tiles come first, which without a window have the most to do, and the heads that share keys come together."""
    pid = tl.program_id(0)
    h, b = pid % H, pid // H % B
    row = (tl.cdiv(Tq, M) - 1 - pid // H // B) * M
    first = row + tl.load(START + b).to(tl.int32)
    last = first + tl.minimum(M, Tq - row) - 1
    return b, h, row, first, last, tl.minimum(tl.load(P + b), Tk).to(tl.int32)


@jit
def _ranges(first, last, P, W, N: tl.constexpr):
    """The arguments of _nth_tile for one query: (p, a, b, d, e, c)."""
    a, b, c = _key_tiles(first, last, P, W, N)
    p, d, e = _inner_tiles(first, last, P, W, N, a, b, c)
    return p, a, b, d, e, c


@jit
def _ranges_apart(first, last, P, W, N: tl.constexpr):
    """The same for q_prefix and for q."""
    _, _, b, d, e, c = _ranges(first, last, 0, W, N)
    n, m = _key_tiles_apart(P, N, b, c)
    d = max(d, n)
    return (min(P // N, (first + 1) // N), n, n, n, n, n), (0, 0, m, d, max(e, d), c)


@jit
def _attend_tiles(acc, top, total, q, keys, ranges, first, P, W, floor, scale,
                  M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """Online softmax of a tile of queries, the first of which has index `first`, over the key tiles in `ranges`: acc (M, PAD) the
    weighted sum of values, top (M,) the largest score in base 2, total (M,) the sum of weights, all so far. `keys` says where the
    keys are; those below floor are not seen."""
    K, V, sk, sv, b, h, Tk = keys
    i = first + tl.arange(0, M)[:, None]
    for edge in tl.static_range(2):
        for x in range(_n_tiles(edge, *ranges)):
            start = _nth_tile(x, edge, *ranges) * N
            k = _load(K, sk, b, h, start, Tk, N, D, PAD)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")                        # (M, N)
            if edge:
                j = start + tl.arange(0, N)[None, :]
                s = tl.where(_visible(i, j, P, W) & (j >= floor), s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1) * scale)
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)                   # nothing seen yet: -inf - -inf would be NaN
            p = tl.exp2(s * scale - safe[:, None])
            keep = tl.exp2(top - safe)                                                # brings what was summed so far to the new scale
            v = _load(V, sv, b, h, start, Tk, N, D, PAD)
            acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
            total = total * keep + tl.sum(p, 1)
            top = new_top
    return acc, top, total


@jit(do_not_specialize=["B", "Tq", "Tk", "W"])
def _forward(Q, QP, K, V, OUT, LSE, P, START, sq, sqp, sk, sv, so, B, H, Hkv, Tq, Tk, W, scale,
             M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, TWO: tl.constexpr):
    """OUT and LSE (B, H, Tq), the log-sum-exp in base 2. Source of the online softmax: arXiv 2307.08691, algorithm 1."""
    b, h, row, first, last, prefix = _query_tile(P, START, B, H, Tq, Tk, M)
    acc = tl.zeros((M, PAD), tl.float32)
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    keys = (K, V, sk, sv, b, h // (H // Hkv), Tk)
    if TWO:
        ranges_prefix, ranges = _ranges_apart(first, last, prefix, W, N)
        q = _load(QP, sqp, b, h, row, Tq, M, D, PAD)
        acc, top, total = _attend_tiles(acc, top, total, q, keys, ranges_prefix, first, prefix, 0, 0, scale * LOG2E, M, N, D, PAD)
        q = _load(Q, sq, b, h, row, Tq, M, D, PAD)
        acc, top, total = _attend_tiles(acc, top, total, q, keys, ranges, first, 0, W, prefix, scale * LOG2E, M, N, D, PAD)
    else:
        ranges = _ranges(first, last, prefix, W, N)
        q = _load(Q, sq, b, h, row, Tq, M, D, PAD)
        acc, top, total = _attend_tiles(acc, top, total, q, keys, ranges, first, prefix, W, 0, scale * LOG2E, M, N, D, PAD)
    out, mask = _tile(OUT, so, b, h, row, Tq, M, D, PAD)
    rows, some, total = row + tl.arange(0, M), total > 0, tl.where(total > 0, total, 1.0)
    tl.store(out, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
    # +inf for a row that sees nothing: the backward's exp2(score - LSE) is then 0
    tl.store(LSE + (b * H + h).to(tl.int64) * Tq + rows, tl.where(some, top + tl.log2(total), float("inf")), mask=rows < Tq)


@jit
def _dq_tiles(dq, q, do, lse, delta, keys, ranges, first, P, W, floor, scale,
              M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """Add to dq (M, PAD) what comes from the key tiles in `ranges`, as in _attend_tiles."""
    K, V, sk, sv, b, h, Tk = keys
    i = first + tl.arange(0, M)[:, None]
    for edge in tl.static_range(2):
        for x in range(_n_tiles(edge, *ranges)):
            start = _nth_tile(x, edge, *ranges) * N
            k = _load(K, sk, b, h, start, Tk, N, D, PAD)
            v = _load(V, sv, b, h, start, Tk, N, D, PAD)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])        # (M, N)
            if edge:
                j = start + tl.arange(0, N)[None, :]
                p = tl.where(_visible(i, j, P, W) & (j >= floor), p, 0.0)
            ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@jit(do_not_specialize=["B", "Tq", "Tk", "W"])
def _backward_q(Q, QP, K, V, OUT, DOUT, LSE, DELTA, DQ, DQP, P, START, sq, sqp, sk, sv, so, sdo, sdq, sdqp,
                B, H, Hkv, Tq, Tk, W, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, TWO: tl.constexpr):
    """DQ and DQP over the tiles of the forward, and for _backward_kv DELTA (B, H, Tq), the sum of OUT * DOUT over D."""
    b, h, row, first, last, prefix = _query_tile(P, START, B, H, Tq, Tk, M)
    keys, rows = (K, V, sk, sv, b, h // (H // Hkv), Tk), row + tl.arange(0, M)
    at = (b * H + h).to(tl.int64) * Tq + rows
    do = _load(DOUT, sdo, b, h, row, Tq, M, D, PAD)
    delta = tl.sum(do.to(tl.float32) * _load(OUT, so, b, h, row, Tq, M, D, PAD).to(tl.float32), 1)
    lse = tl.load(LSE + at, mask=rows < Tq, other=float("inf"))
    tl.store(DELTA + at, delta, mask=rows < Tq)
    dq = tl.zeros((M, PAD), tl.float32)
    if TWO:
        ranges_prefix, ranges = _ranges_apart(first, last, prefix, W, N)
        q = _load(QP, sqp, b, h, row, Tq, M, D, PAD)
        dqp = _dq_tiles(dq, q, do, lse, delta, keys, ranges_prefix, first, prefix, 0, 0, scale * LOG2E, M, N, D, PAD)
        pointers, mask = _tile(DQP, sdqp, b, h, row, Tq, M, D, PAD)
        tl.store(pointers, (dqp * scale).to(DQP.dtype.element_ty), mask=mask)
        q = _load(Q, sq, b, h, row, Tq, M, D, PAD)
        dq = _dq_tiles(dq, q, do, lse, delta, keys, ranges, first, 0, W, prefix, scale * LOG2E, M, N, D, PAD)
    else:
        ranges = _ranges(first, last, prefix, W, N)
        q = _load(Q, sq, b, h, row, Tq, M, D, PAD)
        dq = _dq_tiles(dq, q, do, lse, delta, keys, ranges, first, prefix, W, 0, scale * LOG2E, M, N, D, PAD)
    pointers, mask = _tile(DQ, sdq, b, h, row, Tq, M, D, PAD)
    tl.store(pointers, (dq * scale).to(DQ.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["B", "Tq", "Tk", "W", "SLOTS"])
def _backward_kv(Q, K, V, DOUT, LSE, DELTA, DK, DV, PARTS, P, START, sq, sk, sv, sdo, sdk, sdv, B, H, Hkv, Tq, Tk, W, SLOTS, scale,
                 M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, PREFIX: tl.constexpr):
    """DK and DV of one tile of N keys of one key head, summed over the query heads that read it.

    Launched twice. PREFIX: the keys below P, which all later queries see (W is FULL). There are few of them and they have the most
    to do, so the queries of a tile are shared out among several programs, each of which writes its part into a slot of PARTS
    (B * Hkv, SLOTS, 2, N, PAD); _sum_parts adds them up, always in the same order. Otherwise: the keys from P on, which the queries
    of their own window see. The tile that P cuts is in both launches, and each of them stores its own rows of it."""
    pid = tl.program_id(0)
    hkv, b, t = pid % Hkv, pid // Hkv % B, pid // Hkv // B
    prefix = tl.minimum(tl.load(P + b), Tk).to(tl.int32)
    pieces = 1
    piece = 0
    if PREFIX:
        pieces = _prefix_pieces(tl.cdiv(prefix, N), SLOTS, tl.cdiv(Tq, M))
        piece = t % pieces
        t = t // pieces
    key = t * N
    floor, end = (0, prefix) if PREFIX else (prefix, Tk)                              # this launch's keys
    if (key >= end) | (key + N <= floor):
        return
    query_start = tl.load(START + b).to(tl.int32)
    lo, d, e, hi = _query_tiles(key, key + N - 1, query_start, Tq, W, M)
    if PREFIX:
        share = tl.cdiv(hi - lo, pieces)
        lo += piece * share
        hi = tl.maximum(lo, tl.minimum(hi, lo + share))
        d = tl.minimum(tl.maximum(d, lo), hi)
        e = tl.minimum(tl.maximum(e, lo), hi)
    k = _load(K, sk, b, hkv, key, Tk, N, D, PAD)
    v = _load(V, sv, b, hkv, key, Tk, N, D, PAD)
    dk, dv = tl.zeros((N, PAD), tl.float32), tl.zeros((N, PAD), tl.float32)
    j = key + tl.arange(0, N)
    for edge in tl.static_range(2):
        n = _n_tiles(edge, 0, 0, lo, d, e, hi)                                        # tiles of queries, for each head
        for x in range(n * (H // Hkv)):
            h = hkv * (H // Hkv) + x // n
            row = _nth_tile(x % n, edge, 0, 0, lo, d, e, hi) * M
            rows = row + tl.arange(0, M)
            q = _load(Q, sq, b, h, row, Tq, M, D, PAD)
            do = _load(DOUT, sdo, b, h, row, Tq, M, D, PAD)
            at = (b * H + h).to(tl.int64) * Tq + rows
            lse = tl.load(LSE + at, mask=rows < Tq, other=float("inf"))               # inf: rows beyond the end add nothing
            delta = tl.load(DELTA + at, mask=rows < Tq, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E) - lse[None, :])      # (N, M)
            if edge:
                p = tl.where(_visible(query_start + rows[None, :], j[:, None], 0, W), p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    if pieces > 1:
        slot = PARTS + ((b * Hkv + hkv) * SLOTS + t * pieces + piece).to(tl.int64) * (2 * N * PAD)
        slot += tl.arange(0, N)[:, None] * PAD + tl.arange(0, PAD)[None, :]
        tl.store(slot, dk * scale)
        tl.store(slot + N * PAD, dv)
    else:
        own = (j >= floor) & (j < end)
        pointers, mask = _tile(DK, sdk, b, hkv, key, Tk, N, D, PAD)
        tl.store(pointers, (dk * scale).to(DK.dtype.element_ty), mask=mask & own[:, None])
        pointers, mask = _tile(DV, sdv, b, hkv, key, Tk, N, D, PAD)
        tl.store(pointers, dv.to(DV.dtype.element_ty), mask=mask & own[:, None])


@jit(do_not_specialize=["B", "Tq", "Tk", "SLOTS"])
def _sum_parts(PARTS, DK, DV, P, sdk, sdv, B, Hkv, Tq, Tk, SLOTS,
               M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """Add up what the prefix launch of _backward_kv left in PARTS, one tile of keys per program."""
    pid = tl.program_id(0)
    hkv, b, t = pid % Hkv, pid // Hkv % B, pid // Hkv // B
    prefix = tl.minimum(tl.load(P + b), Tk).to(tl.int32)
    pieces = _prefix_pieces(tl.cdiv(prefix, N), SLOTS, tl.cdiv(Tq, M))
    if (pieces == 1) | (t * N >= prefix):
        return
    slot = PARTS + ((b * Hkv + hkv) * SLOTS + t * pieces).to(tl.int64) * (2 * N * PAD)
    slot += tl.arange(0, N)[:, None] * PAD + tl.arange(0, PAD)[None, :]
    dk, dv = tl.zeros((N, PAD), tl.float32), tl.zeros((N, PAD), tl.float32)
    for piece in range(pieces):
        dk += tl.load(slot + piece * (2 * N * PAD))
        dv += tl.load(slot + piece * (2 * N * PAD) + N * PAD)
    pointers, mask = _tile(DK, sdk, b, hkv, t * N, prefix, N, D, PAD)
    tl.store(pointers, dk.to(DK.dtype.element_ty), mask=mask)
    pointers, mask = _tile(DV, sdv, b, hkv, t * N, prefix, N, D, PAD)
    tl.store(pointers, dv.to(DV.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["B", "S"])
def _decode(Q, QP, K, V, OUTS, LSE, LENGTHS, P, sq, sqp, sk, sv, B, H, Hkv, S, scale, M: tl.constexpr, N: tl.constexpr,
            D: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr, TWO: tl.constexpr):
    """Attention of the query heads of one key head over one of SPLITS shares of the valid slots: OUTS (B, H, SPLITS, D) and LSE
    (B, H, SPLITS) in base 2, both float32. The heads are the rows of one tile, so that every slot is read once for all of them.
    Source: flash-decoding (Dao, Haziza, Massa and Sizov 2023)."""
    pid = tl.program_id(0)
    split, hkv, b = pid % SPLITS, pid // SPLITS % Hkv, pid // SPLITS // Hkv
    length = tl.minimum(tl.load(LENGTHS + b), S).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, N), SPLITS)                                       # tiles of slots
    h = hkv * (H // Hkv)
    q = _load(Q, sq, b, 0 * b, h, h + H // Hkv, M, D, PAD)                            # the heads are the rows
    if TWO:
        qp = _load(QP, sqp, b, 0 * b, h, h + H // Hkv, M, D, PAD)
        prefix = tl.minimum(tl.load(P + b), S).to(tl.int32)
    acc = tl.zeros((M, PAD), tl.float32)
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    for t in range(split * share, tl.minimum(split * share + share, tl.cdiv(length, N))):
        k = _load(K, sk, b, hkv, t * N, length, N, D, PAD)
        slot = t * N + tl.arange(0, N)[None, :]
        s = tl.dot(q, tl.trans(k), input_precision="ieee")                            # (M, N)
        if TWO:
            s = tl.where(slot < prefix, tl.dot(qp, tl.trans(k), input_precision="ieee"), s)
        s = tl.where(slot < length, s * (scale * LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))                                       # finite: the tile has a valid slot
        p = tl.exp2(s - new_top[:, None])
        keep = tl.exp2(top - new_top)
        v = _load(V, sv, b, hkv, t * N, length, N, D, PAD)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        total = total * keep + tl.sum(p, 1)
        top = new_top
    g, d = tl.arange(0, M), tl.arange(0, PAD)
    at = ((b * H + h + g) * SPLITS + split).to(tl.int64)
    total = tl.where(total > 0, total, 1.0)                                           # an empty share: LSE stays -inf
    tl.store(OUTS + (at[:, None] * D + d[None, :]), acc / total[:, None], mask=(g[:, None] < H // Hkv) & (d[None, :] < D))
    tl.store(LSE + at, top + tl.log2(total), mask=g < H // Hkv)


@jit
def _merge(OUTS, LSE, OUT, D: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr):
    """The shares of one head of one row of the batch, weighted by their log-sum-exp: OUT (B, H, 1, D)."""
    at, split, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, PAD)
    lse = tl.load(LSE + (at * SPLITS + split))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))                  # (SPLITS,), all 0 for a row of length 0
    outs = tl.load(OUTS + ((at * SPLITS + split)[:, None] * D + d[None, :]), mask=d[None, :] < D, other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(outs * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(OUT + (at * D + d), out.to(OUT.dtype.element_ty), mask=d < D)


# ---------------------------------------------------------------------------------------------------------------------
# Triton: launching

# (M, N, warps, stages) by the bytes of a padded row of D elements, which count twice in float32, whose dots need the registers; first
# on devices that give a program 200 KB of shared memory or more (H100, B200), then on others. Nothing here depends on T: kernels
# tuned per length stall whenever a length is new. Of the tiles tried, these are the largest whose buffers fit and whose forward, in
# half precision at head_dim 64 and 128, stays in registers: tests/aot.py checks it.
TILES = {
    "forward":     {128: ((128, 64, 8, 3), (128, 64, 8, 3)), 256: ((128, 64, 8, 3), (128, 64, 8, 2)),
                    512: ((64, 64, 8, 2), (64, 32, 4, 2)), 1024: ((32, 16, 4, 2), (32, 16, 4, 1))},
    "forward_two": {128: ((128, 64, 8, 3), (128, 64, 8, 3)), 256: ((128, 64, 8, 3), (64, 32, 4, 2)),
                    512: ((64, 64, 8, 2), (64, 32, 4, 2)), 1024: ((32, 16, 4, 2), (32, 16, 4, 1))},
    "backward_q":  {128: ((128, 64, 8, 2), (128, 64, 8, 2)), 256: ((128, 64, 8, 2), (128, 32, 8, 2)),
                    512: ((64, 32, 8, 2), (32, 32, 4, 1)), 1024: ((16, 16, 4, 1), (16, 16, 4, 1))},
    "backward_kv": {128: ((64, 128, 8, 2), (32, 128, 8, 2)), 256: ((32, 128, 8, 2), (32, 64, 8, 2)),
                    512: ((32, 64, 8, 2), (32, 32, 4, 1)), 1024: ((16, 16, 4, 1), (16, 16, 4, 1))},
    "decode":      {128: ((16, 64, 4, 3), (16, 64, 4, 3)), 256: ((16, 64, 4, 3), (16, 64, 4, 2)),
                    512: ((16, 32, 4, 3), (16, 32, 4, 2)), 1024: ((16, 16, 4, 3), (16, 16, 4, 2))},
}


def tile_config(kernel, q):
    """The compile-time sizes of a kernel in TILES, as keyword arguments of its launch."""
    PAD = max(16, triton.next_power_of_2(q.size(3)))
    row = PAD * q.element_size() * (2 if q.dtype == torch.float32 else 1)
    M, N, warps, stages = TILES[kernel][min(max(row, 128), 1024)][_device(q.device)[0] < 200_000]
    return dict(M=M, N=N, D=q.size(3), PAD=PAD, num_warps=warps, num_stages=stages)


@functools.cache
def _device(device):
    """Shared memory in bytes that a program may use, and the number of multiprocessors; for the interpreter, which has neither, 4."""
    if device.type == "cpu":
        return 101_376, 4
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.multi_processor_count


class _Triton(torch.autograd.Function):
    """The kernels as one differentiable function. Only inputs, output and log-sum-exp are kept; shapes as in the public function,
    P and start (B,) integers, W an int."""

    @staticmethod
    def forward(ctx, q, k, v, q_prefix, P, W, start):
        B, H, Tq, D = q.shape
        Hkv, Tk = k.shape[1:3]
        out, lse = torch.empty_like(q), torch.empty(B, H, Tq, dtype=torch.float32, device=q.device)
        qp, config = q if q_prefix is None else q_prefix, tile_config("forward" if q_prefix is None else "forward_two", q)
        with torch.cuda.device_of(q):
            _forward[B * H * triton.cdiv(Tq, config["M"]),](
                q, qp, k, v, out, lse, P, start, q.stride(), qp.stride(), k.stride(), v.stride(), out.stride(),
                B, H, Hkv, Tq, Tk, W, D ** -0.5, TWO=q_prefix is not None, **config)
        ctx.save_for_backward(q, k, v, q_prefix, out, lse, P, start)
        ctx.window = W
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, q_prefix, out, lse, P, start = ctx.saved_tensors
        B, H, Tq, D = q.shape
        Hkv, Tk = k.shape[1:3]
        two, scale, qp, W = q_prefix is not None, D ** -0.5, q if q_prefix is None else q_prefix, ctx.window
        dq, dqp, dk, dv, delta = map(torch.empty_like, (q, qp, k, v, lse))
        config = tile_config("backward_q", q)
        with torch.cuda.device_of(q):
            _backward_q[B * H * triton.cdiv(Tq, config["M"]),](
                q, qp, k, v, out, dout, lse, delta, dq, dqp, P, start, q.stride(), qp.stride(), k.stride(), v.stride(),
                out.stride(), dout.stride(), dq.stride(), dqp.stride(), B, H, Hkv, Tq, Tk, W, scale, TWO=two, **config)
            config = tile_config("backward_kv", q)
            M, N, PAD = config["M"], config["N"], config["PAD"]
            tiles = triton.cdiv(Tk, N)
            slots = max(min(PIECES // max(B * Hkv, 1), tiles * prefix_pieces(1, PIECES, triton.cdiv(Tq, M))), 1)
            parts = torch.empty(B * Hkv, slots, 2, N, PAD, dtype=torch.float32, device=q.device)
            for x, window, prefix in ((qp, FULL, True), (q, W, False)):
                _backward_kv[B * Hkv * (max(slots, tiles) if prefix else tiles),](
                    x, k, v, dout, lse, delta, dk, dv, parts, P, start, x.stride(), k.stride(), v.stride(), dout.stride(),
                    dk.stride(), dv.stride(), B, H, Hkv, Tq, Tk, window, slots, scale, PREFIX=prefix, **config)
            _sum_parts[B * Hkv * min(slots // 2, tiles),](parts, dk, dv, P, dk.stride(), dv.stride(), B, Hkv, Tq, Tk, slots,
                                                          M, N, D, PAD, num_warps=8)
        return dq, dk, dv, dqp if two else None, None, None, None


def _triton_decode(q, k, v, lengths, P, q_prefix):
    """decode_attention by _decode and _merge. The grid depends on shapes only: nothing waits for the lengths, and a CUDA graph of it
    holds whatever they become."""
    B, H, _, D = q.shape
    Hkv, S = k.shape[1:3]
    config, qp = tile_config("decode", q), q if q_prefix is None else q_prefix
    config["M"] = max(config["M"], triton.next_power_of_2(H // Hkv))
    # two programs for each multiprocessor, if there are enough tiles of slots
    splits = triton.next_power_of_2(max(1, min(2 * _device(q.device)[1] // max(B * Hkv, 1), triton.cdiv(S, config["N"]), 64)))
    outs = torch.empty(B, H, splits, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, H, splits, dtype=torch.float32, device=q.device)
    out = torch.empty(B, H, 1, D, dtype=q.dtype, device=q.device)
    heads_as_rows = [x.transpose(1, 2).stride() for x in (q, qp)]
    with torch.cuda.device_of(q):
        _decode[B * Hkv * splits,](q, qp, k, v, outs, lse, lengths, P, *heads_as_rows, k.stride(), v.stride(), B, H, Hkv, S,
                                   D ** -0.5, SPLITS=splits, TWO=q_prefix is not None, **config)
        _merge[B * H,](outs, lse, out, D, config["PAD"], splits)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# FlexAttention, a peer

def _flex(q, k, v, P, W, start):
    """The same attention by PyTorch's FlexAttention. Imported and compiled at the first call; not there without CUDA."""
    return flex_compiled()(q, k, v, block_mask=flex_block_mask(q, k, P, W, start), enable_gqa=q.size(1) != k.size(1))


@functools.cache
def flex_compiled():
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False)


def flex_block_mask(q, k, P, W, start):
    """FlexAttention's block mask for `visible`, with P and start (1,) or (B,)."""
    from torch.nn.attention.flex_attention import create_block_mask
    P, start = P.expand(q.size(0)), start.expand(q.size(0))
    return create_block_mask(lambda b, h, i, j: visible(i + start[b], j, P[b], W), q.size(0), None, q.size(2), k.size(2),
                             device=q.device, _compile=q.is_cuda)


# ---------------------------------------------------------------------------------------------------------------------
# checks

def _choose(impl, q, q_prefix, choices):
    """The implementation that impl means for tensors like q. Raises ValueError for one that is unknown or cannot take them."""
    fits = q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.size(3) <= 256
    if impl == "auto":
        return "triton" if triton and q.is_cuda and fits else "torch"
    if impl not in choices:
        raise ValueError(f"impl={impl!r} is not one of 'auto', {', '.join(map(repr, choices))}")
    interpreted = triton and not isinstance(_forward, triton.JITFunction)
    if impl == "triton" and not (triton and (q.is_cuda or interpreted) and fits):
        raise ValueError(f"impl='triton' wants Triton (here {triton and triton.__version__}) and CUDA tensors (or TRITON_INTERPRET=1 set "
                         f"before the import), float16, bfloat16 or float32, and D <= 256, not {q.dtype} on {q.device} with D={q.size(3)}")
    if impl == "flex" and (not q.is_cuda or q_prefix is not None):
        raise ValueError(f"impl='flex' wants CUDA tensors, not {q.device}, and no q_prefix")
    return impl


def _check(q, k, v, window, q_prefix):
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"attention wants q (B, H, Tq, D) and k, v (B, Hkv, Tk, D), not {_shapes(q=q, k=k, v=v)}")
    if not q.is_floating_point() or q.numel() == 0:
        raise ValueError(f"attention wants real floating-point numbers, and some, not {q.dtype} in {_shapes(q=q)}")
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
