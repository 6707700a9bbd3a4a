"""sample.py from the command line and in process, on a tiny model with a byte-level tokenizer saved to disk."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import sample
from engine import POLICIES, generate
from model import GPT, GPTConfig
from sliding_cache import row_bytes
from tokenizer import load_tokenizer

SMALL = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=16, head_dim=8, n_inner=32, tokenizer="bytes", eos_ids=(256,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tiny")
    GPT(GPTConfig(**SMALL)).save_pretrained(path)
    return path


def arguments(folder, *args):
    common = ["--device=cpu", "--chat=False", "--start=abc", "--max_new_tokens=40", "--window=8"]
    return [sys.executable, "sample.py", f"--init_from={folder}", *common, *args]


def command(folder, *args, **how):
    return subprocess.run(arguments(folder, *args), cwd=ROOT, capture_output=True, text=True, **how)


def test_end_to_end(folder):
    """The text is what generate gives, the numbers are what the formulas give, the last line is JSON."""
    result = command(folder, "--num_samples=2")
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    tokenizer, model = load_tokenizer(folder), GPT.from_pretrained(folder)
    done = generate(model, [list(b"abc")] * 2, 40, window=8, stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab, seed=1337)
    for i, c in enumerate(done):
        assert f"--- sample {i + 1}\nabc{''.join(tokenizer.stream(t for t in c.tokens if t != 256))}\n" in result.stdout
    n = [len(c.tokens) for c in done]
    assert last["tokens"] == sum(n) and last["finish_reasons"] == [c.finish_reason for c in done]
    assert last["cache_bytes"] == 2 * row_bytes(model.config, [8, 8], 3, None, torch.float32) == 2 * 2 * 2 * 1 * 11 * 8 * 4
    assert last["full_attention_bytes"] == 2 * 2 * 2 * 1 * (3 + max(n)) * 8 * 4
    assert last["tokens_per_s"] > 0 and last["peak_memory_bytes"] > 1e8 and last["prompt_tokens"] == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_and_prompts_from_files(folder, policy, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompt.txt").write_text("žluťoučký kůň", encoding="utf-8")
    for key, value in dict(
        init_from=str(folder), device="cpu", chat=False, start=f"FILE:{tmp_path}/prompt.txt", max_new_tokens=60, window=6, policy=policy
    ).items():
        monkeypatch.setattr(sample, key, value)
    sample.main()
    out = capsys.readouterr().out
    prompt = list("žluťoučký kůň".encode())
    c = generate(GPT.from_pretrained(folder), [prompt], 60, stop_ids=[256], n_vocab=257, seed=1337, **(dict(window=6) | POLICIES[policy]))[
        0
    ]
    assert out.startswith("žluťoučký kůň" + "".join(load_tokenizer(folder).stream(t for t in c.tokens if t != 256)))
    last = json.loads(out.splitlines()[-1])
    assert last["policy"] == policy and last["prompt_tokens"] == len(prompt)
    kept = {"prefix_sliding": len(prompt) + 6, "random": len(prompt) + 6, "sliding": 6, "streaming": 10, "full": len(prompt) + 60}[policy]
    assert last["cache_bytes"] == 2 * 2 * 1 * kept * 8 * 4


def test_ids_that_the_tokenizer_lacks_are_never_drawn(tmp_path, monkeypatch, capsys):
    """An embedding with more rows than the tokenizer has entries, as Qwen's."""
    torch.manual_seed(1)
    GPT(GPTConfig(vocab_size=4000, **SMALL)).save_pretrained(tmp_path)
    kept = []
    monkeypatch.setattr(sample, "generate", lambda *args, **kwargs: kept.extend(generate(*args, **kwargs)) or kept)
    for key, value in dict(init_from=str(tmp_path), device="cpu", chat=False, window=8, max_new_tokens=50, top_p=1.0).items():
        monkeypatch.setattr(sample, key, value)
    sample.main()
    assert max(kept[0].tokens) < 257 and capsys.readouterr().out


