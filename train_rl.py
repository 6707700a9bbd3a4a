"""
Reinforcement learning (GRPO, arXiv 2402.03300) on traces of any length, in memory that does not grow with them.

    python train_rl.py config/rl_passes.py                                   # the embedded task, after config/sft_passes.py
    python train_rl.py config/rl_smollm2_cpu.py                              # real weights on a CPU, after config/sft_smollm2_cpu.py
    torchrun --nproc_per_node=4 train_rl.py config/rl_qwen3_1p7b_80gb.py     # rollouts and gradients divided over 4 GPUs
    python train_rl.py config/rl_qwen3_1p7b_80gb.py --plan=True              # where the memory will go, and one step to prove it
    python train_rl.py config/rl_passes.py --init_from=resume                # go on where it was killed

One step:
  1. draw batch_prompts problems and sample group_size completions of each, by engine.generate: prefix + window, constant memory
  2. score them; the advantage of a completion is its reward minus the mean of its group
  3. drop the groups whose rewards are all equal, and draw others until the batch is full
  4. `segments` cuts each completion into what the trainer sees: by default the prefix and the last context_mult windows
  5. log-probabilities of its targets under the current weights, and their ratio to those that the sampler recorded
  6. the clipped policy gradient, normalised by the number of trained tokens in the whole batch
  7. AdamW, log, checkpoint
`rollout` is 1 to 3, `update_policy` 4 to 7; both read the configuration below. The sampler and the trainer share one copy of the weights.
Steps count from 0 in log.csv, and an evaluation there is of the weights before that step.
Left out on purpose: a critic, an entropy bonus, sampling while training (async_level only shows what such old rollouts do to learning),
top-p and top-k in rollouts (their log-probabilities would be of another distribution than the trainer's).
"""
init_from = "data/smollm2"        # resume | a Hugging Face folder | a hub name
out_dir = "out-rl"                # the run's folder: checkpoints, log.csv, samples.jsonl
task = "reasoning_gym:chain_sum"  # passes:4-60 | reasoning_gym:<dataset> | jsonl:<path> | py:<file>
pass_rates = ""                   # a file of pass_rates/ that eval.py left for this task and seed: it chooses the problems; "" = all
min_pass = 0.0                    # with pass_rates: from this pass rate on, 0 to 1
max_pass = 1.0                    # with pass_rates: up to this pass rate, min_pass to 1
system = ""                       # system message for the chat template, "" = none
template_args = {}                # further arguments of the chat template, such as {"enable_thinking": True}
reward = {"correct": 1.0}         # weight of each part: correct | format | overlong | length (see tasks.reward_parts)
length_targets = []               # tokens; if any, each prompt asks for one of them, and the part "length" rewards keeping to it
overlong_margin = 0               # the part "overlong" penalises the last so many tokens before max_new_tokens more and more
truncated = "keep"                # completions cut at max_new_tokens: keep (scored as they are) | zero (reward 0) | drop (not trained on)
# rollouts
batch_prompts = 16                # groups per step
group_size = 8                    # completions per prompt, at least 2
max_new_tokens = 4096             # most tokens per completion
temperature = 1.0                 # > 0
window: int | list | None = 2048  # tokens, the current one included; None = full attention
prefix_len: int | None = None     # tokens kept for good; None = the whole prompt
rope = "continue"                 # continue: absolute positions | reset: close the gap behind the prefix
rows: int | None = None           # completions sampled at once; None = as many as fit the memory
compile = False                   # True: faster sampling by fast/step.py, after some seconds of compiling (on a CPU: by a C compiler)
filter_groups = True              # drop groups without signal and draw others
max_draws = 4                     # most draws to fill a batch
async_level = 0                   # how many steps old the sampling policy is; 0 = on policy
# what the trainer sees
context_mult = 4                  # windows of context passed, the last of which carries the loss
carry = False                     # False: the context begins at a cut (the paper) | True: it starts from the exact cache before it
loss_on = "tail"                  # tail: the last window of a completion (the paper) | all: all of it, chunk by chunk
# the loss
loss = "grpo"                     # grpo (INTELLECT-2's two-sided clip) | masked_is (INTELLECT-3) | dppo (prime-rl, August 2026)
eps_low = 0.2                     # grpo: ratios below 1 - eps_low gain nothing
eps_high = 0.2                    # grpo: ratios above 1 + eps_high gain nothing
delta = 4.0                       # grpo: the largest ratio where the advantage is negative
alpha = 0.5                       # masked_is: tokens with smaller ratios are dropped
beta = 5.0                        # masked_is: tokens with larger ratios are dropped
advantage_std = False             # divide advantages by the standard deviation of their group
normalise = "token"               # token: by the trained tokens of the batch | fixed: by the most there could be | sequence: mean of means
kl_coef = 0.0                     # weight of the KL (k3) to the model that the run started from; > 0 keeps a copy of it
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
master_device: str | None = None  # where bfloat16 weights have their float32 masters and moments: None = beside them | cpu
# evaluation, files, machine
eval_every = 20                   # steps between evaluations on held-out problems; 0 = never
eval_size = 64                    # held-out problems, one completion each; at the trained length and at twice it
eval_temperature = 1.0            # of these completions; 0 = greedy, which the last evaluation adds anyhow
save_every = 20                   # steps between checkpoints; 0 = at the end only
samples_per_step = 2              # completions written to samples.jsonl at each step
wandb_project = ""                # log to Weights & Biases too (WANDB_MODE=offline works); "" = do not
plan = False                      # print where the memory goes, run one step on the longest rollouts there can be, and exit
seed = 1                          # of problems and samples
device = "auto"                   # auto (cuda, then mps, then cpu) | cpu | cuda | mps
dtype = "auto"                    # auto (bfloat16 where the hardware has it, else float32) | float32 | bfloat16

