"""sliding_cache.py against a simulation that stores (position, key) pairs in a Python list."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings, strategies as st
from util import tiny_gpt

from engine import generate, uniform
from forks.random_eviction import RandomEvictionCache
from model import GPT, GPTConfig
from sliding_cache import SlidingCache, layer_windows
from tokenizer import load_tokenizer

CONFIG = GPTConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=16, head_dim=4)


def marked(positions, layer=0, dtype=torch.float32):
    """Keys (1, Hkv, T, D) that say where they come from: position in the first dimension, head and layer in the others."""
    k = torch.zeros(1, 2, len(positions), 4)
    k[0, :, :, 0] = torch.tensor(positions, dtype=torch.float32)
    k[0, 1, :, 1] = 1
    k[..., 2] = layer
    return k.to(dtype)


def feed(cache, n, row=0):
    """Append n tokens to a row, one pass. -> what attention gets, per layer: (keys, values, valid or start)"""
    first = cache.lengths[row]
    with torch.no_grad():
        plan = cache.advance(n, [row])
        assert plan.positions.tolist() == [list(range(first, first + n))]
        step = cache.append if plan.decoding else cache.extend
        k = [marked(plan.positions[0].tolist(), layer, cache.k[0].dtype) for layer in range(CONFIG.n_layer)]
        return [step(plan, layer, k[layer], -k[layer]) for layer in range(CONFIG.n_layer)]


def expected(n, P, W):
    return [p for p in range(n) if p < P or W is None or p >= n - W]


@pytest.mark.parametrize("P, W", [(0, 1), (0, 4), (3, 1), (3, 4), (5, 2), (40, 4)])
def test_positions_at_every_length_around_every_wrap(P, W):
    cache = SlidingCache(CONFIG, 1, P, W)
    for n in range(1, P + 4 * W + 3):
        for layer, (keys, values, valid) in enumerate(feed(cache, 1)):
            count = int(valid)
            assert sorted(keys[0, 0, :count, 0].int().tolist()) == expected(n, P, W) == cache.positions(0, layer)
            assert torch.equal(values, -keys) and (keys[0, 1, :count, 1] == 1).all() and (keys[0, :, :count, 2] == layer).all()
            assert keys[0, 0, : min(P, n), 0].tolist() == list(range(min(P, n)))  # the prefix lies in the slots below P


@given(P=st.integers(0, 9), W=st.integers(1, 9), chunks=st.lists(st.integers(1, 12), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_appends_of_any_size(P, W, chunks):
    """Trimming that assumes one new token lets the cache grow; writing before attending loses keys that the new tokens need."""
    cache, n = SlidingCache(CONFIG, 1, P, W), 0
    for size in chunks:
        nbytes, decoding = cache.nbytes, size == 1
        for keys, _, valid in feed(cache, size):
            if decoding:
                assert sorted(keys[0, 0, : int(valid), 0].int().tolist()) == expected(n + 1, P, W)
            else:
                assert keys[0, 0, :, 0].int().tolist() == expected(n, P, W) + list(range(n, n + size))
                assert int(valid) == len(expected(n, P, W))
        n += size
        assert cache.positions(0) == expected(n, P, W) and cache.nbytes == nbytes


@given(
    P=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    W=st.integers(1, 6),
    steps=st.lists(st.lists(st.integers(1, 7), min_size=3, max_size=3), min_size=1, max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_ragged_rows_equal_rows_alone(P, W, steps):
    together = SlidingCache(CONFIG, 3, torch.tensor(P), W)
    alone = [SlidingCache(CONFIG, 1, p, W) for p in P]
    for counts in steps:
        T = max(counts)
        with torch.no_grad():
            plan = together.advance(counts)
            k = torch.cat([marked(row) for row in plan.positions.tolist()])  # beyond counts[row]: padding, not to be stored
            step = together.append if plan.decoding else together.extend
            out = [step(plan, layer, k, -k) for layer in range(2)][0]
        for row in range(3):
            single = feed(alone[row], counts[row])[0]
            assert together.positions(row) == alone[row].positions(0)
            if T > 1 and counts[row] > 1:
                n = int(out[2][row]) + counts[row]
                assert torch.equal(out[0][row, :, :n, :2], single[0][0, :, :, :2]) and int(out[2][row]) == int(single[2])
            held = together.k[0][row, 0, :, 0].int().tolist()
            for slot, pos_held in enumerate(held[: min(together.lengths[row], P[row] + W)]):
                assert pos_held in together.positions(row), (slot, held)


def test_bytes_are_the_formula_and_never_change():
    cache = SlidingCache(CONFIG, 3, torch.tensor([5, 2, 0]), 7, dtype=torch.bfloat16)
    formula = 2 * CONFIG.n_layer * 3 * CONFIG.n_kv_head * (5 + 7) * CONFIG.head_dim * 2
    assert cache.nbytes == formula
    for n in (9, 1, 30, 1, 1):
        feed(cache, n, row=1)
        assert cache.nbytes == formula
    assert SlidingCache(CONFIG, 1, 3, [4, None], max_len=50).nbytes == 2 * 1 * 2 * 4 * 4 * ((3 + 4) + 50)


def test_memory_stays_where_it_is_for_fifty_thousand_tokens():
    model = tiny_gpt(dtype=torch.float32, n_layer=1)
    cache = SlidingCache(model.config, 1, 8, 64)
    token, process = torch.zeros(1, 1, dtype=torch.long), psutil.Process()
    with torch.no_grad():
        for n in range(50_000):
            model.features(token, cache=cache)
            if n == 8 + 64:
                gc.collect()
                before = process.memory_info().rss
    assert process.memory_info().rss - before < 8e6
    assert cache.positions(0) == [*range(8), *range(50_000 - 64, 50_000)]


def test_windows_that_differ_by_layer():
    cache = SlidingCache(CONFIG, 1, 2, [3, None], max_len=20)
    feed(cache, 6), feed(cache, 1), feed(cache, 3)
    assert cache.positions(0, 0) == [0, 1, 7, 8, 9] and cache.positions(0, 1) == list(range(10))
    with pytest.raises(ValueError, match="21 tokens.*20"):
        feed(cache, 11)
    assert cache.lengths == [10]  # a refused step leaves no trace


def test_rows_are_reset_copied_and_reused():
    cache = SlidingCache(CONFIG, 3, torch.tensor([4, 2, 0]), 3)
    feed(cache, 9, 0), feed(cache, 5, 1)
    cache.copy(0, 2)
    assert cache.positions(2) == cache.positions(0) == [0, 1, 2, 3, 6, 7, 8] and torch.equal(cache.k[1][2], cache.k[1][0])
    feed(cache, 1, 2)
    assert cache.positions(2) == [0, 1, 2, 3, 7, 8, 9] and cache.positions(0) == [0, 1, 2, 3, 6, 7, 8]
    assert cache.holds_first(0, 4) and not cache.holds_first(0, 5) and cache.holds_first(1, 5)
    cache.copy(0, 1, 4)
    assert cache.positions(1) == [0, 1, 2, 3] and feed(cache, 1, 1)[0][0][0, 0, :, 0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no longer holds its first 5"):
        cache.copy(0, 1, 5)
    cache.reset(0, 1)
    assert cache.positions(0) == [] and [feed(cache, 1, 0) for _ in range(9)] and cache.positions(0) == [0, 6, 7, 8]
    with pytest.raises(ValueError, match="prefixes of 0 to 4"):
        cache.reset(0, 5)


@pytest.mark.parametrize("P, W", [(0, 1), (2, 8), (3, 7), (0, 2)])
def test_random_eviction_keeps_prefix_and_newest_quarter(P, W):
    cache = RandomEvictionCache(CONFIG, 1, P, W)
    cache.streams[0] = 5
    for n in range(1, P + 12 * W):
        keys, _, valid = feed(cache, 1)[0]
        for head in range(2):
            held = sorted(keys[0, head, : int(valid), 0].int().tolist())
            assert held == cache.positions(0, head=head) and len(set(held)) == len(held) == min(n, P + W)
            n_new = W - max(3 * W // 4, 1) + 1  # the newest quarter, and the token just written
            assert held[: min(P, n)] == list(range(min(P, n))) and held[-min(n, n_new) :] == list(range(n - min(n, n_new), n))
    if W > 2:
        assert cache.positions(0, head=0) != expected(n, P, W) and cache.positions(0, head=0) != cache.positions(0, head=1)


def test_random_eviction_is_uniform_over_the_older_three_quarters():
    """W = 8: each of the 6 oldest goes with probability 1/6, whatever its slot; shared by the layers, drawn anew per stream."""
    counts = torch.zeros(8)
    cache = RandomEvictionCache(CONFIG, 400, 0, 8)
    cache.streams = torch.arange(400)
    with torch.no_grad():
        for n in range(9):
            plan, k = cache.advance(), marked([n]).expand(400, -1, -1, -1)
            for layer in range(2):
                cache.append(plan, layer, k, k)
    for row in range(400):
        for head in range(2):
            counts[next(p for p in range(8) if p not in cache.positions(row, head=head))] += 1
    assert counts[6:].sum() == 0 and (counts[:6] - 800 / 6).abs().max() < 5 * (800 / 6) ** 0.5
    assert torch.equal(cache.k[0], cache.k[1])


def test_uniform_is_a_hash_of_its_arguments():
    stream, index = torch.arange(200)[:, None], torch.arange(500)
    u = uniform(stream, index)
    assert u.shape == (200, 500) and u.min() >= 0 and u.max() < 1 and u.unique().numel() == u.numel()
    assert torch.equal(u[7, 9], uniform(torch.tensor(7), torch.tensor(9)))
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / u.numel()) ** 0.5
    assert torch.corrcoef(torch.stack([u[:-1].flatten(), u[1:].flatten()]))[0, 1].abs() < 0.02
    assert torch.corrcoef(torch.stack([u[:, :-1].flatten(), u[:, 1:].flatten()]))[0, 1].abs() < 0.02


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(window=0), "window=0"),
        (dict(window=-3), "window=-3"),
        (dict(window=[4]), "1 entries, the model 2"),
        (dict(window=None), "max_len"),
        (dict(prefix_len=-1), "prefix_len=-1"),
        (dict(window=10**12), r"cache needs 128000\.00 GB"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        SlidingCache(**(dict(config=CONFIG, batch_size=1, prefix_len=2, window=3) | change))


def test_the_models_own_windows_hold_where_they_are_narrower():
    config = GPTConfig(n_layer=3, windows=(None, 8, 8))
    assert layer_windows(config, None) == [None, 8, 8] and layer_windows(config, 4) == [4, 4, 4]
    assert layer_windows(config, [None, 16, 2]) == [None, 8, 2]


def test_a_reused_row_carries_nothing_over():
    """A sequence that had gone NaN left its keys in the slots beyond its successor's tokens: weight 0 times NaN is NaN."""
    model = tiny_gpt()
    for fresh in ("reset", "copy"):
        cache = SlidingCache(model.config, 2, torch.tensor([3, 3]), 5, dtype=torch.float64)
        with torch.no_grad():
            model.features(torch.zeros(1, 7, dtype=torch.long), cache=cache, rows=[1])  # attention reads as far as the longest row
            for t in (*cache.k, *cache.v):
                t[0] = float("nan")
            cache.lengths[0] = 30
            cache.length[0] = 30
            if fresh == "reset":
                cache.reset(0, 3)
                model.features(torch.zeros(1, 3, dtype=torch.long), cache=cache, rows=[0])
            else:
                cache.copy(1, 0, 3)
            x = model.features(torch.ones(2, 1, dtype=torch.long), cache=cache)
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("fresh", ["reset", "copy"])
def test_random_eviction_in_a_reused_row(fresh):
    """The table of what a slot holds begins anew with the row."""
    used, new = RandomEvictionCache(CONFIG, 2, 2, 4), RandomEvictionCache(CONFIG, 1, 2, 4)
    feed(used, 2, 1)
    for _ in range(15):
        feed(used, 1, 0)
    used.reset(0, 2) if fresh == "reset" else used.copy(1, 0, 2)
    assert fresh == "reset" and used.positions(0) == [] or used.positions(0) == [0, 1]
    used.streams[0] = new.streams[0] = 3
    if fresh == "reset":
        feed(used, 2, 0)
    feed(new, 2, 0)
    for _ in range(20):
        feed(used, 1, 0), feed(new, 1, 0)
        assert [used.positions(0, head=h) for h in range(2)] == [new.positions(0, head=h) for h in range(2)]


