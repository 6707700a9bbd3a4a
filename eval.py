r"""
Every policy on the same problems, with the same random streams: accuracy, length, seconds, memory.

    python eval.py config/eval_passes.py                         # the embedded task, after make demo-rl
    python eval.py config/eval_passes.py --budgets=50,100,200    # the same samples, with other budgets
    python eval.py config/eval_qwen3_1p7b.py                     # one GPU; first data/aime25/prepare.py
    python eval.py --task=jsonl:problems.jsonl --policies=full,prefix_sliding,last_k --windows=512,1024
    python -m lab.figures accuracy --data=out-eval/table.csv --out=out-eval/accuracy.png    # a picture of it

Policies: those of engine.POLICIES (prefix_sliding, full, sliding, streaming; random, too, if eval.py is
started by `python -m forks.random_eviction eval.py ...`), and three that attend to everything in a context of
P + W tokens, as much as Prefix Sliding ever holds:
    full_stop  thinks until there is just room for an answer, and has to give it then: `cue`, and
               answer_tokens tokens
    last_k     when the context is full, begins another one: the prompt, the first carry_first and the last
               carry_last new tokens
    summary    just before it is full, writes a summary (summary_prompt, then up to summary_tokens tokens),
               and begins another one: the prompt and the summary, as in summary_form; before the <think> at
               the end of the prompt, if there is one
policy@name samples from the weights models[name] instead of init_from: trained under one attention, tested
under another.

Each sample is a line of out_dir/samples.jsonl (see Sample) as soon as it has ended. A killed evaluation goes
on where it stopped, started again by the same command. The table is made from these lines, and budgets are
applied to them: a longer sample counts as cut, and is scored as it stands there. Differences are paired: by
problem, against `baseline` under the same budget, with a bootstrap interval over the problems. Seconds of a
sample are its shares of the decoding steps that it was in, so that they add up to the time of the whole: they
depend on how many samples ran beside it, and compare between arms that were sampled in one go with the same
`rows`.

Columns of the table: pass_at_k, some sample of a problem is right; mean_tokens and p90_tokens, with the end
token, without summaries; cut, the share that a budget has cut; cache_mb, keys and values that a sample holds
at its end (restarts: in its largest context); difference, low, high: from the arm in `against`.
"""
init_from = "data/smollm2"        # a Hugging Face folder or a hub name
models = {}                       # further weights for policy@name, such as {"full": "out-full/last"}
out_dir = "out-eval"              # samples.jsonl, eval.json (how they were drawn), table.csv, pass_rates/
task: str | list = "reasoning_gym:chain_sum"  # a name as tasks.py explains them; several: "['a', 'b']"
held_out: bool | None = None      # True: problems kept from training | False: the others | None: all
n_problems = 30                   # of each task
samples_per_problem = 8           # the k of avg@k (their mean score) and pass@k (one of them is right)
policies = "full,prefix_sliding"  # separated by commas: those above
windows: tuple | int = 4096       # tokens; several: each policy with each of them
prefixes = "whole"                # of prefix_sliding: whole | question | whole+100 | a number of tokens
rope = "continue"                 # continue: absolute positions | reset: close the gap behind the prefix
max_new_tokens = 32768            # most tokens per sample
min_new_tokens = 0                # tokens before an end token may come
budgets: tuple | int = ()         # tokens, up to max_new_tokens, which is always one of them
baseline = ""                     # a policy, policy@name or arm to compare with; "" = the first policy
system = ""                       # system message for the chat template, "" = none
template_args = {}                # further arguments of the chat template, such as {"enable_thinking": True}
temperature = 0.6                 # >= 0
top_p = 0.95                      # 0 < top_p <= 1
rows: int | None = None           # samples that run at once; None = all, or as many as fit the memory
compile = False                   # True: faster steps by fast/step.py, after some seconds of compiling
carry_first = 0                   # last_k: first new tokens that stay (in Delethink, arXiv 2510.06557: 100)
carry_last = 256                  # last_k: last tokens that stay, k
summary_tokens = 256              # summary: most tokens of a summary
summary_prompt = (
    "\n\nMy notes are about to be lost. I write down what I need to go on, for example: <context>Sought: the "
    "smallest n. It is a multiple of 6; 6, 12 and 18 fail at the second condition. Next: try 24.</context> "
    "Now mine: <context>")
