"""tasks.py: answers are found, parsed and compared without ever being evaluated, problems are split and drawn as they should be, and
whatever is wrong in a user's file is named."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, example, given, settings, strategies as st

import data.passes.task as passes
import tasks
from data.passes.prepare import write_tokenizer
from sources import jsonl, judge, reasoning_gym as gym
from tasks import ask_for_length, check_reward, find_answer, load_task, reward_parts
from tokenizer import load_tokenizer

PASSES, IMPATIENT = "py:data/passes/task.py?low=4&high=60", "py:data/passes/task.py?impatient=True"
RECALL = "py:data/passes/recall.py?low=16&high=32"
PLAIN = tasks.Problem("?", "5")
MARKS = st.lists(st.sampled_from(["<answer>", "</answer>", r"\boxed{", "{", "}", r"\{", r"\}", "\\", "<think>", "</think>", " answer A",
                                  "A", "5", "\n", "<|im_end|>"]), max_size=12).map("".join)


# ---------------------------------------------------------------------------------------------------------------------
# answers and rewards

@pytest.mark.parametrize("text, found", [
    ("<answer>5</answer>", "5"),
    ("<answer> 5\n</answer><|im_end|>\n", "5"),
    ("<answer>5</answer> no, <answer>6</answer>", "6"),
    ("I write it in <answer></answer> tags: <answer>5</answer>", "5"),
    (r"so \boxed{\frac{1}{2}}.<|im_end|>", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \right.} and so on }", r"\left\{ x \right."),
    (r"\boxed {5} \boxed{6", "5"),
    (r"\\boxed{5}", "5"), (r"\\\boxed{5}", "5"), (r"\boxed{1\\}", r"1\\"), (r"\boxed{1\\\}}", r"1\\\}"),
    (r"} \boxed{a{b}c} {", "a{b}c"),
    (r"\boxed{5} <answer>6</answer>", "6"),
    (r"<answer>6</answer> \boxed{5}", "5"),
    (r"<answer>x = \boxed{5}</answer>", "5"),
    (r"\boxed{<answer>5</answer>}", "5"),
    (r"<answer> \boxed{5}", "5"),
    (r"\boxed{ <answer>5</answer>", "5"),
    ("<answer><answer>5</answer>", "5"),
    ("<think>is it <answer>4</answer>?</think><answer>5</answer>", "5"),
    ("<think><answer>4</answer></think> I cannot tell", None),
    ("maybe <answer>4</answer></think>so it is \\boxed{5}", "5"),
    ("<think>a</think><answer>4</answer><think>b</think>5", None),
    ("<think>it is <answer>4</answer>", None),
    ("5", None), ("", None), ("<answer></answer>", None), ("<answer>5", None), (r"\boxed{}", None), (r"\boxed5", None),
    ("</answer>}", None),
])
def test_the_last_answer_behind_the_thinking(text, found):
    assert find_answer(text) == found


@given(MARKS | st.text())
def test_whatever_was_written_has_one_answer_or_none(text):
    found = find_answer(text)
    assert found is None or found and found == found.strip() and found in text
    parts = reward_parts(PLAIN, text, 3, 0.5, 10, 0)
    assert parts["format"] in (0.0, 1.0) and parts["correct"] == 0.5
    if parts["format"] and "think>" not in text:  # it is not paid for repeating
        more = [text] + [r"\boxed{5}", "<answer>5</answer>"] * (found is not None)
        assert not any(reward_parts(PLAIN, text + again, 3, 0.5, 10, 0)["format"] for again in more)


@pytest.mark.parametrize("mark", ["\\", " ", "<answer>", "\\boxed{", "{", "\\text{", "<think>", " answer A", " answer A ", "<|a|>"])
def test_long_texts_take_no_longer_than_they_are(mark):
    began = time.process_time()
    for text in (mark * 100_000, f" answer A{mark * 100_000}.", f"\\boxed{{{mark * 100_000}}}"):
        reward_parts(PLAIN, text, 3, 0.5, 10, 0)
        jsonl.score_jsonl(tasks.Problem("", jsonl.Letter("A")), text, [], "stop")
    assert time.process_time() - began < 5


@given(st.text("ab{}", max_size=10), st.text("ab{}\\ ", max_size=6))
def test_braces_are_balanced(inside, before):
    depth = [0]
    for c in inside:
        depth.append(depth[-1] + {"{": 1, "}": -1}.get(c, 0))
    if min(depth) == depth[-1] == 0 and inside:
        assert find_answer(f"{before} \\boxed{{{inside}}} }}") == inside


@pytest.mark.parametrize("text, tidy", [
    ("<think>a</think>It is <answer>5</answer>", 1), ("a</think>\\boxed{5}<|im_end|>", 1), ("<answer>5</answer>", 1),
    (" 0:01 A 0:00 H answer H", 1), (" 0:00 H answer H<|endoftext|>\n", 1), ("So the answer B fits: \\boxed{B}", 1),
    ("<answer>5</answer><answer>5</answer>", 0), ("\\boxed{5}\\boxed{5}", 0), ("\\boxed{5} <answer>5</answer>", 0),
    ("<answer>\\boxed{5}</answer>", 0), (" 0:00 H answer H answer H", 0), (" 0:00 H answer H and so on", 0), (" 00 00 00 H", 0),
    ("<think>a</think></think><answer>5</answer>", 0), ("<think><answer>5</answer></think>", 0), ("<think> 0:00 H answer H", 0),
    ("<answer>5", 0), ("<answer></answer>", 0), ("\\boxed{5", 0), ("5", 0), ("", 0)])
def test_format(text, tidy):
    assert reward_parts(PLAIN, text, 3, 1.0, 10, 0)["format"] == tidy


def test_overlong_and_length():
    def overlong(n, margin):
        return reward_parts(PLAIN, "", n, 0.0, 100, margin)["overlong"]
    assert [overlong(n, 20) for n in (1, 80, 85, 90, 100, 101)] == [0, 0, -0.25, -0.5, -1, -1]
    assert [overlong(n, 0) for n in (99, 100, 101)] == [0, 0, -1]
    assert [overlong(n, 100) for n in (0, 50, 100)] == [0, -0.5, -1]
    asked = tasks.Problem("?", "5", target_length=1000)
    assert [reward_parts(asked, "", n, 0.0, 5000, 0)["length"] for n in (1000, 1500, 900)] == pytest.approx([0, -0.15, -0.03])
    assert reward_parts(PLAIN, "", 1500, 0.0, 5000, 0)["length"] == 0
    assert tuple(reward_parts(PLAIN, "", 1, 0.0, 5, 0)) == tasks.PARTS


def test_rewards_are_checked():
    check_reward({"correct": 1, "length": 0.5, "overlong": 0}, [100])
    for reward, names in (({"corect": 1.0}, "'corect'.*correct, format, overlong, length"), ({"format": "1"}, "'format'.*'1'"),
                          ({"format": math.nan}, "'format'.*nan"), ({}, "nothing"), ({"correct": 0.0}, "nothing")):
        with pytest.raises(ValueError, match=names):
            check_reward(reward)


def test_asking_for_a_length():
    assert ask_for_length(PLAIN, [], 3, 1) is PLAIN
    asked = [ask_for_length(PLAIN, [128, 512], n, 1) for n in range(100)]
    assert asked == [ask_for_length(PLAIN, [128, 512], n, 1) for n in range(100)] and PLAIN.target_length is None
    assert 30 < sum(p.target_length == 128 for p in asked) < 70
    assert all(re.findall(r"\d+", p.prompt) == [str(p.target_length)] and p.answer == "5" for p in asked)
    assert [p.target_length for p in asked] != [ask_for_length(PLAIN, [128, 512], n, 2).target_length for n in range(100)]
    for targets in ([0], [1.5], ["8"]):
        with pytest.raises(ValueError, match="length_targets"):
            check_reward({"correct": 1.0}, targets)


# ---------------------------------------------------------------------------------------------------------------------
# splits and draws

def numbers_file(tmp_path, n):
    (tmp_path / "n.jsonl").write_text("".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n" for i in range(n)))
    return f"jsonl:{tmp_path / 'n.jsonl'}"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(2, 90), seed=st.integers(0, 5))
def test_the_lines_of_a_file_are_split_and_each_epoch_has_all(tmp_path, n, seed):
    train, held_out = (load_task(numbers_file(tmp_path, n), seed, held_out) for held_out in (False, True))
    answers = [[source.problem(i).answer for i in range(source.size)] for source in (train, held_out)]
    assert answers[1] == [str(i) for i in range(0, n, 20)] and sorted(sum(answers, []), key=int) == [str(i) for i in range(n)]
    epochs = [[train.draw(epoch * train.size + i).answer for i in range(train.size)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(answers[0]) for epoch in epochs)
    assert n < 10 or epochs[0] != epochs[1] != epochs[2]
    whole = load_task(numbers_file(tmp_path, n), seed, None)
    assert [whole.problem(i).answer for i in range(whole.size)] == [str(i) for i in range(n)]


def test_one_line_cannot_be_split(tmp_path):
    for held_out in (False, True):
        with pytest.raises(ValueError, match="1 problem"):
            load_task(numbers_file(tmp_path, 1), held_out=held_out)
    assert load_task(numbers_file(tmp_path, 1), held_out=None).size == 1


@pytest.mark.parametrize("name", [PASSES, IMPATIENT, "reasoning_gym:chain_sum"])
def test_problems_without_end(name):
    train, other, held_out = load_task(name, 1), load_task(name, 2), load_task(name, 1, held_out=True)
    prompts = [[source.draw(i).prompt for i in range(300)] for source in (train, other, held_out)]
    assert train.size is None and len(set(sum(prompts, []))) > 850
    if name.startswith("py"):  # among sums of a few digits some are equal by chance
        assert not set(prompts[0]) & set(prompts[2])
    assert [load_task(name, 1, None).draw(i).prompt for i in range(300)] == prompts[2]
    assert [load_task(name, 1, x).held_out for x in (False, True, None)] == [False, True, None]
    assert [load_task(name, 1).problem(i).prompt for i in (299, 7, 299)] == [prompts[0][i] for i in (299, 7, 299)]


@pytest.mark.parametrize("name, says", [
    ("py:data/passes/task.py?low=0&high=3", "numbers of seconds from 1"), ("py:data/passes/task.py?low=9&high=3", "low=9"),
    ("py:data/passes/task.py?hi=4", "'hi', did you mean 'high'"), ("py:data/passes/task.py?longer=2", "'longer'"),
    ("py:data/passes/task.py?low=x", "task.py: problem raised TypeError"),
    ("py:data/passes/recall.py?low=8&high=30", "numbers of seconds from 16"), ("jsonl:README.md?n=3", "no setting 'n'"),
    ("passes:4-60", "reasoning_gym, jsonl, py, rated"),
    ("reasoning_gym:chainsum", "'chainsum', did you mean 'chain_sum'"), ("reasoning_gym:", "''"),
    ("reasoning_gym:chain_sum?min_term=2", "'min_term', did you mean 'min_terms'"), ("reasoning_gym:chain_sum?seed=2", "'seed'"),
    ("reasoning_gym:chain_sum?min_terms=3&max_terms=2", "max_terms must be >= min_terms"), ("reasoning_gym:chain_sum?min_terms=x", "str"),
    ("reasoning_gym:chain_sum?min_terms", "chain_sum")])
def test_names_that_mean_nothing(name, says):
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        load_task(name)
    assert "\n" not in str(error.value) and (name in str(error.value) or name[3:].partition("?")[0] in str(error.value))


@pytest.mark.parametrize("source", ["jsonl", "py", "rated"])
def test_a_file_that_is_not_there(source):
    with pytest.raises(FileNotFoundError, match="no/such.file"):
        load_task(f"{source}:no/such.file")


def test_settings_of_a_file(tmp_path):
    """They are keyword arguments of problem(); held_out and longer come where it asks for them, and else another seed."""
    (tmp_path / "mine.py").write_text("def score(*args):\n    return 1\n\n\ndef problem(i, seed, low=2, *, name='n'):\n"
                                      "    return f'{name} {low} {i}', seed\n")
    (tmp_path / "knows.py").write_text("def score(*args):\n    return 1\n\n\ndef problem(i, seed, held_out=None, longer=0):\n"
                                       "    return f'{held_out} {longer}', seed\n")
    first, held = (load_task(f"py:{tmp_path / 'mine.py'}?low=5&name=a=b", 3, held_out).problem(7) for held_out in (False, True))
    assert first.prompt == held.prompt == "a=b 5 7" and first.answer == 3 != held.answer
    found = [load_task(f"py:{tmp_path / 'knows.py'}", 3, held_out, longer).problem(0) for held_out, longer in
             ((False, 1), (True, 2), (None, 1))]
    assert [(p.prompt, p.answer) for p in found] == [("False 1", 3), ("True 2", 3), ("True 1", 3)]


# ---------------------------------------------------------------------------------------------------------------------
# which problems are worth training on

def rates_file(tmp_path, rates, **changes):
    """pass_rates.json of the 8 lines to learn from of nine lines: the problems 0..7 have the answers "1".."8"."""
    found = dict(task=numbers_file(tmp_path, 9), seed=3, held_out=False, rates=rates) | changes
    (tmp_path / "pass_rates.json").write_text(json.dumps({key: value for key, value in found.items() if value != "absent"}))
    return f"rated:{tmp_path / 'pass_rates.json'}"


RATES = {"0": 0.0, "1": 0.0625, "2": 0.5, "3": 1, "4": 0.875, "6": 0.9375, "7": 0}  # of problem 5 there is none


@pytest.mark.parametrize("low, high, answers", [
    (0.0625, 0.875, "235"), (0.0, 1.0, "1234578"), (0.0, 0.0, "18"), (1.0, 1.0, "4"), (0.06, 0.49, "2"), (0, 0.9, "12358")])
def test_problems_by_their_pass_rates(tmp_path, low, high, answers):
    name = rates_file(tmp_path, RATES) + f"?min_pass={low}&max_pass={high}"
    source = load_task(name, 3)
    assert source.size == len(answers) and [source.problem(i).answer for i in range(source.size)] == [*answers] and source.name == name
    for epoch in range(3):
        drawn = [source.draw(epoch * source.size + i) for i in range(source.size)]
        assert sorted(p.answer for p in drawn) == [*answers]
    assert source.score(source.problem(0), rf"\boxed{{{answers[0]}}}", [], "stop") == 1
    held_out = load_task(name, 3, held_out=True)
    assert [held_out.problem(i).answer for i in range(held_out.size)] == ["0"]        # nobody rated it


def test_problems_without_end_by_their_pass_rates(tmp_path):
    whole = load_task(PASSES, 3)
    source = load_task(rates_file(tmp_path, {"70": 0.5, "8": 0.5, "9": 1}, task=PASSES) + "?min_pass=0.1&max_pass=0.9", 3)
    assert source.size == 2 and [source.problem(i) for i in (0, 1)] == [whole.problem(8), whole.problem(70)]
    assert {source.draw(i).prompt for i in range(4)} == {whole.problem(8).prompt, whole.problem(70).prompt}
    name = rates_file(tmp_path, {"4": 0.5}, task=PASSES, held_out=None)
    assert load_task(name, 3, None).problem(0) == load_task(PASSES, 3, None).problem(4)
    with pytest.raises(ValueError, match="held_out='missing', not of None"):
        load_task(rates_file(tmp_path, {"4": 0.5}, task=PASSES, held_out="absent"), 3, None)


@pytest.mark.parametrize("changes, says", [
    (dict(task="jsonl:other.jsonl"), "no file 'other.jsonl'"), (dict(task="absent"), "of which task"), (dict(seed=4), "seed=4, not of 3"),
    (dict(held_out=True), "held_out=True, not of False"), (dict(held_out=None), "held_out=None, not of False"),
    (dict(seed="absent"), "seed='missing'"), (dict(held_out="absent"), "held_out='missing'"), (dict(rates="absent"), '"rates" must map'),
    (dict(rates=[0.5]), '"rates" must map'), (dict(rates={"0": 1.5}), '"rates" must map'), (dict(rates={"0": True}), '"rates" must map'),
    (dict(rates={"0": "0.5"}), '"rates" must map'), (dict(rates={"0": math.nan}), '"rates" must map'),
    (dict(rates={"-1": 0.5}), '"rates" must map'), (dict(rates={"x": 0.5}), '"rates" must map'),
    (dict(rates={"01": 0.5}), '"rates" must map'), (dict(rates={"8": 0.5}), "problem 8, but the last is 7"),
    (dict(rates={}), "none of 0 problems"),
    (dict(rates={"0": 0.1, "1": 0.9}), "none of 2 problems has a pass rate from 0.25 to 0.75")])
def test_wrong_pass_rates(tmp_path, changes, says):
    name = rates_file(tmp_path, **{"rates": RATES} | changes)
    with pytest.raises((ValueError, FileNotFoundError), match=says) as error:
        load_task(name + "?min_pass=0.25&max_pass=0.75", 3)
    assert "\n" not in str(error.value)


def test_pass_rates_that_are_none(tmp_path):
    name = rates_file(tmp_path, RATES)
    for low, high in ((0.5, 0.4), (-0.1, 1), (0, 1.1), ("x", 1)):
        with pytest.raises(ValueError, match="min_pass.*max_pass"):
            load_task(f"{name}?min_pass={low}&max_pass={high}", 3)
    with pytest.raises(ValueError, match="'min', did you mean 'min_pass'"):
        load_task(f"{name}?min=0.5", 3)
    (tmp_path / "pass_rates.json").write_text("[0.5]")
    with pytest.raises(ValueError, match="pass_rates.json holds a list"):
        load_task(name, 3)


@pytest.mark.parametrize("question, right", [
    ("How many primes are below 100?", 1), ("In how many ways can 8 people sit?", 1), ("How far does the train go?", 1),
    ("How much does Ann pay, and how old is she?", 1), ("Tom learns how to juggle with 3 balls. Find the number of throws.", 1),
    ("Find the area proved to be least, as Euler's proof shows that it is.", 1), ("He explained it. What is 2 + 2?", 1),
    ("If f(a) = 2 and f(b) = 3, find f(a) + f(b).", 1), ("A line joins (0, a) to (0, b). Find a + b.", 1), ("Let x be in (a, b).", 1),
    ("Which holds?\n(A) x = 1\n(B) x = 2", 1), ("A triangle has sides a, b and c. (a) marks the longest one. Find c.", 1),
    ("(b) is not asked for", 1), ("Simplify $(a) (b)$", 1),
    ("Prove that 2 is prime.", 0), ("Find x and prove it is least.", 0), ("Let n > 1. Show that n < 2n.", 0), ("Show\nthat 1 < 2.", 0),
    ("SHOW THAT 1 < 2", 0), ("Explain why the sky is blue.", 0), ("How would you test it?", 0), ("how does the area change?", 0),
    ("How can one tell?", 0), ("How is work related to heat?", 0),
    ("(a) Find x. (b) Find y.", 0), ("Let x = 2.\n(a) What is $x^2$?\n(b) What is x^3?", 0), ("a) Find x.\nb) Find y.", 0),
    ("Let x = 2. a) Find x. b) Find y.", 0), ("(a) \\(x\\) is what, and (b) $y$?", 0), ("  a) x\n\n  b) y", 0)])
def test_what_can_be_verified(question, right):
    from rows import verifiable

    assert verifiable(question) == right


# ---------------------------------------------------------------------------------------------------------------------
# math-verify in its process

def math_score(right, text):
    return jsonl.score_jsonl(tasks.Problem("?", right), text, [], "stop")


@pytest.mark.parametrize("right, found, equal", [
    ("1/2", "0.5", 1), ("0.5", r"\frac{1}{2}", 1), (r"\frac{1}{2}", r"\dfrac12", 1), ("$1/2$", r"\frac{2}{4}", 1), ("1/2", "1/3", 0),
    ("1000", "1,000", 1), ("1000", "1,001", 0), ("x^2 + 2x + 1", "(x+1)^2", 1), ("x^2 + 2x + 1", "(x-1)^2", 0),
    (r"\sqrt{2}/2", r"1/\sqrt 2", 1), (r"\{1, 2, 3\}", "3, 2, 1", 1), (r"\{1, 2, 3\}", r"\{1, 2\}", 0), ("(1, 2]", r"\left(1,2\right]", 1),
    ("[1, 2]", "(1, 2)", 0),
    ("12", r"12 \text{ cm}", 1), ("12", "12 or 13", 0), ("-3", "3", 0), ("8", "2^3", 1),
    ("Paris", r"\text{paris}", 1), (r"\text{blue whale}", "Blue  whale", 1), ("evil", "vile", 0), ("evil", "5", 0)])
def test_equal_answers(right, found, equal):
    assert math_score(right, f"So it is \\boxed{{{found}}}.<|im_end|>") == equal


def test_text_that_is_no_number_scores_0(tmp_path):
    made = tmp_path / "made"
    for found in ("2**3", f"__import__('os').system('touch {made}')", f"open('{made}', 'w')", "1/0", r"\frac{1}{0}", "\0", "\ud800",
                  "}{" * 99, "1e999999999", "(" * 400, "1" * 5000, "\\frac" * 400, r"\begin{matrix}"):
        assert math_score("8", f"<answer>{found}</answer>") == 0
    assert not made.exists()
    assert math_score("8", "8") == math_score("8", r"<think>\boxed{8}") == math_score("8", r"\boxed{8}</think>I do not know") == 0


def test_a_hang_scores_0_and_the_next_answer_gets_its_own_score():
    assert math_score("8", r"\boxed{2^3}") == 1
    first, began = judge.PROCESSES[None, None].pid, time.process_time()
    assert math_score("8", r"\boxed{9^{9^{9}}}") == 0
    assert [math_score("8", f"\\boxed{{{x}}}") for x in ("2^3", "7 + 2", "4 + 4")] == [1, 0, 1]
    assert judge.PROCESSES[None, None].pid != first and time.process_time() - began < 2
    os.kill(judge.PROCESSES[None, None].pid, signal.SIGKILL)
    judge.PROCESSES[None, None].wait()
    assert math_score("8", r"\boxed{4 + 4}") == 1


def test_an_interrupt_leaves_no_answer_for_the_next_question():
    assert math_score("8", r"\boxed{9}") == 0

    def interrupt(*_):
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            math_score("8", r"\boxed{9^{9^{9}}}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [math_score("8", f"\\boxed{{{x}}}") for x in ("4 + 4", "4 + 5")] == [1, 0]


def test_the_process_has_no_torch_gets_no_signals_and_dies_with_its_parent():
    script = """if True:
        import os, sys, tasks
        from sources import jsonl, judge
        jsonl.score_jsonl(tasks.Problem("", "8"), "\\\\boxed{4 + 4}", [], "stop")
        pid = judge.PROCESSES[None, None].pid
        print(pid, "torch" in open(f"/proc/{pid}/maps").read(), os.getsid(pid) == pid, flush=True)
        os.kill(os.getpid(), 9)"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    pid, torch, own_session = done.stdout.split()
    assert (torch, own_session) == ("False", "True"), done.stderr
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}") or ") Z " in open(f"/proc/{pid}/stat").read():
            return
        time.sleep(0.05)
    pytest.fail("it lives on")