from configurator import configure, run, settings

configure(globals())

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import training
from checkpoint import local_folder
from device import device_and_dtype, free_bytes, peak_bytes
from engine import Completion, generate, hashed
from model import GPT
from sliding_cache import SlidingCache, layer_windows, row_bytes
from tasks import ask_for_length, between, check_reward, load_task, prompt_ids, reward_parts, text_of
from tokenizer import TOKENIZER_FILES, load_tokenizer

CARRY_CHUNK = 1024  # tokens that run through the model at once on the way to the context


@dataclass
class Episode(Completion):
    """A completion with what it earned. problem: its number; correct: the scorer's verdict, 0 to 1; step: of the policy that sampled it."""
    problem: int = 0
    correct: float = 0.0
    reward: float = 0.0
    advantage: float = 0.0
    step: int = 0

    def ids(self, a, b):
        """The tokens a..b-1 of prompt and completion, counted from the first of the prompt."""
        n = len(self.prompt)
        return self.prompt[a:b] + self.tokens[max(a - n, 0):max(b - n, 0)]


@dataclass
class Segment:
    """What one forward pass of the trainer sees of a sequence (prompt and completion, indices from 0): the inputs start..end-2, and before
    them the prefix. The tokens first..end-1 are its targets, each predicted from the input before it. carried: the inputs 0..start-1
    were run through the model before, and are in the cache."""
    start: int
    first: int
    end: int
    carried: bool


def segments(n_prompt, n_new, P, W, m, carry, loss_on):
    """How a sequence of n_prompt + n_new tokens is trained with prefix P, window W (None = full attention: whole, all targets) and
    context_mult m. -> [Segment, ...], in order; every decision about what is passed, carried and trained is made here.
    tail: the last min(W, n_new) tokens are targets, the context is the m W inputs before the last of them.
    all, carry: consecutive chunks of m W targets, each from the cache that the one before it leaves.
    all, no carry: chunks of W targets, each with (m - 1) W inputs of context before its own."""
    if loss_on not in ("tail", "all"):
        raise ValueError(f"loss_on={loss_on!r}: 'tail' or 'all'")
    end = n_prompt + n_new
    if W is None:
        return [Segment(0, n_prompt, end, False)]
    if loss_on == "tail":
        chunks = [(max(n_prompt, end - W), end)]
    else:
        size = m * W if carry else W
        chunks = [(a, min(a + size, end)) for a in range(n_prompt, end, size)]
    out = []
    for a, b in chunks:
        if carry and loss_on == "all":
            start = a - 1 if a > n_prompt else 0
        else:
            start = b - 1 - m * W if b - 1 - m * W > P else 0                         # nothing between prefix and context: pass it whole
        out.append(Segment(start, a, b, carry and start > 0))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# rollouts

