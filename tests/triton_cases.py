"""The Triton kernels in Triton's interpreter, against the dense reference. A process of its own: test_triton.py runs

    TRITON_INTERPRET=1 python -m pytest tests/triton_cases.py

Only float32 and float16 here: the interpreter's bfloat16 dots are not to be trusted.
"""

import os
import random
import types

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("set TRITON_INTERPRET=1: the interpreter is chosen when attn_kernel is imported")

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter

import attn_kernel
from attention import key_tiles
from attn_kernel import count_tiles, decode_attention, key_ranges, prefix_sliding_attention, triton_attention


def patched_once_per_launch(real):
    """The interpreter patches triton.language again at every call of a helper, which takes most of its time. Once each will do."""
    seen = set()

    def patch(fn):
        if fn not in seen:
            seen.add(fn)
            scope = real(fn)
            return types.SimpleNamespace(restore=lambda: (seen.clear(), scope.restore()))

    return patch


interpreter._patch_lang = patched_once_per_launch(interpreter._patch_lang)
interpreter.GridExecutor._restore_args_dev = lambda *args: None  # CPU tensors are not copied, so nothing has to come back


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Small tiles, so that short sequences have many. A test may call it to set them."""

    def use(M, N):
        monkeypatch.setattr(
            attn_kernel,
            "tile_config",
            lambda kernel, q: dict(
                M=16 if kernel == "decode" else M,
                N=N,
                D=q.size(3),
                PAD=max(16, 1 << (q.size(3) - 1).bit_length()),
                num_warps=4,
                num_stages=2,
            ),
        )

    use(16, 16)
    return use


def tensors(seed, dtype, *shapes, strided=False):
    g = torch.Generator().manual_seed(seed)
    out = []
    for shape in shapes:
        x = torch.randn(shape, generator=g).to(dtype)
        if strided:  # heads as a model makes them, with a gap behind every row
            B, H, T, D = shape
            x = torch.cat([x.transpose(1, 2), torch.full((B, T, H, 3), float("nan"), dtype=dtype)], 3)[..., :D].transpose(1, 2)
        out.append(x.requires_grad_())
    return out


def close(got, want, dtype):
    limit = 2e-5 if dtype == torch.float32 else 6e-3
    error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1)
    assert got.isfinite().all() and error < limit, f"relative error {error:.1e}"


def draw(seed):
    """One random combination; the first ones are long, and every fourth is float16."""
    r = random.Random(seed)
    B, Hkv, group = r.choice([(1, 1, 1), (1, 1, 3), (1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1)])
    Tk = 200 if seed < 3 else r.choice([1, 15, 16, 17, 31, 33, 47, 48, 49, 63, 65, 96])
    Tq = Tk if r.random() < 0.6 else r.randint(1, Tk)
    return types.SimpleNamespace(
        B=B,
        H=Hkv * group,
        Hkv=Hkv,
        Tq=Tq,
        Tk=Tk,
        D=r.choice([16, 16, 64, 80, 24]),
        blocks=r.choice([(16, 16), (32, 16), (16, 32), (32, 32)]),
        P=[r.choice([0, r.randint(1, 60), Tk + r.randint(0, 9)]) for _ in range(B)],
        W=r.choice([None, 1, r.randint(2, 60), r.randint(2, 20)]),
        start=[r.randint(0, Tk - Tq) for _ in range(B)] if r.random() < 0.5 else None,
        two=r.random() < 0.4,
        strided=r.random() < 0.4,
        dtype=torch.float16 if seed % 4 == 3 else torch.float32,
    )


def name(seed):
    c = draw(seed)
    flags = "".join(text for text, on in (("-start", c.start), ("-two", c.two), ("-strided", c.strided)) if on)
    P, tile = ".".join(map(str, c.P)), "x".join(map(str, c.blocks))
    return f"{seed}-B{c.B}H{c.H}.{c.Hkv}-T{c.Tq}.{c.Tk}-D{c.D}-P{P}-W{c.W}-{tile}{flags}-{str(c.dtype)[6:]}"


@pytest.mark.parametrize("seed", range(84), ids=name)
def test_forward_gradients_and_decode_equal_the_dense_reference(seed, blocks):
    c = draw(seed)
    blocks(*c.blocks)
    q, q_prefix, dout, k, v = tensors(seed, c.dtype, *[(c.B, c.H, c.Tq, c.D)] * 3, *[(c.B, c.Hkv, c.Tk, c.D)] * 2, strided=c.strided)
    P, start = torch.tensor(c.P), None if c.start is None else torch.tensor(c.start)
    inputs = [q, k, v] + [q_prefix] * c.two
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out = {}
    for impl, (x, keys, values, *rest) in (("triton", inputs), ("dense", exact)):
        y = prefix_sliding_attention(x, keys, values, P, c.W, q_start=start, q_prefix=rest[0] if rest else None, impl=impl)
        out[impl] = y, *torch.autograd.grad(y, [x, keys, values, *rest], dout.detach().to(y.dtype))
    for got, want in zip(out["triton"], out["dense"], strict=True):
        close(got, want, c.dtype)

    lengths = torch.tensor([random.Random(seed + b).randint(0, c.Tk) for b in range(c.B)])
    prefix = dict(q_prefix=q_prefix[:, :, :1], prefix_len=P) if c.two else {}
    exact_prefix = dict(q_prefix=q_prefix[:, :, :1].double(), prefix_len=P) if c.two else {}
    got = decode_attention(q[:, :, :1], k, v, lengths, **prefix, impl="triton")
    close(got, decode_attention(q[:, :, :1].double(), k.double(), v.double(), lengths, **exact_prefix, impl="torch"), c.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# what is read


class Reads:
    """Counts the elements of a tensor that kernels load while it is in force: {program: count per element, (B, Hkv, Tk, D)}."""

    def __init__(self, x):
        self.x, self.counts = x, {}

    def __enter__(self):
        self.real = interpreter.interpreter_builder.create_masked_load
        interpreter.interpreter_builder.create_masked_load = self.load
        return self

    def __exit__(self, *error):
        interpreter.interpreter_builder.create_masked_load = self.real

    def load(self, pointers, mask, *rest):
        at = (pointers.data.astype(np.int64) - self.x.data_ptr()) // self.x.element_size()
        at = at[np.broadcast_to(mask.data.astype(bool), at.shape) & (at >= 0) & (at < self.x.numel())]
        program = tuple(interpreter.interpreter_builder.grid_idx)
        count = self.counts.setdefault(program, np.zeros(self.x.numel(), np.int64))
        np.add.at(count, at.reshape(-1), 1)
        return self.real(pointers, mask, *rest)


@pytest.mark.parametrize("P, W", [(0, 20), (21, 20), (40, 1), (50, None), (300, 9)])
def test_tiles_visited_equal_the_formula(P, W):
    """A program of the forward loads the key tiles that key_tiles names, each once, and how many does not depend on T: a kernel that
    visits a tile twice still gives right results where it is masked twice, and one that visits all is right but quadratic."""
    N, most = 16, {}
    for T in (96, 144, 192):
        q, k, v = tensors(1, torch.float32, *[(1, 1, T, 16)] * 3)
        with Reads(k) as reads:
            prefix_sliding_attention(q, k, v, P, W, impl="triton")
        for (*_, program), count in reads.counts.items():
            first = (T // N - 1 - program) * N  # the last tile of queries comes first
            a, b, c = key_tiles(first, first + N - 1, min(P, T), W, N)
            want = np.array([int(t < a or b <= t < c) for t in range(T // N)])
            assert (count.reshape(T // N, N * 16) == want[:, None]).all(), (T, program)
        most[T] = max(int(count.sum()) // (N * 16) for count in reads.counts.values())
    if W is not None and P < 96:
        assert most[96] == most[144] == most[192] <= -(-P // N) + -(-W // N) + 1


def test_inner_tiles_run_without_a_mask(monkeypatch):
    """The masks that a forward computes are those of its edge tiles: a kernel that masks everywhere would be right, and slow."""
    T, P, W, masks = 192, 21, 50, []
    visible = attn_kernel._visible
    monkeypatch.setattr(attn_kernel, "_visible", lambda *args: masks.append(1) or visible(*args))
    q, k, v = tensors(1, torch.float32, *[(1, 1, T, 16)] * 3)
    prefix_sliding_attention(q, k, v, P, W, impl="triton")
    edges = inner = 0
    for first in range(0, T, 16):
        ranges = key_ranges(first, first + 15, (P, W, 0), 16, *key_tiles(first, first + 15, P, W, 16))
        edges += count_tiles(1, ranges)
        inner += count_tiles(0, ranges)
    assert len(masks) == edges and inner > 20


@pytest.mark.parametrize("two", [False, True])
def test_decode_reads_each_valid_slot_once_and_nothing_else(two, monkeypatch):
    """Decoding is bound by memory: what it reads is what it costs. Behind the valid slots stand NaN, which would show too."""
    monkeypatch.setattr(attn_kernel, "_device_limits", lambda device: (101_376, 16))  # enough multiprocessors to split for
    lengths = torch.tensor([0, 1, 40, 71])
    q, q_prefix, k, v = tensors(2, torch.float32, *[(4, 6, 1, 16)] * 2, *[(4, 2, 71, 16)] * 2)
    with torch.no_grad():
        for b, n in enumerate(lengths):
            k[b, :, n:] = v[b, :, n:] = float("nan")
    prefix = dict(q_prefix=q_prefix, prefix_len=torch.tensor([3, 3, 25, 25])) if two else {}
    want = decode_attention(q, k.nan_to_num(), v.nan_to_num(), lengths, **prefix, impl="torch")
    for x in (k, v):
        with Reads(x) as reads:
            got = decode_attention(q, k, v, lengths, **prefix, impl="triton")
        total = sum(reads.counts.values()).reshape(4, 2, 71, 16)
        assert (total == (np.arange(71)[:, None] < lengths.numpy()[:, None, None, None])).all()
        assert sum(count.any() for count in reads.counts.values()) > 4 * 2  # shared among splits
    assert (got - want).abs().max() < 1e-5 and (got[0] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# traps


@pytest.mark.parametrize("two", [False, True])
def test_logits_far_below_minus_50000(two):
    """A finite stand-in for -inf (-5e4, -1e9 in float16) zeroes the rows whose true logits are lower than it."""
    q, k, v, q_prefix = tensors(3, torch.float32, *[(1, 1, 40, 16)] * 4)
    with torch.no_grad():
        q.copy_(q.abs() * 1e4), q_prefix.copy_(q_prefix.abs() * 1e4), k.copy_(-k.abs() * 1e4)
    second = q_prefix if two else None
    y = prefix_sliding_attention(q, k, v, 5, 9, q_prefix=second, impl="triton")
    want = prefix_sliding_attention(q.double(), k.double(), v.double(), 5, 9, q_prefix=second.double() if two else None, impl="dense")
    assert (y - want).abs().max() < 1e-3 and y.abs().amin(-1).min() > 0


def test_float16_scores_above_65504():
    q, k, v = tensors(4, torch.float16, *[(1, 2, 33, 64)] * 3)
    with torch.no_grad():
        q.mul_(200), k.mul_(200)
    assert (q.float() @ k.float().mT).abs().max() > 65504
    y = prefix_sliding_attention(q, k, v, 5, 9, impl="triton")
    close(y, prefix_sliding_attention(q.double(), k.double(), v.double(), 5, 9, impl="dense"), torch.float16)


def test_rows_that_see_nothing_give_zeros():
    """The checks keep such rows out where they can, which on a GPU would cost a synchronisation: queries before key 0. They must not
    turn into NaN, which a sum over the batch would spread to every weight."""
    q, k, v = tensors(5, torch.float32, (1, 2, 40, 16), (1, 1, 40, 16), (1, 1, 40, 16))
    P, start = torch.tensor([3]), torch.tensor([-20])
    y = triton_attention(q, k, v, P, 7, start)
    dq, dk, dv = torch.autograd.grad(y.square().sum(), [q, k, v])
    assert (y[:, :, :20] == 0).all() and (dq[:, :, :20] == 0).all() and y[:, :, 20:].abs().min() > 0
    rest = prefix_sliding_attention(q[:, :, 20:], k[:, :, :20], v[:, :, :20], 3, 7, impl="dense")
    assert (y[:, :, 20:] - rest).abs().max() < 1e-5
    for got, want in zip((dk, dv), torch.autograd.grad(rest.square().sum(), [k, v]), strict=True):
        assert (got - want).abs().max() < 1e-4


def test_offsets_beyond_32_bits():
    """Each stride fits in 32 bits, but 2 times the batch stride does not, and would wrap around to some other row. The rows stand in
    memory that is reserved and, but for them, never touched."""
    stride = 1_300_000_000
    far = torch.empty(2 * stride + 4096, dtype=torch.float16)
    k = far.as_strided((3, 1, 24, 16), (stride, 24 * 16, 16, 1))
    q, near, v = tensors(6, torch.float16, *[(3, 1, 24, 16)] * 3)
    k.copy_(near.detach())
    for call in (lambda k: prefix_sliding_attention(q, k, v, 3, 9, impl="triton"),
                 lambda k: decode_attention(q[:, :, :1], k, v, torch.tensor([24, 20, 9]), impl="triton")):  # fmt: skip
        assert torch.equal(call(k), call(near))


def test_wrong_inputs():
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match="float64"):
        prefix_sliding_attention(x.double(), x.double(), x.double(), 1, 2, impl="triton")
    wide = torch.zeros(1, 2, 4, 257)
    with pytest.raises(ValueError, match="D=257"):
        prefix_sliding_attention(wide, wide, wide, 1, 2, impl="triton")
