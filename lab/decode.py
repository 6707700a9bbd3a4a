"""
python -m lab.bench decode: one token of a whole model (init_from) when its trace is so and so long: Prefix
Sliding by fast/step.py, by the plain step, with 8 and 64 rows, with weights of 8 bits (CPU); full attention;
and where they are installed, transformers, and llama.cpp with as many keys as Prefix Sliding keeps (its own
cache in float16; the GGUF of SmolLM2 from its package, or `gguf`).

Caches are filled with random keys, so that nobody has to wait for 131,072 tokens; the cases take turns, a few
tokens each, so that a busy moment of the machine hits them alike, and medians are compared. The bytes that a
step must read (weights once, the valid keys and values once), over its time, are set against a copy of a
large tensor that takes turns with them: the share of the limit. Then prefill, and sampling from a model of
the size of the embedded task's, log-probabilities and all. What does not fit the memory is left out and said.
"""
import shutil

import torch

from device import device_and_dtype, free_bytes, peak_bytes
from engine import generate
from evals.table import print_table
from fast.step import fast_step, plain_step
from lab import rivals
from lab.measure import are_counts, name_of, note, rounded, take_turns
from model import GPT, GPTConfig
from sliding_cache import SlidingCache, row_bytes


@torch.no_grad()
def decode(keys):
    device, dtype = device_and_dtype(keys.device, keys.dtype)
    window, P = keys.windows[0] if keys.windows else 4096, keys.prefix_len
    lengths = keys.lengths or (P + window, 8192, 32768, 131072)
    if not are_counts(keys.repeats, window, *lengths) or P < 0 or min(lengths) < P + window:
        raise ValueError(f"repeats={keys.repeats} and windows=({window!r},) are whole numbers of at least 1, "
                         f"prefix_len={P} is at least 0, and lengths={lengths} are at least P + W")
    if keys.rows is not None and keys.rows < 2:
        raise ValueError(f"rows={keys.rows}: at least 2 (1 is always measured)")
    table, prefill, dtypes = [], [], [dtype]
    if keys.dtype == "auto" and device.type == "cpu":
        dtypes = [torch.bfloat16, torch.float32]
    for dtype in dtypes:
        measured = Decoding(keys, device, dtype, window, lengths)
        try:
            measured.collect()
            table += measured.decoding()
            prefill += measured.prefilling()
        finally:
            measured.close()
            del measured                   # its memory is for the next
    peak, _ = peak_bytes(device)
    return dict(
        init_from=keys.init_from, device=str(device), threads=torch.get_num_threads(), P=P, W=window,
        peak_mb=round(peak / 1e6), table=table, prefill=prefill, sampling=sampling(device, keys.repeats))


