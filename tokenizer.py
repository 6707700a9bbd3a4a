r"""
Text to token ids and back: byte level, for models trained from scratch, and any byte-level BPE vocabulary in a Hugging Face tokenizer.json.

    python tokenizer.py data/smollm2 "Hello world 2026"        # prints ids and pieces
    python tokenizer.py bytes "héllo"

    tokenizer = load_tokenizer("data/smollm2")                 # or "bytes", or a hub name such as "Qwen/Qwen3-1.7B"
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is <|im_end|>?"}])      # what a user types is text, never control

The ids equal those of the `tokenizers` library on every string. Three things make that so:
1. A text is cut into pieces by the model's own pattern, in Python's `re`, with \p{L}, \p{N}, \p{M} and \s written out as what they mean in
   tiktoken's regular expressions, and so in those of `tokenizers`: other libraries know another version of Unicode.
2. A tiktoken Encoding merges each piece. tiktoken joins any neighbours that spell a token, lowest rank first; the file lists which pairs
   may join, in order. So the Encoding gets exactly the tokens that the listed merges build from their own bytes (`reachable`), ranked by
   the merge that completes them. Proof that both then do the same: neighbours u, v that spell a token t were built inside t's span alone,
   by the first merges of t on its own. That run ends in t, and its only state of two parts is the listed pair that completes t, with that
   rank: so u, v are that pair. And a token that its own bytes do not reach is reached nowhere.
3. Bytes that a vocabulary lacks (SmolLM2: six control characters, and what begins the characters from U+40000 to U+BFFFF) are dropped in
   silence, before merging, as there.
Deliberately absent: post-processors (nothing is added in front or behind; chat templates write their own <bos>), SentencePiece, WordPiece.
"""
import codecs
import functools
import json
import re
import sys
import unicodedata
from datetime import datetime
from itertools import pairwise

import tiktoken

from checkpoint import local_folder, read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "*.jinja")

# GPT-2's pattern, and the same after each digit was set apart (SmolLM2): spaces before a digit stay whole, as they do at the end of a text.
# `tokenizers` sets digits apart by Rust's own tables, which have two more ranges (Unicode 17) than its regular expressions.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = "\\p{N}\U00011de0-\U00011de9\U00016ff4-\U00016ff6"
GPT2_DIGITS = rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+|[{DIGIT}]| ?[^\s\p{{L}}{DIGIT}]+|\s+(?![^\s{DIGIT}])|\s+"
SPLITS = (  # of Qwen2, Qwen3 and R1-Distill-Qwen; of Llama-3; of Qwen3.5. They match every character: nothing falls between two pieces
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# The NFC of `tokenizers` stopped at Unicode 9. In these ranges lies all that later versions compose or reorder; it stays where it stands
AFTER_UNICODE_9 = re.compile(
    "([\u05c8-\u05c9\u07fd\u0897-\u08d3\u09fe\u0c3c\u0d3b-\u0d3c\u0eba\u1715\u1abf-\u1af0\u1df6-\u1dfa\ua82c\U000105c9-\U000105e4"
    "\U00010d24-\U00010f85\U00011070\U0001133b\U00011382-\U000113d0\U0001145e\U00011839-\U00011a99\U00011d42-\U0001612f"
    "\U00016d63-\U00016ff1\U0001d127-\U0001d128\U0001d250-\U0001d281\U0001e08f-\U0001e6f5])")

# GPT-2 vocabularies write each byte as one printable character: itself where it is one, else the next free one from U+0100 on
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE = {chr(b): b for b in PRINTABLE} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in PRINTABLE)}

# The byte-level tokenizer, in the same format: no merges, ids 0..255 are the bytes, 256 ends a text. In a chat each message is followed by
# a newline, the assistant's by <|endoftext|> instead, so that a model can learn where to stop.
BYTES = {"model": {"vocab": BYTE, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"},
         "added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": True}]}
BYTES_SETTINGS = {"eos_token": "<|endoftext|>", "chat_template": "{% for m in messages %}{{ m['content'] }}"
                  "{{ '<|endoftext|>' if m['role'] == 'assistant' else '\n' }}{% endfor %}"}


