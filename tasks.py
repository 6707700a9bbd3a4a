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
import importlib.util
import inspect
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

from checkpoint import read_json
from verify import BLOCK, behind_thinking, find_answer, judged, reaches


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
    return SOURCES[source](name, target, settings, seed, held_out, longer)


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
# reasoning-gym

CHUNK = 500  # problems that are generated at once


def gym(name, dataset, settings, seed, held_out, longer):
    """Datasets of reasoning-gym, one of CHUNK problems after another: there, the seed of a problem is that of
    its dataset plus its number, so datasets of neighbouring seeds share problems. Four (isomorphic_strings,
    knight_swap, polynomial_multiplication, ransom_note) are the same in every run only if PYTHONHASHSEED is
    set."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ValueError(f"task={name!r} needs a package: pip install reasoning-gym") from None
    check_known(name, "dataset", [dataset], DATASETS)
    fields = DATASETS[dataset][1].__dataclass_fields__.keys() - {"seed", "size"}
    check_known(name, "setting", settings, fields)

    @functools.lru_cache(2)
    def chunk(seed):
        return reasoning_gym.create_dataset(dataset, seed=seed, size=CHUNK, **settings)

    def problem(i, seed):
        chunk_seed = numbered("reasoning_gym", seed, i // CHUNK).getrandbits(31)
        entry = chunk(chunk_seed)[i % CHUNK]
        question = f"{entry['question'].rstrip()}\n\nGive the final answer in <answer></answer> tags."
        return Problem(question, entry, f"<answer>{entry['answer']}</answer>")

    def score(problem, text, tokens, finish_reason):
        found, entry = find_answer(text), problem.answer
        if found is None:
            return 0.0
        if dataset in ("countdown", "puzzle24"):
            details = entry["metadata"]
            return float(reaches(found, details["numbers"], details.get("target", 24)))
        earned = judged((dataset, repr(settings)), entry, found)
        return min(earned, 1.0) if earned > 0.05 else 0.0  # some scorers give up to 0.05 for anything

    try:
        chunk(0)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task={name!r}: the dataset does not take these settings: {error}") from None
    return divided(name, problem, score, None, seed, held_out)


# -----------------------------------------------------------------------------------------------------------
# JSON lines

class Letter(str):
    """The right answer to a problem with choices."""


def jsonl(name, path, settings, seed, held_out, longer):
    check_known(name, "setting", settings, ())
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in utf-8") from None
    lines = text.rstrip("\n").split("\n")                # not splitlines: a text may hold U+2028
    problems = [read_problem(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    letters = all(isinstance(problem.answer, Letter) for problem in problems)
    if not letters and importlib.util.find_spec("math_verify") is None:
        raise ValueError(f"task={name!r} needs a package: pip install 'math-verify[antlr4_13_2]'")
    return divided(name, lambda i, seed: problems[i], score_jsonl, len(problems), seed, held_out)


def read_problem(line, location):
    """The Problem of a line. ValueError that says where and what is wrong."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        example = '{"question": "1 + 1?", "answer": "2"}'
        raise ValueError(f"{location}: not JSON such as {example}: {line[:60]!r}")
    asks = next((key for key in ("question", "problem", "prompt") if key in record), "question")
    question = text_in(record, asks, location)
    solution = text_in(record, "solution", location) if record.get("solution") is not None else None
    if record.get("choices") is not None:
        listed, right = read_choices(record, location)
        question = f"{question}\n\n{listed}\n\nPut the letter of the right choice into \\boxed{{}}."
        return Problem(question, right, solution)
    answer = record.get("answer")
    if type(answer) is int or type(answer) is float and math.isfinite(answer):
        record["answer"] = str(answer)
    answer = text_in(record, "answer", location)
    return Problem(f"{question}\n\nPut the final answer into \\boxed{{}}.", answer, solution)


def text_in(record, key, location):
    """The text under a key, which must be there and not empty."""
    text = record.get(key)
    half_a_pair = "[\ud800-\udfff]"                      # of surrogates, which is no text
    if not isinstance(text, str) or not text.strip() or re.search(half_a_pair, text):
        got = "missing or null" if text is None else json.dumps(text)[:60]
        raise ValueError(f'{location}: "{key}" must be a text and not empty, but is {got}')
    return text


def read_choices(record, location):
    """The choices as the prompt lists them, and the Letter of the right one."""
    choices, answer = record["choices"], record.get("answer")
    if not isinstance(choices, list) or not 2 <= len(choices) <= 26:
        raise ValueError(f'{location}: "choices" must be a list of 2 to 26 texts')
    by_name = {f"choices[{i}]": choice for i, choice in enumerate(choices)}
    texts = [text_in(by_name, name, location) for name in by_name]
    letters = [Letter(chr(ord("A") + i)) for i in range(len(texts))]
    right = []
    for i, (letter, text) in enumerate(zip(letters, texts, strict=True)):
        if type(answer) in (int, str) and answer in (i, letter, text):
            right.append(letter)
    if len(right) != 1:
        raise ValueError(f'{location}: "answer" must be the letter, index (from 0) or text of just one '
                         f"choice, not {json.dumps(answer)[:60]}")
    return "\n".join(f"{letter}) {text}" for letter, text in zip(letters, texts, strict=True)), right[0]