class Decoding:
    """All cases in one dtype."""

    def __init__(self, keys, device, dtype, window, lengths):
        self.keys, self.device, self.dtype = keys, device, dtype
        self.window, self.lengths = window, lengths
        self.n_keys = keys.prefix_len + window        # what Prefix Sliding attends to
        self.model = GPT.from_pretrained(keys.init_from, dtype=dtype, device=device)
        embedding = self.model.model.embed_tokens.weight.numel()
        self.n_weights = sum(p.numel() for p in self.model.parameters())
        self.n_weights -= 0 if self.model.config.tied else embedding
        self.steps = {}        # {(who, tokens, rows): a function without arguments}
        self.read = {}         # the same: bytes that it must read
        self.prefills = {}     # {who: a function without arguments}
        self.left_out = []     # lines that say what does not fit
        self.llamas = []
        generator = torch.Generator(device).manual_seed(0)
        vocab_size = self.model.config.vocab_size
        self.prompt = torch.randint(vocab_size, (1, 2000), device=device, generator=generator)

    def collect(self):
        note(f"{name_of(self.dtype)}: filling caches")
        self.add_sliding()
        full = self.add_full()
        self.prefills["ours"] = self.prefill
        if self.device.type == "cpu":
            if full and rivals.installed("transformers") and rivals.installed("accelerate"):
                self.add_transformers(full)
            if rivals.installed("llama_cpp") and (self.keys.gguf or self.keys.init_from == "data/smollm2"):
                self.add_llama()
        large = torch.ones(2**28, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(large)
        self.add("copy", 0, 0, lambda: target.copy_(large), 2 * large.numel())
        self.add("read", 0, 0, lambda: large.view(torch.float32).sum(), large.numel())

    def add(self, who, tokens, rows, step, n_bytes):
        self.steps[who, tokens, rows], self.read[who, tokens, rows] = step, n_bytes

    def key_bytes(self, n_keys, dtype=None):
        config = self.model.config
        return row_bytes(config, [None] * config.n_layer, 0, n_keys, dtype or self.dtype)

    def filled_cache(self, rows, window, length):
        """A cache of random keys. ValueError if it is too large."""
        cache = SlidingCache(self.model.config, rows, self.keys.prefix_len, window, dtype=self.dtype,
                             device=self.device, max_len=length + 64 * self.keys.repeats)
        if cache.nbytes > free_bytes(self.device) / 2:
            raise ValueError(f"{cache.nbytes / 1e9:.1f} GB of cache")
        for t in (*cache.k, *cache.v):
            t.normal_()
        return cache

    def add_ours(self, who, cache, step, tokens, bytes_per_weight=None):
        rows = cache.batch_size
        token = torch.zeros(rows, 1, dtype=torch.long, device=self.device)

        def at_this_length():
            cache.length.fill_(tokens)
            cache.lengths = [tokens] * rows
            return step(token)

        n_keys = tokens if None in cache.windows else min(tokens, self.n_keys)
        weights = self.n_weights * (bytes_per_weight or self.dtype.itemsize)
        self.add(who, tokens, rows, at_this_length, weights + rows * self.key_bytes(n_keys))

    def add_sliding(self):
        model, first = self.model, self.lengths[0]
        cache = self.filled_cache(1, self.window, 0)
        fast = fast_step(model, cache, "continue")
        self.compile_s = fast.compile_s
        for tokens in self.lengths:
            self.add_ours("prefix_sliding", cache, fast, tokens)
        self.add_ours("prefix_sliding, plain", cache, plain_step(model, cache), first)
        if self.device.type == "cpu" and self.dtype == torch.bfloat16:
            int8 = fast_step(model, cache, "continue", int8=True)
            self.add_ours("prefix_sliding, int8", cache, int8, first, bytes_per_weight=1)
        for rows in (8, 64) if self.keys.rows is None else (self.keys.rows,):
            try:
                cache = self.filled_cache(rows, self.window, 0)
                self.add_ours("prefix_sliding", cache, fast_step(model, cache, "continue"), first)
            except ValueError as error:
                self.left_out.append(f"{rows} rows in {name_of(self.dtype)}: {error}")

    def add_full(self):
        """Full attention, in the longest cache that fits. -> the cache, or None"""
        cache = None
        for tokens in reversed(self.lengths):
            try:
                cache = cache or self.filled_cache(1, None, tokens)
                self.add_ours("full attention, plain", cache, plain_step(self.model, cache), tokens)
            except ValueError as error:
                self.left_out.append(f"full attention at {tokens} in {name_of(self.dtype)}: {error}")
        return cache

    def prefill(self):
        cache = SlidingCache(self.model.config, 1, self.prompt.size(1), self.window, dtype=self.dtype,
                             device=self.device)
        return self.model.lm_head(self.model.features(self.prompt, cache=cache)[:, -1])

    def add_transformers(self, full):
        theirs = rivals.Transformers(self.keys.init_from, self.dtype)
        token = torch.zeros(1, 1, dtype=torch.long)
        for tokens in self.lengths:
            if tokens <= min(32768, full.max_len):
                k, v = ([t[:, :, :tokens] for t in layers] for layers in (full.k, full.v))
                n_bytes = self.n_weights * self.dtype.itemsize + self.key_bytes(tokens)
                self.add("transformers", tokens, 1, theirs.step(k, v, token), n_bytes)
        self.prefills["transformers"] = theirs.prefill(self.prompt)

    def add_llama(self):
        self.gguf = self.keys.gguf or rivals.smollm2_gguf(self.dtype)
        n_keys, n_prompt = self.n_keys, self.prompt.size(1)
        for flash in (False, True):
            who = "llama.cpp, flash" if flash else "llama.cpp"
            for rows in (1, 8 if self.keys.rows is None else self.keys.rows):
                note(f"{name_of(self.dtype)}: filling llama.cpp's cache")
                llama = self.llama(n_keys, rows, flash)
                llama.fill(n_keys)
                n_bytes = self.n_weights * self.dtype.itemsize + rows * self.key_bytes(n_keys, torch.float16)
                self.add(who, n_keys, rows, llama.step(n_keys), n_bytes)
            self.prefills[who] = self.llama(n_prompt, 1, flash).prefill(n_prompt)

    def llama(self, n_tokens, rows, flash):
        self.llamas.append(rivals.LlamaCpp(self.gguf, n_tokens, rows, flash, torch.get_num_threads()))
        return self.llamas[-1]

    def decoding(self):
        """The table of the steps."""
        name, keys = name_of(self.dtype), self.keys
        times = take_turns(self.steps, self.device, keys.repeats, name)
        copy, read = (self.read[who, 0, 0] / times.pop((who, 0, 0)) for who in ("copy", "read"))
        table = []
        for (who, tokens, rows), s in times.items():
            n_bytes = self.read[who, tokens, rows]
            table.append(rounded(
                dtype=name, who=who, rows=rows, tokens=tokens, ms=1e3 * s, tokens_per_s=rows / s,
                read_mb=n_bytes / 1e6, gb_per_s=n_bytes / s / 1e9, share_of_limit=n_bytes / s / copy))
        print(f"{keys.init_from} on {self.device}, {name}, {torch.get_num_threads()} threads: "
              f"P={keys.prefix_len}, W={self.window}, {self.n_keys} keys; copy {copy / 1e9:.3g} GB/s, "
              f"read {read / 1e9:.3g} GB/s; compiled in {self.compile_s:.1f} s")
        print_table(table)
        return table

    def prefilling(self):
        """The table of the prefills."""
        name, n = name_of(self.dtype), self.prompt.size(1)
        times = take_turns(self.prefills, self.device, min(self.keys.repeats, 3), f"{name}, prefill")
        table = [rounded(dtype=name, who=who, prompt=n, s=s, tokens_per_s=n / s) for who, s in times.items()]
        print()
        print_table(table)
        print("".join(f"left out: {line}\n" for line in self.left_out))
        return table

    def close(self):
        self.steps.clear()
        self.prefills.clear()
        for llama in self.llamas:
            llama.close()
        if self.llamas and not self.keys.gguf:
            shutil.rmtree(self.gguf.parent)


def sampling(device, repeats):
    """generate() on a model of the size of the embedded task's (config/sft_passes.py), 64 rows: tokens per
    second, sampled at temperature 1 with their log-probabilities. Weights do not matter for the speed."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=441, n_layer=3, n_head=4, n_embd=64)).to(device).eval()
    prompts = torch.randint(441, (64, 17), generator=torch.Generator().manual_seed(0)).tolist()
    table = []
    for who in ("plain", "compiled"):
        times = []
        for _ in range(repeats):
            stats = {}
            generate(model, prompts, 400, window=12, rope="reset", temperature=1.0, top_p=1.0,
                     compile=who == "compiled", stats=stats)
            times.append(stats["decode_s"] / stats["decode_steps"])
        table.append(rounded(who=who, rows=64, ms=1e3 * min(times), tokens_per_s=64 / min(times)))
    print(f"sampling from a model of 3 layers of 64, {torch.get_num_threads()} threads: "
          f"the fastest of {repeats} runs of 400 tokens")
    print_table(table)
    return table
