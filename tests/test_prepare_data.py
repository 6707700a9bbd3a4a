"""
data/*/prepare.py of the evaluation sets and of the paper's problems: rows of the hub's form become lines that tasks.py reads and scores.

    python -m pytest tests/test_prepare_data.py
"""
import csv
import json
import os
import runpy
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from hypothesis import given, strategies as st

from sources.jsonl import read_problem
from tasks import load_task

sys.path.append(str(ROOT / "data"))
from rows import read_rows

PATH = f"{ROOT}:{ROOT / 'data'}"
AIME = [{"problem": "Find the sum of all bases $b>9$.", "answer": "70", "id": "0"},
        {"problem": "Find the angle in degrees.", "answer": r"336^\circ", "id": "1"},
        {"problem": "How many ways?", "answer": "016", "id": "2"}]
MATH = [{"problem": "Convert $(0,3)$.", "solution": r"It is \boxed{wrong}.", "answer": r"\left( 3, \frac{\pi}{2} \right)", "level": 2},
        {"problem": "Who is fastest?", "solution": "", "answer": r"\text{Evelyn}", "level": 1}]
GPQA = [{"Question": f"Which is {n}?\n", "Correct Answer": f"right {n}\n", "Subdomain": "none"}
        | {f"Incorrect Answer {k}": f" wrong {n}.{k}" for k in (1, 2, 3)} for n in range(24)]
TRAIN = [
    {"problem": "What is 1 + 1?", "answer": "2"}, {"problem": "Prove that 1 + 1 = 2.", "answer": "2"},
    {"question": "How many legs has a cat?", "answer": 4}, {"question": "How would you count them?", "answer": 4},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Half of 1?"}], "solution": r"So \boxed{\frac12}."},
    {"prompt": "(a) 1 + 1? (b) 2 + 2?", "answer": "2, 4"}, {"problem": "Nobody knows.", "answer": ""},
    {"problem": "Zero times two?", "answer": "", "ground_truth": 0}, {"problem": "", "prompt": None, "answer": "5"}]
SETS = {"aime25": AIME, "math500": MATH, "gpqa": GPQA, "prefix_sliding_rl": TRAIN}
HUB = {"aime25": ["math-ai/aime25", None, "test"], "math500": ["HuggingFaceH4/MATH-500", None, "test"],
       "gpqa": ["Idavidrein/gpqa", "gpqa_diamond", "train"], "prefix_sliding_rl": ["prefixsliding/train_v6_filtered", None, "train"]}


def lines_of(name):
    return runpy.run_path(str(ROOT / "data" / name / "prepare.py"), run_name="prepare")["lines"]


def copied(name, folder):
    """prepare.py in a folder of its own, so that no file of the user's is written over."""
    folder.mkdir(exist_ok=True)
    return shutil.copy(ROOT / "data" / name / "prepare.py", folder)


def run(script, *args, cwd, **changes):
    return subprocess.run([sys.executable, script, *args], capture_output=True, encoding="utf-8", cwd=cwd,
                          env=os.environ | {"PYTHONPATH": PATH} | changes)


def write(path, rows):
    if path.suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def score(source, i, answer):
    return source.score(source.problem(i), f"<think>\\boxed{{0}}</think>It is \\boxed{{{answer}}}.", [], "stop")


def problems(folder, name):
    return load_task(f"jsonl:{folder / f'{name}.jsonl'}", held_out=None)


@pytest.mark.parametrize("name, suffix", [("aime25", "csv"), ("aime25", "jsonl"), ("math500", "jsonl"), ("gpqa", "csv"), ("gpqa", "jsonl"),
                                          ("prefix_sliding_rl", "jsonl")])
