r"""
Files of JSON lines as a source of tasks.py: jsonl:<path>, {"question": ..., "answer": ...} a line, answers
checked by math-verify, or letters if there are "choices".
"""
import importlib.util
import json
import math
import re
from pathlib import Path

from sources.judge import judged
from tasks import Problem, check_known, divided, find_answer


class Letter(str):
    """The right answer to a problem with choices."""


def load(name, path, settings, seed, held_out, longer):
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
