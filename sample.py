"""
Sample from a model that attends to its prompt and to a window of its last tokens, in memory that does not grow.

    python sample.py config/sample_smollm2_cpu.py                                  # after: python data/smollm2/prepare.py
    python sample.py config/sample_smollm2_cpu.py --show=True                      # watch tokens fall out of the window
    python sample.py config/sample_smollm2_cpu.py --start="FILE:question.txt" --num_samples=3 --policy=full
    python sample.py --init_from=Qwen/Qwen3-1.7B --start="Prime factorize 806917567." --max_new_tokens=32768

Samples run side by side but are shown one after the other: the first streams as it comes, the next follows when it is done.
"""
init_from = "data/smollm2"        # a Hugging Face folder, or a hub name such as Qwen/Qwen3-1.7B
start = "Tell me a long story about a lighthouse keeper who finds a map."  # the prompt, or FILE:path to read it from a file
chat = True                       # True: the prompt is a user message in the model's chat template; False: raw text to be continued
system = ""                       # system message for the chat template, "" = none
template_args = {}                # further arguments of the chat template, such as {"enable_thinking": False}
policy = "prefix_sliding"         # prefix_sliding | full | sliding | streaming | random
window: int | list | None = 4096  # tokens, the current one included; None = full attention; a list gives each layer its own
prefix_len: int | None = None     # tokens kept for good; None = the whole prompt. sliding means 0, streaming 4
rope = "continue"                 # continue: absolute positions | reset: close the gap behind the prefix. streaming means reset
num_samples = 1                   # completions of the same prompt
rows: int | None = None           # how many run at once; None = all, or as many as fit the memory
max_new_tokens = 2000             # most tokens per sample
min_new_tokens = 0                # tokens before an end token may come
temperature = 0.6                 # >= 0; 0 = always the most probable token
top_k: int | None = None          # None or >= 1: draw from this many most probable tokens
top_p = 0.95                      # 0 < top_p <= 1: draw from the fewest tokens whose probabilities sum to this
stop = []                         # strings that end a sample; they are not shown
min_think = 0                     # tokens of thinking before </think> is accepted; an earlier one becomes wait_text
max_think = -1                    # tokens of thinking after which </think> is forced; -1 = unlimited
wait_text = "Wait"                # what stands in for a </think> that came too early
seed = 1337                       # any int; sample i draws from the stream (seed, i)
compile = False                   # True: faster steps by fast/step.py, after some seconds of compiling (on a CPU: by a C compiler)
int8 = False                      # True: compile, with matrices in 8 bits; on a CPU
show = False                      # redraw the terminal: prefix in colour, window bright, dropped tokens dim
device = "auto"                   # auto (cuda, then mps, then cpu) | cpu | cuda | cuda:1 | mps
dtype = "auto"                    # auto (bfloat16 where the hardware has it, else float32) | float32 | bfloat16 | float16

from configurator import configure, run

configure(globals())

import json
import shutil
import sys
import unicodedata

from device import device_and_dtype, peak_bytes
from engine import POLICIES, Thinking, generate
from model import GPT
from sliding_cache import row_bytes
from tasks import Problem, prompt_ids
from tokenizer import TextStream, load_tokenizer


def main():
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: one of {', '.join(POLICIES)}")
    if show and (not sys.stdout.isatty() or policy == "random" or isinstance(window, list)):
        raise ValueError("show=True needs a terminal, one window for all layers, and a policy that drops the oldest token")
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples}: at least 1")
    how = dict(window=window, prefix_len=prefix_len, rope=rope) | POLICIES[policy]
    tokenizer = load_tokenizer(init_from)
    prompt = encode_prompt(tokenizer)
    where, kind = device_and_dtype(device, dtype)
    model = GPT.from_pretrained(init_from, dtype=kind, device=where)
    config = model.config
    screen, stats = Screen(tokenizer, prompt, how), {}
    done = generate(
        model, [prompt] * num_samples, max_new_tokens, **how, temperature=temperature, top_k=top_k, top_p=top_p,
        min_new_tokens=min_new_tokens, stop_ids=tokenizer.eos_ids, stop_strings=tuple(stop), decode=tokenizer.decode,
        thinking=thinking(tokenizer), n_vocab=tokenizer.n_vocab, seed=seed, rows=rows, on_token=screen.on_token, stats=stats,
        compile=compile, int8=int8)
    new = sum(len(c.tokens) for c in done)
    longest = len(prompt) + max(len(c.tokens) for c in done)
    full = stats["rows"] * row_bytes(config, [None] * config.n_layer, 0, longest, kind)
    peak, memory = peak_bytes(where)
    speed = (new - num_samples) / stats["decode_s"] if stats["decode_s"] else 0.0     # the first tokens come from the prefill
    print(f"{num_samples} x {new / num_samples:,.0f} tokens, {speed:.1f} tokens/s   "
          f"behind a prompt of {len(prompt)} tokens, read in {stats['prefill_s']:.2f} s")
    print(f"cache           {stats['cache_bytes'] / 1e6:10,.1f} MB   policy {policy}, window {how['window']}")
    print(f"full attention  {full / 1e6:10,.1f} MB   would hold all {longest:,} tokens, and grow")
    print(f"peak memory     {peak / 1e6:10,.1f} MB   {memory}, weights included")
    print(json.dumps(dict(
        tokens=new, tokens_per_s=round(speed, 2), prefill_s=round(stats["prefill_s"], 3), decode_s=round(stats["decode_s"], 3),
        compile_s=round(stats["compile_s"], 3), prompt_tokens=len(prompt), cache_bytes=stats["cache_bytes"], full_attention_bytes=full,
        peak_memory_bytes=peak, policy=policy, window=how["window"], finish_reasons=[c.finish_reason for c in done])))


