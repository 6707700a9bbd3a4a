r"""
Problems, verifiers and rewards.

    python tasks.py reasoning_gym:chain_sum                 # three problems of a task, as the model sees them
    python tasks.py jsonl:problems.jsonl --n=10
    python tasks.py "py:data/passes/task.py?low=4&high=60"

A task is a source of numbered problems and a scorer. The names that scripts take:

    reasoning_gym:<dataset>  the generated datasets of the package reasoning-gym, scored by its own scorers. A
                             solution is the bare answer: it teaches the form
    jsonl:<path>             a line per problem, {"question": ..., "answer": ...}, answers checked by
                             math-verify, or letters if there are "choices"; train_sft.py learns from
                             "solution" (a text); lines 1, 21, ... are held out. data/*/prepare.py make some
    py:<file>                a Python file with problem(i, seed) -> (prompt, answer) or a tasks.Problem,
                             score(problem, text, tokens, finish_reason) -> 0 to 1 and, if its problems have
                             an end, `size`. data/passes/task.py is one
    rated:<path>             those problems of another task that a model solves at some rates. path: a file of
                             pass_rates/, which eval.py writes and which names the task; from ?min_pass=0.1 to
                             ?max_pass=0.9

Settings stand behind a question mark, reasoning_gym:chain_sum?min_terms=2&max_terms=3. Those of a Python file
are keyword arguments of its problem(), which may also take held_out (True for problems that are not learned
from) and longer (a factor on how long traces have to be); without held_out it gets another seed for these.
"""
import sys

n = 3             # how many problems to print
seed = 1          # of the problems
held_out: bool | None = False  # True: of those that a run is evaluated on; None: of all that there are

_what = sys.argv.pop(1) if __name__ == "__main__" and sys.argv[1:] and sys.argv[1][0] != "-" else None

from configurator import configure, run

configure(globals())

import ast
import difflib
import functools
import hashlib
import importlib
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

SOURCES = ("reasoning_gym", "jsonl", "py", "rated")     # each a file in sources/


@dataclass
class Problem:
    """prompt: what the user says. answer: what the scorer compares with. solution: a worked text to learn
    from, or None. target_length: how many tokens the prompt asks for, or None."""
    prompt: str
    answer: object
    solution: str | None = None
    target_length: int | None = None


@dataclass
class Task:
    """problem(i) -> Problem number i >= 0, always the same one; size: how many there are, None = without end.
    score(problem, text, tokens, finish_reason) -> 0 (wrong) to 1 (right); text and tokens are without the end
    token."""
    name: str
    problem: Callable
    score: Callable
    size: int | None = None
    seed: int = 0
    held_out: bool | None = False

    def draw(self, n):
        """The n-th problem of a training run: number n of a task without end, else all of them in one random
        order after another."""
        if self.size is None:
            return self.problem(n)
        epoch, place = divmod(n, self.size)
        return self.problem(order(self.size, self.seed, epoch)[place])


def load_task(name, seed=0, held_out=False, longer=1):
    """The Task that a name stands for. held_out: False = the problems to learn from, True = those held out of
    them, None = all that there are, in the order of the file (for evaluation sets; as True where a task has
    no end). longer: a factor on how long their traces have to be, where the task knows. Raises ValueError for
    an unknown name or setting, FileNotFoundError for a missing file."""
    source, _, detail = name.partition(":")
    if source not in SOURCES:
        raise ValueError(f"task={name!r}: one of {', '.join(SOURCES)}, such as jsonl:problems.jsonl")
    target, _, query = detail.partition("?")
    settings = {}
    for item in query.split("&") if query else []:
        key, _, text = item.partition("=")
        settings[key] = literal(text)
    if source != "reasoning_gym" and not Path(target).is_file():
        raise FileNotFoundError(f"task={name!r}: there is no file {target!r}")
    source = importlib.import_module(f"sources.{source}")
    return source.load(name, target, settings, seed, held_out, longer)


def literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_known(name, what, keys, there):
    """ValueError that names the nearest, for the first of the keys that is not there."""
    for key in keys:
        if key not in there:
            near = difflib.get_close_matches(key, there, 1, cutoff=0)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"task={name!r}: there is no {what} {key!r}{hint}")


@functools.lru_cache(1)
def order(size, seed, epoch):
    return numbered("order", seed, epoch).sample(range(size), size)


def numbered(*key):
    """A random generator that depends on the key alone."""
    return random.Random(hashlib.sha256(repr(key).encode()).digest())


def divided(name, problem, score, size, seed, held_out):
    """The Task of problem(i, seed). Held out are the problems of another seed, or every 20th of a number of
    them, the first included."""
    if size is None:
        own = numbered("held out", seed).getrandbits(31) if held_out is not False else seed
        return Task(name, lambda i: problem(i, own), score, None, seed, held_out)
    least = 1 if held_out is None else 2                 # one to learn from, and one to be held out
    if size < least:
        raise ValueError(f"task={name!r} has {size} problems, and needs at least {least}")
    numbers = [i for i in range(size) if held_out is None or (i % 20 == 0) == held_out]
    return Task(name, lambda i: problem(numbers[i], seed), score, len(numbers), seed, held_out)


# -----------------------------------------------------------------------------------------------------------
# answers

BLOCK = re.compile(r"<answer>|\\boxed\s*\{")
# braces behind a backslash, as in \{1, 2\}, enclose nothing
MARK = re.compile(BLOCK.pattern + r"|</answer>|\\\\(?!boxed)|\\?[{}]")


