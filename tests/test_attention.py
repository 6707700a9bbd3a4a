"""attention.py: the mask by hand, every path against loops in float64, gradients, and the tile ranges."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from hypothesis import given, settings, strategies as st
from util import naive_attention

import attention
from attention import is_inner, key_tiles, visible
from attn_kernel import decode_attention, prefix_sliding_attention


def mask(T, P, W):
    return [[bool(visible(i, j, P, W)) for j in range(T)] for i in range(T)]


def test_mask_by_hand():
    assert [sum(row) for row in mask(6, 0, 4)] == [1, 2, 3, 4, 4, 4]  # the window includes the current token
    assert [sum(row) for row in mask(8, 2, 3)] == [1, 2, 3, 4, 5, 5, 5, 5]  # steady state: P + W
    assert mask(5, 0, 1) == [[i == j for j in range(5)] for i in range(5)]
    assert mask(5, 9, 1) == mask(5, 0, None) == [[j <= i for j in range(5)] for i in range(5)]  # P beyond T is full attention


def random_inputs(seed, B, H, Hkv, Tq, Tk, D, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, h, t, D, generator=g, dtype=dtype) * 1.5 for h, t in ((H, Tq), (Hkv, Tk), (Hkv, Tk), (H, Tq))]


CASES = [  # B, H, Hkv, Tq, Tk, D, P, W, q_start, q_prefix
    (1, 2, 1, 17, 17, 8, 3, 5, None, False),
    (2, 6, 2, 33, 33, 16, [0, 9], 4, None, True),
    (1, 4, 4, 1, 40, 8, 0, 7, None, False),
    (1, 2, 2, 2, 30, 8, 4, 6, None, True),
    (2, 2, 1, 5, 30, 10, [40, 2], 1, [3, 21], True),
    (2, 4, 2, 20, 64, 8, [7, 1], None, [44, 0], False),
    (1, 2, 1, 65, 65, 8, 0, 1, None, False),
    (1, 3, 3, 63, 63, 4, 100, 3, None, True),
    (3, 2, 2, 1, 1, 2, 0, 1, None, False),
]


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("impl", ["dense", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_paths_equal_loops(case, impl, tile, monkeypatch):
    B, H, Hkv, Tq, Tk, D, P, W, start, with_prefix = case
    monkeypatch.setattr(attention, "TILE", tile)
    q, k, v, q_prefix = random_inputs(1, B, H, Hkv, Tq, Tk, D)
    q_prefix = q_prefix if with_prefix else None
    P = torch.tensor(P) if isinstance(P, list) else P
    start = torch.tensor(start) if isinstance(start, list) else start
    y = prefix_sliding_attention(q, k, v, P, W, q_start=start, q_prefix=q_prefix, impl=impl)
    assert (y - naive_attention(q, k, v, P, W, start, q_prefix)).abs().max() < 1e-12


@pytest.mark.parametrize("T", [1, 15, 17, 63, 65, 130])
def test_odd_lengths(T, monkeypatch):
    monkeypatch.setattr(attention, "TILE", 16)
    q, k, v, q_prefix = random_inputs(T, 1, 4, 2, T, T, 8)
    for P, W in ((0, 1), (5, 16), (T + 3, 2), (0, 40), (3, None)):
        y = prefix_sliding_attention(q, k, v, P, W, q_prefix=q_prefix, impl="torch")
        assert (y - prefix_sliding_attention(q, k, v, P, W, q_prefix=q_prefix, impl="dense")).abs().max() < 1e-12


def test_gradients_equal_those_of_the_dense_mask(monkeypatch):
    """A backward under another mask than the forward passes every forward test: prefix keys collect from all later queries."""
    monkeypatch.setattr(attention, "TILE", 16)
    for P, W, start in ((torch.tensor([4, 0]), 5, None), (torch.tensor([30, 7]), 3, torch.tensor([20, 8])), (2, None, None)):
        inputs = [t.requires_grad_() for t in random_inputs(3, 2, 4, 2, 50, 70, 6)]
        q, k, v, q_prefix = inputs
        grads = [
            torch.autograd.grad((prefix_sliding_attention(q, k, v, P, W, q_start=start, q_prefix=q_prefix, impl=impl) ** 3).sum(), inputs)
            for impl in ("torch", "dense")
        ]
        for a, b in zip(*grads, strict=True):
            assert (a - b).abs().max() < 1e-10 and b.abs().max() > 1e-3


def test_gradients_by_finite_differences(monkeypatch):
    monkeypatch.setattr(attention, "TILE", 4)
    inputs = [t.requires_grad_() for t in random_inputs(5, 1, 2, 1, 9, 9, 4)]
    assert torch.autograd.gradcheck(lambda q, k, v, qp: prefix_sliding_attention(q, k, v, 2, 3, q_prefix=qp, impl="torch"), inputs)


def test_strided_views_give_what_copies_give():
    """(B, T, H, D).transpose(1, 2) is how a model makes its heads."""
    q, k, v, _ = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in random_inputs(6, 2, 4, 2, 20, 20, 8))
    assert not q.is_contiguous()
    for impl in ("torch", "dense"):
        copies = prefix_sliding_attention(q.contiguous(), k.contiguous(), v.contiguous(), 3, 6, impl=impl)
        assert (prefix_sliding_attention(q, k, v, 3, 6, impl=impl) - copies).abs().max() < 1e-12


def test_full_window_is_sdpa():
    q, k, v, _ = random_inputs(7, 2, 4, 4, 200, 200, 16, torch.float32)
    y = prefix_sliding_attention(q, k, v, 0, None)
    assert (y - F.scaled_dot_product_attention(q, k, v, is_causal=True)).abs().max() < 1e-5


def test_large_negative_logits_and_float16_range():
    """A finite stand-in for -inf (say -5e4) zeroes rows whose true logits are lower; scores above 65504 overflow float16."""
    q, k, v, _ = random_inputs(8, 1, 1, 1, 12, 12, 4)
    q = q.abs() * 1e4
    k = -k.abs() * 1e4
    y = prefix_sliding_attention(q, k, v, 1, 4, impl="torch")
    assert (y - naive_attention(q, k, v, 1, 4)).abs().max() < 1e-9 and y.abs().min() > 0
    half = [t.half() for t in (q.clamp(max=300), k.clamp(min=-300), v)]
    assert torch.isfinite(prefix_sliding_attention(*half, 1, 4, impl="torch")).all()


@given(T=st.integers(1, 90), P=st.integers(0, 100), W=st.none() | st.integers(1, 60), tile=st.sampled_from([1, 4, 16, 32]))
@settings(max_examples=150, deadline=None)
def test_tile_ranges(T, P, W, tile):
    """Every visible key lies in a visited tile, no tile comes twice, no visited tile is invisible, and inner tiles need no mask."""
    n = -(-T // tile)
    for first in range(0, T, tile):
        last = min(first + tile, T) - 1
        a, b, c = key_tiles(first, last, P, W, tile)
        assert 0 <= a <= b <= c <= n
        for t in range(n):
            seen = [bool(visible(i, j, P, W)) for i in range(first, last + 1) for j in range(t * tile, min(t * tile + tile, T))]
            assert any(seen) == (t < a or b <= t < c)
            if (t + 1) * tile <= T:
                assert all(seen) == is_inner(first, last, t * tile, P, W, tile)


def test_tiles_per_query_do_not_grow_with_length(monkeypatch):
    """Time linear in T, as a count: the (query, key) pairs that the block-sparse path computes."""
    sizes = []
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda i, j, *rest: sizes.append(i.size(1) * len(j)) or attend(i, j, *rest))
    pairs = {}
    for T in (1024, 2048, 4096):
        sizes.clear()
        q = torch.zeros(1, 1, T, 2)
        prefix_sliding_attention(q, q, q, 40, 100, impl="torch")
        pairs[T] = sum(sizes)
    assert pairs[4096] - pairs[2048] == 2 * (pairs[2048] - pairs[1024])
    assert pairs[4096] <= 4096 * (40 + 100 + 3 * attention.TILE)


def test_nothing_quadratic_is_kept_for_the_backward():
    """What autograd keeps is the inputs: a (T, T) mask or the weights of every tile would show here."""
    kept = []
    q, k, v, _ = (t.requires_grad_() for t in random_inputs(9, 1, 2, 2, 700, 700, 8))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        prefix_sliding_attention(q, k, v, 10, 50, impl="torch")
    assert sum(kept) <= 3 * q.numel() + 10


@pytest.mark.parametrize("with_prefix", [False, True])
def test_decode_equals_loops_over_valid_slots(with_prefix):
    B, H, Hkv, S, D = 4, 6, 2, 23, 8
    q, k, v, q_prefix = random_inputs(10, B, H, Hkv, 1, S, D)
    lengths, P = torch.tensor([0, 1, 9, 23]), torch.tensor([3, 0, 4, 23])
    y = decode_attention(q, k, v, lengths, prefix_len=P, q_prefix=q_prefix if with_prefix else None)
    assert torch.equal(y[0], torch.zeros(H, 1, D, dtype=torch.float64))
    for b in range(1, B):
        n = int(lengths[b])
        want = naive_attention(
            *(t[b : b + 1] for t in (q, k[:, :, :n], v[:, :, :n])), int(P[b]), None, q_prefix=q_prefix[b : b + 1] if with_prefix else None
        )
        assert (y[b] - want[0]).abs().max() < 1e-12


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=torch.zeros(1, 3, 5, 8), v=torch.zeros(1, 3, 5, 8)), "multiple of Hkv"),
        (dict(v=torch.zeros(1, 2, 6, 8)), r"v \(1, 2, 6, 8\)"),
        (dict(k=torch.zeros(1, 2, 5, 4), v=torch.zeros(1, 2, 5, 4)), r"k \(1, 2, 5, 4\)"),
        (dict(window=0), "window=0"),
        (dict(window=2.5), "window=2.5"),
        (dict(window=True), "window=True"),
        (dict(prefix_len=torch.tensor([1, 2])), "prefix_len"),
        (dict(prefix_len=-1), "prefix_len"),
        (dict(prefix_len=torch.tensor([1.5])), "prefix_len"),
        (dict(q_start=1), "q_start"),
        (dict(q_start=-1), "q_start"),
        (dict(q_prefix=torch.zeros(1, 4, 4, 8)), "q_prefix"),
        (dict(impl="fast"), "impl='fast'"),
        (dict(q=torch.zeros(1, 4, 5, 8).long()), "torch.int64"),
        (dict(k=torch.zeros(1, 2, 5, 8).double(), v=torch.zeros(1, 2, 5, 8)), "float64"),
        (dict(q=torch.zeros(4, 5, 8)), r"q \(4, 5, 8\)"),
    ],
)
def test_wrong_inputs_are_named(change, message):
    good = dict(q=torch.zeros(1, 4, 5, 8), k=torch.zeros(1, 2, 5, 8), v=torch.zeros(1, 2, 5, 8), prefix_len=1, window=2)
    with pytest.raises(ValueError, match=message):
        prefix_sliding_attention(**(good | change))


def test_wrong_decode_inputs_are_named():
    q, k = torch.zeros(2, 4, 1, 8), torch.zeros(2, 2, 5, 8)
    for args, message in (
        ((q, k, k, 6), "lengths"),
        ((q, k, k, torch.tensor([1, 2, 3])), "lengths"),
        ((torch.zeros(2, 4, 2, 8), k, k, 1), "one query"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(*args)
    with pytest.raises(ValueError, match="prefix_len"):
        decode_attention(q, k, k, 1, q_prefix=q)


def test_map_on_the_command_line():
    def call(*args):
        return subprocess.run([sys.executable, "attention.py", *args], cwd=ROOT, capture_output=True, text=True)

    out = call("40", "8", "12").stdout
    assert "  20 ########.############..................." in out and "  32 #.+++" in out and "14 of 25 tiles visited" in out
    for args in ((), ("40", "8"), ("40", "8", "0"), ("40", "x", "1"), ("-1", "2", "3")):
        result = call(*args)
        assert result.returncode == 2 and result.stderr.startswith("usage: ") and result.stderr.count("\n") == 1


def test_decode_scores_beyond_the_range_of_float16():
    q, k = torch.full((1, 2, 1, 8), 200.0).half(), torch.full((1, 1, 4, 8), 200.0).half()
    k[:, :, 3] *= -1
    v = torch.arange(4.0).half().view(1, 1, 4, 1).expand(1, 1, 4, 8).contiguous()
    assert torch.equal(decode_attention(q, k, v, 4), torch.ones(1, 2, 1, 8).half())  # 320,000 each, and -320,000: the mean of 0, 1, 2
