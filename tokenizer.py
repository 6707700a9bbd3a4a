r"""
Text to token ids and back: byte level for models trained from scratch, and any byte-level BPE vocabulary in a
Hugging Face tokenizer.json.

    python tokenizer.py data/smollm2 "Hello world 2026"        # prints ids and pieces
    python tokenizer.py bytes "héllo"

    tokenizer = load_tokenizer("data/smollm2")                 # or "bytes", or a hub name: "Qwen/Qwen3-1.7B"
    ids = tokenizer.encode("What is <|im_end|>?")              # what a user types is text, never control
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is <|im_end|>?"}])

The `tokenizers` library cuts and merges text. What is added here: control strings such as <|im_end|> are
never made of text, only chat templates write them (`encode_chat`); and each id has its bytes, so that text
can be streamed.

Deliberately absent: post-processors (nothing is added in front or behind; a chat template writes its own
<bos>), SentencePiece, WordPiece.
"""
import codecs
import functools
import json
import re
import sys
from datetime import datetime

import tokenizers

from checkpoint import end_ids, local_folder, read_json
from configurator import run

JSON_FILES = ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"]
TOKENIZER_FILES = [*JSON_FILES, "*.jinja"]

# GPT-2 vocabularies write each byte as one printable character: itself where it is one, else the next free
# one from U+0100 on
BYTE = {chr(byte): byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "}
BYTE |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(BYTE.values())))}

# The byte-level tokenizer, in the same format: no merges, ids 0..255 are the bytes, 256 ends a text. In a
# chat a newline follows each message, but <|endoftext|> the assistant's: a model can learn where to stop.
BYTES = {
    "model": {"type": "BPE", "vocab": BYTE, "merges": []},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False},
    "added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": True}],
}
BYTES_SETTINGS = {
    "eos_token": "<|endoftext|>",
    "chat_template": "{% for m in messages %}{{ m['content'] }}"
                     "{{ '<|endoftext|>' if m['role'] == 'assistant' else '\n' }}{% endfor %}",
}


