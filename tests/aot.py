"""
Compile every kernel of attn_kernel.py for GPUs that are not here, and look at what came out.

    python tests/aot.py                  # capability 80, 86, 89, 90, 100 and 120, and gfx942; head_dim 64 and 128; 2 minutes
    python tests/aot.py --quick          # head_dim 64 alone, as in CI
    sh tests/aot_versions.sh             # the same with other versions of Triton, each in a folder of its own

The launching code of attn_kernel.py runs as it would on a GPU, on small CPU tensors, with a driver that names another machine and
launches nothing. So what is compiled is exactly what would run there: types, strides, tile sizes and all.

Checked: shared memory fits the chip; Hopper's and Blackwell's own matrix instructions are used in the forward; forward and decode
keep everything in registers (a spill would show as stack or local memory in the cubin). The last line is JSON.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

import attn_kernel

# the target, shared memory in bytes that one program may use, and the matrix instruction that its forward must contain
TARGETS = [
    (GPUTarget("cuda", 80, 32), 166_912, "mma.sync"),
    (GPUTarget("cuda", 86, 32), 101_376, "mma.sync"),
    (GPUTarget("cuda", 89, 32), 101_376, "mma.sync"),
    (GPUTarget("cuda", 90, 32), 232_448, "wgmma.mma_async"),
    (GPUTarget("cuda", 100, 32), 232_448, "tcgen05.mma"),
    (GPUTarget("cuda", 120, 32), 101_376, "mma.sync"),
    (GPUTarget("hip", "gfx942", 64), 65_536, "v_mfma"),
]


class Elsewhere:
    """A driver that knows which GPU to compile for, and has none."""

    def __init__(self, target, number):
        self.target, self.number = target, number

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.number  # Triton keeps what it compiled by device

    def get_current_stream(self, device):
        return 0


def compile_all(target, number, shared, D, dtype):
    """Every kernel for heads of size D, with and without q_prefix. -> [(name, compiled kernel, its constants)]"""
    compiled, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        has_qp = args[self.arg_names.index("HAS_QP")] if "HAS_QP" in self.arg_names[:len(args)] else options.get("HAS_QP")
        compiled.append((self.__name__ + ("_two" if has_qp else ""), kernel, options))

    driver.set_active(Elsewhere(target, number))
    attn_kernel._device_limits = lambda device: (shared, 132)
    JITFunction.run = compile_only
    try:
        q = torch.zeros(2, 64, 4, D, dtype=dtype).transpose(1, 2).requires_grad_()  # as model.py lays it out
        k = torch.zeros(2, 64, 2, D, dtype=dtype).transpose(1, 2).requires_grad_()
        P = torch.zeros(2, dtype=torch.int64)
        for q_prefix in (None, q):
            attn_kernel.triton_attention(q, k, k, P, 32, P, q_prefix).sum().backward()
            first = None if q_prefix is None else q_prefix[:, :, :1]
            attn_kernel.triton_decode(q[:, :, :1], k, k, P, P, first)
    finally:
        JITFunction.run = run
    return list({name: (name, kernel, options) for name, kernel, options in compiled}.values())


def resources(cubin):
    """Registers, stack and local memory of a cubin, in bytes but for registers, by the cuobjdump in Triton's wheel."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([cuobjdump, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {key: int(re.search(rf"\b{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")}


def main():
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET is set: the interpreter compiles nothing")
    heads, odd = (
        [(64, torch.bfloat16), (128, torch.bfloat16)],
        [(80, torch.float16), (256, torch.bfloat16), (64, torch.float32), (256, torch.float32)],
    )
    if "--quick" in sys.argv:
        heads, odd = heads[:1], []
    problems, count, began = [], 0, time.time()
    print(f"triton {triton.__version__}")
    print("  target    D    dtype kernel                       tile warps  shared   registers stack local")
    for number, (target, shared, instruction) in enumerate(TARGETS):
        for D, dtype in heads + odd * (target.arch == 86):  # where shared memory is scarcest, the other sizes too
            for name, kernel, options in compile_all(target, number, shared, D, dtype):
                where, count = f"{target.arch} D={D} {name}", count + 1
                use = resources(kernel.asm["cubin"]) if target.backend == "cuda" else {}
                code = kernel.asm["ptx" if target.backend == "cuda" else "amdgcn"]
                if kernel.metadata.shared > shared:
                    problems.append(f"{where}: {kernel.metadata.shared} bytes of shared memory, the chip has {shared}")
                if re.search(r"\b(atom|red)\.global|_atomic_", code):
                    problems.append(f"{where}: atomics, whose order of addition changes from run to run")
                if (D, dtype) in heads and name.startswith("_forward") and instruction not in code:
                    problems.append(f"{where}: no {instruction}")
                if (D, dtype) in heads and name.startswith(("_forward", "_decode", "_merge")) and (use.get("STACK") or use.get("LOCAL")):
                    problems.append(f"{where}: spills, {use}")
                line = f"{target.arch:>8} {D:4} {str(dtype)[6:]:>8} {name:22} "
                line += (f"{options['M']}x{options['N']}" if "M" in options else "").rjust(10)
                line += f" {kernel.metadata.num_warps:5} {kernel.metadata.shared:7}   " + " ".join(f"{value:6}" for value in use.values())
                print(line, flush=True)
    for problem in problems:
        print("PROBLEM", problem)
    print(json.dumps(dict(triton=triton.__version__, kernels=count, problems=problems, seconds=round(time.time() - began, 1))))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