# ---------------------------------------------------------------------------------------------------------------------
# files of problems

GOOD = '{"question": "1 + 1?", "answer": "2"}'


@pytest.mark.parametrize("line, says", [
    ("{", "line 2: not JSON"), ("[1]", "line 2: not JSON such as"), ("", "line 2: not JSON"), ("[" * 100000, "line 2: not JSON"),
    ('{"question": "?"}', 'line 2: "answer".*missing'), ('{"answer": "2"}', 'line 2: "question".*missing'),
    ('{"question": 5, "answer": "2"}', 'line 2: "question".*5'), ('{"problem": " ", "answer": "2"}', 'line 2: "problem".*" "'),
    ('{"question": "?", "answer": ["2"]}', r'line 2: "answer".*\["2"\]'), ('{"question": "?", "answer": true}', 'line 2: "answer".*true'),
    ('{"question": "?", "answer": NaN}', 'line 2: "answer".*NaN'), ('{"question": "?", "answer": ""}', 'line 2: "answer"'),
    ('{"question": "?", "answer": "2", "solution": 5}', 'line 2: "solution".*5'),
    (r'{"question": "\ud800", "answer": "2"}', 'line 2: "question"'),
    ('{"question": "?", "answer": "A", "choices": ["x"]}', 'line 2: "choices"'),
    ('{"question": "?", "answer": "A", "choices": "xy"}', 'line 2: "choices"'),
    ('{"question": "?", "answer": "A", "choices": ["x", 5]}', r'line 2: "choices\[1\]".*5'),
    ('{"question": "?", "answer": "C", "choices": ["x", "y"]}', 'line 2: "answer".*"C"'),
    ('{"question": "?", "answer": 2, "choices": ["x", "y"]}', 'line 2: "answer".*2'),
    ('{"question": "?", "answer": true, "choices": ["x", "y"]}', 'line 2: "answer".*true'),
    ('{"question": "?", "answer": "x", "choices": ["x", "x"]}', 'line 2: "answer".*"x"'),
    ('{"question": "?", "answer": "A", "choices": ["B", "A"]}', 'line 2: "answer".*"A"')])
