r"""
Every policy on the same problems, with the same random streams: accuracy, length, seconds, memory.

    python eval.py config/eval_passes.py                                    # the embedded task, all policies, after make demo-rl
    python eval.py config/eval_qwen3_1p7b.py                                # one GPU, after python data/aime25/prepare.py
    python eval.py --task=jsonl:problems.jsonl --policies=full,prefix_sliding,last_k --windows=512,1024
    python eval.py config/eval_passes.py --budgets=50,100,200               # the same samples once more, with other budgets

Policies: those of engine.POLICIES (prefix_sliding, full, sliding, streaming, random), and three that attend to everything in a context of
P + W tokens, as much as Prefix Sliding ever holds:
    full_stop  thinks until there is just room for an answer, and has to give it then: `cue`, and answer_tokens tokens
    last_k     when the context is full, begins another one: the prompt, the first carry_first and the last carry_last new tokens
    summary    just before it is full, writes a summary (summary_prompt, then up to summary_tokens tokens), and begins another one: the
               prompt and the summary, as in summary_form; before the <think> at the end of the prompt, if there is one
policy@name samples from the weights models[name] instead of init_from: trained and tested under different attention.

Each sample is a line of out_dir/samples.jsonl as soon as it is complete. A killed evaluation goes on where it stopped, started again by the
same command. The table is made from these lines, and the budgets are applied to them: a longer sample counts as cut, and is scored as it
stands there. Differences are paired: by problem, against `baseline` under the same budget, with a bootstrap interval over the problems.
Seconds of a sample are its shares of the decoding steps that it was in, so that they add up to the time of the whole: they depend on how
many samples ran beside it, and compare between arms that were sampled in one go with the same `rows`. Columns: pass_at_k, some sample of
a problem is right; mean_tokens and p90_tokens, with the end token, without summaries; cut, the share that a budget has cut; cache_mb,
keys and values that a sample holds at its end (restarts: in its largest context); difference, low, high: from the arm in `against`.
A line of samples.jsonl: task, arm, problem and sample (numbers), question, answer, prompt_tokens, prefix_tokens, n_tokens, finish_reason,
score, s, times (seconds after each `every` tokens), tokens, text.
"""
init_from = "data/smollm2"        # a Hugging Face folder or a hub name
models = {}                       # further weights for policy@name, such as {"full": "out-full/last"}
out_dir = "out-eval"              # samples.jsonl, eval.json (how they were drawn), table.csv, accuracy.png, pass_rates/
task: str | list = "reasoning_gym:chain_sum"  # passes:4-60 | reasoning_gym:<dataset> | jsonl:<path> | py:<file>; several: "['a', 'b']"
held_out: bool | None = None      # True: problems that training does not see | False: the others, to rate them | None: all of a file
n_problems = 30                   # of each task
samples_per_problem = 8           # the k of avg@k and pass@k
policies = "full,prefix_sliding"  # separated by commas: prefix_sliding | full | sliding | streaming | random | full_stop | last_k | summary
windows: tuple | int = 4096       # tokens; several: each policy with each of them
prefixes = "whole"                # for prefix_sliding and random, separated by commas: whole | question | whole+100 | a number of tokens
rope = "continue"                 # continue: absolute positions | reset: close the gap behind the prefix. streaming means reset
max_new_tokens = 32768            # most tokens per sample
min_new_tokens = 0                # tokens before an end token may come
budgets: tuple | int = ()         # tokens, up to max_new_tokens, which is always one of them
baseline = ""                     # what the others are compared with: a policy, policy@name or arm of the table; "" = the first policy
system = ""                       # system message for the chat template, "" = none
template_args = {}                # further arguments of the chat template, such as {"enable_thinking": True}
temperature = 0.6                 # >= 0
top_p = 0.95                      # 0 < top_p <= 1
rows: int | None = None           # samples that run at once; None = all, or as many as fit the memory
compile = False                   # True: faster steps by fast/step.py, after some seconds of compiling (on a CPU: by a C compiler)
carry_first = 0                   # last_k: first new tokens that stay (Delethink: 100)
carry_last = 256                  # last_k: last tokens that stay, k
summary_tokens = 256              # summary: most tokens of a summary
summary_prompt = ("\n\nMy notes are about to be lost. I write down what I need to go on, for example: <context>Sought: the smallest n. "
                  "It is a multiple of 6; 6, 12 and 18 fail at the second condition. Next: try 24.</context> Now mine: <context>")
