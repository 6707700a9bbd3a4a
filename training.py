"""
What train_sft.py and train_rl.py share: log-probabilities, the optimizer, processes, checkpoints, logs.

A run is a folder:

    out/log.csv, out/samples.jsonl    one row per step, flushed as it comes
    out/step_000040/                  a model that sample.py reads (config.json, weights, tokenizer files),
                                      and what a resumed run needs: optimizer.safetensors, state.json
    out/last -> step_000040

A checkpoint is written under another name, synced and renamed, then `last` is turned to it, then older ones
are removed: whenever a run is killed, one whole checkpoint is there. On resume the logs are cut back to it,
and since nothing draws from a generator with hidden state (problems and samples are numbered), the run goes
on as if it had never stopped.
"""
import csv
import datetime
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from attention import upcast
from checkpoint import read_json, replacing
from configurator import require, settings
from tokenizer import TOKENIZER_FILES

LOGITS = 2**26  # at most so many logits at once (256 MB in float32)

# keys of which another value makes another run
SAME_IN_A_RUN = ("task", "window", "prefix_len", "rope", "seed")


def token_logprobs(features, head, targets, temperature=1.0):
    """Of softmax(features head^T / temperature), with features (n, n_embd) and head (vocab_size, n_embd): the
    log-probabilities of `targets` (n,) and the entropies, both (n,). All (n, vocab_size) logits never exist
    at once: they are made for some positions at a time, and anew in the backward. Entropies carry no
    gradient."""
    chunk = max(LOGITS // head.size(0), 1)
    results = [
        checkpoint(chunk_logprobs, x, head, t, temperature, use_reentrant=False)
        for x, t in zip(features.split(chunk), targets.split(chunk), strict=True)]
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def chunk_logprobs(features, head, targets, temperature):
    logp = (upcast(features @ head.T) / temperature).log_softmax(-1)  # (chunk, vocab_size)
    entropy = -(logp.detach().exp() * logp.detach()).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def padded(rows, device):
    """Lists of token ids as one tensor (rows, longest), padded on the right with 0, and their lengths."""
    idx = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return idx.to(device), [len(row) for row in rows]


# ------------------------------------------------------------------------------------------------------------
# the optimizer

class Optimizer:
    """AdamW. Weights in float32 or float64 are updated as they are. Weights in bfloat16 would round small
    updates away, so the optimizer then owns float32 masters of them, on `master_device` (default: the
    model's) with the moments, and writes them back rounded. Gradients are summed into float32 as each is
    computed, and the bfloat16 one is freed at once: no weight's gradient waits for those of the others.
    Weight decay is for matrices only."""

    def __init__(self, model, *, lr, betas=(0.9, 0.95), weight_decay=0.0, master_device=None):
        self.params = dict(model.named_parameters())
        dtypes = {p.dtype for p in self.params.values()}
        if torch.float16 in dtypes:
            raise ValueError("float16 has too little range for gradients: train in bfloat16 or float32")
        self.has_masters = torch.bfloat16 in dtypes
        self.masters = self.params
        if self.has_masters:
            self.masters = {name: float32_master(p, master_device) for name, p in self.params.items()}
        matrices = [p for p in self.masters.values() if p.dim() >= 2]
        vectors = [p for p in self.masters.values() if p.dim() < 2]
        groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=betas)

    @torch.no_grad()
    def step(self, lr, clip):
        """One update with the gradients since the last one, of all processes. -> their norm, unclipped"""
        masters = list(self.masters.values())
        for p in masters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            add_up(p.grad)
        norm = torch.nn.utils.clip_grad_norm_(masters, clip or math.inf).item()
        if not math.isfinite(norm):
            raise ValueError(f"the gradient norm is {norm}: no update was made; a smaller lr may help")
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()
        if self.has_masters:
            for name, p in self.params.items():
                p.copy_(self.masters[name])
        return norm

    def save(self, path):
        tensors = {}
        for name, p in self.masters.items():
            if self.has_masters:
                tensors[f"master.{name}"] = p
            for key, value in self.adamw.state[p].items():  # step, exp_avg, exp_avg_sq
                tensors[f"{key}.{name}"] = value
        save_file(tensors, path)

    @torch.no_grad()
    def load(self, path):
        if not path.exists():
            print(f"{path} is not there: the optimizer starts fresh", file=sys.stderr)
            return
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():
                key, name = stored.split(".", 1)
                master, tensor = self.masters[name], file.get_tensor(stored)
                if key == "master":  # also where the run goes on in float32
                    master.copy_(tensor)
                else:  # AdamW counts its steps on the CPU
                    self.adamw.state[master][key] = tensor if key == "step" else tensor.to(master)