def test_a_bad_line_is_named(tmp_path, line, says):
    (tmp_path / "p.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(ValueError, match=says) as error:
        load_task(f"jsonl:{tmp_path / 'p.jsonl'}")
    assert "p.jsonl" in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


def test_what_else_a_file_may_hold(tmp_path):
    file = tmp_path / "p.jsonl"
    for data in (b"", b"\xff\xfe", b"\n\n"):
        file.write_bytes(data)
        with pytest.raises(ValueError, match="p.jsonl"):
            load_task(f"jsonl:{file}")
    lines = [GOOD, '{"prompt": "a\u2028b", "answer": 0.5, "solution": "half"}', '{"problem": "?", "answer": 7, "solution": null}', GOOD]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")
    train = load_task(f"jsonl:{file}")
    assert [(p.answer, p.solution) for p in map(train.problem, range(3))] == [("0.5", "half"), ("7", None), ("2", None)]
    assert train.problem(0).prompt.startswith("a\u2028b\n") and r"\boxed{}" in train.problem(0).prompt


@given(st.text() | st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.sampled_from(["question", "answer", "choices", "solution"]), inner)).map(json.dumps))
def test_any_line_is_read_or_refused(line):
    try:
        problem = jsonl.read_problem(line, "here")
    except ValueError as error:
        assert str(error).startswith("here: ")
    else:
        assert problem.prompt.encode() and problem.answer.encode()


