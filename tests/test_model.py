"""model.py against transformers, on tiny random weights: logits, windows, files, and what must be refused."""

import json

import pytest
import torch
import transformers
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from util import tiny_gpt

from attention import visible
from checkpoint import hf_config, local_folder, read_config
from device import device_and_dtype
from model import GPT, GPTConfig, rope_frequencies

BASE = dict(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    vocab_size=99,
    max_position_embeddings=64,
    initializer_range=0.2,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
MODELS = {
    "llama": LlamaConfig(**BASE),
    "llama, tied": LlamaConfig(**BASE, tie_word_embeddings=True),
    "llama, head_dim 6": LlamaConfig(**BASE, head_dim=6),
    "llama, one key head": LlamaConfig(**BASE | dict(num_key_value_heads=1)),
    "llama3 scaling": LlamaConfig(**BASE, rope_parameters=LLAMA3),
    "yarn scaling": LlamaConfig(**BASE | dict(max_position_embeddings=256), rope_parameters=YARN),
    "yarn, given factors": Qwen2Config(
        **BASE | dict(max_position_embeddings=256),
        rope_parameters=YARN | dict(attention_factor=1.3, beta_fast=16, beta_slow=2, truncate=False),
    ),
    "yarn, mscale": LlamaConfig(**BASE | dict(max_position_embeddings=256), rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.2)),
    "qwen2": Qwen2Config(**BASE),
    "qwen2, tied": Qwen2Config(**BASE, tie_word_embeddings=True),
    "qwen2, its window unused": Qwen2Config(**BASE, sliding_window=5, use_sliding_window=False),
    "qwen2, its own window": Qwen2Config(**BASE, sliding_window=5, use_sliding_window=True, max_window_layers=1),
    "qwen3": Qwen3Config(**BASE, head_dim=16),
    "qwen3, tied": Qwen3Config(**BASE, head_dim=20, tie_word_embeddings=True),
}


