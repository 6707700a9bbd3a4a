"""
How fast, and in how much memory. The first argument says what:

    python -m lab.bench kernel                                        # attention alone, against PyTorch's and other people's
    python -m lab.bench kernel --lengths=8192,16384 --windows=512,    # on a CPU: T = 8,192 and 16,384 (2 GB of memory, 2 minutes)
    python -m lab.bench kernel --prefix_len=1000 --n_head=16 --n_kv_head=4 --head_dim=64
    python -m lab.bench decode                                        # a whole model: time per token and cache against length
    python -m lab.bench gap                                           # the trainer's log-probabilities against the sampler's
    python -m lab.bench train                                         # a training step: memory and tokens/s against length
    python -m lab.bench batching                                      # rows refilled as they finish against static batches
    python -m lab.bench traces --init_from=out-rl-passes/last         # the embedded task at traces of up to 100,000 tokens

kernel: forward, backward and one step of decoding for every length and window, by
    ours         prefix + window by attn_kernel.py: Triton on CUDA, the block-sparse PyTorch path elsewhere
    flex         the same mask by FlexAttention (CUDA)
    flash-attn   a plain window without the prefix, by the flash_attn package where it is installed (CUDA)
    sdpa mask    the same mask as a dense (T, T) matrix, by scaled_dot_product_attention, up to a length
    sdpa full    full causal attention; its decoding reads T keys where ours reads P + W
FLOPs are those of the visible pairs of query and key alone, 4 D per pair forward and 10 D backward; shares are of the rates that
a large matrix product and a copy reach on this machine. SDPA and flash-attn get repeated key heads, outside of the timing, where
they are slow without.

decode: one token of a whole model (init_from) when its trace is so and so long: Prefix Sliding by fast/step.py, by the plain step, with 8
and 64 rows, with weights of 8 bits (CPU); full attention; and where they are installed, transformers, and llama.cpp with as many keys
as Prefix Sliding keeps (its own cache in float16; the GGUF of SmolLM2 from its package, or `gguf`). Caches are filled with random
keys, so that nobody has to wait for 131,072 tokens; the cases take turns, a few tokens each, so that a busy moment of the machine
hits them alike, and medians are compared. The bytes that a step must read (weights once, the valid keys and values once), over its
time, are set against a copy of a large tensor that takes turns with them: the share of the limit. Then prefill, and sampling from a
model of the size of the embedded task's, log-probabilities and all. What does not fit the memory is left out and said.

gap, train, batching, traces: see the functions; windows, lengths and rows are those of the keys below.

Times of kernel are the fastest of several runs, those of decode medians; the last line is JSON.
"""
import sys

device = "auto"                            # "auto" (cuda, mps, cpu) | "cpu" | "cuda" | "cuda:1" | "mps"
dtype = "auto"                             # "auto" | "bfloat16" | "float16" | "float32"
init_from = "data/smollm2"                 # a Hugging Face folder or a hub name
gguf = ""                                  # decode: the same model in the dtype that is measured, for llama.cpp; "" = SmolLM2, or none
lengths: tuple | None = None               # tokens, e.g. (4096, 8192); None = 4K to 128K on CUDA, else 2K to 16K; decode: P + W to 128K
windows: tuple | None = None               # tokens, e.g. (2048,); None = (2048, 4096, 8192) on CUDA, (512,) elsewhere; decode: (4096,)
prefix_len = 200                           # tokens, P
batch = 1                                  # sequences in forward and backward
rows: int | None = None                    # sequences decoded at once; None = 16, decode: also 8 and 64, beside 1
n_head: int | None = None                  # query heads; None = 32 on CUDA, 4 elsewhere
n_kv_head: int | None = None               # key heads; None = 8 on CUDA, 2 elsewhere
head_dim: int | None = None                # None = 128 on CUDA, 64 elsewhere
dense_up_to = 16384                        # longest T for "sdpa mask", whose memory is quadratic
repeats = 5                                # runs per timing, after one that warms up; decode: turns of 8 tokens; at least 1

