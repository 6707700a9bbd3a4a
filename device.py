"""
The machine: which device and dtype to compute with, and how much of its memory is free and was used.
"""
import resource
import sys

import psutil
import torch


def device_and_dtype(device="auto", dtype="auto"):
    """The torch device and dtype that two configuration strings mean. "auto" is cuda, then mps, then cpu; and bfloat16 where the
    hardware has it (CUDA capability 8.0 and up), else float32. Raises ValueError for what this machine does not have."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(device)
        torch.empty(1, device=device).item()                                          # fails on "meta" as well
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ValueError(f"device={str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    if dtype not in names:
        raise ValueError(f"dtype={dtype!r}: one of auto, {', '.join(names)}")
    return device, names[dtype]


def free_bytes(device):
    """Bytes of memory that are free on a device now, with what PyTorch holds there for later use."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


def peak_bytes(device):
    """The most memory of a device that this process has had in use, and what kind of memory that is."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device), "CUDA memory"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024), "resident"
