"""
The supervised warm start: next-token loss on worked solutions, under the Prefix Sliding mask that will be used to sample.

    python train_sft.py config/sft_passes.py                                      # the embedded task, from scratch, on a CPU
    python train_sft.py --init_from=data/smollm2 --task=jsonl:solved.jsonl --window=512 --lr=1e-5 --batch_size=16
    python train_sft.py config/sft_passes.py --init_from=resume                   # go on where it was killed

Prompts carry no loss. Each batch is sorted by length and cut into micro-batches, so that padding costs little; the loss is the mean
over all answer tokens of the batch, whatever the micro-batches are.
Left out on purpose: packing of several sequences into one row, and truncation: sequences longer than max_len are skipped.
"""
init_from = "scratch"             # scratch (the embedded task only) | resume | a Hugging Face folder | a hub name
out_dir = "out-sft"               # the run's folder: checkpoints and log
task = "passes:impatient"         # whose solutions: passes:impatient | passes:4-60 | reasoning_gym:<dataset> | jsonl:<path> | py:<file>
system = ""                       # system message for the chat template, "" = none
template_args = {}                # further arguments of the chat template, such as {"enable_thinking": False}
n_layer = 3                       # for scratch: layers
n_head = 4                        # for scratch: attention heads
n_embd = 64                       # for scratch: width
window: int | list | None = 12    # tokens, the current one included; None = full attention
prefix_len: int | None = None     # tokens kept for good; None = the whole prompt
rope = "reset"                    # continue: absolute positions | reset: close the gap behind the prefix
max_len = 4096                    # tokens of prompt and solution; longer ones are skipped
batch_size = 64                   # sequences per step
micro_batch = 16                  # sequences per forward and backward
max_steps = 1300                  # optimizer steps
lr = 5e-3                         # peak learning rate
schedule = "linear"               # after the warm-up: constant | linear (down to 0)
warmup_steps = 20                 # steps from 0 to lr
weight_decay = 0.0                # of matrices
beta2 = 0.95                      # AdamW's second decay rate
clip = 1.0                        # largest gradient norm; 0 = no limit
master_device: str | None = None  # where bfloat16 weights have their float32 masters: None = beside them | cpu
checkpointing = False             # compute each layer anew in the backward, to save memory
eval_every = 100                  # steps between evaluations on held-out solutions; 0 = never
eval_size = 256                   # held-out solutions
save_every = 200                  # steps between checkpoints; 0 = at the end only
seed = 1                          # of the weights and of the problems
device = "auto"                   # auto (cuda, then mps, then cpu) | cpu | cuda | mps
dtype = "auto"                    # auto (bfloat16 where the hardware has it, else float32) | float32 | bfloat16

from configurator import configure, run

configure(globals())

import json
import time
from pathlib import Path

import torch

import training
from checkpoint import local_folder
from device import device_and_dtype
from model import GPT, GPTConfig
from tasks import load_task, prompt_ids, write_passes_tokenizer
from tokenizer import TOKENIZER_FILES, load_tokenizer


def encode(problem, tokenizer):
    """(ids of prompt, solution and end token; how many of them are the prompt's)"""
    if problem.solution is None:
        raise ValueError(f"task={task!r} has no worked solutions to learn from")
    prompt = prompt_ids(problem, tokenizer, system, template_args)
    return prompt + tokenizer.encode(problem.solution) + [tokenizer.eos_id], len(prompt)


def batch_loss(model, batch):
    """Backward (where gradients are on) of the mean loss over the answer tokens of batch, [(ids, prompt length)]. -> (loss, share of
    these tokens that are the most probable ones)"""
    total = max(training.all_reduce([sum(len(ids) - n for ids, n in batch)])[0], 1)
    loss = right = 0.0
    batch = sorted(batch, key=lambda item: len(item[0]))
    for i in range(0, len(batch), micro_batch):
        part = batch[i:i + micro_batch]
        idx, lengths = training.padded([ids for ids, _ in part], model.lm_head.weight.device)
        n_prompt = torch.tensor([n for _, n in part], device=idx.device)
        at = torch.arange(idx.size(1) - 1, device=idx.device)
        mask = (at >= n_prompt[:, None] - 1) & (at < torch.tensor(lengths, device=idx.device)[:, None] - 1)       # (B, T - 1)
        P = n_prompt if prefix_len is None else prefix_len
        x = model.features(idx[:, :-1], P, window, rope=rope)[mask]                   # (n, n_embd)
        targets = idx[:, 1:][mask]
        logp, _ = training.token_logprobs(x, model.lm_head.weight, targets)
        part_loss = -logp.sum() / total
        if torch.is_grad_enabled():
            part_loss.backward()
        else:
            for y, t in zip(x.split(256), targets.split(256), strict=True):
                right += (model.lm_head(y).argmax(-1) == t).sum().item() / total
        loss += part_loss.item()
    return training.all_reduce([loss, right])


