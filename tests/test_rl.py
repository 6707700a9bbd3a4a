"""train_rl.py and training.py: what is trained, on which loss, with which gradients."""
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from util import tiny_gpt

import train_rl
import training
from attention import visible
from engine import generate
from tasks import Problem, Task
from train_rl import Episode, advantages, k3, policy_loss, segments, update_policy

CONFIGURATION = dict(vars(train_rl))


@pytest.fixture
def configure(monkeypatch):
    """Set keys of train_rl for one test."""
    def set_keys(**keys):
        for key, value in keys.items():
            assert key in CONFIGURATION
            monkeypatch.setattr(train_rl, key, value)
    return set_keys


# ---------------------------------------------------------------------------------------------------------------------
# segments

@settings(max_examples=300, deadline=None)
@given(n_prompt=st.integers(1, 12), n_new=st.integers(1, 60), P=st.integers(0, 14), W=st.integers(1, 9), m=st.integers(1, 4),
       carry=st.booleans(), loss_on=st.sampled_from(["tail", "all"]))
def test_segments(n_prompt, n_new, P, W, m, carry, loss_on):
    """Against the sentences of the design, token by token."""
    segs, end = segments(n_prompt, n_new, P, W, m, carry, loss_on), n_prompt + n_new
    targets = [t for s in segs for t in range(s.first, s.end)]
    assert targets == list(range(end - min(W, n_new) if loss_on == "tail" else n_prompt, end))            # each once, in order
    for k, s in enumerate(segs):
        assert s.start <= s.first - 1                                                 # the input before the first target is passed
        inputs = range(s.start, s.end - 1)
        if loss_on == "tail" or not carry:
            whole = s.end - 1 - m * W <= P
            assert s.start == (0 if whole else s.end - 1 - m * W) and s.carried == (carry and not whole)
            assert whole or len(inputs) == m * W
            if loss_on == "all":
                assert s.end - s.first == W or k == len(segs) - 1
        else:
            assert s.start == (segs[k - 1].end - 1 if k else 0) and s.carried == (k > 0)
            assert s.end - s.first == m * W or k == len(segs) - 1
        if P == n_prompt and loss_on == "tail":
            assert (s.start == 0) == (n_new - 1 <= m * W)                             # "a rollout with N - 1 <= m W is passed whole"


def test_segments_by_hand():
    """Prompt of 3, 20 new tokens (indices 3..22), W = 4, m = 2."""
    def table(carry, loss_on):
        return [(s.start, s.end - 1, s.first, s.carried) for s in segments(3, 20, 3, 4, 2, carry, loss_on)]
    assert table(False, "tail") == [(14, 22, 19, False)]                              # inputs 14..21, targets 19..22
    assert table(True, "tail") == [(14, 22, 19, True)]
    assert table(True, "all") == [(0, 10, 3, False), (10, 18, 11, True), (18, 22, 19, True)]
    assert table(False, "all") == [(0, 6, 3, False), (0, 10, 7, False), (6, 14, 11, False), (10, 18, 15, False), (14, 22, 19, False)]
    assert [vars(s) for s in segments(3, 20, 3, None, 2, True, "tail")] == [dict(start=0, first=3, end=23, carried=False)]


# ---------------------------------------------------------------------------------------------------------------------
# advantages, losses, weights: by hand

def test_advantages():
    assert advantages([0.0, 1.0]) == [-0.5, 0.5]
    assert advantages([5.0, 5.0]) == [0.0, 0.0]                                       # its own group: the row above changes nothing
    assert advantages([0.1] * 8) == [0.0] * 8 == advantages([0.7] * 8)                # whose sum, divided by 8, is not 0.1
    assert advantages([1.0, 2.0, 3.0, 6.0]) == [-2, -1, 0, 3]


def losses(policy_loss, ratios, advantage, old=-1.0):
    """Of tokens with these ratios: the losses, their gradients, and which count as clipped."""
    old = torch.full((len(ratios),), old, dtype=torch.float64)
    logp = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    batch = SimpleNamespace(logp=logp, old=old, advantage=torch.full_like(old, advantage))
    loss, metrics = policy_loss(batch)
    grad = torch.autograd.grad(loss.sum(), logp)[0]
    assert metrics["ratio"].tolist() == pytest.approx(ratios)
    return [loss.tolist(), grad.tolist(), metrics["clip_fraction"].tolist()]