summary_form = "<context>{}</context>\n\n"  # how it is shown afterwards; what follows {} ends it
cue = "\n\nThe final answer is \\boxed{"    # full_stop: begins the answer, after </think> where the thinking is still going on
answer_tokens = 32                # full_stop: most tokens of the answer
seed = 1                          # of problems and samples
device = "auto"                   # auto (cuda, then mps, then cpu) | cpu | cuda | cuda:1 | mps
dtype = "auto"                    # auto (bfloat16 where the hardware has it, else float32) | float32 | bfloat16 | float16 | float64

from configurator import configure, require, run, settings

configure(globals())

import csv
import fcntl
import hashlib
import itertools
import json
import re
import sys
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import lab.figures as figures
from checkpoint import MODEL_FILES, fingerprint, local_folder, read_json, replacing
from device import device_and_dtype
from engine import POLICIES, generate, hashed
from lab.bench import print_table, rounded
from model import GPT, GPTConfig
from sliding_cache import layer_windows, row_bytes
from tasks import load_task, prompt_ids, text_of
from thinking import Thinking
from tokenizer import load_tokenizer


@dataclass(frozen=True)
class Arm:
    """One way to sample. weights: a key of `models`, "" = init_from."""
    policy: str
    weights: str
    window: int | None
    prefix: str

    def kind(self):
        return self.policy + (f"@{self.weights}" if self.weights else "")

    def __str__(self):
        return self.kind() + (f" W={self.window}" if self.window else "") + (f" P={self.prefix}" if self.prefix != "whole" else "")


def arms():
    """All that the configuration asks for. Raises ValueError for a name that there is not."""
    out, kept = [], [prefix.strip() for prefix in prefixes.split(",")]
    for prefix in kept:
        if not re.fullmatch(r"whole(\+[1-9]\d*)?|question|0|[1-9]\d*", prefix):
            raise ValueError(f"prefixes={prefixes!r}: whole, question, whole+100 or a number of tokens, not {prefix!r}")
    for item in policies.split(","):
        policy, _, weights = item.strip().partition("@")
        if policy not in (*POLICIES, *RESTARTS):
            raise ValueError(f"policies={policies!r}: there is no {policy!r}, only {', '.join((*POLICIES, *RESTARTS))}")
        if weights and weights not in models:
            raise ValueError(f"policies={policies!r}: {item.strip()!r} needs models={{{weights!r}: a folder with weights}}")
        out += [Arm(policy, weights, window, prefix) for window in ([None] if policy == "full" else several(windows))
                for prefix in (kept if policy in ("prefix_sliding", "random") else ["whole"])]
    if len(set(out)) < len(out):
        raise ValueError(f"policies={policies!r}, windows={windows}, prefixes={prefixes!r}: the same twice")
    if baseline and baseline not in (*map(Arm.kind, out), *map(str, out)):
        raise ValueError(f"baseline={baseline!r}: none of {', '.join(map(str, out))} (--baseline= takes the first)")
    return out


def several(value):
    return (value,) if isinstance(value, int) else tuple(value)


def prefix_tokens(prefix, problem, prompt, tokenizer):
    """How many tokens stay for good. "question": up to the end of the question, without what the chat template says after it, which is
    the end that all prompts have in common."""
    if prefix == "question":
        other = prompt_ids(replace(problem, prompt=problem.prompt + "\n\n\u00a7"), tokenizer, system, template_args)
        same = next((n for n, (a, b) in enumerate(zip(reversed(prompt), reversed(other), strict=False)) if a != b), 0)
        return len(prompt) - same
    return int(prefix) if prefix.isdigit() else len(prompt) + int(prefix.partition("+")[2] or 0)


# ---------------------------------------------------------------------------------------------------------------------
# sampling

