"""engine.py and the cache inside the model: decoding equals one masked forward, rows do not feel each other, and what stops a row."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from util import tiny_gpt

from engine import generate, mix, sample, uniform
from model import rotate
from sliding_cache import SlidingCache
from thinking import Thinking


def tokens(seed, *shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def through_the_cache(model, idx, prompt_lens, P, window, rope):
    """Logits (B, T, V) of right-padded prompts in one ragged pass, then of all rows token by token; and which of them are real."""
    B, T = idx.shape
    cache = SlidingCache(model.config, B, P, window, max_len=T, dtype=model.lm_head.weight.dtype)
    nbytes = cache.nbytes
    out, real = torch.zeros(B, T, model.config.vocab_size, dtype=model.lm_head.weight.dtype), torch.zeros(B, T, dtype=torch.bool)
    x = model.lm_head(model.features(idx[:, : max(prompt_lens)], rope=rope, cache=cache, n_new=prompt_lens))
    for row, n in enumerate(prompt_lens):
        out[row, :n], real[row, :n] = x[row, :n], True
    at = list(prompt_lens)
    while max(at) < T:
        step = torch.stack([idx[row, n] for row, n in enumerate(at)])[:, None]
        x = model.lm_head(model.features(step, rope=rope, cache=cache))[:, 0]
        for row, n in enumerate(at):
            out[row, n], real[row, n] = x[row], True
        at = [n + 1 for n in at]
    assert cache.nbytes == nbytes
    return out, real


DECODE = {  # prompt lengths, P, window (per layer), T
    "P longer than W": ([20, 20], [20, 20], 4, 60),
    "P shorter than W": ([5, 9], [5, 9], 12, 130),
    "P shorter than the prompt": ([30, 17], [4, 0], 7, 75),
    "P = 0": ([9, 1], [0, 0], 6, 66),
    "W = 1": ([9, 4], [9, 2], 1, 30),
    "P beyond T": ([5, 5], [99, 0], 3, 40),
    "P beyond the prompt": ([2, 6], [11, 8], 5, 60),
    "windows by layer": ([8, 13], [8, 3], [3, 10, None], 50),
    "no window": ([8, 13], [8, 3], None, 50),
}


@pytest.mark.parametrize("rope", ["continue", "reset"])
@pytest.mark.parametrize("case", DECODE)
@torch.no_grad()
def test_decoding_equals_one_masked_forward(case, rope):
    prompt_lens, P, window, T = DECODE[case]
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        model, idx = tiny_gpt(dtype=dtype), tokens(1, len(P), T)
        got, real = through_the_cache(model, idx, prompt_lens, torch.tensor(P), window, rope)
        want = model(idx, torch.tensor(P), window, rope=rope)
        assert (got - want)[real].abs().max() < tolerance and real.sum() >= T + T - abs(prompt_lens[0] - prompt_lens[1])
        if case == "P shorter than the prompt":  # the comparison can tell masks and positions apart
            assert (got - model(idx, torch.tensor(P) + 1, window, rope=rope))[real].abs().max() > 1e-3
            assert (got - model(idx, torch.tensor(P), window, rope={"reset": "continue", "continue": "reset"}[rope]))[
                real
            ].abs().max() > 1e-3


@torch.no_grad()
def test_chunks_equal_one_forward():
    """A long input in pieces of 7: an append of several tokens must see all the past keys, also those that it pushes out."""
    model, idx = tiny_gpt(), tokens(2, 2, 63)
    for rope in ("continue", "reset"):
        cache = SlidingCache(model.config, 2, torch.tensor([5, 0]), 9, dtype=torch.float64)
        x = torch.cat([model.features(chunk, rope=rope, cache=cache) for chunk in idx.split(7, 1)], 1)
        assert (x - model.features(idx, torch.tensor([5, 0]), 9, rope=rope)).abs().max() < 1e-9


@torch.no_grad()
def test_reencoding_the_last_tokens_is_not_the_rolled_cache():
    """Prefix + last W raw tokens, encoded anew, have lost what their own windows held: equal at one layer only."""
    for n_layer, equal in ((1, True), (3, False)):
        model, idx = tiny_gpt(n_layer=n_layer), tokens(3, 1, 40)
        kept = torch.cat([torch.arange(5), torch.arange(30, 40)])
        again = model(idx[:, kept], 5, 10, positions=kept[None])[0, -1]
        assert ((model(idx, 5, 10)[0, -1] - again).abs().max() < 1e-9) == equal


@torch.no_grad()
def test_reset_is_rerotation_by_slot():
    """StreamingLLM's definition: keys unrotated in the cache, and at every step all of them rotated by their place in it."""
    model, idx, P, W = tiny_gpt(n_layer=2), tokens(4, 1, 45), 4, 6
    config = model.config

    def turn(x, positions):
        a = torch.tensor(positions)[:, None].float() * model.freqs
        return rotate(x, a.cos().double(), a.sin().double())

    held = [[] for _ in range(config.n_layer)]
    for t in range(45):
        x = model.model.embed_tokens(idx[:, t : t + 1])
        for block, cache in zip(model.model.layers, held, strict=True):

            def attend(q, k, v, cache=cache):
                cache.append((k, v))
                if len(cache) > P + W:
                    del cache[P]
                n = len(cache)
                keys = turn(torch.cat([k for k, _ in cache], 2), list(range(n))).repeat_interleave(2, 1)
                values = torch.cat([v for _, v in cache], 2).repeat_interleave(2, 1)
                scores = turn(q, [n - 1]) @ keys.transpose(-1, -2) / config.head_dim**0.5
                return scores.softmax(-1) @ values

            x = block(x, attend)
        logits = model.lm_head(model.model.norm(x))[0, 0]
        assert (logits - model(idx[:, : t + 1], P, W, rope="reset")[0, -1]).abs().max() < 1e-4, t  # angles are float32
    assert (logits - model(idx, P, W)[0, -1]).abs().max() > 1e-2