def test_a_row_moved_in_the_middle_goes_on_as_before():
    """Compaction copies a running row with its stream: the later evictions are those of the row where it was."""
    cache, alone = RandomEvictionCache(CONFIG, 2, 1, 4), RandomEvictionCache(CONFIG, 1, 1, 4)
    cache.streams[1] = alone.streams[0] = 7
    for n in range(25):
        if n == 12:
            cache.copy(1, 0)
        feed(cache, 1, 0 if n >= 12 else 1), feed(alone, 1, 0)
    assert cache.positions(0) == alone.positions(0) != list(range(21, 25))


def test_refused_steps_leave_no_trace():
    cache = RandomEvictionCache(CONFIG, 1, 1, 3)
    for _ in range(6):
        feed(cache, 1)
    before = [cache.positions(0), cache.lengths, cache.length.tolist()]
    with pytest.raises(ValueError, match="one token at a time"):
        feed(cache, 2)
    for wrong in (0, [1, 1], [0]):
        with pytest.raises(ValueError, match="at least one new token|one token at a time"):
            cache.advance(wrong)
    assert [cache.positions(0), cache.lengths, cache.length.tolist()] == before == [cache.positions(0), [6], [6]]


def test_each_slot_is_written_once():
    """One kept token too many would go to the slot of the newest, and which of the two stays is nobody's to say."""
    cache = SlidingCache(CONFIG, 2, torch.tensor([3, 0]), 4)
    with torch.no_grad():
        plan = cache.advance([17, 9])
    row, _, slot = plan.slots[4].target
    pairs = list(zip(row.tolist(), slot.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) == 7 + 4


def test_a_pass_with_gradients_only_reads():
    """As in Transformer-XL: the new tokens get gradients, the cache none. And such a pass may be repeated, as activation checkpointing
    does: it leaves the rows as they were."""
    model = tiny_gpt()
    cache = SlidingCache(model.config, 1, 2, 6, dtype=torch.float64)
    first, second = torch.randint(61, (2, 1, 9))
    with torch.no_grad():
        model.features(first, cache=cache)
        before = [t.clone() for t in (*cache.k, *cache.v)]
    for chunk in (second, second[:, :1]):                                             # one token is no decoding here
        x = model.features(chunk, cache=cache)
        x.square().sum().backward()
        assert x.equal(model.features(chunk, cache=cache)) and not cache.advance(1).decoding
    assert all(a.equal(b) for a, b in zip(before, (*cache.k, *cache.v), strict=True)) and cache.lengths == [9] == cache.length.tolist()
    assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if "k_proj" in name)


def test_random_eviction_from_the_command_line(tmp_path):
    """python -m forks.random_eviction adds a policy to a script, for that one call."""
    torch.manual_seed(0)
    GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, n_inner=32, tokenizer="bytes", eos_ids=(256,))).save_pretrained(tmp_path)
    arguments = ["sample.py", f"--init_from={tmp_path}", "--policy=random", "--device=cpu", "--chat=False", "--start=abc",
                 "--max_new_tokens=40", "--window=8"]
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-m", "forks.random_eviction", *arguments], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["policy"] == "random", done.stderr
    model = GPT.from_pretrained(tmp_path)
    want = generate(model, [list(b"abc")], 40, window=8, stop_ids=[256], seed=1337, cache_class=RandomEvictionCache)[0]
    text = load_tokenizer(tmp_path).decode([t for t in want.tokens if t != 256])
    assert text in done.stdout
    refused = subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True)
    assert refused.returncode == 2 and "policy='random'" in refused.stderr
