"""eval.py: the same prompts and streams for all, the restarts by hand, budgets afterwards, and that a kill changes nothing."""
import csv
import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import test_tokenizer
import torch
from conftest import ROOT
from hypothesis import given, strategies as st

import eval as evaluation
import evals.table
from data.passes.prepare import write_tokenizer
from engine import POLICIES, generate, hashed
from eval import Arm, Sample, Sampler, Weights
from evals import restarts
from lab import figures
from model import GPT, GPTConfig
from sliding_cache import SlidingCache
from tasks import Problem, load_task, prompt_ids
from tokenizer import load_tokenizer

PASSES = "py:data/passes/task.py?low=4&high=20"
EVERYTHING = "prefix_sliding,full,sliding,streaming,full_stop,last_k,summary"
TIMES = {"s_per_sample", "tokens_per_s"}
COMMAND = ["eval.py", f"--policies={EVERYTHING}", "--windows=12", "--rope=reset", f"--task={PASSES}", "--n_problems=3", "--device=cpu",
           "--samples_per_problem=2", "--max_new_tokens=60", "--budgets=10,30", "--cue= answer", "--answer_tokens=2", "--carry_last=4",
           "--summary_prompt=", "--summary_form={}", "--summary_tokens=4", "--rows=3", "--temperature=1.0"]


@pytest.fixture
def configure(monkeypatch):
    """Set keys of eval.py for one test."""
    def set_keys(**keys):
        for key, value in keys.items():
            assert key in vars(evaluation)
            monkeypatch.setattr(evaluation, key, value)
    return set_keys


