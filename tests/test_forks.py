"""forks/: what each of them changes, by hand, and that it runs from the command line."""
import math
from types import SimpleNamespace

import pytest
import torch
from test_rl import Words, gradients, losses, some_episodes, stub_task
from util import tiny_gpt

import train_rl
from forks import kl_penalty, losses as other_losses, stale_rollouts
from train_rl import Episode


@pytest.fixture
def configure(monkeypatch):
    """Set keys of train_rl.py or of a fork for one test."""
    def set_keys(module=train_rl, **keys):
        for key, value in keys.items():
            assert hasattr(module, key)
            monkeypatch.setattr(module, key, value)
    return set_keys


# ---------------------------------------------------------------------------------------------------------------------
# losses.py

def test_masked_is_by_hand(configure):
    configure(other_losses, loss="masked_is")
    assert losses(other_losses.policy_loss, [0.4, 0.6, 1.0, 4.9, 5.1], 1.0) == [
        pytest.approx([0, -0.6, -1, -4.9, 0]), pytest.approx([0, -0.6, -1, -4.9, 0]), [True, False, False, False, True]]


def test_dppo_by_hand(configure):
    """Sampler's probability 0.5; trainer's 0.8, 0.6, 0.2: moved by 0.3, 0.1, -0.3. A > 0 drops the first, A < 0 the last; the pull
    1e-3 (log r)^2 stays for all."""
    configure(other_losses, loss="dppo")
    r, old = [1.6, 1.2, 0.4], math.log(0.5)
    pull = [1e-3 * math.log(x) ** 2 for x in r]
    got = losses(other_losses.policy_loss, r, 1.0, old)
    assert got[0] == pytest.approx([pull[0], pull[1] - 1.2, pull[2] - 0.4]) and got[2] == [True, False, False]
    assert got[1] == pytest.approx([2e-3 * math.log(1.6), 2e-3 * math.log(1.2) - 1.2, 2e-3 * math.log(0.4) - 0.4])
    got = losses(other_losses.policy_loss, r, -1.0, old)
    assert got[0] == pytest.approx([pull[0] + 1.6, pull[1] + 1.2, pull[2]]) and got[2] == [False, False, True]


@pytest.mark.parametrize("loss", ["grpo", "masked_is", "dppo"])
def test_a_ratio_beyond_float32_has_a_finite_gradient(configure, loss):
    configure(other_losses, loss=loss)
    far = torch.zeros(1, requires_grad=True)
    batch = SimpleNamespace(logp=far, old=torch.tensor([-200.0]), advantage=torch.tensor([-1.0]))
    value, _ = other_losses.policy_loss(batch)
    assert torch.isfinite(torch.autograd.grad(value.sum(), far)[0]).all() and torch.isfinite(value).all()


def test_advantages_with_their_standard_deviation(configure):
    configure(other_losses, advantage_std=True)
    assert other_losses.advantages([5.0, 5.0]) == [0.0, 0.0]
    assert other_losses.advantages([0.1] * 8) == [0.0] * 8                            # 8 equal float32 may have a std of 8e-9
    a = other_losses.advantages([1.0, 2.0, 3.0, 6.0])                                 # mean 3, deviations -2 -1 0 3, std sqrt(14 / 3)
    assert a == pytest.approx([x / math.sqrt(14 / 3) for x in (-2, -1, 0, 3)], rel=1e-5)


def test_three_normalisations_are_three_numbers(configure):
    """Two completions with losses 1 per token and lengths 2 and 8, at most 10: token mean (2a + 8b) / 10, sequence mean (a + b) / 2,
    fixed (2a + 8b) / 20."""
    a, b = 1.0, 3.0
    configure(max_new_tokens=10, loss_on="all")
    for name, right in (("token", 2.6), ("sequence", 2.0), ("fixed", 1.3)):
        configure(other_losses, normalise=name)
        w = other_losses.token_weights([2, 8])
        assert w[0] * 2 * a + w[1] * 8 * b == pytest.approx(right)
    configure(other_losses, normalise="words")
    with pytest.raises(ValueError, match="normalise='words'"):
        other_losses.token_weights([1])


@pytest.mark.parametrize("normalise", ["token", "fixed", "sequence"])
def test_the_loss_of_a_step_by_hand(configure, normalise):
    """Tails of 3 and 6 of at most 6 tokens, advantages 1.5 and 0.5, ratios 1: the weighted advantages, negated."""
    from engine import generate

    model = tiny_gpt()
    done = generate(model, [[1, 2, 3], [4, 5, 6]], [3, 20], window=6, temperature=1.0, top_p=1.0)
    episodes = [Episode(**vars(c), advantage=a) for c, a in zip(done, (1.5, 0.5), strict=True)]
    configure(window=6, max_new_tokens=20, carry=True, token_weights=other_losses.token_weights)
    configure(other_losses, normalise=normalise)
    want = {"token": (3 * 1.5 + 6 * 0.5) / 9, "sequence": (1.5 + 0.5) / 2, "fixed": (3 * 1.5 + 6 * 0.5) / (2 * 6)}[normalise]
    assert gradients(model, episodes)[1]["loss"] == pytest.approx(-want)
    windows = [None, 6, 4]                                                            # a layer without a window: whole, of at most 20
    done = generate(model, [[1, 2, 3], [4, 5, 6]], [3, 20], window=windows, temperature=1.0, top_p=1.0)
    configure(window=windows)
    want = {"token": (3 * 1.5 + 20 * 0.5) / 23, "sequence": 1.0, "fixed": (3 * 1.5 + 20 * 0.5) / (2 * 20)}[normalise]
    episodes = [Episode(**vars(c), advantage=a) for c, a in zip(done, (1.5, 0.5), strict=True)]
    assert gradients(model, episodes)[1]["loss"] == pytest.approx(-want)