class CacheReads(TorchDispatchMode):
    """Counts the operations that compute with the keys of a cache, views apart."""

    def __init__(self, cache):
        super().__init__()
        self.storages, self.names = {k.untyped_storage().data_ptr() for k in cache.k}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        if not func.is_view and any(t.untyped_storage().data_ptr() in self.storages for t in tensors):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_reset_makes_no_extra_pass_over_the_cache():
    model = tiny_gpt()
    names = {}
    for rope in ("continue", "reset"):
        cache = SlidingCache(model.config, 1, 3, 5, dtype=torch.float64)
        model.features(tokens(5, 1, 20), rope=rope, cache=cache)
        with CacheReads(cache) as reads:
            model.features(tokens(6, 1, 1), rope=rope, cache=cache)
        names[rope] = reads.names
    assert names["reset"] == names["continue"] and sum("mm" in name for name in names["reset"]) == model.config.n_layer


# ---------------------------------------------------------------------------------------------------------------------
# generate

PROMPTS = [tokens(seed, n).tolist() for seed, n in ((10, 5), (11, 9), (12, 1), (13, 14), (14, 5), (15, 3))]


def naive(model, prompt, n, P, window, rope="continue"):
    idx = list(prompt)
    for _ in range(n):
        idx.append(int(model(torch.tensor([idx]), P, window, rope=rope)[0, -1].argmax()))
    return idx[len(prompt) :]


@pytest.mark.parametrize(
    "rope, window, prefix_len", [("continue", 4, None), ("reset", 4, None), ("continue", 6, 2), ("reset", 3, 0), ("continue", None, None)]
)
@torch.no_grad()
def test_greedy_equals_the_naive_loop(rope, window, prefix_len):
    model = tiny_gpt()
    for rows in (1, 2, 99):
        for prompt, done in zip(
            PROMPTS, generate(model, PROMPTS, 25, window=window, rope=rope, prefix_len=prefix_len, temperature=0, rows=rows), strict=True
        ):
            assert done.tokens == naive(model, prompt, 25, len(prompt) if prefix_len is None else prefix_len, window, rope)
            assert done.prompt == prompt and done.finish_reason == "length" and done.sampled == [True] * 25