def load_tokenizer(path_or_hub_name):
    """The Tokenizer of a model: of a folder, a hub name, or "bytes". A folder without tokenizer.json names
    another in its config.json ("tokenizer": "bytes"). FileNotFoundError if there is none, ValueError naming
    what in the files is not supported."""
    if path_or_hub_name == "bytes":
        return Tokenizer("bytes", BYTES, BYTES_SETTINGS)
    folder = local_folder(path_or_hub_name, TOKENIZER_FILES)
    spec, settings, config, generation = (read_json(folder / name, missing={}) for name in JSON_FILES)
    eos_ids = end_ids(config) + end_ids(generation)
    if not spec:
        other = config.get("tokenizer")
        if not other or other == str(path_or_hub_name):
            raise FileNotFoundError(
                f'{folder} has no tokenizer.json, and its config.json names none ("tokenizer": "bytes")')
        tokenizer = load_tokenizer(other)
        tokenizer.eos_ids = sorted({*tokenizer.eos_ids, *eos_ids})
        return tokenizer
    if (folder / "chat_template.jinja").exists():
        settings["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    try:
        return Tokenizer(str(path_or_hub_name), spec, settings, eos_ids)
    except (AttributeError, KeyError, TypeError) as error:  # a part is missing, or of another type
        raise ValueError(f"{folder / 'tokenizer.json'} is damaged: {type(error).__name__} {error}") from error


class Tokenizer:
    """What load_tokenizer returns. Made from a parsed tokenizer.json (spec) and tokenizer_config.json
    (settings), and the end ids that other files name.

    n_vocab: 1 + the largest id. eos_ids: a sorted list of the ids that end an answer. eos_id: that of its
    own eos_token, which ends the answers of a chat."""

    def __init__(self, name, spec, settings, eos_ids=()):
        check_supported(name, spec)
        self.name = name
        vocab, added = spec["model"]["vocab"], spec.get("added_tokens") or []
        self._added = {token["content"]: token["id"] for token in added}
        self._text = text_tokenizer(name, spec, self._added)
        self._bytes = {i: spelled(token) or token.encode() for token, i in vocab.items()}
        self._bytes |= {i: content.encode() for content, i in self._added.items()}
        self.n_vocab = 1 + max(self._bytes)

        # Control strings marked as normalized are looked for after NFC, and only in what the others left
        self._normalize = self._text.normalizer.normalize_str if self._text.normalizer else str
        late = {token["content"] for token in added if token.get("normalized")}
        self._early_pattern = re.compile(any_of(self._added.keys() - late))
        self._late = {self._normalize(content): self._added[content] for content in late}
        self._late_pattern = re.compile(any_of(self._late))

        special = [token["content"] for token in added if token.get("special")]
        self._control, self._special_control = beginnings(self._added), beginnings(special)
        self._template = settings.get("chat_template")
        if isinstance(self._template, list):
            self._template = {item["name"]: item["template"] for item in self._template}.get("default")
        self._names = {}  # the control strings that templates know by their role
        for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
            if token := settings.get(role):
                self._names[role] = token["content"] if isinstance(token, dict) else token

        self.eos_id = self._added.get(self._names.get("eos_token"))
        self.eos_ids = sorted({*eos_ids, self.eos_id} - {None})
        if self.eos_id is None and self.eos_ids:
            self.eos_id = self.eos_ids[0]

    def encode(self, text):
        """Ids of a text, nothing in front or behind. Control strings in it (<|im_end|>, <think>) are text
        like any other. UnicodeEncodeError, a ValueError, for half a surrogate pair, which UTF-8 cannot
        hold."""
        text.encode()
        return self._text.encode(text, add_special_tokens=False).ids

    def encode_control(self, text, restore=str):
        """Ids of a text whose control strings are their own ids, as in the `tokenizers` library. What lies
        between them goes through `restore` first."""
        ids = []
        for part in self._early_pattern.split(text):
            if part in self._added:
                ids.append(self._added[part])
                continue
            for rest in self._late_pattern.split(self._normalize(part)):
                ids += [self._late[rest]] if rest in self._late else self.encode(restore(rest))
        return ids

    def token_id(self, string):
        """Id of a control token such as "</think>" (special or just added), None if the model has no such
        token."""
        return self._added.get(string)

    def token_bytes(self, token):
        """Bytes of one id: a control token's are its name's, an id that the tokenizer does not know (a padded
        embedding row) has none."""
        return self._bytes.get(int(token), b"")

    def decode(self, ids):
        """Text of some ids, control tokens by name. Bytes that are no UTF-8 become U+FFFD, ids that the
        tokenizer does not know ""."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def stream(self, ids):
        """Yields the text of an iterator of ids as it comes, in whole characters: in all decode(ids)."""
        stream = TextStream(self)
        for token in ids:
            if piece := stream.push(token):
                yield piece
        if piece := stream.end():
            yield piece

    def encode_chat(self, messages, **template_args):
        """Ids of a conversation, a list of {"role": ..., "content": ...}, by the model's chat template.
        template_args are its variables: add_generation_prompt (True unless given), tools, enable_thinking,
        ... ValueError if there is no template, or if it fails on these messages.

        Only what the template itself writes is control. Control strings in messages and arguments are text,
        also when they come in parts that the template joins. One exception: in the assistant's own
        messages, tokens that the tokenizer does not mark as special (<think>, </think>, <tool_call>) keep
        their meaning. They are the model's syntax, and templates cut old reasoning at </think>."""
        if self._template is None:
            raise ValueError(f"{self.name} has no chat template: write the prompt yourself and encode() it")

        # Templates strip, split and quote what they get. So a character that must not begin a control string
        # goes through them as a word that occurs nowhere else, and becomes itself again afterwards.
        mark = "hidden"
        while mark in repr((messages, template_args, self._template)):
            mark += "x"

        def hide(value, pattern):
            if isinstance(value, str):
                return pattern.sub(lambda match: f"{mark}{ord(match[0])}_", self._normalize(value))
            if isinstance(value, dict):
                return {key: hide(item, pattern) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [hide(item, pattern) for item in value]
            return value

        def restore(text):
            return re.sub(rf"{mark}(\d+)_", lambda match: chr(int(match[1])), text)

        variables = {"tools": None, "documents": None, "add_generation_prompt": True}
        variables |= hide(template_args, self._control) | self._names
        pattern_of_role = {"assistant": self._special_control}
        try:
            variables["messages"] = [hide(m, pattern_of_role.get(m["role"], self._control)) for m in messages]
            text = compile_template(self._template).render(variables)
        except Exception as error:  # a template fails in as many ways as a program
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template of {self.name} failed: {reason}") from None
        return self.encode_control(text, restore)


class TextStream:
    """Token ids in, text out, as soon as it is certain and never half a character.

    stop: strings. The text ends before that which is complete first (the longest, if several are at once),
    then `stopped` is True and nothing more comes. What may be the head of one is held back until that is
    decided."""

    def __init__(self, tokenizer, stop=()):
        self._stop = stop
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, token):
        """Takes one id, returns the text that is certain now, often ""."""
        return self._decide(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def end(self):
        """No more ids: returns the text that was held back, with U+FFFD for half a character."""
        text = self._decide(self._utf8.decode(b"", final=True))
        return text if self.stopped else text + self._held

    def _decide(self, text):
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(text.find(s) + len(s), text.find(s)) for s in self._stop if s in text]
        if ends:
            self.stopped = True
            return text[:min(ends)[1]]
        heads = [n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])]
        certain = len(text) - max(heads, default=0)
        self._held = text[certain:]
        return text[:certain]


