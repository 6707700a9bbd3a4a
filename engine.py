"""
Sampling: prefill, a decode loop over a fixed number of rows, and what makes a row stop.

    from engine import generate
    done = generate(model, [prompt_ids], 10_000, window=2048, stop_ids=tokenizer.eos_ids)[0]

Continuous batching in one rule: rows 0..n-1 of the cache are running. A row that finishes is refilled from
the queue at once or, when the queue is empty, overwritten by the last running row, so that no step is spent
on what is finished. The rows of a fixed-size cache are interchangeable: nothing is reallocated, and there
are no pages.

A prompt that comes several times (the G samples of a group) is read once. Its prefix lies untouched in the
row of any sibling, even a finished one, and is copied from there.

Every token is drawn by inverse CDF from one uniform number, a hash of (stream, index of the token); seed s
gives prompt i the stream (s, i). So a row gives the same tokens alone, beside others, or admitted late:
exactly in float64, up to ties at rounding in float32. In bfloat16 the rounding of a matrix product depends
on how many rows it has, so tokens may part.

Left out on purpose: beam search, penalties, speculative decoding; a prompt is read in one piece, by itself.
"""
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from attention import upcast
from device import free_bytes
from sliding_cache import SlidingCache, layer_windows, row_bytes

POLICIES = {  # what each of the family means for generate(); prefix_sliding is its defaults
    "prefix_sliding": {},
    "full": dict(window=None),
    "sliding": dict(prefix_len=0),
    "streaming": dict(prefix_len=4, rope="reset"),
}


@dataclass
class Completion:
    """What a prompt has come to.

    tokens: the new ones, the stop token included. logprobs: of each token under the temperature-scaled
    distribution before any truncation or ban (at temperature 0: of temperature 1). sampled: False where the
    token was forced. finish_reason: "stop" | "length"."""
    prompt: list
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    sampled: list = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Sampling:
    """How tokens are drawn, and what ends a sequence. Raises ValueError for what is out of range."""
    temperature: float = 0.6          # >= 0; 0 = always the most probable token
    top_k: int | None = None          # None or >= 1: draw from this many most probable tokens
    top_p: float = 0.95               # 0 < top_p <= 1: draw from the fewest whose probabilities sum to this
    n_vocab: int | None = None        # ids from here on (padding of the embedding) are never drawn
    stop_ids: Collection = ()         # end tokens
    stop_strings: Collection = ()     # a sequence ends with the token that completes one of these in its text
    decode: Callable | None = None    # gives the text of a list of ids; needed for stop_strings

    def __post_init__(self):
        if isinstance(self.stop_strings, str):
            self.stop_strings = [self.stop_strings]
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: at least 0 (0 = the most probable token)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: None or at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: above 0 and at most 1")
        if self.n_vocab is not None and self.n_vocab < 1:
            raise ValueError(f"n_vocab={self.n_vocab}: None or at least 1")
        ids = self.stop_ids
        if not isinstance(ids, Collection) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError(f"stop_ids={self.stop_ids!r}: a list of token ids")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise ValueError(f"stop_strings={self.stop_strings!r}: strings, and not empty")
        if self.stop_strings and not self.decode:
            raise ValueError(f"stop_strings={self.stop_strings!r}: need decode, too")

    def ends(self, tokens):
        """Whether a sequence is over with the last of its tokens."""
        if tokens[-1] in self.stop_ids:
            return True
        for text in self.stop_strings:
            n_bytes = len(text.encode())    # and a token has one at least
            if text in self.decode(tokens[-n_bytes:]):
                return True
        return False


@dataclass
class Sequence:
    """A prompt on its way through a row of the cache."""
    index: int                # of the prompt
    completion: Completion    # grows by a token per step
    prefix_len: int           # tokens kept for good
    min_new: int              # tokens before an end token may be drawn
    max_len: int              # tokens, those of the prompt included, with which it is over
    stream: int               # which uniform numbers it draws
    choose: Callable          # has the last word on each of its tokens


def as_drawn(prompt):
    """What generate takes for `choose` when every token is to stay what was drawn."""
    return lambda token: (token, False)


