r"""
A user's Python file as a source of tasks.py: py:<file>?<settings>, with problem(i, seed) and score(problem,
text, tokens, finish_reason). data/passes/task.py is one to copy.
"""
import importlib.util
import inspect
import sys
from numbers import Real

from tasks import Problem, Task, check_known, divided


def load(name, path, settings, seed, held_out, longer):
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
