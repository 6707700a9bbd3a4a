"""
The machine: which device and dtype to compute with, how much of its memory is free, and how much was used.
"""
import resource
import sys

import psutil
import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16,
          "bfloat16": torch.bfloat16, "float64": torch.float64}


def device_and_dtype(device="auto", dtype="auto"):
    """The torch device and dtype that two configuration strings mean. "auto" is cuda, then mps, then cpu; and
    bfloat16 where the hardware has it (CUDA capability 8.0 and up), else float32. Raises ValueError for what
    is not here."""
    if device == "auto":
        has_mps = torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    try:
        device = torch.device(device)
        torch.empty(1, device=device).item()             # fails on "meta" as well
    except (RuntimeError, AssertionError) as error:      # torch built without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={str(device)!r} cannot be used here: {reason}") from None
    if dtype == "auto":
        fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        dtype = "bfloat16" if fast else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: one of auto, {', '.join(DTYPES)}")
    return device, DTYPES[dtype]


def free_bytes(device):
    """Bytes of memory that are free on a device now, with what PyTorch holds there for later use."""
    device = torch.device(device)
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return psutil.virtual_memory().available


def peak_bytes(device):
    """The most memory of a device that this process has had in use, and what kind of memory that is."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device), "CUDA memory"
    unit = 1 if sys.platform == "darwin" else 1024       # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident"