_what = sys.argv.pop(1) if __name__ == "__main__" and sys.argv[1:] and sys.argv[1][0] != "-" else None

from configurator import configure, run

configure(globals())

import ctypes
import json
import shutil
import threading
import time
import types

import psutil
import torch
import torch.nn.functional as F

import train_rl
import training
from attention import visible
from attn_kernel import decode_attention, flex_block_mask, flex_compiled, prefix_sliding_attention
from device import device_and_dtype, free_bytes, peak_bytes as memory_peak
from engine import generate, plain_step
from fast.step import fast_step
from lab import rivals
from model import GPT, GPTConfig
from sliding_cache import SlidingCache, row_bytes
from tasks import DAY, load_task
from tokenizer import load_tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# measuring

def seconds(f, device):
    """The time of f(), the fastest of `repeats` runs: what else the machine does can only add to it."""
    f()
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        f()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def synchronize(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def peak_bytes(f, device):
    """By how much memory grows at most while f() runs: what CUDA counts, or the process as seen every millisecond."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        f()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # or else freed memory that the process has kept would hide what is used anew
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    f()
    done.set()
    watcher.join()
    return peak - before


def machine_rates(device, dtype):
    """What this machine reaches: (FLOP/s of a large matrix product, bytes/s of a copy, read and written counted)."""
    n, size = (8192, 2**30) if device.type == "cuda" else (2048, 2**27)
    a, x = torch.randn(n, n, device=device, dtype=dtype), torch.ones(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * n**3 / seconds(lambda: a @ a, device), 2 * size / seconds(lambda: y.copy_(x), device)


def whole(*numbers):
    """Whether all are whole numbers of at least 1."""
    return all(type(n) is int and n >= 1 for n in numbers)


def rounded(**row):
    """A row of a table, its floats to four digits."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def print_table(table):
    columns = list(table[0])
    cells = [columns] + [["-" if row[c] is None else f"{row[c]:g}" if isinstance(row[c], float) else str(row[c]) for c in columns]
                         for row in table]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


# ---------------------------------------------------------------------------------------------------------------------
# attention alone

def visible_pairs(T, P, W):
    """How many (query, key) pairs the mask leaves in a sequence of T tokens."""
    i = torch.arange(T)
    return int((torch.clamp(i + 1, max=W) + (i - W + 1).clamp(0, P)).sum())


def peers(q, k, v, P, W):
    """{name: (function without arguments, its inputs, visible pairs)} of everybody who can do these inputs."""
    T, device, group = q.size(2), q.device, q.size(1) // k.size(1)
    some, every = visible_pairs(T, P, W), T * (T + 1) // 2
    k_all, v_all = (x.detach().repeat_interleave(group, 1).requires_grad_() for x in (k, v))
    out = {"ours": (lambda: prefix_sliding_attention(q, k, v, P, W), [q, k, v], some)}
    if device.type == "cuda":
        mask = flex_block_mask(q, k, torch.tensor([P], device=device), W, torch.tensor([0], device=device))
        out["flex"] = (lambda: flex_compiled()(q, k, v, block_mask=mask, enable_gqa=group > 1), [q, k, v], some)
        try:
            from flash_attn import flash_attn_func
        except ImportError:
            pass
        else:
            x = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]
            out["flash-attn"] = (lambda: flash_attn_func(*x, causal=True, window_size=(W - 1, 0)), x, visible_pairs(T, 0, W))
    if T <= dense_up_to:
        i = torch.arange(T, device=device)
        dense = visible(i[:, None], i, P, W)
        out["sdpa mask"] = (lambda: F.scaled_dot_product_attention(q, k_all, v_all, attn_mask=dense), [q, k_all, v_all], some)
    out["sdpa full"] = (lambda: F.scaled_dot_product_attention(q, k_all, v_all, is_causal=True), [q, k_all, v_all], every)
    return out