@pytest.mark.parametrize("answer", ["B", 1, "Rome"])
def test_choices(tmp_path, answer):
    line = json.dumps({"question": "Where?", "choices": ["Paris", "Rome", "A"], "answer": answer})
    (tmp_path / "c.jsonl").write_text(f"{line}\n{line}\n")
    source = load_task(f"jsonl:{tmp_path / 'c.jsonl'}")
    problem = source.problem(0)
    assert problem.prompt.startswith("Where?\n\nA) Paris\nB) Rome\nC) A\n\n") and r"\boxed{}" in problem.prompt and problem.answer == "B"
    for found, score in (("B", 1), (r"\text{B}", 1), ("(B)", 1), ("B) Rome", 1), ("**B**", 1), ("$B$.", 1), (r"\mathbf{(B)}", 1), ("A", 0),
                         ("Both", 0), ("Rome", 0), ("b", 0), ("A or B", 0), ("1", 0)):
        assert source.score(ask_for_length(problem, [64], 0, 0), f"It is \\boxed{{{found}}}", [], "stop") == score, found
    assert source.score(problem, "B", [], "stop") == 0


USER = '''from tasks import Problem
size = {size}
def problem(i, seed):
    return {problem}
def score(problem, text, tokens, finish_reason):
    return {score}
'''


