"""
One step of decoding, made fast: the same numbers as model.features and the head give. This folder may be
skipped; compile=False goes without it, and nothing else changes.

    step = CompiledStep(model, cache, rope="continue", int8=False)    # on a CPU: fast/step.c
    step = GraphStep(model, cache, rope="continue")                   # on a GPU
    logits = step(idx, rows)                                          # as engine.plain_step does

A cache of fixed size gives every step the same shapes, and positions are data. So on a GPU the plain step is
recorded once as a CUDA graph and replayed, and Python no longer launches kernels one by one. On a CPU a step
is one call of a C function, which reads the weights where PyTorch has them: nothing is copied, nothing is
compiled again however long the trace, and optimizer steps show.

C knows nothing of what somebody changes in model.py or in the cache. So every fast step proves itself when it
is made (see `prove`): it takes a few tokens with a small cache, and must give the logits that the plain step
gives.

torch.compile was tried: one layer compiled and called for all layers, products written as sums, and oneDNN
for several rows. Its steps took 10 to 30% longer, it compiled for 8 to 13 seconds instead of 2, and it needed
a copy of the weights for several rows.
"""
import contextlib
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
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from attention import upcast
from engine import plain_step

CHUNK = 512    # slots per task of the attention in fast/step.c
POINTER = ctypes.c_void_p
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VECTORS = ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight",
           "self_attn.k_norm.weight", "self_attn.q_proj.bias", "self_attn.k_proj.bias",
           "self_attn.v_proj.bias")


class Matrix(ctypes.Structure):
    _fields_ = [("data", POINTER), ("scale", POINTER)]


class Layer(ctypes.Structure):
    """What fast/step.c calls a layer, field by field."""
    _fields_ = [
        *((name, Matrix) for name in MATRICES),
        *((name, POINTER) for name in VECTORS),
        ("keys", POINTER), ("values", POINTER),
        ("slots", ctypes.c_int64), ("window", ctypes.c_int64),
        ("slot", POINTER), ("valid", POINTER), ("slot_heads", ctypes.c_int64)]


@functools.cache
def compiled_step(**sizes):
    """step() of fast/step.c for a model of these sizes. Raises ValueError if it cannot be compiled."""
    given, x86 = os.environ.get("CC", ""), platform.machine() in ("x86_64", "AMD64")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/step.so"
        try:
            # not -ffast-math: gcc then has the library switch off subnormal numbers for the whole process
            command = [
                *(shlex.split(given) or ["cc"]),
                "-O3", "-march=native", *["-mprefer-vector-width=512"][:x86],
                "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
                "-freciprocal-math", "-fopenmp", "-shared", "-fPIC",
                *(f"-D{name}={int(value)}" for name, value in sizes.items()),
                str(Path(__file__).with_name("step.c")), "-o", library, "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            step = ctypes.CDLL(library).step    # loaded: the file may go
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            why = next((line for line in lines if "error" in line), lines[0])
            raise ValueError("compile=True needs a C compiler with OpenMP, gcc 12 or later, compile=False "
                             f"none: {given or 'cc'} says {why!r}") from None
    step.argtypes = [POINTER] * 4 + [Matrix] + [POINTER] * 4 + [ctypes.c_int] * 3 + [ctypes.c_float] * 2
    step.restype = None
    return step


def quantize(weight):
    """A weight (m, n) as int8 (m, n) and a float32 scale per output (m,): a row's largest number becomes
    127."""
    scale = upcast(weight).abs().amax(1).clamp(min=1e-12) / 127
    return (upcast(weight) / scale[:, None]).round().to(torch.int8), scale


def parameter_shapes(config):
    """{name: shape} of the parameters that fast/step.c reads, those of model.py."""
    C, D, n_inner = config.n_embd, config.head_dim, config.n_inner
    q_size, kv_size = config.n_head * D, config.n_kv_head * D
    block = {
        "input_layernorm.weight": (C,),
        "self_attn.q_proj.weight": (q_size, C),
        "self_attn.k_proj.weight": (kv_size, C),
        "self_attn.v_proj.weight": (kv_size, C),
        "self_attn.o_proj.weight": (C, q_size),
        "post_attention_layernorm.weight": (C,),
        "mlp.gate_proj.weight": (n_inner, C),
        "mlp.up_proj.weight": (n_inner, C),
        "mlp.down_proj.weight": (C, n_inner),
    }
    if config.qkv_bias:
        block["self_attn.q_proj.bias"] = (q_size,)
        block["self_attn.k_proj.bias"] = block["self_attn.v_proj.bias"] = (kv_size,)
    if config.qk_norm:
        block["self_attn.q_norm.weight"] = block["self_attn.k_norm.weight"] = (D,)
    shapes = {"model.embed_tokens.weight": (config.vocab_size, C)}
    for i in range(config.n_layer):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    return shapes | {"model.norm.weight": (C,), "lm_head.weight": (config.vocab_size, C)}


def check_model(model):
    """Raise ValueError for a model whose parameters are not those that fast/step.c reads: it would read on
    behind their ends."""
    config, dtype = model.config, model.lm_head.weight.dtype
    sizes = {name: getattr(config, name) for name in ("n_embd", "head_dim", "n_inner")}
    odd = [f"{name}={size}" for name, size in sizes.items() if size % 16]
    if odd or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("compile=True on a CPU takes float32 or bfloat16, and n_embd, head_dim and n_inner "
                         f"in multiples of 16, not {', '.join(odd) or dtype}")
    known = {name: (shape, dtype) for name, shape in parameter_shapes(config).items()}
    found = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters(remove_duplicate=False)}
    for name in known | found:
        if known.get(name) != found.get(name):
            raise ValueError(f"compile=True: {name} is {found.get(name, 'not there')} in this model, and "
                             f"{known.get(name, 'unknown')} in fast/step.c; compile=False runs it")


