r""" Answers: found in what a model wrote, and judged in a process of their own. Imports little, because that
process runs this file.

What a model wrote is parsed. Where a library would give it to eval, that eval is replaced by one which takes
arithmetic only; and there are limits on time and memory. """
import ast
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from fractions import Fraction

BLOCK = re.compile(r"<answer>|\\boxed\s*\{")
# braces behind a backslash, as in \{1, 2\}, enclose nothing
MARK = re.compile(BLOCK.pattern + r"|</answer>|\\\\(?!boxed)|\\?[{}]")

OPERATORS = {ast.Add: Fraction.__add__, ast.Sub: Fraction.__sub__,
             ast.Mult: Fraction.__mul__, ast.Div: Fraction.__truediv__}


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


# -----------------------------------------------------------------------------------------------------------
# scoring in another process: what a model writes may take for ever to simplify, fill the memory, or crash

PROCESSES = {}


def judged(key, *job):
    """The score of a job by the process judge(*key), one for each key; 0 if it fails, or takes 5 seconds of
    the processor or 60 of the clock. RuntimeError if the process does not start."""
    process = PROCESSES.pop(key, None)  # put back when it has answered: an interrupt may leave one in it
    if process is None or process.poll() is not None:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, *filter(None, key)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            start_new_session=True)  # out of the reach of Ctrl-C
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the process that scores answers did not start, for the reason above")
    try:
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        reply = process.stdout.readline()
    except BrokenPipeError:
        reply = b""
    if not reply:
        process.wait()
        return 0.0
    PROCESSES[key] = process
    return float(reply)


def judge(dataset=None, settings=None):
    """What runs there, until its input ends, which it does when the parent dies. dataset, settings: of
    reasoning_gym, whose jobs are (entry, answer); None: math-verify, whose jobs are (right answer,
    answer)."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no reply
    if dataset:
        import reasoning_gym
        source = reasoning_gym.create_dataset(dataset, **ast.literal_eval(settings))
    else:
        from math_verify import LatexExtractionConfig, parse, verify

    def score(right, found):
        if dataset:
            return source.score_answer(found, right)
        right, found = map(parsed, (right, found))
        return verify(right, found, timeout_seconds=None)

    def parsed(answer):
        return parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig()], parsing_timeout=None)

    def arithmetic(code, *scopes):
        nodes = ("Expression Constant List Tuple Load UnaryOp UAdd USub BinOp Add Sub Mult Div Pow LShift "
                 "RShift Call Name").split()
        names = r"[a-zA-Z]|Symbol|Integer|Float|Rational|pi|sqrt|exp|log|ln|a?(sin|cos|tan|cot|sec|csc)h?"
        for node in ast.walk(ast.parse(code, mode="eval")):
            unknown = isinstance(node, ast.Name) and not re.fullmatch(names, node.id)
            if unknown or type(node).__name__ not in nodes:
                raise ValueError("not arithmetic")
        return eval(code, *scopes)

    # some scorers, and the parser of sympy, give the answer to eval
    for name, module in list(sys.modules.items()):
        if name.startswith(("reasoning_gym.", "sympy.parsing.sympy_parser")):
            module.eval = arithmetic
    if sys.platform == "linux" and resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
    os.write(replies, b"ready\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        # These end the process, in whatever it is. The first counts the processor's seconds, so that a busy
        # machine does not score otherwise than an idle one; the second the clock's.
        signal.setitimer(signal.ITIMER_PROF, 5)
        signal.alarm(60)
        try:
            reply = float(score(*job))
        except Exception:  # an answer is anything, and so are the errors that it leads to
            reply = 0.0
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        os.write(replies, f"{reply}\n".encode())


if __name__ == "__main__":
    judge(*sys.argv[1:])
