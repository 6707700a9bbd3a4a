"""figures.py: pictures from real files with values worked out by hand, and what is measured on a model against transformers, dense
passes and what must be exactly zero."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import ROOT
from test_model import BASE, MODELS, hf_model
from transformers import LlamaConfig, Qwen3Config
from util import tiny_gpt

import lab.figures as figures
from attention import visible
from engine import generate
from model import GPT
from tokenizer import load_tokenizer


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """Sets the keys of figures.py for one test; the picture goes into its folder. A text given first becomes the file that `data` names."""

    def keys(content=None, /, **values):
        if content is not None:
            (tmp_path / "data").write_text(content, encoding="utf-8")
            values["data"] = str(tmp_path / "data")
        for key, value in (dict(out=str(tmp_path / "picture.svg")) | values).items():
            monkeypatch.setattr(figures, key, value)

    return keys


# ---------------------------------------------------------------------------------------------------------------------
# from files

LOG = "step,solved,length_mean,eval_solved,eval_length,rollout_s,train_s\n"


def test_curve(tmp_path, keys):
    log = tmp_path / "log.csv"
    log.write_text("step,solved,length_mean,eval_solved,eval_length\n0,0.25,50,0.5,40\n1,0.75,60,,\n2,,,1.0,90\n", encoding="utf-8")
    assert figures.read_log(log) == dict(solved=[(0, 0.25), (1, 0.75)], length_mean=[(0, 50), (1, 60)], eval_solved=[(0, 0.5), (2, 1.0)],
                                         eval_length=[(0, 40), (2, 90)])
    keys(logs=f"{log},{log}")
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        keys(out=str(tmp_path / f"curve{suffix}"))
        result = figures.curve()
        assert (tmp_path / f"curve{suffix}").read_bytes().startswith(magic)
    assert result["lines"] == {str(tmp_path): dict(runs=2, steps=2, solved_last=0.75, length_mean_last=60.0)}  # no times, no minutes
    keys(labels="one")
    with pytest.raises(ValueError, match="1 names for 2 logs"):
        figures.curve()


def test_curve_over_seeds(tmp_path, keys, drawn):
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text(LOG + "0,0.2,10,0.1,8,50,10\n1,0.4,20,,,100,20\n2,0.8,40,,,60,0\n3,,,0.9,50,,\n", encoding="utf-8")
    b.write_text(LOG + "0,0.4,30,0.3,12,80,40\n1,0.8,40,,,120,120\n", encoding="utf-8")
    # step s stands at the time spent before it: steps 0, 1, 2 and 3 of a at 0, 1, 3 and 4 minutes, 0 and 1 of b at 0 and 2
    assert figures.minutes(figures.read_log(a)) == {0: 0, 1: 1, 2: 3, 3: 4} and figures.minutes(figures.read_log(b)) == {0: 0, 1: 2}
    keys(logs=f"{a},{b},{a}", labels="seeds,seeds,alone")
    assert figures.curve()["lines"] == {
        "seeds": dict(runs=2, steps=2, solved_last=0.6, length_mean_last=30.0, minutes=1.5),  # b ends at step 1
        "alone": dict(runs=1, steps=3, solved_last=0.8, length_mean_last=40.0, minutes=3.0)}
    axes = drawn[-1].axes
    assert [ax.get_xlabel() for ax in axes] == ["step"] * 2 + ["minutes of sampling and training"] * 2
    line, dots = axes[2].lines[:2]
    assert line.get_xydata().tolist() == [[0, pytest.approx(0.3)], [1.5, pytest.approx(0.6)]]
    assert dots.get_xydata().tolist() == [[0, pytest.approx(0.2)]]
    band = axes[0].collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band.tolist()} == {(0, 0.2), (0, 0.4), (1, 0.4), (1, 0.8)}
    b.write_text("step,solved,length_mean\n0,0.4,30\n", encoding="utf-8")
    assert figures.curve()["lines"]["seeds"] == dict(runs=2, steps=1, solved_last=0.3, length_mean_last=20.0)
    assert len(drawn[-1].axes) == 2  # one log without times: one row
    b.write_text("step,solved,length_mean\n7,0.4,30\n", encoding="utf-8")
    with pytest.raises(ValueError, match="'seeds' have no step in common"):
        figures.curve()


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    seen, save = [], figures.save
    monkeypatch.setattr(figures, "save", lambda fig, name: (seen.append(fig), save(fig, name))[1])
    return seen


@pytest.mark.parametrize("text, says", [("", "has no rows"), ("step,solved\n", "has no rows"), ("step,solved\n1,x\n", "line 2: not a row"),
                                        ("a,b\n1,2\n", "line 2: not a row"), ("step,solved\n1,2,3\n", "line 2: not a row")])
def test_what_is_no_log(tmp_path, text, says):
    log = tmp_path / "log.csv"
    log.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        figures.read_log(log)


TABLE = ("task,arm,policy,window,prefix,budget,problems,samples,accuracy,pass_at_k,mean_tokens,p90_tokens,cut,s_per_sample,tokens_per_s,"
         "cache_mb,difference,low,high\n")


def test_accuracy(keys, drawn):
    """One task: a point per budget, in their order."""
    keys(TABLE + "t,full,full,,,200,8,8,0.50,0.6,150,190,0,3.0,50,1,,,\n"
                 "t,full,full,,,100,8,8,0.25,0.3,90,100,0,1.5,60,1,,,\n"
                 "t,ps,prefix_sliding,64,,100,8,8,0.30,0.3,95,100,0,1.25,60,1,0.05,,\n")
    arms = figures.accuracy()["arms"]
    assert [p["budget"] for p in arms["full"]] == [100, 200] and [p["budget"] for p in arms["ps"]] == [100]
    seconds, tokens = drawn[0].axes
    assert seconds.lines[0].get_xydata().tolist() == [[1.5, 0.25], [3.0, 0.5]] and seconds.lines[1].get_xydata().tolist() == [[1.25, 0.3]]
    assert tokens.lines[0].get_xydata().tolist() == [[90, 0.25], [150, 0.5]]


def test_accuracy_of_several_tasks(keys, drawn):
    """A point per task, under the largest budget."""
    keys(TABLE + "".join(f"{task},full,full,,,{budget},8,8,{score},0.6,150,190,0,{s},50,1,,,\n" for task, budget, score, s in (
        ("short", 10, 0.1, 1.0), ("short", 20, 0.9, 2.0), ("long", 20, 0.4, 3.0), ("long", 10, 0.2, 1.5))))
    figures.accuracy()
    right, seconds = drawn[0].axes
    assert right.lines[0].get_xydata().tolist() == [[0, 0.9], [1, 0.4]] and seconds.lines[0].get_xydata().tolist() == [[0, 2], [1, 3]]
    assert [label.get_text() for label in right.get_xticklabels()] == ["short", "long"]


@pytest.mark.parametrize("text, says", [
    ("", "lacks the columns task, arm, accuracy"), ("task,arm,accuracy,budget,mean_tokens\n", "lacks the columns s_per_sample:"),
    (TABLE, "has no rows"), (TABLE + "t,full" + "," * 17 + "\n", "line 2: not a row of numbers"),
    (TABLE + "t,full,full,,,x,8,8,0.50,0.6,150,190,,3.0,50,,,,\n", "line 2: not a row of numbers"),
    (TABLE + "t,full,full\n", "line 2: not a row of numbers")])
def test_what_is_no_table(text, says, keys):
    keys(text)
    with pytest.raises(ValueError, match=says):
        figures.accuracy()


def samples(*rows):
    return "".join(json.dumps(dict(arm=arm, every=every, times=times)) + "\n" for arm, every, times in rows)


def test_times(keys, drawn):
    # ms per token: 1 s, 2 s and 3 s for 100 tokens are 10, 20 and 30; the second sample has 30, and ends
    keys(samples(("full", 100, [1.0, 3.0, 6.0]), ("full", 100, [3.0]), ("ps", 50, [0.5, 1.0]), ("ps", 50, [])))
    arms = figures.times()["arms"]
    assert arms == dict(full=dict(every=100, ms_per_token=[20.0, 20.0, 30.0]), ps=dict(every=50, ms_per_token=[10.0, 10.0]))
    assert drawn[0].axes[0].lines[0].get_xdata().tolist() == [100, 200, 300]


@pytest.mark.parametrize("text, says", [
    ("", "has no times"), (samples(("a", 10, [])), "has no times"), ("{}\n", "line 1: no sample with arm, every and times"),
    ("x\n", "line 1: no sample"), ("[]\n", "line 1: no sample"),
    (samples(("a", 10, [1]), ("a", 20, [1])), "line 2: every=20, where 'a' has 10"),
    (samples(("a", 0, [1])), "line 1: every=0, where 'a' has at least 1")])
def test_what_has_no_times(text, says, keys):
    keys(text)
    with pytest.raises(ValueError, match=says):
        figures.times()


def test_mismatch(keys, drawn):
    table = [dict(dtype="float32", carry=carry, context_mult=m, mismatch_kl=kl, max_difference=1) for carry, m, kl in
             ((False, 2, 0.01), (False, 1, 0.1), (True, 1, 1e-9), (True, 2, 0.0))]
    keys("some text\n" + json.dumps(dict(bench="gap", table=table)) + "\n")
    lines = figures.mismatch()["lines"]
    assert lines == {"float32, no carry": [(1, 0.1), (2, 0.01)], "float32, carry": [(1, 1e-9), (2, 0.0)]}
    paper, no_carry, carry = drawn[0].axes[0].lines
    assert no_carry.get_xydata().tolist() == [[1, 0.1], [2, 0.01]] and carry.get_xydata().tolist() == [[1, 1e-9]]
    steps = {1: (0.213, 0.224, 0.230, 0.241, 0.205), 2: (0.0171, 0.0154, 0.0085, 0.0134, 0.0141),
             4: (0.0096, 0.0044, 0.0069, 0.0095, 0.0072), 8: (0.0036, 0.0066, 0.0073, 0.0054, 0.0027)}
    assert {m: round(y, 4) for m, y in paper.get_xydata().tolist()} == {m: round(sum(x) / 5, 4) for m, x in steps.items()}
    for text in ("", "no json", '{"bench": "gap"}', '{"table": []}', '{"table": [{"carry": true}]}', "[1]"):
        keys(text)
        with pytest.raises(ValueError, match="its last line is not the JSON of lab.bench gap"):
            figures.mismatch()


def test_speed(keys, drawn):
    table = [dict(dtype=kind, who=who, rows=rows, tokens=tokens, ms=ms) for kind, who, rows, tokens, ms in
             (("bfloat16", "ours", 1, 8192, 15.0), ("bfloat16", "ours", 1, 4296, 14.0), ("bfloat16", "ours", 8, 4296, 60.0),
              ("bfloat16", "llama.cpp", 1, 4296, 21.0), ("float32", "ours", 1, 4296, 20.0))]
    keys(json.dumps(dict(bench="decode", table=table)))
    assert figures.speed()["lines"] == {"bfloat16": {"ours": [(8192, 15.0), (4296, 14.0)], "llama.cpp": [(4296, 21.0)]},
                                        "float32": {"ours": [(4296, 20.0)]}}
    half, single = drawn[0].axes
    assert [line.get_xydata().tolist() for line in half.lines] == [[[4296, 14], [8192, 15]], [[4296, 21]]] and len(single.lines) == 1
    assert half.get_xscale() == half.get_yscale() == "log" and half.get_title() == "bfloat16"
    for text in ("", "no json", '{"bench": "gap"}', '{"table": []}', '{"table": [{"dtype": "float32"}]}'):
        keys(text)
        with pytest.raises(ValueError, match="its last line is not the JSON of lab.bench decode"):
            figures.speed()


def test_command_line(tmp_path, keys):
    def call(*args):
        return subprocess.run([sys.executable, "-m", "lab.figures", *args], cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(ROOT)),
                              text=True, capture_output=True)

    (tmp_path / "s.jsonl").write_text(samples(("a", 10, [0.1])), encoding="utf-8")
    done = call("times", "--data=s.jsonl")
    assert json.loads(done.stdout.splitlines()[-1])["out"] == "times.png" and (tmp_path / "times.png").exists()
    done = call("attention", "--window=[3]")
    assert done.returncode == 2 and "window wants int or None" in done.stderr and done.stderr.count("\n") == 1
    for what, to, says in (("pie", "", "the first argument names the figure, curve or accuracy or"), ("times", "", "times reads a file"),
                           ("longtext", "x.gif", "out='x.gif': a .png, .svg or .pdf"), ("longtext", "no/x.png", "folder that is there")):
        keys(_what=what, out=to)
        with pytest.raises(ValueError, match=says):
            figures.main()


# ---------------------------------------------------------------------------------------------------------------------
# attention

CASES = [(0, None, "continue"), (3, 5, "continue"), (7, 1, "continue"), (7, 4, "reset"), (0, 6, "reset"), (100, 3, "reset")]


@pytest.mark.parametrize("name", ["llama, tied", "qwen2", "qwen3", "yarn scaling"])
@torch.no_grad()
def test_attention_equals_transformers(name, tmp_path):
    config = {"llama, tied": LlamaConfig, "qwen3": Qwen3Config}.get(name)
    hf_model(MODELS[name]).save_pretrained(tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert config is None or isinstance(hf.config, config)
    model, idx = GPT.from_pretrained(tmp_path), torch.randint(BASE["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    i, j = torch.arange(40)[:, None], torch.arange(40)
    for P, W in ((0, None), (5, 8)):
        mask = torch.zeros(1, 1, 40, 40).masked_fill(~visible(i, j, P, W), float("-inf"))
        want = torch.stack(hf(idx, attention_mask=mask, output_attentions=True).attentions)[:, 0, :, -1].mean(1)  # (n_layer, T)
        got = figures.attention_by_layer(model, idx, P, W)
        assert (got - want).abs().max() < 2e-6 and want.std() > 1e-2
        assert (figures.last_token_attention(model, idx, P, W) - want.mean(0)).abs().max() < 2e-6


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("P, W, rope", CASES)
@torch.no_grad()
def test_attention_weights_are_those_that_the_model_uses(P, W, rope, qk_norm):
    """Values that are one-hot in a layer of one head: what its attention gives out is the weights themselves, in float64."""
    model = tiny_gpt(n_layer=2, n_head=1, n_kv_head=1, head_dim=30, qk_norm=qk_norm)
    idx, seen = torch.randint(61, (1, 30)), []
    for block in model.model.layers:
        def one_hot(module, args):
            x, attend = args

            def instead(q, k, v):
                seen.append(attend(q, k, torch.eye(30, dtype=v.dtype)[None, None])[0, 0, -1])
                return attend(q, k, v)
            return x, instead
        block.self_attn.register_forward_pre_hook(one_hot)
    weights = figures.attention_by_layer(model, idx, P, W, rope)
    assert weights.dtype == torch.float64 and (weights.sum(-1) - 1).abs().max() < 1e-12
    assert (weights - torch.stack(seen)).abs().max() < 1e-12
    hidden = ~visible(torch.tensor(29), torch.arange(30), P, W)
    assert not weights[:, hidden].any() and (weights[:, ~hidden] > 0).all()
    hooks = [len(block.self_attn._forward_pre_hooks) for block in model.model.layers]
    assert hooks == [1, 1]  # ours are gone, the test's are there


@torch.no_grad()
def test_attention_after_a_reset_is_that_of_the_closed_gap():
    """One layer: as if the tokens between prefix and window had never been."""
    model, idx, P, W = tiny_gpt(n_layer=1), torch.randint(61, (1, 40)), 5, 8
    near = torch.cat([idx[:, :P], idx[:, -W:]], 1)
    want, got = figures.last_token_attention(model, near, 0, None), figures.last_token_attention(model, idx, P, W, "reset")
    assert (got[[*range(P), *range(40 - W, 40)]] - want).abs().max() < 1e-6  # the angles are float32
    assert (got - figures.last_token_attention(model, idx, P, W)).abs().max() > 1e-2


@torch.no_grad()
def test_layers_with_windows_of_their_own():
    model, idx = tiny_gpt(windows=(None, 4, 9)), torch.randint(61, (1, 30))
    seen = figures.attention_by_layer(model, idx, 2, 6) > 0
    assert seen.sum(-1).tolist() == [8, 6, 8]


@torch.no_grad()
def test_attention_of_the_real_model(smollm2):
    hf = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager").eval()
    idx = torch.tensor([load_tokenizer(smollm2).encode(figures.python_docs()[:200])])
    want = torch.stack(hf(idx, output_attentions=True).attentions)[:, 0, :, -1].mean((0, 1))
    got = figures.last_token_attention(GPT.from_pretrained(smollm2), idx, 0, None)
    assert (got - want).abs().max() < 1e-5 and got[0] > 0.2  # the first token is a sink
    assert abs(got.sum() - 1) < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# influence

@pytest.mark.parametrize("rope", ["continue", "reset"])
def test_influence_ends_where_the_layers_end(rope):
    model, W, P = tiny_gpt(), 5, 3
    idx, reach = torch.randint(61, (1, 60), generator=torch.Generator().manual_seed(2)), 3 * (W - 1)
    kl, change = figures.influence(model, idx, [10, 25, 40], range(1, 20), P, W, rope)
    assert kl.shape == change.shape == (3, 19)
    assert (change[:, :reach] > 0).all() and (kl[:, :reach] > 0).all()  # distances 1..reach
    assert not change[:, reach:].any() and not kl[:, reach:].any()      # exactly zero beyond
    prefix, _ = figures.influence(model, idx, [1], range(1, 58), P, W, rope)
    assert (prefix > 0).all()                                           # a prefix token is seen by all


@torch.no_grad()
def test_influence_is_that_on_the_last_token_of_a_shorter_text():
    model, idx = tiny_gpt(), torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(3))
    kl, change = figures.influence(model, idx, [20], [0, 1, 4, 7], 2, 6)
    generator = torch.Generator().manual_seed(0)
    others = idx[0][idx[0] != idx[0, 20]]
    other = idx.clone()
    other[0, 20] = others[torch.randint(len(others), (), generator=generator)]
    for n, d in enumerate([0, 1, 4, 7]):
        x, y = (model(t[:, :21 + d], 2, 6)[0, -1] for t in (idx, other))
        want = torch.nn.functional.kl_div(y.log_softmax(0), x.log_softmax(0), log_target=True, reduction="sum")
        assert kl[0, n] == pytest.approx(want.item(), rel=1e-9, abs=1e-15)
        assert change[0, n] == pytest.approx((x - y).abs().max().item(), rel=1e-9)


def test_influence_is_asked_for_what_is_there():
    model, idx = tiny_gpt(), torch.randint(61, (1, 20))
    for places, distances in (([15], [5]), ([-1], [1]), ([3], [-1])):
        with pytest.raises(ValueError, match="they leave the 20 tokens"):
            figures.influence(model, idx, places, distances, 0, 4)
    with pytest.raises(ValueError, match="one and the same token"):
        figures.influence(model, torch.zeros_like(idx), [3], [1], 0, 4)


def test_fades():
    effect = torch.tensor([0.5, 1.0, 0.02, 0.005, 0.01, 0.009, 0.0])
    assert figures.fades(effect, [1, 2, 4, 8, 16, 32, 64]) == 16 and figures.fades(effect[:5], [1, 2, 4, 8, 16]) is None


# ---------------------------------------------------------------------------------------------------------------------
# long text, and whole figures

@pytest.mark.parametrize("P, W, rope", [
    (0, None, "continue"), (0, 7, "continue"), (4, 7, "reset"), (12, 20, "continue"), (12, 20, "reset")])
@torch.no_grad()
def test_nll_in_chunks_is_that_of_one_pass(P, W, rope):
    model, idx = tiny_gpt(), torch.randint(61, (1, 70))
    logits = model(idx, P, W, rope=rope)[0, :-1]
    want = torch.nn.functional.cross_entropy(logits, idx[0, 1:], reduction="none")
    for chunk in (1, 17, 69, 100):
        assert (figures.nll(model, idx, P, W, rope, chunk) - want).abs().max() < 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_gpt(dtype=torch.float32, vocab_size=257, tokenizer="bytes", max_len=64, eos_ids=(256,)).save_pretrained(path)
    return str(path)


def test_figures_of_a_model(folder, keys, tmp_path, drawn):
    (tmp_path / "text").write_text("The mask goes by index. " * 10, encoding="utf-8")
    keys(init_from=folder, text=str(tmp_path / "text"), n_tokens=200, window=6, prefix_len=8, changes=3)
    seen = figures.receptive()
    assert seen["reach_in_W"] == 2.5 and seen["kl_relative"]["3W"] == 0 < seen["kl_relative"]["1.5W"] and seen["places"] == 3
    assert [round(line.get_xdata()[0], 3) for line in drawn[-1].axes[0].lines[2:]] == [1, 1.5, 2.5]
    long = figures.longtext()["nats_per_token"]
    idx, model = torch.tensor([list((tmp_path / "text").read_bytes()[:200])]), GPT.from_pretrained(folder)
    for name, (P, W, rope) in {"full": (8, None, "continue"), "sliding": (0, 6, "continue"), "streaming": (4, 6, "reset"),
                               "prefix sliding, continue": (8, 6, "continue"), "prefix sliding, reset": (8, 6, "reset")}.items():
        want = figures.nll(model, idx, P, W, rope)
        line, = (line for line in drawn[-1].axes[0].lines if line.get_label() == name)
        assert line.get_ydata() == pytest.approx([want.mean().item()], abs=1e-4)      # 199 values are one bin
        assert long[name]["inside"] == pytest.approx(want[8 + 6 - 1:63].mean().item(), abs=1e-3)         # from a full window to max_len
        assert long[name]["beyond"] == pytest.approx(want[63:].mean().item(), abs=1e-3)
    shares = figures.attention()["shares"]
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3) and shares["between"] == 0 < shares["rest_of_prefix"]
    keys(window=None, recent=32)
    weights = figures.last_token_attention(model, idx, 8, None)
    assert figures.attention()["shares"]["between"] == pytest.approx(weights[8:168].sum().item(), abs=1e-4)
    keys(recent=1000)
    assert figures.attention()["shares"] == {
        name: pytest.approx(part.sum().item(), abs=1e-4)
        for name, part in dict(first_4=weights[:4], rest_of_prefix=weights[4:8], between=weights[:0], last=weights[8:]).items()}


def test_a_sampled_trace(folder, keys):
    keys(init_from=folder)
    model, tokenizer = figures.load()
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Why?"}])
    idx, P = figures.trace(model, tokenizer, 20, 6, "Why?")
    assert P == len(prompt) and idx[0, :P].tolist() == prompt and P < idx.size(1) <= P + 20 and 256 not in idx[0, P:]


@pytest.mark.parametrize("figure, changes, says", [
    ("receptive", dict(n_tokens=10**6), "n_tokens=1000000: the documentation of Python has only"),
    ("receptive", dict(window=0), "window=0"), ("attention", dict(window=0), "window=0"), ("longtext", dict(window=[3]), r"window=\[3\]"),
    ("receptive", dict(n_tokens=100), "need more than 576"), ("receptive", dict(changes=0), "changes=0"),
    ("attention", dict(recent=0), "recent=0"), ("longtext", dict(chunk=0), "chunk=0"), ("attention", dict(n_tokens=0), "n_tokens=0"),
    ("attention", dict(prefix_len=-1), "prefix_len=-1"), ("attention", dict(start="Hi", text="x"), "give one of them"),
    ("attention", dict(rope="up"), "rope='up'"), ("attention", dict(device="cdua"), "device='cdua'")])
def test_bad_input_is_named(figure, changes, says, folder, keys):
    keys(init_from=folder, **changes)
    with pytest.raises(ValueError, match=says):
        getattr(figures, figure)()


def test_a_sampled_trace_is_sampled_as_it_is_looked_at(folder, keys):
    keys(init_from=folder, n_tokens=60, prefix_len=3, rope="reset")
    model, tokenizer = figures.load()
    idx, P = figures.trace(model, tokenizer, 60, 5, "abc")
    prompt = tokenizer.encode_chat([{"role": "user", "content": "abc"}])
    want, = generate(model, [prompt], 60, prefix_len=3, window=5, rope="reset", stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab)
    assert P == 3 and idx[0].tolist()[:len(prompt) + 50] == (prompt + want.tokens)[:len(prompt) + 50]
    other, = generate(model, [prompt], 60, window=5, stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab)
    assert other.tokens != want.tokens