def start(*args):
    return subprocess.Popen([sys.executable, *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(*args):
    process = start(*args)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def lines(out, *args):
    """{(arm, problem, sample): line} of an evaluation into `out`."""
    result(*args, f"--out_dir={out}")
    found = map(json.loads, (out / "samples.jsonl").read_text(encoding="utf-8").splitlines())
    return {(r["arm"], r["problem"], r["sample"]): r for r in found}


def arm_of(policy, window, prefix="whole", tokenizer=None, config=None, name=""):
    """An arm whose weights are what a test makes of them."""
    return Arm(policy, Weights(name, "", tokenizer, config or GPTConfig(), "cpu", torch.float32), window, prefix)


def new_sample(i, prompt, prefix_len, k=0):
    """A sample that is still to be drawn."""
    every = max(evaluation.max_new_tokens // 64, 1)
    return Sample("t", "arm", i, k, "question", "answer", len(prompt), prefix_len, every=every, prompt=prompt, context=list(prompt))


def draw(arm, model, prompts, prefix_len=None):
    """The samples of these prompts in the order of the prompts, after a look at whether each was completed once."""
    done = []
    samples = [new_sample(i, prompt, len(prompt) if prefix_len is None else prefix_len) for i, prompt in enumerate(prompts)]
    Sampler(arm, model, samples, done.append).run()
    assert sorted(sample.problem for sample in done) == list(range(len(prompts)))
    return samples


def stream(i, k=0):
    return hashed(evaluation.seed, i, k)


def without_times(table):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in table]


# ---------------------------------------------------------------------------------------------------------------------
# from the command line

def test_a_killed_evaluation_gives_the_same_table(untrained, tmp_path):
    whole = result(*COMMAND, f"--init_from={untrained}", f"--out_dir={tmp_path / 'whole'}")
    again = [*COMMAND, f"--init_from={untrained}", f"--out_dir={tmp_path / 'killed'}"]
    samples = tmp_path / "killed" / "samples.jsonl"
    for least in (3, 20):                                                             # killed twice, in different policies
        process = start(*again)
        while not samples.exists() or samples.read_bytes().count(b"\n") < least:
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        samples.write_bytes(samples.read_bytes() + b'{"task": "%s", "arm": "fu' % PASSES.encode())                # what a kill may leave
    n = samples.read_bytes().count(b"\n")
    assert 20 <= n < 42
    killed = result(*again)
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 42 == len({(r["arm"], r["problem"], r["sample"]) for r in lines})
    assert without_times(killed["table"]) == without_times(whole["table"]) and len(whole["table"]) == 7 * 3
    with open(tmp_path / "killed" / "table.csv", encoding="utf-8", newline="") as file:
        assert [row["arm"] for row in csv.DictReader(file)] == [row["arm"] for row in whole["table"]]
    # other budgets and another baseline are another look at the same samples
    before, began = samples.read_bytes(), time.time()
    other = result(*again, "--budgets=20", "--baseline=sliding")
    assert samples.read_bytes() == before and time.time() - began < 60
    assert {row["budget"] for row in other["table"]} == {20, 60}
    assert [row["difference"] is None for row in other["table"] if row["policy"] == "sliding"] == [True, True]
    assert {row["against"] for row in other["table"] if row["policy"] != "sliding"} == {"sliding W=12"}
    # more problems keep what there is; another temperature would mix two distributions
    more = result(*again, "--n_problems=4")
    assert samples.read_bytes().startswith(before) and {row["problems"] for row in more["table"]} == {4}
    process = start(*again, "--temperature=0.5")
    assert "holds samples of prefix_sliding with temperature=1.0, not 0.5" in process.communicate()[1] and process.returncode == 2
    assert {row["policy"]: row for row in whole["table"]}["full_stop"]["mean_tokens"] <= 12


def test_trained_and_tested_under_different_attention(untrained, tmp_path):
    """policy@name takes other weights; with the same weights it is the same policy, whose difference is exactly 0."""
    table = result(*COMMAND, f"--init_from={untrained}", f"--out_dir={tmp_path / 'out'}", "--policies=full,full@twin,sliding@twin",
                   f"--models={{'twin': '{untrained}'}}", "--baseline=full")["table"]
    rows = {(row["arm"], row["budget"]): row for row in table}
    for budget in (10, 30, 60):
        a, b = rows["full", budget], rows["full@twin", budget]
        assert (b["difference"], b["low"], b["high"]) == (0, 0, 0) and a["difference"] is None
        assert a["mean_tokens"] == b["mean_tokens"] and a["accuracy"] == b["accuracy"]
    assert ("sliding@twin W=12", 60) in rows
    shutil.copytree(untrained, tmp_path / "other")
    torch.manual_seed(1)
    GPT(GPT.from_pretrained(untrained).config).save_pretrained(tmp_path / "other")
    both = lines(tmp_path / "both", *COMMAND, f"--init_from={untrained}", "--policies=full,full@other", "--baseline=full",
                 f"--models={{'other': '{tmp_path / 'other'}'}}")
    alone = lines(tmp_path / "alone", *COMMAND, f"--init_from={tmp_path / 'other'}", "--policies=full", "--baseline=")
    for key, record in alone.items():
        assert both["full@other", *key[1:]]["tokens"] == record["tokens"]
    assert any(both["full", *key[1:]]["tokens"] != record["tokens"] for key, record in alone.items())


SCORER = """
def problem(i, seed):
    return f"Passes AB BA from 00 00 0{i} A", seed

def score(problem, text, tokens, finish_reason):          # what a scorer is told shows in the score
    return (len(tokens) % 7 + 8 * (finish_reason == "stop")) / 16
"""


def test_what_the_scorer_is_told_and_what_the_table_makes_of_it(untrained, tmp_path):
    """Means, pass@k, cuts and pass rates against the lines of the file; the same streams for policies that see the same."""
    (tmp_path / "scorer.py").write_text(SCORER + "size = 7\n", encoding="utf-8")
    keys = [f"--task=py:{tmp_path / 'scorer.py'}", f"--init_from={untrained}", "--policies=full,prefix_sliding", "--windows=99",
            "--rope=continue", "--held_out=False", "--samples_per_problem=3", "--n_problems=99", "--baseline=full", "--seed=3"]
    found = lines(tmp_path / "out", *COMMAND, *keys)
    assert len(found) == 2 * 6 * 3                                                    # of seven problems, six are not held out
    for (_, i, k), r in found.items():
        stopped = r["finish_reason"] == "stop"
        assert r["answer"] == "3" and r["question"] == f"Passes AB BA from 00 00 0{i + 1} A"            # the seed; line 0 is held out
        assert r["score"] == ((r["n_tokens"] - stopped) % 7 + 8 * stopped) / 16       # the end token is not shown
        assert r["tokens"] == found["full", i, k]["tokens"] and len(r["tokens"]) == r["n_tokens"] and len(r["times"]) == r["n_tokens"]
    table = result(*COMMAND, *keys, f"--out_dir={tmp_path / 'out'}")["table"]
    for row in table:
        b = row["budget"]
        groups = [[found[row["arm"], i, k] for k in range(3)] for i in range(6)]
        scores = [[r["score"] if r["n_tokens"] <= b else b % 7 / 16 for r in group] for group in groups]
        tokens = [min(r["n_tokens"], b) for group in groups for r in group]
        assert abs(row["accuracy"] - np.mean(scores)) < 1e-9 and abs(row["pass_at_k"] - np.mean([max(s) for s in scores])) < 1e-9
        assert row["accuracy"] < row["pass_at_k"] and row["mean_tokens"] == np.mean(tokens)
        assert row["p90_tokens"] == np.percentile(tokens, 90) and row["tokens_per_s"] > 0
        assert abs(row["cut"] - np.mean([r["n_tokens"] > b or r["finish_reason"] == "length" for g in groups for r in g])) < 1e-9
    source = load_task(keys[0][7:], 3, False)
    rates = json.loads((tmp_path / "out" / "pass_rates" / "full.json").read_text(encoding="utf-8"))["rates"]
    assert rates == {str(i): sum(found["full", i, k]["score"] for k in range(3)) / 3 for i in range(6)}
    easy = load_task(f"rated:{tmp_path / 'out' / 'pass_rates' / 'full.json'}?min_pass={sorted(rates.values())[3]}", 3)
    assert easy.size == sum(rate >= sorted(rates.values())[3] for rate in rates.values())
    tokenizer = load_tokenizer(untrained)
    assert found["full", 2, 0]["prompt_tokens"] == len(prompt_ids(source.problem(2), tokenizer))
    # other problems under the same name, and other weights under the same name, are refused
    again = [*COMMAND, *keys, f"--out_dir={tmp_path / 'out'}"]
    (tmp_path / "scorer.py").write_text((SCORER + "size = 7\n").replace("BA from", "BA  from"), encoding="utf-8")
    assert "holds samples of another problem 0" in refused(*again)
    (tmp_path / "scorer.py").write_text(SCORER + "size = 7\n", encoding="utf-8")
    shutil.copytree(untrained, tmp_path / "other")
    torch.manual_seed(1)
    GPT(GPT.from_pretrained(untrained).config).save_pretrained(tmp_path / "other")
    assert "holds samples of full with weights=" in refused(*again, f"--init_from={tmp_path / 'other'}")


def refused(*args):
    process = start(*args)
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 2, err
    return err.splitlines()[-1]


@pytest.mark.parametrize("key, value", [
    ("seed", 2), ("rope", "continue"), ("max_new_tokens", 59), ("min_new_tokens", 3), ("top_p", 0.9), ("held_out", True), ("system", "x"),
    ("carry_last", 3), ("summary_tokens", 3), ("cue", " from"), ("template_args", {"a": 1})])
def test_samples_that_were_drawn_otherwise_are_not_mixed(tmp_path, configure, untrained, key, value):
    def arm(policy, name="", dtype=torch.float32):
        return Arm(policy, Weights(name, str(untrained), None, None, "cpu", dtype), 3, "whole")

    def entries():
        return json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))

    arms = [arm("full_stop"), arm("last_k", "x"), arm("summary")]
    configure(rope="reset", max_new_tokens=60, carry_last=4, summary_tokens=4, cue=" answer", out_dir=str(tmp_path))
    done = {("t", str(arm), 0, 0): {} for arm in arms}
    with pytest.raises(ValueError, match="holds samples of full_stop, but no eval.json"):
        evaluation.keep_settings(done, arms)
    evaluation.keep_settings({}, arms)
    evaluation.keep_settings(done, arms)
    configure(n_problems=5, policies="full", budgets=(3,))
    evaluation.keep_settings(done, arms)                                              # how many, and how to look at them
    with pytest.raises(ValueError, match="holds samples of full_stop with dtype='float32', not 'bfloat16'"):
        evaluation.keep_settings(done, [arm("full_stop", dtype=torch.bfloat16)])
    before = entries()
    configure(**{key: value})
    with pytest.raises(ValueError, match=f"holds samples of [a-z_@]+ with {key}="):
        evaluation.keep_settings(done, arms)
    evaluation.keep_settings(done, [arm("prefix_sliding")])                           # not asked for: kept as they were
    assert {name: entries()[name] for name in before} == before
    with pytest.raises(ValueError, match=f"holds samples of [a-z_@]+ with {key}="):
        evaluation.keep_settings(done, arms)
    own = [arm for arm in arms if key in restarts.OWN_KEYS[arm.policy]] or arms
    others = [arm for arm in arms if arm not in own]
    evaluation.keep_settings(done, others)                                            # keys of one policy are nothing to the others
    evaluation.keep_settings({("t", str(arm), 0, 0): {} for arm in others}, arms)     # nor to one without samples
    assert all(entries()[arm.name][key] == value for arm in own)
    evaluation.keep_settings({}, arms)                                                # an empty folder takes anything


