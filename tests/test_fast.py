"""fast/step.py against the plain step that it replaces: the same logits, the same cache, the same tokens; and counts of what it calls."""
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from util import tiny_gpt

import attn_kernel
import fast.step as fast
import model as model_module
from engine import generate
from fast.step import CompiledStep, GraphStep
from forks.random_eviction import RandomEvictionCache
from model import GPT
from sliding_cache import SlidingCache
from thinking import Thinking

SHAPES = dict(n_embd=64, head_dim=16, n_inner=96, n_head=4, n_kv_head=2)


def fast_gpt(dtype=torch.float32, **changes):
    return tiny_gpt(dtype=dtype, **SHAPES | changes)


def filled(model, rows, P, windows, lengths, cache_class=SlidingCache):
    """A cache whose rows have read so many random tokens each."""
    cache = cache_class(model.config, rows, torch.as_tensor(P), windows, max_len=400, dtype=model.lm_head.weight.dtype)
    piece = 400 if cache_class is SlidingCache else 1
    for row, n in enumerate(lengths):
        idx = torch.randint(model.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(row))
        with torch.no_grad():
            for a in range(0, n, piece):
                model.features(idx[:, a:a + piece], cache=cache, rows=[row])
    return cache


def compare(step_of, model, make_cache, rope, counts, tolerance):
    """Both steps on caches of their own, with counts[i] rows in step i; everything that they leave is compared."""
    ours, plain = make_cache(), make_cache()
    step = step_of(model, ours, rope)
    for i, n in enumerate(counts):
        idx = torch.randint(model.config.vocab_size, (n, 1), generator=torch.Generator().manual_seed(100 + i))
        with torch.no_grad():
            want = model.lm_head(model.features(idx, rope=rope, cache=plain, rows=slice(n))[:, 0])
        got = step(idx, slice(n))
        assert got.shape == want.shape and (got.double() - want.double()).abs().max() <= tolerance * max(1, want.abs().max())
        assert ours.lengths == plain.lengths and ours.length.equal(plain.length)
        for a, b in zip((*ours.k, *ours.v), (*plain.k, *plain.v), strict=True):
            assert (a.double() - b.double()).abs().max() <= tolerance * max(1, b.abs().max())


FAMILIES = {"llama": {}, "qwen2": dict(qkv_bias=True, tied=False), "qwen3": dict(qk_norm=True, n_kv_head=1),
            "odd sizes": dict(n_head=3, n_kv_head=3, head_dim=32, vocab_size=53, n_embd=80), "many heads": dict(n_head=8, n_kv_head=1),
            "yarn": dict(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, head_dim=64)}