@pytest.mark.parametrize("evict", ["oldest", "random"])
@pytest.mark.parametrize("rope", ["continue", "reset"])
def test_a_row_alone_beside_others_and_admitted_late(rope, evict):
    model, lengths = tiny_gpt(), [30, 5, 22, 41, 1, 17]
    how = dict(window=5, rope=rope, temperature=1.0, top_p=0.9, top_k=20)
    if evict == "random":
        how["cache_class"] = pytest.importorskip("forks.random_eviction").RandomEvictionCache
    together = generate(model, PROMPTS, lengths, seed=[7] * 6, **how)
    assert [len(c.tokens) for c in together] == lengths
    assert [c.tokens for c in generate(model, PROMPTS, lengths, seed=[7] * 6, rows=2, **how)] == [c.tokens for c in together]
    for prompt, n, c in zip(PROMPTS, lengths, together, strict=True):
        alone = generate(model, [prompt], n, seed=7, **how)[0]
        assert alone.tokens == c.tokens and max(abs(a - b) for a, b in zip(alone.logprobs, c.logprobs, strict=True)) < 1e-9
    a, b = generate(model, [PROMPTS[0]] * 2, 30, seed=7, **how)
    assert a.tokens == together[0].tokens != b.tokens  # prompt i has the stream (seed, i)
    assert generate(model, [PROMPTS[0]], 30, seed=8, **how)[0].tokens != a.tokens


@torch.no_grad()
def test_logprobs_are_those_of_the_untruncated_distribution():
    model = tiny_gpt()
    for temperature, ban in ((0.7, 0), (0, 0), (1.0, 30)):
        c = generate(model, [PROMPTS[1]], 30, window=4, temperature=temperature, top_k=5, top_p=0.5, min_new_tokens=ban, stop_ids=[3])[0]
        logits = model(torch.tensor([c.prompt + c.tokens]), len(c.prompt), 4)[0, len(c.prompt) - 1 : -1]
        want = (logits / (temperature or 1)).log_softmax(-1)[torch.arange(len(c.tokens)), c.tokens]
        assert (torch.tensor(c.logprobs) - want).abs().max() < 1e-6 and (len(c.tokens) == 30 or c.tokens[-1] == 3)


def test_identical_prompts_are_prefilled_once():
    model, stats = tiny_gpt(), {}
    group = [PROMPTS[3]] * 5 + [PROMPTS[1]] * 5
    lengths = [3, 30, 12, 9, 17, 2, 28, 8, 11, 5]
    how = dict(window=4, temperature=1.0, seed=list(range(10)))
    for rows in (1, 2, 3, 10):
        done = generate(model, group, lengths, rows=rows, stats=stats, **how)
        assert stats["prefills"] == 2 and stats["rows"] == rows
        for prompt, n, seed, c in zip(group, lengths, range(10), done, strict=True):
            assert c.tokens == generate(model, [prompt], n, window=4, temperature=1.0, seed=seed)[0].tokens
    generate(model, [PROMPTS[3]] * 4, 20, rows=1, window=4, prefix_len=2, stats=stats)
    assert stats["prefills"] == 4  # without it in the prefix, the prompt slid away


def test_siblings_with_different_limits_keep_the_same_prefix():
    """A prefix longer than the prompt was once capped at each row's own length, and then copied from a sibling with a shorter one."""
    model, how = tiny_gpt(), dict(prefix_len=40, window=4, rows=1, temperature=1.0)
    for limits in ([3, 60], [60, 3]):
        done = generate(model, [PROMPTS[0]] * 2, limits, seed=[1, 2], **how)
        for n, seed, c in zip(limits, (1, 2), done, strict=True):
            assert c.tokens == generate(model, [PROMPTS[0]], 60, seed=seed, **how)[0].tokens[:n]


def test_each_prompt_may_have_a_prefix_of_its_own():
    """Two rows of the same prompt with different prefixes are no siblings: neither may be copied from the other."""
    model, prefixes, how = tiny_gpt(), [2, 9, 2, 30], dict(window=4, temperature=1.0)
    for rows in (1, 4):
        done = generate(model, [PROMPTS[3]] * 4, 30, prefix_len=prefixes, seed=[5] * 4, rows=rows, **how)
        for P, c in zip(prefixes, done, strict=True):
            assert c.tokens == generate(model, [PROMPTS[3]], 30, prefix_len=P, seed=[5], **how)[0].tokens
        assert done[0].tokens == done[2].tokens and len({tuple(c.tokens) for c in done}) == 3


