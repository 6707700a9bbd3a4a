"""
Attention over a prefix and a sliding window: the two public functions, and the Triton kernels.

prefix_sliding_attention is for training and prefill, decode_attention for one query per row against a cache.
Both compute softmax(q k^T / sqrt(D)) v under the predicate `visible` of attention.py, in one of several ways:

    dense     the definition, for tests and short sequences                         attention.py
    torch     block-sparse in PyTorch: any device, any dtype                        attention.py
    triton    the same tiles as fused kernels, from Ampere to Blackwell, with their own backward; float16,
              bfloat16 or float32 and D <= 256
    flex      PyTorch's FlexAttention under the same predicate, as a peer to compare with; CUDA

Without a GPU nothing below the checks is ever called.

One limit of the kernels is on purpose. The gradient of a prefix key comes from all later queries, and one
program computes it for a tile of keys. Beyond some hundred thousand queries in one pass, the few programs of
a short prefix run for longer than all others together. Sharing the queries of such a tile out among several
programs would mend that, for a second kernel that adds up their parts; no trainer here passes so many queries
at once.
"""
import functools
import types

import torch
from torch.autograd.function import once_differentiable

from attention import (
    block_sparse_attention,
    check_window,
    decode_in_torch,
    dense_attention,
    key_tiles,
    visible,
)