@pytest.mark.parametrize("rope", ["continue", "reset"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_equals_plain(family, rope):
    """Rows before, at and far beyond their windows, a layer without one, and more or fewer rows from step to step."""
    model = fast_gpt(**FAMILIES[family])
    P, lengths = [3, 7, 0, 5, 9, 2, 1, 4, 6], [3, 15, 40, 12, 8, 60, 21, 33, 5]
    compare(CompiledStep, model, lambda: filled(model, 9, P, [8, None, 30], lengths), rope, [9, 8, 7, 5, 3, 2, 1, 9] * 2, 1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_compiled_equals_plain_property(data):
    rows = data.draw(st.integers(1, 5))
    P = data.draw(st.lists(st.integers(0, 20), min_size=rows, max_size=rows))
    windows = data.draw(st.lists(st.sampled_from([1, 2, 7, 16, 17, 600, None]), min_size=3, max_size=3))
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=rows, max_size=rows))
    model = fast_gpt()
    counts = data.draw(st.lists(st.integers(1, rows), min_size=1, max_size=6))
    compare(CompiledStep, model, lambda: filled(model, rows, P, windows, lengths), data.draw(st.sampled_from(["continue", "reset"])),
            counts, 2e-5)


def test_more_slots_than_a_task_takes():
    """Windows that are divided among several tasks, some of them empty, and a last one that is cut off."""
    model = fast_gpt(n_layer=1)
    for P, W, lengths in (([5, 300], 1400, [7, 390]), ([5, 600], 300, [7, 1300])):    # the second: a prefix of more than one task
        compare(CompiledStep, model, lambda P=P, W=W, n=lengths: filled(model, 2, P, W, n), "reset", [2] * 3, 1e-5)
        assert max(P) + W > fast.CHUNK  # or else this tests nothing


def test_scores_far_apart_and_far_below_zero():
    """Weights of exp(-1000), a largest score of -1000, gates of -1000."""
    model = fast_gpt()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.weight.mul_(100)
            block.mlp.gate_proj.weight.mul_(100)
    compare(CompiledStep, model, lambda: filled(model, 3, 4, 16, [40, 3, 9]), "continue", [3] * 8, 2e-3)
    cache = filled(model, 1, 1, 1, [1])                                               # one key, whose score may be anything
    compare(CompiledStep, model, lambda: filled(model, 4, 1, 1, [1, 2, 3, 4]), "continue", [4] * 8, 2e-3)
    assert cache.lengths == [1]


def test_several_threads_do_not_get_in_each_others_way():
    """In a process of its own: how many threads there are is decided at its start."""
    code = ("import sys; sys.path[:0] = ['.', 'tests']\nfrom test_fast import *\nmodel = fast_gpt(n_inner=512, vocab_size=500)\n"
            "for _ in range(10): compare(CompiledStep, model, lambda: filled(model, 5, 4, [16, 600, None], [40, 3, 9, 20, 300]), 'reset', "
            "[5, 3, 1, 5] * 3, 2e-5)\nprint(torch.get_num_threads())")
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | dict(OMP_NUM_THREADS="4"), text=True, capture_output=True,
                          cwd=Path(__file__).parent.parent)
    assert done.returncode == 0 and int(done.stdout) > 1, done.stderr[-2000:]         # at most as many as there are cores


def test_random_eviction_overwrites_the_same_slots():
    model = fast_gpt()
    for windows in (8, [8, None, 30]):
        compare(CompiledStep, model, lambda w=windows: filled(model, 2, [3, 4], w, [20, 5], RandomEvictionCache),
                "continue", [2] * 12, 1e-5)


def test_bfloat16_rounds_once_where_plain_rounds_at_every_step():
    """Judged by float32: the compiled step is no further from it than the plain one."""
    exact, model = fast_gpt(), fast_gpt().bfloat16()
    exact.load_state_dict(model.float().state_dict())
    model = model.bfloat16()
    caches = [filled(m, 3, 4, 16, [30, 10, 50]) for m in (model, model, exact)]
    step, errors = CompiledStep(model, caches[0]), [0.0, 0.0]
    for i in range(20):
        idx = torch.full((3, 1), i)
        with torch.no_grad():
            plain, want = (m.lm_head(m.features(idx, cache=c)[:, 0]) for m, c in ((model, caches[1]), (exact, caches[2])))
        for j, got in enumerate((step(idx), plain)):
            errors[j] += float((got.float() - want).abs().mean()) / 20
    assert 0 < errors[0] < 1.1 * errors[1] < 0.1


def test_int8_is_what_its_rounded_weights_say():
    model = fast_gpt()
    rounded = fast_gpt()
    rounded.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, p in rounded.named_parameters():
            if p.dim() == 2 and "embed" not in name and "lm_head" not in name:
                number, scale = fast.quantize(p)
                assert number.dtype == torch.int8 and number.abs().amax(1).eq(127).all()
                p.copy_(number * scale[:, None])
                assert (p - dict(model.named_parameters())[name]).abs().le(scale[:, None] * 0.501).all()
    number, scale = fast.quantize(model.lm_head.weight)
    rounded.lm_head.weight = torch.nn.Parameter(number * scale[:, None])
    ours, plain = (filled(rounded, 2, 4, 16, [20, 9]) for _ in range(2))
    for a, b in zip((*ours.k, *ours.v), (*plain.k, *plain.v), strict=True):
        a.copy_(b)
    step, idx = CompiledStep(model, ours, int8=True), torch.tensor([[5], [6]])
    with torch.no_grad():
        want = rounded.lm_head(rounded.features(idx, cache=plain)[:, 0])
    assert (step(idx) - want).abs().max() < 1e-4