def rollout(model, tokenizer, source, numbers, step=0):
    """Sample group_size completions of each of the problems, score them and compare them. -> groups, lists of Episodes"""
    problems = [ask_for_length(source.draw(n), length_targets, n, seed) for n in numbers]
    prompts = [ids for problem in problems for ids in [prompt_ids(problem, tokenizer, system, template_args)] * group_size]
    sampled, shown = 0, time.perf_counter()

    def on_token(i, token):
        nonlocal sampled, shown
        sampled += 1
        if time.perf_counter() - shown > 20:
            shown = time.perf_counter()
            print(f"sampling {len(prompts)} completions: {sampled:,} tokens so far", file=sys.stderr, flush=True)

    seeds = [sample_seed(n * group_size + k) for n in numbers for k in range(group_size)]
    done = generate(model, prompts, max_new_tokens, prefix_len=prefix_len, window=window, rope=rope, temperature=temperature, top_p=1.0,
                    stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab, seed=seeds, rows=rows, on_token=on_token, compile=compile)
    if model.lm_head.weight.is_cuda:
        torch.cuda.empty_cache()                                                      # the sampler's cache makes room for the trainer
    groups = []
    for i, (n, problem) in enumerate(zip(numbers, problems, strict=True)):
        group = [Episode(**vars(c), problem=n, step=step) for c in done[i * group_size:(i + 1) * group_size]]
        for e in group:
            tokens = e.tokens[:-1] if e.finish_reason == "stop" else e.tokens
            text = text_of(tokens, e.prompt, tokenizer)
            e.correct = float(source.score(problem, text, tokens, e.finish_reason))
            parts = reward_parts(problem, text, len(e.tokens), e.correct, max_new_tokens, overlong_margin)
            e.reward = sum(weight * parts[name] for name, weight in reward.items())
            if truncated == "zero" and e.finish_reason == "length":
                e.reward = 0.0
        for e, a in zip(group, advantages([e.reward for e in group], advantage_std), strict=True):
            e.advantage = a
        groups.append(group)
    return groups


def sample_seed(n):
    """The seed of the n-th sample of the run: another seed gives another stream for every one."""
    return hashed(seed, n)


