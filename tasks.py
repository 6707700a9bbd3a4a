r"""
Problems, verifiers and rewards.

    python tasks.py passes                                    # three problems of a task, as the model sees them
    python tasks.py reasoning_gym:chain_sum
    python tasks.py jsonl:problems.jsonl --n=10

A task is a source of numbered problems and a scorer. The names that scripts take:

    passes:4-60              made here, for models from scratch: see below. 4-60: seconds on the clock
    recall:16-32             the same, and at the end also who had the ball at a moment early in the trace
    reasoning_gym:<dataset>  the generated datasets of the package reasoning-gym, scored by its own scorers; with settings:
                             reasoning_gym:chain_sum?min_terms=2&max_terms=3. A solution is the bare answer: it teaches the form
    jsonl:<path>             a line per problem, {"question": ..., "answer": ...}, answers checked by math-verify, or letters if there
                             are "choices"; "solution" (a worked text) is what train_sft.py learns from; lines 1, 21, 41, ... are held out.
                             data/*/prepare.py make such files of AIME25, GPQA, MATH-500 and the paper's problems
    py:<file>                a Python file with problem(i, seed) -> (prompt, answer) or a tasks.Problem, score(problem, text, tokens,
                             finish_reason) -> 0 to 1 and, if its problems have an end, `size`

The embedded task is made to need what Prefix Sliding keeps. Eleven people pass a ball, one pass a second; the prompt says who throws to
whom, and is the only place that does:

    Passes CG AF KB DI EH FJ GK BD HC IA JE from 00 01 02 A    A throws to F, B to D, ...; A has the ball, for 1 minute 2 seconds
    00 01 01 F 00 01 00 J 00 00 59 E 00 00 58 H [...] answer K

Every step looks up one word of the prompt and otherwise needs only the step before it. Everybody has the ball once in eleven passes
(the throws are one ring), so a window of fewer than eleven steps never shows the throw that is needed next. A trace is as long as its
clock says, and only the answer is checked. The worked solutions for the warm start show clocks of up to 24 hours, but they are
impatient: at every step, with a small probability, they stop and answer with whoever has the ball. Patience is what is left for
reinforcement learning. (Were there ten people, every minute could be skipped and the answer stay the same; RL found that out at once.)

recall is where a window has to fail: the prompt names a moment in the first third of the trace, and the answer has to say who had the
ball then. The trace tells that once, and when it is needed, it has long left the window, and the reach of three layers of windows.

    Passes CG AF [...] answer 00 00 15 from 00 00 20 A        who has the ball at the end, and who had it when the clock showed 15?
    00 00 19 F [...] 00 00 15 H 00 00 14 C [...] 00 00 00 E answer E H
    00 00 19 F [...] 00 00 15 H H 00 00 14 C H [...] 00 00 00 E H answer E H

Of the worked solutions half (REHEARSES) repeat the name at every step, as in the last line. The others just walk on.
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
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

from checkpoint import read_json, replacing
from tokenizer import BYTE
from verify import BLOCK, behind_thinking, find_answer, judged, reaches


@dataclass
class Problem:
    """prompt: what the user says. answer: what the scorer compares with. solution: a worked text to learn from, or None.
    target_length: how many tokens the prompt asks for, or None."""
    prompt: str
    answer: object
    solution: str | None = None
    target_length: int | None = None


@dataclass
class Task:
    """problem(i) -> Problem number i >= 0, always the same one; size: how many there are, None = without end.
    score(problem, text, tokens, finish_reason) -> 0 (wrong) to 1 (right); text and tokens are without the end token."""
    name: str
    problem: Callable
    score: Callable
    size: int | None = None
    seed: int = 0
    held_out: bool | None = False

    def draw(self, n):
        """The n-th problem of a training run: number n of a task without end, else all of them in one random order after another."""
        if self.size is None:
            return self.problem(n)
        epoch, place = divmod(n, self.size)
        return self.problem(order(self.size, self.seed, epoch)[place])


def load_task(name, seed=0, held_out=False, longer=1):
    """The Task that a name stands for. held_out: False = the problems to learn from, True = those held out of them, None = all that
    there are, in the order of the file (for evaluation sets; as True where a task has no end). longer: a factor on how long their traces
    have to be, where the task knows. Raises ValueError for an unknown name, FileNotFoundError for a missing file."""
    kind, _, detail = name.partition(":")
    if kind not in SOURCES:
        raise ValueError(f"task={name!r}: one of {', '.join(SOURCES)}, such as passes:4-60 or jsonl:problems.jsonl")
    return SOURCES[kind](name, detail, seed, held_out, longer)


@functools.lru_cache(1)
def order(size, seed, epoch):
    return numbered("order", seed, epoch).sample(range(size), size)


def numbered(*key):
    """A random generator that depends on the key alone."""
    return random.Random(hashlib.sha256(repr(key).encode()).digest())


def divided(name, problem, score, size, seed, held_out):
    """The Task of problem(i, seed). Held out are the problems of another seed, or every 20th of a number of them, the first included."""
    if size is None:
        own = numbered("held out", seed).getrandbits(31) if held_out is not False else seed
        return Task(name, lambda i: problem(i, own), score, None, seed, held_out)
    if size < 1:
        raise ValueError(f"task={name!r} has {size} problems")
    if size < 2 and held_out is not None:
        raise ValueError(f"task={name!r} has {size} problem, and needs two: one to learn from, one to be held out")
    numbers = [i for i in range(size) if held_out is None or (i % 20 == 0) == held_out]
    return Task(name, lambda i: problem(numbers[i], seed), score, len(numbers), seed, held_out)


# ---------------------------------------------------------------------------------------------------------------------
# which problems are worth training on

def between(source, path, min_pass, max_pass):
    """The Task of those problems of `source` that a model solved at a rate from min_pass to max_pass, both included. path: a
    file of pass_rates/ that eval.py left for this task, seed and part, {"task": ..., "seed": ..., "held_out": ..., "rates": {"0": 0.5}},
    by the numbers i of source.problem(i); problems without a rate are left out.
    Two criteria of the paper come down to it. Difficulty: neither never nor nearly always solved in 16 samples, min_pass=1/16 and
    max_pass=14/16. Answers that are guessed without thinking in at least one of 8 samples: the rates of 8 samples without thinking, and
    max_pass=0. (For both at once, take the numbers of the guessed ones out of the file of the other rates.)
    Raises ValueError if the file is of another form or of other problems or no problem is left, FileNotFoundError if there is none."""
    if not 0 <= min_pass <= max_pass <= 1:
        raise ValueError(f"min_pass={min_pass!r} and max_pass={max_pass!r}: pass rates from 0 to 1, the first not above the second")
    found = read_json(Path(path))
    rates = found.get("rates")
    if not isinstance(rates, dict) or not all(
            re.fullmatch("0|[1-9][0-9]{0,8}", i) and type(rate) in (int, float) and 0 <= rate <= 1 for i, rate in rates.items()):
        raise ValueError(f'{path}: "rates" must map numbers of problems to pass rates from 0 to 1, such as {{"0": 0.5}}')
    for key, value in dict(task=source.name, seed=source.seed, held_out=source.held_out).items():
        if key not in found or found[key] != value:
            raise ValueError(f"{path} has the pass rates of {key}={found.get(key, 'missing')!r}, not of {value!r}")
    rates = {int(i): rate for i, rate in rates.items()}
    if source.size is not None and max(rates, default=0) >= source.size:
        raise ValueError(f"{path} has a pass rate of problem {max(rates)}, and task={source.name!r} ends at {source.size - 1}")
    numbers = sorted(i for i, rate in rates.items() if min_pass <= rate <= max_pass)
    if not numbers:
        raise ValueError(f"{path}: none of {len(rates)} problems has a pass rate from {min_pass} to {max_pass}")
    name = f"{source.name}, pass rates {min_pass} to {max_pass}"  # the numbers are others now: rates of the source do not fit any more
    return replace(source, name=name, problem=lambda i: source.problem(numbers[i]), size=len(numbers))


OPEN = re.compile(r"\b(prove|write\s+a\s+proof|(show|demonstrate)\s+that|justify|explain|"
                  r"how\s+(would|could|can|should|might|do|does|did|is|are|was|were|will))\b", re.IGNORECASE)
# "(a) Find", or "a) Find" where a sentence begins: not f(a), (0, a)
ITEM = r"(?<!\S)(?:\*\*)?\({0}\)(?:\*\*)?\s+[\w$\\]|(?:^|[.?!:;]\s|\n)\s*{0}\)\s"


def verifiable(question):
    """Whether a short answer to a question (a text) can be checked: it asks for no proof or explanation, and for one thing, not for
    (a) and (b). The paper drops questions with "How", too; here "how many", "how far" and their like stay, as their answers are numbers,
    and so does "how to", which is often part of a story."""
    parts = (all(re.search(ITEM.format(number), question) for number in first_two) for first_two in (("a", "b"), ("i", "ii")))
    return not OPEN.search(question) and not any(parts)


# ---------------------------------------------------------------------------------------------------------------------
# answers and rewards

PARTS = ("correct", "format", "overlong", "length")


def reward_parts(problem, text, n_tokens, correct, max_new_tokens, overlong_margin):
    r"""What the weights in `reward` multiply, for one completion of n_tokens tokens:
    correct    as the scorer found, 0 to 1
    format     1 if the thinking ends at most once and one answer follows, no more: <answer>...</answer> or \boxed{...}, or, in a text
               without these, " answer X" at its end, as in the embedded task; else 0
    overlong   0 up to max_new_tokens - overlong_margin tokens, from there down to -1 at max_new_tokens (DAPO, arXiv 2503.14476)
    length     -0.0003 for every token more or less than the prompt asked for (L1, arXiv 2503.04697), 0 if it did not ask"""
    tail = behind_thinking(text)
    blocks = len(BLOCK.findall(tail))
    if blocks:
        tidy = blocks == 1 and find_answer(tail) is not None
    else:
        tidy = tail.count(" answer ") == 1 and re.search(rf" answer [{PEOPLE}]\s*(<\|\w+\|>)?$", tail.rstrip()) is not None
    over = n_tokens - (max_new_tokens - overlong_margin)
    overlong = 0.0 if over <= 0 else -min(over / overlong_margin, 1.0) if overlong_margin else -1.0
    length = -0.0003 * abs(problem.target_length - n_tokens) if problem.target_length else 0.0
    return dict(correct=correct, format=float(tidy and text.count("</think>") <= 1), overlong=overlong, length=length)


def check_reward(reward, length_targets=()):
    """ValueError naming what is wrong, unless `reward` maps parts that there are to numbers."""
    for part, weight in reward.items():
        if part not in PARTS:
            raise ValueError(f"reward={reward!r}: there is no part {part!r}, only {', '.join(PARTS)}")
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise ValueError(f"reward={reward!r}: the weight of {part!r} must be a number, not {weight!r}")
    if reward.get("length") and not length_targets:
        raise ValueError(f"reward={reward!r}: the part 'length' needs length_targets, the numbers of tokens to ask for")
    if not any(reward.values()):
        raise ValueError(f"reward={reward!r} rewards nothing; the parts are {', '.join(PARTS)}")


def prompt_ids(problem, tokenizer, system="", template_args=None):
    """The prompt as the chat template of a model renders it, with a system message unless that is empty."""
    if not all(isinstance(key, str) and key != "messages" for key in template_args or {}):
        raise ValueError(f"template_args={template_args!r}: its keys are names of variables of the chat template, messages apart")
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": problem.prompt}]
    return tokenizer.encode_chat(messages, **(template_args or {}))


def text_of(tokens, prompt, tokenizer):
    """The text of a completion as scorers get it: with the <think> that the prompt ends inside of, if it does, so that an answer in
    thinking that was cut off counts for no more than where the model itself wrote <think>."""
    think, end_think = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    last = next((t for t in reversed(prompt) if t in (think, end_think)), None)
    return "<think>" * (last is not None and last == think) + tokenizer.decode(tokens)


def ask_for_length(problem, targets, n, seed):
    """The problem, or a copy that asks to think for one of the `targets` (numbers of tokens), drawn by its number n and the seed."""
    if not targets:
        return problem
    if not all(type(target) is int and target > 0 for target in targets):
        raise ValueError(f"length_targets={targets!r}: whole numbers of tokens, at least 1")
    target = numbered("length", seed, n).choice(targets)
    return replace(problem, prompt=f"{problem.prompt}\n\nThink for about {target} tokens.", target_length=target)


# ---------------------------------------------------------------------------------------------------------------------
# the embedded task

PEOPLE = "ABCDEFGHIJK"
DAY = 24 * 60 * 60      # seconds: the longest clock is 23 59 59
IMPATIENCE = 0.06      # chance, at every step of an impatient solution, to stop there
LONGEST_SOLUTION = 40  # steps of an impatient solution
REHEARSES = 0.5        # share of the solutions of recall that repeat the name that is asked for


def passes(name, detail, seed, held_out, longer):
    match = re.fullmatch(r"(\d+)-(\d+)", detail or "4-60")
    low, high = (longer * int(n) for n in match.groups()) if match else (1, DAY - 1)
    if not (match or detail == "impatient") or not 1 <= low <= high < DAY:
        raise ValueError(f"task={name!r}: passes:impatient, or two numbers of seconds from 1 to {DAY - 1}, such as passes:4-60")

    def problem(i):
        rng = numbered("passes", seed, held_out is not False, i)
        # small rings soon teach that the next holder is somebody who stands in the prompt; whole ones, to look everywhere in it
        size = len(PEOPLE) if match else rng.choice((rng.randint(3, 5), rng.randint(3, len(PEOPLE)), len(PEOPLE)))
        ring = rng.sample(PEOPLE, size)
        order = rng.sample(ring, len(ring))
        throws = dict(zip(ring, ring[1:] + ring[:1], strict=True))
        seconds = rng.randint(low, high) if match else rng.choice(                    # short clocks, any, minutes and hours about to end
            (rng.randint(1, 80), rng.randint(1, high), rng.randrange(0, DAY, 60) + rng.randint(1, 12),
             rng.randrange(0, DAY, 3600) + rng.randint(1, 12)))
        shown = seconds
        if not match:
            shown = next((n for n in range(1, LONGEST_SOLUTION) if rng.random() < IMPATIENCE), LONGEST_SOLUTION)
        prompt = f"Passes {' '.join(a + throws[a] for a in order)} from {clock(seconds)} {ring[0]}"
        steps = [f" {clock(seconds - n)} {ring[n % len(ring)]}" for n in range(1, min(shown, seconds) + 1)]
        return Problem(prompt, ring[seconds % len(ring)], f"{''.join(steps)} answer{steps[-1][-2:]}")

    return Task(name, problem, score_passes, None, seed, held_out)


def recall(name, detail, seed, held_out, longer):
    match = re.fullmatch(r"(\d+)-(\d+)", detail)
    low, high = (longer * int(n) for n in match.groups()) if match else (0, 0)
    if not 16 <= low <= high < DAY:
        raise ValueError(f"task={name!r}: two numbers of seconds from 16 to {DAY - 1}, such as recall:16-32")

    def problem(i):
        rng = numbered("recall", seed, held_out is not False, i)
        ring = rng.sample(PEOPLE, len(PEOPLE))
        throws = dict(zip(ring, ring[1:] + ring[:1], strict=True))
        seconds = rng.randint(low, high)
        asked = rng.randint(1, seconds // 3)                                          # the step whose holder is asked for
        prompt = (f"Passes {' '.join(a + throws[a] for a in rng.sample(ring, len(ring)))} answer {clock(seconds - asked)} "
                  f"from {clock(seconds)} {ring[0]}")
        note = f" {ring[asked % len(ring)]}"
        rehearsed = note if rng.random() < REHEARSES else ""
        steps = [f" {clock(seconds - n)} {ring[n % len(ring)]}{rehearsed if n >= asked else ''}" for n in range(1, seconds + 1)]
        answer = f"{ring[seconds % len(ring)]}{note}"
        return Problem(prompt, answer, f"{''.join(steps)} answer {answer}")

    return Task(name, problem, score_recall, None, seed, held_out)


def score_recall(problem, text, tokens, finish_reason):
    """1 if the text ends with the only answer that it gives, and both names are right."""
    found = re.fullmatch(rf"[^a-z]* answer ([{PEOPLE}] [{PEOPLE}])", text)
    return float(finish_reason == "stop" and found is not None and found[1] == problem.answer)


def clock(seconds):
    return f"{seconds // 3600:02d} {seconds // 60 % 60:02d} {seconds % 60:02d}"


def score_passes(problem, text, tokens, finish_reason):
    """1 if the text ends with the only answer that it gives, and it is right."""
    found = re.fullmatch(rf"[^a-z]* answer ([{PEOPLE}])", text)
    return float(finish_reason == "stop" and found is not None and found[1] == problem.answer)


def write_passes_tokenizer(folder):
    """tokenizer.json and tokenizer_config.json of the embedded task: a throw, a person, a number of the clock are one token each, and
    whatever else may come is bytes."""
    words = ["Passes", " from", " answer", *(f" {a}" for a in PEOPLE), *(f" {a}{b}" for a in PEOPLE for b in PEOPLE if a != b),
             *(f" {n:02d}" for n in range(60))]
    vocab = dict(BYTE)
    for word in words:
        vocab.setdefault("".join(CHARACTER[b] for b in word.encode()), len(vocab))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)  # the `tokenizers` library wants them all
    spec = {"model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True},
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "added_tokens": [{"id": len(vocab), "content": "<|endoftext|>", "special": True} | flags]}
    template = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": template}
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in (("tokenizer.json", spec), ("tokenizer_config.json", settings)):
        with replacing(folder / file_name) as file:
            file.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


CHARACTER = {b: c for c, b in BYTE.items()}

# ---------------------------------------------------------------------------------------------------------------------
# problems from elsewhere

CHUNK = 500



def gym(name, detail, seed, held_out, longer):
    """Datasets of reasoning-gym, one of CHUNK problems after another: there, the seed of a problem is that of its dataset plus its number,
    so datasets of neighbouring seeds share problems. Four (isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note) are
    the same in every run only if PYTHONHASHSEED is set."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ValueError(f"task={name!r} needs a package: pip install reasoning-gym") from None
    dataset, _, query = detail.partition("?")
    settings = {key: literal(text) for key, _, text in (item.partition("=") for item in query.split("&") if item)}
    known(name, "dataset", [dataset], DATASETS)
    known(name, "setting", settings, DATASETS[dataset][1].__dataclass_fields__.keys() - {"seed", "size"})

    @functools.lru_cache(2)
    def chunk(seed):
        return reasoning_gym.create_dataset(dataset, seed=seed, size=CHUNK, **settings)

    def problem(i, seed):
        entry = chunk(numbered("reasoning_gym", seed, i // CHUNK).getrandbits(31))[i % CHUNK]
        question = f"{entry['question'].rstrip()}\n\nGive the final answer in <answer></answer> tags."
        return Problem(question, entry, f"<answer>{entry['answer']}</answer>")

    def score(problem, text, tokens, finish_reason):
        found, entry = find_answer(text), problem.answer
        if found is None:
            return 0.0
        if dataset in ("countdown", "puzzle24"):
            return float(reaches(found, entry["metadata"]["numbers"], entry["metadata"].get("target", 24)))
        earned = judged((dataset, repr(settings)), entry, found)
        return min(earned, 1.0) if earned > 0.05 else 0.0  # some scorers give up to 0.05 for anything

    try:
        chunk(0)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task={name!r}: the dataset does not take these settings: {error}") from None
    return divided(name, problem, score, None, seed, held_out)


def literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def known(name, what, keys, there):
    for key in keys:
        if key not in there:
            near = difflib.get_close_matches(key, there, 1, cutoff=0)
            raise ValueError(f"task={name!r}: there is no {what} {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))


class Letter(str):
    """The right answer to a problem with choices."""


def jsonl(name, detail, seed, held_out, longer):
    path = file_of(name, detail)
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")  # not splitlines: a text may hold U+2028
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in utf-8") from None
    problems = [read_problem(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if importlib.util.find_spec("math_verify") is None and not all(isinstance(problem.answer, Letter) for problem in problems):
        raise ValueError(f"task={name!r} needs a package: pip install 'math-verify[antlr4_13_2]'")
    return divided(name, lambda i, seed: problems[i], score_jsonl, len(problems), seed, held_out)


def file_of(name, detail):
    if not Path(detail).is_file():
        raise FileNotFoundError(f"task={name!r}: there is no file {detail!r}")
    return Path(detail)


def read_problem(line, where):
    """The Problem of a line. ValueError that says where and what is wrong."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError(f'{where}: not JSON such as {{"question": "1 + 1?", "answer": "2"}}: {line[:60]!r}')
    asks = next((key for key in ("question", "problem", "prompt") if key in record), "question")
    question, answer, choices, solution = (record.get(key) for key in (asks, "answer", "choices", "solution"))
    texts = {asks: question} | ({} if solution is None else {"solution": solution})
    if choices is None:
        number = type(answer) is int or type(answer) is float and math.isfinite(answer)
        texts["answer"] = answer = str(answer) if number else answer
    else:
        if not isinstance(choices, list) or not 2 <= len(choices) <= 26:
            raise ValueError(f'{where}: "choices" must be a list of 2 to 26 texts')
        texts |= {f"choices[{i}]": text for i, text in enumerate(choices)}
    for key, text in texts.items():
        if not isinstance(text, str) or not text.strip() or re.search("[\ud800-\udfff]", text):  # half a surrogate pair is no text
            got = "missing or null" if text is None else json.dumps(text)[:60]
            raise ValueError(f'{where}: "{key}" must be a text and not empty, but is {got}')
    if choices is None:
        return Problem(f"{question}\n\nPut the final answer into \\boxed{{}}.", answer, solution)
    letters = [Letter(chr(ord("A") + i)) for i in range(len(choices))]
    right = [letters[i] for i in range(len(choices)) if type(answer) in (int, str) and answer in (i, choices[i], letters[i])]
    if len(right) != 1:
        raise ValueError(f'{where}: "answer" must be the letter, index (from 0) or text of just one choice, not {json.dumps(answer)[:60]}')
    listed = "\n".join(f"{letter}) {text}" for letter, text in zip(letters, choices, strict=True))
    return Problem(f"{question}\n\n{listed}\n\nPut the letter of the right choice into \\boxed{{}}.", right[0], solution)


def score_jsonl(problem, text, tokens, finish_reason):
    """1 if the answer is the same letter, the same text or, by math-verify, equal."""
    found = find_answer(text)
    if found is None:
        return 0.0
    words, right = (re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", x).split() for x in (found, problem.answer))
    if isinstance(problem.answer, Letter):
        letter = re.match(r"[({*$]*([A-Z])(?!\w)", "".join(words[:1]))
        return float(letter is not None and letter[1] == problem.answer)
    if words == right:
        return 1.0
    if re.fullmatch(r"[^\W\d_]{3,}", "".join(right)):  # to math-verify a word is a product, and "vile" equals "evil"
        return float([word.casefold() for word in words] == [word.casefold() for word in right])
    return judged((None, None), problem.answer, found) if len(found) <= 1000 else 0.0


def python_file(name, detail, seed, held_out, longer):
    path = file_of(name, detail)
    spec = importlib.util.spec_from_file_location(detail, path)
    if spec is None:
        raise ValueError(f"task={name!r}: a Python file ends in .py")
    module = sys.modules[detail] = importlib.util.module_from_spec(spec)  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # anybody's Python: whatever it raises is a fault of the file
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    size = getattr(module, "size", None)
    for function in ("problem", "score"):
        if not callable(getattr(module, function, None)):
            raise ValueError(f"{path} has no function {function}")
    if size is not None and type(size) is not int:
        raise ValueError(f"{path}: size must be a whole number or None, not {size!r}")

    def called(function, *args):
        try:
            return function(*args)
        except Exception as error:  # anybody's Python again
            raise ValueError(f"{path}: {function.__name__} raised {type(error).__name__}: {error}") from error

    def problem(i, seed):
        made = called(module.problem, i, seed)
        problem = Problem(*made) if isinstance(made, tuple) and len(made) == 2 else made
        if not isinstance(problem, Problem) or not isinstance(problem.prompt, str):
            raise ValueError(f"{path}: problem({i}, {seed}) must return (prompt, answer) or a Problem, not {made!r:.80}")
        return problem

    def score(*args):
        score = called(module.score, *args)
        if not isinstance(score, Real) or not 0 <= score <= 1:
            raise ValueError(f"{path}: score must return a number from 0 to 1, not {score!r:.80}")
        return float(score)

    return divided(name, problem, score, size, seed, held_out)


SOURCES = dict(passes=passes, recall=recall, reasoning_gym=gym, jsonl=jsonl, py=python_file)


def main():
    if _what is None:
        raise ValueError("the first argument names a task: python tasks.py passes:4-60")
    if n < 1:
        raise ValueError(f"n={n}: at least 1")
    source = load_task(_what, seed, held_out)
    for i in range(min(n, source.size or n)):
        problem = source.problem(i)
        answer = problem.answer["answer"] if _what.startswith("reasoning_gym") else problem.answer
        print(f"--- {i}\n{problem.prompt}\n\nanswer: {answer}" + (f"\nsolution: {problem.solution}" if problem.solution else ""))
    print(json.dumps(dict(task=_what, size=source.size)))


if __name__ == "__main__":
    sys.modules["tasks"] = sys.modules["__main__"]  # where a user's file finds Problem
    run(main)