# --------------------------------------------------------------------------------------------------
# the vocabulary

def text_tokenizer(name, spec, added):
    """The library's Tokenizer for text alone: a tokenizer.json without its control strings."""
    model = spec["model"]
    control = {content for content in added if len(content) > 1}  # a single one spells a byte, too
    vocab = {token: i for token, i in model["vocab"].items() if token not in control}
    merges = []
    for merge in model["merges"]:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if control.isdisjoint([*pair, "".join(pair)]):
            merges.append(merge)
    text_only = dict(model=dict(model, vocab=vocab, merges=merges), normalizer=spec.get("normalizer"),
                     pre_tokenizer=spec["pre_tokenizer"], version="1.0", added_tokens=[])
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(text_only))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{name}: its tokenizer.json is damaged: {error}") from None


def spelled(token):
    """The bytes that a token of a vocabulary spells, None if it is not written in BYTE's characters."""
    if all(character in BYTE for character in token):
        return bytes(BYTE[character] for character in token)


def check_supported(name, spec):
    """ValueError naming what a tokenizer.json asks for and this file does not do: its tokens must spell
    bytes, and give back the text that they were made of."""
    def refuse(what):
        raise ValueError(f"{name}: its tokenizer.json has {what}, which is not supported")

    model, normalizer = spec.get("model") or {}, spec.get("normalizer") or {}
    if model.get("type", "BPE") != "BPE" or not model.get("vocab"):
        refuse(f"model type {model.get('type')!r}")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            refuse(f"{key} {model[key]!r}")
    if model.get("unk_token") and not all(character in model["vocab"] for character in BYTE):
        refuse(f"unk_token {model['unk_token']!r} for bytes that it lacks")
    if normalizer.get("type") not in (None, "NFC"):
        refuse(f"normalizer {normalizer['type']!r}")
    pre_tokenizer = spec.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    changes = any(step.get("add_prefix_space") or step.get("behavior") == "Removed" for step in steps)
    known = {step.get("type") for step in steps} <= {"Split", "Digits", "ByteLevel"}
    if changes or not known or steps[-1]["type"] != "ByteLevel":
        refuse(f"pre_tokenizer {json.dumps(spec.get('pre_tokenizer'))}")
    for token in spec.get("added_tokens") or []:
        for key in ("lstrip", "rstrip", "single_word"):
            if token.get(key):
                refuse(f"{key} on {token['content']!r}")


# --------------------------------------------------------------------------------------------------
# control strings and chat templates

def any_of(strings):
    """A regular expression with one group, the longest of `strings`; it matches nothing if there are none."""
    longest_first = sorted(strings, key=len, reverse=True)
    return "(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")"


def beginnings(controls):
    """Pattern of each character with which a control string begins, or the head of one at the end of a
    text, which the next text could complete."""
    heads = {s[:n] for s in controls for n in range(1, len(s)) if not s[0].isalnum()}
    return re.compile(rf"(?={any_of(controls)}|{any_of(heads)}\s*\Z).", re.DOTALL)


@functools.lru_cache
def compile_template(source):
    """A chat template, sandboxed because it came with a downloaded model, with the functions that
    transformers offers to templates."""
    import jinja2.sandbox

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def strftime_now(form):
        return datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    # jinja2's own tojson escapes HTML
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    # {% generation %} and {% endgeneration %} tell other trainers what to train on. Here they do nothing
    source = re.sub(r"(\{%[-+]?\s*)(end)?generation\b", r"\1set ignored = true", source)
    return environment.from_string(source)


def main():
    if len(sys.argv) != 3:
        raise ValueError('usage: python tokenizer.py <folder, hub name or bytes> "text"')
    tokenizer = load_tokenizer(sys.argv[1])
    ids = tokenizer.encode(sys.argv[2])
    print(ids)
    print([tokenizer.decode([i]) for i in ids])


if __name__ == "__main__":
    run(main)