class Recorder:
    """Takes the tokens of some samples as they come, shares the time among them, and writes each sample when it is complete.

    samples: dicts of what is known of each beforehand. A decoding step gives at most one token to a sample: the second one to any of
    them begins the next step, and what has passed since the step before is the time of all who had a token in this one."""

    def __init__(self, samples, complete, eos_ids):
        self.samples, self.complete, self.eos_ids = samples, complete, eos_ids
        self.tokens, self.times, self.seconds = [[] for _ in samples], [[] for _ in samples], [0.0] * len(samples)
        self.every = max(max_new_tokens // 64, 1)
        self.step, self.cost, self.last = {}, 0.0, time.perf_counter()                # samples with a token in this step
        self.reason, self.ended, self.written = {}, [], 0
        self.began = self.shown = self.last

    def token(self, i, token):
        if i in self.step or not self.step:
            cost = time.perf_counter() - self.last
            self.close()
            self.cost, self.last = cost, time.perf_counter()
        self.step[i] = True
        self.tokens[i].append(token)
        if token in self.eos_ids or len(self.tokens[i]) == max_new_tokens:
            self.end(i, "stop" if token in self.eos_ids else "length")

    def share(self, samples):
        """Count the time since the last step, of work that gave them no tokens, to some samples."""
        self.close()
        now = time.perf_counter()
        for i in samples:
            self.seconds[i] += (now - self.last) / len(samples)
        self.last = now

    def end(self, i, reason):
        self.reason[i] = reason
        self.ended.append(i)

    def close(self):
        """Ends a step; scoring and writing are no part of anybody's time."""
        for i in self.step:
            self.seconds[i] += self.cost / len(self.step)
            if len(self.tokens[i]) % self.every == 0:
                self.times[i].append(round(self.seconds[i], 6))
        for i in self.ended:
            self.complete(dict(self.samples[i], n_tokens=len(self.tokens[i]), finish_reason=self.reason[i], s=round(self.seconds[i], 6),
                               every=self.every, times=self.times[i], tokens=self.tokens[i]))
        self.written += len(self.ended)
        self.step, self.ended, now = {}, [], time.perf_counter()
        if now - self.shown > 20:
            self.shown, tokens = now, sum(map(len, self.tokens))
            most = sum(max_new_tokens - len(t) for i, t in enumerate(self.tokens) if i not in self.reason)
            rate = tokens / (now - self.began)
            print(f"  {self.written} of {len(self.tokens)} samples, {tokens:,} tokens, {rate:,.0f} tokens/s, for these at most "
                  f"{most / rate / 60:,.1f} min left", file=sys.stderr, flush=True)


def sample(arm, model, tokenizer, prompts, kept, seeds, recorder):
    """Sample a completion of each prompt under a policy; every token goes to recorder.token. kept: prefix lengths."""
    how = dict(temperature=temperature, top_p=top_p, min_new_tokens=min_new_tokens, stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab,
               rows=rows, compile=compile)
    if arm.policy in POLICIES:
        generate(model, prompts, max_new_tokens, seed=seeds, on_token=recorder.token, **how,
                 **dict(window=arm.window, prefix_len=kept, rope=rope) | POLICIES[arm.policy])
        recorder.close()
        return
    turn = 0

    def piece(contexts, reserve=0, limit=max_new_tokens, hidden=False, **more):
        """Go on from contexts, {sample: tokens}, to P + W - reserve tokens at most. -> {sample: new tokens} of those that did not finish.
        Each piece draws from a stream of its own, the first one from that of the other policies. hidden: no part of the sample."""
        nonlocal turn
        index = [i for i in contexts if i not in recorder.reason]
        if not index:
            return {}
        so_far = [0 if hidden else len(recorder.tokens[i]) for i in index]
        room = [len(prompts[i]) + arm.window - reserve - len(contexts[i]) for i in index]
        done = generate(
            model, [contexts[i] for i in index], [min(r, limit, max_new_tokens - n) for r, n in zip(room, so_far, strict=True)],
            window=None, prefix_len=[len(prompts[i]) for i in index], seed=[hashed(seeds[i], turn) if turn else seeds[i] for i in index],
            **how | more | dict(min_new_tokens=[0 if hidden else max(min_new_tokens - n, 0) for n in so_far]),
            on_token=None if hidden else lambda j, token: recorder.token(index[j], token))
        turn += 1
        recorder.share(index) if hidden else recorder.close()
        return {i: c.tokens for i, c in zip(index, done, strict=True) if i not in recorder.reason}

    RESTARTS[arm.policy](prompts, tokenizer, recorder, piece)
    recorder.close()


def full_stop(prompts, tokenizer, recorder, piece):
    """Full attention that has to answer when its context is full."""
    think, end_think, ask = tokenizer.token_id("<think>"), tokenizer.token_id("</think>"), tokenizer.encode(cue)
    left = piece(dict(enumerate(prompts)), room_taken("full_stop", tokenizer))
    for i, fresh in left.items():
        is_open = end_think is not None and Thinking(end_think, think).open_in(prompts[i] + fresh) and end_think not in fresh
        for token in [end_think] * is_open + ask:
            recorder.token(i, token)
    for i in piece({i: prompts[i] + recorder.tokens[i] for i in left}, limit=answer_tokens):
        recorder.end(i, "length")


def last_k(prompts, tokenizer, recorder, piece):
    """Restarts with the last raw tokens; with the first ones too it is Delethink's carry-over (arXiv 2510.06557)."""
    contexts = dict(enumerate(prompts))
    while left := piece(contexts):
        contexts = {}
        for i in left:
            first, rest = recorder.tokens[i][:carry_first], recorder.tokens[i][carry_first:]
            contexts[i] = prompts[i] + first + rest[max(len(rest) - carry_last, 0):]


def summary(prompts, tokenizer, recorder, piece):
    """Restarts with a summary by the same model. It costs time but counts for no tokens of the sample."""
    opening, closing = summary_form.split("{}")
    before, after, ask = map(tokenizer.encode, (opening, closing, summary_prompt))
    think, end = tokenizer.token_id("<think>"), closing.strip()
    stop = dict(stop_strings=(end,), decode=tokenizer.decode) if end else {}
    contexts = dict(enumerate(prompts))
    while left := piece(contexts, len(ask) + summary_tokens):
        asked = {i: contexts[i] + fresh + ask for i, fresh in left.items()}
        contexts = {}
        for i, text in piece(asked, limit=summary_tokens, hidden=True, **stop).items():
            text = [t for t in text if t not in tokenizer.eos_ids]
            text = tokenizer.encode(tokenizer.decode(text).partition(end)[0])[:summary_tokens] if end else text
            at = next((n for n in range(len(prompts[i]) - 2, len(prompts[i])) if prompts[i][n] == think), len(prompts[i]))
            contexts[i] = prompts[i][:at] + before + text + after + prompts[i][at:]


RESTARTS = dict(full_stop=full_stop, last_k=last_k, summary=summary)
OWN_KEYS = dict(full_stop=("cue", "answer_tokens"), last_k=("carry_first", "carry_last"),
                summary=("summary_prompt", "summary_form", "summary_tokens"))


def room_taken(policy, tokenizer):
    """How many of the W tokens of a context are not for new ones: what is carried into it, and what is said at its end."""
    if policy == "full_stop":
        return (tokenizer.token_id("</think>") is not None) + len(tokenizer.encode(cue)) + answer_tokens
    if policy == "last_k":
        return carry_first + carry_last
    return sum(len(tokenizer.encode(part)) for part in (summary_prompt, *summary_form.split("{}"))) + 2 * summary_tokens


# ---------------------------------------------------------------------------------------------------------------------
# what is on disk

def read_samples(file):
    """{(task, arm, problem, sample): line} of samples.jsonl, open for reading and appending. A last line that a kill has cut is removed."""
    file.seek(0)
    data, done = file.read(), {}
    whole = data[:data.rfind(b"\n") + 1]
    file.truncate(len(whole))
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            done[record["task"], record["arm"], record["problem"], record["sample"]] = compact(record)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file.name}, line {number}: not a sample of eval.py") from None
    return done