def test_the_step_sees_an_update_of_the_weights():
    model = fast_gpt()
    cache = filled(model, 1, 4, 16, [20])
    step, idx = CompiledStep(model, cache), torch.tensor([[3]])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        plain = filled(model, 1, 4, 16, [20])
        for a, b in zip((*cache.k, *cache.v), (*plain.k, *plain.v), strict=True):
            b.copy_(a)
        assert torch.allclose(step(idx), model.lm_head(model.features(idx, cache=plain)[:, 0]), atol=1e-4)


@pytest.mark.parametrize("how", [{}, dict(rope="reset"), dict(prefix_len=0), dict(window=None), dict(cache_class=RandomEvictionCache),
                                 dict(cache_class=RandomEvictionCache, window=None), dict(temperature=0.0),
                                 dict(top_p=0.8, top_k=20)], ids=str)
def test_generate_draws_the_same_tokens(how):
    """Sequences of several lengths through fewer rows than there are of them, so that rows are refilled and moved."""
    model = fast_gpt()
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3], [7] * 9, [8], [9, 10, 11, 12]]
    how = dict(window=6, temperature=1.0, top_p=1.0, rows=3, stop_ids=[0, 1]) | how
    a, b = (generate(model, prompts, [40, 25, 40, 10, 60, 33], compile=compile, **how) for compile in (False, True))
    assert [c.tokens for c in a] == [c.tokens for c in b] and len({len(c.tokens) for c in a}) > 2
    for x, y in zip(a, b, strict=True):
        assert x.logprobs == pytest.approx(y.logprobs, abs=2e-4)
    assert generate(model, prompts[:1], 5, compile=True, choose=Thinking(end_id=2, maximum=2))[0].tokens[2] == 2


def test_subnormal_numbers_survive():
    """Libraries that gcc links with -ffast-math switch them off for everybody in the process."""
    model = fast_gpt()
    CompiledStep(model, filled(model, 1, 4, 16, [20]))(torch.tensor([[3]]))
    assert float(torch.tensor(1e-40) * 1.0) > 0 and 5e-324 / 1.0 > 0


def test_nan_weights_are_noticed():
    model = fast_gpt()
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
        bad = fast_gpt()
        bad.load_state_dict(model.state_dict())
        with torch.no_grad():
            bad.model.layers[1].get_submodule(name).weight[3] = math.nan
        with pytest.raises(ValueError, match="not finite"):
            generate(bad, [[1]], 5, compile=True)


# ---------------------------------------------------------------------------------------------------------------------
# the proof: whoever changes the model or the cache gets what they changed, or an error

def changed_forward(self, x, attend):
    """Attention.forward as it is in model.py, with a place for changes."""
    q, k, v = (self.heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
    if self.qk_norm:
        q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = CHANGE["now"](self, q, k, v)
    return self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))


CHANGE = {}


def value_residual(self, q, k, v):
    """The values of the first layer are added to those of the others; blocks are called in order."""
    if self.is_first:
        type(self).first_v = v
    return q, k, (v + type(self).first_v) / 2


def shifted(self, q, k, v):
    return q, k, v + 0.1 * v.std()


def in_attention(change):
    def patch(monkeypatch, model):
        monkeypatch.setitem(CHANGE, "now", change)
        monkeypatch.setattr(model_module.Attention, "forward", changed_forward)
        for i, block in enumerate(model.model.layers):
            block.self_attn.is_first = i == 0
    return patch


def in_class(name, forward):
    return lambda monkeypatch, model: monkeypatch.setattr(getattr(model_module, name), "forward", forward)


def parallel(self, x, attend):
    return x + self.self_attn(self.input_layernorm(x), attend) + self.mlp(self.post_attention_layernorm(x))


CHANGES = {
    "value residual": in_attention(value_residual),
    "scale": in_attention(lambda self, q, k, v: (q * 1.5, k, v)),
    "bias": in_attention(shifted),
    "MLP": in_class("MLP", lambda self, x: self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))),
    "norm": in_class("RMSNorm", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight + 0.2)),
    "parallel block": in_class("Block", parallel),
    "capped logits": lambda monkeypatch, model: model.lm_head.register_forward_hook(lambda m, x, y: 2 * torch.tanh(y / 2)),
}


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused(change, numbers, monkeypatch):
    """Log-probabilities were off by up to 4 nats, without a word, when Attention.forward had been changed."""
    model = fast_gpt(dtype=torch.bfloat16 if numbers == "bfloat16" else torch.float32)
    cache = SlidingCache(model.config, 1, 3, 50, dtype=model.lm_head.weight.dtype)
    CompiledStep(model, cache, int8=numbers == "int8")
    CHANGES[change](monkeypatch, model)
    with pytest.raises(ValueError, match="are off by .* of their standard deviation.*compile=False"):
        CompiledStep(model, cache, int8=numbers == "int8")