# ---------------------------------------------------------------------------------------------------------------------
# kl_penalty.py

@pytest.fixture
def penalised(configure, monkeypatch):
    """Gradients and metrics with the penalty to a given reference."""
    def run(model, episodes, reference):
        monkeypatch.setattr(kl_penalty, "reference", lambda dtype, device: reference)
        configure(passes=kl_penalty.passes, policy_loss=kl_penalty.policy_loss)
        found = gradients(model, episodes)
        configure(passes=kl_penalty.plain_passes, policy_loss=kl_penalty.plain_loss)
        return found
    return run


def test_reference_kl(configure, penalised):
    """To itself 0; to another model the k3 of the two log-probabilities, and its gradient joins with its weight, carried or not."""
    model, other, episodes = tiny_gpt(), tiny_gpt(seed=1), some_episodes()
    configure(kl_penalty, kl_coef=0.1)
    for carry in (False, True):
        configure(window=6, context_mult=2, carry=carry, loss_on="all")
        assert penalised(model, episodes, model)[1]["kl"] == pytest.approx(0, abs=1e-12)
        plain, without = gradients(model, episodes)
        grads, metrics = penalised(model, episodes, other)
        assert metrics["kl"] > 0.01 and metrics["loss"] == pytest.approx(without["loss"] + 0.1 * metrics["kl"])
        assert all(not torch.allclose(grads[name], plain[name]) for name in plain)

    e, P = some_episodes(1, lengths=(40,))[0], 5                                      # by two whole dense forwards
    configure(window=6, context_mult=1, carry=True, loss_on="all", temperature=1.0)
    ids = e.prompt + e.tokens
    mine, theirs = (m(torch.tensor([ids]), P, 6)[0, P - 1:-1].log_softmax(-1)[torch.arange(40), e.tokens] for m in (model, other))
    d, old = (theirs - mine)[torch.tensor(e.sampled)], (mine - torch.tensor(e.logprobs, dtype=torch.float64))[torch.tensor(e.sampled)]
    metrics = penalised(model, [e], other)[1]
    assert metrics["kl"] == pytest.approx((d.exp() - 1 - d).mean().item())
    assert metrics["gap_k3"] == pytest.approx((old.exp() - 1 - old).mean().item())


def test_the_reference_is_carried_as_the_model_is(configure, penalised):
    """Its distance to itself is 0, in every chunk and for rows of unequal length."""
    from engine import generate

    model = tiny_gpt(qk_norm=True)
    for window, prefix_len in ((6, None), ([6, 3, 5], 2), (1000, 9)):
        done = generate(model, [[1, 2, 3, 4, 9, 9], [5, 6, 7], [8] * 14], [40, 20, 5], window=window, prefix_len=prefix_len,
                        temperature=0.7, top_p=1.0, seed=3)
        episodes = [Episode(**vars(c), advantage=1.0) for c in done]
        for loss_on in ("tail", "all"):
            configure(window=window, prefix_len=prefix_len, context_mult=1, carry=True, temperature=0.7, loss_on=loss_on, micro_batch=3,
                      CARRY_CHUNK=5)
            metrics = penalised(model, episodes, model)[1]
            assert metrics["gap_max"] < 1e-9 and metrics["kl"] < 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# stale_rollouts.py

def test_batches_wait_in_a_queue(configure):
    """Step n trains on the problems that step n - 2 drew, and the queue is plain data that a checkpoint keeps."""
    import json

    configure(window=6, max_new_tokens=12, group_size=2, batch_prompts=3, filter_groups=False)
    configure(stale_rollouts, async_level=2)
    model, state, seen = tiny_gpt(), {"cursor": 0}, []
    for _ in range(3):
        kept, drawn = stale_rollouts.collect(model, Words(), stub_task(), state)
        seen.append(([g[0].problem for g in kept], [g[0].problem for g in drawn]))
        state = json.loads(json.dumps(state))
    assert seen == [([0, 1, 2], [*range(9)]), ([3, 4, 5], [9, 10, 11]), ([6, 7, 8], [12, 13, 14])]
    assert len(state["queue"]) == 2 and all(type(e) is Episode for g in kept for e in g)