def compact(record):
    """What the table needs of a sample: a list of tokens costs nine times as much memory as an array, and there may be 10^8 of them."""
    kept = {key: value for key, value in record.items() if key not in ("text", "question", "answer")}
    return kept | dict(tokens=array("i", record["tokens"]))


def keep_settings(out, done, ways, kind, folders):
    """Write to eval.json how the samples are drawn, and by which weights. ValueError if those that there are (done) were drawn in another
    way. Keys that only say which samples to draw and how to look at them may change, and those of policies that have no samples yet."""
    path, asked = out / "eval.json", {arm.policy for arm in ways}
    drawn = {arm.partition("@")[0].partition(" ")[0] for _, arm, _, _ in done}
    if done and not path.exists():
        raise ValueError(f"out_dir={out_dir!r} holds samples, but no eval.json that says how they were drawn: name another out_dir")
    before = read_json(path) if done else {}
    now = settings(globals()) | dict(dtype=str(kind)[6:]) | dict(
        weights=before.get("weights", {}) | {name: fingerprint(folder) for name, folder in folders.items()})
    now |= {key: before[key] for policy in drawn & OWN_KEYS.keys() - asked for key in OWN_KEYS[policy]}
    free = {"out_dir", "task", "n_problems", "samples_per_problem", "policies", "windows", "prefixes", "budgets", "baseline", "rows",
            "models", "init_from", "device", "debug", *(key for policy in OWN_KEYS.keys() - drawn for key in OWN_KEYS[policy])}
    for name, mark in before.get("weights", {}).items():
        if now["weights"][name] != mark:
            raise ValueError(f"out_dir={out_dir!r} holds samples of other weights than {folders[name]!r}: name another out_dir")
    for key in before.keys() - free - {"weights"}:
        if before[key] != now.get(key):
            raise ValueError(f"out_dir={out_dir!r} holds samples with {key}={before[key]!r}, not {now.get(key)!r}: name another out_dir")
    with replacing(path) as file:
        file.write_text(json.dumps(now) + "\n", encoding="utf-8")


