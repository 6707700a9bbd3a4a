"""
The files of a model on disk: found, read strictly, and written so that nobody ever meets half a file.

    folder = local_folder("Qwen/Qwen3-1.7B", MODEL_FILES)      # or a folder here
    config = GPTConfig(**read_config(folder))                  # config.json, checked
    weights = read_weights(folder, shapes, dtype, device)      # every tensor of every .safetensors file

What is missing, damaged or not supported ends in a FileNotFoundError or ValueError of one line that names it.
"""
import hashlib
import json
import os
import re
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

MODEL_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json"]
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# A size's name in config.json, and in GPTConfig
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_len",
}
MAY_BE_ABSENT = ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers")

# What model.py leaves out, and the value of config.json that says that it is not needed
LEFT_OUT = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}


# --------------------------------------------------------------------------------------------------
# finding and reading files

def local_folder(path_or_hub_name, patterns):
    """The folder (a Path) that a model's name stands for: itself if it is one here, else what the hub has
    of it that matches `patterns`, a list, downloaded or cached. FileNotFoundError if neither, or if its
    prepare.py was not run. Without a network that takes 11 seconds at most."""
    name, folder = str(path_or_hub_name), Path(path_or_hub_name)
    if folder.is_dir():
        is_there = any(any(folder.glob(pattern)) for pattern in patterns)
        if (folder / "prepare.py").exists() and not is_there:
            raise FileNotFoundError(f"{name} is not prepared yet: run `python {folder / 'prepare.py'}` first")
        return folder
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise FileNotFoundError(f"{name!r} is neither a folder here nor a hub name such as Qwen/Qwen3-1.7B")
    from huggingface_hub import HfApi, snapshot_download

    # snapshot_download asks the hub without a time limit and may hang for ever: one with a limit goes first.
    # Both raise whatever the HTTP library of their version raises.
    offline = None
    try:
        HfApi().model_info(name, timeout=8)
    except Exception as error:
        offline = error  # the cache may still have the files
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=offline is not None))
    except Exception as error:
        reason = " ".join(str(offline or error).split())
        raise FileNotFoundError(
            f"{name!r} is neither a folder here nor could it be fetched from the hub: {reason}") from None


