"""
The files of a model on disk: found, read strictly, and written so that nobody ever meets half a file.
"""
import json
import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open


def local_folder(path_or_hub_name, patterns):
    """The folder that is meant: an existing one, or the files of a hub repository that match `patterns`, fetched or cached.
    Raises FileNotFoundError that says what to do if there is neither."""
    folder = Path(path_or_hub_name)
    if folder.is_dir():
        if not (folder / "config.json").exists() and (folder / "prepare.py").exists():
            raise FileNotFoundError(f"{folder} is not prepared yet: run python {folder / 'prepare.py'}")
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path_or_hub_name)):
        raise FileNotFoundError(f"there is no folder {str(path_or_hub_name)!r}")
    try:
        return Path(snapshot_download(str(path_or_hub_name), allow_patterns=patterns))
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FileNotFoundError(f"{str(path_or_hub_name)!r} is no folder here, and the hub did not give it: {reason}") from None


def read_json(path):
    """The contents of a JSON file. Raises FileNotFoundError or ValueError that names it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


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
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise FileNotFoundError(f"{folder} lacks {len(absent)} of {len(names)} weight files: {', '.join(absent)}")
        return [folder / name for name in names]
    if not single.is_file():
        raise FileNotFoundError(f"{folder} holds no model.safetensors")
    return [single]


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
            os.replace(self.tmp, self.path)
        else:
            self.tmp.unlink(missing_ok=True)
