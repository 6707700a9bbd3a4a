"""train_rl.py and training.py: what is trained, on which loss, with which gradients, and that a killed run goes on."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from util import tiny_gpt

import train_rl
import training
from attn_kernel import visible
from engine import generate
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
    targets = [t for s in segs for t in range(s.first, s.stop + 1)]
    assert targets == list(range(end - min(W, n_new) if loss_on == "tail" else n_prompt, end))            # each once, in order
    for k, s in enumerate(segs):
        assert s.start <= s.first - 1                                                 # the input before the first target is passed
        inputs = range(s.start, s.stop)
        if loss_on == "tail" or not carry:
            whole = s.stop - m * W <= P
            assert s.start == (0 if whole else s.stop - m * W) and s.carried == (carry and not whole)
            assert whole or len(inputs) == m * W
            if loss_on == "all":
                assert s.stop + 1 - s.first == W or k == len(segs) - 1
        else:
            assert s.start == (segs[k - 1].stop if k else 0) and s.carried == (k > 0)
            assert s.stop + 1 - s.first == m * W or k == len(segs) - 1
        if P == n_prompt and loss_on == "tail":
            assert (s.start == 0) == (n_new - 1 <= m * W)                             # "a rollout with N - 1 <= m W is passed whole"


def test_segments_by_hand():
    """Prompt of 3, 20 new tokens (indices 3..22), W = 4, m = 2."""
    def table(carry, loss_on):
        return [(s.start, s.stop, s.first, s.carried) for s in segments(3, 20, 3, 4, 2, carry, loss_on)]
    assert table(False, "tail") == [(14, 22, 19, False)]                              # inputs 14..21, targets 19..22
    assert table(True, "tail") == [(14, 22, 19, True)]
    assert table(True, "all") == [(0, 10, 3, False), (10, 18, 11, True), (18, 22, 19, True)]
    assert table(False, "all") == [(0, 6, 3, False), (0, 10, 7, False), (6, 14, 11, False), (10, 18, 15, False), (14, 22, 19, False)]
    assert [vars(s) for s in segments(3, 20, 3, None, 2, True, "tail")] == [dict(start=0, stop=22, first=3, carried=False)]
    with pytest.raises(ValueError, match="loss_on='head'"):
        segments(3, 20, 3, 4, 2, True, "head")


# ---------------------------------------------------------------------------------------------------------------------
# advantages, losses, weights: by hand

def test_advantages():
    assert advantages([0.0, 1.0], False) == [-0.5, 0.5]
    assert advantages([5.0, 5.0], True) == [0.0, 0.0]                                 # its own group: the row above changes nothing
    assert advantages([0.1] * 8, True) == [0.0] * 8 == advantages([0.7] * 8, False)  # 8 equal float32 may have a std of 8e-9
    a = advantages([1.0, 2.0, 3.0, 6.0], True)                                        # mean 3, deviations -2 -1 0 3, std sqrt(14 / 3)
    assert a == pytest.approx([x / math.sqrt(14 / 3) for x in (-2, -1, 0, 3)], rel=1e-5)


def losses(kind, ratios, advantage, old=-1.0):
    old = torch.full((1, len(ratios)), old, dtype=torch.float64)
    logp = (old + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    out, ratio, clipped = policy_loss(logp, old, torch.tensor([[advantage]], dtype=torch.float64), torch.ones(1, len(ratios)).bool(), kind)
    grad = torch.autograd.grad(out.sum(), logp)[0]
    assert ratio[0].tolist() == pytest.approx(ratios)
    return [out[0].tolist(), grad[0].tolist(), clipped[0].tolist()]


def test_grpo_by_hand():
    """eps 0.2 both sides, delta 4. For A < 0 a ratio of 2 is not clipped, one of 5 is, at 4; d(loss)/d(logp) = -A r where not clipped."""
    assert losses("grpo", [0.5, 0.9, 1.1, 2.0, 5.0], 1.0) == [
        pytest.approx([-0.5, -0.9, -1.1, -1.2, -1.2]), pytest.approx([-0.5, -0.9, -1.1, 0, 0]), [False, False, False, True, True]]
    assert losses("grpo", [0.5, 0.9, 1.1, 2.0, 5.0], -2.0) == [
        pytest.approx([1.6, 1.8, 2.2, 4.0, 8.0]), pytest.approx([0, 1.8, 2.2, 4.0, 0]), [True, False, False, False, True]]
    assert losses("grpo", [0.1, 9.0], 0.0)[2] == [False, False]                       # nothing to clip


def test_masked_is_by_hand():
    assert losses("masked_is", [0.4, 0.6, 1.0, 4.9, 5.1], 1.0) == [
        pytest.approx([0, -0.6, -1, -4.9, 0]), pytest.approx([0, -0.6, -1, -4.9, 0]), [True, False, False, False, True]]


def test_dppo_by_hand():
    """Sampler's probability 0.5; trainer's 0.8, 0.6, 0.2: moved by 0.3, 0.1, -0.3. A > 0 drops the first, A < 0 the last; the pull
    1e-3 (log r)^2 stays for all."""
    r, old = [1.6, 1.2, 0.4], math.log(0.5)
    pull = [1e-3 * math.log(x) ** 2 for x in r]
    got = losses("dppo", r, 1.0, old)
    assert got[0] == pytest.approx([pull[0], pull[1] - 1.2, pull[2] - 0.4]) and got[2] == [True, False, False]
    assert got[1] == pytest.approx([2e-3 * math.log(1.6), 2e-3 * math.log(1.2) - 1.2, 2e-3 * math.log(0.4) - 0.4])
    got = losses("dppo", r, -1.0, old)
    assert got[0] == pytest.approx([pull[0] + 1.6, pull[1] + 1.2, pull[2]]) and got[2] == [False, False, True]


def test_what_is_masked_counts_nowhere():
    """Nor do NaNs or infinities in it: they are selected away, not multiplied by 0."""
    logp = torch.tensor([[-1.0, -2.0, float("-inf")]], requires_grad=True)
    old = torch.tensor([[-1.0, float("-inf"), 0.0]])
    for kind in ("grpo", "masked_is", "dppo"):
        out, ratio, clipped = policy_loss(logp, old, torch.tensor([[1.0]]), torch.tensor([[True, False, False]]), kind)
        assert out[0].tolist() == [-1, 0, 0] and not clipped.any()
        grad = torch.autograd.grad(out.sum(), logp)[0]
        assert grad[0].tolist() == pytest.approx([-1, 0, 0])
        far = torch.tensor([[0.0]], requires_grad=True)                               # a ratio beyond float32
        out, _, _ = policy_loss(far, torch.tensor([[-200.0]]), torch.tensor([[-1.0]]), torch.tensor([[True]]), kind)
        assert torch.isfinite(torch.autograd.grad(out.sum(), far)[0]).all() and torch.isfinite(out).all()


def test_k3():
    d = torch.tensor([0.0, math.log(2), -1.0, 100.0, -100.0], requires_grad=True)
    assert k3(d)[:3].tolist() == pytest.approx([0, 1 - math.log(2), math.exp(-1)], abs=1e-6)
    assert torch.isfinite(k3(d)).all() and (k3(d) >= 0).all()
    grad = torch.autograd.grad(k3(d).sum(), d)[0]
    assert torch.isfinite(grad).all() and grad[:3].tolist() == pytest.approx([0, 1, math.exp(-1) - 1], abs=1e-6) and grad[3] > 0


def test_three_normalisations_are_three_numbers(configure):
    """Two completions with losses 1 per token and lengths 2 and 8, at most 10: token mean (2a + 8b) / 10, sequence mean (a + b) / 2,
    fixed (2a + 8b) / 20."""
    a, b = 1.0, 3.0
    for name, right in (("token", 2.6), ("sequence", 2.0), ("fixed", 1.3)):
        configure(normalise=name)
        w = train_rl.token_weights([2, 8], 10)
        assert w[0] * 2 * a + w[1] * 8 * b == pytest.approx(right)
        assert train_rl.token_weights([0, 0], 10) == [0, 0]
    configure(normalise="words")
    with pytest.raises(ValueError, match="normalise='words'"):
        train_rl.token_weights([1], 1)


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


def gradients(model, episodes, **processes):
    keeper = Gradients(model)
    metrics = update_policy(model, keeper, episodes, 0.0, **processes)
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
    count = sum(sum(train_rl.trained(e, s)) for e, segs in zip(episodes, cuts, strict=True) for s in segs)
    total = 0.0
    for e, segs in zip(episodes, cuts, strict=True):
        ids, n = e.prompt + e.tokens, len(e.prompt)
        for s in segs:
            logits = dense_forward(model, ids[:s.stop], n, W, rope, s.start)
            logp = (logits / temperature).log_softmax(-1)
            for t in range(s.first, s.stop + 1):
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
def test_micro_batches_and_processes_change_nothing(configure, carry, loss_on):
    """1 x 5 gives what 5 x 1 gives, and the sum of two processes' shares too."""
    model, episodes = tiny_gpt(), some_episodes()
    configure(window=6, context_mult=2, carry=carry, loss_on=loss_on, temperature=1.0)
    results = []
    for size in (1, 2, 5):
        configure(micro_batch=size)
        results.append(gradients(model, episodes))
    shares = [gradients(model, episodes, rank=r, world=2) for r in (0, 1)]
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
    assert (s.start, s.stop, s.first) == (32, 44, 39)
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