def test_grpo_by_hand():
    """eps 0.2 both sides, delta 4. For A < 0 a ratio of 2 is not clipped, one of 5 is, at 4; d(loss)/d(logp) = -A r where not clipped."""
    assert losses(policy_loss, [0.5, 0.9, 1.1, 2.0, 5.0], 1.0) == [
        pytest.approx([-0.5, -0.9, -1.1, -1.2, -1.2]), pytest.approx([-0.5, -0.9, -1.1, 0, 0]), [False, False, False, True, True]]
    assert losses(policy_loss, [0.5, 0.9, 1.1, 2.0, 5.0], -2.0) == [
        pytest.approx([1.6, 1.8, 2.2, 4.0, 8.0]), pytest.approx([0, 1.8, 2.2, 4.0, 0]), [True, False, False, False, True]]
    assert losses(policy_loss, [0.1, 9.0], 0.0)[2] == [False, False]                  # nothing to clip


def test_both_sides_of_the_clip(monkeypatch):
    monkeypatch.setattr(train_rl, "eps_high", 0.5)
    assert losses(policy_loss, [0.7, 1.4, 1.6], 1.0)[0] == pytest.approx([-0.7, -1.4, -1.5])
    assert losses(policy_loss, [0.7, 1.4, 1.6], -1.0)[0] == pytest.approx([0.8, 1.4, 1.6])


def test_a_ratio_beyond_float32_has_a_finite_gradient():
    far = torch.zeros(1, requires_grad=True)
    loss, _ = policy_loss(SimpleNamespace(logp=far, old=torch.tensor([-200.0]), advantage=torch.tensor([-1.0])))
    assert torch.isfinite(torch.autograd.grad(loss.sum(), far)[0]).all() and torch.isfinite(loss).all()


def test_what_is_forced_counts_nowhere(configure):
    """Nor do NaNs or infinities in it: forced tokens never reach the loss, so nothing is multiplied by 0."""
    model, episodes = tiny_gpt(), some_episodes()
    configure(window=6, context_mult=2)
    want, metrics = gradients(model, episodes)
    for e in episodes:
        e.logprobs = [x if sampled else (float("nan"), float("-inf"))[t % 2]
                      for t, (x, sampled) in enumerate(zip(e.logprobs, e.sampled, strict=True))]
    got, same = gradients(model, episodes)
    assert same == metrics and all(want[name].equal(got[name]) for name in want)


def test_k3():
    d = torch.tensor([0.0, math.log(2), -1.0, 100.0, -100.0], requires_grad=True)
    assert k3(d)[:3].tolist() == pytest.approx([0, 1 - math.log(2), math.exp(-1)], abs=1e-6)
    assert torch.isfinite(k3(d)).all() and (k3(d) >= 0).all()
    grad = torch.autograd.grad(k3(d).sum(), d)[0]
    assert torch.isfinite(grad).all() and grad[:3].tolist() == pytest.approx([0, 1, math.exp(-1) - 1], abs=1e-6) and grad[3] > 0


def test_every_trained_token_weighs_the_same():
    """Two completions with losses 1 and 3 per token and lengths 2 and 8: the token mean is (2 x 1 + 8 x 3) / 10."""
    w = train_rl.token_weights([2, 8])
    assert w[0] * 2 * 1.0 + w[1] * 8 * 3.0 == pytest.approx(2.6)


def test_token_logprobs():
    """Equal to the plain formula, values and gradients, whatever the chunks are; the entropy too."""
    torch.manual_seed(0)
    x, head, targets = torch.randn(13, 8, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64), torch.randint(30, (13,))
    results = []
    for limit in (30 * 4, 10**9, 1):
        training.LOGITS, before = limit, training.LOGITS
        a, b = x.clone().requires_grad_(), head.clone().requires_grad_()
        logp, entropy = training.token_logprobs(a, b, targets, 0.7)
        training.LOGITS = before
        results.append([logp.detach(), entropy, *torch.autograd.grad(logp.square().sum(), (a, b))])
        assert not entropy.requires_grad
    a, b = x.clone().requires_grad_(), head.clone().requires_grad_()
    p = torch.softmax(a @ b.T / 0.7, -1)
    logp = p[torch.arange(13), targets].log()
    want = [logp.detach(), -(p * p.log()).sum(-1).detach(), *torch.autograd.grad(logp.square().sum(), (a, b))]
    for got in results:
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# update_policy

