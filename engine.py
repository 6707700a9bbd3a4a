"""
Sampling: prefill, a decode loop over a fixed number of rows, and what makes a row stop.

    from engine import generate
    done = generate(model, [prompt_ids], 10_000, window=2048, stop_ids=tokenizer.eos_ids)[0]

Continuous batching in one rule: rows 0..n-1 of the cache are running, and a row that finishes is refilled from the queue at once
or, when the queue is empty, overwritten by the last running row, so that no step is spent on what is finished. The rows of a
fixed-size cache are interchangeable, so nothing is reallocated, and there are no pages.

A prompt that comes several times (the G samples of a group) is prefilled once: its prefix lies untouched in the row of any
sibling, even a finished one, and is copied from there.

Every token is drawn by inverse CDF from one uniform number, a hash of (stream, index of the token); seed s gives prompt i the
stream (s, i). So a row gives the same tokens alone, beside others, or admitted late: exactly in float64, up to ties at rounding in
float32. In bfloat16 the rounding of a matrix product depends on how many rows it has, so tokens may part.

Left out on purpose: beam search, penalties, speculative decoding; a prompt is prefilled in one piece and by itself.
"""
import math
import operator
import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from attention import upcast
from device import free_bytes
from sliding_cache import SlidingCache, layer_windows, row_bytes


def uniform(stream, *counters):
    """One number in [0, 1) for each element of the int64 tensors `stream` and `counters` (broadcast): a hash, so that the number
    does not depend on what was drawn before or beside it. The mixing is that of splitmix64 (Steele, Lea and Flood 2014)."""
    for counter in counters:
        stream = mix(stream, counter)
    bits, dtype = (24, torch.float32) if stream.device.type == "mps" else (53, torch.float64)      # no float64 on mps
    return ((stream >> (64 - bits)) & ((1 << bits) - 1)).to(dtype) / (1 << bits)


def mix(x, counter):
    """Hash the int64 tensor x and counter (a tensor or an int) into one int64 tensor; products wrap around."""
    x = x + (torch.as_tensor(counter, device=x.device) + 1) * -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor                 # torch shifts in the sign bit: mask it off
    return x


def hashed(seed, *numbers):
    """An int to seed the stream with that belongs to these numbers: another seed gives another one for each of them."""
    x = mix(torch.tensor(seed), 0)
    for n in numbers:
        x = mix(x, n)
    return int(x)


POLICIES = {  # what each of the family means for generate(); prefix_sliding is its defaults
    "prefix_sliding": {}, "full": dict(window=None), "sliding": dict(prefix_len=0), "streaming": dict(prefix_len=4, rope="reset")}


@dataclass
class Completion:
    """tokens includes the stop token. logprobs: of each token under the temperature-scaled distribution before any truncation or
    ban (at temperature 0: of temperature 1). sampled: False where the token was forced. finish_reason: "stop" | "length"."""
    prompt: list
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    sampled: list = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Thinking:
    """A budget for the tokens between <think> and </think>, after s1 (arXiv 2501.19393): an end that comes before `minimum` tokens
    is replaced by `wait_ids`, and after `maximum` tokens (-1 = unlimited) the end is forced. `start_id` may stand in the prompt or
    be emitted; None: a completion begins thinking. Ids, not text: </think> is one token, and its pieces are another thing."""
    end_id: int
    start_id: int | None = None
    minimum: int = 0
    maximum: int = -1
    wait_ids: tuple = ()

    def __post_init__(self):
        if self.minimum < 0:
            raise ValueError(f"at least {self.minimum} thinking tokens: 0 or more")
        if self.minimum > 0 and not self.wait_ids:
            raise ValueError(f"a minimum of {self.minimum} thinking tokens needs wait_ids, what to say instead of ending")
        if self.maximum < -1 or 0 <= self.maximum < self.minimum:
            raise ValueError(f"at most {self.maximum} thinking tokens: -1 for unlimited, or at least the minimum, {self.minimum}")

    def open_in(self, prompt):
        """Whether a completion of this prompt begins inside the thinking."""
        return self.start_id is None or next((t == self.start_id for t in reversed(prompt) if t in (self.start_id, self.end_id)), False)


@dataclass
class Sequence:
    """A prompt that occupies a row of the cache, and what it has come to."""
    index: int                                    # of the prompt
    limit: int                                    # most new tokens
    completion: Completion
    thinking: bool                                # between <think> and </think>
    draws: list = field(default_factory=list)     # uniform numbers for the next tokens
    thought: int = 0                              # tokens spent there
    forced: deque = field(default_factory=deque)  # tokens that come next, whatever is drawn


