"""
Reinforcement learning (GRPO, arXiv 2402.03300) on traces of any length, in memory that does not grow.

    python train_rl.py config/rl_passes.py                     # the embedded task, after config/sft_passes.py
    python train_rl.py config/rl_smollm2_cpu.py                # real weights, after config/sft_smollm2_cpu.py
    python train_rl.py config/rl_passes.py --init_from=resume  # go on where it was killed
    torchrun --nproc_per_node=4 train_rl.py config/rl_qwen3_1p7b_80gb.py  # rollouts and gradients on 4 GPUs
    python -m lab.plan config/rl_qwen3_1p7b_80gb.py            # where its memory goes, and a step to prove it

One step:
  1. draw batch_prompts problems and sample group_size completions of each: prefix + window, constant memory
  2. score them; the advantage of a completion is its reward minus the mean of its group
  3. drop the groups whose rewards are all equal, and draw others until the batch is full
  4. `segments` cuts each completion into what the trainer sees: the prefix and the last context_mult windows
  5. log-probabilities of its targets under the current weights, and their ratio to the sampler's
  6. the clipped policy gradient, normalised by the number of trained tokens in the whole batch
  7. AdamW, log, checkpoint
`collect` is 1 to 3, `update_policy` 4 to 7. One copy of the weights serves the sampler and the trainer.
Steps count from 0 in log.csv, and an evaluation there is of the weights before that step.

Left out on purpose: a critic, an entropy bonus, top-p and top-k in rollouts (the recorded log-probabilities
would be of another distribution than the trainer's). In forks/: other losses, a KL penalty, older rollouts.
"""
init_from = "data/smollm2"        # resume | a Hugging Face folder | a hub name
out_dir = "out-rl"                # the run's folder: checkpoints, log.csv, samples.jsonl
task = "reasoning_gym:chain_sum"  # reasoning_gym:<dataset> | jsonl:<path> | py:<file> | rated:<path>
system = ""                       # system message for the chat template, "" = none
template_args = {}                # further arguments of the chat template, such as {"enable_thinking": True}
reward = {"correct": 1.0}         # weight of each part: correct | format | overlong | length (tasks.py)
length_targets = []               # tokens; each prompt asks for one of them, "length" rewards keeping to it
overlong_margin = 0               # "overlong" penalises the last so many tokens before max_new_tokens
truncated = "keep"                # completions cut at max_new_tokens: keep | zero (reward 0) | drop
# rollouts
batch_prompts = 16                # groups per step
group_size = 8                    # completions per prompt, at least 2
max_new_tokens = 4096             # most tokens per completion
temperature = 1.0                 # > 0
window: int | list | None = 2048  # tokens, the current one included; None = full attention
prefix_len: int | None = None     # tokens kept for good; None = the whole prompt
rope = "continue"                 # continue: absolute positions | reset: close the gap behind the prefix
rows: int | None = None           # completions sampled at once; None = as many as fit the memory
compile = False                   # True: faster sampling by fast/, after seconds of compiling
filter_groups = True              # drop groups without signal and draw others
max_draws = 4                     # most draws to fill a batch
# what the trainer sees
context_mult = 4                  # windows of context passed, the last of which carries the loss
carry = False                     # False: context begins at a cut (the paper) | True: at the exact cache
loss_on = "tail"                  # tail: a completion's last window (the paper) | all: all of it, in chunks
# the loss: INTELLECT-2's two-sided clip
eps_low = 0.2                     # ratios below 1 - eps_low gain nothing
eps_high = 0.2                    # ratios above 1 + eps_high gain nothing
delta = 4.0                       # the largest ratio where the advantage is negative
updates_per_batch = 1             # optimizer steps per batch of rollouts
micro_batch = 8                   # completions per forward and backward
checkpointing = False             # compute each layer anew in the backward, to save memory
# the optimizer
max_steps = 200                   # batches
lr = 1e-6                         # peak learning rate
schedule = "constant"             # after the warm-up: constant | linear (down to 0)
warmup_steps = 0                  # steps from 0 to lr
weight_decay = 0.0                # of matrices
beta2 = 0.95                      # AdamW's second decay rate
clip = 1.0                        # largest gradient norm; 0 = no limit
master_device: str | None = None  # of bfloat16 weights' float32 masters and moments; None = theirs
# evaluation, files, machine
eval_every = 20                   # steps between evaluations on held-out problems; 0 = never
eval_size = 64                    # held-out problems; one completion at the trained length, one at twice it
eval_temperature = 1.0            # of these completions; 0 = greedy, which the last evaluation adds anyhow
save_every = 20                   # steps between checkpoints; 0 = at the end only
samples_per_step = 2              # completions written to samples.jsonl at each step
wandb_project = ""                # log to Weights & Biases too (WANDB_MODE=offline works); "" = do not
seed = 1                          # of problems and samples
device = "auto"                   # auto (cuda, then mps, then cpu) | cpu | cuda | mps
dtype = "auto"                    # auto (bfloat16 where the hardware has it) | float32 | bfloat16