def advantages(rewards, std):
    """Reward minus mean of the group, divided by its standard deviation + 1e-6 if std. Exactly 0 where all rewards are equal: the
    rounded mean of equal numbers may differ from them, and a tiny deviation divided by a tiny one would be of any size."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    scale = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5 + 1e-6 if std else 1.0
    return [(r - mean) / scale for r in rewards]


def collect(model, tokenizer, source, cursor, step=0, rank=0, world=1):
    """Rollouts of the problems from number `cursor` on, until batch_prompts groups carry a signal (or max_draws draws were made).
    The processes share each draw and end with the same lists. -> groups to train on, all groups drawn, next cursor"""
    kept, drawn = [], []
    for _ in range(max_draws if filter_groups else 1):
        numbers = range(cursor, cursor + batch_prompts - len(kept))
        cursor = numbers.stop
        mine = [n for n in numbers if n % world == rank]
        new = sorted(training.gather(rollout(model, tokenizer, source, mine, step)), key=lambda g: g[0].problem)
        drawn += new
        kept += [g for g in new if not filter_groups or any(e.advantage for e in g)]
        if len(kept) == batch_prompts:
            break
    return kept, drawn, cursor


# ---------------------------------------------------------------------------------------------------------------------
# the update

def policy_loss(logp, old, advantage, mask, kind=None):
    """The loss of each token (B, T), 0 where not mask, its ratio and whether it was clipped or dropped. logp: log-probabilities under the
    weights in training; old: those that the sampler recorded; advantage (B, 1). A sequence-level ratio replaces logp - old by its mean
    over the row where a completion is one segment; with loss_on="all" it needs a pass over all segments first."""
    kind = kind or loss
    ratio = torch.where(mask, logp - old, 0).clamp(max=20).exp()                      # (B, T), never inf: 0 times its gradient is NaN
    if kind == "grpo":       # INTELLECT-2 (arXiv 2505.07291), eq. 1; delta binds only where the advantage is negative
        bounded = ratio.clamp(1 - eps_low, 1 + eps_high)
        gain = torch.minimum(ratio.clamp(max=delta) * advantage, bounded * advantage)
        out = torch.where(advantage > 0, ratio > 1 + eps_high, (ratio < 1 - eps_low) | (ratio > delta))
    elif kind == "masked_is":  # INTELLECT-3 (arXiv 2512.16144)
        out = (ratio < alpha) | (ratio > beta)
        gain = torch.where(out, 0, ratio * advantage)
    elif kind == "dppo":     # prime-rl, August 2026: far moves of the probability itself are dropped; a pull back to the sampler for all
        moved = torch.where(mask, logp.exp() - old.exp(), 0).detach()
        out = torch.where(advantage > 0, moved > 0.2, moved < -0.2)
        gain = torch.where(out, 0, ratio * advantage) - 1e-3 * torch.where(mask, logp - old, 0).square()
    else:
        raise ValueError(f"loss={kind!r}: grpo, masked_is or dppo")
    return torch.where(mask, -gain, 0), ratio.detach(), out & mask & (advantage != 0)


def k3(log_ratio):
    """Schulman's estimate of KL(sampler || other), exp(d) - 1 - d with d = log p_other - log p_sampler; never negative. Beyond d = 20
    it is continued linearly, so that it and its gradient stay finite."""
    d = log_ratio.clamp(max=20)
    return d.expm1() + d.exp() * (log_ratio - d) - log_ratio


def token_weights(counts, most):
    """What a trained token of each completion weighs in the loss, given how many each of them has and could at most have."""
    n, total = sum(c > 0 for c in counts), sum(counts)                                # of those that count
    if normalise not in ("token", "fixed", "sequence"):
        raise ValueError(f"normalise={normalise!r}: token, fixed or sequence")
    return [0.0 if not c else {"token": 1 / total, "fixed": 1 / (n * most), "sequence": 1 / (n * c)}[normalise] for c in counts]


def update_policy(model, optimizer, episodes, rate, reference=None, rank=0, world=1):
    """One optimizer step on all the episodes, of which this process computes its share. -> dict of metrics, the same everywhere, or
    None: no token of them is to be trained on, and the weights stay as they are."""
    W = training_window(model.config)
    cut = [segments(len(e.prompt), len(e.tokens), prefix_of(e), W, context_mult, carry, loss_on) for e in episodes]
    counts = [0 if truncated == "drop" and e.finish_reason == "length" else sum(sum(trained(e, s)) for s in segs)
              for e, segs in zip(episodes, cut, strict=True)]
    if not sum(counts):
        return None
    most = max_new_tokens if loss_on == "all" or W is None else min(W, max_new_tokens)
    work = [item for item in zip(episodes, cut, token_weights(counts, most), strict=True) if item[2]]
    work = sorted(work, key=lambda item: item[1][-1].end)[rank::world]
    sums, largest = [0.0] * 7, [0.0]
    for i in range(0, len(work), micro_batch):
        batch = work[i:i + micro_batch]
        caches = [open_cache(m, batch) for m in (model, reference) if m is not None]
        for c in range(max(len(segs) for _, segs, _ in batch)):
            rows_left = [r for r, (_, segs, _) in enumerate(batch) if c < len(segs)]
            part = [(batch[r][0], batch[r][1][c]) for r in rows_left]
            if any(seg.carried for _, seg in part):
                for m, cache in zip((model, reference), caches, strict=False):
                    carry_to(m, cache, rows_left, part)
            logp, entropy, mask = segment_logprobs(model, part, caches[0], rows_left)                  # (B, T) each
            old = table([e.logprobs for e, _ in part], part, logp)
            advantage = torch.tensor([[e.advantage] for e, _ in part], dtype=logp.dtype, device=logp.device)
            weight = torch.tensor([[batch[r][2]] for r in rows_left], dtype=logp.dtype, device=logp.device)
            losses, ratio, clipped = policy_loss(logp, old, advantage, mask)
            kl = torch.zeros_like(logp)
            if reference is not None:
                with torch.no_grad():
                    frozen, _, _ = segment_logprobs(reference, part, caches[1], rows_left)
                kl = k3(torch.where(mask, frozen - logp, 0))
            total = (weight * (losses + kl_coef * kl)).sum()
            total.backward()
            gap = torch.where(mask, logp.detach() - old, 0)
            for k, x in enumerate((mask, ratio * mask, clipped, entropy, k3(gap), kl, total)):
                sums[k] += x.sum().item()
            largest[0] = max(largest[0], gap.abs().max().item())
    norm = optimizer.step(rate, clip)
    n, *sums = training.all_reduce(sums)
    names = ("ratio", "clip_fraction", "entropy", "gap_k3", "kl")
    return dict(zip(names, (x / max(n, 1) for x in sums), strict=False)) | dict(
        gap_max=training.all_reduce(largest, "max")[0], loss=sums[-1], trained_tokens=int(n), grad_norm=norm)


def training_window(config):
    """The widest window among the layers, None if one of them has none."""
    windows = layer_windows(config, window)
    return None if None in windows else max(windows)


def prefix_of(episode):
    return len(episode.prompt) if prefix_len is None else prefix_len


def trained(episode, segment):
    """Which targets of a segment carry loss: those that were sampled, not forced."""
    n = len(episode.prompt)
    return episode.sampled[segment.first - n:segment.end - n]


def table(values, part, like):
    """The slices of per-token values that belong to the targets of each segment, as (B, T), padded with 0."""
    rows_ = [x[seg.first - len(e.prompt):seg.end - len(e.prompt)] for x, (e, seg) in zip(values, part, strict=True)]
    out = torch.zeros(like.shape, dtype=like.dtype)
    for r, row in enumerate(rows_):
        out[r, :len(row)] = torch.tensor(row, dtype=like.dtype)
    return out.to(like.device)


def open_cache(model, batch):
    """The cache that carries a micro-batch's prefixes and windows from segment to segment, None where nothing is carried."""
    if not any(seg.carried for _, segs, _ in batch for seg in segs):
        return None
    weight, longest = model.lm_head.weight, max(segs[-1].end for _, segs, _ in batch)
    prefixes = [min(prefix_of(e), longest) for e, _, _ in batch]
    windows = [min(w, longest) for w in layer_windows(model.config, window)]
    return SlidingCache(model.config, len(batch), torch.tensor(prefixes), windows, dtype=weight.dtype, device=weight.device)