def plain_step(model, cache, rope="continue"):
    """One step of decoding: step(idx, rows) -> logits (rows, vocab_size) behind the tokens idx (rows, 1)."""
    return lambda idx, rows=slice(None): model.lm_head(model.features(idx, rope=rope, cache=cache, rows=rows)[:, 0])


@torch.no_grad()
def generate(model, prompts, max_new_tokens, *, prefix_len=None, window=4096, rope="continue", cache_class=SlidingCache, temperature=0.6,
             top_k=None, top_p=0.95, min_new_tokens=0, stop_ids=(), stop_strings=(), decode=None, thinking=None, n_vocab=None,
             seed=0, rows=None, on_token=None, stats=None, compile=False, int8=False):
    """Sample one completion for each of `prompts` (lists of token ids). -> list[Completion], in the order of the prompts.

    max_new_tokens, min_new_tokens, prefix_len, seed: one int, or one per prompt (a prompt with a seed of its own has the stream (seed, 0),
    as if it were alone). prefix_len: how many tokens each row keeps for good; None = its whole prompt. window, rope: see GPT.features.
    cache_class: SlidingCache or a subclass. temperature >= 0 (0 = argmax), top_k None or >= 1, 0 < top_p <= 1.
    stop_ids: end tokens, not drawn before min_new_tokens. stop_strings: a sequence ends, at any length, with the token that completes
    one of them in its text, decode(ids); the tokens are not cut, tokenizer.stream(ids, stop) cuts the text. thinking: a Thinking, or None.
    n_vocab: ids from here on (padding of the embedding) are never drawn; None = vocab_size.
    rows: how many sequences run at once; None = all, or as many as fit the memory. on_token(i, token): called once per token.
    stats: a dict that receives cache_bytes, rows, prefills, prefill_s, decode_steps, decode_s, compile_s (seconds).
    compile: take the steps by fast/step.py, which compiles for some seconds first. int8: do so, with weights of 8 bits, on a CPU.
    Raises ValueError for arguments out of range, and for a cache that does not fit the memory.
    """
    n, config, weight = len(prompts), model.config, model.lm_head.weight
    stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    limits, seeds = _per_prompt(max_new_tokens, n, "max_new_tokens"), _per_prompt(seed, n, "seed")
    least = _per_prompt(min_new_tokens, n, "min_new_tokens")
    prefixes = None if prefix_len is None else _per_prompt(prefix_len, n, "prefix_len")
    _check(prompts, limits, config, prefixes, temperature, top_k, top_p, stop_ids, stop_strings, decode, thinking, n_vocab, rows)
    if not prompts:
        return []
    # A prefix or a window longer than what any sequence can fill would cost memory and change nothing.
    lengths = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    longest = max(lengths)
    prefixes = [min(P, longest) for P in prefixes or map(len, prompts)]
    room = max(1, max(length - P for length, P in zip(lengths, prefixes, strict=True)))
    windows = [w and min(w, room) for w in layer_windows(config, window)]
    fit = int(0.8 * free_bytes(weight.device) / row_bytes(config, windows, max(prefixes), longest, weight.dtype))
    n_rows = min(n, rows or max(fit, 1))
    cache = cache_class(config, n_rows, max(prefixes), windows, max_len=longest, dtype=weight.dtype, device=weight.device)
    stats = {} if stats is None else stats
    stats.update(cache_bytes=cache.nbytes, rows=n_rows, prefills=0, prefill_s=0.0, decode_steps=0, decode_s=0.0, compile_s=0.0)

    streams = mix(torch.tensor([(s + 2**63) % 2**64 - 2**63 for s in seeds]), 0 if hasattr(seed, "__len__") else torch.arange(n))
    completions, keys = [Completion(list(prompt)) for prompt in prompts], [*zip(map(tuple, prompts), prefixes, strict=True)]
    still_to_come, first_logits, occupant = Counter(keys), {}, [None] * n_rows        # occupant: whose prompt a row held last
    queue, ends = deque(range(n)), [t for t in stop_ids if t < config.vocab_size]

    def prefill(row, i):
        """Put prompt i into a row. -> logits (1, vocab_size) for its first new token"""
        key, start = keys[i], time.perf_counter()
        prompt, P = key
        sibling = next((r for r in range(n_rows) if occupant[r] == key and cache.holds_first(r, len(prompt))), None)
        if sibling is not None:
            cache.copy(sibling, row, len(prompt))
        else:
            cache.reset(row, P)
            idx = torch.tensor([prompt], device=weight.device)
            first_logits[key] = model.lm_head(model.features(idx, rope=rope, cache=cache, rows=[row])[:, -1])
            stats["prefills"] += 1
        cache.streams[row], occupant[row] = streams[i], key
        still_to_come[key] -= 1
        stats["prefill_s"] += time.perf_counter() - start
        return first_logits[key] if still_to_come[key] else first_logits.pop(key)

    def draw(s):
        """The uniform number for the next token of a sequence; they are hashed many at once."""
        n = len(s.completion.tokens)
        if n % 256 == 0:
            s.draws = uniform(streams[s.index], torch.arange(n, n + 256)).tolist()
        return s.draws[n % 256]

    def accept(sequences, logits):
        """Choose and record the next token of each of the sequences, given its logits (len(sequences), vocab_size)."""
        logits = upcast(logits)
        if temperature > 0:
            logits = (logits - logits.amax(-1, keepdim=True)) / temperature           # a tiny temperature must not overflow
        u = torch.tensor([draw(s) for s in sequences], dtype=torch.float64)           # which mps does not have
        u = u.to(logits.device, torch.float32 if logits.device.type == "mps" else torch.float64)
        early = [i for i, s in enumerate(sequences) if len(s.completion.tokens) < least[s.index]] if ends else []
        allowed = logits.clone() if early or n_vocab is not None else logits
        allowed[:, config.vocab_size if n_vocab is None else n_vocab:] = float("-inf")
        if early:
            allowed[torch.tensor(early)[:, None], torch.tensor(ends)] = float("-inf")
        tokens = sample(allowed, u, temperature, top_k, top_p)                        # (rows,)
        chosen = [(token, False) for token in tokens.tolist()]
        if thinking is not None:
            chosen = [budget(s, token, thinking, stop_ids) for s, (token, _) in zip(sequences, chosen, strict=True)]
            tokens = torch.tensor([token for token, _ in chosen], device=logits.device)
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        for s, (token, is_forced), logprob in zip(sequences, chosen, logprobs, strict=True):
            done = s.completion
            if math.isnan(logprob):
                raise ValueError(f"prompt {s.index}: the model's logits are not finite behind {len(done.tokens)} new tokens")
            done.tokens.append(token)
            done.logprobs.append(logprob)
            done.sampled.append(not is_forced)
            if token in stop_ids or stop_strings and _stops(done.tokens, stop_strings, decode):
                done.finish_reason = "stop"
            elif len(done.tokens) == s.limit:
                done.finish_reason = "length"
            if on_token:
                on_token(s.index, token)

    def admit(row):
        """Fill a row from the queue. -> the sequence, which has its first token and is not finished, or None: the queue is empty"""
        while queue:
            i = queue.popleft()
            s = Sequence(i, limits[i], completions[i], thinking=thinking is not None and thinking.open_in(prompts[i]))
            accept([s], prefill(row, i))
            if s.completion.finish_reason is None:
                return s
        return None

    if compile or int8:
        from fast.step import fast_step
        step = fast_step(model, cache, rope, int8)
    else:
        step = plain_step(model, cache, rope)
    stats["compile_s"] = getattr(step, "compile_s", 0.0)
    running = []
    while len(running) < n_rows and (s := admit(len(running))):
        running.append(s)
    while running:
        start = time.perf_counter()
        idx = torch.tensor([s.completion.tokens[-1:] for s in running], device=weight.device)         # (rows, 1)
        compiled = stats["compile_s"]
        accept(running, step(idx, slice(len(running))))                                               # logits (rows, vocab_size)
        stats["compile_s"] = getattr(step, "compile_s", 0.0)
        stats["decode_steps"] += 1
        stats["decode_s"] += time.perf_counter() - start - (stats["compile_s"] - compiled)
        for row in reversed(range(len(running))):
            if running[row].completion.finish_reason is None:
                continue
            if s := admit(row):
                running[row] = s
            elif row < len(running) - 1:
                cache.copy(len(running) - 1, row)
                running[row] = running.pop()
            else:
                running.pop()
    return completions