def test_a_change_that_changes_nothing_is_taken(monkeypatch):
    model = fast_gpt(qk_norm=True)
    in_attention(lambda self, q, k, v: (q, k, v))(monkeypatch, model)
    compare(CompiledStep, model, lambda: filled(model, 2, [3, 4], [8, None, 30], [20, 5]), "reset", [2] * 4, 1e-5)


@pytest.mark.parametrize("name, parameter", [
    ("self_attn.o_proj.bias", torch.zeros(64)), ("mlp.down_proj.weight", torch.zeros(64, 80)), ("mlp.up_proj.weight", None),
    ("input_layernorm.weight", torch.ones(64, dtype=torch.bfloat16)), ("self_attn.mix", torch.zeros(1))])
def test_parameters_that_c_does_not_know_are_refused_by_name(name, parameter):
    """It would read beyond the end of one that is smaller."""
    model = fast_gpt()
    module, _, attribute = name.rpartition(".")
    parameter = parameter if parameter is None else torch.nn.Parameter(parameter)
    model.model.layers[1].get_submodule(module).register_parameter(attribute, parameter)
    with pytest.raises(ValueError, match=f"model.layers.1.{name} is .* in this model"):
        CompiledStep(model, SlidingCache(model.config, 1, 3, 8))


class KeepsTheOldest(SlidingCache):
    """Another rule of eviction, in the one method that says it: the newest of a full window goes."""
    def next_slot(self, plan, window):
        slot = super().next_slot(plan, window)
        return slot if window is None else torch.minimum(plan.positions, plan.prefix_len[:, None] + window - 1)


class ForgetsTheOldest(SlidingCache):
    """And in one that C does not call: the slots behind the prefix hold nothing once the window is full."""
    def append(self, plan, layer, k, v):
        keys, values, n = super().append(plan, layer, k, v)
        window = self.windows[layer]
        return keys, values, n if window is None else torch.where(plan.end > plan.prefix_len + window, plan.prefix_len + 1, n)


@pytest.mark.parametrize("rope", ["continue", "reset"])
def test_another_rule_of_eviction_is_right_or_refused(rope):
    model = fast_gpt()
    compare(CompiledStep, model, lambda: filled(model, 2, [3, 4], [8, None, 30], [20, 5], KeepsTheOldest), rope, [2] * 9, 1e-5)
    with pytest.raises(ValueError, match="compile=False"):
        CompiledStep(model, filled(model, 2, [3, 4], [8, None, 30], [20, 5], ForgetsTheOldest), rope)


def test_generate_refuses_or_is_right(monkeypatch):
    model, how = fast_gpt(), dict(window=4, temperature=1.0)
    plain = generate(model, [[1, 2, 3]], 30, **how)[0].tokens
    assert generate(model, [[1, 2, 3]], 30, compile=True, **how)[0].tokens == plain
    CHANGES["value residual"](monkeypatch, model)
    assert generate(model, [[1, 2, 3]], 30, **how)[0].tokens != plain
    for fast_one in (dict(compile=True), dict(int8=True)):
        with pytest.raises(ValueError, match="compile=False"):
            generate(model, [[1, 2, 3]], 30, **fast_one, **how)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_unchanged_models_pass(data):
    """Weights of ordinary and of wild sizes, in every dtype: rounding alone refuses nothing."""
    family = FAMILIES[data.draw(st.sampled_from(["llama", "qwen3", "odd sizes"]))]
    dtype, int8 = data.draw(st.sampled_from([(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]))
    model, std = fast_gpt(**family, n_layer=data.draw(st.integers(1, 6))), data.draw(st.sampled_from([0.02, 0.1, 0.25, 0.5]))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=std) if p.dim() == 2 else p.uniform_(0.5, 1.5)
    model = model.to(dtype)
    windows = data.draw(st.lists(st.sampled_from([1, 2, 3, 600, None]), min_size=model.config.n_layer, max_size=model.config.n_layer))
    cache = SlidingCache(model.config, 1, 3, windows, max_len=50, dtype=dtype)
    CompiledStep(model, cache, data.draw(st.sampled_from(["continue", "reset"])), int8)