from configurator import configure, run

configure(globals())

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import training
from checkpoint import local_folder
from device import device_and_dtype, peak_bytes
from engine import Completion, generate, hashed
from model import GPT
from sliding_cache import SlidingCache, layer_windows
from tasks import ask_for_length, check_reward, load_task, prompt_ids, reward_parts, text_of
from tokenizer import TOKENIZER_FILES, load_tokenizer

CARRY_CHUNK = 1024  # tokens that run through the model at once on the way to the context


@dataclass
class Episode(Completion):
    """A completion with what it earned. problem: its number; correct: the scorer's verdict, 0 to 1."""
    problem: int = 0
    correct: float = 0.0
    reward: float = 0.0
    advantage: float = 0.0

    def ids(self, start, stop):
        """The tokens start..stop-1 of prompt and completion, counted from the first of the prompt."""
        n = len(self.prompt)
        return self.prompt[start:stop] + self.tokens[max(start - n, 0):max(stop - n, 0)]


@dataclass
class Segment:
    """What one forward pass of the trainer sees of a sequence (prompt and completion, indices from 0): the
    inputs start..end-2, and before them the prefix. The tokens first..end-1 are its targets, each predicted
    from the input before it. carried: the inputs 0..start-1 ran through the model before, into the cache."""
    start: int
    first: int
    end: int
    carried: bool


def segments(n_prompt, n_new, P, W, m, carry, loss_on):
    """How a sequence of n_prompt + n_new tokens is trained, for prefix P, window W (None = full attention: it
    is passed whole) and context_mult m: all that is passed, carried and trained. -> [Segment, ...]

    tail: the last min(W, n_new) tokens are targets, the context is the m W inputs before the last of them.
    all, carry: consecutive chunks of m W targets, each from the cache that the one before it leaves.
    all, no carry: chunks of W targets, each with (m - 1) W inputs of context before its own."""
    end = n_prompt + n_new
    if W is None:
        return [Segment(0, n_prompt, end, carried=False)]
    if loss_on == "tail":
        chunks = [(max(n_prompt, end - W), end)]
    else:
        size = m * W if carry else W
        chunks = [(first, min(first + size, end)) for first in range(n_prompt, end, size)]
    found = []
    for first, stop in chunks:
        start = stop - 1 - m * W
        if start <= P:                       # nothing lies between the prefix and the context: pass it whole
            start = 0
        if carry and loss_on == "all":       # where the chunk before it ended
            start = first - 1 if first > n_prompt else 0
        found.append(Segment(start, first, stop, carried=carry and start > 0))
    return found


# -----------------------------------------------------------------------------------------------------------
# rollouts