def decoder(peer, make, rows, P, W, T, H, Hkv):
    """(a function without arguments that decodes one token of `rows` sequences, the slots it reads), or (None, 0)."""
    slots = {"ours": P + W, "sdpa full": T}.get(peer, 0)
    if not slots:
        return None, 0
    q, k, v = make(rows, H, 1), make(rows, Hkv, slots), make(rows, Hkv, slots)
    full = torch.full((rows,), slots, device=q.device)
    if peer == "ours":
        return lambda: decode_attention(q, k, v, full), slots
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=H != Hkv), slots


def kernel():
    where, kind = device_and_dtype(device, dtype)
    large = where.type == "cuda"
    Ts = lengths or ((4096, 8192, 16384, 32768, 65536, 131072) if large else (2048, 4096, 8192, 16384))
    Ws = windows or ((2048, 4096, 8192) if large else (512,))
    H, Hkv, D = (given if given is not None else standard[not large]
                 for given, standard in ((n_head, (32, 4)), (n_kv_head, (8, 2)), (head_dim, (128, 64))))
    n_rows = 16 if rows is None else rows
    if not whole(repeats, *Ts, *Ws, batch, n_rows, H, Hkv, D) or prefix_len < 0 or H % Hkv:
        raise ValueError(f"lengths={Ts}, windows={Ws}, batch={batch}, rows={n_rows} and repeats={repeats} are whole numbers of at least 1, "
                         f"prefix_len={prefix_len} at least 0, and n_head={H} is a multiple of n_kv_head={Hkv}; head_dim={D}")
    flops, bandwidth = machine_rates(where, kind)
    name = torch.cuda.get_device_name(where) if large else f"{where}, {torch.get_num_threads()} threads"
    print(f"{name}: {str(kind)[6:]} matrix product {flops / 1e12:.3g} TFLOP/s, copy {bandwidth / 1e9:.3g} GB/s; "
          f"batch {batch}, {H} query and {Hkv} key heads of {D}, P={prefix_len}; decoding {n_rows} rows")
    generator, table = torch.Generator(where).manual_seed(0), []

    def make(B, heads, T):
        return torch.randn(B, heads, T, D, device=where, dtype=kind, generator=generator)

    for W in Ws:
        for T in Ts:
            q, k, v = (make(batch, heads, T).requires_grad_() for heads in (H, Hkv, Hkv))
            dout = make(batch, H, T)
            for peer, (f, inputs, pairs) in peers(q, k, v, prefix_len, W).items():
                print(f"\r{peer} at T={T}, W={W}".ljust(60), end="", file=sys.stderr, flush=True)
                try:
                    y = f()
                    grad = dout.reshape(y.shape)  # flash-attn has heads and tokens the other way round; random is random
                    forward = seconds(f, where)
                    backward = seconds(lambda y=y, i=inputs, g=grad: torch.autograd.grad(y, i, g, retain_graph=True), where)
                    del y
                    peak = peak_bytes(lambda f=f, i=inputs, g=grad: torch.autograd.grad(f(), i, g), where)
                    step, slots = decoder(peer, make, n_rows, prefix_len, W, T, H, Hkv)
                    decode = seconds(step, where) if step else None
                except torch.OutOfMemoryError:
                    print(f"\r{peer} at T={T}, W={W}: out of memory, left out".ljust(60), file=sys.stderr)
                    continue
                work, read = 4 * D * pairs * batch * H, 2 * n_rows * Hkv * slots * D * kind.itemsize
                table.append(rounded(
                    W=W, T=T, impl=peer, forward_ms=1e3 * forward, backward_ms=1e3 * backward,
                    forward_tflop_per_s=work / forward / 1e12, forward_share=work / forward / flops,
                    backward_tflop_per_s=2.5 * work / backward / 1e12, backward_share=2.5 * work / backward / flops,
                    peak_mb=peak / 1e6, decode_ms=decode and 1e3 * decode,
                    decode_gb_per_s=decode and read / decode / 1e9, decode_share=decode and read / decode / bandwidth))
    print("\r".ljust(60) + "\r", end="", file=sys.stderr, flush=True)
    print_table(table)
    # what the length costs, and what it costs others
    total = {(row["W"], row["T"], row["impl"]): row["forward_ms"] + row["backward_ms"] for row in table}
    memory = {(row["W"], row["T"], row["impl"]): row["peak_mb"] for row in table}
    ratios = []
    for W, T, impl in total:
        if impl == "ours":
            row = dict(W=W, T=T)
            for other in ("sdpa mask", "sdpa full", "flex", "flash-attn"):
                if (W, T, other) in total:
                    row[f"times_faster_than_{other.replace(' ', '_').replace('-', '_')}"] = total[W, T, other] / total[W, T, impl]
            if (W, T // 2, impl) in total:
                row |= dict(time_for_twice_the_length=total[W, T, impl] / total[W, T // 2, impl],
                            memory_for_twice_the_length=memory[W, T, impl] / max(memory[W, T // 2, impl], 1e-9))
            ratios.append(rounded(**row))
    columns = list(dict.fromkeys(key for row in ratios for key in row))
    print("\nforward and backward together, ours against others and against half the length")
    print_table([{key: row.get(key) for key in columns} for row in ratios])
    return dict(bench="kernel", device=name, dtype=str(kind)[6:], matrix_tflop_per_s=flops / 1e12, copy_gb_per_s=bandwidth / 1e9,
                P=prefix_len, batch=batch, rows=n_rows, n_head=H, n_kv_head=Hkv, head_dim=D, table=table, ratios=ratios)


# ---------------------------------------------------------------------------------------------------------------------
# one token of a whole model

@torch.no_grad()
def decode():
    where, kind = device_and_dtype(device, dtype)
    W, P = windows[0] if windows else 4096, prefix_len
    Ts = lengths or (P + W, 8192, 32768, 131072)
    if not whole(repeats, W, *Ts) or P < 0 or min(Ts) < P + W or rows is not None and rows < 2:
        raise ValueError(f"repeats={repeats} and windows=({W!r},) are whole numbers of at least 1, prefix_len={P} at least 0, "
                         f"lengths={Ts} at least P + W, and rows={rows} at least 2")
    kinds = (torch.bfloat16, torch.float32) if dtype == "auto" and where.type == "cpu" else (kind,)
    results = [decode_in(where, kind, P, W, Ts) for kind in kinds]
    peak, _ = memory_peak(where)
    return dict(bench="decode", init_from=init_from, device=str(where), threads=torch.get_num_threads(), P=P, W=W,
                peak_mb=round(peak / 1e6), table=sum((table for table, _ in results), []),
                prefill=sum((table for _, table in results), []), sampling=sampling(where))


def decode_in(where, kind, P, W, Ts):
    """Everything in one dtype. -> (table, table of the prefill)"""
    name, keys, left_out = str(kind)[6:], P + W, []
    model = GPT.from_pretrained(init_from, dtype=kind, device=where)
    c, full, cases, closing = model.config, None, {}, []                              # cases: {(who, tokens, rows): (step, bytes read)}
    weights = sum(p.numel() for p in model.parameters()) - (0 if c.tied else model.model.embed_tokens.weight.numel())

    def of_keys(n, dtype=kind):
        return row_bytes(c, [None] * c.n_layer, 0, n, dtype)

    def cached(n, window, length):
        cache = SlidingCache(c, n, P, window, max_len=length + 64 * repeats, dtype=kind, device=where)
        if cache.nbytes > free_bytes(where) / 2:
            raise ValueError(f"{cache.nbytes / 1e9:.1f} GB of cache")
        for t in (*cache.k, *cache.v):
            t.normal_()
        return cache

    def ours(who, cache, step, T, bytes_per_weight=kind.itemsize):
        n = cache.batch_size
        token = torch.zeros(n, 1, dtype=torch.long, device=where)

        def at_T():
            cache.length.fill_(T)
            cache.lengths = [T] * n
            return step(token)
        cases[who, T, n] = at_T, weights * bytes_per_weight + n * of_keys(T if None in cache.windows else min(T, keys))

    print(f"{name}: filling caches".ljust(60), end="\r", file=sys.stderr, flush=True)
    sliding = cached(1, W, 0)
    fast = fast_step(model, sliding, "continue")
    for T in Ts:
        ours("prefix_sliding", sliding, fast, T)
    ours("prefix_sliding, plain", sliding, plain_step(model, sliding), Ts[0])
    if where.type == "cpu" and kind == torch.bfloat16:
        ours("prefix_sliding, int8", sliding, fast_step(model, sliding, "continue", int8=True), Ts[0], bytes_per_weight=1)
    for n in (8, 64) if rows is None else (rows,):
        try:
            many = cached(n, W, 0)
            ours("prefix_sliding", many, fast_step(model, many, "continue"), Ts[0])
        except ValueError as error:
            left_out.append(f"{n} rows in {name}: {error}")
    for T in reversed(Ts):                                                            # the longest that fits, for all of them
        try:
            full = full or cached(1, None, T)
            ours("full attention, plain", full, plain_step(model, full), T)
        except ValueError as error:
            left_out.append(f"full attention at {T} in {name}: {error}")
    prefills = {"ours": lambda: model.lm_head(model.features(prompt, cache=SlidingCache(c, 1, prompt.size(1), W, dtype=kind,
                                                                                        device=where))[:, -1])}
    prompt = torch.randint(c.vocab_size, (1, 2000), device=where, generator=torch.Generator(where).manual_seed(0))
    if where.type == "cpu" and rivals.installed("transformers") and rivals.installed("accelerate") and full:
        theirs = rivals.Transformers(init_from, kind)
        for T in [T for T in Ts if T <= min(32768, full.max_len)]:
            step = theirs.step([k[:, :, :T] for k in full.k], [v[:, :, :T] for v in full.v], torch.zeros(1, 1, dtype=torch.long))
            cases["transformers", T, 1] = step, weights * kind.itemsize + of_keys(T)
        prefills["transformers"] = theirs.prefill(prompt)
    if where.type == "cpu" and rivals.installed("llama_cpp") and (gguf or init_from == "data/smollm2"):
        file = gguf or rivals.smollm2_gguf(kind)
        for flash in (False, True):
            for n in (1, 8 if rows is None else rows):
                print(f"{name}: filling llama.cpp's cache".ljust(60), end="\r", file=sys.stderr, flush=True)
                llama = rivals.LlamaCpp(file, keys, n, flash, torch.get_num_threads())
                llama.fill(keys)
                who = "llama.cpp" + ", flash" * flash
                cases[who, keys, n] = llama.step(keys), weights * kind.itemsize + n * of_keys(keys, torch.float16)
                closing.append(llama)
            llama = rivals.LlamaCpp(file, prompt.size(1), 1, flash, torch.get_num_threads())
            prefills[who] = llama.prefill(prompt.size(1))
            closing.append(llama)
    large = torch.ones(2**28, dtype=torch.uint8, device=where)
    into = torch.empty_like(large)
    cases["copy", 0, 0] = (lambda: into.copy_(large)), 2 * large.numel()
    cases["read", 0, 0] = (lambda: large.view(torch.float32).sum()), large.numel()
    times = take_turns({case: step for case, (step, _) in cases.items()}, where, repeats, name)
    rates = {who: cases[who, 0, 0][1] / times.pop((who, 0, 0)) for who in ("copy", "read")}
    table = [rounded(dtype=name, who=who, rows=n, tokens=T, ms=1e3 * t, tokens_per_s=n / t, read_mb=cases[who, T, n][1] / 1e6,
                     gb_per_s=cases[who, T, n][1] / t / 1e9, share_of_limit=cases[who, T, n][1] / t / rates["copy"])
             for (who, T, n), t in times.items()]
    print(f"{init_from} on {where}, {name}, {torch.get_num_threads()} threads: P={P}, W={W}, {keys} keys; "
          f"copy {rates['copy'] / 1e9:.3g} GB/s, read {rates['read'] / 1e9:.3g} GB/s; compiled in {fast.compile_s:.1f} s".ljust(60))
    print_table(table)
    times = take_turns(prefills, where, min(repeats, 3), f"{name}, prefill")
    prefill = [rounded(dtype=name, who=who, prompt=prompt.size(1), s=t, tokens_per_s=prompt.size(1) / t) for who, t in times.items()]
    print()
    print_table(prefill)
    print("".join(f"left out: {line}\n" for line in left_out))
    for llama in closing:
        llama.close()
    if closing and not gguf:
        shutil.rmtree(file.parent)
    return table, prefill


def take_turns(steps, where, turns, name):
    """The median time of each of the functions: in every turn one call that is not counted, and up to four that are."""
    times = {case: [] for case in steps}
    for turn in range(turns):
        for case, step in steps.items():
            print(f"{name}: turn {turn + 1} of {turns}, {case}".ljust(78)[:78], end="\r", file=sys.stderr, flush=True)
            for n in range(5):
                synchronize(where)
                began = time.perf_counter()
                step()
                synchronize(where)
                took = time.perf_counter() - began
                if n or took > 1:  # the first finds the caches of the processor full of the case before, which a long one does not feel
                    times[case].append(took)
                if took > 0.3 and n or took > 1:
                    break
    print("".ljust(78), end="\r", file=sys.stderr, flush=True)
    return {case: sorted(t)[len(t) // 2] for case, t in times.items()}


def sampling(where):
    """generate() on a model of the size of the embedded task's (config/sft_passes.py), 64 rows: tokens per second, sampled at
    temperature 1 with their log-probabilities. Weights do not matter for the speed."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=441, n_layer=3, n_head=4, n_embd=64)).to(where).eval()
    prompts = torch.randint(441, (64, 17), generator=torch.Generator().manual_seed(0)).tolist()

    def run(compile):
        stats = {}
        generate(model, prompts, 400, window=12, rope="reset", temperature=1.0, top_p=1.0, compile=compile, stats=stats)
        return stats["decode_s"] / stats["decode_steps"]

    best = {who: min(run(who == "compiled") for _ in range(repeats)) for who in ("plain", "compiled")}
    table = [rounded(who=who, rows=64, ms=1e3 * t, tokens_per_s=64 / t) for who, t in best.items()]
    print(f"sampling from a model of 3 layers of 64, {torch.get_num_threads()} threads: the fastest of {repeats} runs of 400 tokens")
    print_table(table)
    return table


# ---------------------------------------------------------------------------------------------------------------------
# training: what the trainer sees against what the sampler saw, and memory against length; batches that are refilled

def set_trainer(**keys):
    vars(train_rl).update(dict(loss_on="tail", temperature=1.0, rope="continue", prefix_len=None) | keys)


def gap():
    """The trainer's log-probabilities against those that the sampler recorded, on the last window of the same rollouts."""
    where, _ = device_and_dtype(device)
    W, n_rows = windows[0] if windows else 64, 4 if rows is None else rows
    n_new = lengths[0] if lengths else 16 * W
    if not whole(n_rows, W, n_new) or n_new < 12 * W:
        raise ValueError(f"rows={n_rows} and windows=({W!r},) are whole numbers of at least 1, lengths=({n_new!r},) at least 12 windows")
    tokenizer, table = load_tokenizer(init_from), []
    questions = ("Why is the sky blue?", "How does a lighthouse work?", "Write a story about two rivers.", "What is a prime number?")
    prompts = [tokenizer.encode_chat([{"role": "user", "content": questions[i % 4]}]) for i in range(n_rows)]
    for name in ("float32", "bfloat16") if dtype == "auto" else (dtype,):
        model = GPT.from_pretrained(init_from, dtype=device_and_dtype(device, name)[1], device=where)
        print(f"sampling {n_rows} x {n_new} tokens in {name}".ljust(60), end="\r", file=sys.stderr, flush=True)
        done = generate(model, prompts, n_new, window=W, temperature=1.0, top_p=1.0, n_vocab=tokenizer.n_vocab)
        episodes = [train_rl.Episode(**vars(c), advantage=1.0) for c in done]
        for carry in (False, True):
            for m in (1, 2, 4, 8):
                print(f"{name}, carry={carry}, context_mult={m}".ljust(60), end="\r", file=sys.stderr, flush=True)
                set_trainer(window=W, context_mult=m, carry=carry, micro_batch=1)
                got = train_rl.update_policy(model, types.SimpleNamespace(step=lambda rate, clip: 0.0), episodes, 0.0)
                model.zero_grad()
                table.append(rounded(dtype=name, carry=carry, context_mult=m, mismatch_kl=got["gap_k3"], max_difference=got["gap_max"]))
    print(f"{init_from} on {where}: {n_rows} rollouts of {n_new} tokens with W={W}, the last {W} tokens of each".ljust(60))
    print_table(table)
    return dict(bench="gap", init_from=init_from, W=W, tokens_per_rollout=n_new, rows=n_rows, table=table)


def train():
    """One step of train_rl.py on one rollout of each length, with carry and without, passing one window of context or four: peak memory
    above the level before, and the tokens of the rollout over the seconds."""
    where, kind = device_and_dtype(device, dtype)
    W, Ts = windows[0] if windows else 512, (4096, 16384) if lengths is None else lengths
    if not Ts or not whole(W, *Ts) or min(Ts) <= prefix_len:
        raise ValueError(f"windows=({W!r},) and lengths={Ts} are whole numbers of at least 1, and lengths above prefix_len={prefix_len}")
    model, table = GPT.from_pretrained(init_from, dtype=kind, device=where), []
    optimizer = training.Optimizer(model, lr=1e-6)
    arms = [(carry, m) for carry in (True, False) for m in (1, 4)]
    for (carry, m), T in [(arms[0], min(Ts))] + [(arm, T) for arm in arms for T in Ts]:  # the first makes the optimizer's moments
        tokens = torch.randint(model.config.vocab_size, (T,), generator=torch.Generator().manual_seed(0)).tolist()
        episode = train_rl.Episode(tokens[:prefix_len], tokens, [-9.0] * T, [True] * T, "length", advantage=1.0)
        set_trainer(window=W, context_mult=m, carry=carry, micro_batch=1)
        print(f"{T} tokens, carry={carry}, context_mult={m}".ljust(60), end="\r", file=sys.stderr, flush=True)
        began = time.perf_counter()
        peak = peak_bytes(lambda e=episode: train_rl.update_policy(model, optimizer, [e], 1e-6), where)
        s = time.perf_counter() - began
        table.append(rounded(carry=carry, context_mult=m, tokens=T, peak_mb=peak / 1e6, s=s, tokens_per_s=T / s))
    print(f"{init_from} on {where}, {str(kind)[6:]}: one training step, P={prefix_len}, W={W}, loss on the last {W} tokens".ljust(60))
    print_table(table[1:])
    return dict(bench="train", init_from=init_from, P=prefix_len, W=W, table=table[1:])


def traces():
    """A model of the embedded task (init_from) on problems that take so and so many tokens: the share that it gets right."""
    where, kind = device_and_dtype(device, dtype)
    W, n_rows, Ts = windows[0] if windows else 12, 16 if rows is None else rows, lengths or (1000, 10000, 100000)
    if not whole(W, n_rows, *Ts) or min(Ts) < 8 or max(Ts) >= 4 * DAY:
        raise ValueError(f"windows=({W!r},) and rows={n_rows} are whole numbers of at least 1, lengths={Ts} of 8 to {4 * DAY - 1}")
    model, tokenizer, table = GPT.from_pretrained(init_from, dtype=kind, device=where), load_tokenizer(init_from), []
    for T in Ts:
        source = load_task(f"passes:{T // 4}-{T // 4}", held_out=True)                # a step is four tokens
        problems = [source.problem(i) for i in range(n_rows)]
        prompts = [tokenizer.encode_chat([{"role": "user", "content": p.prompt}]) for p in problems]
        for temperature in (0.0, 1.0):
            print(f"{T} tokens at temperature {temperature:g}".ljust(60), end="\r", file=sys.stderr, flush=True)
            began = time.perf_counter()
            done = generate(model, prompts, T + T // 4 + 40, window=W, rope="reset", temperature=temperature, top_p=1.0,
                            stop_ids=tokenizer.eos_ids, n_vocab=tokenizer.n_vocab)
            right = [source.score(p, tokenizer.decode(c.tokens[:-1]), c.tokens[:-1], c.finish_reason)
                     for p, c in zip(problems, done, strict=True)]
            fair = [r * (len(c.tokens) > 0.9 * T) for r, c in zip(right, done, strict=True)]  # giving up is right by chance, once in 11
            table.append(rounded(tokens=T, temperature=temperature, problems=n_rows, right=int(sum(fair)),
                                 mean_tokens=sum(len(c.tokens) for c in done) / n_rows, s=time.perf_counter() - began,
                                 P_plus_W=max(map(len, prompts)) + W))
    print(f"{init_from} on {where}".ljust(60))
    print_table(table)
    return dict(bench="traces", init_from=init_from, table=table)


def batching():
    """Sequences whose lengths are log-uniform over a factor of ten: rows that are refilled as they finish, against batches of as many
    rows that all run until the longest of them is done."""
    where, kind = device_and_dtype(device, dtype)
    W, n_rows = windows[0] if windows else 256, 8 if rows is None else rows
    if not whole(W, n_rows):
        raise ValueError(f"windows=({W!r},) and rows={n_rows} are whole numbers of at least 1")
    model, n, generator = GPT.from_pretrained(init_from, dtype=kind, device=where), 8 * n_rows, torch.Generator().manual_seed(0)
    limits = [int(16 * 10**u) for u in torch.rand(n, generator=generator).tolist()]
    prompts = torch.randint(model.config.vocab_size, (n, 16), generator=generator).tolist()

    def timed(prompts, limits):
        stats, began = {}, time.perf_counter()
        generate(model, prompts, limits, window=W, rows=n_rows, stats=stats)
        return stats["decode_steps"], time.perf_counter() - began

    static = []
    for a in range(0, n, n_rows):
        print(f"static batches: {a} of {n} done".ljust(60), end="\r", file=sys.stderr, flush=True)
        static.append(timed(prompts[a:a + n_rows], max(limits[a:a + n_rows])))
    totals = dict(static=[sum(x) for x in zip(*static, strict=True)], continuous=timed(prompts, limits))
    table = [rounded(batches=name, useful_tokens=sum(limits), steps=steps, s=s, tokens_per_s=sum(limits) / s)
             for name, (steps, s) in totals.items()]
    ratio = totals["static"][1] / totals["continuous"][1]
    print(f"{init_from} on {where}, {str(kind)[6:]}: {n} sequences of {min(limits)} to {max(limits)} new tokens, {n_rows} rows, W={W}")
    print_table(table)
    print(f"continuous batching gives {ratio:.2f} times the tokens/s of static batches")
    return dict(bench="batching", init_from=init_from, rows=n_rows, sequences=n, times_faster=round(ratio, 3), table=table)


BENCHES = dict(kernel=kernel, decode=decode, gap=gap, train=train, batching=batching, traces=traces)


def main():
    if _what not in BENCHES:
        raise ValueError(f"the first argument says what to measure, {' or '.join(BENCHES)}, not {_what!r}: python -m lab.bench kernel")
    print(json.dumps(BENCHES[_what]()))


if __name__ == "__main__":
    run(main)