def new_model(out):
    """A model from scratch for the embedded task, and the folder with its tokenizer."""
    folder = out / "tokenizer"
    write_passes_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=tokenizer.n_vocab, n_layer=n_layer, n_head=n_head, n_embd=n_embd, qk_norm=True, tied=True,
                         eos_ids=tuple(tokenizer.eos_ids))), folder


def main():
    training.check(globals(), ("batch_size", batch_size >= 1, "at least 1"), ("max_len", max_len >= 2, "at least 2"))
    rank, world, name = training.start_processes(device)
    where, kind = device_and_dtype(name, dtype)
    source, others = load_task(task, seed), load_task(task, seed, held_out=True)
    if init_from == "scratch" and not task.startswith("passes"):
        raise ValueError(f"init_from='scratch' is for the embedded task, and task={task!r} needs a model that knows its language")
    without = [i for i in range(source.size or 0) if source.problem(i).solution is None]
    if without:
        raise ValueError(f"task={task!r}: {len(without)} of {source.size} problems have no solution to learn from, the first of them is "
                         f"{source.problem(without[0]).prompt[:60]!r}")
    out, init, state = training.open_run(out_dir, init_from, "train_sft.py")
    if init == "scratch":
        model, init = new_model(out)
        model = model.to(where, kind)
    else:
        model = GPT.from_pretrained(init, dtype=kind, device=where)
    tokenizer, folder = load_tokenizer(init), local_folder(init, TOKENIZER_FILES)
    model.train().checkpointing = checkpointing
    optimizer = training.Optimizer(model, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, master_device=master_device)
    state = state or dict(script="train_sft.py", step=0, cursor=0)
    training.same_keys(globals(), state)
    first, cursor = state["step"], state["cursor"]
    if first:
        optimizer.load(Path(init) / "optimizer.safetensors")
    log, stop, progress = training.Log(out, first) if rank == 0 else None, training.Stop(), training.Progress(first, max_steps)
    held_out = [encode(others.problem(i), tokenizer) for i in range(rank, min(eval_size, others.size or eval_size), world)]
    held_out = [item for item in held_out if len(item[0]) <= max_len]
    step, loss, evaluation = first - 1, None, {}
    for step in range(first, max_steps):
        began, batch, skipped = time.perf_counter(), [], 0
        while len(batch) < batch_size:
            item = encode(source.draw(cursor), tokenizer)
            cursor += 1
            if len(item[0]) <= max_len:
                batch.append(item)
            elif (skipped := skipped + 1) > 1000:
                raise ValueError(f"of {1000 + len(batch)} solutions of task={task!r}, {len(batch)} have at most max_len={max_len} tokens")
        loss, _ = batch_loss(model, batch[rank::world])
        rate = training.learning_rate(step, lr, warmup_steps, schedule, max_steps)
        norm = optimizer.step(rate, clip)
        seconds = time.perf_counter() - began
        evaluation = {}
        if eval_every and ((step + 1) % eval_every == 0 or step + 1 == max_steps):
            with torch.no_grad():
                evaluation = dict(zip(("eval_loss", "eval_right"), batch_loss(model, held_out), strict=True))
        if rank == 0:
            log.row(step=step, loss=loss, lr=rate, grad_norm=norm, tokens_per_s=sum(len(ids) for ids, _ in batch) / seconds,
                    **{key: evaluation.get(key) for key in ("eval_loss", "eval_right")})
            if evaluation or step % 10 == 0:
                progress.line(step, f"loss {loss:.3f}" + "".join(f"  {key} {value:.4f}" for key, value in evaluation.items()))
        stopping = bool(stop)
        if rank == 0 and (save_every and (step + 1) % save_every == 0 or step + 1 == max_steps or stopping):
            training.save_run(out, step + 1, model, optimizer, state | dict(cursor=cursor), folder)
        if stopping:
            break
    if rank == 0:
        print(json.dumps(dict(steps=step + 1, out_dir=out_dir, loss=loss, **evaluation)))


if __name__ == "__main__":
    run(main)