def test_one_process_per_folder(untrained, tmp_path):
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / "samples.jsonl", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "is in use by another eval.py" in refused(*COMMAND, f"--init_from={untrained}", f"--out_dir={tmp_path / 'out'}")


@pytest.mark.parametrize("config", sorted(p.stem for p in (ROOT / "config").glob("eval_*.py")))
def test_configs_evaluate_a_tiny_model_of_their_architecture(tmp_path, monkeypatch, config):
    folder = tmp_path / "model"
    write_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    GPT(GPTConfig(vocab_size=tokenizer.n_vocab, eos_ids=tuple(tokenizer.eos_ids), n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=8,
                  n_inner=48, qk_norm=True)).save_pretrained(folder)
    (tmp_path / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 3, encoding="utf-8")
    source = (ROOT / "config" / f"{config}.py").read_text(encoding="utf-8")
    names = json.dumps(dict.fromkeys(("full", "ps"), str(folder)))
    table = result("eval.py", f"config/{config}.py", f"--init_from={folder}", f"--models={names}", f"--out_dir={tmp_path / 'out'}",
                   f"--task=jsonl:{tmp_path / 'problems.jsonl'}", "--held_out=None", "--n_problems=2", "--samples_per_problem=2",
                   "--windows=16", "--max_new_tokens=24", "--min_new_tokens=0", "--budgets=8", "--carry_first=0", "--carry_last=4",
                   "--answer_tokens=2", "--cue= answer", "--summary_tokens=2", "--summary_prompt=", "--summary_form={}",
                   "--device=cpu", "--dtype=float32")["table"]
    assert {row["problems"] for row in table} == {2} and "init_from" in source
    rates = list((tmp_path / "out" / "pass_rates").iterdir())
    assert len(rates) == len({row["arm"] for row in table})
    monkeypatch.setattr(figures, "data", str(tmp_path / "out" / "table.csv"))
    monkeypatch.setattr(figures, "out", str(tmp_path / "out" / "accuracy.png"))
    assert set(figures.accuracy()["arms"]) == {row["arm"] for row in table}
    assert (tmp_path / "out" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_a_misspelt_key_is_named(untrained, tmp_path):
    process = start(*COMMAND, f"--init_from={untrained}", f"--out_dir={tmp_path / 'out'}", "--windows=4,x")
    assert "windows wants tuple or int, not str" in process.communicate()[1] and process.returncode == 2


@pytest.mark.parametrize("keys, says", [
    (dict(policies="prefix_slide"), "there is no 'prefix_slide', only prefix_sliding, full,"),
    (dict(policies="full@other"), "'full@other' needs models={'other': a folder with weights}"),
    (dict(policies="full,full"), "the same twice"), (dict(prefixes="half"), "prefixes='half'"), (dict(windows=0), "windows=0"),
    (dict(windows=()), r"windows=\(\)"), (dict(budgets=(10, 100)), "from 1 to 60"), (dict(n_problems=0), "n_problems=0: must be at"),
    (dict(policies="last_k", carry_last=12), "takes 12 of its 12 tokens"), (dict(policies="full_stop", answer_tokens=12), "of its 12"),
    (dict(policies="summary", summary_tokens=11), "of its 12 tokens"), (dict(summary_form="x"), "a text with {} in it"),
    (dict(baseline="ful"), "baseline='ful'"), (dict(task=[]), r"task=\[\]"), (dict(init_from="nowhere"), "nowhere"),
    (dict(top_p=0.0), "top_p=0"), (dict(rows=0), "rows=0"),
])
def test_wrong_inputs_are_named(untrained, tmp_path, configure, keys, says):
    configure(**dict(init_from=str(untrained), out_dir=str(tmp_path / "out"), policies="full", windows=12, task=PASSES, device="cpu",
                     n_problems=1, samples_per_problem=1, max_new_tokens=60, carry_last=4, summary_prompt="", summary_form="{}") | keys)
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        evaluation.main()


# ---------------------------------------------------------------------------------------------------------------------
# the policies

@pytest.fixture
def passes(untrained, configure):
    """A tiny model, its tokenizer, and six prompts of the embedded task."""
    configure(max_new_tokens=40, temperature=1.0, top_p=1.0, rope="reset", carry_last=4, carry_first=0, answer_tokens=2, cue=" answer",
              summary_prompt="", summary_form="{}", summary_tokens=4, rows=None)
    model, tokenizer = GPT.from_pretrained(untrained).double(), load_tokenizer(untrained)
    prompts = [prompt_ids(load_task("py:data/passes/task.py?low=4&high=60").problem(i), tokenizer) for i in range(6)]
    return SimpleNamespace(model=model, tokenizer=tokenizer, prompts=prompts)


def drawn(policy, window, passes, prompts=None, prefix_len=None):
    return draw(arm_of(policy, window, tokenizer=passes.tokenizer), passes.model, prompts or passes.prompts, prefix_len)


@pytest.mark.parametrize("rows", [None, 2])
def test_all_policies_draw_from_the_same_streams(passes, configure, rows):
    """With a window that never fills, every policy whose positions are the same is full attention, token for token."""
    configure(rows=rows, answer_tokens=1)
    want = generate(passes.model, passes.prompts, 40, window=None, temperature=1.0, top_p=1.0, seed=[stream(i) for i in range(6)],
                    stop_ids=passes.tokenizer.eos_ids, n_vocab=passes.tokenizer.n_vocab)
    for policy in (*POLICIES, *restarts.RESTARTS):
        window = None if policy == "full" else 60
        if policy in ("sliding", "streaming"):
            window = 200                                                              # their windows have to hold the prompt, too
        got = drawn(policy, window, passes)
        assert [(s.tokens, s.finish_reason) for s in got] == [(c.tokens, c.finish_reason) for c in want], policy


def is_a_call_of_the_engine(passes, configure, policy, how):
    """With a window that fills, and with a least length."""
    configure(min_new_tokens=30)
    got = drawn(policy, None if policy == "full" else 12, passes, prefix_len=4)
    want = generate(passes.model, passes.prompts, 40, temperature=1.0, top_p=1.0, seed=[stream(i) for i in range(6)], min_new_tokens=30,
                    stop_ids=passes.tokenizer.eos_ids, n_vocab=passes.tokenizer.n_vocab, **how)
    assert [s.tokens for s in got] == [c.tokens for c in want] and min(len(c.tokens) for c in want) >= 30


@pytest.mark.parametrize("policy, how", [
    ("prefix_sliding", dict(prefix_len=[4] * 6, window=12, rope="reset")), ("full", dict(window=None)),
    ("sliding", dict(prefix_len=0, window=12, rope="reset")), ("streaming", dict(prefix_len=4, window=12, rope="reset"))])
def test_each_policy_is_a_call_of_the_engine(passes, configure, policy, how):
    is_a_call_of_the_engine(passes, configure, policy, how)


def test_random_eviction_is_a_call_of_the_engine(passes, configure, monkeypatch):
    import forks.random_eviction as fork
    random = dict(cache_class=fork.RandomEvictionCache)
    monkeypatch.setitem(POLICIES, "random", random)
    is_a_call_of_the_engine(passes, configure, "random", dict(prefix_len=[4] * 6, window=12, rope="reset") | random)


def test_the_fork_adds_random_eviction(untrained, tmp_path):
    """Under its own name, with prefixes like prefix_sliding; killed or not, the rest of the folder stays as it is."""
    out = [f"--init_from={untrained}", f"--out_dir={tmp_path / 'out'}"]
    before = result(*COMMAND, *out, "--policies=prefix_sliding")["table"]
    after = result("-m", "forks.random_eviction", *COMMAND, *out, "--policies=prefix_sliding,random", "--prefixes=whole,4")["table"]
    assert [row["arm"] for row in after if row["budget"] == 60] == [
        "prefix_sliding W=12", "prefix_sliding W=12 P=4", "random W=12", "random W=12 P=4"]
    assert after[:3] == before
    assert "there is no 'random'" in refused(*COMMAND, *out, "--policies=random")


@pytest.mark.parametrize("policy", restarts.RESTARTS)
def test_a_restarted_sample_is_the_same_alone(passes, configure, policy):
    """Contexts of others in the batch are no part of it, nor is how long they are (min_new_tokens)."""
    configure(min_new_tokens=25, summary_form="{} 59")
    together = drawn(policy, 16, passes)
    assert policy == "full_stop" or min(s.n_tokens for s in together) >= 25
    for i in (1, 4):
        alone, done = new_sample(i, passes.prompts[i], 0), []
        Sampler(arm_of(policy, 16, tokenizer=passes.tokenizer), passes.model, [alone], done.append).run()
        assert done == [alone] and alone.tokens == together[i].tokens


def fake(monkeypatch, calls, calls_how=None, written=None):
    """An engine that writes down its contexts and answers with 1, 2, 3, ... in each of them, or a summary with what is `written`."""
    calls_how = [] if calls_how is None else calls_how

    def generate(model, contexts, limits, *, window, seed, on_token, **how):
        assert window is None
        limits = limits if isinstance(limits, list) else [limits] * len(contexts)
        calls.append((contexts, limits, seed))
        calls_how.append(how)
        done = [list(range(1, n + 1)) for n in limits]
        if written is not None and "stop_strings" in how:
            done = [written]
        for i, tokens in enumerate(done):
            for token in tokens:
                on_token(i, token)
        return [SimpleNamespace(tokens=tokens) for tokens in done]
    monkeypatch.setattr(evaluation, "generate", generate)


def test_last_k_by_hand(passes, configure, monkeypatch):
    """P = 2, W = 6, k = 2: six new tokens, then prompt + last two + four new ones, again and again; Delethink keeps the first ones too."""
    for first, contexts in ((0, [[50, 51], [50, 51, 5, 6], [50, 51, 3, 4], [50, 51, 3, 4]]),
                            (1, [[50, 51], [50, 51, 1, 5, 6], [50, 51, 1, 2, 3], [50, 51, 1, 2, 3], [50, 51, 1, 2, 3]])):
        configure(max_new_tokens=16, carry_last=2, carry_first=first, min_new_tokens=8)
        turns, how = [], []
        fake(monkeypatch, turns, how)
        sample, = drawn("last_k", 6, passes, [[50, 51]])
        assert [h["min_new_tokens"] for h in how][:3] == [[8], [2], [0]] and all(h["prefix_len"] == [2] for h in how)
        assert [c for (c,), _, _ in turns] == contexts
        assert [n for _, (n,), _ in turns] == ([6, 4, 4, 2] if first == 0 else [6, 3, 3, 3, 1])
        assert sample.n_tokens == 16 and sample.finish_reason == "length"
        seeds = [s for _, _, (s,) in turns]
        assert seeds[0] == stream(0) and len(set(seeds)) == len(seeds)                # a stream of its own for each piece


def test_summary_by_hand(passes, configure, monkeypatch):
    """P = 2, W = 12: room for a question of two tokens and a summary of three at the end of each context; the summary is not counted."""
    ids = passes.tokenizer.encode
    configure(max_new_tokens=10, summary_prompt=" 01 02", summary_tokens=3, summary_form=" 03{} 04", carry_last=4, min_new_tokens=9)
    turns, how, written = [], [], ids(" 00 59 04 03")                                 # goes on behind the closing tag
    fake(monkeypatch, turns, how, written)
    sample, = drawn("summary", 12, passes, [[50, 51]])
    ask, carried = ids(" 01 02"), ids(" 03") + ids(" 00 59 ") + ids(" 04")
    new = list(range(1, 8))
    assert turns[0][:2] == ([[50, 51]], [7])                                          # 12 - 2 - 3
    assert turns[1][:2] == ([[50, 51, *new, *ask]], [3])
    assert turns[2][:2] == ([[50, 51, *carried]], [2])                                # 10 - 7 are left, and 12 - 2 - 3 - 5 fit
    assert sample.n_tokens == 10 and sample.tokens == [*new, 1, 2, 1]
    assert how[1]["stop_strings"] == ("04",) and [h["min_new_tokens"] for h in how[:3]] == [[9], [0], [2]]


def test_full_stop_by_hand(passes, configure, monkeypatch):
    ids = passes.tokenizer.encode
    configure(max_new_tokens=100, cue=" answer", answer_tokens=2)
    turns = []
    fake(monkeypatch, turns)
    sample, = drawn("full_stop", 8, passes, [[50, 51]])
    (first, n, _), (second, m, _) = turns
    assert first == [[50, 51]] and n == [5] and second == [[50, 51, 1, 2, 3, 4, 5, *ids(" answer")]] and m == [2]
    assert sample.tokens == [1, 2, 3, 4, 5, *ids(" answer"), 1, 2] and sample.n_tokens == 8


def test_a_forced_answer_ends_with_the_sample(passes, configure, monkeypatch):
    """The cue is longer than what max_new_tokens leaves: each sample is completed once, and is no longer than that."""
    configure(max_new_tokens=7, cue=" answer 00 01 02", answer_tokens=2)
    fake(monkeypatch, [])
    samples = drawn("full_stop", 11, passes, [[50, 51], [50, 52]])
    assert [s.tokens for s in samples] == [[1, 2, 3, 4, 5, *passes.tokenizer.encode(" answer 00 01 02")[:2]]] * 2


def test_the_summary_stands_before_the_thinking(configure, monkeypatch):
    """A prompt that ends in <think> and a newline: the summary comes before a fresh <think>; the forced answer ends the thinking first."""
    tokenizer = SimpleNamespace(encode=lambda text: list(map(int, text.split())), decode=lambda ids: " ".join(map(str, ids)), eos_ids=[99],
                                n_vocab=100, token_id={"<think>": 7, "</think>": 8}.get)
    configure(max_new_tokens=14, summary_prompt="20", summary_tokens=2, summary_form="21 {} 22", rows=None, cue="30 31", answer_tokens=2)
    turns, passes = [], SimpleNamespace(tokenizer=tokenizer, model=None)
    fake(monkeypatch, turns)
    drawn("summary", 10, passes, [[5, 6, 7, 10]])
    assert turns[2][0] == [[5, 6, 21, 1, 2, 22, 7, 10]]
    turns.clear()
    drawn("full_stop", 10, passes, [[5, 6, 7, 10]])
    assert turns[1][0] == [[5, 6, 7, 10, 1, 2, 3, 4, 5, 8, 30, 31]]                    # 10 - 1 - 2 - 2 tokens of thinking
    for prompt, window in (([5, 6, 7, 8], 10), ([5, 6, 7, 10], 14)):                  # it is over in the prompt, or came (8) by itself
        turns.clear()
        drawn("full_stop", window, passes, [prompt])
        assert turns[1][0] == [[*prompt, *range(1, window - 4), 30, 31]]


def test_prefixes(smollm2, configure):
    tokenizer = load_tokenizer(smollm2)
    configure(system="", template_args={})
    problem = Problem("Why is the sky blue?", "")
    prompt = prompt_ids(problem, tokenizer)
    n = evaluation.prefix_tokens("question", problem, prompt, tokenizer)
    assert tokenizer.decode(prompt[:n]).endswith("Why is the sky blue?") and len(prompt) - n > 2
    assert [evaluation.prefix_tokens(p, problem, prompt, tokenizer) - len(prompt) for p in ("whole", "whole+100")] == [0, 100]
    assert evaluation.prefix_tokens("4", problem, prompt, tokenizer) == 4


def test_the_question_is_kept_to_its_end(tmp_path, configure):
    """Qwen's tokenizer joins punctuation and line breaks: a comparison of the beginnings of two prompts lost the last word."""
    spec = test_tokenizer.train(test_tokenizer.QWEN2, 2000, test_tokenizer.normalizers.NFC(), test_tokenizer.QWEN_ADDED)
    _, tokenizer = test_tokenizer.load(spec, tmp_path, chat_template=test_tokenizer.QWEN_TEMPLATE, eos_token="<|im_end|>")
    configure(system="", template_args={})
    for question in ("Why?", "f(x)", 'say "hi".', r"Put it into \boxed{}.", "Return it.)"):
        prompt = prompt_ids(Problem(question, ""), tokenizer)
        n = evaluation.prefix_tokens("question", Problem(question, ""), prompt, tokenizer)
        assert tokenizer.decode(prompt[:n]).endswith(question) and 0 < len(prompt) - n < 8


# ---------------------------------------------------------------------------------------------------------------------
# the numbers

def test_the_time_of_a_step_is_shared(monkeypatch, configure):
    """Two samples in steps of 2 seconds, one of which ends after three: it took 1 + 1 + 1, the other 1 + 1 + 1 + 2."""
    now, done = [0.0], []
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: now[0])
    configure(max_new_tokens=128)

    def complete(record):
        done.append(record)
        now[0] += 100                                                                 # scoring takes long, and is nobody's time
    samples = [new_sample(i, [1], 1) for i in range(2)]
    sampler = Sampler(arm_of("full", None, tokenizer=SimpleNamespace(eos_ids=[9])), None, samples, complete)
    for tokens in ((1, 1), (1, 1), (9, 1), (None, 9)):
        now[0] += 2
        for sample, token in zip(samples, tokens, strict=True):
            if token is not None:
                sampler.token(sample, token)
    sampler.close()
    assert done == samples and [(s.s, s.every, s.times, s.n_tokens) for s in samples] == [(3, 2, [2], 3), (5, 2, [2, 5], 4)]