summary_form = "<context>{}</context>\n\n"    # how it is shown afterwards; what follows {} ends it
cue = "\n\nThe final answer is \\boxed{"      # full_stop: begins the answer, after </think>
answer_tokens = 32                # full_stop: most tokens of the answer
seed = 1                          # of problems and samples
device = "auto"                   # auto (cuda, then mps, then cpu) | cpu | cuda | cuda:1 | mps
dtype = "auto"                    # auto | float32 | bfloat16 | float16 | float64

from configurator import configure, require, run, settings

configure(globals())

import fcntl
import functools
import hashlib
import itertools
import json
import math
import re
import sys
import time
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from checkpoint import MODEL_FILES, fingerprint, local_folder, read_config, read_json, replacing
from device import device_and_dtype
from engine import POLICIES, generate, hashed
from evals.restarts import OWN_KEYS, RESTARTS, check_room
from evals.table import scores, table_rows, write_table
from model import GPT, GPTConfig
from tasks import load_task, prompt_ids, text_of
from tokenizer import load_tokenizer

# ----------------------------------------------------------------------------------------------------------
# arms: what is compared

@dataclass(eq=False)
class Weights:
    """What arms sample from."""
    name: str                     # in `models`; "" = init_from
    folder: str
    tokenizer: object
    config: GPTConfig
    location: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class Arm:
    """One way to sample: a row of the table."""
    policy: str
    weights: Weights
    window: int | None            # tokens; None = everything
    prefix: str                   # one of `prefixes`

    @property
    def name(self):
        return f"{self.policy}@{self.weights.name}" if self.weights.name else self.policy

    def __str__(self):
        text = self.name
        if self.window is not None:
            text += f" W={self.window}"
        if self.prefix != "whole":
            text += f" P={self.prefix}"
        return text


def all_arms():
    """Each policy with the windows and prefixes that it takes. ValueError for a name that there is not."""
    arms, load = [], functools.cache(load_weights)
    for item in split(policies):
        policy, _, name = item.partition("@")
        known = (*POLICIES, *RESTARTS)
        if policy not in known:
            raise ValueError(f"policies={policies!r}: there is no {policy!r}, only {', '.join(known)}")
        if name and name not in models:
            raise ValueError(f"policies: {item!r} needs models={{{name!r}: a folder with weights}}")
        keeps_prompt = policy in ("prefix_sliding", "random")
        for window in [None] if policy == "full" else several(windows):
            for prefix in split(prefixes) if keeps_prompt else ["whole"]:
                arms.append(Arm(policy, load(name), window, prefix))
    if len(set(arms)) < len(arms):
        raise ValueError(f"policies={policies!r}, windows={windows}, prefixes={prefixes!r}: the same twice")
    if baseline and not any(baseline in (arm.name, str(arm)) for arm in arms):
        raise ValueError(f"baseline={baseline!r}: none of {', '.join(map(str, arms))}")
    return arms


def load_weights(name):
    folder = models.get(name, init_from)
    config = GPTConfig(**read_config(local_folder(folder, MODEL_FILES)))
    return Weights(name, folder, load_tokenizer(folder), config, *device_and_dtype(device, dtype))


def own_keys(policy):
    return {key: globals()[key] for key in OWN_KEYS[policy]}


def split(names):
    return [name.strip() for name in names.split(",")]


def several(value):
    """A key that holds one number or several of them, as a tuple."""
    return (value,) if isinstance(value, int) else tuple(value)


def prefix_tokens(prefix, problem, prompt, tokenizer):
    """How many tokens stay for good. "question": up to the end of the question, without what the chat
    template says after it, which is the end that all prompts have in common."""
    if prefix.isdigit():
        return int(prefix)
    if prefix != "question":
        return len(prompt) + int(prefix.removeprefix("whole") or 0)
    longer = replace(problem, prompt=problem.prompt + "\n\n\u00a7")
    other = prompt_ids(longer, tokenizer, system, template_args)
    same = 0
    while prompt[-1 - same] == other[-1 - same]:
        same += 1
    return len(prompt) - same


# ----------------------------------------------------------------------------------------------------------
# sampling under a policy

@dataclass(eq=False)
class Sample:
    """One attempt at a problem: a line of samples.jsonl. The last two fields serve only while it is drawn."""
    task: str
    arm: str
    problem: int                  # its number in the task
    sample: int                   # its number among those of the problem
    question: str
    answer: str
    prompt_tokens: int
    prefix_tokens: int            # how many stay for good
    n_tokens: int = 0             # with the end token
    finish_reason: str = ""       # "stop" | "length" | "" while it is drawn
    s: float = 0.0                # seconds
    every: int = 1
    times: list = field(default_factory=list)     # seconds after each `every` tokens
    tokens: list = field(default_factory=list)
    score: float = 0.0            # 0 to 1
    mark: str = ""                # of the problem, see mark_of
    text: str = ""
    prompt: list = ()             # token ids
    context: list = ()            # token ids that it goes on from: at first the prompt