@torch.no_grad()
def carry_to(model, cache, rows_, part):
    """Run what precedes each segment through the model, without gradients, so that its row of the cache stands where it starts."""
    while behind := [(row, e, seg.start) for row, (e, seg) in zip(rows_, part, strict=True) if cache.lengths[row] < seg.start]:
        pieces = [e.ids(cache.lengths[row], min(start, cache.lengths[row] + CARRY_CHUNK)) for row, e, start in behind]
        idx, lengths = training.padded(pieces, cache.length.device)
        model.features(idx, rope=rope, cache=cache, rows=[row for row, _, _ in behind], n_new=lengths)


def segment_logprobs(model, part, cache, rows_):
    """Log-probabilities of the targets of some segments, their entropies, and which of them carry loss, all (B, T). With a cache, its
    given rows hold what comes before."""
    heads = [prefix_of(e) if cache is None and seg.start else 0 for e, seg in part]   # prefix tokens in front of a context
    idx, lengths = training.padded([e.ids(0, n) + e.ids(seg.start, seg.end - 1) for n, (e, seg) in zip(heads, part, strict=True)],
                                   model.lm_head.weight.device)
    at = torch.arange(idx.size(1), device=idx.device)
    n, start, head = (torch.tensor(x, device=idx.device)[:, None] for x in (lengths, [seg.start for _, seg in part], heads))
    if cache is None:
        positions = torch.where(at < head, at, at - head + start)
        P = torch.tensor([prefix_of(e) for e, _ in part], device=idx.device)
        x = model.features(idx, P, window, positions=positions, rope=rope)            # (B, Tc, n_embd)
    else:
        x = model.features(idx, rope=rope, cache=cache, rows=rows_, n_new=lengths)
    n_targets = torch.tensor([seg.end - seg.first for _, seg in part], device=idx.device)[:, None]
    place = torch.arange(int(n_targets.max()), device=idx.device) < n_targets         # (B, T)
    targets = torch.tensor([t for e, seg in part for t in e.ids(seg.first, seg.end)], device=idx.device)
    flat = training.token_logprobs(x[(at >= n - n_targets) & (at < n)], model.lm_head.weight, targets, temperature)
    logp, entropy = (torch.zeros(place.shape, dtype=f.dtype, device=f.device).masked_scatter(place, f) for f in flat)
    mask = table([e.sampled for e, _ in part], part, logp).bool()
    return logp, torch.where(mask, entropy, 0), mask


# ---------------------------------------------------------------------------------------------------------------------
# evaluation and the plan