# ---------------------------------------------------------------------------------------------------------------------
# counts: what a step costs does not depend on how long the trace is

class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.calls.append(str(f))
        return f(*args, **kwargs or {})


@pytest.mark.parametrize("step_of", [None, CompiledStep])
def test_calls_and_bytes_are_the_same_at_every_position(step_of):
    """The PyTorch operators of a step, in order, at positions that are 100,000 tokens apart; no tensor is larger at the end."""
    model = fast_gpt()
    cache = filled(model, 2, [3, 4], 8, [20, 30])
    step = step_of(model, cache) if step_of else lambda idx: model.lm_head(model.features(idx, cache=cache)[:, 0])
    seen, addresses = [], [t.data_ptr() for t in (*cache.k, *cache.v)]
    for position in (40, 41, 1000, 100_000):
        cache.length.fill_(position)
        cache.lengths = [position] * 2
        with Count() as count, torch.no_grad():
            step(torch.tensor([[1], [2]]))
        seen.append(count.calls)
    assert seen[0] == seen[1] == seen[2] == seen[3] and len(seen[0]) > 10
    assert step_of is None or len(seen[0]) < 60
    assert addresses == [t.data_ptr() for t in (*cache.k, *cache.v)]


def test_one_compilation_for_all_shapes_that_differ_in_rows_window_and_prefix(monkeypatch):
    calls = []
    run = fast.subprocess.run
    monkeypatch.setattr(fast.subprocess, "run", lambda *a, **k: calls.append(a) or run(*a, **k))
    fast.compiled_step.cache_clear()
    for rows, P, W, rope in ((1, 3, 8, "continue"), (3, 0, 5, "reset"), (2, 9, None, "continue")):
        model = fast_gpt()
        step = CompiledStep(model, filled(model, rows, P, W, [6] * rows), rope)
        for n in range(1, rows + 1):
            step(torch.zeros(n, 1, dtype=torch.long), slice(n))
    assert len(calls) == 1


# ---------------------------------------------------------------------------------------------------------------------
# the CUDA graph, without CUDA: a step is traced once and replayed, so that whatever Python had put into it would be old

class TracedStep(GraphStep):
    def capture(self, step):
        state = self.cache.state
        before = [t.clone() for t in state]
        graph = make_fx(step)()                                                       # which runs the step, other than CUDA's
        for t, old in zip(state, before, strict=True):
            t.copy_(old)

        def replay():
            self.logits = graph()
        return replay, None

    def __call__(self, idx, rows=slice(None)):
        super().__call__(idx, rows)
        return self.logits


@pytest.mark.parametrize("rope", ["continue", "reset"])
@pytest.mark.parametrize("more", [{}, dict(cache_class=RandomEvictionCache)], ids=["oldest", "random"])
def test_a_recorded_step_can_be_replayed_at_any_position(rope, more, monkeypatch):
    # this one looks at values only where that is no synchronisation, on a CPU
    monkeypatch.setattr(attn_kernel, "_per_row", lambda value, q, *rest: torch.as_tensor(value).reshape(-1))
    model = fast_gpt(dtype=torch.float64)
    windows = 8 if more else [8, None, 30]
    compare(TracedStep, model, lambda: filled(model, 3, [3, 7, 0], windows, [3, 15, 40], **more), rope, [3, 3, 2, 3, 2, 1, 3] * 4, 1e-9)


def test_a_recorded_step_that_would_repeat_old_numbers_is_refused(monkeypatch):
    """What Python computes is recorded as a constant."""
    monkeypatch.setattr(attn_kernel, "_per_row", lambda value, q, *rest: torch.as_tensor(value).reshape(-1))
    model, calls = fast_gpt(), []

    def counted(self, q, k, v):
        calls.append(1)
        return q * (1 + len(calls) % 7), k, v
    cache = SlidingCache(model.config, 1, 3, 8)
    TracedStep(model, cache)
    in_attention(value_residual)(monkeypatch, model)                                  # this one it records
    TracedStep(model, cache)
    in_attention(counted)(monkeypatch, model)
    with pytest.raises(ValueError, match="TracedStep are off by .*compile=False"):
        TracedStep(model, cache)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rope", ["continue", "reset"])