def mark_of(problem):
    """What tells a problem from one that stood in its place before its file was edited. (Answers that are more than a text or a number
    are left out: sets are printed in another order by each process.)"""
    answer = problem.answer if isinstance(problem.answer, str | int | float) else None
    return hashlib.sha256(repr((problem.prompt, answer)).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# the table

def at_budget(record, budget, source, tokenizer):
    """What a sample comes to if it is stopped after `budget` tokens: (score, tokens, whether it was cut, seconds)."""
    n = record["n_tokens"]
    if n <= budget:
        return record["score"], n, record["finish_reason"] == "length", record["s"]
    tokens, problem = list(record["tokens"][:budget]), source.problem(record["problem"])
    score = source.score(problem, text_of(tokens, prompt_ids(problem, tokenizer, system, template_args), tokenizer), tokens, "length")
    marks = [0, *(record["every"] * (k + 1) for k in range(len(record["times"]))), n]
    return float(score), budget, True, float(np.interp(budget, marks, [0.0, *record["times"], record["s"]]))


def cache_bytes(arm, config, n_prompt, kept, n_new, kind):
    """Bytes of the keys and values that a sample of n_new tokens holds at its end; restarts: in its largest context."""
    P = POLICIES.get(arm.policy, {}).get("prefix_len", kept)
    n, room = n_prompt + n_new, max(n_prompt + n_new - P, 1)
    windows = [w and min(w, room) for w in layer_windows(config, arm.window)]
    return row_bytes(config, windows, min(P, n), n, kind)


def paired(a, b):
    """The mean difference of two lists of values for the same problems, and its 95 % bootstrap interval over the problems."""
    d = np.array(a) - np.array(b)
    means = d[np.random.default_rng(0).integers(0, len(d), (10000, len(d)))].mean(1)
    return float(d.mean()), *map(float, np.percentile(means, (2.5, 97.5)))


def task_table(name, source, records, tokenizers, configs, kind):
    """The rows of the table for one task: each arm under each budget. records: {arm: {problem: [its samples]}}."""
    out, means = [], {}
    for arm, budget in itertools.product(records, sorted({*several(budgets), max_new_tokens})):
        samples = [r for group in records[arm].values() for r in group]
        ends = [at_budget(r, budget, source, tokenizers[arm.weights]) for r in samples]
        scores, n_tokens, cut, seconds = (np.array(x, dtype=float) for x in zip(*ends, strict=True))
        scores = scores.reshape(len(records[arm]), -1)                                # (problems, samples of each)
        means[arm, budget] = scores.mean(1)
        held = [cache_bytes(arm, configs[arm.weights], r["prompt_tokens"], r["prefix_tokens"], int(n), kind)
                for r, n in zip(samples, n_tokens, strict=True)]
        out.append(dict(
            task=name, arm=str(arm), policy=arm.policy, window=arm.window, prefix=arm.prefix, budget=budget, problems=len(scores),
            samples=scores.shape[1], accuracy=float(scores.mean()), pass_at_k=float(scores.max(1).mean()),
            mean_tokens=float(n_tokens.mean()), p90_tokens=float(np.percentile(n_tokens, 90)), cut=float(cut.mean()),
            s_per_sample=float(seconds.mean()), tokens_per_s=float(n_tokens.sum() / max(seconds.sum(), 1e-9)),
            cache_mb=float(np.mean(held)) / 1e6, against=None, difference=None, low=None, high=None))
    first = baseline or next(iter(records)).kind()
    for row, (arm, budget) in zip(out, means, strict=True):
        bases = [a for a in records if str(a) == first or a.kind() == first and (a.window in (None, arm.window) or arm.window is None)]
        base = next((a for a in bases if str(a) == first), bases[0] if bases else arm)
        if base != arm:
            row["against"] = str(base)
            row["difference"], row["low"], row["high"] = paired(means[arm, budget], means[base, budget])
    return out


def draw(arm, name, source, todo, model, tokenizer, file, done):
    """Sample what is still missing of an arm on a task: todo, [(problem, sample)]. Complete samples go to `file` and `done`."""
    problems = {i: source.problem(i) for i, _ in todo}
    prompts = {i: prompt_ids(problem, tokenizer, system, template_args) for i, problem in problems.items()}
    kept = {i: prefix_tokens(arm.prefix, problem, prompts[i], tokenizer) for i, problem in problems.items()}

    def complete(record):
        tokens = record["tokens"][:-1] if record["finish_reason"] == "stop" else record["tokens"]
        text = text_of(tokens, prompts[record["problem"]], tokenizer)
        record["score"] = float(source.score(problems[record["problem"]], text, tokens, record["finish_reason"]))
        record |= dict(mark=mark_of(problems[record["problem"]]), text=text)
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        done[name, str(arm), record["problem"], record["sample"]] = compact(record)

    known = [dict(task=name, arm=str(arm), problem=i, sample=k, question=problems[i].prompt, answer=str(problems[i].answer),
                  prompt_tokens=len(prompts[i]), prefix_tokens=kept[i]) for i, k in todo]
    sample(arm, model, tokenizer, [prompts[i] for i, _ in todo], [kept[i] for i, _ in todo], [hashed(seed, i, k) for i, k in todo],
           Recorder(known, complete, tokenizer.eos_ids))


def write_results(out, table, records):
    """The table, on the terminal too, the picture, and for each arm and task the share of right samples of each problem, by which
    train_rl.py can choose problems."""
    with replacing(out / "table.csv") as path, open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    hidden = {"policy", "window", "prefix", "samples"}
    hidden |= {key for key in ("task", "budget", "problems") if len({row[key] for row in table}) == 1}
    print(f"{samples_per_problem} samples of each problem; differences are from the arm in `against`, with 95 % intervals")
    print_table([{key: value for key, value in rounded(**row).items() if key not in hidden} for row in table])
    figures.accuracy(out / "table.csv", out / "accuracy.png")
    (out / "pass_rates").mkdir(exist_ok=True)
    names = list(dict.fromkeys(name for name, _ in records))
    for (name, arm), problems in records.items():
        rates = {i: sum(r["score"] for r in samples) / len(samples) for i, samples in problems.items()}
        number = f"{names.index(name)}-" if len(names) > 1 else ""
        with replacing(out / "pass_rates" / f"{number}{re.sub(r'[^a-zA-Z0-9_.@=+-]+', '_', str(arm))}.json") as path:
            path.write_text(json.dumps(dict(task=name, seed=seed, held_out=held_out, rates=rates)) + "\n", encoding="utf-8")


def main():
    least = dict(n_problems=1, samples_per_problem=1, max_new_tokens=1, min_new_tokens=0, answer_tokens=1, summary_tokens=1, carry_first=0,
                 carry_last=0)
    require(globals(), *((key, globals()[key] >= n, f"at least {n}") for key, n in least.items()),
            ("summary_form", summary_form.count("{}") == 1, "a text with {} in it"), ("seed", abs(seed) < 2**63, "of 64 bits"),
            ("windows", bool(several(windows)) and all(type(w) is int and w >= 1 for w in several(windows)), "whole numbers of at least 1"),
            ("budgets", all(type(b) is int and 0 < b <= max_new_tokens for b in several(budgets)), f"from 1 to {max_new_tokens}"),
            ("min_new_tokens", min_new_tokens <= max_new_tokens, f"at most max_new_tokens={max_new_tokens}"),
            ("models", all(isinstance(folder, str) for folder in models.values()), "names and their folders"),
            ("task", bool(task) and all(isinstance(name, str) for name in task), "a name or a list of names"))
    sources = {name: load_task(name, seed, held_out) for name in ([task] if isinstance(task, str) else task)}
    numbers = {name: range(min(n_problems, source.size or n_problems)) for name, source in sources.items()}
    ways, (where, kind) = arms(), device_and_dtype(device, dtype)
    folders = {arm.weights: models[arm.weights] if arm.weights else init_from for arm in ways}
    configs = {w: GPTConfig.from_hf(read_json(local_folder(f, MODEL_FILES) / "config.json")) for w, f in folders.items()}
    tokenizers = {w: load_tokenizer(folder) for w, folder in folders.items()}
    for arm in ways:
        if arm.policy in RESTARTS and (taken := room_taken(arm.policy, tokenizers[arm.weights])) >= arm.window:
            raise ValueError(f"{arm}: what is carried into a context and said at its end takes {taken} of its {arm.window} tokens: a "
                             f"larger window, or smaller {', '.join(OWN_KEYS[arm.policy])}")
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "samples.jsonl", "ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"out_dir={out_dir!r} is in use by another eval.py: wait for it, or name another out_dir") from None
        done = read_samples(file)
        keep_settings(out, done, ways, kind, folders)
        for weights in folders:
            model = None                                                              # frees the one before
            for arm, (name, source) in itertools.product([arm for arm in ways if arm.weights == weights], sources.items()):
                todo = []
                for i, k in itertools.product(numbers[name], range(samples_per_problem)):
                    if (name, str(arm), i, k) not in done:
                        todo.append((i, k))
                    elif done[name, str(arm), i, k]["mark"] != mark_of(source.problem(i)):
                        raise ValueError(f"out_dir={out_dir!r} holds samples of another problem {i} of task={name!r}: name another out_dir")
                if todo:
                    print(f"{arm} ({ways.index(arm) + 1} of {len(ways)}) on {name}: {len(todo)} samples", file=sys.stderr, flush=True)
                    model = model or GPT.from_pretrained(folders[weights], dtype=kind, device=where)
                    draw(arm, name, source, todo, model, tokenizers[weights], file, done)
    records = {(name, arm): {i: [done[name, str(arm), i, k] for k in range(samples_per_problem)] for i in numbers[name]}
               for name in sources for arm in ways}
    table = [row for name, source in sources.items() for row in task_table(
        name, source, {arm: records[name, arm] for arm in ways}, tokenizers, configs, kind)]
    write_results(out, table, records)
    print(json.dumps(dict(out_dir=out_dir, table=table)))


if __name__ == "__main__":
    run(main)
