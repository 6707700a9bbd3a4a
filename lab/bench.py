"""
How fast, and in how much memory. The first argument says what:

    python -m lab.bench kernel                    # attention alone, against PyTorch's and other people's
    python -m lab.bench kernel --lengths=8192,16384 --windows=512,    # on a CPU: 2 GB of memory, 2 minutes
    python -m lab.bench kernel --prefix_len=1000 --n_head=16 --n_kv_head=4 --head_dim=64
    python -m lab.bench decode                    # a whole model: time per token and cache against length
    python -m lab.bench gap                       # the trainer's log-probabilities against the sampler's
    python -m lab.bench train                     # a training step: memory and tokens/s against length
    python -m lab.bench batching                  # rows refilled as they finish against static batches
    python -m lab.bench traces --init_from=out-rl-passes/last    # the embedded task at up to 100,000 tokens

kernel is in lab/kernel.py, decode in lab/decode.py, the others are in lab/trainer.py; each says what it
measures. The keys below are for all of them. The last line of standard output is JSON.
"""
import sys

device = "auto"                  # "auto" (cuda, mps, cpu) | "cpu" | "cuda" | "cuda:1" | "mps"
dtype = "auto"                   # "auto" | "bfloat16" | "float16" | "float32"
init_from = "data/smollm2"       # a Hugging Face folder or a hub name
gguf = ""                        # decode: the same model and dtype for llama.cpp; "" = SmolLM2, or none
lengths: tuple | None = None     # tokens, such as (4096, 8192); None = what each benchmark takes
windows: tuple | None = None     # tokens, such as (2048,); None = what each benchmark takes
prefix_len = 200                 # tokens, P
batch = 1                        # kernel: sequences in forward and backward
rows: int | None = None          # sequences at once; None = what each benchmark takes. decode: beside 1
n_head: int | None = None        # kernel: query heads; None = 32 on CUDA, 4 elsewhere
n_kv_head: int | None = None     # kernel: key heads; None = 8 on CUDA, 2 elsewhere
head_dim: int | None = None      # kernel: None = 128 on CUDA, 64 elsewhere
dense_up_to = 16384              # kernel: longest T for "sdpa mask", whose memory is quadratic
repeats = 5                      # runs per timing, after one that warms up; decode: turns; at least 1

_what = sys.argv.pop(1) if __name__ == "__main__" and sys.argv[1:] and sys.argv[1][0] != "-" else None

from configurator import configure, run

configure(globals())

import json
import types

from lab.decode import decode
from lab.kernel import kernel
from lab.trainer import batching, gap, traces, train

BENCHES = dict(kernel=kernel, decode=decode, gap=gap, train=train, batching=batching, traces=traces)
KEYS = ("device", "dtype", "init_from", "gguf", "lengths", "windows", "prefix_len", "batch", "rows", "n_head",
        "n_kv_head", "head_dim", "dense_up_to", "repeats")


def main():
    if _what not in BENCHES:
        raise ValueError(f"the first argument says what to measure, {' or '.join(BENCHES)}, not {_what!r}: "
                         "python -m lab.bench kernel")
    keys = types.SimpleNamespace(**{key: globals()[key] for key in KEYS})
    print(json.dumps(dict(bench=_what) | BENCHES[_what](keys)))


if __name__ == "__main__":
    run(main)