def test_a_tiny_temperature_is_the_limit_of_small_ones():
    """Logits divided by 1e-40 were infinite, their log-probabilities NaN."""
    model = tiny_gpt(dtype=torch.float32)
    for top_p in (0.95, 1.0):
        c = generate(model, [PROMPTS[1]], 20, window=4, temperature=1e-40, top_p=top_p)[0]
        assert c.tokens == generate(model, [PROMPTS[1]], 20, window=4, temperature=0)[0].tokens and c.logprobs == [0.0] * 20


def test_no_step_is_spent_on_finished_rows(monkeypatch):
    model, decoded = tiny_gpt(), []
    features = model.features
    monkeypatch.setattr(model, "features", lambda idx, **kwargs: decoded.append(idx.numel()) or features(idx, **kwargs))
    lengths = [30, 5, 22, 41, 1, 17]
    generate(model, PROMPTS, lengths, rows=3, window=4)
    assert sum(decoded) == sum(len(p) for p in PROMPTS) + sum(n - 1 for n in lengths)  # prompts once, then a pass per token but the last


def test_cache_bytes_and_rows():
    model, stats = tiny_gpt(dtype=torch.float32), {}
    generate(model, PROMPTS, 40, window=6, rows=3, stats=stats)
    assert stats["cache_bytes"] == 2 * 3 * 3 * 2 * (14 + 6) * 8 * 4 and stats["decode_steps"] > 0
    generate(model, PROMPTS, 2, window=10**9, stats=stats)
    assert stats["cache_bytes"] == 2 * 3 * 6 * 2 * (14 + 2) * 8 * 4  # no window needs more than what comes behind the prompt
    with pytest.raises(ValueError, match=r"cache needs \d+\.\d\d GB \(1 rows"):
        generate(model, [[1]], 10**12, window=None)
    with pytest.raises(ValueError, match="cache needs"):
        generate(model, [[1]], 10**12, window=10**11)


def test_stop_ids_and_min_new_tokens():
    model = tiny_gpt()
    free = generate(model, [PROMPTS[0]], 200, window=5, temperature=1.0)[0].tokens
    stop = free[20]
    first = free.index(stop)
    c = generate(model, [PROMPTS[0]], 200, window=5, temperature=1.0, stop_ids=[stop, 61])[0]
    assert c.tokens == free[: first + 1] and c.finish_reason == "stop"
    c = generate(model, [PROMPTS[0]], 200, window=5, temperature=1.0, stop_ids=[stop], min_new_tokens=first + 30)[0]
    assert stop not in c.tokens[: first + 30] and all(c.sampled)
    assert generate(model, [PROMPTS[0]], 200, window=5, temperature=1.0, stop_ids=[])[0].finish_reason == "length"


def test_stop_strings_span_tokens():
    """Stop "ab", tokens "xa", "bc": the end lies inside the second token."""
    model, text = tiny_gpt(), {i: s for i, s in enumerate(["xa", "bc", "y", "b", "a", "é"] * 11)}

    def decode(ids):
        return "".join(text[i] for i in ids)

    free = generate(model, [PROMPTS[0]], 300, window=5, temperature=1.0, seed=2)[0].tokens
    c = generate(model, [PROMPTS[0]], 300, window=5, temperature=1.0, seed=2, stop_strings="ab", decode=decode)[0]
    assert c.finish_reason == "stop" and "ab" in decode(c.tokens)
    for stop in ("ab", "xabc", "ay", "éb"):
        c = generate(model, [PROMPTS[0]], 300, window=5, temperature=1.0, seed=2, stop_strings=["none of it", stop], decode=decode)[0]
        n = next(n for n in range(1, 301) if stop in decode(free[:n]))
        assert c.tokens == free[:n] and c.finish_reason == "stop" and n > 1


def test_on_token_is_called_once_per_token():
    calls = []
    done = generate(tiny_gpt(), PROMPTS, 12, rows=2, window=3, on_token=lambda i, token: calls.append((i, token)))
    for i, c in enumerate(done):
        assert [token for j, token in calls if j == i] == c.tokens


