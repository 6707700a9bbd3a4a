"""
A penalty on the KL to the model that a run of train_rl.py started from.

    python -m forks.kl_penalty config/rl_passes.py --kl_coef=0.01

A frozen copy of those weights goes through the same passes beside the policy, carried as it is; the loss of a
token gains kl_coef times k3 of its two log-probabilities (GRPO, arXiv 2402.03300, eq. 4), and the log a
column kl. It costs the memory of the copy and a forward for each forward and backward.
"""
import functools
from pathlib import Path

import torch

import train_rl
from checkpoint import read_json
from configurator import configure, run
from model import GPT

kl_coef = 0.01  # weight of the penalty, at least 0

plain_passes, plain_loss = train_rl.passes, train_rl.policy_loss


@functools.cache
def reference(dtype, device):
    """The weights that the run began from, which a checkpoint names."""
    init = train_rl.init_from
    if init == "resume":
        init = read_json(Path(train_rl.out_dir) / "last" / "state.json")["began_from"]
    return GPT.from_pretrained(init, dtype=dtype, device=device).requires_grad_(False)


def passes(model, traces):
    """The batches of train_rl.passes, each with the reference's log-probabilities of its tokens."""
    weight = model.lm_head.weight
    of_reference = plain_passes(reference(weight.dtype, weight.device), traces)
    for batch in plain_passes(model, traces):
        with torch.no_grad():
            batch.reference = next(of_reference).logp
        yield batch


def policy_loss(batch):
    """The loss of train_rl.py and the penalty. -> loss (n,), {name: (n,)}"""
    loss, metrics = plain_loss(batch)
    kl = train_rl.k3(batch.reference - batch.logp)
    return loss + kl_coef * kl, metrics | dict(kl=kl)


if __name__ == "__main__":
    configure(globals(), train_rl)
    train_rl.passes, train_rl.policy_loss = passes, policy_loss
    train_rl.METRICS.append("kl")
    run(train_rl.main)