def behind_thinking(text):
    """What follows the last </think>, up to a <think> that is not closed; the whole text where there is
    neither."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def find_answer(text):
    r"""What stands in the last <answer>...</answer> or \boxed{...} (braces balanced) behind the thinking, of
    nested ones in the innermost; None if there is none, or nothing in it."""
    text, tag, braces, found = behind_thinking(text), None, [], None
    for mark in MARK.finditer(text):
        start = None
        if mark[0] == "<answer>":
            tag = mark.end()
        elif mark[0] == "</answer>":
            start, tag = tag, None
        elif mark[0] == "}":
            start = braces.pop() if braces else None
        elif mark[0][-1] == "{" and mark[0] != r"\{":
            braces.append(mark.end() if "boxed" in mark[0] else None)
        if start is not None and (found is None or found[0] < start):
            found = start, mark.start()
    return text[found[0]:found[1]].strip() or None if found else None


# -----------------------------------------------------------------------------------------------------------
# prompts and rewards

PARTS = ("correct", "format", "overlong", "length")


def reward_parts(problem, text, n_tokens, correct, max_new_tokens, overlong_margin):
    r"""What the weights in `reward` multiply, for one completion of n_tokens tokens:
    correct    as the scorer found, 0 to 1
    format     1 if the thinking ends at most once and one answer follows, no more: <answer>...</answer> or
               \boxed{...}, or, in a text without these, " answer X" at its end, X in capitals; else 0
    overlong   0 up to max_new_tokens - overlong_margin tokens, from there down to -1 at max_new_tokens
               (DAPO, arXiv 2503.14476)
    length     -0.0003 for every token more or less than the prompt asked for (L1, arXiv 2503.04697)"""
    tail = behind_thinking(text)
    n_blocks = len(BLOCK.findall(tail))
    if n_blocks:
        tidy = n_blocks == 1 and find_answer(tail) is not None
    else:
        ends = re.search(r" answer [A-Z]( [A-Z])*\s*(<\|\w+\|>)?$", tail.rstrip())
        tidy = tail.count(" answer ") == 1 and ends is not None
    over = n_tokens - (max_new_tokens - overlong_margin)
    overlong = -min(over / max(overlong_margin, 1), 1.0) if over > 0 else 0.0
    length = -0.0003 * abs(problem.target_length - n_tokens) if problem.target_length else 0.0
    tidy = tidy and text.count("</think>") <= 1
    return dict(correct=correct, format=float(tidy), overlong=overlong, length=length)


def check_reward(reward, length_targets=()):
    """ValueError naming what is wrong, unless `reward` maps parts that there are to numbers."""
    for part, weight in reward.items():
        if part not in PARTS:
            raise ValueError(f"reward={reward!r}: there is no part {part!r}, only {', '.join(PARTS)}")
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise ValueError(f"reward={reward!r}: the weight of {part!r} must be a number, not {weight!r}")
    if not any(reward.values()):
        raise ValueError(f"reward={reward!r} rewards nothing; the parts are {', '.join(PARTS)}")
    if reward.get("length") and not length_targets:
        raise ValueError(f"reward={reward!r}: the part 'length' needs length_targets, numbers of tokens")
    if not all(type(target) is int and target > 0 for target in length_targets):
        raise ValueError(f"length_targets={length_targets!r}: whole numbers of tokens, at least 1")


def ask_for_length(problem, targets, n, seed):
    """The problem, or a copy that asks to think for one of the `targets` (numbers of tokens), drawn by its
    number n and the seed."""
    if not targets:
        return problem
    target = numbered("length", seed, n).choice(targets)
    prompt = f"{problem.prompt}\n\nThink for about {target} tokens."
    return replace(problem, prompt=prompt, target_length=target)


def prompt_ids(problem, tokenizer, system="", template_args=None):
    """The prompt as the chat template of a model renders it, with a system message unless that is empty."""
    if not all(isinstance(key, str) and key != "messages" for key in template_args or {}):
        raise ValueError(
            f"template_args={template_args!r}: its keys are variables of the chat template, messages apart")
    messages = [{"role": "user", "content": problem.prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode_chat(messages, **(template_args or {}))


def text_of(tokens, prompt, tokenizer):
    """The text of a completion as scorers get it: with the <think> that the prompt ends inside of, if it
    does, so that an answer in thinking that was cut off counts for no more than where the model itself wrote
    <think>."""
    think, end_think = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    last = next((t for t in reversed(prompt) if t in (think, end_think)), None)
    is_open = last is not None and last == think
    return ("<think>" if is_open else "") + tokenizer.decode(tokens)


def main():
    if _what is None:
        raise ValueError("the first argument names a task: python tasks.py reasoning_gym:chain_sum")
    if n < 1:
        raise ValueError(f"n={n}: at least 1")
    source = load_task(_what, seed, held_out)
    for i in range(min(n, source.size or n)):
        problem = source.problem(i)
        answer = problem.answer["answer"] if _what.startswith("reasoning_gym") else problem.answer
        print(f"--- {i}\n{problem.prompt}\n\nanswer: {answer}")
        if problem.solution:
            print(f"solution: {problem.solution}")
    print(json.dumps(dict(task=_what, size=source.size)))


if __name__ == "__main__":
    sys.modules["tasks"] = sys.modules["__main__"]       # where a user's file finds Problem
    run(main)