class Gradients:
    """In place of the optimizer: keeps the gradients."""

    def __init__(self, model):
        self.model = model

    def step(self, rate, clip):
        self.grads = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.model.zero_grad()
        return 1.0


def gradients(model, episodes):
    keeper = Gradients(model)
    metrics = update_policy(model, keeper, episodes, 0.0)
    return keeper.grads, metrics


def some_episodes(n=5, P=5, seed=0, vocab=61, lengths=(3, 40, 17, 29, 1)):
    g = torch.Generator().manual_seed(seed)
    out = []
    for i in range(n):
        prompt = torch.randint(vocab, (P + i % 2,), generator=g).tolist()
        tokens = torch.randint(vocab, (lengths[i],), generator=g).tolist()
        logprobs = (-4 + torch.randn(lengths[i], generator=g, dtype=torch.float64) * 0.1).tolist()
        out.append(Episode(prompt, tokens, logprobs, [j % 7 != 3 for j in range(lengths[i])], "stop", advantage=float(1.5 - i)))
    return out


def dense_forward(model, ids, P, W, rope, detach_before):
    """Logits of a whole sequence by one dense masked forward in which every query sees keys and values before `detach_before` without
    gradient, written apart from model.features: the reference of design.md, section 2."""
    from model import rotate

    T = len(ids)
    x = model.model.embed_tokens(torch.tensor([ids]))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    mask = visible(i, j, P, W)

    def angles(pos):
        a = pos[None, None, :, None].float() * model.freqs
        return a.cos().to(x.dtype), a.sin().to(x.dtype)

    pos = torch.arange(T)
    cut = (j < detach_before)[None, None, :, None]
    for block in model.model.layers:
        h, att = block.input_layernorm(x), block.self_attn
        q, k, v = (p(h).unflatten(-1, (-1, att.head_dim)).transpose(1, 2) for p in (att.q_proj, att.k_proj, att.v_proj))
        if att.qk_norm:
            q, k = att.q_norm(q), att.k_norm(k)
        k, q_window = rotate(k, *angles(pos)), rotate(q, *angles(pos))
        q_prefix = rotate(q, *angles(pos.clamp(max=P + W - 1))) if rope == "reset" else q_window
        k, v = torch.where(cut, k.detach(), k), torch.where(cut, v.detach(), v)
        k, v = (t.repeat_interleave(q.size(1) // k.size(1), 1) for t in (k, v))
        s = torch.where(j < P, q_prefix @ k.transpose(2, 3), q_window @ k.transpose(2, 3)) / att.head_dim**0.5
        y = torch.softmax(s.masked_fill(~mask, float("-inf")), -1) @ v
        x = x + att.o_proj(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))[0]


def reference_gradients(model, episodes, W, m, carry, loss_on, rope, temperature):
    """The loss written out: every segment by its own dense forward over the whole sequence."""
    cuts = [segments(len(e.prompt), len(e.tokens), len(e.prompt), W, m, carry, loss_on) for e in episodes]
    count = sum(e.sampled[t - len(e.prompt)] for e, segs in zip(episodes, cuts, strict=True) for s in segs for t in range(s.first, s.end))
    total = 0.0
    for e, segs in zip(episodes, cuts, strict=True):
        ids, n = e.prompt + e.tokens, len(e.prompt)
        for s in segs:
            logits = dense_forward(model, ids[:s.end - 1], n, W, rope, s.start)
            logp = (logits / temperature).log_softmax(-1)
            for t in range(s.first, s.end):
                if e.sampled[t - n]:
                    r = (logp[t - 1, ids[t]] - e.logprobs[t - n]).exp()
                    gain = torch.minimum(r.clamp(max=4) * e.advantage, r.clamp(0.8, 1.2) * e.advantage)
                    total = total - gain / count
    total.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return grads, total.item()


@pytest.mark.parametrize("loss_on", ["tail", "all"])
@pytest.mark.parametrize("rope", ["continue", "reset"])
@pytest.mark.parametrize("m", [1, 3])
def test_gradients_with_carry(configure, rope, m, loss_on):
    """Equal to one dense masked forward with the carried keys and values detached, to 1e-9 in float64; activation checkpointing and the
    size of the pieces that are carried change nothing."""
    model = tiny_gpt(qk_norm=True)
    episodes = some_episodes()
    want, loss = reference_gradients(model, episodes, 6, m, True, loss_on, rope, 0.8)
    configure(window=6, context_mult=m, carry=True, loss_on=loss_on, rope=rope, temperature=0.8, micro_batch=3, CARRY_CHUNK=4)
    for model.checkpointing in (False, True):
        got, metrics = gradients(model, episodes)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-12)
        assert max((got[name] - want[name]).abs().max().item() for name in want) < 1e-9
    assert max(g.abs().max().item() for g in want.values()) > 1e-3


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("loss_on", ["tail", "all"])
def test_micro_batches_and_processes_change_nothing(configure, monkeypatch, carry, loss_on):
    """1 x 5 gives what 5 x 1 gives, and the sum of two processes' shares too."""
    model, episodes = tiny_gpt(), some_episodes()
    configure(window=6, context_mult=2, carry=carry, loss_on=loss_on, temperature=1.0)
    results = []
    for size in (1, 2, 5):
        configure(micro_batch=size)
        results.append(gradients(model, episodes))
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(training, "share", lambda items, rank=rank: items[rank::2])
        shares.append(gradients(model, episodes))
    results.append(({name: shares[0][0][name] + shares[1][0][name] for name in shares[0][0]}, None))
    for grads, metrics in results[1:]:
        assert all(torch.allclose(grads[name], results[0][0][name], rtol=1e-9, atol=1e-12) for name in grads)
        assert metrics is None or metrics == pytest.approx(results[0][1])


