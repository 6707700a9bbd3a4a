"""
Other losses, normalisations and advantages for train_rl.py.

    python -m forks.losses config/rl_passes.py --loss=masked_is
    python -m forks.losses config/rl_passes.py --loss=dppo --normalise=sequence --advantage_std=True

masked_is: importance sampling, tokens with a ratio outside [alpha, beta] are dropped (INTELLECT-3, arXiv
2512.16144). dppo: tokens whose probability itself has moved far in the direction of the advantage are
dropped, and all others feel a pull back to the sampler (prime-rl, August 2026).
"""
import torch

import train_rl
from configurator import configure, run

loss = "masked_is"     # grpo (that of train_rl.py) | masked_is | dppo
alpha = 0.5            # masked_is: tokens with smaller ratios are dropped, 0 to below 1
beta = 5.0             # masked_is: tokens with larger ratios are dropped, above 1
normalise = "token"    # by the trained tokens of the batch | fixed: by the most there could be | sequence
advantage_std = False  # divide advantages by the standard deviation of their group

grpo_loss, mean_advantages = train_rl.policy_loss, train_rl.advantages


def policy_loss(batch):
    """As train_rl.policy_loss, by `loss`: the loss of each trained token, and what to log of it."""
    if loss == "grpo":
        return grpo_loss(batch)
    log_ratio = batch.logp - batch.old
    ratio = log_ratio.clamp(max=20).exp()
    if loss == "masked_is":
        dropped = (ratio < alpha) | (ratio > beta)
        pull = 0.0
    elif loss == "dppo":
        moved = (batch.logp.exp() - batch.old.exp()).detach()
        dropped = torch.where(batch.advantage > 0, moved > 0.2, moved < -0.2)
        pull = 1e-3 * log_ratio.square()
    else:
        raise ValueError(f"loss={loss!r}: grpo, masked_is or dppo")
    gain = torch.where(dropped, 0, ratio * batch.advantage) - pull
    return -gain, dict(ratio=ratio, clip_fraction=dropped & (batch.advantage != 0))


def token_weights(counts):
    """What a trained token of each completion weighs in the loss, given how many each has, by `normalise`."""
    if normalise == "token":
        return [1 / sum(counts) for _ in counts]
    if normalise == "sequence":
        return [1 / (len(counts) * count) for count in counts]
    if normalise == "fixed":
        windows = train_rl.window if isinstance(train_rl.window, list) else [train_rl.window]
        most = train_rl.max_new_tokens
        if train_rl.loss_on == "tail" and None not in windows:
            most = min(max(windows), most)
        return [1 / (len(counts) * most) for _ in counts]
    raise ValueError(f"normalise={normalise!r}: token, fixed or sequence")


def advantages(rewards):
    """Reward minus mean of the group, divided by its standard deviation if `advantage_std`."""
    found = mean_advantages(rewards)
    if not advantage_std:
        return found
    scale = (sum(a * a for a in found) / (len(found) - 1)) ** 0.5 + 1e-6
    return [a / scale for a in found]


if __name__ == "__main__":
    configure(globals(), train_rl)
    train_rl.policy_loss, train_rl.token_weights, train_rl.advantages = policy_loss, token_weights, advantages
    run(train_rl.main)