def sample(logits, u, temperature, top_k, top_p):
    """Draw a token id (rows,) from logits (rows, vocab_size), already divided by the temperature, -inf where banned.

    u (rows,) in [0, 1): the token is the first, in the order of the vocabulary, at which the cumulative probability of what top_k
    and then top_p leave exceeds u. Top-p keeps the fewest most probable tokens whose probabilities sum to it (arXiv 1904.09751);
    ties at either cut are kept. Temperature 0 takes the most probable token."""
    if temperature == 0:
        return logits.argmax(-1)
    p = logits.softmax(-1)
    if top_k is not None and top_k < p.size(-1):
        p = torch.where(p >= p.topk(top_k).values[:, -1:], p, 0)
    if top_p < 1:
        total = p.sum(-1, keepdim=True)
        top = p.topk(min(256, p.size(-1))).values                                     # a full sort only where these do not do
        if bool((top.sum(-1, keepdim=True) < top_p * total).any()):
            top = p.sort(descending=True).values
        n_keep = (top.cumsum(-1) - top < top_p * total).sum(-1, keepdim=True).clamp(min=1)         # a tiny top_p rounds to 0
        p = torch.where(p >= top.gather(-1, n_keep - 1), p, 0)
    cdf = p.cumsum(-1, dtype=u.dtype)                                                 # (rows, vocab_size)
    total = cdf[:, -1:].contiguous()
    token = torch.searchsorted(cdf, u[:, None] * total, right=True)
    return torch.minimum(token, torch.searchsorted(cdf, total))[:, 0].clamp(max=p.size(-1) - 1)   # u * total may round up to total