def user_task(tmp_path, held_out=False, size=None, problem="f'{i} {seed}', i", score="1.0", text=None):
    (tmp_path / "mine.py").write_text(text if text is not None else USER.format(size=size, problem=problem, score=score))
    return load_task(f"py:{tmp_path / 'mine.py'}", 3, held_out)


def test_a_users_file(tmp_path):
    train, held_out = user_task(tmp_path), user_task(tmp_path, True)
    assert train.size is None and train.problem(7) == tasks.Problem("7 3", 7)
    assert held_out.problem(7).answer == 7 and held_out.problem(7).prompt != "7 3"
    train, held_out = (user_task(tmp_path, x, size=41, problem="Problem('?', i, solution='!')") for x in (False, True))
    assert [held_out.problem(i).answer for i in range(held_out.size)] == [0, 20, 40] and train.size == 38
    assert train.problem(0) == tasks.Problem("?", 1, "!")
    source = user_task(tmp_path, score="len(tokens) / 4 if text == problem.answer and finish_reason == 'stop' else True")
    assert source.score(tasks.Problem("?", "x"), "x", [1, 2, 3], "stop") == 0.75
    assert type(source.score(tasks.Problem("?", "x"), "y", [], "stop")) is float


@pytest.mark.parametrize("wrong, says", [
    (dict(text="def problem(i, seed): pass"), "mine.py has no function score"),
    (dict(text="problem = 5"), "mine.py has no function problem"),
    (dict(text="import nothing_at_all"), "mine.py: ModuleNotFoundError: .*nothing_at_all"), (dict(text="def"), "mine.py: SyntaxError"),
    (dict(size="'ten'"), "mine.py: size .*'ten'"), (dict(size=1), "1 problem"), (dict(size=0), "0 problem"),
    (dict(size=0, held_out=None), "0 problem"),
    (dict(problem="'?'"), r"mine.py: problem\(0, 3\) .*'\?'"), (dict(problem="None"), r"mine.py: problem\(0, 3\)"),
    (dict(problem="5, 6"), r"mine.py: problem\(0, 3\)"), (dict(score="1.5"), "mine.py: score .*1.5"), (dict(score="-1"), "mine.py: score"),
    (dict(score="float('nan')"), "mine.py: score .*nan"), (dict(score="'1'"), "mine.py: score .*'1'"),
    (dict(score="None"), "mine.py: score .*None")])