def answer(model, tokenizer, source, problems, seeds, most, heat):
    """Sample and score one completion of each of the problems, of at most `most` tokens. -> [Episode, ...]"""
    prompts = [prompt_ids(problem, tokenizer, system, template_args) for problem in problems]
    completions = generate(
        model, prompts, most, prefix_len=prefix_len, window=window, rope=rope, temperature=heat, top_p=1.0,
        stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab, seed=seeds, rows=rows, compile=compile,
        on_token=training.sampling_progress(len(prompts)))
    if model.lm_head.weight.is_cuda:
        torch.cuda.empty_cache()                         # the sampler's cache makes room for the trainer
    episodes = [Episode(**vars(completion)) for completion in completions]
    for episode, problem in zip(episodes, problems, strict=True):
        episode.correct = float(source.score(problem, *said(episode, tokenizer), episode.finish_reason))
    return episodes


def said(episode, tokenizer):
    """The text and the tokens of a completion as scorers get them, without the end token."""
    tokens = episode.tokens[:-1] if episode.finish_reason == "stop" else episode.tokens
    return text_of(tokens, episode.prompt, tokenizer), tokens


def rollout(model, tokenizer, source, numbers):
    """Sample group_size completions of each problem, score and compare them. -> groups, lists of Episodes"""
    problems = [ask_for_length(source.draw(n), length_targets, n, seed) for n in numbers]
    repeated = [problem for problem in problems for _ in range(group_size)]
    seeds = [sample_seed(n * group_size + k) for n in numbers for k in range(group_size)]
    episodes = answer(model, tokenizer, source, repeated, seeds, max_new_tokens, temperature)
    groups = []
    for n, problem in zip(numbers, problems, strict=True):
        group, episodes = episodes[:group_size], episodes[group_size:]
        for episode in group:
            episode.problem = n
            episode.reward = reward_of(episode, problem, tokenizer)
        for episode, value in zip(group, advantages([e.reward for e in group]), strict=True):
            episode.advantage = value
        groups.append(group)
    return groups


def reward_of(episode, problem, tokenizer):
    """The weighted parts of the reward of a completion that was scored."""
    if truncated == "zero" and episode.finish_reason == "length":
        return 0.0
    text, _ = said(episode, tokenizer)
    parts = reward_parts(problem, text, len(episode.tokens), episode.correct, max_new_tokens, overlong_margin)
    return sum(weight * parts[name] for name, weight in reward.items())


def sample_seed(n):
    """The seed of the n-th sample of the run: another seed gives another stream for every one."""
    return hashed(seed, n)