def prefix_sliding_attention(q, k, v, prefix_len, window, *, q_start=None, q_prefix=None, impl="auto"):
    """Attention in which query i sees key j iff visible(i, j, prefix_len, window). Differentiable.

    q (B, H, Tq, D), k and v (B, Hkv, Tk, D), any strides; query head h reads key head h // (H // Hkv).
    prefix_len: int or (B,). window: int >= 1, or None for full attention.
    q_start: the key index of query 0, int or (B,), default Tk - Tq. Keys are padded on the right: causality
    hides the padding.
    q_prefix (B, H, Tq, D): the query that meets the keys j < prefix_len, for rope="reset"; default q.
    impl: "auto" (triton on CUDA, else torch) | "triton" | "torch" | "dense" | "flex" (no q_prefix).
    Returns (B, H, Tq, D). Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    implementations = dict(triton=triton_attention, torch=block_sparse_attention, dense=dense_attention,
                           flex=flex_attention)
    _check(q, k, v, q_prefix)
    check_window(window)
    attention = _choose(impl, implementations, q, q_prefix)
    latest = k.size(2) - q.size(2)
    prefix_len = _per_row(prefix_len, q, "prefix_len", 0)
    q_start = _per_row(latest if q_start is None else q_start, q, "q_start", 0, latest)
    return attention(q, k, v, prefix_len, window, q_start, q_prefix)


def decode_attention(q, k_cache, v_cache, lengths, *, prefix_len=None, q_prefix=None, impl="auto"):
    """One query per row against the first lengths[b] slots of a cache, in any order. Not differentiable.

    q (B, H, 1, D), k_cache and v_cache (B, Hkv, S, D), lengths: int or (B,).
    q_prefix (B, H, 1, D): the query that meets the slots below prefix_len (int or (B,)), for rope="reset".
    Both queries are scored in one pass over the keys. Without it prefix_len is not looked at.
    impl: "auto" (triton on CUDA, else torch) | "triton" | "torch".
    Returns (B, H, 1, D), zeros for rows of length 0. Raises ValueError for shapes, dtypes or devices that do
    not fit. On CUDA nothing waits for the device, so that a CUDA graph can record it.
    """
    _check(q, k_cache, v_cache, q_prefix)
    attention = _choose(impl, dict(triton=triton_decode, torch=decode_in_torch), q, q_prefix)
    if q.size(2) != 1:
        raise ValueError(f"decode_attention takes one query per row, q has {q.size(2)}")
    lengths = _per_row(lengths, q, "lengths", 0, k_cache.size(2))
    if q_prefix is None:
        prefix_len = lengths    # some tensor: nobody reads it
    elif prefix_len is None:
        raise ValueError("q_prefix needs prefix_len: the slots that it is for")
    else:
        prefix_len = _per_row(prefix_len, q, "prefix_len", 0)
    return attention(q, k_cache, v_cache, lengths, prefix_len, q_prefix)


# ------------------------------------------------------------------------------------------------------------
# checks: each argument once, here and nowhere below

def _check(q, k, v, q_prefix):
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"attention wants q (B, H, Tq, D) and k, v (B, Hkv, Tk, D), not {shapes}")
    if not q.is_floating_point() or q.numel() == 0:
        raise ValueError(f"attention wants real floating-point numbers, and some, not {q.dtype} in {shapes}")
    if q.size(0) != k.size(0) or q.size(3) != k.size(3) or q.size(1) % k.size(1):
        raise ValueError(f"batch and head size must agree, and H be a multiple of Hkv: {shapes}")
    if q_prefix is not None and q_prefix.shape != q.shape:
        raise ValueError(f"q_prefix must be shaped as q: q_prefix {tuple(q_prefix.shape)}, {shapes}")
    for name, x in dict(k=k, v=v, q_prefix=q_prefix).items():
        if x is not None and (x.dtype, x.device) != (q.dtype, q.device):
            raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}")


def _per_row(value, q, name, low, high=None):
    """An int, or ints (B,), as a tensor (1,) or (B,) on q's device. On CUDA the values themselves are not
    checked, which would have to wait for the device."""
    value = torch.as_tensor(value)
    if value.dim() > 1 or value.numel() not in (1, q.size(0)) or value.is_floating_point():
        raise ValueError(f"{name} must be an int or {q.size(0)} ints, one per row of q, "
                         f"not {tuple(value.shape)} of {value.dtype}")
    if value.device.type == "cpu" and (value.min() < low or (high is not None and value.max() > high)):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {limits}, not {value.tolist()}")
    return value.reshape(-1).to(q.device)


def _choose(impl, implementations, q, q_prefix):
    """The function that impl names, for tensors like q."""
    takes_triton = q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.size(3) <= 256
    if impl == "auto":
        impl = "triton" if triton and q.is_cuda and takes_triton else "torch"
    if impl not in implementations:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(map(repr, ['auto', *implementations]))}")
    interpreted = triton and not isinstance(_forward, triton.JITFunction)
    if impl == "triton" and not (triton and takes_triton and (q.is_cuda or interpreted)):
        raise ValueError(
            f"impl='triton' wants Triton (here {triton and triton.__version__}), CUDA tensors (or "
            f"TRITON_INTERPRET=1 set before the import), float16, bfloat16 or float32, and D <= 256, "
            f"not {q.dtype} on {q.device} with D={q.size(3)}")
    if impl == "flex" and (not q.is_cuda or q_prefix is not None):
        raise ValueError(f"impl='flex' wants CUDA tensors, not {q.device}, and no q_prefix")
    return implementations[impl]


# ------------------------------------------------------------------------------------------------------------
# FlexAttention, a peer

def flex_attention(q, k, v, prefix_len, window, q_start, q_prefix=None):
    """The same attention by PyTorch's FlexAttention, compiled at the first call."""
    block_mask = flex_block_mask(q, k, prefix_len, window, q_start)
    return flex_compiled()(q, k, v, block_mask=block_mask, enable_gqa=q.size(1) != k.size(1))


@functools.cache
def flex_compiled():
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False)


def flex_block_mask(q, k, prefix_len, window, q_start):
    """FlexAttention's block mask for `visible`, with prefix_len and q_start (1,) or (B,)."""
    from torch.nn.attention.flex_attention import create_block_mask
    B, Tq, Tk = q.size(0), q.size(2), k.size(2)
    P, start = prefix_len.expand(B), q_start.expand(B)

    def mask(b, h, i, j):
        return visible(i + start[b], j, P[b], window)

    return create_block_mask(mask, B, None, Tq, Tk, device=q.device, _compile=q.is_cuda)