def test_without_carry_the_context_begins_at_a_cut(configure):
    """The paper's: equal to a dense forward over prefix + tail with true positions."""
    model, (e,) = tiny_gpt(), some_episodes(1, lengths=(40,))
    configure(window=6, context_mult=2, carry=False, loss_on="tail", temperature=1.0)
    got, metrics = gradients(model, [e])
    ids, (s,) = e.prompt + e.tokens, segments(5, 40, 5, 6, 2, False, "tail")
    assert (s.start, s.end - 1, s.first) == (32, 44, 39)
    idx, positions = torch.tensor([ids[:5] + ids[32:44]]), torch.tensor([[*range(5), *range(32, 44)]])
    logp = model(idx, 5, 6, positions=positions)[0, -6:].log_softmax(-1)[torch.arange(6), ids[39:45]]
    mask = torch.tensor(e.sampled[-6:])
    r = (logp - torch.tensor(e.logprobs[-6:], dtype=torch.float64)).exp()
    loss = -(torch.minimum(r.clamp(max=4) * 1.5, r.clamp(0.8, 1.2) * 1.5) * mask).sum() / mask.sum()
    loss.backward()
    assert metrics["trained_tokens"] == mask.sum() == 5 and metrics["loss"] == pytest.approx(loss.item())
    assert all(torch.allclose(p.grad, got[name], rtol=1e-9, atol=1e-12) for name, p in model.named_parameters())


def test_the_gap_of_an_exact_trainer_is_zero(configure):
    """Rollouts of the engine, 12 windows long: with carry the trainer finds the sampler's own log-probabilities, at any temperature and
    multiple; without it a three-layer model does not. No prompt token is in the loss, and forced tokens are not trained on."""
    model = tiny_gpt()
    done = generate(model, [[1, 2, 3, 4], [5, 6, 7]], 72, window=6, temperature=0.7, top_p=1.0, seed=3)
    episodes = [Episode(**vars(c), advantage=1.0) for c in done]
    gaps = {}
    for carry in (True, False):
        for m in (1, 2, 8):
            configure(window=6, context_mult=m, carry=carry, temperature=0.7, loss_on="tail")
            metrics = gradients(model, episodes)[1]
            gaps[carry, m] = metrics["gap_max"]
            assert metrics["trained_tokens"] == 12
    assert max(gaps[True, m] for m in (1, 2, 8)) < 1e-9
    assert gaps[False, 1] > gaps[False, 2] > 1e-4
    configure(temperature=1.0, context_mult=1, carry=True)
    assert gradients(model, episodes)[1]["gap_max"] > 0.01                            # scored at another temperature than sampled


