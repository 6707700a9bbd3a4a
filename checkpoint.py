"""
The files of a model on disk: found, read strictly, and written so that nobody ever meets half a file.
"""
import hashlib
import json
import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

MODEL_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json"]


def local_folder(path_or_hub_name, patterns):
    """The folder (a Path) that a model's name stands for: itself if it is one here, else what the hub has of it that matches `patterns`,
    downloaded or cached. FileNotFoundError, one line, if neither, or if its prepare.py was not run; without a network after 11
    seconds at most."""
    name, folder = str(path_or_hub_name), Path(path_or_hub_name)
    if folder.is_dir():
        if (folder / "prepare.py").exists() and not (folder / "config.json").exists():
            raise FileNotFoundError(f"{name} is not prepared yet: run `python {folder / 'prepare.py'}` first")
        return folder
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise FileNotFoundError(f"{name!r} is neither a folder here nor a hub name such as Qwen/Qwen3-1.7B")
    from huggingface_hub import HfApi, snapshot_download

    offline = None
    try:
        HfApi().model_info(name, timeout=8)  # snapshot_download asks the same first, but without a time limit: it may hang for ever
    except Exception as error:  # of whatever HTTP library the hub's client uses this year; the cache may still have the files
        offline = error
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=offline is not None))
    except Exception as error:
        reason = (str(offline or error).strip() or type(offline or error).__name__).splitlines()[0]
        raise FileNotFoundError(f"{name!r} is neither a folder here nor could it be fetched from the hub: {reason}") from None


def read_json(path, missing=None):
    """The JSON object in a file. FileNotFoundError if there is no such file, unless `missing` is given to stand for it; ValueError if
    it holds anything else."""
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


def read_weights(folder, shapes, dtype, device):
    """The tensors of a folder, one for each name in `shapes`, as {name: tensor}; read one file after the other. Raises ValueError
    or FileNotFoundError that names every tensor or file that is missing, unused, misshapen or damaged."""
    weights, unused, head = {}, [], None
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for stored in file.keys():
                    name = stored.removeprefix("_orig_mod.")                          # left there by torch.compile
                    if name.endswith("rotary_emb.inv_freq"):                          # written by old Llamas, a constant
                        continue
                    tensor = file.get_tensor(stored)
                    if name == "lm_head.weight" and name not in shapes:               # stored although tied
                        head = tensor
                    elif name not in shapes:
                        unused.append(name)
                    elif tensor.shape != shapes[name]:
                        raise ValueError(f"{path}: {name} is {tuple(tensor.shape)}, the model wants {tuple(shapes[name])}")
                    else:
                        weights[name] = tensor.to(device, dtype)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    missing = [name for name in shapes if name not in weights]
    if missing or unused:
        raise ValueError(f"{folder}: " + "; ".join(
            f"{len(names)} tensors are {what}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
            for names, what in ((missing, "missing"), (unused, "not used by this model")) if names))
    if head is not None and not head.to(device, dtype).equal(weights["model.embed_tokens.weight"]):
        raise ValueError(f"{folder}: lm_head.weight differs from the embedding that config.json ties it to")
    return weights


def weight_files(folder):
    """The .safetensors files of a folder. Raises FileNotFoundError that names those which the index lists and are not there."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files")
        names = sorted(set(where.values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise FileNotFoundError(f"{folder} lacks {len(absent)} of {len(names)} weight files: {', '.join(absent)}")
        return [folder / name for name in names]
    if not single.is_file():
        raise FileNotFoundError(f"{folder} holds no model.safetensors")
    return [single]


def fingerprint(folder):
    """What tells the weights of a folder, or of the hub, from others: a hash of their sizes and last megabytes, and of the config."""
    folder = local_folder(folder, MODEL_FILES)
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 2**20, 0))
            found.update(str(size).encode() + file.read())
    return found.hexdigest()


class replacing:
    """`with replacing(path) as tmp:` write tmp; on success it is synced and takes the place of path, on failure it is removed."""

    def __init__(self, path):
        self.path, self.tmp = Path(path), Path(f"{path}.tmp{os.getpid()}")

    def __enter__(self):
        return self.tmp

    def __exit__(self, kind, error, trace):
        if kind is None:
            with open(self.tmp, "rb") as file:
                os.fsync(file.fileno())
            self.tmp.chmod(0o644)  # safetensors writes files that only their owner can read
            os.replace(self.tmp, self.path)
        else:
            self.tmp.unlink(missing_ok=True)