def advantages(rewards):
    """Reward minus mean of the group; exactly 0 where all are equal, though their mean is rounded."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def collect(model, tokenizer, source, state):
    """Rollouts of the problems from number state["cursor"] on, until batch_prompts groups carry a signal (or
    max_draws draws were made). state: what a checkpoint keeps beside the weights. The processes share each
    draw and end with the same lists. -> groups to train on, all groups drawn"""
    kept, drawn = [], []
    for _ in range(max_draws if filter_groups else 1):
        numbers = range(state["cursor"], state["cursor"] + batch_prompts - len(kept))
        state["cursor"] = numbers.stop
        groups = training.gather(rollout(model, tokenizer, source, training.share(numbers)))
        groups.sort(key=lambda group: group[0].problem)
        drawn += groups
        kept += [group for group in groups if not filter_groups or any(e.advantage for e in group)]
        if len(kept) == batch_prompts:
            break
    return kept, drawn


# -----------------------------------------------------------------------------------------------------------
# the update

def policy_loss(batch):
    """The loss of each trained token of a Batch, and what to log of it: PPO's clip, with a ratio of at most
    delta where the advantage is negative (INTELLECT-2, arXiv 2505.07291, eq. 1). -> loss (n,), {name:
    (n,)}"""
    ratio = (batch.logp - batch.old).clamp(max=20).exp()  # never inf: 0 times its gradient would be NaN
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high)
    gain = torch.minimum(ratio.clamp(max=delta) * batch.advantage, bounded * batch.advantage)
    too_high = (batch.advantage > 0) & (ratio > 1 + eps_high)
    too_low = (batch.advantage < 0) & ((ratio < 1 - eps_low) | (ratio > delta))
    return -gain, dict(ratio=ratio, clip_fraction=too_high | too_low)


def k3(log_ratio):
    """Schulman's estimate of KL(sampler || other), exp(d) - 1 - d with d = log p_other - log p_sampler; never
    negative. Beyond d = 20 it is continued linearly, so that it and its gradient stay finite."""
    d = log_ratio.clamp(max=20)
    return d.expm1() + d.exp() * (log_ratio - d) - log_ratio


def token_weights(counts):
    """What a trained token of each completion weighs in the loss, given how many each has: all the same."""
    total = sum(counts)
    return [1 / total for _ in counts]


@dataclass
class Trace:
    """An episode as the trainer sees it. weight: of each of its trained tokens in the loss."""
    episode: Episode
    prefix: int
    segments: list
    weight: float = 0.0

    def trained(self, segment):
        """The targets of a segment that carry loss (sampled, not forced), as indices into the completion."""
        n = len(self.episode.prompt)
        return [t for t in range(segment.first - n, segment.end - n) if self.episode.sampled[t]]


def traces_of(config, episodes):
    """The traces of all the episodes that have a token to train on, with the weights of these."""
    W, found, counts = training_window(config), [], []
    for episode in episodes:
        if truncated == "drop" and episode.finish_reason == "length":
            continue
        n_prompt = len(episode.prompt)
        P = n_prompt if prefix_len is None else prefix_len
        trace = Trace(episode, P, segments(n_prompt, len(episode.tokens), P, W, context_mult, carry, loss_on))
        count = sum(len(trace.trained(segment)) for segment in trace.segments)
        if count:
            found.append(trace)
            counts.append(count)
    for trace, weight in zip(found, token_weights(counts), strict=True):
        trace.weight = weight
    return found


def update_policy(model, optimizer, episodes, rate):
    """One optimizer step on all the episodes, of which this process computes its share. -> dict of metrics,
    the same everywhere, or None: no token is to be trained on, and the weights stay as they are."""
    traces = traces_of(model.config, episodes)
    if not traces:
        return None
    traces.sort(key=lambda trace: trace.segments[-1].end)  # neighbours of one length need little padding
    mine = training.share(traces)
    sums, gap_max = Counter(), 0.0
    for i in range(0, len(mine), micro_batch):
        for batch in passes(model, mine[i:i + micro_batch]):
            losses, metrics = policy_loss(batch)
            loss = (batch.weight * losses).sum()
            loss.backward()
            gap = batch.logp.detach() - batch.old
            gap_max = max(gap_max, gap.abs().max().item())
            metrics |= dict(loss=loss, entropy=batch.entropy, gap_k3=k3(gap), tokens=torch.ones_like(gap))
            sums.update({name: values.detach().sum().item() for name, values in metrics.items()})
    norm = optimizer.step(rate, clip)
    totals = Counter()
    for share in training.gather([sums]):
        totals.update(share)
    loss, n = totals.pop("loss"), totals.pop("tokens")
    means = {name: total / n for name, total in totals.items()}
    gap_max = max(training.gather([gap_max]))
    return means | dict(loss=loss, trained_tokens=int(n), gap_max=gap_max, grad_norm=norm)


def training_window(config):
    """The widest window among the layers, None if one of them has none."""
    windows = layer_windows(config, window)
    return None if None in windows else max(windows)


@dataclass
class Batch:
    """The trained tokens of one forward pass, one behind the other: tensors (n,); logp has a gradient."""
    logp: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor            # log-probabilities that the sampler recorded
    advantage: torch.Tensor
    weight: torch.Tensor


def passes(model, traces):
    """Run some traces through the model: the first segment of each together, then the second of each, and so
    on. -> yields the Batch of each pass; take its backward before the next, which needs the memory."""
    cache = carried_cache(model, traces)
    for number in range(max(len(trace.segments) for trace in traces)):
        cache_rows = [row for row, trace in enumerate(traces) if number < len(trace.segments)]
        pieces = [(traces[row], traces[row].segments[number]) for row in cache_rows]
        if any(segment.carried for _, segment in pieces):
            carry_to(model, cache, cache_rows, pieces)
        yield forward(model, cache, cache_rows, pieces)


def carried_cache(model, traces):
    """The cache that carries prefixes and windows from segment to segment, None where nothing is carried."""
    if not any(segment.carried for trace in traces for segment in trace.segments):
        return None
    weight = model.lm_head.weight
    longest = max(trace.segments[-1].end for trace in traces)
    prefixes = torch.tensor([min(trace.prefix, longest) for trace in traces])
    windows = [min(w, longest) for w in layer_windows(model.config, window)]
    like_weights = dict(dtype=weight.dtype, device=weight.device)
    return SlidingCache(model.config, len(traces), prefixes, windows, **like_weights)


@torch.no_grad()
def carry_to(model, cache, cache_rows, pieces):
    """Run what precedes each segment through the model, without gradients: its row of the cache then stands
    where the segment starts."""
    while True:
        behind, chunks = [], []
        for row, (trace, segment) in zip(cache_rows, pieces, strict=True):
            seen = cache.lengths[row]
            if seen < segment.start:
                behind.append(row)
                chunks.append(trace.episode.ids(seen, min(segment.start, seen + CARRY_CHUNK)))
        if not behind:
            return
        idx, lengths = training.padded(chunks, cache.length.device)
        model.features(idx, rope=rope, cache=cache, rows=behind, n_new=lengths)


def forward(model, cache, cache_rows, pieces):
    """One pass over a segment of each trace; their rows of the cache hold what was carried there. -> Batch"""
    device = model.lm_head.weight.device
    inputs, positions = [], []
    for trace, segment in pieces:
        cut = segment.start > 0 and not segment.carried   # then the prefix stands in front of the context
        prefix = range(trace.prefix) if cut else range(0)
        context = range(segment.start, segment.end - 1)
        inputs.append(trace.episode.ids(0, len(prefix)) + trace.episode.ids(context.start, context.stop))
        positions.append([*prefix, *context])
    idx, lengths = training.padded(inputs, device)        # (B, T)
    if cache is None:
        P = torch.tensor([trace.prefix for trace, _ in pieces], device=device)
        positions, _ = training.padded(positions, device)
        x = model.features(idx, P, window, positions=positions, rope=rope)  # (B, T, n_embd)
    else:
        x = model.features(idx, rope=rope, cache=cache, rows=cache_rows, n_new=lengths)

    row_of, column_of, tokens, old, advantage, weight = [], [], [], [], [], []
    for row, (trace, segment) in enumerate(pieces):
        episode, shift = trace.episode, lengths[row] - segment.end + len(trace.episode.prompt)
        for t in trace.trained(segment):
            row_of.append(row)
            column_of.append(shift + t)                   # of the input before the token
            tokens.append(episode.tokens[t])
            old.append(episode.logprobs[t])
            advantage.append(episode.advantage)
            weight.append(trace.weight)
    x = x[row_of, column_of]                              # (n, n_embd)
    targets = torch.tensor(tokens, device=device)
    logp, entropy = training.token_logprobs(x, model.lm_head.weight, targets, temperature)
    others = [torch.tensor(values, dtype=logp.dtype, device=device) for values in (old, advantage, weight)]
    return Batch(logp, entropy, *others)


# -----------------------------------------------------------------------------------------------------------
# evaluation and logs

def evaluate(model, tokenizer, longer, heat):
    """One completion of each of eval_size held-out problems, with `longer` times the tokens (and problems as
    much longer, where the task knows how). -> share that is right, mean tokens, share that finished"""
    source = load_task(task, seed, held_out=True, longer=longer)
    numbers = training.share(range(min(eval_size, source.size or eval_size)))
    problems = [ask_for_length(source.problem(n), length_targets, -1 - n, seed) for n in numbers]
    seeds = [sample_seed(-1 - n) for n in numbers]
    mine = answer(model, tokenizer, source, problems, seeds, longer * max_new_tokens, heat)
    return outcome(training.gather(mine))


def evaluations(model, tokenizer, greedy=False):
    """Held-out problems at the trained length and at twice it, and greedy. -> row of the log"""
    ways = [("eval", 1, eval_temperature), ("eval2x", 2, eval_temperature)]
    if greedy:
        ways.append(("greedy", 1, 0))
    row = {}
    for name, longer, heat in ways:
        found = evaluate(model, tokenizer, longer, heat)
        row |= {f"{name}_{key}": value for key, value in found.items()}
    return row


def outcome(episodes):
    """What some scored completions are like, in the mean."""
    return dict(
        solved=mean([episode.correct for episode in episodes]),
        length=mean([len(episode.tokens) for episode in episodes]),
        finished=mean([episode.finish_reason == "stop" for episode in episodes]))


def mean(values):
    return sum(values) / len(values) if values else None


METRICS = ["loss", "entropy", "ratio", "clip_fraction", "grad_norm"]  # of update_policy
EVALUATIONS = [f"{way}_{what}" for way in ("eval", "eval2x", "greedy")
               for what in ("solved", "length", "finished")]
SHOWN = ["reward", "solved", "length_mean", "groups", "groups_dropped", "gap_k3", "rollout_s", "train_s",
         "eval_solved", "eval2x_solved"]     # on the terminal


def summary(kept, drawn, updates):
    """What a step logs of all that it sampled, and of its updates."""
    episodes = [episode for group in drawn for episode in group]
    found = outcome(episodes)
    row = dict(
        reward=mean([episode.reward for episode in episodes]), solved=found["solved"],
        length_mean=found["length"], length_max=max((len(e.tokens) for e in episodes), default=None),
        finished=found["finished"], groups=len(drawn), groups_dropped=len(drawn) - len(kept))
    for name in METRICS:
        row[name] = mean([update[name] for update in updates])
    for name in ("gap_k3", "gap_max"):       # after the first update the weights are no longer the sampler's
        row[name] = updates[0][name] if updates else None
    return row | dict(trained_tokens=sum(update["trained_tokens"] for update in updates))


def record(log, tokenizer, step, row, drawn):
    """Log a row, and some of the completions as text."""
    log.row(step=step, **row)
    for episode in [episode for group in drawn for episode in group][:samples_per_step]:
        log.sample(
            step=step, problem=episode.problem, reward=episode.reward, correct=episode.correct,
            n_tokens=len(episode.tokens), finish_reason=episode.finish_reason,
            prompt=tokenizer.decode(episode.prompt), text=tokenizer.decode(episode.tokens))


def check():
    """Raise ValueError for the first key that is out of range, where nothing later would name it."""
    counts = [(key, globals()[key] >= 1, "at least 1")
              for key in ("batch_prompts", "max_new_tokens", "max_draws", "context_mult")]
    training.check(
        globals(), *counts,
        ("group_size", group_size >= 2, "at least 2: an advantage compares completions"),
        ("temperature", temperature > 0, "above 0: there is nothing to learn from equal completions"),
        ("updates_per_batch", 1 <= updates_per_batch <= batch_prompts * group_size, "1 to the completions"),
        ("loss_on", loss_on in ("tail", "all"), "tail or all"),
        ("eval_temperature", eval_temperature >= 0, "at least 0"),
        ("eps_low", 0 <= eps_low <= 1, "0 to 1"),
        ("eps_high", eps_high >= 0, "at least 0"),
        ("delta", delta >= 1 + eps_high, "at least 1 + eps_high"),
        ("truncated", truncated in ("keep", "zero", "drop"), "keep, zero or drop"),
        ("overlong_margin", 0 <= overlong_margin <= max_new_tokens, "0 to max_new_tokens"),
        ("init_from", init_from != "scratch", "a model that gets some answers right (train_sft.py)"))
    check_reward(reward, length_targets)


# -----------------------------------------------------------------------------------------------------------

def train_step(model, tokenizer, optimizer, source, state, step):
    """One batch of rollouts and the updates on it. -> what to log, and all groups that were drawn"""
    began = time.perf_counter()
    kept, drawn = collect(model, tokenizer, source, state)
    rollout_s = time.perf_counter() - began
    batch = [episode for group in kept for episode in group]
    rate = training.learning_rate(step, lr, warmup_steps, schedule, max_steps)
    updates = []
    for u in range(updates_per_batch):
        updates.append(update_policy(model, optimizer, batch[u::updates_per_batch], rate))
    train_s = time.perf_counter() - began - rollout_s
    row = summary(kept, drawn, [update for update in updates if update])
    sampled = sum(len(episode.tokens) for group in drawn for episode in group)
    rates = dict(
        lr=rate, rollout_s=rollout_s, train_s=train_s,
        rollout_tokens_per_s=sampled / max(rollout_s, 1e-9),
        train_tokens_per_s=row["trained_tokens"] / max(train_s, 1e-9),
        peak_memory_bytes=peak_bytes(model.lm_head.weight.device)[0])
    return row | rates, drawn


def load(init, device_name):
    """The model, its tokenizer and a fresh optimizer."""
    location, weights_dtype = device_and_dtype(device_name, dtype)
    model = GPT.from_pretrained(init, dtype=weights_dtype, device=location)
    model.checkpointing = checkpointing
    optimizer = training.Optimizer(
        model, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, master_device=master_device)
    return model, load_tokenizer(init), optimizer


def main():
    check()
    rank, _, device_name = training.start_processes(device)
    source = load_task(task, seed)
    out, init, state = training.open_run(out_dir, init_from, "train_rl.py")
    model, tokenizer, optimizer = load(init, device_name)
    if state is None:
        began_from = Path(init).resolve() if Path(init).exists() else init    # `last` may be turned elsewhere
        state = dict(script="train_rl.py", step=0, cursor=0, began_from=str(began_from))
    training.same_keys(globals(), state)
    first = state["step"]
    if first:
        optimizer.load(Path(init) / "optimizer.safetensors")
    log = training.Log(out, first, wandb_project, globals()) if rank == 0 else None
    stop, progress = training.Stop(), training.Progress(first, max_steps)

    step = first - 1
    for step in range(first, max_steps):
        row = dict.fromkeys(EVALUATIONS)
        if eval_every and step % eval_every == 0:
            row |= evaluations(model, tokenizer)
        measured, drawn = train_step(model, tokenizer, optimizer, source, state, step)
        row |= measured | dict(remaining_s=progress.remaining_s(step))
        stopping = bool(stop)
        if rank == 0:
            record(log, tokenizer, step, row, drawn)
            shown = [f"{name} {row[name]:.3g}" for name in SHOWN if row[name] is not None]
            progress.line(step, "  ".join(shown))
            if stopping or step + 1 == max_steps or save_every and (step + 1) % save_every == 0:
                training.save_run(out, step + 1, model, optimizer, state, local_folder(init, TOKENIZER_FILES))
        if stopping:
            break

    result = dict(steps=step + 1, out_dir=out_dir)
    if step + 1 == max_steps and eval_every:
        row = evaluations(model, tokenizer, greedy=True)
        result |= {key: round(value, 4) for key, value in row.items()}
        if rank == 0:
            record(log, tokenizer, max_steps, row, [])
    if rank == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    run(main)