class Exact(TorchFunctionMode):
    """Inside, a model computes in float32, as fast/step.c does, whatever its weights are, and nn.Linear
    multiplies by int8 weights, {address of the weight: (numbers, scale)}, where there are any. One matrix at
    a time: there is no copy of the model."""

    def __init__(self, int8_weights):
        super().__init__()
        self.int8_weights = int8_weights

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.embedding:
            return upcast(function(*args, **kwargs or {}))
        if function is F.linear and args[1].data_ptr() in self.int8_weights:
            numbers, scale = self.int8_weights[args[1].data_ptr()]
            args = args[0], numbers * scale[:, None], *args[2:]
        if function.__name__ != "__get__":    # which reads x.dtype and the like
            args = [x.float() if torch.is_tensor(x) and x.dtype == torch.bfloat16 else x for x in args]
        return function(*args, **kwargs or {})


# ----------------------------------------------------------------------------------------------------
# the proof

# How far a logit may be off, in standard deviations of all logits: ten times the largest that rounding did to
# SmolLM2 and to 6,000 random models. A key that is rounded to bfloat16 is now and then rounded the other way.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.03}
GRAPH_TOLERANCE = {torch.float64: 2e-3, torch.float32: 2e-3, torch.bfloat16: 0.2, torch.float16: 0.2}


def prove(step, model, cache, rope, exact=None):
    """Raise ValueError if a fast step gives other logits than the plain one: it would leave out, without a
    word, what somebody changed in the model or the cache. exact: an Exact around the plain step, so that what
    is compared is not hidden by the plain step's own rounding.

    Not seen is a change that takes more than a few tokens, or a window of more than 4, to show."""
    name, instead = type(step).__name__, "compile=False (and int8=False) runs it"
    try:
        error = difference(step, model, cache, rope, exact)
    except RuntimeError as reason:
        if exact is None:
            raise
        raise ValueError(f"compile=True: {name} cannot judge this model ({reason}); {instead}") from None
    tolerance = (GRAPH_TOLERANCE if exact is None else TOLERANCE)[model.lm_head.weight.dtype]
    if error > tolerance:
        raise ValueError(f"compile=True: the logits of {name} are off by {error:.2g} of their standard "
                         f"deviation, and rounding explains {tolerance:g}: it does not know what was "
                         f"changed in this model or its cache; {instead}")