def float32_master(p, device):
    """A copy of a weight in float32, which takes each gradient of the weight as soon as it is computed."""
    master = p.detach().to(device or p.device, torch.float32, copy=True)

    def take_gradient(p):
        grad = p.grad.to(master)
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        p.grad = None

    p.register_post_accumulate_grad_hook(take_gradient)
    return master


def learning_rate(step, lr, warmup_steps, schedule, max_steps):
    """Linear from lr / warmup_steps up to lr, then constant, or linear down to 0 after the last step. Steps
    count from 0."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    return lr * (max_steps - step) / (max_steps - warmup_steps)


# ------------------------------------------------------------------------------------------------------------
# several processes, as torchrun starts them

def start_processes(device):
    """(rank, number of processes, the name of this one's device). Without torchrun (0, 1, device)."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return 0, 1, device
    cuda = device == "cuda" or device == "auto" and torch.cuda.is_available()
    if cuda:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    # rollouts of one process may take hours longer than those of another
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(days=7))
    return dist.get_rank(), world, device


def share(items):
    """This process's share of a list that all processes have."""
    if not dist.is_initialized():
        return items
    return items[dist.get_rank()::dist.get_world_size()]


def gather(items):
    """The lists of all processes, as one list for each of them."""
    if not dist.is_initialized():
        return items
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return sum(lists, [])


def all_reduce(values, op="sum"):
    """A list of numbers, summed (or the largest, op="max") over all processes."""
    reduce = sum if op == "sum" else max
    return [reduce(column) for column in zip(*gather([values]), strict=True)]


def add_up(tensor):
    """Sum a tensor over all processes, in place."""
    if dist.is_initialized():
        total = tensor.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(total)
        tensor.copy_(total)


# ------------------------------------------------------------------------------------------------------------
# runs that can be killed

class Stop:
    """True once SIGINT or SIGTERM came to any process: the step is finished and saved then. A second SIGINT
    does not wait. (torchrun kills its processes after 30 seconds: longer steps are repeated on resume.)"""

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGINT, self.ask)
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        name = signal.Signals(number).name
        message = f"\n{name}: finishing this step, then saving (Ctrl-C: stop now and lose the step)"
        print(message, file=sys.stderr)

    def __bool__(self):
        return any(gather([self.asked]))


def open_run(out_dir, init_from, script):
    """(folder of the run, folder or hub name of the model, state of the run or None) for init_from = "resume"
    or a model. Raises ValueError if there is a run that would be overwritten or that another script made,
    FileNotFoundError if there is none to resume."""
    out = Path(out_dir)
    last = out / "last"
    if init_from != "resume":
        if last.exists():
            raise ValueError(f"out_dir={out_dir!r} holds a run already: go on with --init_from=resume, "
                             "or name another --out_dir")
        out.mkdir(parents=True, exist_ok=True)
        return out, init_from, None
    if not last.exists():
        raise FileNotFoundError(f"out_dir={out_dir!r} holds no checkpoint to resume from")
    state = read_json(last / "state.json")
    if state.get("script") != script:
        raise ValueError(f"out_dir={out_dir!r} holds a run of {state.get('script')}, not of {script}: "
                         f"to train its weights on, use --init_from={last} and another --out_dir")
    return out, last, state


def save_run(out, step, model, optimizer, state, tokenizer_folder):
    """Write the checkpoint out/step_<step>, with copies of the tokenizer's files, and make it the last."""
    unfinished, folder = out / "saving.tmp", out / f"step_{step:06d}"
    for leftover in (unfinished, folder):  # of a run that was killed here
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    for pattern in TOKENIZER_FILES:
        for path in tokenizer_folder.glob(pattern):
            shutil.copy(path, unfinished)
    model.save_pretrained(unfinished)  # config.json is the model's, not the tokenizer's
    optimizer.save(unfinished / "optimizer.safetensors")
    (unfinished / "state.json").write_text(json.dumps(state | {"step": step}) + "\n", encoding="utf-8")
    for path in (*unfinished.iterdir(), unfinished):
        sync(path)
    unfinished.rename(folder)
    link = out / "last.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(out / "last")
    sync(out)
    for old in out.iterdir():
        if old != folder and re.fullmatch(r"step_\d{6,}", old.name):
            shutil.rmtree(old)