def encode_prompt(tokenizer):
    text = start
    if start.startswith("FILE:"):
        try:
            with open(start[5:], encoding="utf-8") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{start[5:]} is not text in utf-8: {error}") from None
    if not chat:
        return tokenizer.encode(text)
    return prompt_ids(Problem(text, None), tokenizer, system, template_args)


def thinking(tokenizer):
    """The thinking budget that the configuration asks for, or None."""
    if min_think == 0 and max_think == -1:
        return None
    end = tokenizer.token_id("</think>")
    if end is None:
        raise ValueError(f"min_think and max_think need a </think> token, which the tokenizer of {init_from} does not have")
    return Thinking(end, tokenizer.token_id("<think>"), min_think, max_think, tuple(tokenizer.encode(wait_text)))


class Screen:
    """Shows samples one after the other as their tokens come. With show=True the terminal is drawn anew at every token, because
    what was printed long ago has to be dimmed."""
    PREFIX, WINDOW, DROPPED, OFF = "\x1b[1;36m", "\x1b[1;37m", "\x1b[90m", "\x1b[0m"

    def __init__(self, tokenizer, prompt, how):
        self.streams = [TextStream(tokenizer, tuple(stop)) for _ in range(num_samples)]
        self.pieces = [[] for _ in range(num_samples)]                                # the text of each token of each sample
        self.prompt = [*map(TextStream(tokenizer).push, prompt)]
        self.n_prefix = len(prompt) if how["prefix_len"] is None else how["prefix_len"]
        self.window = how["window"]
        self.eos_ids, self.finished, self.current, self.printed = tokenizer.eos_ids, set(), 0, 0

    def on_token(self, i, token):
        text = "" if token in self.eos_ids else self.streams[i].push(token)
        if token in self.eos_ids or self.streams[i].stopped or len(self.pieces[i]) + 1 == max_new_tokens:
            self.finished.add(i)
            text += self.streams[i].end()
        self.pieces[i].append(text)
        while self.current < num_samples:                                             # catch up with what waited behind this sample
            self.draw() if show else self.write()
            if self.current not in self.finished:
                break
            print()
            self.current, self.printed = self.current + 1, 0

    def write(self):
        """Print what is new in the current sample."""
        pieces = self.pieces[self.current]
        if not self.printed and pieces:
            print((f"--- sample {self.current + 1}\n" if num_samples > 1 else "") + ("" if chat else "".join(self.prompt)), end="")
        print("".join(pieces[self.printed:]), end="", flush=True)
        self.printed = len(pieces)

    def draw(self):
        """Fill the terminal: the prefix above, then as much of the end of the text as fits, then a line of numbers."""
        pieces, n_prompt = self.pieces[self.current], len(self.prompt)
        n = n_prompt + len(pieces)
        oldest = 0 if self.window is None else max(n - self.window, 0)
        width, height = shutil.get_terminal_size()

        def lines(texts, first):  # wrapped to the width of the terminal, each token in the colour of where it is now
            out, column = [""], 0
            for pos, text in enumerate(texts, first):
                colour = self.PREFIX if pos < self.n_prefix else self.WINDOW if pos >= oldest else self.DROPPED
                out[-1] += colour
                for char in text:
                    wide = 2 if unicodedata.east_asian_width(char) in "WF" else int(char.isprintable())
                    if char == "\n" or column + wide > width:
                        out.append(colour)
                        column = 0
                    if wide:
                        out[-1] += char
                        column += wide
            return out

        head = lines(self.prompt, 0)[-(height // 3):]
        first = max(len(pieces) - width * height, 0)                                  # more tokens than this do not fit
        body = lines(pieces[first:], n_prompt + first)[-(height - len(head) - 2):]
        held = min(self.n_prefix, oldest) + n - oldest
        status = f"{n:,} tokens, {held:,} in memory, {n - held:,} dropped"[:width - 1]
        print("\x1b[H\x1b[2J" + "\n".join(head + body) + f"{self.OFF}\n{status}", end="", flush=True)


if __name__ == "__main__":
    run(main)
