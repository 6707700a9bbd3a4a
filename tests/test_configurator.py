"""configurator.py as users meet it: a real script in a real process, its output and exit code."""

import subprocess
import sys

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, given, settings, strategies as st

from configurator import _keys, _parse, _typed

SCRIPT = '''"""A script.

    python script.py --lr=0.1
"""
lr = 1e-3                     # learning rate, > 0
steps = 10                    # whole number
compile = False               # True | False
start = "Once"                # "a # in the text" is no comment
ids = (1, 2)                  # token ids
top_k = None                  # None or >= 1
window: int | None = 4096     # tokens; None = full
_hidden = 3

from configurator import configure, run

configure(globals())
import json

def main():
    if steps < 0:
        raise ValueError(f"steps={steps}: must be\\n at least 0")
    if start == "wait":
        raise KeyboardInterrupt
    if start == "much":
        for _ in range(100000):
            print("text")
    if start.startswith("FILE:"):
        open(start[5:])
    print(json.dumps(dict(lr=lr, steps=steps, compile=compile, start=start, ids=ids, top_k=top_k, window=window), ensure_ascii=False))

if __name__ == "__main__":
    run(main)
'''


@pytest.fixture
def call(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "configurator.py").write_text((ROOT / "configurator.py").read_text())

    def call(*args, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return subprocess.run([sys.executable, "script.py", *args], cwd=tmp_path, capture_output=True, text=True)

    return call


def values(result):
    import json

    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_overrides(call):
    got = values(call("--lr=1", "--steps=5", "--compile=True", "--start=a=b", "--ids=[3]", "--top_k=7", "--window=None"))
    assert got == dict(lr=1.0, steps=5, compile=True, start="a=b", ids=[3], top_k=7, window=None)
    assert isinstance(got["lr"], float)
    assert (
        values(call("--start=123"))["start"] == "123"
        and values(call("--start="))["start"] == ""
        and values(call("--start='x'"))["start"] == "'x'"
    )


def test_files_and_order(call):
    a = "import math\n_two = 2\nsteps = _two * int(math.sqrt(9))\nlr = lr / 2\ndef helper():\n    pass\n"
    assert values(call("a.py", a=a))["steps"] == 6 and values(call("a.py", a=a))["lr"] == 5e-4
    assert values(call("a.py", "--steps=1", a=a))["steps"] == 1 and values(call("--steps=1", "a.py", a=a))["steps"] == 6
    assert values(call("a.py", a="window = None\ntop_k = 3\nids = [4]"))["window"] is None


@pytest.mark.parametrize(
    "args, parts",
    [
        (["--strat=x"], ["'strat'", "did you mean 'start'"]),
        (["--zzz=1"], ["'zzz'"]),
        (["--_hidden=1"], ["'_hidden'"]),
        (["--steps"], ["--steps=VALUE", "10"]),
        (["--steps=ten"], ["steps wants int", "--steps=ten"]),
        (["--steps=1.5"], ["steps wants int"]),
        (["--steps=True"], ["steps wants int"]),
        (["--lr=fast"], ["lr wants float"]),
        (["--compile=false"], ["compile wants bool", "True or False"]),
        (["--compile=1"], ["compile wants bool"]),
        (["--window=4.5"], ["window wants int or None"]),
        (["--window=False"], ["window wants int or None"]),
        (["--ids=5"], ["ids wants tuple"]),
        (["--lr=None"], ["lr wants float"]),
        (["nowhere.py"], ["nowhere.py"]),
        (["-x"], ["-x"]),
        (["--=3"], ["--=3"]),
        (["--start=FILE:none.txt"], ["none.txt"]),
        (["--steps=-1"], ["steps=-1: must be at least 0"]),
        (["."], ["."]),
    ],
)
def test_wrong_arguments_end_in_one_line(call, args, parts):
    result = call(*args)
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), (
        result.stderr
    )
    assert all(part in result.stderr for part in parts), result.stderr


@pytest.mark.parametrize(
    "text, parts",
    [
        ("strat = 1", ["a.py", "'strat'", "did you mean 'start'"]),
        ("steps = '5'", ["a.py", "steps wants int, not str"]),
        ("steps = = 5", ["a.py", "SyntaxError"]),
        ("steps = undefined", ["a.py", "NameError"]),
        ("open('nowhere')", ["a.py", "FileNotFoundError"]),
        ("compile = 'false'", ["compile wants bool"]),
    ],
)
def test_wrong_files_end_in_one_line(call, text, parts):
    """nanoGPT accepts a misspelt key in a config file silently."""
    result = call("a.py", a=text)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and all(part in result.stderr for part in parts), result.stderr


def test_debug_shows_the_traceback(call):
    result = call("--steps=-1", "--debug=True")
    assert result.returncode == 1 and "Traceback" in result.stderr and "line" in result.stderr