class Sampler:
    """Draws the samples of an arm, shares the time among them, and calls complete(sample) when one has ended.

    A decoding step gives at most one token to a sample: the second one to any of them begins the next step,
    and what has passed since the step before is the time of all who had a token in this one."""

    def __init__(self, arm, model, samples, complete):
        self.arm, self.model, self.tokenizer = arm, model, arm.weights.tokenizer
        self.samples, self.complete = samples, complete
        self.turns = 0            # calls of generate()
        self.step = {}            # samples with a token in this step
        self.cost = 0.0           # seconds of this step
        self.began = self.reported = self.last = time.perf_counter()    # last: the end of the step before

    def run(self):
        """Bring all samples to their end."""
        policy = self.arm.policy
        if policy in RESTARTS:
            RESTARTS[policy](self, **own_keys(policy))
        else:
            prefix_len = [sample.prefix_tokens for sample in self.samples]
            how = dict(window=self.arm.window, prefix_len=prefix_len, rope=rope) | POLICIES[policy]
            self.draw(self.samples, max_new_tokens, **how)

    def running(self):
        return [sample for sample in self.samples if not sample.finish_reason]

    def tokens_left(self, sample):
        return max_new_tokens - sample.n_tokens

    def go_on(self, reserve=0, limit=None):
        """Draw until P + W - reserve tokens are in the context of each running sample, or `limit` new ones
        have come. -> the samples that are still running"""
        samples, limits = self.running(), []
        for sample in samples:
            room = sample.prompt_tokens + self.arm.window - reserve - len(sample.context)
            left = self.tokens_left(sample)
            limits.append(min(room, left, limit or left))
        self.draw(samples, limits)
        return self.running()

    def draw(self, samples, limits, aside=False, **how):
        """Have some samples go on from their contexts. -> the new tokens of each; `aside`, they take time but
        are no part of it. Each turn draws from streams of its own; the first are shared by all policies."""
        streams = [hashed(seed, sample.problem, sample.sample) for sample in samples]
        if self.turns:
            streams = [hashed(stream, self.turns) for stream in streams]
        self.turns += 1
        contexts = [list(sample.context) for sample in samples]
        least = [0 if aside else max(min_new_tokens - sample.n_tokens, 0) for sample in samples]
        # Restarts attend to everything in a context; the other policies say in `how` what they attend to.
        everything = dict(window=None, prefix_len=[sample.prompt_tokens for sample in samples])
        done = generate(
            self.model, contexts, limits, min_new_tokens=least, seed=streams,
            temperature=temperature, top_p=top_p, rows=rows, compile=compile,
            stop_ids=self.tokenizer.eos_ids, n_vocab=self.tokenizer.n_vocab,
            on_token=lambda i, token: self.token(samples[i], token, aside), **everything | how)
        self.close()
        return [completion.tokens for completion in done]

    def token(self, sample, token, aside=False):
        if sample in self.step or not self.step:
            cost = time.perf_counter() - self.last
            self.close()
            self.cost = cost
        self.step[sample] = True
        sample.context.append(token)
        if not aside:
            sample.tokens.append(token)
            sample.n_tokens += 1
            if token in self.tokenizer.eos_ids:
                sample.finish_reason = "stop"
            elif sample.n_tokens == max_new_tokens:
                sample.finish_reason = "length"

    def close(self):
        """Ends a step. Scoring and writing are no part of anybody's time: the next step begins afterwards."""
        for sample in self.step:
            sample.s += self.cost / len(self.step)
            if len(sample.times) < sample.n_tokens // sample.every:
                sample.times.append(round(sample.s, 6))
            if sample.finish_reason:
                self.complete(sample)
        self.step = {}
        self.last = time.perf_counter()
        if self.last - self.reported > 20:
            self.report()

    def report(self):
        self.reported = time.perf_counter()
        n_tokens = sum(sample.n_tokens for sample in self.samples)
        rate = max(n_tokens, 1) / (self.reported - self.began)
        most = sum(self.tokens_left(sample) for sample in self.running())
        print(f"  {len(self.running())} of {len(self.samples)} samples are running, {rate:,.0f} tokens/s, "
              f"at most {most / rate / 60:,.1f} min left", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------
# what is on disk

# What decides how a sample comes out, beside OWN_KEYS, the dtype and the weights. The other keys only say
# which samples to draw and how to look at them. A new key that changes samples belongs in here.
SAMPLING_KEYS = ("held_out", "rope", "max_new_tokens", "min_new_tokens", "system", "template_args",
                 "temperature", "top_p", "compile", "seed")


def keep_settings(done, arms):
    """Write to eval.json how the samples of each policy are drawn, and by which weights. ValueError if those
    in `done` were drawn in another way. Policies that are not asked for stay as they are."""
    path = Path(out_dir, "eval.json")
    entries = read_json(path, missing={})
    marks = {weights: fingerprint(weights.folder) for weights in {arm.weights for arm in arms}}
    drawn = {arm.partition(" ")[0] for _, arm, _, _ in done}
    for arm in arms:
        keys = (*SAMPLING_KEYS, *OWN_KEYS.get(arm.policy, ()))
        now = {key: settings(globals())[key] for key in keys}
        now |= dict(dtype=str(arm.weights.dtype).removeprefix("torch."), weights=marks[arm.weights])
        before = entries.get(arm.name, {}) if arm.name in drawn else now
        if not before:
            refuse(f"holds samples of {arm.name}, but no eval.json that says how they were drawn")
        for key, value in now.items():
            if before.get(key) != value:
                refuse(f"holds samples of {arm.name} with {key}={before.get(key)!r}, not {value!r}")
        entries[arm.name] = now
    write_json(path, entries)


def refuse(what):
    raise ValueError(f"out_dir={out_dir!r} {what}: name another out_dir")


def write_json(path, value):
    with replacing(path) as file:
        file.write_text(json.dumps(value) + "\n", encoding="utf-8")


def lock(file):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse("is in use by another eval.py, wait for it")


def read_samples(file):
    """{(task, arm, problem, sample): Sample} of samples.jsonl. A last line that a kill has cut is removed."""
    file.seek(0)
    text = file.read()
    whole = text[:text.rfind(b"\n") + 1]
    file.truncate(len(whole))
    done = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            sample = Sample(**json.loads(line))
        except (ValueError, TypeError):
            raise ValueError(f"{file.name}, line {number}: not a sample of eval.py") from None
        # There may be 10^8 tokens, and a list takes nine times the memory of an array.
        sample.tokens, sample.text = array("i", sample.tokens), ""
        done[sample.task, sample.arm, sample.problem, sample.sample] = sample
    return done


def write_sample(file, source, tokenizer, sample):
    line = vars(judged(sample, source, tokenizer)) | dict(s=round(sample.s, 6))
    del line["prompt"], line["context"]
    file.write(json.dumps(line).encode() + b"\n")
    file.flush()


def missing_samples(arm, source, done):
    """The samples of an arm on a task that are not in `done`. ValueError if those are of other problems."""
    missing, tokenizer = [], arm.weights.tokenizer
    for i, k in places(source):
        problem, sample = source.problem(i), done.get((source.name, str(arm), i, k))
        if sample is None:
            prompt = prompt_ids(problem, tokenizer, system, template_args)
            prefix_len = prefix_tokens(arm.prefix, problem, prompt, tokenizer)
            missing.append(Sample(
                source.name, str(arm), i, k, problem.prompt, str(problem.answer), len(prompt), prefix_len,
                every=max(max_new_tokens // 64, 1), mark=mark_of(problem),
                prompt=prompt, context=list(prompt)))
        elif sample.mark != mark_of(problem):
            refuse(f"holds samples of another problem {i} of task={source.name!r}")
    return missing


def places(source):
    """The (problem, sample) of a task that are asked for."""
    n = min(n_problems, source.size or n_problems)
    return list(itertools.product(range(n), range(samples_per_problem)))


def mark_of(problem):
    """What tells a problem from one that stood in its place before its file was edited. (Answers that are
    more than a text or a number are left out: each process prints a set in another order.)"""
    answer = problem.answer if isinstance(problem.answer, str | int | float) else None
    return hashlib.sha256(repr((problem.prompt, answer)).encode()).hexdigest()[:16]


def judged(sample, source, tokenizer):
    """The sample, with its text and its score."""
    problem, tokens = source.problem(sample.problem), list(sample.tokens)
    if sample.finish_reason == "stop":
        tokens.pop()
    prompt = prompt_ids(problem, tokenizer, system, template_args)
    sample.text = text_of(tokens, prompt, tokenizer)
    sample.score = float(source.score(problem, sample.text, tokens, sample.finish_reason))
    return sample


# ----------------------------------------------------------------------------------------------------------
# the table

def at_budget(sample, budget, source, tokenizer):
    """A sample as it would be if it had been stopped after `budget` tokens, scored as it stands there."""
    if sample.n_tokens <= budget:
        return sample
    marks = [sample.every * n for n in range(len(sample.times) + 1)]
    s = np.interp(budget, [*marks, sample.n_tokens], [0.0, *sample.times, sample.s])
    tokens = sample.tokens[:budget]
    cut = replace(sample, tokens=tokens, n_tokens=budget, finish_reason="length", s=float(s))
    return judged(cut, source, tokenizer)


def task_table(source, samples):
    """The rows of one task: each arm under each budget. samples: {arm: its samples, problem by problem}."""
    cut = {}
    for arm, budget in itertools.product(samples, sorted({*several(budgets), max_new_tokens})):
        tokenizer = arm.weights.tokenizer
        cut[arm, budget] = [at_budget(sample, budget, source, tokenizer) for sample in samples[arm]]
    return table_rows(cut, samples_per_problem, baseline)


def write_pass_rates(path, samples):
    """The share of right samples of each problem, by which train_rl.py can choose problems."""
    path.parent.mkdir(exist_ok=True)
    rates = dict(enumerate(scores(samples, samples_per_problem).mean(1)))
    write_json(path, dict(task=samples[0].task, seed=seed, held_out=held_out, rates=rates))


# ----------------------------------------------------------------------------------------------------------

def check_keys():
    """ValueError for a key out of range; those that generate() takes as they are, it checks by itself."""
    least = dict(n_problems=1, samples_per_problem=1, max_new_tokens=1, answer_tokens=1, summary_tokens=1,
                 carry_first=0, carry_last=0)
    form = r"whole(\+[1-9]\d*)?|question|0|[1-9]\d*"
    require(
        globals(),
        *((key, globals()[key] >= n, f"at least {n}") for key, n in least.items()),
        ("seed", abs(seed) < 2**63, "of 64 bits"),
        ("windows", windows and within(windows, 1, math.inf), "numbers of tokens, at least 1"),
        ("budgets", within(budgets, 1, max_new_tokens), f"numbers of tokens, from 1 to {max_new_tokens}"),
        ("prefixes", all(re.fullmatch(form, prefix) for prefix in split(prefixes)),
         "made of whole, question, whole+100 or a number of tokens"),
        ("summary_form", summary_form.count("{}") == 1, "a text with {} in it"),
        ("models", all(isinstance(text, str) for text in (*models, *models.values())),
         "names with their folders"),
        ("task", task and all(isinstance(name, str) for name in task), "a name or a list of names"))


def within(numbers, low, high):
    return all(type(n) is int and low <= n <= high for n in several(numbers))


def draw_missing(file, arms, sources):
    """Draw the samples that are not in the file yet, and write each of them to it."""
    done = read_samples(file)
    keep_settings(done, arms)
    for weights in dict.fromkeys(arm.weights for arm in arms):
        model = None              # frees the one before
        for arm, source in itertools.product(arms, sources):
            samples = missing_samples(arm, source, done) if arm.weights == weights else []
            if samples:
                place = f"{arms.index(arm) + 1} of {len(arms)}"
                print(f"{arm} ({place}) on {source.name}: {len(samples)} samples", file=sys.stderr)
                model = model or GPT.from_pretrained(
                    weights.folder, dtype=weights.dtype, device=weights.location)
                write = functools.partial(write_sample, file, source, weights.tokenizer)
                Sampler(arm, model, samples, write).run()


def main():
    check_keys()
    sources = [load_task(name, seed, held_out) for name in ([task] if isinstance(task, str) else task)]
    arms = all_arms()
    for arm in arms:
        if arm.policy in RESTARTS:
            check_room(arm, own_keys(arm.policy))
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "samples.jsonl", "ab+") as file:
        lock(file)
        draw_missing(file, arms, sources)
        done = read_samples(file)
    table = []
    for number, source in enumerate(sources):
        samples = {arm: [done[source.name, str(arm), i, k] for i, k in places(source)] for arm in arms}
        table += task_table(source, samples)
        for arm in arms:
            label = f"{number}-{arm}" if len(sources) > 1 else str(arm)
            label = re.sub(r"[^a-zA-Z0-9_.@=+-]+", "_", label)
            write_pass_rates(out / "pass_rates" / f"{label}.json", samples[arm])
    write_table(out / "table.csv", table)
    print(f"as a picture: python -m lab.figures accuracy --data={out}/table.csv --out={out}/accuracy.png",
          file=sys.stderr)
    print(json.dumps(dict(out_dir=out_dir, table=table)))


if __name__ == "__main__":
    run(main)
