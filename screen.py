"""
What sample.py shows of its samples while they grow: the text, or a picture of what is still in memory.

    python sample.py config/sample_smollm2_cpu.py --show=True
"""
import shutil
import sys
import unicodedata
from dataclasses import dataclass, field

from tokenizer import TextStream

PREFIX, WINDOW, DROPPED, OFF = "\x1b[1;36m", "\x1b[1;37m", "\x1b[90m", "\x1b[0m"
CLEAR = "\x1b[H\x1b[2J"


@dataclass
class Shown:
    """A sample so far."""
    stream: TextStream
    pieces: list = field(default_factory=list)    # the text of each token
    finished: bool = False


class Printer:
    """Prints samples one after the other: the first as it comes, the next when that is done.

    on_token is for generate(). stop: strings that end a sample, not shown. echo: print the prompt, too.
    memory: the window, prefix_len, ... that generate() is given."""

    def __init__(self, tokenizer, prompt, num_samples, max_new_tokens, stop, echo, memory):
        stream = TextStream(tokenizer)
        self.prompt = [stream.push(token) for token in prompt]
        self.samples = [Shown(TextStream(tokenizer, tuple(stop))) for _ in range(num_samples)]
        self.eos_ids, self.max_new_tokens = tokenizer.eos_ids, max_new_tokens
        self.echo, self.memory = echo, memory
        self.current = 0    # the sample that is being shown
        self.printed = 0    # tokens of it that have been

    def on_token(self, i, token):
        self.add(self.samples[i], token)
        while self.current < len(self.samples):    # a sample that has waited may be complete by now
            self.draw(self.samples[self.current])
            if not self.samples[self.current].finished:
                break
            print()
            self.current += 1
            self.printed = 0

    def add(self, sample, token):
        is_end = token in self.eos_ids
        text = "" if is_end else sample.stream.push(token)
        if is_end or sample.stream.stopped or len(sample.pieces) + 1 == self.max_new_tokens:
            sample.finished = True
            text += sample.stream.end()
        sample.pieces.append(text)

    def draw(self, sample):
        """Print what is new."""
        if not self.printed and sample.pieces:
            if len(self.samples) > 1:
                print(f"--- sample {self.current + 1}")
            if self.echo:
                print("".join(self.prompt), end="")
        print("".join(sample.pieces[self.printed:]), end="", flush=True)
        self.printed = len(sample.pieces)


class Picture(Printer):
    """Draws the terminal anew at every token, because what was printed long ago has to be dimmed.
    Raises ValueError where there is no terminal, or no one window to show."""

    def __init__(self, tokenizer, prompt, *others):
        super().__init__(tokenizer, prompt, *others)
        self.window = self.memory["window"]
        self.prefix_len = len(prompt) if self.memory["prefix_len"] is None else self.memory["prefix_len"]
        if not sys.stdout.isatty() or isinstance(self.window, list) or "cache_class" in self.memory:
            raise ValueError("show=True needs a terminal, one window for all layers, and the usual eviction")

    def draw(self, sample):
        """Fill the terminal: the prompt, as much of the end of the text as fits, and a line of numbers."""
        n_prompt = len(self.prompt)
        n = n_prompt + len(sample.pieces)
        oldest = 0 if self.window is None else max(n - self.window, 0)    # of the window
        width, height = shutil.get_terminal_size()
        top = self.lines(self.prompt, 0, oldest, width)[-(height // 3):]
        first = max(len(sample.pieces) - width * height, 0)    # more tokens than this do not fit
        rest = self.lines(sample.pieces[first:], n_prompt + first, oldest, width)
        rest = rest[-(height - len(top) - 2):]
        held = min(self.prefix_len, oldest) + n - oldest
        status = f"{n:,} tokens, {held:,} in memory, {n - held:,} dropped"
        print(CLEAR + "\n".join(top + rest) + f"{OFF}\n{status[:width - 1]}", end="", flush=True)

    def lines(self, pieces, first, oldest, width):
        """Texts of tokens as lines of a terminal, each in the colour of where it is. first: a position."""
        lines, column = [""], 0
        for position, text in enumerate(pieces, first):
            colour = PREFIX if position < self.prefix_len else WINDOW if position >= oldest else DROPPED
            lines[-1] += colour
            for char in text:
                columns = char_columns(char)
                if char == "\n" or column + columns > width:
                    lines.append(colour)
                    column = 0
                if columns:
                    lines[-1] += char
                    column += columns
        return lines


def char_columns(char):
    """How many columns of a terminal a character takes; those that move the cursor are not printed."""
    if unicodedata.east_asian_width(char) in "WF":
        return 2
    return int(char.isprintable())
