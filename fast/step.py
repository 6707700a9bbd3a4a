"""
One step of decoding, made fast. What it computes is what model.features and the head compute; this file may be skipped
(compile=False goes without it), and nothing else changes.

    step = CompiledStep(model, cache, rope="continue", int8=False)                    # on a CPU: fast/step.c
    step = GraphStep(model, cache, rope="continue")                                   # on a GPU
    logits = step(idx, rows)         # like model.lm_head(model.features(idx, rope=rope, cache=cache, rows=rows)[:, -1])

A cache of fixed size gives every step the same shapes, and positions are data. So on a GPU the plain step is recorded once as a
CUDA graph and replayed, and Python no longer launches kernels one by one. On a CPU a step is one call of a C function, which reads
the weights where PyTorch has them: nothing is copied, nothing is compiled again however long the trace, and optimizer steps show.

torch.compile was tried: one layer compiled and called for all layers, products written as sums, and oneDNN for several rows. Its
steps took 10 to 30% longer, it compiled for 8 to 13 seconds instead of 2, and it needed a copy of the weights for several rows.
"""
import ctypes
import functools
import os
import platform
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from attention import upcast
from engine import plain_step

CHUNK = 512  # slots per task of the attention in fast/step.c
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
POINTER = ctypes.c_void_p


class Matrix(ctypes.Structure):
    _fields_ = [("data", POINTER), ("scale", POINTER)]