def test_what_is_said_aside_takes_time_but_is_no_part(monkeypatch, configure):
    now = [0.0]
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: now[0])
    configure(max_new_tokens=128)
    samples = [new_sample(i, [1], 1) for i in range(2)]
    sampler = Sampler(arm_of("summary", 9, tokenizer=SimpleNamespace(eos_ids=[9])), None, samples, None)
    for aside in (False, False, True, True, False, False):
        now[0] += 2
        for sample in samples:
            sampler.token(sample, 9 if aside else 5, aside)
    sampler.close()
    assert [(s.s, s.times, s.tokens, s.finish_reason) for s in samples] == [(6, [2, 6], [5] * 4, "")] * 2
    assert samples[0].context == [1, 5, 5, 9, 9, 5, 5]


def test_budgets_are_applied_afterwards():
    task = load_task("py:data/passes/task.py?low=4&high=4")
    problem = task.problem(0)
    text = " 00 00 03 A answer B"
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(ids), encode_chat=lambda messages: [1], token_id=lambda text: None)
    source = SimpleNamespace(problem=lambda i: problem, score=lambda p, text, ids, reason: float(text == " 00 00" and reason == "length"))
    tokens = [" 00", " 00", " 03", " A", " answer", " B", "end"]
    sample = Sample("t", "arm", 0, 0, "", "", 1, 1, 7, "stop", 9.0, 2, [1.0, 3.0, 6.0], tokens, 1.0, text=text)

    def at(budget):
        cut = evaluation.at_budget(sample, budget, source, tokenizer)
        return cut.score, cut.n_tokens, cut.finish_reason == "length", cut.s

    assert at(100) == at(7) == (1.0, 7, False, 9.0)
    assert at(6) == (0.0, 6, True, 6.0) and at(2) == (1.0, 2, True, 1.0)
    assert at(1) == (0.0, 1, True, 0.5) and at(3) == (0.0, 3, True, 2.0)               # between two marks
    assert (sample.tokens, sample.text, sample.n_tokens) == (tokens, text, 7)          # left as it was
    sample.finish_reason = "length"
    assert at(7)[2] is True


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_paired_differences(pairs):
    a, b = map(list, zip(*pairs, strict=True))
    a, b = (np.array(x)[:, None] for x in (a, b))                                     # one sample of each problem
    mean, low, high = evals.table.paired(a, b)
    d = np.subtract(a, b)
    assert abs(mean - d.mean()) < 1e-12 and d.min() - 1e-12 <= low <= high <= d.max() + 1e-12
    assert evals.table.paired(a, a) == (0, 0, 0)
    again = evals.table.paired(b, a)
    assert abs(again[0] + mean) < 1e-12