def test_graph_equals_plain_on_a_gpu(rope):
    model = fast_gpt().cuda()
    a, b = (generate(model, [[1, 2, 3], [4, 5], [6]], [40, 25, 60], window=6, rope=rope, rows=2, compile=compile)
            for compile in (False, True))
    assert [c.tokens for c in a] == [c.tokens for c in b]


# ---------------------------------------------------------------------------------------------------------------------
# real weights, wrong inputs

@pytest.fixture(scope="module")
def smollm2():
    return GPT.from_pretrained("data/smollm2")


def perplexity(model, step, cache, ids):
    logprobs = []
    for a, b in zip(ids, ids[1:], strict=False):
        logits = step(torch.tensor([[a]])) if step else model.lm_head(model.features(torch.tensor([[a]]), cache=cache)[:, 0])
        logprobs.append(float(logits.float().log_softmax(-1)[0, b]))
    return math.exp(-sum(logprobs) / len(logprobs)), logprobs


def test_smollm2_on_a_text(smollm2):
    """float32 to 1e-4 in every log-probability; bfloat16 and int8 by perplexity, within 1%."""
    from tokenizer import load_tokenizer
    with open("README.md", encoding="utf-8") as file:
        ids = load_tokenizer("data/smollm2").encode(file.read())[:200]
    with torch.no_grad():
        caches = [SlidingCache(smollm2.config, 1, 20, 64) for _ in range(3)]
        plain, want = perplexity(smollm2, None, caches[0], ids)
        compiled, got = perplexity(smollm2, CompiledStep(smollm2, caches[1]), caches[1], ids)
        int8, _ = perplexity(smollm2, CompiledStep(smollm2, caches[2], int8=True), caches[2], ids)
        half = GPT.from_pretrained("data/smollm2", dtype=torch.bfloat16)
        cache = SlidingCache(half.config, 1, 20, 64, dtype=torch.bfloat16)
        bfloat16, _ = perplexity(half, CompiledStep(half, cache), cache, ids)
    assert max(abs(a - b) for a, b in zip(want, got, strict=True)) < 1e-4
    assert int8 == pytest.approx(plain, rel=0.01) and bfloat16 == pytest.approx(plain, rel=0.01)


def test_bad_input_gets_one_line(monkeypatch):
    model = fast_gpt()
    cache = SlidingCache(model.config, 2, 3, 8)
    for wrong, says in ((fast_gpt(n_embd=40), "n_embd=40"), (fast_gpt(head_dim=8, n_inner=24), "head_dim=8, n_inner=24"),
                        (fast_gpt(dtype=torch.float64), "float64")):
        with pytest.raises(ValueError, match=says):
            CompiledStep(wrong, SlidingCache(wrong.config, 1, 3, 8))
    with pytest.raises(ValueError, match="the cache is torch.bfloat16, the model torch.float32"):
        CompiledStep(model, SlidingCache(model.config, 1, 3, 8, dtype=torch.bfloat16))
    for rows in ([0], slice(1, 2), slice(2)):
        with pytest.raises(ValueError, match="first so many rows"):
            CompiledStep(model, cache)(torch.zeros(1, 1, dtype=torch.long), rows)
    for compiler in ("no-such-compiler", "false", "true", '"x'):
        monkeypatch.setenv("CC", compiler)
        fast.compiled_step.cache_clear()
        with pytest.raises(ValueError, match=f"compile=True needs a C compiler.*{compiler}"):
            generate(model, [[1]], 3, compile=True)
    monkeypatch.setenv("CC", " ")                                                    # as good as none
    fast.compiled_step.cache_clear()
    torch.set_default_dtype(torch.float64)                                            # is no business of C's
    try:
        assert len(generate(model, [[1]], 3, compile=True)[0].tokens) == 3
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(type(model.lm_head.weight), "device", torch.device("meta"), raising=False)
    with pytest.raises(ValueError, match="compile=True is for a CPU or CUDA, not for meta"):
        fast.fast_step(model, cache, "continue")