@torch.no_grad()
def difference(step, model, cache, rope, exact=None, n_steps=2):
    """The largest difference of two logits, in standard deviations of all, over a few steps with small caches
    of the same class, whose rows are before, at and past the end of their windows."""
    weight, vocab_size = model.lm_head.weight, model.config.vocab_size
    prefixes, lengths = torch.tensor([2, 1, 2]), [1, 5, 7]
    longest = max(lengths)
    windows = [w and min(w, 4) for w in cache.windows]

    def small(dtype):
        return type(cache)(model.config, len(lengths), prefixes, windows,
                           max_len=longest + n_steps, dtype=dtype, device=weight.device)

    ours, theirs = small(weight.dtype), small(torch.float32 if exact else weight.dtype)
    step.use(ours)
    theirs.fixed_shapes = ours.fixed_shapes
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(vocab_size, (len(lengths), longest + n_steps), generator=generator, device="cpu")
    prompts, *later = tokens.to(weight.device).split([longest] + [1] * n_steps, 1)
    exact = exact or contextlib.nullcontext()
    model.features(prompts, rope=rope, cache=ours, n_new=lengths)
    with exact:
        model.features(prompts, rope=rope, cache=theirs, n_new=lengths)
    for mine, their in zip(ours.k + ours.v, theirs.k + theirs.v, strict=True):
        mine.copy_(their)                                       # so that the two begin alike
        their.copy_(mine)
    append = theirs.append

    def append_rounded(plan, layer, k, v):
        return append(plan, layer, k.to(weight.dtype).to(their.dtype), v.to(weight.dtype).to(their.dtype))

    theirs.append = append_rounded                              # to the dtype of the cache, as ours does
    plain, largest = plain_step(model, theirs, rope), 0.0
    for idx in later:
        with exact:
            expected = plain(idx).double()                      # (rows, vocab_size)
        error = (step(idx).double().nan_to_num() - expected.nan_to_num()).abs().max()
        spread = expected[expected.isfinite()].std().nan_to_num()
        if error > 0:
            largest = max(largest, float(error / spread))
    return largest


# ----------------------------------------------------------------------------------------------------
# the steps

class CompiledStep:
    """Steps of a model on the rows of a cache, by fast/step.c. int8: with matrices rounded to int8 as they
    are now, at half of bfloat16's bytes; else the weights are those of the model, also after an update in
    place (one that moves to other memory needs a new step). compile_s: seconds that compiling and the proof
    took. Raises ValueError for a model that fast/step.c does not take, or would take for another one."""

    def __init__(self, model, cache, rope="continue", int8=False):
        began, c = time.perf_counter(), model.config
        check_model(model)
        self.model, self.rope, self.kept, self.int8_weights = model, rope, [], {}
        self.dtype = model.lm_head.weight.dtype
        self.layers = (Layer * c.n_layer)()
        self.use(cache)
        self.step = compiled_step(
            C=c.n_embd, H=c.n_head, HKV=c.n_kv_head, D=c.head_dim, I=c.n_inner,
            BF16=self.dtype == torch.bfloat16, INT8=int8, CHUNK=CHUNK)

        def pointer(t):
            self.kept.append(t.detach().contiguous())    # C knows addresses only
            return self.kept[-1].data_ptr()

        def matrix(weight):
            if not int8:
                return Matrix(pointer(weight))
            numbers, scale = self.int8_weights[weight.data_ptr()] = quantize(weight.detach())
            return Matrix(pointer(numbers), pointer(scale))

        for layer, block in zip(self.layers, model.model.layers, strict=True):
            for name, p in block.named_parameters():
                if p.dim() == 2:
                    setattr(layer, name.split(".")[-2], matrix(p))
                else:
                    setattr(layer, name, pointer(p))
        self.norm, self.head = pointer(model.model.norm.weight), matrix(model.lm_head.weight)
        prove(self, model, cache, rope, Exact(self.int8_weights))
        self.use(cache)
        self.compile_s = time.perf_counter() - began

    def use(self, cache):
        """Go on with the rows of this cache."""
        c = self.model.config
        if cache.k[0].dtype != self.dtype:
            raise ValueError(f"the cache is {cache.k[0].dtype}, the model {self.dtype}")
        self.cache = cache
        for layer, keys, values, w in zip(self.layers, cache.k, cache.v, cache.windows, strict=True):
            layer.keys, layer.values, layer.slots = keys.data_ptr(), values.data_ptr(), keys.size(2)
            layer.window = w if self.rope == "reset" and w is not None else 0
        tasks = max(keys.size(2) for keys in cache.k) // CHUNK + 1
        per_row = c.n_embd + 4 * c.n_head * c.head_dim + 2 * max(c.n_inner, c.n_kv_head * c.head_dim)
        per_row += tasks * c.n_head * (c.head_dim + 2)
        self.room = torch.empty(cache.batch_size * per_row, dtype=torch.float32, device="cpu")

    @torch.no_grad()
    def __call__(self, idx, rows=slice(None)):
        """The logits (rows, vocab_size) float32 behind the tokens idx (rows, 1), with which the first so many
        rows of the cache go on."""
        cache, model, c = self.cache, self.model, self.model.config
        if not isinstance(rows, slice) or range(cache.batch_size)[rows] != range(len(idx)):
            raise ValueError(f"rows={rows} for {len(idx)} tokens: a compiled step takes the first so many "
                             "rows, a slice(n)")
        plan = cache.advance(1, rows)
        x = upcast(model.model.embed_tokens(idx[:, 0])).clone()            # (rows, n_embd)
        slots = {w: s.target[2].contiguous() for w, s in plan.slots.items()}    # (rows, 1 | Hkv)
        for layer, w in zip(self.layers, cache.windows, strict=True):
            layer.slot, layer.slot_heads = slots[w].data_ptr(), slots[w].size(1)
            layer.valid = plan.slots[w].n_held.data_ptr()
        logits = torch.empty(len(idx), c.vocab_size, dtype=torch.float32, device="cpu")
        self.step(
            x.data_ptr(), logits.data_ptr(), ctypes.addressof(self.layers), self.norm, self.head,
            plan.positions.data_ptr(), cache.prefix_len.data_ptr(), model.freqs.data_ptr(),
            self.room.data_ptr(), len(idx), c.n_layer, c.vocab_size, model.rope_factor, c.norm_eps)
        return logits