def test_a_local_file(tmp_path, name, suffix):
    script, local = copied(name, tmp_path / "set"), write(tmp_path / f"mine.{suffix}", SETS[name])
    done = run(script, local.name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "set" / f"{name}.jsonl"
    made = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert made == lines_of(name)(SETS[name]) and json.loads(done.stdout) == {"file": str(out), "problems": len(made)}
    assert sorted(os.listdir(tmp_path / "set")) == [f"{name}.jsonl", "prepare.py"]
    source = problems(tmp_path / "set", name)
    assert source.size == len(made) == {"prefix_sliding_rl": 4}.get(name, len(SETS[name]))
    assert name != "prefix_sliding_rl" or done.stderr == "5 of 9 rows are left out\n"


def test_the_hub(tmp_path):
    """A package `datasets` that knows what it is asked for."""
    (tmp_path / "datasets.py").write_text(f"sets = {[(HUB[name], rows) for name, rows in SETS.items()]}\n"
                                          "def load_dataset(path, name=None, *, split):\n"
                                          "    return next(rows for asked, rows in sets if asked == [path, name, split])\n")
    for name in SETS:
        done = run(copied(name, tmp_path / name), cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{PATH}")
        assert done.returncode == 0 and problems(tmp_path / name, name).size == json.loads(done.stdout)["problems"], done.stderr


def test_answers_that_are_right_and_wrong(tmp_path):
    for name in ("aime25", "math500", "prefix_sliding_rl"):
        write(tmp_path / f"{name}.jsonl", lines_of(name)(SETS[name]))
    aime, math500, train = (problems(tmp_path, name) for name in ("aime25", "math500", "prefix_sliding_rl"))
    assert [score(aime, i, x) for i, x in enumerate(("70", "336", "16"))] == [1, 1, 1]
    assert [score(aime, i, x) for i, x in enumerate(("71", "63", "61"))] == [0, 0, 0]
    assert [score(math500, i, x) for i, x in ((0, r"(3, \pi/2)"), (1, "Evelyn"))] == [1, 1]
    assert [score(math500, i, x) for i, x in ((0, "wrong"), (0, "(3, 2)"), (1, "Carla"))] == [0, 0, 0]
    assert all(math500.problem(i).solution is None for i in range(2))
    asked = [train.problem(i).prompt.partition("\n\n")[0] for i in range(4)]
    assert asked == ["What is 1 + 1?", "How many legs has a cat?", "Half of 1?", "Zero times two?"]
    assert [train.problem(i).answer for i in range(4)] == ["2", "4", r"\frac12", "0"]
    assert [score(train, i, x) for i, x in enumerate(("2", "4", "0.5", "0"))] == [1, 1, 1, 1]
    assert [score(train, i, x) for i, x in enumerate(("3", "5", "2", "1"))] == [0, 0, 0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# choices

def test_the_right_letter_stands_before_the_right_text(tmp_path):
    lines = lines_of("gpqa")
    write(tmp_path / "gpqa.jsonl", lines(GPQA))
    source, letters = problems(tmp_path, "gpqa"), []
    for n, row in enumerate(GPQA):
        problem = source.problem(n)
        assert problem.prompt.startswith(f"Which is {n}?\n\nA) ") and f"\n{problem.answer}) right {n}\n" in problem.prompt
        assert all(f") wrong {n}.{k}\n" in problem.prompt for k in (1, 2, 3))
        assert [score(source, n, x) for x in "ABCD"] == [float(x == problem.answer) for x in "ABCD"]
        letters.append(problem.answer)
        assert lines([row]) == lines(GPQA)[n:n + 1]                                   # whatever other rows there are
    assert len({tuple(line["choices"].index(f"wrong {n}.{k}") for k in (1, 2, 3)) for n, line in enumerate(lines(GPQA))}) > 8
    assert all(2 <= letters.count(x) <= 12 for x in "ABCD")                           # six each, on average


def test_the_seed_gives_the_order(monkeypatch):
    lines = lines_of("gpqa")
    before = json.dumps(lines(GPQA))
    assert before == json.dumps(lines_of("gpqa")(GPQA))
    monkeypatch.setitem(lines.__globals__, "SEED", 2)
    assert before != json.dumps(lines(GPQA))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(str.strip) | st.sampled_from("ABCD0123")


@given(TEXT, st.lists(TEXT, min_size=4, max_size=4, unique_by=str.strip))
def test_any_choices_keep_the_right_one(question, texts):
    names = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
    line, = lines_of_gpqa([{"Question": question, **dict(zip(names, texts, strict=True))}])
    assert sorted(line["choices"]) == sorted(text.strip() for text in texts)
    problem = read_problem(json.dumps(line), "here")
    assert line["choices"]["ABCD".index(problem.answer)] == texts[0].strip()


lines_of_gpqa = lines_of("gpqa")


def test_choices_that_read_alike():
    """The letter of one of them is right, and the line is not refused."""
    row = GPQA[0] | {"Incorrect Answer 2": "right 0"}
    problem = read_problem(json.dumps(lines_of_gpqa([row])[0]), "here")
    assert f"\n{problem.answer}) right 0\n" in problem.prompt


# ---------------------------------------------------------------------------------------------------------------------
# what is wrong is named

@pytest.mark.parametrize("name, row, says", [
    ("aime25", {"question": "?", "answer": "1"}, "no column 'problem', only 'question', 'answer'"),
    ("math500", {"problem": "?", "solution": "1"}, "no column 'answer', only 'problem', 'solution'"),
    ("gpqa", GPQA[0] | {"Correct Answer": " "}, r"gpqa.jsonl, line 2: .choices\[\d\]. must be a text"),
    ("gpqa", {"Question": "?"}, "no column 'Correct Answer', only 'Question'"),
    ("aime25", {"problem": "?", "answer": ""}, 'aime25.jsonl, line 2: "answer" must be a text'),
    ("aime25", {"problem": "?", "answer": True}, 'aime25.jsonl, line 2: "answer" must be a text .* true'),
    ("prefix_sliding_rl", {"text": "?", "answer": 1}, "no column 'question' or 'problem' or 'prompt', only 'text', 'answer'"),
    ("prefix_sliding_rl", {"prompt": "?", "reply": 1}, "no column 'answer' or .*, only 'prompt', 'reply'"),
    ("prefix_sliding_rl", {"prompt": ["?"], "answer": 1}, r"not a list of .*\['\?'\]"),
    ("prefix_sliding_rl", {"prompt": [{"role": "user"}], "answer": 1}, "not a list of .*'user'"),
    ("prefix_sliding_rl", {"prompt": 5, "answer": 1}, 'line 2: "question" must be a text'),
    ("prefix_sliding_rl", {"prompt": "?", "answer": ["1"]}, r'line 2: "answer" must be a text .*\["1"\]')])
def test_a_wrong_row_is_named(tmp_path, monkeypatch, name, row, says):
    script = runpy.run_path(str(copied(name, tmp_path / "set")), run_name="prepare")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(write(tmp_path / "mine.jsonl", [SETS[name][0], row]))])
    with pytest.raises(ValueError, match=says):
        script["main"]()
    assert os.listdir(tmp_path / "set") == ["prepare.py"]                             # no file, and no half of one


@pytest.mark.parametrize("name, content, says", [
    ("x.jsonl", "{", "x.jsonl: not a .jsonl file"), ("x.jsonl", "[1]\n", "x.jsonl: each line must be a JSON object"),
    ("x.csv", b"problem\n\xff", "x.csv: not a .csv file"), ("x.json", "{}", "x.json'?: one .jsonl or .csv file"),
    ("x.csv", "problem\n" + "x" * 200_000, "x.csv: not a .csv file")])
def test_a_wrong_file_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=says):
        read_rows([str(tmp_path / name)], "some/set", split="test")


def test_wrong_calls_end_in_one_line(tmp_path):
    script = copied("aime25", tmp_path / "set")
    (tmp_path / "datasets.py").write_text("raise ImportError")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "datasets.py").write_text("def load_dataset(*args, split):\n    raise ConnectionError('no\\nnetwork')")
    calls = [([], tmp_path, "pip install datasets"), ([], tmp_path / "hub", "'math-ai/aime25' could not be fetched from the hub: no"),
             (["none.jsonl"], ROOT, "'none.jsonl': No such file"), (["--help"], ROOT, "one .jsonl or .csv file"),
             (["empty.jsonl"], ROOT, "there is no problem")]
    for args, first, says in calls:
        done = run(script, *args, cwd=tmp_path, PYTHONPATH=f"{first}:{PATH}")
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert os.listdir(tmp_path / "set") == ["prepare.py"]
