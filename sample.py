"""
Sample from a model that attends to its prompt and to its last tokens, in memory that does not grow.

    python sample.py config/sample_smollm2_cpu.py                   # after: python data/smollm2/prepare.py
    python sample.py config/sample_smollm2_cpu.py --show=True       # watch tokens fall out of the window
    python sample.py config/sample_smollm2_cpu.py --start="FILE:question.txt" --num_samples=3 --policy=full
    python sample.py --init_from=Qwen/Qwen3-1.7B --start="Prime factorize 806917567." --max_new_tokens=32768

Samples run side by side but are shown one after the other: the first as it comes, the next when that is done.
"""
init_from = "data/smollm2"        # a Hugging Face folder, or a hub name such as Qwen/Qwen3-1.7B
start = "Tell me a long story about a lighthouse keeper who finds a map."  # or FILE:path to read the prompt
chat = True                       # True: start is a user message for the model's chat template; False: a text
system = ""                       # system message for the chat template, "" = none
template_args = {}                # further arguments of the chat template, such as {"enable_thinking": False}
policy = "prefix_sliding"         # prefix_sliding | full | sliding | streaming
window: int | list | None = 4096  # tokens, with the current one; None = full attention; a list: one per layer
prefix_len: int | None = None     # tokens kept for good; None = the whole prompt; sliding: 0, streaming: 4
rope = "continue"                 # continue: absolute positions | reset (streaming): no gap behind the prefix
num_samples = 1                   # completions of the same prompt
rows: int | None = None           # how many run at once; None = all, or as many as fit the memory
max_new_tokens = 2000             # most tokens per sample
min_new_tokens = 0                # tokens before an end token may come
temperature = 0.6                 # >= 0; 0 = always the most probable token
top_k: int | None = None          # None or >= 1: draw from this many most probable tokens
top_p = 0.95                      # 0 < top_p <= 1: draw from the fewest whose probabilities sum to this
stop = []                         # strings that end a sample; they are not shown
min_think = 0                     # tokens of thinking before </think> counts; one before becomes wait_text
max_think = -1                    # tokens of thinking after which </think> is forced; -1 = unlimited
wait_text = "Wait"                # what stands in for a </think> that came too early
seed = 1337                       # any int; sample i draws from the stream (seed, i)
compile = False                   # True: faster steps, after some seconds of compiling (a CPU needs gcc)
int8 = False                      # True: compile, with matrices in 8 bits; on a CPU
show = False                      # redraw the terminal: prefix in colour, window bright, dropped tokens dim
device = "auto"                   # auto (cuda, then mps, then cpu) | cpu | cuda | cuda:1 | mps
dtype = "auto"                    # auto (bfloat16 if the hardware has it) | float32 | bfloat16 | float16

from configurator import configure, run

configure(globals())

import json

from device import device_and_dtype, peak_bytes
from engine import POLICIES, as_drawn, generate
from model import GPT
from screen import Picture, Printer
from sliding_cache import row_bytes
from tasks import Problem, prompt_ids
from thinking import Thinking
from tokenizer import load_tokenizer


def main():
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: one of {', '.join(POLICIES)}")
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples}: at least 1")
    memory = dict(window=window, prefix_len=prefix_len, rope=rope) | POLICIES[policy]

    # load
    tokenizer = load_tokenizer(init_from)
    prompt = encode_prompt(tokenizer)
    printer_class = Picture if show else Printer
    printer = printer_class(tokenizer, prompt, num_samples, max_new_tokens, stop, not chat, memory)
    torch_device, torch_dtype = device_and_dtype(device, dtype)
    model = GPT.from_pretrained(init_from, dtype=torch_dtype, device=torch_device)

    # generate: the text is shown as it comes
    stats = {}
    done = generate(
        model, [prompt] * num_samples, max_new_tokens, min_new_tokens=min_new_tokens, **memory,
        temperature=temperature, top_k=top_k, top_p=top_p, n_vocab=tokenizer.n_vocab,
        stop_ids=tokenizer.eos_ids, stop_strings=stop, decode=tokenizer.decode,
        choose=thinking_budget(tokenizer), seed=seed, rows=rows, on_token=printer.on_token, stats=stats,
        compile=compile, int8=int8)

    # print what it took
    lengths = [len(completion.tokens) for completion in done]
    n_tokens, longest = sum(lengths), len(prompt) + max(lengths)
    speed = (n_tokens - num_samples) / max(stats["decode_s"], 1e-9)    # the first ones come from the prefill
    full = row_bytes(model.config, [None] * model.config.n_layer, 0, longest, torch_dtype) * stats["rows"]
    peak, kind_of_memory = peak_bytes(torch_device)
    print(f"{num_samples} x {n_tokens / num_samples:,.0f} tokens, {speed:.1f} tokens/s   "
          f"behind a prompt of {len(prompt)} tokens, read in {stats['prefill_s']:.2f} s")
    print(f"cache           {stats['cache_bytes'] / 1e6:10,.1f} MB   "
          f"policy {policy}, window {memory['window']}")
    print(f"full attention  {full / 1e6:10,.1f} MB   would hold all {longest:,} tokens, and grow")
    print(f"peak memory     {peak / 1e6:10,.1f} MB   {kind_of_memory}, weights included")
    results = {key: round(value, 3) for key, value in stats.items()}
    print(json.dumps(dict(
        tokens=n_tokens,
        tokens_per_s=round(speed, 2),
        **results,
        prompt_tokens=len(prompt),
        full_attention_bytes=full,
        peak_memory_bytes=peak,
        policy=policy,
        window=memory["window"],
        finish_reasons=[completion.finish_reason for completion in done],
    )))


def encode_prompt(tokenizer):
    text = start
    if start.startswith("FILE:"):
        path = start.removeprefix("FILE:")
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in utf-8: {error}") from None
    if not chat:
        return tokenizer.encode(text)
    return prompt_ids(Problem(text, None), tokenizer, system, template_args)


def thinking_budget(tokenizer):
    """What has the last word on each token: min_think and max_think, or nothing at all."""
    if min_think == 0 and max_think == -1:
        return as_drawn
    end, begin = tokenizer.token_id("</think>"), tokenizer.token_id("<think>")
    return Thinking(end, begin, min_think, max_think, tokenizer.encode(wait_text), tokenizer.eos_ids)


if __name__ == "__main__":
    run(main)