def test_what_is_wrong_in_a_users_file_is_named(tmp_path, wrong, says):
    with pytest.raises(ValueError, match=says):
        source = user_task(tmp_path, **wrong)
        source.score(source.problem(0), "", [], "stop")


# ---------------------------------------------------------------------------------------------------------------------
# reasoning-gym

def score_of(source, problem, found):
    return source.score(problem, f"<think>hm</think>\n<answer>{found}</answer>", [], "stop")


def test_settings_reach_the_datasets_and_their_scorers():
    source = load_task("reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&allow_negation=True")
    for i in (0, 1, 499, 500, 1234):
        problem = source.problem(i)
        a, sign, b = re.search(r": (-?\d) ([+-]) (-?\d) =", problem.prompt).groups()
        total = int(a) + int(b) * (1 if sign == "+" else -1)
        assert problem.answer["answer"] == str(total) and problem.prompt.endswith("<answer></answer> tags.")
        assert [score_of(source, problem, x) for x in (total, total + 1, "\ud800", "")] == [1, 0, 0, 0]
        assert source.score(problem, str(total), [], "stop") == 0
        assert source.score(ask_for_length(problem, [8], 0, 0), f"<answer>{total}</answer>", [], "stop") == 1
    assert len({source.problem(i).prompt for i in range(0, 5000, 500)}) > 5  # chunks have their own seeds


def test_nothing_is_paid_for_junk():
    source = load_task("reasoning_gym:palindrome_generation")
    problem = source.problem(0)
    assert score_of(source, problem, problem.answer["answer"]) == 1
    assert problem.answer["answer"] != "abc" and score_of(source, problem, "abc") == score_of(source, problem, "a") == 0


def test_every_dataset_makes_the_same_problem_twice():
    from reasoning_gym.factory import DATASETS
    for name in DATASETS.keys() - {"composite"}:  # made of others, by settings that a name cannot hold
        prompts = [load_task(f"reasoning_gym:{name}", 5).problem(1).prompt for _ in range(2)]
        assert prompts[0] == prompts[1], name