def test_the_interval_is_that_of_the_mean():
    """100 problems, half of them won: a standard error of 0.05, so about 0.4 to 0.6; the noise that both share cancels."""
    mean, low, high = evals.table.paired(np.repeat([[1.0], [0.0]], 50, 0), np.zeros((100, 1)))
    assert mean == 0.5 and abs(low - 0.402) < 0.015 and abs(high - 0.598) < 0.015
    noise = np.random.default_rng(1).uniform(0, 100, (100, 1))
    mean, low, high = evals.table.paired(noise + 1, noise)
    assert max(abs(x - 1) for x in (mean, low, high)) < 1e-9


@pytest.mark.parametrize("policy", [*POLICIES, *restarts.RESTARTS])
@pytest.mark.parametrize("n_new", [3, 50])
def test_cache_bytes(policy, n_new):
    """Against what a cache of that size really allocates."""
    config, W, n_prompt = GPTConfig(n_layer=2, windows=(None, 5)), 12, 17
    arm = arm_of(policy, None if policy == "full" else W, config=config)
    got = evals.table.cache_bytes(arm, Sample("t", "arm", 0, 0, "", "", n_prompt, n_prompt, n_new))
    P, n = {"sliding": 0, "streaming": 4}.get(policy, n_prompt), n_prompt + n_new
    windows = [None if policy == "full" else min(W, n - P), min(5, n - P)]
    assert got == SlidingCache(config, 1, P, windows, max_len=n).nbytes