def load_tokenizer(path_or_hub_name):
    """
    The Tokenizer of a model: of a folder, a hub name, or "bytes". A folder without tokenizer.json names another in its config.json
    ("tokenizer": "bytes"). FileNotFoundError if there is none, ValueError naming what in the files is not supported.
    """
    if path_or_hub_name == "bytes":
        return Tokenizer("bytes", BYTES, BYTES_SETTINGS)
    folder = local_folder(path_or_hub_name, TOKENIZER_FILES)
    spec, settings, config, generation = (read_json(folder / name, missing={}) for name in TOKENIZER_FILES[:4])
    eos_ids = [i for ids in (config.get("eos_token_id"), generation.get("eos_token_id")) for i in (ids if isinstance(ids, list) else [ids])]
    if not spec:
        named = config.get("tokenizer")
        if not isinstance(named, str) or named == str(path_or_hub_name):
            raise FileNotFoundError(f'{folder} has no tokenizer.json, and its config.json names none (such as "tokenizer": "bytes")')
        tokenizer = load_tokenizer(named)
        tokenizer.eos_ids = sorted({*tokenizer.eos_ids, *eos_ids} - {None})
        return tokenizer
    if (folder / "chat_template.jinja").exists():
        settings["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    try:
        return Tokenizer(str(path_or_hub_name), spec, settings, eos_ids)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{folder}: its tokenizer files are not as they should be: {type(error).__name__}: {error}") from None


def reachable(tokens, merges):
    """The `tokens` that `merges` (pairs, first ones first) build from their characters -> index of the last merge, -1 for one character."""
    rank_of, never, found = {pair: i for i, pair in enumerate(merges)}, len(merges), {}
    for token in tokens:
        parts, last = list(token), -1
        while len(parts) > 1:
            ranks = [rank_of.get(pair, never) for pair in pairwise(parts)]
            if (best := min(ranks)) == never:
                break
            i, last = ranks.index(best), best
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 1:
            found[token] = last
    return found


def pattern_of(pre):
    """The regular expression that cuts a text as the pre_tokenizer `pre` of a tokenizer.json does. ValueError naming an unknown one."""
    steps = (pre or {}).get("pretokenizers", [pre or {}])
    kinds, first, last = [step.get("type") for step in steps], steps[0], steps[-1]
    regex = last.get("use_regex", True)
    if not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and regex:
            return GPT2
        if kinds == ["Digits", "ByteLevel"] and regex and first.get("individual_digits"):
            return GPT2_DIGITS
        if kinds == ["Split", "ByteLevel"] and not regex and first.get("behavior") == "Isolated" and not first.get("invert"):
            if first["pattern"].get("Regex") in SPLITS:
                return first["pattern"]["Regex"]
    raise ValueError(f"pre_tokenizer {json.dumps(pre)} is not supported; known are ByteLevel, Digits (individual) + ByteLevel, and the "
                     "Split patterns of Qwen2, Qwen3, Qwen3.5 and Llama-3 + ByteLevel, all without add_prefix_space")


@functools.cache
def characters(name):
    r"""The characters that tiktoken's regular expressions count in a class such as \p{L}, as ranges to put between the [] of a pattern."""
    everything = "".join(chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000)
    encoding = tiktoken.Encoding(name, pat_str=name + "+", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={})
    members = [ord(c) for c in encoding.decode(encoding.encode_ordinary(everything))]
    starts = [c for before, c in pairwise([-9, *members]) if c != before + 1]
    ends = [c for c, after in pairwise([*members, -9]) if after != c + 1]
    return "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in zip(starts, ends, strict=True))


def python_pattern(pattern):
    """A pattern in tiktoken's language for Python's `re`, its character classes written out."""
    def write_out(match):
        inner = r"^\s" if match[0] == r"\S" else match[0].strip("[]")
        return "[" + re.sub(r"\\p\{\w\}|\\s", lambda name: characters(name[0]), inner) + "]"
    return re.compile(re.sub(r"\[[^\]]*\]|\\p\{\w\}|\\[sS]", write_out, pattern))


def nfc(text):
    """Unicode's composed form, as `tokenizers` has it."""
    return "".join(unicodedata.normalize("NFC", part) for part in AFTER_UNICODE_9.split(text))


def any_of(strings):
    """A pattern with one group that matches the longest of `strings`; nothing if there are none."""
    return re.compile("(" + ("|".join(re.escape(s) for s in sorted(strings, key=len, reverse=True)) or "(?!)") + ")")


class Tokenizer:
    """
    What load_tokenizer returns. `n_vocab` is 1 + the largest id, `eos_ids` a sorted list of the ids that end an answer, `eos_id` that of
    its own eos_token (what a chat's answers end with), `encoding` the tiktoken Encoding, whose tokens are ranks, not yet ids. Made from a
    parsed tokenizer.json and tokenizer_config.json, and the end ids that other files name.
    """

    def __init__(self, name, spec, settings, eos_ids=()):
        self.name, model, added = name, spec.get("model") or {}, spec.get("added_tokens") or []
        vocab, normalizer = model.get("vocab", {}), (spec.get("normalizer") or {}).get("type")
        refused = [] if vocab and model.get("type", "BPE") == "BPE" else [f"model type {model.get('type')!r}"]
        refused += [f"{key} {model[key]!r}" for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
                    if model.get(key)]
        refused += [f"normalizer {normalizer!r}"] if normalizer not in (None, "NFC") else []
        refused += [f"{flag} on {token['content']!r}" for token in added for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        self._missing = bytes(b for c, b in BYTE.items() if c not in vocab)
        if self._missing and model.get("unk_token") is not None:
            refused += [f"unk_token {model['unk_token']!r} for bytes that it lacks"]
        if refused:
            raise ValueError(f"{name}: its tokenizer.json has {', '.join(refused)}, which is not supported")
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        for pair in merges:
            if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
                raise ValueError(f"{name}: its tokenizer.json has a merge {' '.join(pair)!r} that does not make a token of two")

        self._added = {token["content"]: vocab.get(token["content"], token["id"]) for token in added}
        self._special = [token["content"] for token in added if token.get("special")]
        spelled = {token: bytes(map(BYTE.get, token)) for token in vocab if all(c in BYTE for c in token)}
        self._bytes = {i: spelled.get(token, token.encode()) for token, i in vocab.items()}
        self._bytes |= {i: content.encode() for content, i in self._added.items()}
        # Ranks below 256 are the bytes. Added tokens are never made of text, so they get none
        plain = {token: data for token, data in spelled.items() if token not in self._added or len(token) == 1}
        ranks = {token: 256 + last if last >= 0 else BYTE[token] for token, last in reachable(plain, merges).items()}
        self._ids = {rank: vocab[token] for token, rank in ranks.items()}
        self._whole = {data: vocab[token] for token, data in plain.items()} if model.get("ignore_merges") else {}
        pattern = pattern_of(spec.get("pre_tokenizer"))
        self.encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks={plain[t]: r for t, r in ranks.items()}, special_tokens={})
        self._pieces = python_pattern(pattern).findall
        self._piece = functools.lru_cache(1 << 16)(self._merge)

        self._normalize = nfc if normalizer else str
        late = {token["content"] for token in added if token.get("normalized")}  # looked for after normalisation only
        self._split = any_of(self._added.keys() - late).split
        self._late = {self._normalize(content): self._added[content] for content in late}
        self._split_late = any_of(self._late).split

        template = settings.get("chat_template") or []
        self._templates = {"default": template} if isinstance(template, str) else {item["name"]: item["template"] for item in template}
        names = {key: settings.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self._names = {key: value["content"] if isinstance(value, dict) else value for key, value in names.items() if value}
        eos = self._names.get("eos_token")
        own = self._added.get(eos, vocab.get(eos))
        self.eos_ids = sorted({*eos_ids, own} - {None})
        self.eos_id = self.eos_ids[0] if own is None and self.eos_ids else own
        self.n_vocab = 1 + max(self._bytes)

    def encode(self, text, allow_special=False):
        """
        Ids of a text, nothing in front or behind. Control strings in it (<|im_end|>, <think>) are text like any other; allow_special=True
        makes them their own ids, as in the `tokenizers` library. ValueError for half a surrogate pair, which UTF-8 cannot hold.
        """
        return self._parse(text) if allow_special else self._ordinary(text)

    def _ordinary(self, text):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"not valid Unicode: half a surrogate pair, U+{ord(text[error.start]):04X}, in the text") from None
        return [i for piece in self._pieces(self._normalize(text)) for i in self._piece(piece)]

    def _merge(self, piece):
        data = piece.encode()
        if data in self._whole:  # ignore_merges: Llama-3 has words that its merges do not build
            return [self._whole[data]]
        data = data.translate(None, self._missing)
        # tiktoken's method for one piece: it takes bytes that are no UTF-8 any more, but panics on none at all
        return [self._ids[rank] for rank in self.encoding._encode_single_piece(data)] if data else []

    def _parse(self, text, restore=str):
        ids = []
        for i, part in enumerate(self._split(text)):  # odd parts are control strings
            if i % 2:
                ids.append(self._added[part])
                continue
            for j, rest in enumerate(self._split_late(self._normalize(part))):
                ids.extend([self._late[rest]] if j % 2 else self._ordinary(restore(rest)))
        return ids

    def token_id(self, string):
        """Id of a control token such as "</think>" (special or just added), None if the model has no such token."""
        return self._added.get(string)

    def token_bytes(self, token):
        """Bytes of one id: a control token's are its name's, an id that the tokenizer does not know (a padded embedding row) has none."""
        return self._bytes.get(int(token), b"")

    def decode(self, ids):
        """Text of some ids, control tokens by name. Bytes that are no UTF-8 become U+FFFD, ids that the tokenizer does not know ""."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def stream(self, ids, stop=()):
        """Yields the text of an iterator of ids as it comes, in whole characters: in all decode(ids), up to the first `stop` string."""
        stream = TextStream(self, stop)
        for token in ids:
            if piece := stream.push(token):
                yield piece
            if stream.stopped:
                return
        if piece := stream.end():
            yield piece

    def encode_chat(self, messages, **template_args):
        """
        Ids of a conversation, a list of {"role": ..., "content": ...}, by the model's chat template. template_args are its variables:
        add_generation_prompt (True unless given), tools, enable_thinking, ... Only what the template itself writes is control. Control
        strings in messages and arguments are text, also when they come in parts that the template joins. One exception: in the assistant's
        own messages, tokens that the tokenizer does not mark as special (<think>, </think>, <tool_call>) keep their meaning. They are the
        model's syntax, and templates cut old reasoning at </think>. ValueError if there is no template, or if it fails on these messages.
        """
        if not isinstance(messages, (list, tuple)) or not all(isinstance(message, dict) for message in messages):
            raise ValueError('messages must be a list of dicts such as {"role": "user", "content": "Hi"}')
        name = "tool_use" if template_args.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(f"{self.name} has no chat template: write the whole prompt yourself and encode() it")
        # Templates strip, split and quote what they get. What must not become control goes through them as a word that occurs nowhere else
        mark, hidden = "hidden", []
        while mark in repr((messages, template_args, self._templates)):
            mark += "x"

        def hide(value, pattern):
            if isinstance(value, str):
                return pattern.sub(lambda match: hidden.append(match[0]) or f"{mark}{len(hidden) - 1}_", self._normalize(value))
            if isinstance(value, dict):
                return {key: hide(item, pattern) for key, item in value.items()}
            return [hide(item, pattern) for item in value] if isinstance(value, (list, tuple)) else value

        everything, special = hideable(tuple(self._added)), hideable(tuple(self._special))
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **hide(template_args, everything), **self._names}
        variables["messages"] = [hide(message, special if message.get("role") == "assistant" else everything) for message in messages]
        try:
            text = compile_template(self._templates[name]).render(variables)
        except Exception as error:  # a template fails in as many ways as a program: raise_exception, a missing key, None + "text" ...
            raise ValueError(f"the chat template of {self.name} failed: {' '.join(str(error).split())}") from None
        return self._parse(text, lambda part: re.sub(rf"{mark}(\d+)_", lambda match: hidden[int(match[1])], part))


@functools.lru_cache
def hideable(controls):
    """Pattern of the control strings, and of the head of one at the end of a text, which the next text could complete."""
    heads = {s[:n] for s in controls for n in range(1, len(s)) if not s[0].isalnum()}
    return re.compile(any_of(controls).pattern + "|" + any_of(heads).pattern + r"(?=\s*\Z)")


@functools.lru_cache
def compile_template(source):
    """A chat template, sandboxed because it came with a downloaded model, with the functions that transformers offers to templates."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, **options):  # jinja2's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    # {% generation %} marks, for other trainers, what to train on; here it is a block that is always shown
    source = re.sub(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})", lambda m: m[1] + ("endif" if m[2] else "if true") + m[3], source)
    return environment.from_string(source)