@pytest.mark.parametrize("found, right", [
    ("(6 - 2) * 5 + 4", 1), ("5*(6-2)+4", 1), ("4 - -5*(6 - 2)", 1), ("(6 - 2) * 5 + 4.0", 0), ("24", 0), ("6 * 4", 0), ("6*5 - 6", 0),
    ("6 + 5 + 4 + 4 + 5", 0), ("6 ** 2 - 5 - 4 - 3", 0), ("5**2 - 6 + 4 + 1", 0), ("6 * 5 - 4 - 2 = 24", 0), ("6 / (5 - 5) + 4 + 2", 0),
    ("9**9**9", 0), ("6, 5, 4, 2", 0), ("__import__('os').abort()", 0), ("6 * 5 - 4 - 2 if 1 else 0", 0), ("(lambda: 24)()", 0),
    ("(" * 250, 0), ("-" * 290, 0), ("-" * 290 + "1", 0), ("(" * 99999 + "1" + ")" * 99999, 0), ("\0", 0), ("", 0)])
def test_arithmetic_is_parsed_with_each_number_once(found, right):
    assert gym.reaches(found, [6, 5, 4, 2], 24) == right


@settings(max_examples=200)
@given(st.text("0123456789+-*/() ", max_size=12) | st.text(max_size=8))
@example("1/(1-1)")
def test_arithmetic_never_fails(text):
    assert gym.reaches(text, [1, 2], 3) in (True, False)


def test_countdown_and_puzzle24():
    for name in ("countdown", "puzzle24"):
        source = load_task(f"reasoning_gym:{name}")
        for problem in map(source.problem, range(20)):
            entry = problem.answer
            target, junk = entry["metadata"].get("target", 24), ("", "1", "1/0", "x", "9**9**9", "1 + 1 + 11 + 11", "2 * 12")
            assert score_of(source, problem, entry["answer"]) == 1
            assert [score_of(source, problem, x) for x in (*junk, target, f"{entry['answer']} + 0")] == [0] * 9


def test_scorers_that_evaluate_answers_are_kept_from_it(tmp_path):
    made = tmp_path / "made"
    for name in ("simple_integration", "string_insertion"):
        source = load_task(f"reasoning_gym:{name}")
        problem = source.problem(0)
        right = problem.answer["answer"]
        assert score_of(source, problem, right) == 1
        hostile = (f"open('{made}', 'w')", f"[open('{made}', 'w')]", f"__import__('os').system('touch {made}')",
                   f"N('open(\"{made}\", \"w\")')", "S('[].__class__')", f"Symbol('{made}').__class__", "1/0", "(" * 5000)
        assert [score_of(source, problem, x) for x in hostile] == [0] * len(hostile) and not made.exists()
    assert score_of(source, problem, list(right)) == 0.1  # a list of letters, as this scorer has it
    source = load_task("reasoning_gym:simple_integration")
    problem = source.problem(0)
    assert score_of(source, problem, f"{problem.answer['answer']} + 5") == 1
    assert score_of(source, problem, f"Integral({problem.answer['metadata']['integrand']})") == 0


# ---------------------------------------------------------------------------------------------------------------------
# the embedded task

def walk(prompt):
    """The clock and everybody who has the ball, from now to the end, by the prompt alone."""
    throws, h, m, s, holder = re.fullmatch(r"Passes((?: [A-K]{2}){3,11}) from (\d\d) (\d\d) (\d\d) ([A-K])", prompt).groups()
    to, seconds, holders = dict(throws.split()), 3600 * int(h) + 60 * int(m) + int(s), [holder]
    for _ in range(seconds):
        holders.append(to[holders[-1]])
    assert sorted(to) == sorted(to.values()) and len(to) == len(throws.split())
    return len(to), seconds, holders


@pytest.mark.parametrize("name, longer", [(PASSES, 1), (PASSES, 2), (IMPATIENT, 1)])
def test_the_solutions_are_right(name, longer):
    source, stopped, clocks, sizes = load_task(name, 3, longer=longer), 0, [], set()
    for problem in map(source.problem, range(150)):
        size, seconds, holders = walk(problem.prompt)
        steps, answer = re.fullmatch(r"((?: \d\d \d\d \d\d [A-K])+) answer ([A-K])", problem.solution).groups()
        steps = [(3600 * int(h) + 60 * int(m) + int(s), holder) for h, m, s, holder in re.findall(r"(\d+) (\d+) (\d+) ([A-K])", steps)]
        assert steps == [(seconds - n, holders[n]) for n in range(1, len(steps) + 1)] and answer == steps[-1][1]
        assert problem.answer == holders[-1]
        assert all(len(set(holders[i:i + size])) == size for i in range(min(seconds + 2 - size, 50)))  # all throws are one ring
        assert len(steps) == seconds or name == IMPATIENT and len(steps) <= passes.LONGEST_SOLUTION
        assert passes.score(problem, problem.solution, [], "stop") == (answer == problem.answer)
        stopped, clocks, sizes = stopped + (len(steps) < seconds), [*clocks, seconds], sizes | {size}
    if name == IMPATIENT:
        assert stopped > 75 and max(clocks) > 60 * 60 * 20
    else:
        assert sizes == {11} and 4 * longer <= min(clocks) < 15 * longer and 50 * longer < max(clocks) <= 60 * longer