def test_stop_strings_that_overlap(folder):
    """With stops "ab!?" and "b" the screen once waited for what follows while the engine had stopped: later samples never came."""
    model, tokenizer = GPT.from_pretrained(folder), load_tokenizer(folder)
    c = generate(model, [list(b"abc")], 40, window=8, stop_ids=tokenizer.eos_ids, n_vocab=257, seed=1337)[0]
    text = tokenizer.decode(t for t in c.tokens if 32 < t < 127)
    result = command(folder, "--num_samples=3", f"--stop={[text[0] + '!?', text[0]]!r}")
    assert result.returncode == 0 and all(f"--- sample {i}\nabc" in result.stdout for i in (1, 2, 3)), result.stdout


def test_stop_strings_are_not_shown(folder, monkeypatch, capsys):
    for key, value in dict(
        init_from=str(folder), device="cpu", chat=False, start="abc", max_new_tokens=400, min_new_tokens=400, window=8, temperature=1.5
    ).items():
        monkeypatch.setattr(sample, key, value)
    sample.main()
    free = capsys.readouterr().out.rsplit("\n1 x ", 1)[0]
    end = free[200:202]
    monkeypatch.setattr(sample, "stop", [end])
    sample.main()
    out = capsys.readouterr().out
    assert out.rsplit("\n1 x ", 1)[0] == "abc" + free[3 : 3 + free[3:].index(end)] and json.loads(out.splitlines()[-1])[
        "finish_reasons"
    ] == ["stop"]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--windw=8"], "did you mean 'window'"),
        (["--window=0"], "window=0: a window is None"),
        (["--window=wide"], "window wants int or list or None"),
        (["--start=FILE:none.txt"], "'none.txt': No such file"),
        (["--init_from=nowhere"], "'nowhere' is neither a folder"),
    ],
)
def test_bad_input_ends_in_one_line(folder, args, message):
    result = command(folder, *args)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and message in result.stderr and not result.stdout, result.stderr


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(policy="prefix"), "policy='prefix': one of prefix_sliding, full"),
        (dict(top_p=0), "top_p=0"),
        (dict(start=""), "prompt 0 is empty"),
        (dict(num_samples=0), "num_samples=0"),
        (dict(device="tpu9"), "device='tpu9'"),
        (dict(dtype="int8"), "dtype='int8'"),
        (dict(window=[4]), "1 entries"),
        (dict(show=True), "needs a terminal"),
        (dict(max_think=5), "need a </think> token"),
        (dict(window=None, max_new_tokens=10**11), r"cache needs \d+"),
    ],
)
def test_bad_values_are_named(folder, change, message, monkeypatch):
    for key, value in (dict(init_from=str(folder), device="cpu", chat=False, window=8) | change).items():
        monkeypatch.setattr(sample, key, value)
    with pytest.raises(ValueError, match=message):
        sample.main()


def test_show_colours_tokens_by_where_they_are(folder):
    """In a real terminal (a pty of 24 x 80): prefix, dropped and window in three colours, in that order, and the right counts."""
    parent, child = pty.openpty()
    env = os.environ | dict(COLUMNS="80", LINES="24")
    args = arguments(folder, "--max_new_tokens=30", "--min_new_tokens=30", "--show=True")
    process = subprocess.Popen(args, cwd=ROOT, stdout=child, stderr=child, env=env)
    os.close(child)
    out = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        out += piece
    os.close(parent)
    assert process.wait() == 0, out
    frames = out.decode().split("\x1b[H\x1b[2J")
    assert len(frames) == 1 + 30
    colours = re.findall(r"\x1b\[(1;36|1;37|90)m", frames[-1])
    assert "".join({"1;36": "p", "1;37": "w", "90": "d"}[c] for c in colours).replace("\n", "").count("w") >= 8
    assert [c for i, c in enumerate(colours) if i == 0 or c != colours[i - 1]] == ["1;36", "90", "1;37"]
    assert "33 tokens, 11 in memory, 22 dropped" in frames[-1]
