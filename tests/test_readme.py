"""
README.md and docs/ are products: their Python runs, and what their commands name exists.

    python -m pytest tests/test_readme.py
    python tests/test_readme.py              # writes the line counts of README's reading order anew
"""
import ast
import contextlib
import io
import re
import runpy
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "config|data|docs|evals|fast|forks|lab|sources|tests"
COUNTED = re.compile(r"^(\| `([\w/]+\.py)` \| *)(\d+)", re.M)      # a row of the reading order: file, lines


def read(path):
    return path.read_text(encoding="utf-8")


def blocks(language, paths=DOCS):
    """The code blocks of one language in these files. -> [(file name, text)]"""
    found = []
    for path in paths:
        for text in re.findall(rf"```{language}\n(.*?)```", read(path), re.S):
            found.append((path.name, text))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# commands

def command_lines(path):
    """What stands in the sh blocks and, one by one, between backticks."""
    text = read(path)
    shell = [line for _, block in blocks("sh", [path]) for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return shell + inline


def python_commands(path):
    """[(script, arguments)] of all the commands of a file. A script is a path; a fork is followed by the script that it runs."""
    found = []
    for line in command_lines(path):
        words = shlex.shlex(line.replace(".venv/bin/python", "python"), posix=True, punctuation_chars=True)
        words.whitespace_split = True
        words = list(words)
        while "python" in words:
            words = words[words.index("python") + 1:]
            end = next((n for n, word in enumerate(words) if set(word) <= set(";|&<>()")), len(words))
            command, words = words[:end], words[end:]
            if command[:1] == ["-m"] and command[1] == "pip":
                continue
            if command[:1] == ["-m"]:
                command = [command[1].replace(".", "/") + ".py", *command[2:]]
            if command and command[0].startswith("forks/"):
                command = command[1:]                              # test_files_exist looks for the fork
            if command and command[0].endswith(".py"):
                found.append((command[0], command[1:]))
    return found


def key_block(script):
    """The keys of a script: its plain variables, down to configure(globals()). Empty for a script that has none."""
    keys = set()
    for node in ast.parse(read(ROOT / script)).body:
        if isinstance(node, ast.Expr) and ast.unparse(node.value) == "configure(globals())":
            return keys | {"debug"}
        for target in assigned(node):
            keys.add(target)
    return set()


def assigned(node):
    """The public names that a statement of a module assigns."""
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Assign):
        targets = [name for target in node.targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    else:
        targets = []
    return [name.id for name in targets if isinstance(name, ast.Name) and not name.id.startswith("_")]


def check_command(script, arguments):
    source = read(ROOT / script)
    keys = key_block(script)
    if script == "lab/plan.py":                                    # it takes the configs of train_rl.py
        keys |= key_block("train_rl.py")
    for number, word in enumerate(arguments):
        if word.startswith("--"):
            key, equals, _ = word[2:].partition("=")
            assert equals or key in ("help", "quick"), (script, word)
            assert key in keys or not equals, (script, word)
        elif word.startswith("config/"):
            names = {name for node in ast.parse(read(ROOT / word)).body for name in assigned(node)}
            assert names <= keys, (script, word, names - keys)
        elif number == 0 and script in ("lab/bench.py", "lab/figures.py"):
            assert re.search(rf'\b{word}=|"{word}"|^def {word}\(', source, re.M), (script, word)


COMMANDS = [(path.name, *command) for path in DOCS for command in python_commands(path)]


def test_there_are_commands():
    assert len(COMMANDS) > 40
    assert {name for name, *_ in COMMANDS} == {path.name for path in DOCS}


@pytest.mark.parametrize("doc, script, arguments", COMMANDS, ids=[f"{doc}-{n}-{script}" for n, (doc, script, _) in enumerate(COMMANDS)])
def test_commands_name_what_exists(doc, script, arguments):
    check_command(script, arguments)


@pytest.mark.parametrize("wrong", [
    ("train_rl.py", ["--windw=3"]), ("train_rl.py", ["config/no_such.py"]), ("no_such.py", []), ("lab/bench.py", ["no_such"]),
    ("eval.py", ["config/sft_passes.py"])])
def test_a_wrong_command_is_seen(wrong):
    with pytest.raises((AssertionError, FileNotFoundError)):
        check_command(*wrong)


def test_configs_begin_from_what_an_earlier_command_makes():
    """Where a config begins from another run's folder, the same page shows the command for that run first."""
    for path in DOCS:
        made = {"out-demo-rl"}
        for script, arguments in python_commands(path):
            configs = [word for word in arguments if word.startswith("config/")]
            if not script.startswith("train_") or not configs:
                continue
            keys = dict(re.findall(r'^(init_from|out_dir) = "(.*)"', read(ROOT / configs[0]), re.M))
            keys |= dict(word[2:].split("=", 1) for word in arguments if re.match("--(init_from|out_dir)=", word))
            begins = keys["init_from"]
            assert not begins.startswith("out-") or begins.split("/")[0] in made, (path.name, configs, begins)
            made.add(keys["out_dir"].split("/")[0])


# ---------------------------------------------------------------------------------------------------------------------
# names

@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_files_exist(path):
    text = read(path)
    names = set(re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*|\w+\.(?:py|c|md)|requirements[\w-]*\.txt)\b", text))
    names |= {module.replace(".", "/") + ".py" for module in re.findall(r"python -m ((?:lab|forks)\.\w+)", text)}
    missing = set()
    for name in names - {"mine.py", "data/gpqa/gpqa.jsonl"}:                # the reader's own; what a prepare.py makes
        places = [ROOT / name, path.parent / name, *ROOT.glob(f"data/*/{name}")]
        if not any(place.exists() for place in places):
            missing.add(name)
    assert not missing


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", read(path)):
        name, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        page = path.parent / name if name else path
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", read(page), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([\w-]+):", read(ROOT / "Makefile"), re.M))
    for line in command_lines(path):
        for name in re.findall(r"(?:^|&& *)make ([\w-]+)", line.strip()):
            assert name in targets, name


