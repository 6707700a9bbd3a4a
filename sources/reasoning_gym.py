r"""
The datasets of the package reasoning-gym as a source of tasks.py: reasoning_gym:<dataset>?<settings>.

A dataset is one of CHUNK problems after another: there, the seed of a problem is that of its dataset plus its
number, so datasets of neighbouring seeds share problems. Four (isomorphic_strings, knight_swap,
polynomial_multiplication, ransom_note) are the same in every run only if PYTHONHASHSEED is set.
"""
import ast
import functools
from fractions import Fraction

from sources.judge import judged
from tasks import Problem, check_known, divided, find_answer, numbered

CHUNK = 500  # problems that are generated at once

OPERATORS = {ast.Add: Fraction.__add__, ast.Sub: Fraction.__sub__,
             ast.Mult: Fraction.__mul__, ast.Div: Fraction.__truediv__}


def load(name, dataset, settings, seed, held_out, longer):
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


def reaches(text, numbers, target):
    """Whether a text is an expression in + - * / and brackets that uses each of the numbers once and equals
    the target. The package evaluates such texts, takes 24.9 for 24, and has puzzle24 solved with any
    numbers."""
    used = []

    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("not arithmetic")

    try:
        found = value(ast.parse(text, mode="eval").body) if len(text) < 300 else None
        return found == target and sorted(used) == sorted(numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