def evaluate(model, tokenizer, longer, heat, rank=0, world=1):
    """One completion of each of eval_size held-out problems, with `longer` times the tokens (and problems as much longer, where the
    task knows how). -> dict of the share that is right, mean tokens, share that finished"""
    source = load_task(task, seed, held_out=True, longer=longer)
    numbers = range(rank, min(eval_size, source.size or eval_size), world)
    problems = [ask_for_length(source.problem(n), length_targets, -1 - n, seed) for n in numbers]
    prompts = [prompt_ids(p, tokenizer, system, template_args) for p in problems]
    done = generate(model, prompts, longer * max_new_tokens, prefix_len=prefix_len, window=window, rope=rope, temperature=heat,
                    top_p=1.0, stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab, rows=rows, compile=compile,
                    seed=[sample_seed(-1 - n) for n in numbers])
    finished = [c.finish_reason == "stop" for c in done]
    said = [c.tokens[:len(c.tokens) - f] for c, f in zip(done, finished, strict=True)]
    right = [float(source.score(p, text_of(tokens, c.prompt, tokenizer), tokens, c.finish_reason))
             for p, c, tokens in zip(problems, done, said, strict=True)]
    n, *sums = training.all_reduce([len(done), sum(right), sum(len(c.tokens) for c in done), sum(finished)])
    return dict(zip(("solved", "length", "finished"), (x / max(n, 1) for x in sums), strict=True))


def saved_bytes(model, n_tokens):
    """Bytes that the backward of a sequence of n_tokens needs: measured, weights not counted."""
    seen, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        x = model.features(torch.zeros(1, n_tokens, dtype=torch.long, device=model.lm_head.weight.device), 0, window, rope=rope)
    return sum(seen.values()) + x.nbytes


