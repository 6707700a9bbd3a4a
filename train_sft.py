"""
The supervised warm start: next-token loss on worked solutions, under the mask of Prefix Sliding.

    python data/passes/prepare.py && python train_sft.py config/sft_passes.py     # from scratch, on a CPU
    python train_sft.py --init_from=data/smollm2 --task=jsonl:solved.jsonl --window=512 --lr=1e-5
    python train_sft.py config/sft_passes.py --init_from=resume                   # go on where it was killed

Prompts carry no loss. Each batch is sorted by length and cut into micro-batches, so that padding costs
little; the loss is the mean over all answer tokens of the batch, whatever the micro-batches are.
Left out on purpose: packing of several sequences into one row, and truncation: sequences longer than max_len
are skipped.
"""
init_from = "scratch"             # scratch | resume | a Hugging Face folder | a hub name
out_dir = "out-sft"               # the run's folder: checkpoints and log
task = "py:data/passes/task.py?impatient=True"  # whose solutions: a name as tasks.py explains them
system = ""                       # system message for the chat template, "" = none
template_args = {}                # further arguments of the chat template, such as {"enable_thinking": False}
tokenizer = "data/passes"         # for scratch: the folder of its tokenizer (python data/passes/prepare.py)
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
master_device: str | None = None  # of bfloat16 weights' float32 masters: None = beside them | cpu
checkpointing = False             # compute each layer anew in the backward, to save memory
eval_every = 100                  # steps between evaluations on held-out solutions; 0 = never
eval_size = 256                   # held-out solutions
save_every = 200                  # steps between checkpoints; 0 = at the end only
wandb_project = ""                # log to Weights & Biases too (WANDB_MODE=offline works); "" = do not
seed = 1                          # of the weights and of the problems
device = "auto"                   # auto (cuda, then mps, then cpu) | cpu | cuda | mps
dtype = "auto"                    # auto (bfloat16 where the hardware has it) | float32 | bfloat16

from configurator import configure, run

configure(globals())

import json
import time
from dataclasses import dataclass

import torch

import training
from checkpoint import local_folder
from device import device_and_dtype
from model import GPT, GPTConfig
from tasks import load_task, prompt_ids
from tokenizer import TOKENIZER_FILES, load_tokenizer


@dataclass
class Example:
    """A prompt and its worked solution with the end token, as token ids."""
    prompt: list
    answer: list

    def __len__(self):
        return len(self.prompt) + len(self.answer)


