"""The Triton kernels: their tile ranges as plain functions, their runs in the interpreter (triton_cases.py), what has no GPU or no
Triton, and, where there is a GPU, the compiled kernels themselves."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings, strategies as st

import attn_kernel
from attention import is_inner, key_tiles, visible
from attn_kernel import (
    count_tiles,
    decode_attention,
    flex_block_mask,
    key_ranges,
    nth_tile,
    prefix_sliding_attention,
    query_ranges,
)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
lengths, windows, tiles = st.integers(1, 90), st.none() | st.integers(1, 60), st.sampled_from([1, 4, 16, 32])


def run(*args, **env):
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, env=os.environ | env)


@pytest.mark.skipif(attn_kernel.triton is None, reason="needs Triton")
def test_kernels_in_the_interpreter():
    """More than 80 random shapes and the traps, in one process of their own. `pytest tests/triton_cases.py` shows each."""
    result = run("-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "tests/triton_cases.py", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


# ---------------------------------------------------------------------------------------------------------------------
# the tile ranges, against the predicate


def listed(ranges):
    """The tiles that a kernel visits without a mask, and with one."""
    return [[nth_tile(x, edge, ranges) for x in range(count_tiles(edge, ranges))] for edge in (0, 1)]


def rules(P, W):
    """Of the one pass without q_prefix, and of the two with it."""
    return (P, W, 0), (P, 0, 0), (0, W, P)


def seen(i, j, rule):
    P, W, floor = rule
    return bool(visible(i, j, P, W)) and j >= floor


@given(T=lengths, P=st.integers(0, 100), W=windows)
@settings(max_examples=50, deadline=None)
def test_two_queries_share_the_keys(T, P, W):
    """With q_prefix, each (query, key) pair is scored once, by the query that it belongs to."""
    _, of_q_prefix, of_q = rules(P, W)
    for i in range(T):
        for j in range(T):
            assert seen(i, j, of_q_prefix) == (visible(i, j, P, W) and j < P)
            assert seen(i, j, of_q) == (visible(i, j, P, W) and j >= P)


@given(T=lengths, P=st.integers(0, 100), W=windows, M=tiles, N=tiles)
@settings(max_examples=150, deadline=None)
def test_every_key_tile_once_and_a_mask_where_a_boundary_cuts(T, P, W, M, N):
    for first in range(0, T, M):
        last = min(first + M, T) - 1
        a, b, c = key_tiles(first, last, P, W, N)
        inner, edge = listed(key_ranges(first, last, (P, W, 0), N, a, b, c))
        assert sorted(inner + edge) == [*range(a), *range(b, c)]  # each once
        assert all(is_inner(first, last, t * N, P, W, N) for t in inner)
        # a prefix that ends inside the window's first tiles may leave a few inner tiles masked, no more than the window moves
        assert sum(is_inner(first, last, t * N, P, W, N) for t in edge) <= M // N + 1


@given(T=lengths, P=st.integers(0, 100), W=windows, M=tiles, N=tiles)
@settings(max_examples=100, deadline=None)
def test_every_key_tile_once_for_each_of_two_queries(T, P, W, M, N):
    for first in range(0, T, M):
        last = min(first + M, T) - 1
        visits = []
        for rule in rules(P, W)[1:]:
            ranges = key_ranges(first, last, rule, N, *key_tiles(first, last, rule[0], rule[1], N))
            inner, edge = listed(ranges)
            assert list(ranges) == sorted(ranges) and len({*inner, *edge}) == len(inner + edge)
            for t in range(-(-T // N)):
                pairs = [seen(i, j, rule) for i in range(first, last + 1) for j in range(t * N, t * N + N)]
                assert (t in inner + edge) >= any(pairs) and (t in inner) <= all(pairs)
            visits.append({*inner, *edge})
        assert all(t == P // N for t in visits[0] & visits[1])  # only the tile that P cuts is in both


@given(T=lengths, Tq=lengths, P=st.integers(0, 100), W=windows, M=tiles, N=tiles)
@settings(max_examples=150, deadline=None)
def test_every_query_tile_that_sees_a_key_once(T, Tq, P, W, M, N):
    Tq = min(Tq, T)
    start = T - Tq
    for first in range(0, T, N):
        last = first + N - 1  # the kernel's tile of keys may end behind the keys
        for rule in rules(P, W):
            ranges = query_ranges(first, last, start, Tq, rule, M)
            inner, edge = listed(ranges)
            lo, hi = ranges[2], ranges[5]
            assert list(ranges) == sorted(ranges) and hi <= -(-Tq // M) and sorted(inner + edge) == [*range(lo, hi)]
            for r in range(-(-Tq // M)):
                queries = range(start + r * M, start + min(r * M + M, Tq))
                pairs = [seen(i, j, rule) for i in queries for j in range(first, last + 1)]
                assert (lo <= r < hi) >= any(pairs) and (r in inner) <= all(pairs)
            if rule == (P, 0, 0) and first >= P or rule[2] > last:
                assert lo == hi  # the other of the two queries has these keys


# ---------------------------------------------------------------------------------------------------------------------
# choosing an implementation


def test_implementations_that_this_tensor_cannot_have():
    x = torch.zeros(1, 2, 4, 16)
    unknown = "'cuda' is not one of 'auto', 'triton'"
    for impl, message in (("triton", "CUDA tensors.* on cpu"), ("flex", "CUDA tensors, not cpu"), ("cuda", unknown)):
        with pytest.raises(ValueError, match=message):
            prefix_sliding_attention(x, x, x, 1, 2, impl=impl)
        with pytest.raises(ValueError, match=message if impl == "triton" else f"'{impl}' is not one of 'auto', 'triton', 'torch'"):
            decode_attention(x[:, :, :1], x, x, 1, impl=impl)


def test_without_triton():
    """The file is imported and computes, the kernels apart, where there is no Triton: on macOS and Windows."""
    code = """if True:
        import sys
        sys.modules["triton"] = None
        import torch, attn_kernel
        x = torch.randn(1, 2, 40, 16)
        y = [attn_kernel.prefix_sliding_attention(x, x, x, 3, 7, impl=impl) for impl in ("auto", "dense")]
        assert torch.allclose(*y, atol=1e-6) and attn_kernel.triton is None
        attn_kernel.prefix_sliding_attention(x, x, x, 3, 7, impl="triton")"""
    result = run("-c", code)
    assert "ValueError: impl='triton' wants Triton (here None)" in result.stderr


def test_the_predicate_of_flex_attention():
    q, k = torch.zeros(2, 4, 20, 16), torch.zeros(2, 2, 30, 16)
    P, start = torch.tensor([3, 12]), torch.tensor([10, 4])
    mask = flex_block_mask(q, k, P, 6, start).mask_mod
    for b in range(2):
        for i in range(20):
            for j in range(30):
                assert bool(mask(b, 0, i, j)) == bool(visible(i + start[b], j, P[b], 6))


# ---------------------------------------------------------------------------------------------------------------------
# with a GPU


@gpu
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize("T, P, W, two", [(257, [0, 40], 33, False), (1000, [130, 7], 200, True), (600, [700, 64], None, False)])
def test_compiled_kernels_equal_the_dense_reference(T, P, W, two, D, dtype, limit):
    g = torch.Generator("cuda").manual_seed(0)
    make = lambda H: torch.randn(2, T, H, D, generator=g, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()  # noqa: E731
    inputs = [make(6), make(2), make(2)] + [make(6)] * two
    exact, dout, P = [t.detach().double().requires_grad_() for t in inputs], make(6).detach(), torch.tensor(P, device="cuda")
    out = []
    for impl, (q, k, v, *rest) in (("triton", inputs), ("dense", exact)):
        y = prefix_sliding_attention(q, k, v, P, W, q_prefix=rest[0] if rest else None, impl=impl)
        out.append([y, *torch.autograd.grad(y, [q, k, v, *rest], dout.to(y.dtype))])
        valid = torch.tensor([T, 5], device="cuda")
        out[-1].append(decode_attention(q[:, :, -1:], k, v, valid, impl="triton" if impl == "triton" else "torch"))
    for got, want in zip(*out, strict=True):
        assert ((got.double() - want).abs().max() / want.abs().max()) < limit


@gpu
def test_decode_in_a_cuda_graph_follows_the_lengths():
    q, k = torch.randn(2, 8, 1, 64, device="cuda", dtype=torch.float16), torch.randn(2, 2, 700, 64, device="cuda", dtype=torch.float16)
    n = torch.tensor([700, 3], device="cuda")
    decode_attention(q, k, k, n)  # compiled outside of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode_attention(q, k, k, n)
    for values in ([1, 650], [0, 64]):
        n.copy_(torch.tensor(values))
        graph.replay()
        assert (y - decode_attention(q, k, k, n, impl="torch")).abs().max() < 5e-3


@gpu
def test_flex_attention_equals_the_dense_reference():
    q, k = torch.randn(2, 4, 300, 64, device="cuda"), torch.randn(2, 2, 300, 64, device="cuda")
    P = torch.tensor([5, 90], device="cuda")
    y = prefix_sliding_attention(q, k, k, P, 70, impl="flex")
    assert (y - prefix_sliding_attention(q, k, k, P, 70, impl="dense")).abs().max() < 2e-2  # TF32 dots