def show_plan(model, optimizer, tokenizer, source, reference):
    """Print what this configuration keeps in memory and where, then sample a token with a full cache and train one step on completions
    of max_new_tokens: what does not fit fails now. -> dict of bytes"""
    config, weight = model.config, model.lm_head.weight
    prompt = prompt_ids(source.draw(0), tokenizer, system, template_args)
    longest = len(prompt) + max_new_tokens
    P = len(prompt) if prefix_len is None else min(prefix_len, longest)
    windows = [w and min(w, max_new_tokens) for w in layer_windows(config, window)]
    row = row_bytes(config, windows, P, longest, weight.dtype)
    n_rows = min(batch_prompts * group_size, rows or max(int(0.8 * free_bytes(weight.device) / row), 1))
    W = training_window(config)
    cut = segments(len(prompt), max_new_tokens, P, W, context_mult, carry, loss_on)
    seg = max(cut, key=lambda s: s.end - s.start)
    passed = seg.end - 1 - seg.start + (P if seg.start and not carry else 0)
    targets, vocab = min(seg.end - seg.first, passed) * micro_batch, config.vocab_size
    per_token = (saved_bytes(model, 256) - saved_bytes(model, 128)) / 128
    where = str(weight.device)
    there, n_weights = str(next(iter(optimizer.masters.values())).device), sum(p.nbytes for p in model.parameters())
    n_masters = sum(p.nbytes for p in optimizer.masters.values())
    lines = [  # name, bytes, where, what
        ("weights", n_weights, where, ""), ("reference", n_weights if kl_coef else 0, where, "for the KL"),
        ("masters", n_masters if optimizer.has_masters else 0, there, "in float32"), ("gradients", n_masters, there, ""),
        ("moments", 2 * n_masters, there, "of AdamW"),
        ("sampling_cache", n_rows * row, where, f"{n_rows} rows of up to {max(P + w if w else longest for w in windows):,} tokens"),
        ("carried_cache", micro_batch * row * any(s.carried for s in cut), where, f"{micro_batch} rows"),
        ("activations", int(micro_batch * passed * per_token), where, f"{micro_batch} x {passed:,} tokens"),
        ("logits", 12 * min(targets * vocab, max(training.LOGITS, vocab)), where, f"{targets:,} targets, some at a time")]
    for name, n, place, what in lines:
        if n:
            print(f"{name:16}{n / 1e9:10.3f} GB  {place}  {what}")
    print("the sampling cache is freed before what stands below it and the gradients are needed; rows=None takes as many rows as fit")
    cache = SlidingCache(config, n_rows, P, windows, max_len=longest, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        model.features(torch.zeros(n_rows, 1, dtype=torch.long, device=weight.device), rope=rope, cache=cache)
    del cache
    tokens = [(7 * i) % min(tokenizer.n_vocab, vocab) for i in range(max_new_tokens)]
    episodes = [Episode(prompt, tokens, [-1.0] * max_new_tokens, [True] * max_new_tokens, "stop", advantage=1.0 - 2 * (i % 2))
                for i in range(micro_batch)]
    update_policy(model, optimizer, episodes, 0.0, reference)
    peak, memory = peak_bytes(weight.device)
    print(f"{'peak':16}{peak / 1e9:10.3f} GB  {memory}, of one step on completions of {max_new_tokens:,} tokens")
    return {f"{name}_bytes": n for name, n, _, _ in lines} | dict(peak_memory_bytes=peak)


def check():
    training.check(
        globals(), ("group_size", group_size >= 2, "at least 2: an advantage compares completions"),
        ("temperature", temperature > 0, "above 0: there is nothing to learn from equal completions"),
        *((key, globals()[key] >= 1, "at least 1") for key in ("batch_prompts", "max_new_tokens", "max_draws", "context_mult")),
        ("rows", rows is None or rows >= 1, "None (as many as fit) or at least 1"), ("async_level", async_level >= 0, "at least 0"),
        ("updates_per_batch", 1 <= updates_per_batch <= batch_prompts * group_size, "1 to the number of completions"),
        ("loss_on", loss_on in ("tail", "all"), "tail or all"), ("eval_temperature", eval_temperature >= 0, "at least 0"),
        ("loss", loss in ("grpo", "masked_is", "dppo"), "grpo, masked_is or dppo"), ("kl_coef", kl_coef >= 0, "at least 0"),
        ("eps_low", 0 <= eps_low <= 1, "0 to 1"), ("eps_high", eps_high >= 0, "at least 0"),
        ("delta", delta >= 1 + eps_high, "at least 1 + eps_high"), ("beta", 0 <= alpha < 1 < beta, "above 1, and alpha from 0 to below 1"),
        ("normalise", normalise in ("token", "fixed", "sequence"), "token, fixed or sequence"),
        ("truncated", truncated in ("keep", "zero", "drop"), "keep, zero or drop"),
        ("overlong_margin", 0 <= overlong_margin <= max_new_tokens, "0 to max_new_tokens"),
        ("length_targets", all(type(n) is int and n > 0 for n in length_targets), "a list of numbers of tokens"),
        ("max_pass", 0 <= min_pass <= max_pass <= 1, f"0 to 1, and not below min_pass={min_pass!r}"),
        ("pass_rates", pass_rates or (min_pass, max_pass) == (0, 1), "a file for min_pass and max_pass to choose by"),
        ("init_from", init_from != "scratch", "a model that gets some answers right: make one with train_sft.py"))
    check_reward(reward, length_targets)


# ---------------------------------------------------------------------------------------------------------------------

def main():
    check()
    rank, world, name = training.start_processes(device)
    where, kind = device_and_dtype(name, dtype)
    source = load_task(task, seed)
    if pass_rates:
        source = between(source, pass_rates, min_pass, max_pass)
    out, init, state = (None, init_from, None) if plan else training.open_run(out_dir, init_from, "train_rl.py")
    model, tokenizer = GPT.from_pretrained(init, dtype=kind, device=where), load_tokenizer(init)
    folder = local_folder(init, TOKENIZER_FILES)
    training_window(model.config)                                                     # a bad window is named now
    model.checkpointing = checkpointing
    optimizer = training.Optimizer(model, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, master_device=master_device)
    if state is None:
        began_from = str(Path(init).resolve() if Path(init).exists() else init)       # `last` may be turned to another checkpoint
        state = dict(script="train_rl.py", step=0, cursor=0, began_from=began_from, queue=[])
    training.same_keys(globals(), state)
    first, cursor = state["step"], state["cursor"]
    queue = [[Episode(**e) for e in batch] for batch in state["queue"]]               # batches that wait to be trained on
    if first:
        optimizer.load(Path(init) / "optimizer.safetensors")
    reference = GPT.from_pretrained(state["began_from"], dtype=kind, device=where).requires_grad_(False) if kl_coef else None
    if plan:
        print(json.dumps(show_plan(model, optimizer, tokenizer, source, reference)))
        return
    log, stop, progress = training.Log(out, first) if rank == 0 else None, training.Stop(), training.Progress(first, max_steps)
    board = start_wandb(out) if rank == 0 and wandb_project else None
    step = first - 1
    for step in range(first, max_steps):
        row = dict.fromkeys(EVALUATIONS)
        if eval_every and step % eval_every == 0:
            row |= evaluations(model, tokenizer, rank, world)
        began, drawn, n_kept = time.perf_counter(), [], 0
        while len(queue) <= async_level:
            kept, new, cursor = collect(model, tokenizer, source, cursor, step, rank, world)
            queue.append([e for group in kept for e in group])
            drawn, n_kept = drawn + new, n_kept + len(kept)
        rollout_s, batch = time.perf_counter() - began, queue.pop(0)
        rate = training.learning_rate(step, lr, warmup_steps, schedule, max_steps)
        updates = [update_policy(model, optimizer, batch[u::updates_per_batch], rate, reference, rank, world)
                   for u in range(updates_per_batch)]
        updates = [u for u in updates if u]
        train_s = time.perf_counter() - began - rollout_s
        row = summary(drawn, n_kept, updates) | dict(lr=rate) | row | dict(
            rollout_tokens_per_s=sum(len(e.tokens) for g in drawn for e in g) / max(rollout_s, 1e-9),
            train_tokens_per_s=sum(u["trained_tokens"] for u in updates) / max(train_s, 1e-9),
            rollout_s=rollout_s, train_s=train_s, peak_memory_bytes=peak_bytes(where)[0], remaining_s=progress.remaining_s(step))
        stopping = bool(stop)
        if rank == 0:
            record(log, board, progress, tokenizer, step, row, drawn)
            if save_every and (step + 1) % save_every == 0 or step + 1 == max_steps or stopping:
                state |= dict(cursor=cursor, queue=[[asdict(e) for e in b] for b in queue])
                training.save_run(out, step + 1, model, optimizer, state, folder)
        if stopping:
            break
    result = dict(steps=step + 1, out_dir=out_dir)
    if step + 1 == max_steps and eval_every:
        row = evaluations(model, tokenizer, rank, world) | named("greedy", evaluate(model, tokenizer, 1, 0, rank, world))
        if rank == 0:
            log.row(step=max_steps, **row)
            if board:
                board.log(row, step=max_steps)
        result |= {key: round(value, 4) for key, value in row.items()}
    if rank == 0:
        print(json.dumps(result))


EVALUATIONS = [f"{name}_{what}" for name in ("eval", "eval2x", "greedy") for what in ("solved", "length", "finished")]


def evaluations(model, tokenizer, rank, world):
    """Held-out problems at the trained length and at twice it."""
    return named("eval", evaluate(model, tokenizer, 1, eval_temperature, rank, world)) | named(
        "eval2x", evaluate(model, tokenizer, 2, eval_temperature, rank, world))


def named(prefix, values):
    return {f"{prefix}_{key}": value for key, value in values.items()}


def summary(drawn, n_kept, updates):
    """The row of a step: what was sampled, and what the updates were like (the gap is the first one's: later ones moved the weights)."""
    episodes = [e for g in drawn for e in g]

    def mean(values):
        return sum(values) / len(values) if values else None

    lengths = [len(e.tokens) for e in episodes]
    return dict(
        reward=mean([e.reward for e in episodes]), solved=mean([e.correct for e in episodes]), length_mean=mean(lengths),
        length_max=max(lengths, default=None), finished=mean([e.finish_reason == "stop" for e in episodes]), groups=len(drawn),
        groups_dropped=len(drawn) - n_kept,
        **{key: mean([u[key] for u in updates]) for key in ("loss", "entropy", "ratio", "clip_fraction", "kl", "grad_norm")},
        gap_k3=updates[0]["gap_k3"] if updates else None, gap_max=updates[0]["gap_max"] if updates else None,
        trained_tokens=sum(u["trained_tokens"] for u in updates))


def record(log, board, progress, tokenizer, step, row, drawn):
    log.row(step=step, **row)
    for e in [e for group in drawn for e in group][:samples_per_step]:
        log.sample(step=step, problem=e.problem, reward=e.reward, correct=e.correct, n_tokens=len(e.tokens), finish_reason=e.finish_reason,
                   prompt=tokenizer.decode(e.prompt), text=tokenizer.decode(e.tokens))
    if board:
        board.log({key: value for key, value in row.items() if value is not None}, step=step)
    progress.line(step, f"reward {row['reward'] or 0:.3f}  solved {row['solved'] or 0:.3f}  length {row['length_mean'] or 0:.0f}  "
                  f"groups dropped {row['groups_dropped']}/{row['groups']}  "
                  + ("no update: no group has a signal  " if row["gap_k3"] is None else f"gap {row['gap_k3']:.0e}  ")
                  + f"rollout {row['rollout_s']:.1f} s  train {row['train_s']:.1f} s" + "".join(
                      f"  {key} {row[key]:.3f}" for key in ("eval_solved", "eval2x_solved") if row[key] is not None))


def start_wandb(out):
    try:
        import wandb
    except ImportError:
        raise ValueError(f"wandb_project={wandb_project!r} needs the package wandb: pip install wandb") from None
    return wandb.init(project=wandb_project, name=out.name, dir=str(out), config=settings(globals()))


if __name__ == "__main__":
    run(main)