@torch.no_grad()
def generate(model, prompts, max_new_tokens, *, min_new_tokens=0, prefix_len=None, window=4096,
             rope="continue", cache_class=SlidingCache, seed=0, rows=None, choose=as_drawn, on_token=None,
             stats=None, compile=False, int8=False, **settings):
    """Sample one completion for each of `prompts`, lists of token ids. -> list[Completion], in their order.

    max_new_tokens, min_new_tokens, prefix_len, seed: one int, or one per prompt (a prompt with a seed of its
    own has the stream (seed, 0), as if it were alone). min_new_tokens: how many come before a stop id may be
    drawn. prefix_len: how many tokens each row keeps for good; None = its whole prompt. window, rope: see
    GPT.features. cache_class: SlidingCache, or one that evicts otherwise. rows: how many sequences run at
    once; None = all, or as many as fit the memory. settings: the fields of Sampling.

    choose: has the last word on every token. choose(prompt) is called once per sequence and gives a function
    for it alone, called as (token drawn) -> (token to take, whether it was forced). See thinking.py.
    on_token(i, token): called once per token of prompt i. stats: a dict that receives cache_bytes, rows,
    prefills, prefill_s, decode_steps, decode_s, compile_s (seconds).
    compile: take the steps by fast/step.py, which compiles for some seconds first. int8: do so, with weights
    of 8 bits, on a CPU.
    Raises ValueError for arguments out of range, and for a cache that does not fit the memory.
    """
    sampling = Sampling(**settings)
    if not prompts:
        return []
    check_prompts(prompts, model.config.vocab_size)
    sequences = new_sequences(prompts, max_new_tokens, min_new_tokens, prefix_len, seed, choose)
    cache = new_cache(cache_class, model, sequences, window, rows)
    step = read = plain_step(model, cache, rope)
    if compile or int8:
        from fast.step import fast_step
        step = fast_step(model, cache, rope, int8)
    compiled_s = step.compile_s    # later on a step may compile for each new number of rows
    stats = {} if stats is None else stats
    stats.update(cache_bytes=cache.nbytes, rows=cache.batch_size, prefills=0, decode_steps=0,
                 prefill_s=0.0, decode_s=0.0)
    prefill = SharedPrefill(read, cache, stats)
    queue = deque(sequences)

    def admit(row):
        """Fill a row from the queue. -> a sequence that goes on after its first token; None: none is left"""
        while queue:
            sequence = queue.popleft()
            start = time.perf_counter()
            logits = prefill(row, sequence)
            stats["prefill_s"] += time.perf_counter() - start
            accept([sequence], logits, sampling, on_token)
            if not sequence.completion.finish_reason:
                return sequence
        return None

    running = []    # running[row] is the sequence in that row
    while len(running) < cache.batch_size and (sequence := admit(len(running))):
        running.append(sequence)
    while running:
        start = time.perf_counter()
        newest = [sequence.completion.tokens[-1:] for sequence in running]
        idx = torch.tensor(newest, device=cache.length.device)    # (rows, 1)
        logits = step(idx, slice(len(running)))                   # (rows, vocab_size)
        accept(running, logits, sampling, on_token)
        stats["decode_steps"] += 1
        stats["decode_s"] += time.perf_counter() - start
        for row in reversed(range(len(running))):
            if not running[row].completion.finish_reason:
                continue
            if sequence := admit(row):
                running[row] = sequence
                continue
            last = running.pop()
            if row < len(running):
                cache.copy(len(running), row)
                running[row] = last
    stats["compile_s"] = step.compile_s
    stats["decode_s"] -= step.compile_s - compiled_s
    return [sequence.completion for sequence in sequences]