def sync(path):
    """Have a file, or the names in a folder, on disk and not only in the machine's memory."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def same_keys(keys, state):
    """Keep the configuration in the state of a run. On resume, name on standard error the keys that have
    changed since; ValueError for one that makes it another run. A key newer than the run has not
    changed."""
    now = settings(keys, without=("init_from", "out_dir", "debug"))
    before = state.get("keys", now)
    for key, value in now.items():
        if value != before.get(key, value):
            change = f"on resume {key}={before[key]!r} has become {value!r}"
            if key in SAME_IN_A_RUN:
                raise ValueError(f"{change}: that is another run; give it another out_dir")
            print(change, file=sys.stderr)
    state["keys"] = now


class Log:
    """Rows to log.csv and samples to samples.jsonl, each flushed as it comes; those of a resumed run are cut
    back to its step. With a wandb_project the rows go to Weights & Biases too; keys: the script's
    globals()."""

    def __init__(self, out, step, wandb_project="", keys=None):
        self.rows, self.samples = out / "log.csv", out / "samples.jsonl"
        lines = cut_back(self.rows, step)
        cut_back(self.samples, step)
        self.columns = lines[0].decode().strip().split(",") if lines else None
        self.wandb = start_wandb(wandb_project, out, keys) if wandb_project else None

    def row(self, **values):
        """Append a row, `step` first; floats to six digits. Every row has the columns of the first."""
        cells = {key: f"{x:.6g}" if isinstance(x, float) else x for key, x in values.items()}
        self.columns = self.columns or list(values)
        with open(self.rows, "a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(cells)
        if self.wandb:
            self.wandb.log({key: x for key, x in values.items() if x is not None}, step=values["step"])

    def sample(self, **values):
        """Append a sample, `step` first."""
        with open(self.samples, "a", encoding="utf-8") as file:
            file.write(json.dumps(values, ensure_ascii=False) + "\n")


def cut_back(path, step):
    """Keep the lines of a log that come before a step. -> these lines (bytes)"""
    text = path.read_bytes() if path.exists() else b""
    *whole, _ = text.split(b"\n")  # the last line may be cut
    kept = [line for line in whole if step_of(line) < step]
    with replacing(path) as file:
        file.write_bytes(b"".join(line + b"\n" for line in kept))
    return kept


def step_of(line):
    """Of a line of either log, which begins with its step. The header of log.csv belongs to step 0."""
    found = re.match(rb'(?:{"step": )?(\d+)', line)
    return int(found[1]) if found else 0


def start_wandb(project, out, keys):
    try:
        import wandb
    except ImportError:
        raise ValueError(f"wandb_project={project!r} needs the package wandb: pip install wandb") from None
    return wandb.init(project=project, name=out.name, dir=str(out), config=settings(keys))


def sampling_progress(n):
    """An on_token for generate() that says every 20 seconds how far n completions have come."""
    sampled, shown = 0, time.perf_counter()

    def on_token(i, token):
        nonlocal sampled, shown
        sampled += 1
        if time.perf_counter() - shown > 20:
            shown = time.perf_counter()
            print(f"sampling {n} completions: {sampled:,} tokens so far", file=sys.stderr, flush=True)

    return on_token


class Progress:
    """Lines on standard error with how long is still to go."""

    def __init__(self, step, max_steps):
        self.first, self.max_steps, self.began = step, max_steps, time.perf_counter()

    def remaining_s(self, step):
        per_step = (time.perf_counter() - self.began) / (step + 1 - self.first)
        return per_step * (self.max_steps - step - 1)

    def line(self, step, text):
        minutes = self.remaining_s(step) / 60
        line = f"step {step + 1}/{self.max_steps}  {text}  {minutes:.1f} min left"
        print(line, file=sys.stderr, flush=True)


def check(keys, *rules):
    """ValueError for the first key with a wrong value: of those that both scripts have, then by `rules`, as
    configurator.require takes them."""
    for key in ("micro_batch", "eval_size"):
        require(keys, (key, keys[key] >= 1, "at least 1"))
    for key in ("max_steps", "warmup_steps", "save_every", "eval_every", "clip"):
        require(keys, (key, keys[key] >= 0, "at least 0"))
    prefix_len = keys["prefix_len"]
    require(
        keys,
        ("schedule", keys["schedule"] in ("constant", "linear"), "constant or linear"),
        ("beta2", 0 <= keys["beta2"] < 1, "at least 0 and below 1"),
        ("master_device", keys["master_device"] in (None, "cpu"), "None (beside the weights) or cpu"),
        ("prefix_len", prefix_len is None or prefix_len >= 0, "None (the whole prompt) or at least 0"),
        ("seed", abs(keys["seed"]) < 2**63, "of 64 bits"),
        *rules,
    )