def test_padding_of_the_embedding_is_never_drawn():
    model = tiny_gpt()
    free = generate(model, PROMPTS, 50, temperature=2.0, top_p=1.0)
    assert max(t for c in free for t in c.tokens) >= 20
    assert max(t for c in generate(model, PROMPTS, 50, temperature=2.0, top_p=1.0, n_vocab=20) for t in c.tokens) < 20
    assert max(t for c in generate(model, PROMPTS, 50, temperature=0, n_vocab=20) for t in c.tokens) < 20


BEGIN, END, WAIT = 59, 60, (7, 8)


def thinking_part(c):
    """Tokens between the first BEGIN of prompt and completion and the END behind it, or the end."""
    everything = c.prompt + c.tokens
    everything = everything[everything.index(BEGIN) + 1 :]
    return everything[: everything.index(END)] if END in everything else everything


def test_thinking_budget():
    model, prompt = tiny_gpt(), PROMPTS[0] + [BEGIN]
    how = dict(window=6, temperature=1.5, top_p=1.0)
    for seed in range(15):
        free = generate(model, [prompt], 80, seed=seed, **how)[0]
        c = generate(model, [prompt], 80, seed=seed, choose=Thinking(END, BEGIN, maximum=10), **how)[0]
        assert len(thinking_part(c)) <= 10 and c.tokens[: len(thinking_part(free))][:10] == free.tokens[: len(thinking_part(free))][:10]
        if len(thinking_part(free)) > 10:
            assert c.tokens[10] == END and c.sampled[:11] == [True] * 10 + [False]
        c = generate(model, [prompt], 80, seed=seed, choose=Thinking(END, BEGIN, minimum=40, wait_ids=WAIT), **how)[0]
        part = thinking_part(c)
        forced = [i for i, s in enumerate(c.sampled) if not s]
        assert len(part) >= 40 and [c.tokens[i] for i in forced] == list(WAIT) * (len(forced) // 2)
        assert bool(forced) == (len(thinking_part(free)) < 40)
        unlimited = generate(model, [prompt], 80, seed=seed, choose=Thinking(END, BEGIN, maximum=-1), **how)[0]
        assert unlimited.tokens == free.tokens and all(unlimited.sampled)


def test_a_wait_does_not_overrun_the_maximum():
    model, prompt = tiny_gpt(), PROMPTS[0] + [BEGIN]
    seen = 0
    for seed in range(20):
        budget = Thinking(END, BEGIN, minimum=5, maximum=6, wait_ids=tuple(range(1, 21)))
        c = generate(model, [prompt], 30, seed=seed, window=6, temperature=2.0, top_p=1.0, choose=budget)[0]
        assert len(thinking_part(c)) in (5, 6)
        assert c.sampled[c.tokens.index(END) + 1]  # what is left of the wait does not come behind the end
        seen += not all(c.sampled[:5])
    assert seen


def test_thinking_that_begins_in_the_completion_or_is_over_in_the_prompt():
    model = tiny_gpt()
    how = dict(window=6, temperature=1.5, top_p=1.0)
    for prompt in (PROMPTS[0], PROMPTS[0] + [BEGIN, 3, END, 4]):
        seen = 0
        for seed in range(12):
            free = generate(model, [prompt], 60, seed=seed, **how)[0].tokens
            c = generate(model, [prompt], 60, seed=seed, choose=Thinking(END, BEGIN, maximum=0), **how)[0]
            if BEGIN in free[:-1]:  # from here on every thought is cut at once
                at = free.index(BEGIN)
                assert c.tokens[: at + 2] == free[: at + 1] + [END]
                seen += 1
            else:
                assert c.tokens == free  # no thinking, nothing forced
        assert seen > 1
    c = generate(model, [PROMPTS[0]], 60, choose=Thinking(END, None, maximum=4), **how)[0]
    assert c.tokens[4] == END or END in c.tokens[:4]  # no start token: it thinks from the beginning


def test_thinking_with_end_tokens_before_the_minimum():
    """An end of the whole answer is an end of the thinking too: below the minimum it is replaced."""
    model, prompt = tiny_gpt(), PROMPTS[0] + [BEGIN]
    for seed in range(10):
        c = generate(
            model,
            [prompt],
            60,
            seed=seed,
            window=6,
            temperature=1.5,
            top_p=1.0,
            stop_ids=list(range(30)),
            choose=Thinking(END, BEGIN, minimum=25, wait_ids=(40,), stop_ids=range(30)),
        )[0]
        assert len(c.tokens) >= 25 and all(t >= 30 for t in c.tokens[:25]) and False in c.sampled


def test_a_budget_counts_for_each_sequence_by_itself():
    """One Thinking for all the sequences of a call, through fewer rows, and for the next call: as if each were alone."""
    model, budget = tiny_gpt(), Thinking(END, None, minimum=4, maximum=9, wait_ids=WAIT)
    how = dict(window=6, temperature=1.5, top_p=1.0, choose=budget)
    for rows in (2, 6):
        done = generate(model, PROMPTS, 25, seed=range(6), rows=rows, **how)
        assert any(not all(c.sampled) for c in done)
        for seed, (prompt, c) in enumerate(zip(PROMPTS, done, strict=True)):
            alone = generate(model, [prompt], 25, seed=[seed], **how)[0]
            assert c.tokens == alone.tokens and c.sampled == alone.sampled


def test_a_tool_forces_what_it_has_to_say():
    """choose as a tool: behind every call (any token below 20) come two tokens of output, which depend on the prompt."""
    def tool(prompt):
        output = []

        def choose(token):
            if output:
                return output.pop(), True
            if token < 20:
                output.extend([prompt[0], 60])
            return token, False

        return choose

    for c in generate(tiny_gpt(), PROMPTS, 40, window=5, rows=4, temperature=1.0, choose=tool):
        calls = [i for i, (token, sampled) in enumerate(zip(c.tokens, c.sampled, strict=True)) if sampled and token < 20]
        assert calls and c.sampled.count(False) >= 2 * len(calls) - 2
        for i in calls:
            assert c.tokens[i + 1 : i + 3] == [60, c.prompt[0]][: 40 - i - 1] and not any(c.sampled[i + 1 : i + 3])


def test_random_eviction_is_a_class_of_its_own():
    """Another cache, and nothing else changes; it has a stream for each row to draw from."""
    fork = pytest.importorskip("forks.random_eviction")
    how = dict(window=4, temperature=0, seed=5)
    a, b = (generate(tiny_gpt(), [PROMPTS[1]] * 2, 40, cache_class=c, **how) for c in (SlidingCache, fork.RandomEvictionCache))
    assert a[0].tokens == a[1].tokens and len({tuple(c.tokens) for c in (*a, *b)}) == 3


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompts=[[1], []]), "prompt 1 is empty"),
        (dict(prompts=[[1, 61]]), "ids from 1 to 61, the model has 0 to 60"),
        (dict(prompts=[[-1]]), "ids from -1"),
        (dict(prompts=[1, 2]), "prompt 0 is no list of token ids but '1'"),
        (dict(prompts=["ab"]), "prompt 0 is no list of token ids but 'ab'"),
        (dict(stop_ids=5), "stop_ids=5"),
        (dict(stop_ids=[-1]), r"stop_ids=\[-1\]"),
        (dict(prefix_len=[1, 2, 3]), r"prefix_len is one int or \d of them, one per prompt, not \[1, 2, 3\]"),
        (dict(prefix_len=1.5), "not 1.5"),
        (dict(max_new_tokens=2.5), "max_new_tokens"),
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(max_new_tokens=[1, 2]), "1 of them"),
        (dict(seed=[1, 2]), "seed"),
        (dict(prefix_len=-1), "prefix_len=-1"),
        (dict(window=0), "window=0"),
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=math.nan), "temperature=nan"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_p=0), "top_p=0"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(rows=0), "rows=0"),
        (dict(rope="none"), "rope='none'"),
        (dict(n_vocab=0), "n_vocab=0"),
        (dict(stop_strings=["x"]), "stop_strings"),
        (dict(stop_strings=[""], decode=str), "stop_strings"),
        (dict(stop_strings=[5], decode=str), r"stop_strings=\[5\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_gpt(), **(dict(prompts=[[1, 2]], max_new_tokens=3, window=3) | change))
    with pytest.raises(TypeError, match="temprature"):
        generate(tiny_gpt(), [[1]], 3, temprature=1.0)
    for wrong in (dict(minimum=3), dict(minimum=3, maximum=2, wait_ids=(1,)), dict(maximum=-2)):
        with pytest.raises(ValueError, match="thinking tokens"):
            Thinking(END, **wrong)


def test_no_prompts_no_completions():
    assert generate(tiny_gpt(), [], 5) == []


# ---------------------------------------------------------------------------------------------------------------------
# the draw


def test_draw_by_hand():
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()

    def draws(**how):
        return [
            int(sample(logits, torch.tensor([u], dtype=torch.float64), 1.0, **how))
            for u in (0.0, 0.0999, 0.11, 0.49, 0.51, 0.79, 0.81, 0.9999)
        ]

    assert draws(top_k=None, top_p=1) == [0, 0, 1, 1, 2, 2, 3, 3]  # cumulative 0.1 0.5 0.8 1.0, in vocabulary order
    assert draws(top_k=2, top_p=1) == [1, 1, 1, 1, 1, 2, 2, 2]  # 4/7, 3/7
    assert draws(top_k=99, top_p=1) == draws(top_k=4, top_p=1) == draws(top_k=None, top_p=1)
    assert draws(top_k=None, top_p=0.4) == draws(top_k=1, top_p=1) == [1] * 8  # the fewest that reach 0.4
    assert draws(top_k=None, top_p=0.41) == draws(top_k=2, top_p=1)
    assert draws(top_k=2, top_p=0.5) == [1] * 8  # of what top_k left, 4/7 is enough
    assert int(sample(logits, torch.tensor([0.99]), 0, None, 1)) == 1


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=300),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.01, 1),
    st.none() | st.integers(1, 400),
)
@settings(max_examples=300, deadline=None)
def test_draw_against_a_loop(logits, u, top_p, top_k):
    """A plain Python inverse CDF, sorted in full; many logits are equal or tiny, where off-by-ones and empty sets hide."""
    x = torch.tensor([logits], dtype=torch.float64)
    token = int(sample(x, torch.tensor([u], dtype=torch.float64), 1.0, top_k, top_p))
    p = x.softmax(-1)[0].tolist()
    order = sorted(p, reverse=True)
    cut = order[min(top_k or len(p), len(p)) - 1]
    kept = [q if q >= cut else 0 for q in p]
    mass, order = 0.0, sorted(kept, reverse=True)
    for q in order:
        mass, cut = mass + q, q
        if mass >= top_p * sum(kept) * (1 + 1e-12) or mass >= top_p * sum(kept):
            break
    assert kept[token] > 0 and kept[token] >= cut * (1 - 1e-9)
    kept = [q if q >= cut else 0 for q in kept]
    below = sum(kept[:token])
    assert below <= u * sum(kept) * (1 + 1e-9) + 1e-15 and u * sum(kept) <= (below + kept[token]) * (1 + 1e-9) + 1e-15


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(4000, 1)
    u = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    count = torch.bincount(sample(logits, u, 1.0, None, 1), minlength=4) / 4000
    assert (count - logits[0].softmax(-1)).abs().max() < 0.03