def accept(sequences, logits, sampling, on_token):
    """Give each sequence its next token, chosen by its row of logits (len(sequences), vocab_size)."""
    logits = upcast(logits)
    if sampling.temperature > 0:
        highest = logits.amax(-1, keepdim=True)    # without it a tiny temperature would overflow
        logits = (logits - highest) / sampling.temperature
    lengths = [len(s.completion.tokens) for s in sequences]
    streams = torch.tensor([s.stream for s in sequences])
    u = uniform(streams, torch.tensor(lengths))    # (rows,)
    u = u.to(logits.device, torch.float32 if logits.device.type == "mps" else torch.float64)
    allowed = logits[:, :sampling.n_vocab].clone()
    early = [row for row, s in enumerate(sequences) if lengths[row] < s.min_new]
    for token in sampling.stop_ids:
        if token < allowed.size(-1):
            allowed[early, token] = -math.inf
    drawn = sample(allowed, u, sampling.temperature, sampling.top_k, sampling.top_p)
    choices = [s.choose(token) for s, token in zip(sequences, drawn.tolist(), strict=True)]
    tokens = torch.tensor([token for token, _ in choices], device=logits.device)
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]    # (rows,)
    for sequence, (token, forced), logprob in zip(sequences, choices, logprobs.tolist(), strict=True):
        i, done = sequence.index, sequence.completion
        if math.isnan(logprob):
            raise ValueError(
                f"prompt {i}: the model's logits are not finite behind {len(done.tokens)} new tokens")
        done.tokens.append(token)
        done.logprobs.append(logprob)
        done.sampled.append(not forced)
        if sampling.ends(done.tokens):
            done.finish_reason = "stop"
        elif len(done.prompt) + len(done.tokens) == sequence.max_len:
            done.finish_reason = "length"
        if on_token:
            on_token(i, token)


def sample(logits, u, temperature, top_k, top_p):
    """Draw a token id (rows,) from logits (rows, vocab_size), divided by the temperature, -inf where banned.

    u (rows,) in [0, 1): the token is the first, in the order of the vocabulary, at which the cumulative
    probability of what top_k and then top_p leave exceeds u. Top-p keeps the fewest most probable tokens
    whose probabilities sum to it (arXiv 1904.09751); ties at either cut are kept. Temperature 0 takes the
    most probable token."""
    if temperature == 0:
        return logits.argmax(-1)
    p = logits.softmax(-1)
    if top_k is not None and top_k < p.size(-1):
        p = torch.where(p >= p.topk(top_k).values[:, -1:], p, 0)
    if top_p < 1:
        mass = top_p * p.sum(-1, keepdim=True)
        top = p.topk(min(256, p.size(-1))).values    # a full sort only where these do not do
        if (top.sum(-1, keepdim=True) < mass).any():
            top = p.sort(descending=True).values
        n_keep = (top.cumsum(-1) - top < mass).sum(-1, keepdim=True)
        least = top.gather(-1, n_keep.clamp(min=1) - 1)    # a tiny top_p rounds to 0
        p = torch.where(p >= least, p, 0)
    cdf = p.cumsum(-1, dtype=u.dtype)    # (rows, vocab_size)
    total = cdf[:, -1:].contiguous()
    token = torch.searchsorted(cdf, u[:, None] * total, right=True)
    last = torch.searchsorted(cdf, total)    # u * total may round up to total
    return torch.minimum(token, last)[:, 0].clamp(max=p.size(-1) - 1)


def plain_step(model, cache, rope="continue"):
    """What reads tokens: step(idx (rows, T), rows) appends them to these rows of the cache and returns the
    logits (rows, vocab_size) behind the last of them. For T = 1 fast/step.py has faster ones."""
    def step(idx, rows=slice(None)):
        return model.lm_head(model.features(idx, rope=rope, cache=cache, rows=rows)[:, -1])
    step.compile_s = 0.0
    return step


class SharedPrefill:
    """Puts prompts into rows of a cache. One that a row still holds is copied from there, not read again."""

    def __init__(self, read, cache, stats):
        self.read, self.cache, self.stats = read, cache, stats
        self.filled = {}    # row: what it was last filled with, and the logits behind that

    def __call__(self, row, sequence):
        """-> logits (1, vocab_size) for the first new token of the sequence, which now has this row"""
        prompt = sequence.completion.prompt
        key = (prompt, sequence.prefix_len)    # with another prefix it would go on to keep other tokens
        for sibling, (other, known) in self.filled.items():
            if other == key and self.cache.holds_first(sibling, len(prompt)):
                self.cache.copy(sibling, row, len(prompt))
                logits = known
                break
        else:
            self.stats["prefills"] += 1
            self.cache.reset(row, min(sequence.prefix_len, self.cache.max_prefix))
            logits = self.read(torch.tensor([prompt], device=self.cache.length.device), [row])
        self.cache.streams[row] = sequence.stream
        self.filled[row] = (key, logits)
        return logits