# ---------------------------------------------------------------------------------------------------------------------
# README itself

def test_it_is_short():
    assert len(README.read_bytes()) <= 12 * 1024


def test_nothing_is_left_to_fill_in():
    assert not re.findall(r"\bN (?:lines|minutes)\b|TODO", read(README))


def test_tables_fit_a_terminal():
    for path in DOCS:
        for line in read(path).splitlines():
            assert not line.startswith("|") or len(line) <= 118, (path.name, line)


def test_line_counts_are_near():
    counted = COUNTED.findall(read(README))
    assert len(counted) >= 6
    for _, name, number in counted:
        lines = read(ROOT / name).count("\n")
        assert abs(int(number) - lines) <= max(10, lines // 10), f"{name} has {lines} lines: python tests/test_readme.py"


@pytest.mark.parametrize("name, block", blocks("python"), ids=lambda value: value if value.endswith(".md") else "")
def test_python_blocks_run(name, block, smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "block.py").write_text(block, encoding="utf-8")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(tmp_path / "block.py"))
    if "dense" in block:
        assert float(re.search(r"tensor\((.*)\)", out.getvalue())[1]) < 1e-5
    else:
        assert out.getvalue().count("\n") == 4


def test_the_example_of_an_own_task(tmp_path):
    from tasks import load_task

    (_, block), = blocks("py")
    (tmp_path / "mine.py").write_text(block, encoding="utf-8")
    source = load_task(f"py:{tmp_path / 'mine.py'}", 3)
    for problem in map(source.problem, range(20)):
        a, b = map(int, re.match(r"What is (\d+) \* (\d+)\?", problem.prompt).groups())
        assert problem.answer == a * b
        assert [source.score(problem, text, [], "stop") for text in (f"It is {a * b}.", f"{a * b + 1}", "")] == [1, 0, 0]


def write_line_counts():
    def row(match):
        return match[1] + str(read(ROOT / match[2]).count("\n"))

    README.write_text(COUNTED.sub(row, read(README)), encoding="utf-8")


if __name__ == "__main__":
    write_line_counts()