def test_a_difference_is_paired_with_the_baseline_of_the_same_window(configure):
    configure(budgets=(), max_new_tokens=10, baseline="sliding", samples_per_problem=1)
    arms = [arm_of("full", None), *(arm_of(p, w) for w in (4, 8) for p in ("prefix_sliding", "sliding"))]
    samples = {}
    for k, arm in enumerate(arms):
        samples[arm] = [Sample("x", str(arm), i, 0, "", "", 3, 3, 5, "stop", 1.0, score=k / 100 + i / 10) for i in range(3)]
    rows = evaluation.task_table(None, samples)
    assert [row["difference"] and round(row["difference"], 6) for row in rows] == [-0.02, -0.01, None, -0.01, None]
    assert [row["against"] for row in rows] == ["sliding W=4", "sliding W=4", None, "sliding W=8", None]
    configure(baseline="full")
    rows = evaluation.task_table(None, samples)
    assert [row["difference"] and round(row["difference"], 6) for row in rows] == [None, 0.01, 0.02, 0.03, 0.04]
    assert [row["tokens_per_s"] for row in rows] == [5] * 5
    # under a budget that cuts every sample all are the same, and so are the differences
    configure(budgets=(2,))
    source = SimpleNamespace(problem=lambda i: Problem("x", ""), score=lambda problem, text, tokens, reason: 0.5)
    for arm in arms:
        arm.weights.tokenizer = SimpleNamespace(decode=lambda ids: "", encode_chat=lambda messages: [1], token_id=lambda text: None)
    rows = evaluation.task_table(source, samples)
    assert [(row["budget"], row["accuracy"] == 0.5, row["difference"] and round(row["difference"], 6)) for row in rows] == [
        (2, True, None), (10, False, None), *((b, b == 2, 0 if b == 2 else x) for x in (0.01, 0.02, 0.03, 0.04) for b in (2, 10))]


def test_what_is_no_file_of_samples(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"task": 1}\n{"task"')
    with open(path, "ab+") as file, pytest.raises(ValueError, match="line 1: not a sample of eval.py"):
        evaluation.read_samples(file)
    assert path.read_bytes() == b'{"task": 1}\n'
    with open(tmp_path / "nothing.jsonl", "ab+") as file:
        assert evaluation.read_samples(file) == {}