@pytest.mark.parametrize("longer", [1, 2])
def test_recall(longer):
    """What is asked for is told once, farther from the end than three layers of windows of 12 reach, unless it is rehearsed."""
    task, rehearsed = load_task(RECALL, 5, longer=longer), 0
    for i in range(300):
        problem = task.problem(i)
        throws, moment, start, first = re.fullmatch(r"Passes ((?:\w\w )+)answer (\d\d \d\d \d\d) from (\d\d \d\d \d\d) (\w)",
                                                    problem.prompt).groups()
        throws = dict(throws.split())
        assert len(throws) == 11
        seconds, asked = int(start[3:5]) * 60 + int(start[6:]), int(moment[3:5]) * 60 + int(moment[6:])
        assert 16 * longer <= seconds <= 32 * longer and 4 * asked > 3 * 11 + 4
        holders, holder = {}, first
        for left in range(seconds - 1, -1, -1):
            holder = holders[left] = throws[holder]
        assert problem.answer == f"{holder} {holders[asked]}"
        plain = "".join(f" {passes.clock(left)} {who}" for left, who in holders.items()) + f" answer {problem.answer}"
        noted = "".join(f" {passes.clock(left)} {who}" + f" {holders[asked]}" * (left <= asked) for left, who in holders.items())
        rehearses = problem.solution != plain
        assert problem.solution == (f"{noted} answer {problem.answer}" if rehearses else plain)
        rehearsed += rehearses
        assert task.score(problem, problem.solution, [], "stop") == 1 and task.score(problem, problem.solution, [], "length") == 0
        assert task.score(problem, problem.solution[:-1] + ("A" if problem.answer[-1] != "A" else "B"), [], "stop") == 0
        assert task.score(problem, problem.solution[:-2], [], "stop") == 0            # half an answer
    assert 0.4 < rehearsed / 300 < 0.6
    assert {p.prompt for p in map(task.problem, range(50))}.isdisjoint(
        p.prompt for p in map(load_task(RECALL, 5, True, longer).problem, range(50)))


def test_scores_of_the_embedded_task():
    problem = tasks.Problem("", "H")
    for text, finish_reason, score in ((" 00 00 00 H answer H", "stop", 1), (" 00 00 00 H answer H", "length", 0),
                                       (" 00 00 00 H answer G", "stop", 0),
                                       (" answer H", "stop", 1), (" answer G answer H", "stop", 0), (" answer H 00 00 00", "stop", 0),
                                       (" answer H\n", "stop", 0), (" 00 00 00 H", "stop", 0), ("", "stop", 0), (" answer HH", "stop", 0)):
        assert passes.score(problem, text, [], finish_reason) == score, text


@pytest.fixture(scope="module")
def passes_tokenizers(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("passes") / "new" / "folder"
    write_tokenizer(folder)
    return load_tokenizer(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_every_word_is_one_token(passes_tokenizers):
    ours, reference = passes_tokenizers
    for name, n in ((PASSES, 50), ("py:data/passes/task.py?low=25000&high=29999", 2), (IMPATIENT, 50)):
        for problem in map(load_task(name).problem, range(n)):
            prompt, solution = ours.encode_chat([{"role": "user", "content": problem.prompt}]), ours.encode(problem.solution)
            n_steps = (len(problem.solution.split()) - 2) // 4
            assert len(prompt) == 6 + walk(problem.prompt)[0] and len(solution) == 4 * n_steps + 2 and n_steps > 0
            assert ours.decode(prompt) == problem.prompt and ours.decode(solution) == problem.solution
            for ids, text in ((prompt, problem.prompt), (solution, problem.solution)):
                assert ids == reference.encode(text, add_special_tokens=False).ids
    assert ours.eos_ids == [ours.n_vocab - 1] and ours.decode(ours.eos_ids) == "<|endoftext|>"


@given(text=st.text() | st.lists(st.sampled_from(
    [" A", "AB", " AB", ":", "00", " 0", " 07", " 60", "Passes", " from", " answer", "x", "é", " "])).map("".join))
def test_any_text_has_the_ids_of_the_tokenizers_library(passes_tokenizers, text):
    ours, reference = passes_tokenizers
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode(text)) == text


# ---------------------------------------------------------------------------------------------------------------------
# the command line

def test_the_command_line(tmp_path):
    def call(*args):
        return subprocess.run([sys.executable, ROOT / "tasks.py", *args], capture_output=True, text=True, cwd=tmp_path)
    (tmp_path / "mine.py").write_text(USER.format(size=None, problem="Problem(f'number {i}', i, 'solved')", score="1"))
    done = call("py:mine.py", "--n=2")
    assert done.returncode == 0 and [f"number {i}" in done.stdout for i in range(3)] == [True, True, False], done.stderr
    assert "answer: 1\nsolution: solved" in done.stdout and json.loads(done.stdout.splitlines()[-1]) == {"task": "py:mine.py", "size": None}
    for args, says in (((), "the first argument"), (("py:mine.py", "--seeds=3"), "did you mean 'seed'"), (("pases:",), "'pases:'")):
        done = call(*args)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1 and "error: " in done.stderr


def test_an_answer_in_thinking_that_was_cut_off(tmp_path):
    """Whether the prompt ends in <think> (R1) or the model writes it (Qwen3): what is said before </think> is no answer."""
    ids = {"<think>": 1, "</think>": 2}
    tokenizer = type("T", (), dict(token_id=lambda self, text: ids.get(text), decode=lambda self, tokens: "".join(tokens)))()
    (tmp_path / "p.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n', encoding="utf-8")
    task = tasks.load_task(f"jsonl:{tmp_path / 'p.jsonl'}", held_out=None)
    for prompt, text, score in (([5, 1], r"maybe \boxed{2}, but", 0), ([5, 1], r"hm</think>\boxed{2}", 1), ([5], r"<think>\boxed{2}", 0),
                                ([5], r"\boxed{2}", 1), ([5, 1, 2], r"\boxed{2}", 1), ([1, 2, 5, 1], r"\boxed{2}", 0)):
        assert task.score(task.problem(0), tasks.text_of(list(text), prompt, tokenizer), list(text), "length") == score, text