class TextStream:
    """
    Token ids in, text out, as soon as it is certain and never half a character. `stop`: a string or several; the text ends before that
    which is complete first (the longest, if several are at once), then `stopped` is True and nothing more comes. What may be the head
    of one is held back until that is decided.
    """

    def __init__(self, tokenizer, stop=()):
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stop:
            raise ValueError("a stop string must not be empty")
        self._tokenizer, self._held, self.stopped = tokenizer, "", False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token):
        """Takes one id, returns the text that is certain now, often ""."""
        return self._decide(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def end(self):
        """No more ids: returns the text that was held back, with U+FFFD for half a character."""
        return self._decide(self._utf8.decode(b"", final=True), final=True)

    def _decide(self, text, final=False):
        if self.stopped:
            return ""
        text = self._held + text
        found = min(((at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0), default=None)
        if found:
            self.stopped = True
            return text[:found[1]]
        heads = [len(text) - n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])]
        cut = len(text) if final else min(heads, default=len(text))
        self._held = text[cut:]
        return text[:cut]


if __name__ == "__main__":
    try:
        if len(sys.argv) != 3:
            raise ValueError('usage: python tokenizer.py <folder, hub name or bytes> "text"')
        tokenizer = load_tokenizer(sys.argv[1])
        ids = tokenizer.encode(sys.argv[2])
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(ids)
    print([tokenizer.decode([i]) for i in ids])