# ------------------------------------------------------------------------------------------------------------
# Triton: which tiles a program visits
#
# The kernels call the plain functions `visible`, `key_tiles` and those of this section, compiled: they say
# who sees whom for the GPU as for PyTorch. A program visits the tiles that it needs and no other: first the
# inner ones, which need no mask, then the edge ones, which a boundary may cut.
#
# A rule (P, W, floor) says which keys a query sees: those at j >= floor for which visible(i, j, P, W).
# Without q_prefix there is one rule, (prefix, window, 0). With it there are two, which share the keys between
# them: (0, window, prefix) for q, and (prefix, 0, 0), the past of the prefix and no window, for q_prefix.
#
# What to visit under a rule is given by six numbers of tiles, p <= a <= b <= d <= e <= c:
#     inner tiles  0..p-1  and d..e-1
#     edge tiles   p..a-1, b..d-1 and e..c-1

def key_ranges(first, last, rule, tile, prefix_end, window_start, window_end):
    """What to visit for the queries first..last, made from the three numbers that key_tiles gives."""
    P, W, floor = rule
    prefix_tiles = (P + tile - 1) // tile
    c = min(window_end, prefix_tiles) if W == 0 else window_end
    b = min(max(window_start, floor // tile), c)
    a = min(prefix_end, b)
    # if the window of the last query begins inside the prefix, no key between the two is hidden from anyone
    d = b if W is None or P > last - W else max((last - W + tile) // tile, b)
    d = min(max(d, (floor + tile - 1) // tile), c)
    e = min(max((first + 1) // tile, d), c)
    return min(P // tile, a), a, b, d, e, c


def query_ranges(first, last, start, Tq, rule, tile):
    """What to visit for the keys first..last: tiles of the Tq queries, the first of which has index start."""
    P, W, floor = rule
    end = Tq if W is None or first < P else min(max(last + W - start, 0), Tq)
    hidden = (last < floor) | ((W == 0) & (first >= P))
    c = 0 if hidden else (end + tile - 1) // tile
    b = min(max(first - start, 0) // tile, c)
    d = c if first < floor else min(max(last - start + tile - 1, 0) // tile, c)
    e = c if W is None or last < P else min(max(first + W - start, 0) // tile, c)
    return 0, 0, b, d, max(d, e), c


def count_tiles(edge, ranges):
    """How many edge tiles there are in the ranges, or inner ones."""
    p, a, b, d, e, c = ranges
    return a - p + d - b + c - e if edge else p + e - d


def nth_tile(x, edge, ranges):
    """Tile number x of those."""
    p, a, b, d, e, c = ranges
    if edge:
        x = x + p
        x = x if x < a else x + b - a
        return x if x < d else x + e - d
    return x if x < p else x + d - p


# ------------------------------------------------------------------------------------------------------------
# Triton: the kernels
#
# Capitals are tensors in memory. One with strides is a pair (pointer, strides), a contiguous one its pointer.
# Q is a tuple of them: q, and q_prefix if there is one; DQ is likewise. DX is the gradient of X, LSE the
# log-sum-exp of a query's scores in base 2, DELTA the sum of OUT * DOUT, both (B, H, Tq). P is prefix_len and
# START q_start, both (B,). A tile has M queries and N keys; D is the size of a head, and PAD the power of two
# to which it is padded. `row` is where a tile of queries begins in q, `first` its index in the sequence.
#
# Statistics and sums are float32 whatever the inputs are. An invisible score is -inf and no large number in
# its place: rows may have scores of any size, and one that sees nothing gives 0. Offsets are 64 bits wide.
# Dots of float32 run in float32 ("ieee") and not in TF32, whose errors near 2e-2 nobody who asks for float32
# expects.

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:     # the kernels stay plain functions that nobody calls
    triton = None

    def jit(function=None, **options):
        return function or jit

    def constexpr(value):
        return value

FULL = 2**30  # the window that stands for None: longer than any sequence, and twice of it still fits 32 bits
LOG2E = constexpr(1.4426950408889634)
LENGTHS = ["Tq", "Tk", "W", "S"]    # no kernel is compiled again for one of these


def _compiled(function):
    """A plain function for kernels to call. Triton looks for its language in the module of a function, which
    for those of attention.py has to be this one."""
    return jit(types.FunctionType(function.__code__, globals(), function.__name__))


_visible, _key_tiles, _key_ranges, _query_ranges, _count_tiles, _nth_tile = map(
    _compiled, (visible, key_tiles, key_ranges, query_ranges, count_tiles, nth_tile))


@jit
def _rule(n, Q, prefix, W):
    """The rule for Q[n]."""
    if len(Q) == 1:
        return prefix, W, 0
    if n == 0:
        return 0, W, prefix
    return prefix, 0, 0


@jit
def _seen_in_tile(first, key, rule, M: constexpr, N: constexpr):
    """Which of the keys key..key+N-1 the queries first..first+M-1 see.  (M, N)"""
    P, W, floor = rule
    i = first + tl.arange(0, M)[:, None]
    j = key + tl.arange(0, N)[None, :]
    return _visible(i, j, P, W) & (j >= floor)


@jit
def _matrix(X, b, h, n):
    """X[b, h], which has n rows, as (pointer, row stride, column stride, n)."""
    pointer, strides = X
    pointer += b.to(tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    return pointer, strides[2], strides[3], n


@jit
def _pointers(matrix, row, ROWS: constexpr, D: constexpr, PAD: constexpr):
    """Pointers to ROWS rows of a matrix, and which of them exist.  (ROWS, PAD) both"""
    pointer, row_stride, column_stride, n = matrix
    r, d = tl.arange(0, ROWS)[:, None], tl.arange(0, PAD)[None, :]
    mask = r < n - row
    if D != PAD:
        mask = mask & (d < D)
    pointer += tl.cast(row, tl.int64) * row_stride
    return pointer + (r.to(tl.int64) * row_stride + d.to(tl.int64) * column_stride), mask


@jit
def _load(matrix, row, ROWS: constexpr, D: constexpr, PAD: constexpr):
    """Those rows, zeros where there are none.  (ROWS, PAD)"""
    pointers, mask = _pointers(matrix, row, ROWS, D, PAD)
    return tl.load(pointers, mask=mask, other=0.0)


@jit
def _store(matrix, row, x, ROWS: constexpr, D: constexpr, PAD: constexpr):
    pointers, mask = _pointers(matrix, row, ROWS, D, PAD)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@jit
def _products(a, b):
    """a b^T"""
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@jit
def _add_values(acc, top, total, s, v, scale):
    """A step of the online softmax, for scores s (M, N) and values v (N, PAD): acc (M, PAD) is the weighted
    sum of values so far, top (M,) the largest score in base 2, total (M,) the sum of weights. Source: arXiv
    2307.08691."""
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)     # nothing seen yet: -inf - -inf would be NaN
    p = tl.exp2(s * scale - safe[:, None])
    keep = tl.exp2(top - safe)                                  # brings the sums so far to the new scale
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, new_top, total * keep + tl.sum(p, 1)


@jit
def _query_tile(P, START, Tq, Tk, M: constexpr):
    """Which tile of queries this program has. The last tiles come first, which without a window have the most
    to do, and the heads that share keys come together."""
    h, b = tl.program_id(0), tl.program_id(1)
    row = (tl.num_programs(2) - 1 - tl.program_id(2)) * M
    first = row + tl.load(START + b).to(tl.int32)
    last = first + tl.minimum(M, Tq - row) - 1
    prefix = tl.minimum(tl.load(P + b), Tk).to(tl.int32)
    return b, h, row, first, last, prefix


@jit
def _statistics(b, h, row, H, Tq, M: constexpr):
    """Where those of a tile of queries are in LSE and DELTA, and which of them exist.  (M,) both"""
    rows = row + tl.arange(0, M)
    return (b * H + h).to(tl.int64) * Tq + rows, rows < Tq


@jit
def _visits(first, last, rule, N: constexpr):
    P, W, floor = rule
    prefix_end, window_start, window_end = _key_tiles(first, last, P, W, N)
    return _key_ranges(first, last, rule, N, prefix_end, window_start, window_end)


@jit(do_not_specialize=LENGTHS)
def _forward(Q, K, V, OUT, LSE, P, START, H, Hkv, Tq, Tk, W,
             M: constexpr, N: constexpr, D: constexpr, PAD: constexpr):
    """OUT and LSE of a tile of queries."""
    b, h, row, first, last, prefix = _query_tile(P, START, Tq, Tk, M)
    K = _matrix(K, b, h // (H // Hkv), Tk)
    V = _matrix(V, b, h // (H // Hkv), Tk)
    acc = tl.zeros((M, PAD), tl.float32)
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    for n in tl.static_range(len(Q)):
        q = _load(_matrix(Q[n], b, h, Tq), row, M, D, PAD)
        rule = _rule(n, Q, prefix, W)
        ranges = _visits(first, last, rule, N)
        for edge in tl.static_range(2):
            for x in range(_count_tiles(edge, ranges)):
                key = _nth_tile(x, edge, ranges) * N
                s = _products(q, _load(K, key, N, D, PAD))      # (M, N)
                if edge:
                    s = tl.where(_seen_in_tile(first, key, rule, M, N), s, float("-inf"))
                v = _load(V, key, N, D, PAD)
                acc, top, total = _add_values(acc, top, total, s, v, D ** -0.5 * LOG2E)

    sees_some, total = total > 0, tl.where(total > 0, total, 1.0)
    _store(_matrix(OUT, b, h, Tq), row, acc / total[:, None], M, D, PAD)
    # +inf for a row that sees nothing: the backward's exp2(score - LSE) is then 0
    lse = tl.where(sees_some, top + tl.log2(total), float("inf"))
    at, mask = _statistics(b, h, row, H, Tq, M)
    tl.store(LSE + at, lse, mask=mask)


@jit(do_not_specialize=LENGTHS)
def _backward_q(Q, K, V, OUT, DOUT, LSE, DELTA, DQ, P, START, H, Hkv, Tq, Tk, W,
                M: constexpr, N: constexpr, D: constexpr, PAD: constexpr):
    """DQ and DELTA of a tile of queries."""
    b, h, row, first, last, prefix = _query_tile(P, START, Tq, Tk, M)
    K = _matrix(K, b, h // (H // Hkv), Tk)
    V = _matrix(V, b, h // (H // Hkv), Tk)
    dout = _load(_matrix(DOUT, b, h, Tq), row, M, D, PAD)
    at, mask = _statistics(b, h, row, H, Tq, M)
    lse = tl.load(LSE + at, mask=mask, other=float("inf"))
    delta = tl.sum(dout.to(tl.float32) * _load(_matrix(OUT, b, h, Tq), row, M, D, PAD).to(tl.float32), 1)
    tl.store(DELTA + at, delta, mask=mask)
    for n in tl.static_range(len(Q)):
        q = _load(_matrix(Q[n], b, h, Tq), row, M, D, PAD)
        rule = _rule(n, Q, prefix, W)
        ranges = _visits(first, last, rule, N)
        dq = tl.zeros((M, PAD), tl.float32)
        for edge in tl.static_range(2):
            for x in range(_count_tiles(edge, ranges)):
                key = _nth_tile(x, edge, ranges) * N
                k = _load(K, key, N, D, PAD)
                v = _load(V, key, N, D, PAD)
                p = tl.exp2(_products(q, k) * (D ** -0.5 * LOG2E) - lse[:, None])       # (M, N)
                if edge:
                    p = tl.where(_seen_in_tile(first, key, rule, M, N), p, 0.0)
                p *= _products(dout, v) - delta[:, None]        # from here on the gradient of the scores
                dq = tl.dot(p.to(k.dtype), k, dq, input_precision="ieee")
        _store(_matrix(DQ[n], b, h, Tq), row, dq * D ** -0.5, M, D, PAD)


@jit(do_not_specialize=LENGTHS)
def _backward_kv(Q, K, V, DOUT, LSE, DELTA, DK, DV, P, START, H, Hkv, Tq, Tk, W,
                 M: constexpr, N: constexpr, D: constexpr, PAD: constexpr):
    """DK and DV of a tile of keys, from all queries that see it, of all heads that read it. The tiles of the
    prefix have the most to do and come first."""
    hkv, b, key = tl.program_id(0), tl.program_id(1), tl.program_id(2) * N
    start = tl.load(START + b).to(tl.int32)
    prefix = tl.minimum(tl.load(P + b), Tk).to(tl.int32)
    k = _load(_matrix(K, b, hkv, Tk), key, N, D, PAD)
    v = _load(_matrix(V, b, hkv, Tk), key, N, D, PAD)
    dk, dv = tl.zeros((N, PAD), tl.float32), tl.zeros((N, PAD), tl.float32)
    for n in tl.static_range(len(Q)):
        rule = _rule(n, Q, prefix, W)
        ranges = _query_ranges(key, key + N - 1, start, Tq, rule, M)
        for edge in tl.static_range(2):
            tiles = _count_tiles(edge, ranges)                  # for each head
            for x in range(tiles * (H // Hkv)):
                h = hkv * (H // Hkv) + x // tiles
                row = _nth_tile(x % tiles, edge, ranges) * M
                q = _load(_matrix(Q[n], b, h, Tq), row, M, D, PAD)
                dout = _load(_matrix(DOUT, b, h, Tq), row, M, D, PAD)
                at, mask = _statistics(b, h, row, H, Tq, M)
                lse = tl.load(LSE + at, mask=mask, other=float("inf"))      # rows beyond the end add nothing
                p = tl.exp2(_products(k, q) * (D ** -0.5 * LOG2E) - lse[None, :])       # (N, M)
                if edge:
                    p = tl.where(tl.trans(_seen_in_tile(start + row, key, rule, M, N)), p, 0.0)
                dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
                p *= _products(v, dout) - tl.load(DELTA + at, mask=mask, other=0.0)[None, :]
                dk = tl.dot(p.to(q.dtype), q, dk, input_precision="ieee")
    _store(_matrix(DK, b, hkv, Tk), key, dk * D ** -0.5, N, D, PAD)
    _store(_matrix(DV, b, hkv, Tk), key, dv, N, D, PAD)


@jit(do_not_specialize=LENGTHS)
def _decode(Q, K, V, PARTS, LSE, LENGTH, P, H, Hkv, S,
            M: constexpr, N: constexpr, D: constexpr, PAD: constexpr):
    """Attention of the query heads of one key head over one share of the valid slots: PARTS (B, H, shares, D)
    and LSE (B, H, shares). The heads are the rows of one tile, so that each slot is read once for all of
    them: Q[n] is (B, 1, H, D). Source: flash-decoding (Dao, Haziza, Massa and Sizov 2023)."""
    share, hkv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shares = tl.num_programs(0)
    group = H // Hkv
    h = hkv * group
    length = tl.minimum(tl.load(LENGTH + b), S).to(tl.int32)
    prefix = tl.minimum(tl.load(P + b), S).to(tl.int32)
    tiles = tl.cdiv(length, N)
    begin = share * tl.cdiv(tiles, shares)
    end = tl.minimum(begin + tl.cdiv(tiles, shares), tiles)
    K = _matrix(K, b, hkv, length)
    V = _matrix(V, b, hkv, length)
    q = _load(_matrix(Q[0], b, 0, h + group), h, M, D, PAD)
    if len(Q) == 2:
        q_prefix = _load(_matrix(Q[1], b, 0, h + group), h, M, D, PAD)
    acc = tl.zeros((M, PAD), tl.float32)
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    for t in range(begin, end):
        slot = t * N + tl.arange(0, N)[None, :]
        k = _load(K, t * N, N, D, PAD)
        s = _products(q, k)                                     # (M, N)
        if len(Q) == 2:
            s = tl.where(slot < prefix, _products(q_prefix, k), s)
        s = tl.where(slot < length, s, float("-inf"))
        v = _load(V, t * N, N, D, PAD)
        acc, top, total = _add_values(acc, top, total, s, v, D ** -0.5 * LOG2E)

    r, d = tl.arange(0, M), tl.arange(0, PAD)
    at = ((b * H + h + r) * shares + share).to(tl.int64)
    total = tl.where(total > 0, total, 1.0)                     # an empty share: its LSE stays -inf
    mask = (r[:, None] < group) & (d[None, :] < D)
    tl.store(PARTS + (at[:, None] * D + d[None, :]), acc / total[:, None], mask=mask)
    tl.store(LSE + at, top + tl.log2(total), mask=r < group)


@jit
def _merge(PARTS, LSE, OUT, D: constexpr, PAD: constexpr, SHARES: constexpr):
    """The shares of one head of one row of the batch, weighted by their log-sum-exp: OUT (B, H, 1, D)."""
    head, share, d = tl.program_id(0).to(tl.int64), tl.arange(0, SHARES), tl.arange(0, PAD)
    at = head * SHARES + share
    lse = tl.load(LSE + at)
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))        # all 0 for a row of length 0
    parts = tl.load(PARTS + (at[:, None] * D + d[None, :]), mask=d[None, :] < D, other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(OUT + (head * D + d), out.to(OUT.dtype.element_ty), mask=d < D)


# ------------------------------------------------------------------------------------------------------------
# Triton: launching

# (M, N, warps, stages) by the bytes of a padded row of D elements, which count twice in float32, whose dots
# need the registers; first on devices that give a program 200 KB of shared memory or more (H100, B200), then
# on the others. Nothing here depends on T: kernels tuned per length stall whenever a length is new. Of the
# tiles tried, these are the largest whose buffers fit and whose forward, in half precision at D of 64 and
# 128, stays in registers: tests/aot.py checks it.
TILES = {
    "forward": {
        128: ((128, 64, 8, 3), (128, 64, 8, 3)), 256: ((128, 64, 8, 3), (128, 64, 8, 2)),
        512: ((64, 64, 8, 2), (64, 32, 4, 2)), 1024: ((32, 16, 4, 2), (32, 16, 4, 1))},
    "backward_q": {
        128: ((128, 64, 8, 2), (128, 64, 8, 2)), 256: ((128, 64, 8, 2), (128, 32, 8, 2)),
        512: ((64, 32, 8, 2), (32, 32, 4, 1)), 1024: ((16, 16, 4, 1), (16, 16, 4, 1))},
    "backward_kv": {
        128: ((64, 128, 8, 2), (32, 128, 8, 2)), 256: ((32, 128, 8, 2), (32, 64, 8, 2)),
        512: ((32, 64, 8, 2), (32, 32, 4, 1)), 1024: ((16, 16, 4, 1), (16, 16, 4, 1))},
    "decode": {
        128: ((16, 64, 4, 3), (16, 64, 4, 3)), 256: ((16, 64, 4, 3), (16, 64, 4, 2)),
        512: ((16, 32, 4, 3), (16, 32, 4, 2)), 1024: ((16, 16, 4, 3), (16, 16, 4, 2))},
}
TILES["forward_two"] = TILES["forward"] | {256: ((128, 64, 8, 3), (64, 32, 4, 2))}      # with q_prefix


def tile_config(kernel, q):
    """The compile-time sizes of a kernel in TILES, as keyword arguments of its launch."""
    D = q.size(3)
    PAD = max(16, triton.next_power_of_2(D))
    row_bytes = PAD * q.element_size() * (2 if q.dtype == torch.float32 else 1)
    shared_memory, _ = _device_limits(q.device)
    large, small = TILES[kernel][min(max(row_bytes, 128), 1024)]
    M, N, warps, stages = large if shared_memory >= 200_000 else small
    return dict(M=M, N=N, D=D, PAD=PAD, num_warps=warps, num_stages=stages)


@functools.cache
def _device_limits(device):
    """The shared memory in bytes that a program may use, and the number of multiprocessors."""
    if device.type == "cpu":    # the interpreter has neither
        return 101_376, 4
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.multi_processor_count


def _strided(*tensors):
    """The tensors, but for those that are None, as kernels take them: pairs of pointer and strides."""
    return tuple((x, x.stride()) for x in tensors if x is not None)


def triton_attention(q, k, v, prefix_len, window, q_start, q_prefix=None):
    """As attention.dense_attention, by the kernels."""
    B = q.size(0)
    P = prefix_len.expand(B).contiguous()
    start = q_start.expand(B).contiguous()
    W = FULL if window is None else min(window, FULL)
    return TritonAttention.apply(q, k, v, P, W, start, q_prefix)


class TritonAttention(torch.autograd.Function):
    """Only inputs, output and log-sum-exp are kept for the backward."""

    @staticmethod
    def forward(ctx, q, k, v, P, W, start, q_prefix):
        B, H, Tq, D = q.shape
        Hkv, Tk = k.shape[1:3]
        out = torch.empty_like(q)
        lse = torch.empty(B, H, Tq, dtype=torch.float32, device=q.device)
        config = tile_config("forward" if q_prefix is None else "forward_two", q)
        with torch.cuda.device_of(q):
            _forward[H, B, triton.cdiv(Tq, config["M"])](
                _strided(q, q_prefix), *_strided(k, v, out), lse, P, start, H, Hkv, Tq, Tk, W, **config)
        ctx.save_for_backward(q, k, v, P, start, q_prefix, out, lse)
        ctx.window = W
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, P, start, q_prefix, out, lse = ctx.saved_tensors
        B, H, Tq, D = q.shape
        Hkv, Tk = k.shape[1:3]
        dq, dk, dv, delta = map(torch.empty_like, (q, k, v, lse))
        dq_prefix = None if q_prefix is None else torch.empty_like(q_prefix)
        queries = _strided(q, q_prefix)
        sizes = H, Hkv, Tq, Tk, ctx.window
        with torch.cuda.device_of(q):
            config = tile_config("backward_q", q)
            _backward_q[H, B, triton.cdiv(Tq, config["M"])](
                queries, *_strided(k, v, out, dout), lse, delta, _strided(dq, dq_prefix),
                P, start, *sizes, **config)
            config = tile_config("backward_kv", q)
            _backward_kv[Hkv, B, triton.cdiv(Tk, config["N"])](
                queries, *_strided(k, v, dout), lse, delta, *_strided(dk, dv), P, start, *sizes, **config)
        return dq, dk, dv, None, None, None, dq_prefix


def triton_decode(q, k_cache, v_cache, lengths, prefix_len, q_prefix=None):
    """As attention.decode_in_torch, by _decode and _merge. The grid depends on shapes only: nothing waits for
    the lengths, and a CUDA graph of it holds whatever they become."""
    B, H, _, D = q.shape
    Hkv, S = k_cache.shape[1:3]
    config = tile_config("decode", q)
    config["M"] = max(config["M"], triton.next_power_of_2(H // Hkv))
    # two programs for each multiprocessor, if there are enough tiles of slots
    _, multiprocessors = _device_limits(q.device)
    shares = min(2 * multiprocessors // (B * Hkv), triton.cdiv(S, config["N"]), 64)
    shares = triton.next_power_of_2(max(shares, 1))
    parts = torch.empty(B, H, shares, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, H, shares, dtype=torch.float32, device=q.device)
    out = torch.empty(B, H, 1, D, dtype=q.dtype, device=q.device)
    queries = [None if x is None else x.transpose(1, 2) for x in (q, q_prefix)]        # (B, 1, H, D)
    lengths, P = lengths.expand(B).contiguous(), prefix_len.expand(B).contiguous()
    with torch.cuda.device_of(q):
        _decode[shares, Hkv, B](
            _strided(*queries), *_strided(k_cache, v_cache), parts, lse, lengths, P, H, Hkv, S, **config)
        _merge[B * H,](parts, lse, out, D, config["PAD"], shares)
    return out