def load(init, device_name):
    """-> the model, a fresh optimizer, the tokenizer, the folder of the tokenizer's files"""
    location, weights_dtype = device_and_dtype(device_name, dtype)
    folder = local_folder(tokenizer if init == "scratch" else init, TOKENIZER_FILES)
    words = load_tokenizer(folder)
    if init == "scratch":
        torch.manual_seed(seed)
        sizes = dict(vocab_size=words.n_vocab, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        model = GPT(GPTConfig(**sizes, qk_norm=True, eos_ids=tuple(words.eos_ids)))
        model.to(location, weights_dtype)
    else:
        model = GPT.from_pretrained(init, device=location, dtype=weights_dtype)
    model.checkpointing = checkpointing
    optimizer = training.Optimizer(
        model, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, master_device=master_device)
    return model, optimizer, words, folder


def solution_of(problem):
    if problem.solution is None:
        raise ValueError(f"task={task!r} has no worked solution to learn from: {problem.prompt[:60]!r}")
    return problem.solution


def encode(problem, words):
    prompt = prompt_ids(problem, words, system, template_args)
    return Example(prompt, words.encode(solution_of(problem)) + [words.eos_id])


def draw_batch(source, cursor, words):
    """The next batch_size examples that fit max_len, from problem number `cursor` on. -> them, new cursor"""
    batch, end = [], cursor + 1000 + batch_size
    for number in range(cursor, end):
        example = encode(source.draw(number), words)
        if len(example) <= max_len:
            batch.append(example)
        if len(batch) == batch_size:
            return batch, number + 1
    raise ValueError(f"task={task!r}: {len(batch)} of {end - cursor} solutions fit max_len={max_len}")


def draw_held_out(words):
    """This process's share of the examples for evaluation."""
    source = load_task(task, seed, held_out=True)
    numbers = range(min(eval_size, source.size or eval_size))
    examples = [encode(source.problem(i), words) for i in training.share(numbers)]
    return [example for example in examples if len(example) <= max_len]


def answer_features(model, examples):
    """The features from which the head predicts each answer token (n, n_embd), and these tokens (n,)."""
    device = model.lm_head.weight.device
    idx, _ = training.padded([e.prompt + e.answer[:-1] for e in examples], device)  # (B, T)
    prefixes = [len(e.prompt) if prefix_len is None else prefix_len for e in examples]
    x = model.features(idx, torch.tensor(prefixes, device=device), window, rope=rope)  # (B, T, n_embd)
    features = [x[row, len(e.prompt) - 1:len(e) - 1] for row, e in enumerate(examples)]
    targets = [token for e in examples for token in e.answer]
    return torch.cat(features), torch.tensor(targets, device=device)


def batch_loss(model, batch):
    """The mean loss over the answer tokens of a batch and of those of the other processes, with its backward.
    Without gradients also the share of these tokens that are the most probable ones. -> (loss, share)"""
    total = max(sum(training.gather([len(e.answer) for e in batch])), 1)
    batch = sorted(batch, key=len)
    loss, right = 0.0, 0
    for i in range(0, len(batch), micro_batch):
        features, targets = answer_features(model, batch[i:i + micro_batch])
        logprobs, _ = training.token_logprobs(features, model.lm_head.weight, targets)
        part = -logprobs.sum() / total
        loss += part.item()
        if torch.is_grad_enabled():
            part.backward()
            continue
        for x, target in zip(features.split(256), targets.split(256), strict=True):  # few, for few logits
            right += (model.lm_head(x).argmax(-1) == target).sum().item()
    return training.all_reduce([loss, right / total])


@torch.no_grad()
def evaluate(model, held_out, done):
    """After `done` steps the loss of held-out answers and the share of their tokens that are the most
    probable ones; None, None where no evaluation is due."""
    if eval_every and (done % eval_every == 0 or done == max_steps):
        return batch_loss(model, held_out)
    return None, None


def main():
    training.check(globals(), ("batch_size", batch_size >= 1, "at least 1"))
    rank, _, device_name = training.start_processes(device)
    source = load_task(task, seed)
    for i in range(source.size or 0):
        solution_of(source.problem(i))  # a missing one is named now, not when it is drawn

    out, init, state = training.open_run(out_dir, init_from, "train_sft.py")
    state = state or dict(script="train_sft.py", step=0, cursor=0)  # cursor: number of the next problem
    training.same_keys(globals(), state)
    model, optimizer, words, folder = load(init, device_name)
    if init_from == "resume":
        optimizer.load(init / "optimizer.safetensors")
    held_out = draw_held_out(words)
    log = training.Log(out, state["step"], wandb_project, globals()) if rank == 0 else None
    stop, progress = training.Stop(), training.Progress(state["step"], max_steps)

    loss = eval_loss = eval_right = None
    for step in range(state["step"], max_steps):
        began = time.perf_counter()
        batch, state["cursor"] = draw_batch(source, state["cursor"], words)
        loss, _ = batch_loss(model, training.share(batch))
        rate = training.learning_rate(step, lr, warmup_steps, schedule, max_steps)
        norm = optimizer.step(rate, clip)
        tokens_per_s = sum(map(len, batch)) / (time.perf_counter() - began)
        state["step"] = done = step + 1

        eval_loss, eval_right = evaluate(model, held_out, done)
        last = bool(stop) or done == max_steps
        if rank == 0:
            log.row(step=step, loss=loss, lr=rate, grad_norm=norm, tokens_per_s=tokens_per_s,
                    eval_loss=eval_loss, eval_right=eval_right)
            if eval_loss is not None:
                shown = f"loss {loss:.3f}  eval_loss {eval_loss:.4f}  eval_right {eval_right:.4f}"
                progress.line(step, shown)
            elif step % 10 == 0:
                progress.line(step, f"loss {loss:.3f}")
            if last or save_every and done % save_every == 0:
                training.save_run(out, done, model, optimizer, state, folder)
        if last:
            break
    if rank == 0:
        result = dict(steps=state["step"], out_dir=out_dir, loss=loss)
        print(json.dumps(result | dict(eval_loss=eval_loss, eval_right=eval_right)))


if __name__ == "__main__":
    run(main)