WINDOWS = [6, [6, 3, 5], [None, 6, 6], [6, None, 4], 1000]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("prefix_len", [None, 0, 2, 9, 10**6])
def test_carry_is_exact_for_every_prefix_and_window(configure, prefix_len, window):
    """Rows of unequal length in one micro-batch, windows that differ from layer to layer, prefixes shorter and longer than the prompt."""
    model = tiny_gpt(qk_norm=True)
    for rope in ("continue", "reset"):
        done = generate(model, [[1, 2, 3, 4, 9, 9], [5, 6, 7], [8] * 14], [40, 20, 5], window=window, prefix_len=prefix_len, rope=rope,
                        temperature=0.7, top_p=1.0, seed=3)
        episodes = [Episode(**vars(c), advantage=1.0) for c in done]
        for loss_on in ("tail", "all"):
            configure(window=window, prefix_len=prefix_len, rope=rope, context_mult=1, carry=True, temperature=0.7, loss_on=loss_on,
                      micro_batch=3, CARRY_CHUNK=5)
            assert gradients(model, episodes)[1]["gap_max"] < 1e-9


@pytest.mark.parametrize("prefix_len", [None, 0, 2, 9, 40])
def test_cut_contexts_for_every_prefix(configure, prefix_len):
    """Without carry: a dense forward over ids[:P] + ids[start:stop] with true positions."""
    model, episodes = tiny_gpt(qk_norm=True), some_episodes()
    for loss_on, m in (("tail", 1), ("tail", 3), ("all", 1), ("all", 3)):
        configure(window=6, prefix_len=prefix_len, context_mult=m, carry=False, temperature=0.7, loss_on=loss_on)
        for e in episodes:
            P, ids = len(e.prompt) if prefix_len is None else prefix_len, e.prompt + e.tokens
            for s in segments(len(e.prompt), len(e.tokens), P, 6, m, False, loss_on):
                idx = (ids[:P] if s.start else []) + ids[s.start:s.end - 1]
                positions = torch.tensor([[*range(P if s.start else 0), *range(s.start, s.end - 1)]])
                want = (model(torch.tensor([idx]), P, 6, positions=positions)[0] / 0.7).log_softmax(-1)
                n = s.end - s.first
                want = want[torch.arange(len(idx) - n, len(idx)), ids[s.first:s.end]]
                sampled = torch.tensor(e.sampled[s.first - len(e.prompt):s.end - len(e.prompt)])
                batch = train_rl.forward(model, None, [0], [(train_rl.Trace(e, P, [s]), s)])
                torch.testing.assert_close(batch.logp, want[sampled], rtol=1e-9, atol=1e-12)
                assert len(batch.entropy) == sampled.sum() and (batch.entropy > 0).all()


def test_nothing_to_train_on(configure):
    """All completions masked: no step is made, not even by the momentum of earlier ones; else only those that count are counted."""
    model, episodes = tiny_gpt(dtype=torch.float32), some_episodes()
    optimizer = training.Optimizer(model, lr=1e-2)
    configure(window=6, truncated="drop")
    assert update_policy(model, optimizer, episodes, 1e-2)["trained_tokens"] > 0
    before = model.lm_head.weight.clone()
    for e in episodes:
        e.finish_reason = "length"
    assert update_policy(model, optimizer, episodes, 1e-2) is None is update_policy(model, optimizer, [], 1e-2)
    assert model.lm_head.weight.equal(before)
    episodes[2].finish_reason = "stop"
    assert gradients(model, episodes)[1]["trained_tokens"] == sum(episodes[2].sampled[-6:])