def score_jsonl(problem, text, tokens, finish_reason):
    """1 if the answer is the same letter, the same text or, by math-verify, equal."""
    found = find_answer(text)
    if found is None:
        return 0.0
    words, right = plain_words(found), plain_words(problem.answer)
    if isinstance(problem.answer, Letter):
        letter = re.match(r"[({*$]*([A-Z])(?!\w)", "".join(words[:1]))
        return float(letter is not None and letter[1] == problem.answer)
    if words == right:
        return 1.0
    if re.fullmatch(r"[^\W\d_]{3,}", "".join(right)):  # to math-verify a word is a product: "vile" is "evil"
        return float([word.casefold() for word in words] == [word.casefold() for word in right])
    return judged((None, None), problem.answer, found) if len(found) <= 1000 else 0.0


def plain_words(text):
    """The words of a text, without LaTeX's names of fonts."""
    return re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", text).split()


# -----------------------------------------------------------------------------------------------------------
# a user's file

def python_file(name, path, settings, seed, held_out, longer):
    module = load_module(name, path)
    size = getattr(module, "size", None)
    if size is not None and type(size) is not int:
        raise ValueError(f"{path}: size must be a whole number or None, not {size!r}")
    parameters = list(inspect.signature(module.problem).parameters)[2:]
    check_known(name, "setting", settings, [key for key in parameters if key not in ("held_out", "longer")])
    knows = dict(held_out=held_out is not False, longer=longer)
    settings = settings | {key: value for key, value in knows.items() if key in parameters}

    def called(function, *args, **more):
        try:
            return function(*args, **more)
        except Exception as error:  # anybody's Python: whatever it raises is a fault of the file
            raise ValueError(f"{path}: {function.__name__} raised {type(error).__name__}: {error}") from error

    def problem(i, seed):
        made = called(module.problem, i, seed, **settings)
        problem = Problem(*made) if isinstance(made, tuple) and len(made) == 2 else made
        if not isinstance(problem, Problem) or not isinstance(problem.prompt, str):
            raise ValueError(f"{path}: problem({i}, {seed}) must return (prompt, answer) or a Problem, "
                             f"not {made!r:.80}")
        return problem

    def score(*args):
        score = called(module.score, *args)
        if not isinstance(score, Real) or not 0 <= score <= 1:
            raise ValueError(f"{path}: score must return a number from 0 to 1, not {score!r:.80}")
        return float(score)

    if "held_out" in parameters and size is None:
        task = Task(name, lambda i: problem(i, seed), score, None, seed, held_out)
    else:
        task = divided(name, problem, score, size, seed, held_out)
    task.problem(0)                                      # wrong settings are named now
    return task


def load_module(name, path):
    spec = importlib.util.spec_from_file_location(path, path)
    if spec is None:
        raise ValueError(f"task={name!r}: a Python file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path] = module                           # where dataclasses look for their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # anybody's Python
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    for function in ("problem", "score"):
        if not callable(getattr(module, function, None)):
            raise ValueError(f"{path} has no function {function}")
    return module


# -----------------------------------------------------------------------------------------------------------
# problems that are worth training on

def rated(name, path, settings, seed, held_out, longer):
    """The problems of the task that a file of pass rates names, {"task": ..., "seed": ..., "held_out": ...,
    "rates": {"0": 0.5}}, by the numbers i of its problem(i); those without a rate are left out. What the task
    holds out for the evaluation of a run is not chosen by rates.

    Two criteria of the paper come down to it. Difficulty: neither never nor nearly always solved in 16
    samples, min_pass=1/16 and max_pass=14/16. Answers that are guessed without thinking in at least one of 8
    samples: the rates of 8 samples without thinking, and max_pass=0."""
    check_known(name, "setting", settings, ("min_pass", "max_pass"))
    min_pass, max_pass = settings.get("min_pass", 0), settings.get("max_pass", 1)
    if not all(isinstance(rate, Real) for rate in (min_pass, max_pass)) or not 0 <= min_pass <= max_pass <= 1:
        raise ValueError(f"task={name!r}: min_pass and max_pass are 0 to 1, the first not above the second")
    found = read_json(Path(path))
    rates = found.get("rates")
    if not isinstance(rates, dict) or not all(is_rate(i, rate) for i, rate in rates.items()):
        raise ValueError(f'{path}: "rates" must map numbers of problems to rates from 0 to 1: {{"0": 0.5}}')
    if not isinstance(found.get("task"), str):
        raise ValueError(f"{path} does not say of which task these pass rates are")
    source = load_task(found["task"], seed, held_out, longer)
    if held_out:
        return source
    for key, value in (("seed", seed), ("held_out", held_out)):
        if key not in found or found[key] != value:
            rated_at = found.get(key, "missing")
            raise ValueError(f"{path} has the pass rates of {key}={rated_at!r}, not of {value!r}")
    last = max(map(int, rates), default=0)
    if source.size is not None and last >= source.size:
        raise ValueError(f"{path} has a rate of problem {last}, but the last is {source.size - 1}")
    numbers = sorted(int(i) for i, rate in rates.items() if min_pass <= rate <= max_pass)
    if not numbers:
        raise ValueError(
            f"{path}: none of {len(rates)} problems has a pass rate from {min_pass} to {max_pass}")
    return replace(source, name=name, problem=lambda i: source.problem(numbers[i]), size=len(numbers))


def is_rate(i, rate):
    return re.fullmatch("0|[1-9][0-9]{0,8}", i) and type(rate) in (int, float) and 0 <= rate <= 1


SOURCES = dict(reasoning_gym=gym, jsonl=jsonl, py=python_file, rated=rated)


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
