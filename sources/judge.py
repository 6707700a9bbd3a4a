r"""
Judges answers in a process of its own: what a model writes may take for ever to simplify, fill the memory,
or crash. Imports little, because that process runs this file.

What a model wrote is parsed. Where a library would give it to eval, that eval is replaced by one which takes
arithmetic only; and there are limits on time and memory.
"""
import ast
import os
import pickle
import re
import resource
import signal
import subprocess
import sys

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