def test_interrupts_and_closed_pipes_are_no_errors(call, tmp_path):
    result = call("--start=wait")
    assert result.returncode == 130 and result.stderr == "interrupted\n"
    assert call("--start=wait", "--debug=True").returncode == 130
    process = subprocess.Popen([sys.executable, "script.py", "--start=much"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait() == 141 and process.stderr.read() == b""


def test_characters_that_the_terminal_lacks(call, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert values(call("a.py", a="start = 'ž'"))["start"] == "?"


def test_help_lists_every_key(call):
    result = call("--steps=7", "--help")
    assert result.returncode == 0 and "A script." in result.stdout
    lines = {line.split("=")[0].strip(): line for line in result.stdout.splitlines() if line.startswith("  --")}
    assert list(lines) == [f"--{key}" for key in ("lr", "steps", "compile", "start", "ids", "top_k", "window", "debug")]
    assert (
        lines["--lr"].endswith("learning rate, > 0")
        and "=7" in lines["--steps"]
        and lines["--start"].endswith('"a # in the text" is no comment')
    )
    assert lines["--window"].endswith("tokens; None = full")


def test_importing_a_script_configures_nothing(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", "import sample; print(sample.window, sample.encode_prompt.__name__)", "--nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "4096 encode_prompt", result.stderr


FORK = '''"""A fork.

    python -m forks.twice --factor=3
"""
import script
from configurator import configure, run

factor = 2                    # of the steps, >= 1
lr = 0.5                      # another default
best: int | None = None       # None or >= 0

def result():
    return dict(script_result(), factor=factor, theirs=script.factor, best=best)

if __name__ == "__main__":
    configure(globals(), script)
    script_result, script.result = script.result, result
    run(script.main)
'''
SCRIPT_OF_FORK = '''"""A script."""
lr = 1e-3                     # learning rate, > 0
steps: int | None = 10        # whole number, or None

from configurator import configure, run, settings

configure(globals())
import json

LIMIT = 100
def result():
    return settings(globals())

def main():
    if steps > LIMIT:
        raise ValueError(f"steps={steps}: must be at most 100")
    print(json.dumps(result()))

if __name__ == "__main__":
    run(main)
'''


@pytest.fixture
def fork(call, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT_OF_FORK)
    (tmp_path / "forks").mkdir()
    (tmp_path / "forks" / "twice.py").write_text(FORK)

    def fork(*args, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return subprocess.run([sys.executable, "-m", "forks.twice", *args], cwd=tmp_path, capture_output=True, text=True)

    return fork


def test_a_fork_has_the_keys_of_its_script_and_its_own(fork):
    """Both modules see the fork's values, and the script's settings, which go into its logs, hold them."""
    default = dict(lr=0.5, steps=10, factor=2, theirs=2, best=None, debug=False)
    assert values(fork()) == default
    args = ("--steps=7", "--factor=3", "--lr=1", "--best=4")
    assert values(fork(*args)) == default | dict(steps=7, factor=3, theirs=3, lr=1.0, best=4)
    assert values(fork("a.py", a="factor = steps + 1")) == default | dict(factor=11, theirs=11)


@pytest.mark.parametrize(
    "args, part",
    [
        (["--fact=3"], "did you mean 'factor'"),
        (["--stepz=3"], "did you mean 'steps'"),
        (["--factor=x"], "factor wants int"),
        (["--best=1.5"], "best wants int or None"),
        (["--steps=1.5"], "steps wants int or None"),
        (["--LIMIT=3"], "no key 'LIMIT'"),
        (["--steps=101"], "steps=101: must be at most 100"),
    ],
)
def test_wrong_arguments_of_a_fork_end_in_one_line(fork, args, part):
    result = fork(*args)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and part in result.stderr, result.stderr


def test_debug_shows_the_traceback_of_a_fork(fork):
    result = fork("--steps=101", "--debug=True")
    assert result.returncode == 1 and "Traceback" in result.stderr


def test_help_of_a_fork_lists_both(fork):
    lines = [line.strip() for line in fork("--help").stdout.splitlines()]
    assert lines[0] == "A fork." and "keys:" in lines
    keys = {line.split("=")[0]: line for line in lines[lines.index("keys:") + 1:]}
    assert list(keys) == ["--lr", "--steps", "--factor", "--best", "--debug"]
    assert keys["--steps"].endswith("whole number, or None") and keys["--factor"].endswith("of the steps, >= 1")
    assert keys["--lr"].startswith("--lr=0.5") and keys["--lr"].endswith("another default")


def test_importing_a_fork_changes_nothing(fork, tmp_path):
    code = "import script, forks.twice; print(script.lr, script.result.__module__, hasattr(script, 'factor'))"
    result = subprocess.run([sys.executable, "-c", code, "--nonsense"], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.strip() == "0.001 script False", result.stderr


def test_the_keys_of_an_imported_script_are_those_that_it_configures():
    """A fork takes for keys what is lower-case plain data in the imported script: nothing else may look like it."""
    import train_rl

    result = subprocess.run([sys.executable, ROOT / "train_rl.py", "--help"], capture_output=True, text=True)
    listed = [line.split("=")[0][4:] for line in result.stdout.split("keys:")[1].splitlines() if line.startswith("  --")]
    assert set(_keys(vars(train_rl))) | {"debug"} == set(listed)


@given(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.lists(st.integers())
    | st.dictionaries(st.text(), st.integers())
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.differing_executors])
def test_a_value_written_as_python_comes_back(value):
    kind = type(value)
    text = value if kind is str else repr(value)
    assert _typed("key", _parse(text, kind), kind, "here") == value
    assert _parse(repr(value), object) == value


def test_help_into_a_pipe_that_closes():
    """`--help | head` ended in a traceback."""
    process = subprocess.Popen([sys.executable, ROOT / "train_rl.py", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() in (0, 141)