def check_prompts(prompts, vocab_size):
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, list | tuple) or not all(isinstance(token, int) for token in prompt):
            raise ValueError(f"prompt {i} is no list of token ids but {str(prompt)[:60]!r}")
        if not prompt:
            raise ValueError(f"prompt {i} is empty: sampling needs at least one token to begin with")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocab_size:
            raise ValueError(f"prompt {i} has ids from {low} to {high}, the model has 0 to {vocab_size - 1}")


def per_prompt(value, n, name):
    """A list of n ints from one int or n of them."""
    values = value if hasattr(value, "__len__") else [value] * n
    if len(values) != n or not all(hasattr(v, "__index__") for v in values):
        raise ValueError(f"{name} is one int or {n} of them, one per prompt, not {value!r}")
    return [int(v) for v in values]


def new_sequences(prompts, max_new_tokens, min_new_tokens, prefix_len, seed, choose):
    """A Sequence for each prompt."""
    n = len(prompts)
    whole = [len(prompt) for prompt in prompts]
    prefixes = per_prompt(whole if prefix_len is None else prefix_len, n, "prefix_len")
    most = per_prompt(max_new_tokens, n, "max_new_tokens")
    least = per_prompt(min_new_tokens, n, "min_new_tokens")
    if min(most) < 1:
        raise ValueError(f"max_new_tokens={min(most)}: at least 1")
    seeds = [(s + 2**63) % 2**64 - 2**63 for s in per_prompt(seed, n, "seed")]    # any int, as one of 64 bits
    streams = mix(torch.tensor(seeds), 0 if hasattr(seed, "__len__") else torch.arange(n)).tolist()
    sequences = []
    for i, prompt in enumerate(prompts):
        completion = Completion(list(prompt))
        max_len = len(prompt) + most[i]
        sequence = Sequence(i, completion, prefixes[i], least[i], max_len, streams[i], choose(prompt))
        sequences.append(sequence)
    return sequences


def new_cache(cache_class, model, sequences, window, rows):
    """A cache for these sequences. A prefix or a window longer than what any of them can fill would cost
    memory and change nothing, so it is cut."""
    config, weight = model.config, model.lm_head.weight
    max_len = max(s.max_len for s in sequences)
    max_prefix = min(max_len, max(s.prefix_len for s in sequences))
    max_window = max(1, max(s.max_len - s.prefix_len for s in sequences))
    windows = [w and min(w, max_window) for w in layer_windows(config, window)]
    if rows is None:
        one = row_bytes(config, windows, max_prefix, max_len, weight.dtype)
        rows = max(1, int(0.8 * free_bytes(weight.device) / one))
    if rows < 1:
        raise ValueError(f"rows={rows}: None (as many as fit) or at least 1")
    rows = min(rows, len(sequences))
    return cache_class(config, rows, max_prefix, windows,
                       max_len=max_len, dtype=weight.dtype, device=weight.device)


def uniform(stream, *counters):
    """One number in [0, 1) for each element of the int64 tensors `stream` and `counters` (broadcast): a hash,
    so that the number does not depend on what was drawn before or beside it. The mixing is that of splitmix64
    (Steele, Lea and Flood 2014)."""
    for counter in counters:
        stream = mix(stream, counter)
    # mps has no float64
    bits, dtype = (24, torch.float32) if stream.device.type == "mps" else (53, torch.float64)
    return ((stream >> (64 - bits)) & ((1 << bits) - 1)).to(dtype) / (1 << bits)


def mix(x, counter):
    """Hash the int64 tensor x and counter (a tensor or an int) into one int64 tensor; products wrap."""
    # 2**64 / golden ratio, as a signed number
    x = x + (torch.as_tensor(counter, device=x.device) + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        # torch shifts in the sign bit: mask it off
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def hashed(seed, *numbers):
    """An int to seed the stream with that belongs to these numbers: another seed gives another for each."""
    x = mix(torch.tensor(seed), 0)
    for n in numbers:
        x = mix(x, n)
    return int(x)
