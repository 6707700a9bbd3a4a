"""Runs of train_sft.py and train_rl.py from the command line: killed, interrupted, resumed, divided; and the optimizer under them."""
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT
from safetensors import safe_open
from util import tiny_gpt

import train_sft
import training
from data.passes.prepare import write_tokenizer
from model import GPT, GPTConfig
from tasks import Problem, load_task
from tokenizer import load_tokenizer

TIMES = {"tokens_per_s", "rollout_tokens_per_s", "train_tokens_per_s", "rollout_s", "train_s", "peak_memory_bytes", "remaining_s"}
SFT = ["train_sft.py", "--n_layer=2", "--n_embd=16", "--n_head=2", "--batch_size=8", "--micro_batch=4", "--eval_size=4", "--window=8",
       "--warmup_steps=2", "--device=cpu", "--dtype=float32"]
TASK = f"py:{ROOT / 'tests' / 'parity.py'}"
RL = ["train_rl.py", f"--task={TASK}", "--window=8", "--rope=reset", "--max_new_tokens=24", "--batch_prompts=3", "--group_size=4",
      "--lr=1e-3", "--eval_size=4", "--eval_every=2", "--filter_groups=False", "--micro_batch=5", "--device=cpu", "--dtype=float32"]


def start(args, processes=1):
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"] if processes > 1 else []
    return subprocess.Popen([sys.executable, *launch, *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def script(args, **kwargs):
    code, out, err = finish(start(args, **kwargs))
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def rows(out_dir):
    """The log without what depends on the time of day."""
    with open(out_dir / "log.csv", encoding="utf-8", newline="") as file:
        return [{key: value for key, value in row.items() if key not in TIMES} for row in csv.DictReader(file)]


def weights(out_dir):
    with safe_open(out_dir / "last" / "model.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def same(a, b):
    assert rows(a) == rows(b) and len(rows(a)) > 2
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    x, y = weights(a), weights(b)
    assert all(x[key].equal(y[key]) for key in x)


# ---------------------------------------------------------------------------------------------------------------------
# the optimizer

def test_small_updates_reach_bfloat16_weights():
    """At lr 1e-6, 100 steps move no bfloat16 weight near 1 that is updated in place; with masters the change arrives."""
    def run(**kwargs):
        torch.manual_seed(0)
        model = tiny_gpt(dtype=torch.bfloat16)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = training.Optimizer(model, lr=1e-6, **kwargs)
        for _ in range(100):
            model(torch.tensor([[1, 2, 3, 4]])).float().log_softmax(-1)[0, :, 7].sum().backward()
            assert all(p.grad is None for p in model.parameters())                    # each went to its float32 sum at once
            optimizer.step(1e-6, 1.0)
        return model, before, optimizer

    model, before, optimizer = run(master_device="cpu")
    for name, p in model.named_parameters():
        master = optimizer.masters[name]
        assert master.dtype == torch.float32 and (master - before[name].float()).abs().max() > 5e-5
        assert p.equal(master.bfloat16())
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_gradients_are_summed_in_float32():
    """256 gradients of 1 and then 64 of 2**-9 each: in bfloat16 the small ones would be lost one by one."""
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = training.Optimizer(model, lr=0.0)
    for x in [1.0] * 4 + [2.0**-9] * 64:
        model(torch.tensor([[x]], dtype=torch.bfloat16)).sum().backward()
    assert optimizer.masters["weight"].grad.item() == 4 + 64 * 2.0**-9


def test_float32_is_its_own_master_and_equals_adamw():
    model, twin = tiny_gpt(dtype=torch.float32), tiny_gpt(dtype=torch.float32)
    optimizer = training.Optimizer(model, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    matrices = [p for p in twin.parameters() if p.dim() == 2], [p for p in twin.parameters() if p.dim() == 1]
    peer = torch.optim.AdamW([dict(params=matrices[0], weight_decay=0.1), dict(params=matrices[1], weight_decay=0.0)], betas=(0.9, 0.99))
    idx = torch.randint(61, (2, 9))
    for step in range(5):
        for group in peer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        losses = [m(idx).log_softmax(-1)[..., 3].mean() for m in (model, twin)]
        for loss in losses:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        assert optimizer.step(1e-2 / (step + 1), 0.05) == pytest.approx(norm.item())
        peer.step()
        peer.zero_grad()
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert optimizer.masters["model.norm.weight"] is model.model.norm.weight


def test_optimizer_refusals(tmp_path, capsys):
    with pytest.raises(ValueError, match="float16 has too little range"):
        training.Optimizer(tiny_gpt(dtype=torch.float16), lr=1e-3)
    model = tiny_gpt(dtype=torch.float32)
    optimizer = training.Optimizer(model, lr=1e-3)
    before = model.lm_head.weight.clone()
    model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, float("nan"))
    with pytest.raises(ValueError, match="gradient norm is nan"):
        optimizer.step(1e-3, 1.0)
    assert model.lm_head.weight.equal(before)
    optimizer.load(tmp_path / "optimizer.safetensors")                                # weights without optimizer
    assert "the optimizer starts fresh" in capsys.readouterr().err


def test_learning_rates_by_hand():
    assert [training.learning_rate(s, 1.0, 4, "linear", 12) for s in (0, 1, 3, 4, 8, 11)] == [0.25, 0.5, 1, 1, 0.5, 0.125]
    assert [training.learning_rate(s, 1.0, 0, "constant", 12) for s in (0, 11)] == [1, 1]


def test_what_a_log_holds_is_cut_back_line_by_line(tmp_path):
    """Characters that Python takes for ends of lines, and JSON does not, may stand in what a model wrote; the last line may be cut."""
    log = training.Log(tmp_path, 0)
    for step in range(3):
        log.row(step=step, loss=0.5, empty=None)
        log.sample(step=step, text="a\x85b\u2028c\u2029d\x0be")
    with open(tmp_path / "samples.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 1, "te')
    log = training.Log(tmp_path, 2)
    log.row(step=2, loss=0.25, empty=1)
    assert [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_bytes().split(b"\n")[:-1]] == [0, 1]
    assert (tmp_path / "log.csv").read_text() == "step,loss,empty\n0,0.5,\n1,0.5,\n2,0.25,1\n"


def test_a_checkpoint_is_synced_before_it_is_the_last(tmp_path, monkeypatch):
    """Everything in it first, then its name, then the link; folders that are not checkpoints stay."""
    write_tokenizer(tmp_path / "tokenizer")
    model, done = tiny_gpt(dtype=torch.float32), []
    optimizer = training.Optimizer(model, lr=1e-3)
    (tmp_path / "step_000001_best").mkdir()
    (tmp_path / "step_notes.txt").write_text("mine")
    monkeypatch.setattr(training, "sync", lambda folder: done.append((folder.name, sorted(p.name for p in tmp_path.glob("*")))))
    for step in (1, 2):
        training.save_run(tmp_path, step, model, optimizer, {}, tmp_path / "tokenizer")
    kept = ["step_000001_best", "step_notes.txt", "tokenizer"]
    files = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json", "tokenizer_config.json"}
    second = done[len(done) // 2:]
    assert {name for name, _ in second[:-2]} == files
    assert second[-2] == ("saving.tmp", sorted(["last", "saving.tmp", "step_000001", *kept]))
    assert second[-1] == (tmp_path.name, sorted(["last", "step_000001", "step_000002", *kept]))
    assert sorted(p.name for p in tmp_path.glob("*")) == sorted(["last", "step_000002", *kept])
    assert (tmp_path / "last").resolve().name == "step_000002"


@pytest.mark.parametrize("prefix_len", [None, 3])
def test_the_loss_of_the_warm_start(monkeypatch, prefix_len):
    """Against a loss written out token by token: every answer token and the end token, no prompt token, whatever the micro-batches."""
    model, batch = tiny_gpt(), [([1, 2, 3, 4, 5, 6, 7, 8, 9], 4), ([9, 8, 7, 6, 5], 2), ([3, 1, 4], 2)]
    examples = [train_sft.Example(ids[:n], ids[n:]) for ids, n in batch]
    monkeypatch.setattr(train_sft, "window", 3)
    monkeypatch.setattr(train_sft, "prefix_len", prefix_len)
    want = 0.0
    for ids, n in batch:
        logp = model(torch.tensor([ids]), n if prefix_len is None else prefix_len, 3, rope="reset")[0].log_softmax(-1)
        want = want - sum(logp[t - 1, ids[t]] for t in range(n, len(ids))) / 9
    grads = torch.autograd.grad(want, list(model.parameters()))
    for size in (1, 2, 3):
        monkeypatch.setattr(train_sft, "micro_batch", size)
        loss, _ = train_sft.batch_loss(model, examples)
        assert loss == pytest.approx(want.item())
        assert all(torch.allclose(p.grad, g, rtol=1e-9, atol=1e-12) for p, g in zip(model.parameters(), grads, strict=True))
        model.zero_grad()


def test_a_solution_ends_with_the_end_token(smollm2):
    tokenizer = load_tokenizer(smollm2)
    example = train_sft.encode(Problem("1 + 1?", "2", "It is 2."), tokenizer)
    assert example.answer[-1] == tokenizer.eos_id == tokenizer.token_id("<|im_end|>")
    assert tokenizer.decode(example.answer[:-1]) == "It is 2."
    assert tokenizer.decode(example.prompt).endswith("1 + 1?<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="no worked solution"):
        train_sft.encode(Problem("1 + 1?", "2"), tokenizer)


# ---------------------------------------------------------------------------------------------------------------------
# runs

@pytest.mark.parametrize("dtype, fork", [
    ("float32", ["-m", "forks.stale_rollouts", "--async_level=1"]), ("float32", ["-m", "forks.kl_penalty", "--kl_coef=0.01"]),
    ("bfloat16", ["train_rl.py"])])
def test_two_and_two_steps_equal_four(untrained, tmp_path, dtype, fork):
    """Moments, masters, the place among the problems and the batches that wait (async_level) all survive."""
    args = [*fork, *RL[1:], f"--init_from={untrained}", "--save_every=2", f"--dtype={dtype}"]
    script([*args, f"--out_dir={tmp_path / 'whole'}", "--max_steps=4"])
    script([*args, f"--out_dir={tmp_path / 'parts'}", "--max_steps=2"])
    shutil.copytree(tmp_path / "parts", tmp_path / "killed", symlinks=True)
    with open(tmp_path / "killed" / "log.csv", "a", encoding="utf-8") as file:        # a row and a half that no checkpoint knows of
        file.write("2,0.5,0.5,1\n3,0.")
    for name in ("parts", "killed"):
        script([*args, f"--out_dir={tmp_path / name}", "--max_steps=4", "--init_from=resume"])
        same(tmp_path / "whole", tmp_path / name)
    assert [p.name for p in (tmp_path / "parts").glob("step_*")] == ["step_000004"]


@pytest.mark.parametrize("script_args", [SFT, RL], ids=["sft", "rl"])
def test_killed_at_any_moment(untrained, tmp_path, script_args):
    """SIGKILL at random moments until the run is through: its log, samples and weights are those of a run that was never killed."""
    args = [*script_args, "--max_steps=12", "--save_every=1", "--eval_every=3"]
    first = [f"--init_from={untrained}"] if script_args is RL else []
    script([*args, *first, f"--out_dir={tmp_path / 'whole'}"])
    out, kills, rng = tmp_path / "killed", 0, random.Random(1)
    while True:
        process = start([*args, f"--out_dir={out}", *(["--init_from=resume"] if (out / "last").exists() else first)])
        if kills < 3:
            known = len(os.listdir(out)) if out.exists() else 0
            while process.poll() is None and not ((out / "last").exists() and len(os.listdir(out)) >= known):
                time.sleep(0.01)
            time.sleep(rng.uniform(0.5, 3.5))
            process.kill()
            kills += 1
        code, _, err = finish(process)
        if code == 0:
            break
        assert code == -signal.SIGKILL, err
    same(tmp_path / "whole", out)


def test_an_interrupted_run_saves_and_exits_0(untrained, tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM):
        out = tmp_path / number.name
        process = start([*RL, f"--init_from={untrained}", f"--out_dir={out}", "--max_steps=100000", "--save_every=100000"])
        while not (out / "log.csv").exists() or len(rows(out)) < 2:
            time.sleep(0.05)
        process.send_signal(number)
        code, stdout, err = finish(process)
        steps = json.loads(stdout.splitlines()[-1])["steps"]
        assert code == 0 and number.name in err and (out / "last").resolve().name == f"step_{steps:06d}"
        assert len(rows(out)) == steps


def test_two_processes_equal_one(untrained, tmp_path):
    """torchrun with gloo: the same rollouts, the same log, the same weights up to the order of sums."""
    for name, args in (("rl", [*RL, f"--init_from={untrained}", "--filter_groups=True", "--loss_on=all", "--carry=True"]), ("sft", SFT)):
        args = [*args, "--max_steps=3", "--eval_every=2"]
        one, two = (tmp_path / f"{name}{n}" for n in (1, 2))
        script([*args, f"--out_dir={one}"])
        script([*args, f"--out_dir={two}"], processes=2)
        for a, b in zip(rows(one), rows(two), strict=True):
            for key in a:
                assert (a[key] == b[key] == "") or float(a[key]) == pytest.approx(float(b[key]), rel=2e-3, abs=1e-6), (key, a, b)
        a, b = weights(one), weights(two)
        assert max((a[key] - b[key]).abs().max().item() for key in a) < 1e-4


def test_what_a_run_leaves_is_a_model(untrained, tmp_path):
    """sample.py and transformers read the checkpoint, tokenizer included."""
    script([*SFT, "--max_steps=2", f"--out_dir={tmp_path / 'out'}"])
    last = tmp_path / "out" / "last"
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "optimizer.safetensors", "state.json"} == set(
        os.listdir(last))
    result = script(["sample.py", f"--init_from={last}", "--start=Passes AF FA from 00 00 04 A", "--max_new_tokens=5", "--window=8",
                     "--rope=reset", "--device=cpu"])
    assert result["prompt_tokens"] == 8 and result["tokens"] <= 5
    from transformers import AutoModelForCausalLM, AutoTokenizer
    peer, tokenizer = AutoModelForCausalLM.from_pretrained(last), AutoTokenizer.from_pretrained(last)
    ids = tokenizer("Passes AF FA from 00 00 04 A")["input_ids"]
    assert ids == load_tokenizer(last).encode("Passes AF FA from 00 00 04 A")
    ours = GPT.from_pretrained(last)(torch.tensor([ids]))
    torch.testing.assert_close(ours, peer(torch.tensor([ids])).logits, rtol=1e-4, atol=1e-4)


def said(process):
    code, _, err = finish(process)
    lines = err.strip().splitlines()
    assert code == 2 and len(lines) == 1, err
    return lines[0]


def test_wrong_inputs(untrained, tmp_path):
    out = f"--out_dir={tmp_path / 'out'}"
    rl = [*RL, f"--init_from={untrained}", out]
    cases = [
        ([*RL, "--init_from=resume", out], "holds no checkpoint to resume from"),
        ([*RL, "--init_from=scratch", out], "init_from='scratch': must be a model that gets some answers right"),
        ([*rl, "--group_size=1"], "group_size=1: must be at least 2"),
        ([*rl, "--temperature=0"], "temperature=0.0: must be above 0"),
        (["-m", "forks.losses", *rl[1:], "--loss=ppo"], "loss='ppo': grpo, masked_is or dppo"),
        ([*rl, "--task=sudoku"], "task='sudoku'"),
        ([*rl, "--window=0"], "window"),
        ([*rl, "--reward={'speed': 1.0}"], "speed"),
        ([*rl, "--dtype=float16"], "float16 has too little range"),
        ([*SFT, out, "--tokenizer=data/passes_of_nobody"], "data/passes_of_nobody"),
        ([*SFT, out, "--schedule=cosine"], "schedule='cosine'"),
        ([*SFT, out, "--micro_batch=0"], "micro_batch=0: must be at least 1"),
        ([*rl, "--master_device=gpu"], "master_device='gpu'"),
        ([*rl, "--task=rated:no/rates.json"], "no/rates.json"),
        ([*rl, "--reward={'length': 1.0}"], "needs length_targets"),
        ([*RL, f"--init_from={untrained}", f"--out_dir={untrained}/config.json"], "config.json': File exists")]
    for k in range(0, len(cases), 2):                                                 # two at a time
        for (args, what), process in [(case, start(case[0])) for case in cases[k:k + 2]]:
            assert what in said(process), args
    (tmp_path / "out").mkdir(exist_ok=True)
    script([*rl, "--max_steps=1"])
    assert "holds a run already" in said(start(rl))
    assert "holds a run of train_rl.py, not of train_sft.py" in said(start([*SFT, out, "--init_from=resume"]))
    assert "window=8 has become 9: that is another run" in said(start([*rl, "--init_from=resume", "--window=9"]))
    process = start([*rl, "--init_from=resume", "--max_steps=1", "--lr=0.5"])
    assert "lr=0.001 has become 0.5" in finish(process)[1 + 1]


def test_a_run_on_problems_of_some_pass_rates(untrained, tmp_path):
    """It samples those problems only, and goes on with no others."""
    held = dict(task=TASK, seed=1, held_out=False)
    (tmp_path / "rates.json").write_text(json.dumps(held | {"rates": {"3": 0.5, "4": 0.0, "7": 0.75, "8": 1.0}}))
    run = [*RL, f"--out_dir={tmp_path / 'out'}", "--eval_every=0", "--samples_per_step=99"]
    rated = f"--task=rated:{tmp_path / 'rates.json'}?min_pass=0.5"
    script([*run, f"{rated}&max_pass=0.75", f"--init_from={untrained}", "--max_steps=2"])
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    problems = load_task(TASK, 1).problem
    assert len(samples) == 24 and {s["prompt"] for s in samples} == {problems(3).prompt, problems(7).prompt}
    assert f"has become {rated[7:]!r}: that is another run" in said(start([*run, rated, "--init_from=resume"]))


def test_the_plan(untrained, tmp_path):
    """Prints a line per kind of memory, trains one step on the longest completions, and leaves no run behind."""
    process = start(["-m", "lab.plan", *RL[1:], f"--init_from={untrained}", f"--out_dir={tmp_path / 'out'}", "--carry=True",
                     "--context_mult=1"])
    code, out, err = finish(process)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["weights_bytes"] == sum(t.nbytes for t in GPT.from_pretrained(untrained).parameters()) == result["gradients_bytes"]
    assert result["moments_bytes"] == 2 * result["weights_bytes"] and result["peak_memory_bytes"] > 0
    P, W = len(load_tokenizer(untrained).encode(load_task(TASK).problem(0).prompt)), 8
    config = GPT.from_pretrained(untrained).config
    assert result["sampling_cache_bytes"] == 12 * 2 * config.n_layer * config.n_kv_head * config.head_dim * 4 * (P + W)
    assert not (tmp_path / "out" / "last").exists()


@pytest.mark.parametrize("config, changes", [
    ("rl_qwen3_1p7b_80gb", dict(qk_norm=True, tied=True)), ("rl_r1_distill_1p5b_24gb", dict(qkv_bias=True)),
    ("rl_smollm2_cpu", dict(tied=True)), ("rl_passes", dict(qk_norm=True))])
def test_configs_train_a_tiny_model_of_their_architecture(tmp_path, config, changes):
    folder = tmp_path / "model"
    write_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    sizes = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=8, n_inner=48)
    GPT(GPTConfig(vocab_size=tokenizer.n_vocab, eos_ids=tuple(tokenizer.eos_ids), **sizes, **changes)).save_pretrained(folder)
    family = json.loads((folder / "config.json").read_text())["model_type"]
    assert family == {"qwen3": "qwen3", "r1": "qwen2", "smollm2": "llama", "passes": "qwen3"}[config.split("_")[1]]
    result = script(["train_rl.py", f"config/{config}.py", f"--init_from={folder}", f"--out_dir={tmp_path / 'out'}", "--max_new_tokens=20",
                     "--window=8", "--batch_prompts=2", "--group_size=2", "--max_steps=2", "--eval_size=2", "--device=cpu",
                     f"--task={TASK}", "--eval_every=1"])
    assert result["steps"] == 2 and len(rows(tmp_path / "out")) == 3