def budget(s, token, thinking, stop_ids):
    """The token that sequence s really gets where `token` was drawn, and whether it was forced. Keeps count of the thinking."""
    is_forced = bool(s.forced)
    token = s.forced.popleft() if s.forced else token
    if s.thinking and 0 <= thinking.maximum <= s.thought and token != thinking.end_id:
        s.forced.clear()
        token, is_forced = thinking.end_id, True
    elif not is_forced and s.thinking and s.thought < thinking.minimum and (token == thinking.end_id or token in stop_ids):
        token, *rest = thinking.wait_ids
        s.forced.extend(rest)
        is_forced = True
    if thinking is not None:
        s.thought += s.thinking and token != thinking.end_id
        s.thinking = token != thinking.end_id and (s.thinking or token == thinking.start_id)
    return token, is_forced


def _stops(tokens, stop_strings, decode):
    """Whether the text of the tokens has come to contain a stop string. One of n bytes that the last token completes lies within
    the last n tokens."""
    reach = max((len(s.encode()) for s in stop_strings), default=0)
    return reach > 0 and any(s in decode(tokens[-reach:]) for s in stop_strings)


def _per_prompt(value, n, name):
    """A list of n ints from one int or n of them."""
    try:
        values = list(map(operator.index, value if hasattr(value, "__len__") else [value] * n))
    except TypeError:
        values = None
    if values is None or len(values) != n:
        raise ValueError(f"{name} is one int or {n} of them, one per prompt, not {value!r}")
    return values


def _check(prompts, limits, config, prefixes, temperature, top_k, top_p, stop_ids, stop_strings, decode, thinking, n_vocab, rows):
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, list | tuple) or not all(isinstance(token, int) for token in prompt):
            raise ValueError(f"prompt {i} is no list of token ids but {str(prompt)[:60]!r}")
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty: sampling needs at least one token to begin with")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise ValueError(f"prompt {i} has token ids from {min(prompt)} to {max(prompt)}, the model knows 0 to {config.vocab_size - 1}")
    for name, ok, value, right in (
            ("max_new_tokens", min(limits, default=1) >= 1, min(limits, default=1), "at least 1"),
            ("prefix_len", min(prefixes or [0]) >= 0, min(prefixes or [0]), "None (the whole prompt) or at least 0"),
            ("stop_ids", isinstance(stop_ids, Collection) and all(isinstance(t, int) and t >= 0 for t in stop_ids), stop_ids,
             "a list of token ids"),
            ("temperature", temperature >= 0, temperature, "at least 0 (0 = the most probable token)"),
            ("top_k", top_k is None or top_k >= 1, top_k, "None or at least 1"),
            ("top_p", 0 < top_p <= 1, top_p, "above 0 and at most 1"),
            ("n_vocab", n_vocab is None or 1 <= n_vocab, n_vocab, "None or at least 1"),
            ("rows", rows is None or rows >= 1, rows, "None (as many as fit) or at least 1"),
            ("thinking", thinking is None or max(thinking.end_id, *thinking.wait_ids, 0) < config.vocab_size, thinking,
             f"made of ids below {config.vocab_size}"),
            ("stop_strings", not stop_strings or decode is not None, stop_strings, "given together with decode"),
            ("stop_strings", all(isinstance(s, str) and s for s in stop_strings), stop_strings, "strings, and not empty")):
        if not ok:
            raise ValueError(f"{name}={value!r}: must be {right}")