class Layer(ctypes.Structure):
    _fields_ = [*((name, Matrix) for name in MATRICES), *((name, POINTER) for name in (
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
        "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "keys", "values")),
        ("slots", ctypes.c_int64), ("window", ctypes.c_int64), ("slot", POINTER), ("valid", POINTER), ("slot_heads", ctypes.c_int64)]


@functools.cache
def compiled_step(**sizes):
    """step() of fast/step.c for a model of these sizes. Raises ValueError if it cannot be compiled."""
    given, x86 = os.environ.get("CC", ""), platform.machine() in ("x86_64", "AMD64")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/step.so"
        try:
            # not -ffast-math: gcc then has the library switch off subnormal numbers for the whole process
            subprocess.run([*(shlex.split(given) or ["cc"]), "-O3", "-march=native", *["-mprefer-vector-width=512"][:x86],
                            "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math",
                            "-fopenmp", "-shared", "-fPIC", *(f"-D{name}={int(value)}" for name, value in sizes.items()),
                            str(Path(__file__).with_name("step.c")), "-o", library, "-lm"], check=True, capture_output=True, text=True)
            step = ctypes.CDLL(library).step                                          # loaded: the file may go
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            why = next((line for line in lines if "error" in line), lines[0])
            raise ValueError("compile=True needs a C compiler with OpenMP, gcc 12 or later, compile=False none: "
                             f"{given or 'cc'} says {why!r}") from None
    step.argtypes = [POINTER] * 4 + [Matrix] + [POINTER] * 4 + [ctypes.c_int] * 3 + [ctypes.c_float] * 2
    step.restype = None
    return step


def quantize(weight):
    """A weight (m, n) as int8 (m, n) and a float32 scale per output (m,): the largest number of a row becomes 127."""
    scale = upcast(weight).abs().amax(1).clamp(min=1e-12) / 127
    return (upcast(weight) / scale[:, None]).round().to(torch.int8), scale


class CompiledStep:
    """Steps of a model on the rows of a cache, by fast/step.c. int8: with matrices rounded to int8 as they are now, at half of bfloat16's
    bytes; else the weights are those of the model, also after an update in place (one that moves to other memory needs a new step).
    compile_s: what compiling took, in seconds. Raises ValueError for a model that fast/step.c does not take."""

    def __init__(self, model, cache, rope="continue", int8=False):
        c, dtype, began = model.config, model.lm_head.weight.dtype, time.perf_counter()
        odd = [name for name in ("n_embd", "head_dim", "n_inner") if getattr(c, name) % 16]
        if odd or dtype not in (torch.float32, torch.bfloat16):
            raise ValueError("compile=True on a CPU takes float32 or bfloat16, and n_embd, head_dim and n_inner in multiples of 16, not "
                             + ", ".join([f"{name}={getattr(c, name)}" for name in odd] or [str(dtype)]))
        if cache.k[0].dtype != dtype:
            raise ValueError(f"the cache is {cache.k[0].dtype}, the model {dtype}")
        self.model, self.cache, self.kept = model, cache, []
        self.step = compiled_step(C=c.n_embd, H=c.n_head, HKV=c.n_kv_head, D=c.head_dim, I=c.n_inner, BF16=dtype == torch.bfloat16,
                                  INT8=int8, CHUNK=CHUNK)

        def pointer(t):
            self.kept.append(t.detach().contiguous())                                 # C knows addresses only
            return self.kept[-1].data_ptr()

        def matrix(weight):
            return Matrix(*map(pointer, quantize(weight.detach()))) if int8 else Matrix(pointer(weight))

        self.layers = (Layer * c.n_layer)()
        for layer, block, keys, values, w in zip(self.layers, model.model.layers, cache.k, cache.v, cache.windows, strict=True):
            for name, p in block.named_parameters():
                setattr(layer, *((name.split(".")[-2], matrix(p)) if p.dim() == 2 else (name, pointer(p))))
            layer.keys, layer.values, layer.slots = pointer(keys), pointer(values), keys.size(2)
            layer.window = w if rope == "reset" and w is not None else 0
            layer.slot_heads = cache.heads if cache.held and w is not None else 1
        self.norm, self.head = pointer(model.model.norm.weight), matrix(model.lm_head.weight)
        tasks = max(k.size(2) for k in cache.k) // CHUNK + 1
        each = c.n_embd + 4 * c.n_head * c.head_dim + 2 * max(c.n_inner, c.n_kv_head * c.head_dim) + tasks * c.n_head * (c.head_dim + 2)
        self.room = torch.empty(cache.batch_size * each, dtype=torch.float32, device="cpu")
        self.compile_s = time.perf_counter() - began

    @torch.no_grad()
    def __call__(self, idx, rows=slice(None)):
        """The logits (rows, vocab_size) float32 behind the tokens idx (rows, 1), with which the first so many rows of the cache go on."""
        cache, model, c = self.cache, self.model, self.model.config
        if not isinstance(rows, slice) or range(cache.batch_size)[rows] != range(len(idx)):
            raise ValueError(f"rows={rows} for {len(idx)} tokens: a compiled step takes the first so many rows, a slice(n)")
        pos, x = cache.advance(1, rows), upcast(model.model.embed_tokens(idx[:, 0])).clone()            # (rows, 1), (rows, n_embd)
        plans = {w: (slot.contiguous(), valid) for w, (slot, valid) in cache.plans.items()}
        for layer, w in zip(self.layers, cache.windows, strict=True):
            layer.slot, layer.valid = plans[w][0].data_ptr(), plans[w][1].data_ptr()
        logits = torch.empty(len(idx), c.vocab_size, dtype=torch.float32, device="cpu")
        self.step(x.data_ptr(), logits.data_ptr(), ctypes.addressof(self.layers), self.norm, self.head,
                  pos.data_ptr(), cache.prefix_len.data_ptr(), model.freqs.data_ptr(), self.room.data_ptr(),
                  len(idx), c.n_layer, c.vocab_size, model.rope_factor, c.norm_eps)
        return logits


class GraphStep:
    """Plain steps of a model on the rows of a cache, each number of rows recorded as a CUDA graph when it first comes. A replay does
    on the device what the recorded step did: it reads and writes the same tensors, whatever they hold by then."""

    def __init__(self, model, cache, rope="continue"):
        self.plain, self.cache, self.graphs, self.pool, self.compile_s = plain_step(model, cache, rope), cache, {}, None, 0.0
        self.idx = torch.zeros(cache.batch_size, 1, dtype=torch.long, device=model.lm_head.weight.device)
        cache.fixed_shapes = True

    @torch.no_grad()
    def __call__(self, idx, rows=slice(None)):
        """The logits (rows, vocab_size) behind the tokens idx (rows, 1). They are overwritten by the next call."""
        self.idx[:len(idx)].copy_(idx)
        if len(idx) not in self.graphs:
            self.graphs[len(idx)] = self.record(lambda: self.plain(self.idx[rows], rows))
        self.cache.count(1, rows)
        replay, logits = self.graphs[len(idx)]
        replay()
        return logits

    def record(self, step):
        """Take a step to have kernels compiled and libraries set up, undo it but for a slot that the next token takes anyway, and
        record one. -> a function that repeats it, and the tensor that then holds the logits"""
        cache = self.cache
        state = [cache.length, *cache.held.values()]
        began, lengths, before = time.perf_counter(), list(cache.lengths), [t.clone() for t in state]
        step()
        for t, old in zip(state, before, strict=True):
            t.copy_(old)
        cache.lengths = list(lengths)
        recorded = self.capture(step)
        cache.lengths = lengths
        self.compile_s += time.perf_counter() - began
        return recorded

    def capture(self, step):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = step()
        self.pool = graph.pool()                                                      # graphs that take turns can share their memory
        return graph.replay, logits


def fast_step(model, cache, rope, int8=False):
    """The fast step for the device of the model. Raises ValueError where there is none."""
    device = model.lm_head.weight.device.type
    if device not in ("cpu", "cuda") or int8 and device != "cpu":
        raise ValueError(f"{'int8' if int8 else 'compile'}=True is for a CPU{'' if int8 else ' or CUDA'}, not for {device}")
    return CompiledStep(model, cache, rope, int8) if device == "cpu" else GraphStep(model, cache, rope)