def read_json(path, missing=None):
    """The JSON object in a file. FileNotFoundError if there is no such file, unless `missing` is given to
    stand for it; ValueError if it holds anything else."""
    if not path.is_file():
        if missing is not None:
            return missing
        raise FileNotFoundError(f"{path} is missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


# --------------------------------------------------------------------------------------------------
# config.json

def read_config(folder):
    """What the config.json of a folder (a Path) says, as a dict of the arguments of GPTConfig. ValueError
    names what is missing or not supported. GPTConfig itself checks that the sizes fit each other."""
    path = folder / "config.json"
    found = read_json(path)
    family = found.get("model_type")
    if family not in list(FAMILIES):
        raise ValueError(f"{path}: model_type {family!r} is not supported, only {', '.join(FAMILIES)}")
    for key, value in LEFT_OUT.items():
        if found.get(key) not in (None, value):
            raise ValueError(f"{path}: {key}={found[key]!r} is not supported, only {value!r}")

    sizes = read_sizes(found, path)
    if family == "qwen3" and sizes["head_dim"] is None:
        sizes["head_dim"] = 128
    theta, scaling = read_rope(found, path)
    return sizes | dict(
        norm_eps=found.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=found.get("tie_word_embeddings", False),
        windows=read_windows(found),
        eos_ids=tuple(end_ids(found)),
        tokenizer=found.get("tokenizer"),
    )


def read_sizes(found, path):
    for key in (*SIZES, *MAY_BE_ABSENT):
        size = found.get(key)
        if size is None and key in MAY_BE_ABSENT:
            continue
        if type(size) is not int or size < 0:
            raise ValueError(f"{path}: {key}={size!r} is no whole number")
    return {ours: found.get(key) for key, ours in SIZES.items()}


def read_rope(found, path):
    """RoPE's base and its scaling, a dict or None. transformers 5 writes both into rope_parameters; older
    files have rope_theta and rope_scaling, the oldest with "type" for "rope_type"."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{path}: rope parameters {rope!r} are not supported, only one set for all layers")
    theta = rope.pop("rope_theta", found.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float) or theta <= 1:
        raise ValueError(f"{path}: rope_theta={theta!r} is no number above 1")
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("original_max_position_embeddings", found["max_position_embeddings"])
    return theta, None if rope["rope_type"] == "default" else rope


def read_windows(found):
    """The windows that the layers were trained with, or None. Many files name a sliding_window and do not
    use it."""
    window = found.get("sliding_window")
    if not window or not found.get("use_sliding_window"):
        return None
    layer_types = found.get("layer_types")
    if layer_types:
        return tuple(window if layer == "sliding_attention" else None for layer in layer_types)
    first = found.get("max_window_layers", 28)  # older files name the first layer that slides
    return tuple(window if layer >= first else None for layer in range(found["num_hidden_layers"]))


def end_ids(found):
    """The end tokens of a config.json or generation_config.json, a list: files have one, several or none."""
    ids = found.get("eos_token_id")
    if isinstance(ids, list):
        return ids
    return [] if ids is None else [ids]


def hf_config(config):
    """The contents of a config.json, for transformers 4 and 5 and for read_config. ValueError for windows
    that it cannot hold."""
    contents = {key: getattr(config, ours) for key, ours in SIZES.items()} | dict(
        architectures=[FAMILIES[config.family]],
        model_type=config.family,
        hidden_act="silu",
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        tie_word_embeddings=config.tied,
        eos_token_id=list(config.eos_ids) or None,
        bos_token_id=None,
    )
    if config.tokenizer:
        contents["tokenizer"] = config.tokenizer
    windows = set(config.windows) - {None}
    if len(windows) > 1 or windows and config.family == "llama":
        raise ValueError(f"windows={config.windows}: config.json has room for one size, and none in a Llama")
    if windows:
        contents["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.windows]
        contents.update(use_sliding_window=True, sliding_window=windows.pop(), max_window_layers=0)
    return contents


# --------------------------------------------------------------------------------------------------
# weights

def read_weights(folder, shapes, dtype, device):
    """The tensors of a folder, one for each name in `shapes`, as {name: tensor}; read one file after the
    other. ValueError or FileNotFoundError names the tensors or files that are missing, unused, misshapen or
    damaged."""
    weights, unused = {}, {}
    for path in weight_files(folder):
        for name, tensor in stored_tensors(path):
            if name not in shapes:
                unused[name] = tensor
            elif tensor.shape != shapes[name]:
                raise ValueError(
                    f"{path}: {name} is {tuple(tensor.shape)}, the model wants {tuple(shapes[name])}")
            else:
                weights[name] = tensor.to(device, dtype)
    head = unused.pop("lm_head.weight", None)  # some files store it although it is tied
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing: {', '.join(missing[:4])}")
    if unused:
        raise ValueError(
            f"{folder}: {len(unused)} tensors are not used by this model: {', '.join(list(unused)[:4])}")
    if head is not None and not head.to(device, dtype).equal(weights["model.embed_tokens.weight"]):
        raise ValueError(f"{folder}: lm_head.weight differs from the embedding that config.json ties it to")
    return weights


def stored_tensors(path):
    """Yields the name and tensor of all that one file stores."""
    try:
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():
                name = stored.removeprefix("_orig_mod.")  # left there by torch.compile
                if not name.endswith("rotary_emb.inv_freq"):  # written by old Llamas, a constant
                    yield name, file.get_tensor(stored)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def weight_files(folder):
    """The .safetensors files of a folder. FileNotFoundError names those which should be there and are not."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder} holds no {', '.join(absent)}")
    return [folder / name for name in names]


def fingerprint(folder):
    """What tells the weights of a folder, or of the hub, from others: a hash of the config.json and of the
    sizes and last megabytes of the weight files."""
    folder = local_folder(folder, MODEL_FILES)
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 2**20, 0))
            found.update(str(size).encode() + file.read())
    return found.hexdigest()


@contextmanager
def replacing(path):
    """`with replacing(path) as tmp:` write tmp; on success it is synced and takes the place of path, on
    failure it is removed."""
    tmp = Path(f"{path}.tmp{os.getpid()}")
    try:
        yield tmp
        with open(tmp, "rb") as file:
            os.fsync(file.fileno())
        tmp.chmod(0o644)  # safetensors writes files that only their owner can read
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