def test_the_loss_of_a_step_by_hand(configure):
    """Tails of 3 and 6 of at most 6 tokens, advantages 1.5 and 0.5, ratios 1: the mean advantage of the tokens, negated."""
    model = tiny_gpt()
    done = generate(model, [[1, 2, 3], [4, 5, 6]], [3, 20], window=6, temperature=1.0, top_p=1.0)
    episodes = [Episode(**vars(c), advantage=a) for c, a in zip(done, (1.5, 0.5), strict=True)]
    configure(window=6, max_new_tokens=20, carry=True)
    assert gradients(model, episodes)[1]["loss"] == pytest.approx(-(3 * 1.5 + 6 * 0.5) / 9)


# ---------------------------------------------------------------------------------------------------------------------
# rollouts

class Words:
    """A tokenizer for a model of 61 tokens: the token n is the word "n"."""
    eos_ids, n_vocab = [7, 9], 61

    def encode_chat(self, messages, **template_args):
        return [int(x) for x in " ".join(m["content"] for m in messages).split()]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def token_id(self, string):
        return None


def stub_task(seen=None, score=lambda problem, text, tokens, finish_reason: len(set(tokens)) % 2):
    def noted(problem, text, tokens, finish_reason):
        if seen is not None:
            seen.append((problem, text, tokens, finish_reason))
        return score(problem, text, tokens, finish_reason)
    return Task("stub", lambda i: Problem(f"{i % 50} 3 4", i), noted)


def test_rollout(configure):
    """The scorer sees neither the end token nor the prompt; groups are compared among themselves; truncated="zero" zeroes the cut ones
    only; every completion is that of its own stream, and of no other's."""
    model, seen = tiny_gpt(), []
    configure(window=6, max_new_tokens=12, group_size=4, temperature=1.0, system="1 2", reward={"correct": 2.0, "overlong": 1.0},
              overlong_margin=4, truncated="zero", rows=3)
    groups = train_rl.rollout(model, Words(), stub_task(seen), [5, 60])
    assert [[e.problem for e in g] for g in groups] == [[5] * 4, [60] * 4]
    assert {e.finish_reason for g in groups for e in g} == {"stop", "length"}
    for (problem, text, tokens, reason), e in zip(seen, [e for g in groups for e in g], strict=True):
        assert e.prompt == [1, 2, problem.answer % 50, 3, 4] and problem.answer == e.problem and reason == e.finish_reason
        assert tokens == (e.tokens[:-1] if reason == "stop" else e.tokens) and text == Words().decode(tokens)
        assert e.correct == len(set(tokens)) % 2
        overlong = 0 if len(e.tokens) <= 8 else -(len(e.tokens) - 8) / 4
        assert e.reward == (0 if reason == "length" else 2 * e.correct + overlong)
    for g in groups:
        assert [e.advantage for e in g] == advantages([e.reward for e in g])
    assert len({tuple(e.tokens) for g in groups for e in g}) > 6
    alone = train_rl.rollout(model, Words(), stub_task(), [60])
    assert [e.tokens for e in alone[0]] == [e.tokens for e in groups[1]]
    held_out = [train_rl.sample_seed(-1 - n) for n in range(100)]
    assert not {train_rl.sample_seed(n) for n in range(1000)} & set(held_out)


def test_collect(configure):
    """Groups without signal are dropped and others drawn, as often as max_draws allows."""
    def only_odd(problem, text, tokens, finish_reason):
        return len(set(tokens)) % 2 if problem.answer % 2 else 1.0
    configure(window=6, max_new_tokens=12, group_size=6, batch_prompts=4, max_draws=2, filter_groups=True)
    kept, drawn = train_rl.collect(tiny_gpt(), Words(), stub_task(score=only_odd), state := {"cursor": 10})
    assert [g[0].problem for g in kept] == [11, 13, 15]
    assert [g[0].problem for g in drawn] == [10, 11, 12, 13, 14, 15] and state["cursor"] == 16
    configure(max_draws=9)
    kept, drawn = train_rl.collect(tiny_gpt(), Words(), stub_task(score=only_odd), state := {"cursor": 10})
    assert [g[0].problem for g in kept] == [11, 13, 15, 17] and state["cursor"] == 18
    configure(filter_groups=False)
    kept, drawn = train_rl.collect(tiny_gpt(), Words(), stub_task(score=only_odd), state := {"cursor": 10})
    assert kept == drawn and [g[0].problem for g in kept] == [10, 11, 12, 13] and state["cursor"] == 14