class GraphStep:
    """Plain steps of a model on the rows of a cache, each number of rows recorded as a CUDA graph when it
    first comes. A replay does on the device what the recorded step did: it reads and writes the same tensors,
    whatever they hold by then. What Python computed in the recorded step is a constant: the proof is there
    for that."""

    def __init__(self, model, cache, rope="continue"):
        began = time.perf_counter()
        self.model, self.rope = model, rope
        self.compile_s = 0.0
        prove(self, model, cache, rope)
        self.use(cache)
        self.compile_s = time.perf_counter() - began

    def use(self, cache):
        """Go on with the rows of this cache."""
        self.cache, self.graphs, self.pool = cache, {}, None
        self.plain = plain_step(self.model, cache, self.rope)
        self.idx = torch.zeros(cache.batch_size, 1, dtype=torch.long, device=self.model.lm_head.weight.device)
        cache.fixed_shapes = True

    @torch.no_grad()
    def __call__(self, idx, rows=slice(None)):
        """The logits (rows, vocab_size) behind the tokens idx (rows, 1). The next call overwrites them."""
        self.idx[:len(idx)].copy_(idx)
        if len(idx) not in self.graphs:
            self.graphs[len(idx)] = self.record(lambda: self.plain(self.idx[rows], rows))
        self.cache.count(1, rows)
        replay, logits = self.graphs[len(idx)]
        replay()
        return logits

    def record(self, step):
        """Take a step to have kernels compiled and libraries set up, undo it but for a slot that the next
        token takes anyway, and record one. -> a function that repeats it, and the tensor that then holds the
        logits"""
        cache, began = self.cache, time.perf_counter()
        lengths, state = list(cache.lengths), [t.clone() for t in cache.state]
        step()
        for t, old in zip(cache.state, state, strict=True):
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
        self.pool = graph.pool()    # graphs that take turns can share their memory
        return graph.replay, logits


def fast_step(model, cache, rope, int8=False):
    """The fast step for the device of the model. Raises ValueError where there is none."""
    device = model.lm_head.weight.device.type
    if device == "cpu":
        return CompiledStep(model, cache, rope, int8)
    if int8:
        raise ValueError(f"int8=True is for a CPU, not for {device}")
    if device == "cuda":
        return GraphStep(model, cache, rope)
    raise ValueError(f"compile=True is for a CPU or CUDA, not for {device}")