def hf_model(config, seed=0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # norms and biases begin as ones and zeros: a dropped one would not show
                p.add_(torch.randn_like(p) * (0.5 if name.endswith("bias") else 0.1))
    return model


def read(folder, contents):
    """The GPTConfig of a config.json with these contents."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(contents))
    return GPTConfig(**read_config(folder))


@pytest.fixture
def save(tmp_path):
    def save(config, **kwargs):
        model = hf_model(config)
        model.save_pretrained(tmp_path / "hf", **kwargs)
        return model, tmp_path / "hf"

    return save


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_equal_transformers(name, save):
    hf, folder = save(MODELS[name])
    model = GPT.from_pretrained(folder)
    idx = torch.randint(99, (2, 300), generator=torch.Generator().manual_seed(1))  # several times the original length
    want = hf(idx).logits
    assert (model(idx) - want).abs().max() < 2e-4 and want.std() > 0.5
    far = torch.arange(30_000, 30_300)[None].expand(2, -1)  # tables built in bfloat16 are off by radians here
    assert (model(idx, positions=far) - hf(idx, position_ids=far).logits).abs().max() < 2e-4


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3, tied"])
@torch.no_grad()
def test_windows_equal_transformers_under_the_same_mask(name, save):
    hf, folder = save(MODELS[name])
    model = GPT.from_pretrained(folder)
    idx = torch.randint(99, (3, 90))
    i, j = torch.arange(90)[:, None], torch.arange(90)
    for P, W in ((torch.tensor([0, 7, 100]), 10), (torch.tensor([3, 3, 3]), 1), (torch.tensor([50, 1, 0]), None)):
        mask = torch.stack([visible(i, j, p, W) for p in P.tolist()])[:, None]  # (B, 1, T, T)
        assert (model(idx, P, W) - hf(idx, attention_mask=mask).logits).abs().max() < 2e-4


@torch.no_grad()
def test_shards(save):
    hf, folder = save(MODELS["llama"], max_shard_size="30KB")
    idx = torch.randint(99, (1, 20))
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert (GPT.from_pretrained(folder)(idx) - hf(idx).logits).abs().max() < 2e-4
    absent = sorted(folder.glob("*.safetensors"))[1]
    absent.unlink()
    with pytest.raises(FileNotFoundError, match=absent.name):
        GPT.from_pretrained(folder)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_transformers_loads_what_we_save(name, save, tmp_path):
    _, folder = save(MODELS[name])
    model = GPT.from_pretrained(folder)
    model.save_pretrained(tmp_path / "ours")
    idx = torch.randint(99, (2, 100))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert (again(idx).logits - model(idx)).abs().max() < 2e-4
    assert GPT.from_pretrained(tmp_path / "ours").config == model.config
    assert [p.name for p in sorted((tmp_path / "ours").iterdir())] == ["config.json", "model.safetensors"]


def test_oldest_config_files(save, tmp_path):
    """Hub files carry rope_theta and rope_scaling, with "type" in the oldest; eos_token_id may be a list."""
    _, folder = save(MODELS["yarn scaling"])
    d = json.loads((folder / "config.json").read_text())
    rope = d.pop("rope_parameters")
    d |= dict(rope_theta=rope.pop("rope_theta"), rope_scaling=dict(rope, type=rope.pop("rope_type")), eos_token_id=[3, 5])
    old, new = read(tmp_path / "old", d), GPT.from_pretrained(folder).config
    assert torch.equal(rope_frequencies(old)[0], rope_frequencies(new)[0]) and rope_frequencies(old)[1] == rope_frequencies(new)[1] > 1
    assert old.eos_ids == (3, 5)


def test_tied_head_stored_or_absent(save):
    from safetensors.torch import load_file, save_file

    hf, folder = save(MODELS["llama, tied"])
    path = folder / "model.safetensors"
    weights = load_file(path)
    assert "lm_head.weight" not in weights
    idx = torch.randint(99, (1, 9))
    with torch.no_grad():
        save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
        assert (GPT.from_pretrained(folder)(idx) - hf(idx).logits).abs().max() < 2e-4
        save_file({f"_orig_mod.{k}": v for k, v in weights.items()}, path)  # saved from a compiled model
        model = GPT.from_pretrained(folder)
        assert (model(idx) - hf(idx).logits).abs().max() < 2e-4 and model.lm_head.weight is model.model.embed_tokens.weight
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        GPT.from_pretrained(folder)


@pytest.mark.parametrize(
    "name, damage, message",
    [
        ("llama", lambda w: w.pop("lm_head.weight"), "1 tensors are missing: lm_head.weight"),
        ("qwen2", lambda w: w.pop("model.layers.1.self_attn.k_proj.bias"), "missing: model.layers.1.self_attn.k_proj.bias"),
        ("llama", lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}), "not used by this model: .*q_proj.bias"),
        ("llama", lambda w: w.update({"model.norm.weight": torch.zeros(47)}), r"model.norm.weight is \(47,\), the model wants \(48,\)"),
    ],
)
def test_wrong_tensors_are_named(name, damage, message, save):
    from safetensors.torch import load_file, save_file

    _, folder = save(MODELS[name])
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model_type="mamba"), "model_type 'mamba'"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (dict(vocab_size=-5), "vocab_size=-5"),
        (dict(num_hidden_layers="2"), "num_hidden_layers='2'"),
        (dict(sliding_window=-4), "sliding_window=-4"),
        (dict(model_type=["llama"]), "model_type"),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=0)), "rope_theta=0"),
        (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "one set for all layers"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(hidden_size=None), "hidden_size=None"),
        (dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4)), "rope scaling 'longrope'"),
        (dict(num_key_value_heads=3), "n_kv_head=3"),
        (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "'yarn' lacks factor"),
        (dict(head_dim=7), "head_dim=7"),
    ],
)
def test_unsupported_configs_are_named(change, message, save):
    _, folder = save(MODELS["llama"])
    d = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(d | change))
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(folder)


def test_damaged_and_absent_files(save, tmp_path):
    _, folder = save(MODELS["llama"])
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        GPT.from_pretrained(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="holds no model.safetensors"):
        GPT.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON in UTF-8"):
        GPT.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        GPT.from_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="neither a folder here"):
        GPT.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "prepare.py").touch()
    with pytest.raises(FileNotFoundError, match="run .python .*prepare.py"):
        local_folder(tmp_path, [])


def test_windows_of_hub_files(tmp_path):
    """Hub files of Qwen2 say sliding_window 32768 and use_sliding_window false, and name no layer_types."""
    d = hf_model(MODELS["qwen2"]).config.to_dict()
    d |= dict(layer_types=None, sliding_window=32768, use_sliding_window=False, max_window_layers=0)
    assert read(tmp_path, d).windows == (None, None, None)
    assert read(tmp_path, d | dict(use_sliding_window=True, max_window_layers=1)).windows == (None, 32768, 32768)
    del d["max_window_layers"]
    assert read(tmp_path, d | dict(use_sliding_window=True)).windows == (None,) * 3


def test_end_tokens_and_defaults_survive_a_save(tmp_path):
    model = tiny_gpt(dtype=torch.float32, eos_ids=(3, 5))
    model.save_pretrained(tmp_path)
    assert GPT.from_pretrained(tmp_path).config.eos_ids == (3, 5) and not GPT.from_pretrained(tmp_path).training
    d = hf_config(GPTConfig(qk_norm=True))
    del d["head_dim"]
    assert read(tmp_path, d).head_dim == 128  # Qwen3's default is not n_embd / n_head
    old = dict(d, rope_scaling=dict(rope_type="yarn", factor=2.0), max_position_embeddings=64)
    assert read(tmp_path, old).rope_scaling["original_max_position_embeddings"] == 64
    for ids, want in ((None, ()), (0, (0,)), ([7, 0], (7, 0))):
        assert read(tmp_path, d | dict(eos_token_id=ids)).eos_ids == want


@torch.no_grad()
def test_norms_of_half_precision_models_are_float32(save):
    """The mean of squares overflows float16 from 256 on, and bfloat16 has two digits."""
    norm = tiny_gpt(dtype=torch.float16).model.norm
    x = torch.full((1, 1, 32), 1000.0).half()
    assert torch.equal(norm(x), torch.ones(1, 1, 32).half())


def test_a_save_replaces_older_shards(save):
    """The index of sharded weights wins over model.safetensors: left where it was, it brought the old weights back."""
    _, folder = save(MODELS["llama"], max_shard_size="30KB")
    model = GPT.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(folder)
    assert not GPT.from_pretrained(folder).lm_head.weight.any()


def test_sizes_follow_from_each_other():
    c = GPTConfig(n_head=6, n_embd=384)
    assert (c.n_kv_head, c.head_dim, c.n_inner) == (6, 64, 1152)
    wrong = (
        (dict(n_kv_head=0), "at least 1"),
        (dict(n_layer=0), "at least 1"),
        (dict(n_head=6, n_kv_head=4), "n_kv_head=4"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "rope scaling 'linear' is not supported"),
        (dict(windows=(8, None)), "windows has 2 entries"),
    )
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            GPTConfig(**change)
    with pytest.raises(ValueError, match="none in a Llama"):
        hf_config(GPTConfig(windows=(None, 8, None, 8)))


def test_training_under_autocast():
    """The residual is float32 there and the values are bfloat16: queries and keys must come as the values do."""
    model = tiny_gpt(dtype=torch.float32, qk_norm=True)
    idx = torch.randint(61, (2, 40))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, 3, 8, rope="reset").float().square().mean()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_save_that_fails_leaves_the_old_files(tmp_path, monkeypatch):
    model = tiny_gpt(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(weights, file, metadata):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("model.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before and len(list(tmp_path.iterdir())) == 2


def test_angles_stay_float32():
    """RoPE frequencies rounded to bfloat16 turn position 32,768 by radians too much."""
    model = tiny_gpt()
    freqs = model.freqs.clone()
    assert torch.equal(model.bfloat16().freqs, freqs) and freqs.dtype == torch.float32
    assert torch.equal(model.double().freqs, freqs)


def test_a_model_from_scratch_starts_near_uniform():
    config = GPTConfig(n_layer=4, qk_norm=True, tied=False)
    torch.manual_seed(0)
    model = GPT(config)
    idx = torch.randint(257, (4, 64))
    loss = torch.nn.functional.cross_entropy(model(idx[:, :-1]).flatten(0, 1), idx[:, 1:].flatten())
    assert abs(loss.item() - torch.log(torch.tensor(257.0)).item()) < 0.1
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_float64_is_float64_throughout():
    """At least float32 does not mean float32: a float64 model is the reference of many tests."""
    model, single = tiny_gpt(), tiny_gpt().float()
    idx = torch.randint(61, (1, 30))
    with torch.no_grad():
        assert model(idx).dtype == torch.float64 and 1e-8 < (model(idx) - single(idx)).abs().max() < 1e-4
        model2 = tiny_gpt()
        next(model2.parameters())[idx[0, 0], 0] += 1e-12
        assert 0 < (model(idx) - model2(idx)).abs().max() < 1e-9


def test_device_and_dtype():
    assert device_and_dtype("cpu") == (torch.device("cpu"), torch.float32)
    for args, message in ((("cdua",), "device='cdua'"), (("cpu", "fp16"), "dtype='fp16'")):
        with pytest.raises(ValueError, match=message):
            device_and_dtype(*args)
