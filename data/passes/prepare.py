"""
The tokenizer of the embedded task (task.py): a throw, a person and a number of the clock are one token each, and whatever
else may come is bytes.

    python data/passes/prepare.py        # writes tokenizer.json and tokenizer_config.json beside itself
"""
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from checkpoint import replacing
from configurator import run
from data.passes.task import PEOPLE
from tokenizer import BYTE

CHARACTER = {byte: character for character, byte in BYTE.items()}
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)  # the `tokenizers` library wants them all
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"


def write_tokenizer(folder):
    """Write both files into a folder (a Path), which is made."""
    words = ["Passes", " from", " answer"]
    words += [f" {person}" for person in PEOPLE]
    words += [f" {thrower}{catcher}" for thrower in PEOPLE for catcher in PEOPLE if thrower != catcher]
    words += [f" {number:02d}" for number in range(60)]
    vocab = dict(BYTE)
    for word in words:
        vocab.setdefault("".join(CHARACTER[byte] for byte in word.encode()), len(vocab))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spec = {"model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True},
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "added_tokens": [{"id": len(vocab), "content": "<|endoftext|>", "special": True} | FLAGS]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", spec), ("tokenizer_config.json", settings)):
        with replacing(folder / name) as file:
            file.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(lambda: write_tokenizer(Path(__file__).resolve().parent))
