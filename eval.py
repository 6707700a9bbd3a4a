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

import csv
import fcntl
import functools
import hashlib
import itertools
import json
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
from model import GPT, GPTConfig
from sliding_cache import layer_windows, row_bytes
from tasks import load_task, prompt_ids, text_of
from thinking import Thinking
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
            RESTARTS[policy](self)
        else:
            prefix_len = [sample.prefix_tokens for sample in self.samples]
            how = dict(window=self.arm.window, prefix_len=prefix_len, rope=rope) | POLICIES[policy]
            self.draw(self.samples, max_new_tokens, **how)

    def running(self):
        return [sample for sample in self.samples if not sample.finish_reason]

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
        rate = sum(sample.n_tokens for sample in self.samples) / (self.reported - self.began)
        most = sum(max_new_tokens - sample.n_tokens for sample in self.running())
        print(f"  {len(self.running())} of {len(self.samples)} samples are running, {rate:,.0f} tokens/s, "
              f"at most {most / rate / 60:,.1f} min left", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------
# restarts: full attention, but in contexts of P + W tokens

def go_on(sampler, reserve=0, limit=None):
    """Draw until P + W - reserve tokens are in the context of each running sample, or `limit` new ones have
    come. -> the samples that are still running"""
    samples, limits = sampler.running(), []
    for sample in samples:
        room = sample.prompt_tokens + sampler.arm.window - reserve - len(sample.context)
        left = max_new_tokens - sample.n_tokens
        limits.append(min(room, left, limit or left))
    sampler.draw(samples, limits)
    return sampler.running()


def full_stop(sampler):
    """Full attention that has to answer when its context is full."""
    tokenizer = sampler.tokenizer
    think, end_think = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    for sample in go_on(sampler, reserve=room_taken(sampler.arm)):
        said = tokenizer.encode(cue)
        if end_think is not None and end_think not in sample.tokens:
            if Thinking(end_think, think).open_in(sample.context):
                said = [end_think, *said]
        for token in said[:max_new_tokens - sample.n_tokens]:
            sampler.token(sample, token)
    for sample in go_on(sampler, limit=answer_tokens):
        sample.finish_reason = "length"
        sampler.complete(sample)


def last_k(sampler):
    """Restarts with the last raw tokens; with the first ones too it is Delethink's carry-over."""
    while running := go_on(sampler):
        for sample in running:
            first, rest = sample.tokens[:carry_first], sample.tokens[carry_first:]
            sample.context = sample.prompt + first + rest[max(len(rest) - carry_last, 0):]


def summary(sampler):
    """Restarts with a summary by the same model. It costs time but counts for no tokens of the sample."""
    tokenizer = sampler.tokenizer
    opening, closing = summary_form.split("{}")
    before, after, ask = map(tokenizer.encode, (opening, closing, summary_prompt))
    think, end = tokenizer.token_id("<think>"), closing.strip()
    stop = dict(stop_strings=(end,), decode=tokenizer.decode) if end else {}
    while running := go_on(sampler, reserve=len(ask) + summary_tokens):
        for sample in running:
            sample.context += ask
        written = sampler.draw(running, summary_tokens, aside=True, **stop)
        for sample, notes in zip(running, written, strict=True):
            notes = [token for token in notes if token not in tokenizer.eos_ids]
            if end:
                text = tokenizer.decode(notes).partition(end)[0]
                notes = tokenizer.encode(text)[:summary_tokens]
            place = sample.prompt_tokens
            if think in sample.prompt[-2:]:
                place = sample.prompt.index(think, -2)
            notes = before + notes + after
            sample.context = sample.prompt[:place] + notes + sample.prompt[place:]


RESTARTS = dict(full_stop=full_stop, last_k=last_k, summary=summary)
OWN_KEYS = dict(full_stop=("cue", "answer_tokens"), last_k=("carry_first", "carry_last"),
                summary=("summary_prompt", "summary_form", "summary_tokens"))


def room_taken(arm):
    """How many of the W tokens of a context are not for new ones: what is carried into it, and what is said
    at its end."""
    tokenizer = arm.weights.tokenizer
    if arm.policy == "last_k":
        return carry_first + carry_last
    if arm.policy == "full_stop":
        ends_thinking = tokenizer.token_id("</think>") is not None
        return ends_thinking + len(tokenizer.encode(cue)) + answer_tokens
    said = (summary_prompt, *summary_form.split("{}"))
    return sum(len(tokenizer.encode(text)) for text in said) + 2 * summary_tokens


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


def cache_bytes(arm, sample):
    """Bytes of the keys and values that a sample holds at its end; restarts: in its largest context."""
    prefix_len = POLICIES.get(arm.policy, {}).get("prefix_len", sample.prefix_tokens)
    length = sample.prompt_tokens + sample.n_tokens
    room = max(length - prefix_len, 1)
    windows = [w and min(w, room) for w in layer_windows(arm.weights.config, arm.window)]
    return row_bytes(arm.weights.config, windows, min(prefix_len, length), length, arm.weights.dtype)


def task_table(source, samples):
    """The rows of one task: each arm under each budget. samples: {arm: its samples, problem by problem}."""
    cut, rows = {}, []
    for arm, budget in itertools.product(samples, sorted({*several(budgets), max_new_tokens})):
        tokenizer = arm.weights.tokenizer
        cut[arm, budget] = [at_budget(sample, budget, source, tokenizer) for sample in samples[arm]]
    for (arm, budget), drawn in cut.items():
        row = table_row(arm, budget, drawn)
        base = base_of(arm, list(samples))
        if base != arm:
            row["against"] = str(base)
            row["difference"], row["low"], row["high"] = paired(scores(drawn), scores(cut[base, budget]))
        rows.append(row)
    return rows


def table_row(arm, budget, samples):
    n_tokens = [sample.n_tokens for sample in samples]
    seconds = [sample.s for sample in samples]
    return dict(
        task=samples[0].task, arm=str(arm), policy=arm.policy, window=arm.window, prefix=arm.prefix,
        budget=budget, problems=len(scores(samples)), samples=samples_per_problem,
        accuracy=mean(scores(samples)),
        pass_at_k=mean(scores(samples).max(1)),
        mean_tokens=mean(n_tokens),
        p90_tokens=float(np.percentile(n_tokens, 90)),
        cut=mean([sample.finish_reason == "length" for sample in samples]),
        s_per_sample=mean(seconds),
        tokens_per_s=sum(n_tokens) / max(sum(seconds), 1e-9),
        cache_mb=mean([cache_bytes(arm, sample) for sample in samples]) / 1e6,
        against=None, difference=None, low=None, high=None)


def scores(samples):
    """(problems, samples of each)"""
    return np.reshape([sample.score for sample in samples], (-1, samples_per_problem))


def mean(values):
    return float(np.mean(values))


def base_of(arm, arms):
    """What an arm is compared with: the baseline, where it has a window with the same one; else itself."""
    name = baseline or arms[0].name
    for other in arms:
        same_window = other.window == arm.window or None in (other.window, arm.window)
        if name == str(other) or name == other.name and same_window:
            return other
    return arm


def paired(a, b):
    """The mean difference of two arms with scores (problems, samples of each), and its 95 % bootstrap
    interval over the problems."""
    differences = a.mean(1) - b.mean(1)
    draws = np.random.default_rng(0).choice(differences, (10000, len(differences)))
    low, high = np.percentile(draws.mean(1), (2.5, 97.5))
    return mean(differences), float(low), float(high)


def write_table(path, table):
    """The table as a file and, without the columns that say the same everywhere, on the terminal."""
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    hidden = {"policy", "window", "prefix", "samples"}
    for key in ("task", "budget", "problems"):
        if len({row[key] for row in table}) == 1:
            hidden.add(key)
    print(f"{samples_per_problem} samples of each problem; differences are from the arm in `against`, "
          "with 95 % intervals")
    print_table([{key: value for key, value in row.items() if key not in hidden} for row in table])


def print_table(table):
    """Rows that have the same keys, for a terminal: floats to four digits."""
    lines = [list(table[0]), *([cell(value) for value in row.values()] for row in table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.rjust, line, widths)))


def cell(value):
    if isinstance(value, float):
        return f"{float(f'{value:.4g}'):g}"
    return "-" if value is None else str(value)


def write_pass_rates(path, samples):
    """The share of right samples of each problem, by which train_rl.py can choose problems."""
    path.parent.mkdir(exist_ok=True)
    rates = dict(enumerate(scores(samples).mean(1)))
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
        ("windows", min(several(windows), default=0) >= 1, "at least 1"),
        ("budgets", all(1 <= n <= max_new_tokens for n in several(budgets)), f"from 1 to {max_new_tokens}"),
        ("prefixes", all(re.fullmatch(form, prefix) for prefix in split(prefixes)),
         "made of whole, question, whole+100 or a number of tokens"),
        ("summary_form", summary_form.count("{}") == 1, "a text with {} in it"),
        ("task", len(task) > 0, "a name or a list of names"))


def check_room(arm):
    if arm.policy in RESTARTS and room_taken(arm) >= arm.window:
        raise ValueError(
            f"{arm}: what is carried into a context and said at its end takes {room_taken(arm)} of its "
            f"{arm.window} tokens: a larger window, or smaller {', '.join(OWN_KEYS[arm.policy])}")


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
        check_room(arm)
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
