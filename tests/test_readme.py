"""The README is a product: its Python runs, its commands name files and keys that exist."""
import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
from conftest import ROOT

from tasks import load_task

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "block.py").write_text(block, encoding="utf-8")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(tmp_path / "block.py"))
    if "dense" in block:
        assert float(re.search(r"tensor\((.*)\)", out.getvalue())[1]) < 1e-5
    else:
        assert out.getvalue().count("\n") == 4


def test_commands_name_what_exists():
    commands = re.findall(r"python ([\w/]+\.py)([^\n`]*)", README)
    assert len(commands) > 4
    for script, rest in commands:
        source = Path(ROOT / script).read_text(encoding="utf-8")
        for word in rest.split("#")[0].split():
            if word.endswith(".py") and not word.startswith("--"):
                assert (ROOT / word).exists(), word
            elif word.startswith("--"):
                assert re.search(rf"^{word[2:].split('=')[0]}\b.*=", source, re.M), (script, word)


def test_files_of_the_map_exist():
    for name in re.findall(r"^\| `([\w./<>]+)`", README.split("## Files")[1].split("##")[0], re.M):
        assert (ROOT / name).exists(), name


def test_the_example_of_an_own_task(tmp_path):
    block, = re.findall(r"```py\n(.*?)```", README, re.S)
    (tmp_path / "mine.py").write_text(block, encoding="utf-8")
    source = load_task(f"py:{tmp_path / 'mine.py'}", 3)
    for problem in map(source.problem, range(20)):
        a, b = map(int, re.match(r"What is (\d+) \* (\d+)\?", problem.prompt).groups())
        assert problem.answer == a * b
        assert [source.score(problem, text, [], "stop") for text in (f"It is {a * b}.", f"{a * b + 1}", "")] == [1, 0, 0]


def test_configs_begin_from_what_an_earlier_command_makes():
    """Where a config begins from another run's folder, the README shows the command for that run first."""
    made = set()
    for name, rest in re.findall(r"train_\w+\.py config/(\w+)\.py(.*)", README):
        if "--init_from=" in rest:
            continue
        keys = dict(re.findall(r'^(init_from|out_dir) = "(.*)"', (ROOT / "config" / f"{name}.py").read_text(encoding="utf-8"), re.M))
        assert not keys["init_from"].startswith("out-") or keys["init_from"].removesuffix("/last") in made, name
        made.add(keys["out_dir"])