def test_top_p_over_more_tokens_than_the_first_look():
    """The cut is sought among the 256 most probable; a flat distribution needs the full sort."""
    logits = torch.linspace(0, 0.5, 2000, dtype=torch.float64)[None]
    p = logits.softmax(-1)[0]
    n = int((p.flip(0).cumsum(0) < 0.9).sum()) + 1
    assert n > 256 and int(sample(logits, torch.tensor([0.0], dtype=torch.float64), 1.0, None, 0.9)) == 2000 - n


def test_a_draw_at_the_upper_end_is_a_possible_token():
    """u * total may round up to the total: the last token with probability > 0, not the end of the vocabulary."""
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    assert int(sample(logits, torch.tensor([1.0]), 1.0, None, 1.0)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# what is easily lost


def test_siblings_with_windows_that_differ_by_layer():
    """A prompt that the first layer still holds may have left another."""
    model, how, stats = tiny_gpt(), dict(prefix_len=1, window=[30, 6, 6], rows=1, temperature=1.0), {}
    done = generate(model, [PROMPTS[3]] * 2, 10, seed=[4, 5], stats=stats, **how)
    assert stats["prefills"] == 2
    for seed, c in zip((4, 5), done, strict=True):
        assert c.tokens == generate(model, [PROMPTS[3]], 10, seed=seed, **how)[0].tokens


def test_rows_that_fit_the_memory(monkeypatch):
    model, stats = tiny_gpt(dtype=torch.float32), {}
    one = 2 * 3 * 2 * (14 + 6) * 8 * 4
    monkeypatch.setattr("engine.free_bytes", lambda device: 3.5 * one / 0.8)
    generate(model, PROMPTS, 20, window=6, stats=stats)
    assert stats["rows"] == 3 and stats["cache_bytes"] == 3 * one
    generate(model, PROMPTS, 20, window=6, rows=5, stats=stats)
    assert stats["rows"] == 5


def test_a_prefix_beyond_everything_costs_what_is_used():
    stats = {}
    generate(tiny_gpt(dtype=torch.float32), [PROMPTS[0]], 10, prefix_len=10**9, window=10**9, stats=stats)
    assert stats["cache_bytes"] == 2 * 3 * 2 * (15 + 1) * 8 * 4


def test_any_int_is_a_seed():
    model = tiny_gpt()
    texts = [tuple(generate(model, [PROMPTS[0]], 20, seed=seed, temperature=1.5)[0].tokens) for seed in (-5, 0, 5, 2**63, 2**70 + 1)]
    assert len(set(texts)) == len(texts)
    a, b = (generate(model, [PROMPTS[0]] * 2, 20, seed=seed, temperature=1.5)[1].tokens for seed in (7, torch.tensor(7).numpy()[()]))
    assert a == b                                                                     # a numpy int is one seed, too


@torch.no_grad()
def test_logprobs_of_a_bfloat16_model_are_float32():
    model = tiny_gpt(dtype=torch.bfloat16)
    c = generate(model, [PROMPTS[1]], 12, window=4, temperature=0.7)[0]
    logits = model(torch.tensor([c.prompt]), len(c.prompt), 4)[0, -1].float()
    assert abs(c.logprobs[0] - (logits / 0.7).log_softmax(-1)[c.tokens[0]].item()) < 1e-5


def test_every_token_has_the_number_of_its_own_index():
    """With equal logits a token is its number times the size of the vocabulary. More tokens than are hashed at once."""
    model = tiny_gpt(tied=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    done = generate(model, [[1], [2]], 600, window=4, temperature=1.0, top_p=1.0, seed=3)
    for i, c in enumerate(done):
        u = uniform(mix(torch.tensor(3), i), torch.arange(600))
        assert c.tokens == (u * model.config.vocab_size).long().tolist()


def test_logits_that_are_not_finite_are_named():
    model = tiny_gpt(tied=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = math.nan
    for top_p in (0.9, 1.0):
        with pytest.raises(ValueError, match="prompt 1: the model's logits are not finite behind 0 new tokens"):
            generate(model, [[1, 2], [1, 5]], 5, top_p=top_p)


def test_no_graph_is_kept():
    model = tiny_gpt()
    seen = []
    features = model.features
    model.features = lambda *args, **kwargs: seen.append(features(*args, **kwargs)) or seen[-1]
    generate(model, [PROMPTS[0]], 3, window=4)
    assert len(seen) == 3 and not any(x.requires_grad or x.is_inference() for x in seen)


def test_a_cache_that_says_it_all_is_not_told_again():
    model = tiny_gpt()
    cache = SlidingCache(model.config, 1, 2, 3, dtype=torch.float64)
    for twice in (dict(prefix_len=2), dict(window=3), dict(positions=torch.zeros(1, 1))):
        with pytest.raises(ValueError, match="the cache's"):
            model.features(tokens(1, 1, 1), cache=cache, **twice)