def test_nothing_to_train_on(configure):
    """All completions masked: loss 0, finite gradients of 0; the denominator counts what the numerator counts."""
    model, episodes = tiny_gpt(), some_episodes()
    configure(window=6, truncated="drop")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for e in episodes:
        e.finish_reason = "length"
    grads, metrics = gradients(model, episodes)
    assert metrics["loss"] == 0 == metrics["trained_tokens"] and all((g == 0).all() for g in grads.values())
    episodes[0].finish_reason = "stop"
    assert gradients(model, episodes)[1]["trained_tokens"] == sum(episodes[0].sampled)


def test_reference_kl(configure):
    """To itself 0; to another model the k3 of the two log-probabilities, and its gradient joins with its weight, carried or not."""
    model, other, episodes = tiny_gpt(), tiny_gpt(seed=1), some_episodes()
    for carry in (False, True):
        configure(window=6, context_mult=2, carry=carry, loss_on="all", kl_coef=0.1)
        assert gradients(model, episodes, reference=model.requires_grad_(True))[1]["kl"] == pytest.approx(0, abs=1e-12)
        plain, without = gradients(model, episodes)
        grads, metrics = gradients(model, episodes, reference=other)
        assert metrics["kl"] > 0.01 and metrics["loss"] == pytest.approx(without["loss"] + 0.1 * metrics["kl"])
        assert all(not torch.allclose(grads[name], plain[name]) for name in plain)
