"""
What train_sft.py and train_rl.py share: the optimizer, log-probabilities without whole logits, several processes, checkpoints and logs.

A run is a folder:

    out/log.csv, out/samples.jsonl       one row per step, flushed as it comes
    out/step_000040/                     a Hugging Face folder (config.json, model.safetensors, tokenizer files) that sample.py reads,
                                         and beside them optimizer.safetensors and state.json, from which the run goes on
    out/last -> step_000040

A checkpoint is written under another name, synced and renamed, then `last` is turned to it, then older ones are removed: whenever a
run is killed, one whole checkpoint is there. On resume the logs are cut back to it, and since nothing draws from a generator with
hidden state (problems and samples are numbered), the run goes on as if it had never stopped.
"""
import csv
import datetime
import json
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
from torch.utils.checkpoint import checkpoint

from attention import upcast
from checkpoint import read_json, replacing
from configurator import require, settings
from tokenizer import TOKENIZER_FILES

LOGITS = 2**26  # at most so many logits at once (256 MB in float32)


def token_logprobs(x, head, targets, temperature=1.0):
    """log p(targets) (n,) and the entropy (n,) of softmax(x head^T / temperature), for features x (n, n_embd), head (vocab_size, n_embd)
    and targets (n,). A few positions at a time, and their logits are computed anew in the backward: all (n, vocab_size) never exist at
    once. The entropy carries no gradient."""
    def piece(x, head, targets):
        logp = (upcast(x @ head.T) / temperature).log_softmax(-1)                       # (chunk, vocab_size)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.detach().exp() * logp.detach()).sum(-1)

    size = max(LOGITS // head.size(0), 1)
    pieces = [checkpoint(piece, *args, head, t, use_reentrant=False) if torch.is_grad_enabled() else piece(*args, head, t)
              for *args, t in zip(x.split(size), targets.split(size), strict=True)]
    return torch.cat([logp for logp, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def padded(rows, device):
    """Lists of token ids as one tensor (rows, longest), padded on the right with 0, and their lengths."""
    lengths = [len(row) for row in rows]
    idx = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for i, row in enumerate(rows):
        idx[i, :len(row)] = torch.tensor(row)
    return idx.to(device), lengths


# ---------------------------------------------------------------------------------------------------------------------
# the optimizer

class Optimizer:
    """AdamW. Weights in float32 or float64 are updated as they are. Weights in bfloat16 would round small updates away, so there the
    optimizer owns float32 masters, on `master_device` (default: the model's) with the moments, and writes them back rounded. Their
    gradients are summed into float32 as each is computed, and the half-precision one is freed at once: no weight's gradient waits
    for those of the others. Weight decay is for matrices only."""

    def __init__(self, model, *, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, master_device=None):
        self.params = dict(model.named_parameters())
        if any(p.dtype == torch.float16 for p in self.params.values()):
            raise ValueError("float16 has too little range for gradients: train in bfloat16 or float32")
        try:
            device = torch.device(master_device or next(iter(self.params.values())).device)
        except RuntimeError:
            raise ValueError(f"master_device={master_device!r}: None (beside the weights) or a device such as cpu") from None
        self.has_masters = any(p.dtype == torch.bfloat16 for p in self.params.values())
        self.masters = self.params
        if self.has_masters:
            self.masters = {name: p.detach().to(device, torch.float32, copy=True) for name, p in self.params.items()}
            for name, p in self.params.items():
                p.register_post_accumulate_grad_hook(lambda p, master=self.masters[name]: self._take_gradient(p, master))
        decays = [p for p in self.masters.values() if p.dim() >= 2], [p for p in self.masters.values() if p.dim() < 2]
        self.adamw = torch.optim.AdamW([dict(params=decays[0], weight_decay=weight_decay), dict(params=decays[1], weight_decay=0.0)],
                                       lr=lr, betas=betas, eps=eps)

    @staticmethod
    def _take_gradient(p, master):
        grad = p.grad.to(master.device, torch.float32)
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        p.grad = None

    def step(self, lr, clip):
        """One update with the gradients summed since the last one, over all processes. -> their norm before clipping."""
        grads = []
        for p in self.masters.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads.append(p.grad)
        if dist.is_initialized():
            for grad in grads:
                shared = grad.to(collective_device())
                dist.all_reduce(shared)
                grad.copy_(shared)
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters.values()), clip or float("inf")).item()
        if norm != norm or norm == float("inf"):
            raise ValueError(f"the gradient norm is {norm}: the update was not made; a smaller lr, or float32, may help")
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.has_masters:
            with torch.no_grad():
                for name, p in self.params.items():
                    p.copy_(self.masters[name])
        return norm

    def save(self, path):
        tensors = {}
        for name, p in self.masters.items():
            if self.has_masters:
                tensors[f"master.{name}"] = p.detach().contiguous()
            tensors |= {f"{key}.{name}": value.contiguous() for key, value in self.adamw.state.get(p, {}).items()}
        with replacing(path) as file:
            save_file(tensors, file)

    def load(self, path):
        if not path.exists():
            print(f"{path} is not there: the optimizer starts fresh", file=sys.stderr)
            return
        with safe_open(path, framework="pt") as file, torch.no_grad():
            stored = set(file.keys())
            for name, p in self.masters.items():
                if f"master.{name}" in stored:                                        # also where the run goes on in float32
                    p.copy_(file.get_tensor(f"master.{name}"))
                state = {key: file.get_tensor(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in stored}
                if state:
                    self.adamw.state[p] = {key: value if key == "step" else value.to(p.device) for key, value in state.items()}


def learning_rate(step, lr, warmup_steps, schedule, max_steps):
    """Linear from lr / warmup_steps up to lr, then constant, or linear down to 0 after the last step. Steps count from 0."""
    if schedule not in ("constant", "linear"):
        raise ValueError(f"schedule={schedule!r}: 'constant' or 'linear'")
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    return lr if schedule == "constant" else lr * (max_steps - step) / max(max_steps - warmup_steps, 1)


# ---------------------------------------------------------------------------------------------------------------------
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


def collective_device():
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def all_reduce(values, op="sum"):
    """A list of numbers, summed (or the largest, op="max") over all processes."""
    if not dist.is_initialized():
        return list(values)
    t = torch.tensor(values, dtype=torch.float64, device=collective_device())
    dist.all_reduce(t, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return t.tolist()


def share(items):
    """This process's share of a list."""
    if not dist.is_initialized():
        return items
    return items[dist.get_rank()::dist.get_world_size()]


def gather(items):
    """The lists of all processes, as one list for each of them."""
    if not dist.is_initialized():
        return items
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


# ---------------------------------------------------------------------------------------------------------------------
# runs that can be killed

class Stop:
    """True once SIGINT or SIGTERM came to any process: the step is finished and saved then. A second SIGINT does not wait. (torchrun
    itself kills its processes 30 seconds after a signal: steps that take longer are repeated on resume.)"""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        print(f"\n{signal.Signals(number).name}: finishing this step, then saving (Ctrl-C: stop now and lose the step)", file=sys.stderr)

    def __bool__(self):
        return all_reduce([float(self.asked)], "max")[0] > 0


def open_run(out_dir, init_from, script):
    """(folder of the run, folder or hub name of the model, state of the run or None) for init_from = "resume" or a model. Raises
    ValueError if there is a run that would be overwritten or that another script made, FileNotFoundError if there is none to resume."""
    out, last = Path(out_dir), Path(out_dir) / "last"
    if init_from == "resume":
        if not last.exists():
            raise FileNotFoundError(f"out_dir={out_dir!r} holds no checkpoint to resume from")
        state = read_json(last / "state.json")
        if state.get("script") != script:
            raise ValueError(f"out_dir={out_dir!r} holds a run of {state.get('script')}, not of {script}: to train its weights on, use "
                             f"--init_from={last} and another --out_dir")
        return out, last, state
    if out.exists() and not out.is_dir():
        raise ValueError(f"out_dir={out_dir!r} is a file")
    if last.exists():
        raise ValueError(f"out_dir={out_dir!r} holds a run already: go on with --init_from=resume, or name another --out_dir")
    out.mkdir(parents=True, exist_ok=True)
    return out, init_from, None


def save_run(out, step, model, optimizer, state, tokenizer_folder):
    """Write the checkpoint out/step_<step>, with the tokenizer files that lie in another folder, and make it the last."""
    folder, tmp, link = out / f"step_{step:06d}", out / "saving.tmp", out / "last"
    if link.exists() and link.resolve() == folder.resolve():
        return
    for leftover in (tmp, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(tmp)
    for pattern in TOKENIZER_FILES:
        for path in tokenizer_folder.glob(pattern):
            if path.name != "config.json":
                with replacing(tmp / path.name) as file:
                    shutil.copyfile(path, file)
    optimizer.save(tmp / "optimizer.safetensors")
    with replacing(tmp / "state.json") as file:
        file.write_text(json.dumps(state | {"step": step}) + "\n", encoding="utf-8")
    sync(tmp)
    tmp.rename(folder)
    new = out / "last.tmp"
    new.unlink(missing_ok=True)
    new.symlink_to(folder.name)
    new.replace(link)
    sync(out)
    for old in out.iterdir():
        if old != folder and old.is_dir() and re.fullmatch(r"step_\d{6,}", old.name):
            shutil.rmtree(old)


def sync(folder):
    """Have the names in a folder on disk, not only in the machine's memory."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def same_keys(keys, state):
    """Keep the configuration in the state of a run. On resume, name on standard error the keys that have changed since; ValueError for
    those that would make it another run."""
    now = settings(keys, without=("init_from", "out_dir", "debug", "plan"))
    before = state.setdefault("keys", now)
    changed = {key: f"{key}={before.get(key)!r} has become {value!r}" for key, value in now.items() if before.get(key) != value}
    for key in ("task", "pass_rates", "min_pass", "max_pass", "window", "prefix_len", "rope", "seed"):
        if key in changed and key in before:                                          # a run of before there was such a key goes on
            raise ValueError(f"on resume {changed[key]}: that is another run; give it another out_dir")
    if changed:
        print("on resume: " + "; ".join(changed.values()), file=sys.stderr)
    state["keys"] = now


class Log:
    """Rows to a CSV file and samples to a JSON-lines file, each flushed as it comes; a resumed run's are cut back to its step."""

    def __init__(self, out, step, wandb_project="", keys=None):
        self.board = start_wandb(wandb_project, out, keys) if wandb_project else None
        self.rows, self.samples = out / "log.csv", out / "samples.jsonl"
        old = []
        if self.rows.exists() and step:
            with open(self.rows, encoding="utf-8", newline="") as file:
                whole = [row for row in csv.DictReader(file) if None not in row.values() and row["step"].isdigit()]
            old = [row for row in whole if int(row["step"]) < step]
        lines = self.samples.read_bytes().split(b"\n")[:-1] if self.samples.exists() and step else []        # the last may be cut
        lines = [line for line in lines if json.loads(line)["step"] < step]
        self.columns = list(old[0]) if old else None
        with replacing(self.rows) as path, open(path, "w", encoding="utf-8", newline="") as file:
            if old:
                writer = csv.DictWriter(file, self.columns)
                writer.writeheader()
                writer.writerows(old)
        with replacing(self.samples) as path:
            path.write_bytes(b"".join(line + b"\n" for line in lines))

    def row(self, **values):
        """Append a row; floats to six digits. Every row has the columns of the first."""
        with open(self.rows, "a", encoding="utf-8", newline="") as file:
            if self.columns is None:
                self.columns = list(values)
                csv.writer(file).writerow(self.columns)
            cells = [values.get(c) for c in self.columns]
            csv.writer(file).writerow([f"{x:.6g}" if isinstance(x, float) else "" if x is None else x for x in cells])
        if self.board:
            self.board.log({name: value for name, value in values.items() if value is not None}, step=values["step"])

    def sample(self, **values):
        with open(self.samples, "a", encoding="utf-8") as file:
            file.write(json.dumps(values, ensure_ascii=False) + "\n")


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
        done = step + 1 - self.first
        return (time.perf_counter() - self.began) / done * (self.max_steps - step - 1)

    def line(self, step, text):
        print(f"step {step + 1}/{self.max_steps}  {text}  {self.remaining_s(step) / 60:.1f} min left", file=sys.stderr, flush=True)


def check(keys, *rules):
    """ValueError for the first rule that does not hold (see configurator.require), those of both scripts included."""
    whole = [(key, keys[key] >= least, f"at least {least}") for least, names in (
        (1, ("micro_batch", "eval_size")), (0, ("max_steps", "warmup_steps", "save_every", "eval_every", "clip", "lr", "weight_decay")))
        for key in names]
    require(keys, *whole, ("schedule", keys["schedule"] in ("constant", "linear"), "constant or linear"),
            ("beta2", 0 <= keys["beta2"] < 1, "at least 0 and below 1"),
            ("prefix_len", keys["prefix_len"] is None or keys["prefix_len"] >= 0, "None (the whole prompt) or at least 0"),
            ("seed", abs(keys["seed"]) < 2**63, "of 64 bits"), *rules)
