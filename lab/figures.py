"""
Pictures of what was measured. The first argument says which:

    python -m lab.figures curve --logs=out-rl-passes/log.csv                             # reward and length while training
    python -m lab.figures curve --logs=a/log.csv,b/log.csv,c/log.csv --labels="ours,ours,window" --out=rl.svg
    python -m lab.figures accuracy --data=out-eval/table.csv                             # accuracy against seconds and tokens
    python -m lab.figures times --data=out-eval/samples.jsonl                            # seconds per token along the trace
    python -m lab.figures mismatch --data=gap.txt                                        # after: python -m lab.bench gap > gap.txt
    python -m lab.figures speed --data=decode.txt                                        # after: python -m lab.bench decode > decode.txt
    python -m lab.figures attention                                                      # what the last token of a trace attends to
    python -m lab.figures receptive --window=64                                          # how far back a changed token is felt
    python -m lab.figures receptive --init_from=out-demo-rl/seed1/rl/last --window=12 --rope=reset \\
        --start="Passes CG AF KB DI EH FJ GK BD HC IA JE from 00 10 00 A"
    python -m lab.figures longtext                                                       # far beyond the positions of the training

The first five read what other scripts left behind, the others measure a model; each function says which figure of the paper
(arXiv 2608.26070) it is. The last line is JSON: the numbers of the picture.
"""
import sys

out = ""                       # the picture: .png, .svg or .pdf; "" = <figure>.png
logs = "out-rl/log.csv"        # curve: log.csv of one or more runs, separated by commas
labels = ""                    # curve: their names, separated by commas; logs of the same name are one line; "" = their folders
data = ""                      # accuracy: table.csv, times: samples.jsonl, both of eval.py; mismatch, speed: the output of lab.bench
init_from = "data/smollm2"     # attention, receptive, longtext: a Hugging Face folder or a hub name
window: int | None = None      # tokens; None = attention: full attention, receptive: 64, longtext: 1024
prefix_len: int | None = None  # tokens, P; None = the prompt of a sampled trace, 64 tokens of a text
rope = "continue"              # attention, receptive: continue | reset
text = ""                      # a file to read; "" = a sampled trace where there is a prompt, else the documentation in Python
start = ""                     # the prompt of a sampled trace; "" = attention: a story, receptive and longtext: no trace but a text
n_tokens: int | None = None    # of the text, or sampled at most; None = attention: 1024, receptive: 16 windows, longtext: 16384
changes = 16                   # receptive: tokens that are changed, one at a time; the effects are averaged
recent = 256                   # attention: the last tokens to mark and add up where window is None
chunk = 1024                   # longtext: tokens per forward
device = "auto"                # auto (cuda, then mps, then cpu) | cpu | cuda | cuda:1 | mps
dtype = "auto"                 # auto (bfloat16 where the hardware has it, else float32) | float32 | bfloat16 | float16 | float64

_what = sys.argv.pop(1) if __name__ == "__main__" and sys.argv[1:] and sys.argv[1][0] != "-" else None

from configurator import configure, run

configure(globals())

import csv
import json
import time
from pathlib import Path

import torch

from attention import check_window, upcast, visible
from device import device_and_dtype
from engine import POLICIES, generate
from model import GPT, rotate
from sliding_cache import SlidingCache, layer_windows
from tokenizer import load_tokenizer
from training import Progress, token_logprobs

STORY = "Tell me a long story about a lighthouse keeper who finds a map."
PAPER_MISMATCH = {1: 0.2226, 2: 0.0137, 4: 0.0075, 8: 0.0051}  # Fig. 8: Qwen3-1.7B, W = 2048, the mean of its five steps


def pyplot():
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("pictures need a package: pip install matplotlib") from None
    return pyplot


def panels(rows, columns, **options):
    fig, axes = pyplot().subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), layout="constrained", squeeze=False, **options)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    return fig, axes


def save(fig, figure):
    """Write the picture and close it. -> where it is"""
    path = out or f"{figure}.png"
    fig.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot().close(fig)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# from the files of other scripts

def read_log(path):
    """{column: [(step, value), ...]} of a log.csv, empty cells left out. ValueError if it is none."""
    columns = {}
    with open(path, encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                step = int(row.pop("step"))
                for name, cell in row.items():
                    columns.setdefault(name, []).extend([(step, float(cell))] if cell else [])
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}, line {number}: not a row of a training log") from None
    if not columns:
        raise ValueError(f"{path} has no rows")
    return columns


def minutes(log):
    """{step: minutes of sampling and training before it}: the time that made the model which the row of a step speaks of, so the
    evaluations are not counted. Empty for a log without rollout_s and train_s."""
    spent, before, total = {}, {}, 0.0
    for step, s in log.get("rollout_s", []) + log.get("train_s", []):
        spent[step] = spent.get(step, 0.0) + s
    for step in sorted({step for column in log.values() for step, _ in column}) if spent else ():
        before[step], total = total / 60, total + spent.get(step, 0.0)
    return before


def curve():
    """Fig. 7 of the paper: share solved and mean trace length of train_rl.py, against the step and, where all logs have times, against
    minutes of sampling and training. Dots are held-out problems. Runs of the same name are one line, their mean, in a band from the
    lowest to the highest, over the steps that they share."""
    paths = [Path(path) for path in logs.split(",")]
    names = labels.split(",") if labels else [str(path.parent) for path in paths]
    if len(names) != len(paths):
        raise ValueError(f"labels={labels!r}: {len(names)} names for {len(paths)} logs")
    runs, lines = {}, {}
    for path, name in zip(paths, names, strict=True):
        runs.setdefault(name, []).append(read_log(path))
        if not runs[name][-1].get("solved"):
            raise ValueError(f"{path} has no column solved: it is no log of train_rl.py")
    n_rows = 2 if all(minutes(log) for group in runs.values() for log in group) else 1
    fig, axes = panels(n_rows, 2)

    def draw(group, column, *style, **options):  # -> the means, and the x of the last row of panels
        values = [dict(log.get(column, [])) for log in group]
        steps, clocks = sorted(set.intersection(*map(set, values))), [minutes(log) for log in group]
        values = [[run[step] for run in values] for step in steps]
        mean, x = [sum(v) / len(v) for v in values], steps
        for row in range(n_rows):
            x = [sum(clock[step] for clock in clocks) / len(clocks) for step in steps] if row else steps
            ax = axes[row, int("length" in column)]
            ax.plot(x, mean, *style, **options)
            if len(group) > 1 and not style:
                ax.fill_between(x, [*map(min, values)], [*map(max, values)], color=options["color"], alpha=0.2, linewidth=0)
            ax.set_xlabel("minutes of sampling and training" if row else "step")
        return mean, x

    for number, (name, group) in enumerate(runs.items()):
        (solved, x), (length, _) = (draw(group, column, color=f"C{number}", label=name) for column in ("solved", "length_mean"))
        if not solved or not length:
            raise ValueError(f"the runs of {name!r} have no step in common that has solved and length_mean")
        for column in ("eval_solved", "eval_length"):
            draw(group, column, "o", color=f"C{number}")
        lines[name] = dict(runs=len(group), steps=len(solved), solved_last=round(solved[-1], 4), length_mean_last=round(length[-1], 4))
        lines[name] |= dict(minutes=round(x[-1], 3)) if n_rows == 2 else {}
    for solved, length in axes:
        solved.set(title="share solved", ylim=(0, 1.02))
        length.set_title("tokens per trace")
    axes[0, 0].legend()
    return dict(figure="curve", out=save(fig, "curve"), lines=lines)


def read_table(path):
    """({arm: [its rows, as numbers and the task]}, the tasks in their order) of a table.csv. ValueError if it is none."""
    arms, columns, tasks = {}, ("accuracy", "s_per_sample", "mean_tokens", "budget"), []
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, restval="missing")
        missing = [name for name in ("task", "arm", *columns) if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} lacks the columns {', '.join(missing)}: it is no table.csv of eval.py")
        for number, row in enumerate(reader, 2):
            try:
                point = {name: float(row[name]) for name in columns}
            except ValueError:
                raise ValueError(f"{path}, line {number}: not a row of numbers") from None
            arms.setdefault(row["arm"], []).append(point | dict(task=row["task"]))
            if row["task"] not in tasks:
                tasks.append(row["task"])
    if not arms:
        raise ValueError(f"{path} has no rows")
    return arms, tasks


def accuracy():
    """Fig. 1 and 9 of the paper: accuracy against seconds per sample and against mean tokens, from the table.csv of
    eval.py. One line per arm (a policy with its window), one point per token budget. A table of several tasks:
    accuracy and seconds of each of them, under the largest budget."""
    arms, tasks = read_table(data)
    fig, axes = panels(1, 2, sharey=len(tasks) == 1)
    for number, (arm, points) in enumerate(arms.items()):
        style = dict(label=arm, color=f"C{number % 10}", linestyle="-" if number < 10 else "--", alpha=0.8)
        style["marker"] = "os^v"[number // 10 % 4]
        points.sort(key=lambda point: (tasks.index(point["task"]), point["budget"]))
        if len(tasks) == 1:
            for ax, x in zip(axes[0], ("s_per_sample", "mean_tokens"), strict=True):
                ax.plot([point[x] for point in points], [point["accuracy"] for point in points], **style)
        else:
            last = list({point["task"]: point for point in points}.values())    # of each task, the largest budget
            for ax, y in zip(axes[0], ("accuracy", "s_per_sample"), strict=True):
                ax.plot([tasks.index(point["task"]) for point in last], [point[y] for point in last], **style)
    if len(tasks) == 1:
        axes[0, 0].set(xlabel="seconds per sample", xscale="log", ylabel="accuracy")
        axes[0, 1].set(xlabel="tokens per sample", xscale="log")
    else:
        axes[0, 0].set(ylabel="accuracy")
        axes[0, 1].set(ylabel="seconds per sample", yscale="log")
        for ax in axes[0]:
            ax.set_xticks(range(len(tasks)), tasks, rotation=20)
    axes[0, 1].legend(fontsize="x-small", bbox_to_anchor=(1, 1), loc="upper left")
    return dict(figure="accuracy", out=save(fig, "accuracy"), arms=arms)


def times():
    """Fig. 10 of the paper: the time of a token along the trace, from the samples.jsonl of eval.py: the mean over the samples of an arm
    that got so far. Flat with a window, growing with full attention, a sawtooth where the context is restarted. The first value holds
    the prefill. Samples of different lengths blur it: those that go on share their steps among fewer (see config/eval_times.py)."""
    arms = {}                                                                         # name: (every, ms per token of each sample)
    with open(data, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                sample = json.loads(line)
                arm, every, times = sample["arm"], int(sample["every"]), list(map(float, sample["times"]))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{data}, line {number}: no sample with arm, every and times") from None
            if every < 1 or arms.setdefault(arm, (every, []))[0] != every:
                raise ValueError(f"{data}, line {number}: every={every}, where {arm!r} has " + str(arms.get(arm, ["at least 1"])[0]))
            arms[arm][1].append([1e3 * (b - a) / every for a, b in zip([0.0, *times], times, strict=False)])
    if not any(any(samples) for _, samples in arms.values()):
        raise ValueError(f"{data} has no times")
    fig, axes = panels(1, 1)
    for arm, (every, samples) in arms.items():
        there = [[s[n] for s in samples if n < len(s)] for n in range(max(map(len, samples)))]
        ms = [round(sum(values) / len(values), 4) for values in there]
        axes[0, 0].plot([every * (n + 1) for n in range(len(ms))], ms, label=arm)
        arms[arm] = dict(every=every, ms_per_token=ms)
    axes[0, 0].set(xlabel="tokens of the trace", ylabel="ms per token", ylim=(0, None))
    axes[0, 0].legend()
    return dict(figure="times", out=save(fig, "times"), arms=arms)


def from_bench(what, point):
    """{line: [(x, y), ...]} from the table in the last line of the output of lab.bench, a point(row) -> (line, x, y) of each row."""
    try:
        lines = {}
        for row in json.loads(Path(data).read_text(encoding="utf-8").strip().rpartition("\n")[2])["table"]:
            name, x, y = point(row)
            lines.setdefault(name, []).append((x, y))
        if not lines:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{data}: its last line is not the JSON of lab.bench {what}") from None
    return lines


def speed():
    """Time per token against the length of the trace, one row, from the last line of lab.bench decode: flat lines and rising ones."""
    lines = from_bench("decode", lambda row: (row["dtype"], row["rows"], (row["who"], row["tokens"], float(row["ms"]))))
    fig, axes = panels(1, len(lines), sharey=True)
    colours = {who: f"C{i}" for i, who in enumerate(dict.fromkeys(who for points in lines.values() for _, (who, _, _) in points))}
    for ax, (kind, points) in zip(axes[0], lines.items(), strict=True):
        whos = {}
        for rows, (who, tokens, ms) in points:
            if rows == 1:
                whos.setdefault(who, []).append((tokens, ms))
        for who, line in whos.items():
            ax.plot(*zip(*sorted(line), strict=True), "o-" if len(line) > 1 else "s", color=colours[who], label=who)
        ax.set(title=kind, xlabel="tokens in the trace", ylabel="ms per token", xscale="log", yscale="log")
        lines[kind] = whos
    by_name = {line.get_label(): line for ax in axes[0] for line in ax.lines}
    fig.legend(by_name.values(), by_name, loc="outside lower center", ncols=4)
    return dict(figure="speed", out=save(fig, "speed"), lines=lines)


def mismatch():
    """Fig. 8 of the paper: the mismatch KL between trainer and sampler against the context that the trainer gets, with carry and
    without, from the last line of lab.bench gap. The paper's own values, of another model, stand beside them in grey."""
    lines = from_bench("gap", lambda row: (f"{row['dtype']}, {'carry' if row['carry'] else 'no carry'}", row["context_mult"],
                                           float(row["mismatch_kl"])))
    fig, axes = panels(1, 1)
    axes[0, 0].plot(*zip(*PAPER_MISMATCH.items(), strict=True), "o--", color="grey", label="the paper's (Qwen3-1.7B)")
    for name, points in lines.items():
        lines[name] = sorted(points)
        positive = [point for point in lines[name] if point[1] > 0]                   # a logarithm has no place for none at all
        axes[0, 0].plot(*(zip(*positive, strict=True) if positive else ((), ())), "o-", label=name)
    axes[0, 0].set(xlabel="context in windows", ylabel="mismatch KL", xscale="log", yscale="log")
    axes[0, 0].set_xticks(list(PAPER_MISMATCH), [f"{m}x" for m in PAPER_MISMATCH])
    axes[0, 0].set_xticks([], minor=True)
    axes[0, 0].legend()
    return dict(figure="mismatch", out=save(fig, "mismatch"), lines=lines, paper=PAPER_MISMATCH)


# ---------------------------------------------------------------------------------------------------------------------
# measured on a model

def load():
    where, kind = device_and_dtype(device, dtype)
    return GPT.from_pretrained(init_from, dtype=kind, device=where), load_tokenizer(init_from)


def trace(model, tokenizer, n, window, prompt=""):
    """Token ids (1, T) and their prefix length: what the model says to a prompt, without the end token, or the first tokens of a text;
    n_tokens of them, n by default."""
    n = n if n_tokens is None else n_tokens
    if n < 2 or prefix_len is not None and prefix_len < 0:
        raise ValueError(f"n_tokens={n} is at least 2, prefix_len={prefix_len} at least 0")
    if text and start:
        raise ValueError("text is for a trace that is there, start for one to be sampled: give one of them")
    if prompt and not text:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        print(f"sampling a trace of at most {n} tokens", file=sys.stderr, flush=True)
        done = generate(model, [ids], n, prefix_len=prefix_len, window=window, rope=rope, stop_ids=tokenizer.eos_ids,
                        n_vocab=tokenizer.n_vocab)[0]
        P, ids = len(ids), ids + done.tokens[:-1 if done.finish_reason == "stop" else None]
    else:
        ids, P = tokenizer.encode(Path(text).read_text(encoding="utf-8") if text else python_docs()), 64
        if len(ids) < n:
            raise ValueError(f"n_tokens={n}: {text or 'the documentation of Python'} has only {len(ids)} tokens")
        ids = ids[:n]
    return torch.tensor([ids], device=model.lm_head.weight.device), min(P if prefix_len is None else prefix_len, len(ids))


def python_docs():
    """A real text that is there wherever Python is: 465,000 characters of its documentation."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@torch.no_grad()
def attention_by_layer(model, idx, prefix_len, window, rope="continue"):
    """The weights (n_layer, T) with which the last of the tokens idx (1, T) attends to all, averaged over the heads; exactly 0 where
    it sees nothing. Queries and keys are those that each layer hands to its attention, before RoPE."""
    T, rows = idx.size(1), []
    windows, j = layer_windows(model.config, window), torch.arange(T, device=idx.device)

    def turned(x, positions):
        a = positions[:, None].float() * model.freqs                                  # (T, D / 2)
        return rotate(x, *((part * model.rope_factor).to(x.dtype) for part in (a.cos(), a.sin())))

    def watch(module, args):
        x, attend = args

        def attend_and_look(q, k, v):  # q (1, H, T, D); k, v (1, Hkv, T, D)
            W = windows[len(rows)]
            near = min(T - 1, prefix_len + W - 1) if rope == "reset" and W is not None else T - 1
            keys = turned(k, j).repeat_interleave(q.size(1) // k.size(1), 1)          # (1, H, T, D)
            s_window, s_prefix = (upcast(turned(q[:, :, -1:], j[t:t + 1])) @ upcast(keys).mT for t in (T - 1, near))   # (1, H, 1, T)
            s = torch.where(j < prefix_len, s_prefix, s_window) * q.size(-1) ** -0.5
            s = s.masked_fill(~visible(T - 1, j, prefix_len, W), float("-inf"))
            rows.append(s.softmax(-1).mean((0, 1, 2)))                                # (T,)
            return attend(q, k, v)

        return x, attend_and_look

    hooks = [block.self_attn.register_forward_pre_hook(watch) for block in model.model.layers]
    try:
        model.features(idx, prefix_len, window, rope=rope)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(rows)


def last_token_attention(model, idx, prefix_len, window, rope="continue"):
    """attention_by_layer, averaged over the layers: (T,) weights that sum to 1."""
    return attention_by_layer(model, idx, prefix_len, window, rope).mean(0)


def attention():
    """Fig. 2 of the paper: what the last token of a trace attends to, averaged over heads and then layers. By default the trace is what
    the model says to a prompt, with full attention; prefix and last tokens are shaded."""
    check_window(window)
    if recent < 1:
        raise ValueError(f"recent={recent}: at least 1")
    model, tokenizer = load()
    idx, P = trace(model, tokenizer, 1024, window, start or STORY)
    weights = last_token_attention(model, idx, P, window, rope).float().cpu()
    T, W = idx.size(1), window or recent
    cuts = [0, min(4, T), min(max(P, 4), T)]
    cuts += [max(cuts[-1], T - W), T]
    shares = {name: round(weights[a:b].sum().item(), 4)
              for name, a, b in zip(("first_4", "rest_of_prefix", "between", "last"), cuts, cuts[1:], strict=False)}
    fig, axes = panels(1, 1)
    ax = axes[0, 0]
    seen = weights > 0
    ax.plot(seen.nonzero()[:, 0], weights[seen], ".", markersize=3)
    ax.axvspan(0, min(P, T), alpha=0.2, color="C2", linewidth=0, label="prefix")
    ax.axvspan(cuts[3], T, alpha=0.2, color="C1", linewidth=0, label=f"last {W}")
    ax.set(xlabel="position", ylabel="attention of the last token", yscale="log")
    ax.legend()
    return dict(figure="attention", out=save(fig, "attention"), init_from=init_from, tokens=T, P=P, W=window, recent=W, shares=shares)


@torch.no_grad()
def influence(model, idx, places, distances, prefix_len, window, rope="continue"):
    """What changing one token does to the predictions behind it: KL(p || p') and max |change of a logit|, (places, distances) each.

    Each place in turn gets another token of idx (1, T), drawn at random. One forward then shows the effect at every distance: by
    causality, the prediction at place + d is that of a sequence which ends there. All forwards have the same shape, so where there
    is no effect both numbers are exactly 0; in float32, changes of a logit below 1e-4 are rounding. Raises ValueError where a
    distance leads beyond the sequence."""
    T, generator = idx.size(1), torch.Generator().manual_seed(0)
    distances = torch.as_tensor(distances, device=idx.device)
    if max(places) + int(distances.max()) >= T or min(places) < 0 or int(distances.min()) < 0:
        raise ValueError(f"places={min(places)}..{max(places)}: with distances up to {int(distances.max())} they leave the {T} tokens")
    lines, effects = Progress(0, len(places)), []
    before = model.features(idx, prefix_len, window, rope=rope)[0]                    # (T, n_embd)
    for number, place in enumerate(places):
        others = idx[0][idx[0] != idx[0, place]]
        if not len(others):
            raise ValueError("a text of one and the same token has no other to put in its place")
        changed = idx.clone()
        changed[0, place] = others[torch.randint(len(others), (), generator=generator)]
        after, rows = model.features(changed, prefix_len, window, rope=rope)[0], []
        for at in (place + distances).split(64):
            x, y = (model.lm_head(f[at]).cpu().double() for f in (before, after))     # (64, vocab_size)
            p, q = x.log_softmax(-1), y.log_softmax(-1)
            rows.append(torch.stack([(p.exp() * (p - q)).sum(-1), (x - y).abs().amax(-1)]))        # (2, 64)
        effects.append(torch.cat(rows, 1))
        lines.line(number, "changed tokens")
    return torch.stack(effects, 1).unbind()


def fades(effect, distances, share=0.01):
    """The largest of the distances at which the effect is at least a share of its largest value; None if that is the last one."""
    n = int((effect >= share * effect.max()).nonzero().max())
    return distances[n] if n + 1 < len(effect) else None


def receptive():
    """The measured receptive field: how much one changed token outside of the prefix changes the prediction d tokens later. The paper
    (section 2) says that it is about 1.5 W; the most that n layers can reach is n (W - 1)."""
    W = 64 if window is None else window
    check_window(W)
    if changes < 1:
        raise ValueError(f"changes={changes}: at least 1")
    model, tokenizer = load()
    idx, P = trace(model, tokenizer, 16 * W, W, start)
    T = idx.size(1)
    if T <= P + 8 * W:
        raise ValueError(f"{T} tokens with a prefix of {P}: distances up to 8 windows need more than {P + 8 * W} (n_tokens, start)")
    distances = sorted({*range(1, min(8 * W, 32) + 1), *torch.linspace(1, 8 * W, 512).long().tolist()})
    places = sorted(set(torch.linspace(P, T - 1 - 8 * W, changes).long().tolist()))
    kl, change = (x.mean(0) for x in influence(model, idx, places, distances, P, W, rope))
    reach = sum(w - 1 for w in layer_windows(model.config, W))
    fig, axes = panels(1, 1)
    for effect, name in ((kl, "KL(p || p')"), (change, "max |change of a logit|")):
        axes[0, 0].plot([d / W for d in distances], effect.where(effect > 0, float("nan")), label=name)
    for x, style, name in ((1, "-", "W"), (1.5, "--", "1.5 W"), (reach / W, ":", f"{model.config.n_layer} (W - 1)")):
        axes[0, 0].axvline(min(x, 8), color="grey", linestyle=style, label=name + (f" = {x:.1f} W, outside" if x > 8 else ""))
    axes[0, 0].set(xlabel="distance in windows", ylabel="effect of one changed token", yscale="log", xlim=(0, 8))
    axes[0, 0].legend()
    at = {f"{m:g}W": min(range(len(distances)), key=lambda n, m=m: abs(distances[n] - m * W)) for m in (0.5, 1, 1.5, 2, 3, 4, 8)}
    result = dict(figure="receptive", out=save(fig, "receptive"), init_from=init_from, tokens=T, P=P, W=W, rope=rope, places=len(places),
                  reach_in_W=round(reach / W, 3))
    for effect, name in ((kl, "kl"), (change, "change")):
        d = fades(effect, distances)
        result |= {f"{name}_below_1_percent_beyond_W": d and round(d / W, 3), f"{name}_largest": float(f"{effect.max():.4g}"),
                   f"{name}_relative": {m: float(f"{effect[n] / effect.max():.3g}") for m, n in at.items()}}
    return result


@torch.no_grad()
def nll(model, idx, prefix_len, window, rope="continue", chunk=1024, name=""):
    """-log p of the tokens 1..T-1 of idx (1, T), as (T - 1,), through a cache that holds the prefix and the window: memory does not grow
    with T (window=None keeps all)."""
    T, weight, pieces = idx.size(1), model.lm_head.weight, []
    cache = SlidingCache(model.config, 1, prefix_len, window, max_len=T, dtype=weight.dtype, device=weight.device)
    lines = Progress(0, -(-(T - 1) // chunk))
    for number, a in enumerate(range(0, T - 1, chunk)):
        b = min(a + chunk, T - 1)
        x = model.features(idx[:, a:b], rope=rope, cache=cache)[0]                    # (b - a, n_embd)
        pieces.append(-token_logprobs(x, weight, idx[0, a + 1:b + 1])[0])
        lines.line(number, f"chunks {name}")
    return torch.cat(pieces)


def longtext():
    """Not in the paper: a model that was never trained with a window, on a text longer than the positions it was trained on. The
    negative log-likelihood (nats per token) of every policy of the family, in bins of 512 positions."""
    W = 1024 if window is None else window
    check_window(W)
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: at least 1")
    model, tokenizer = load()
    idx, P = trace(model, tokenizer, 16384, W, start)
    T, edge, table = idx.size(1), model.config.max_len, {}
    cases = {"full": POLICIES["full"], "sliding": POLICIES["sliding"], "streaming": POLICIES["streaming"],
             "prefix sliding, continue": dict(rope="continue"), "prefix sliding, reset": dict(rope="reset")}
    fig, axes = panels(1, 1)
    for name, how in cases.items():
        began = time.perf_counter()
        losses = nll(model, idx, **dict(prefix_len=P, window=W) | how, chunk=chunk, name=name).double().cpu()
        bins = [part.mean().item() for part in losses.split(512)]
        axes[0, 0].plot([min(512 * n + 256, T) for n in range(len(bins))], bins, label=name)
        # losses[t] is that of the token at position t + 1
        inside, beyond = (part.mean().item() if len(part) else None for part in (losses[P + W - 1:edge - 1], losses[max(edge - 1, 0):]))
        table[name] = dict(inside=inside and round(inside, 4), beyond=beyond and round(beyond, 4), s=round(time.perf_counter() - began, 1))
    axes[0, 0].axvline(edge, color="grey", linestyle="--", label=f"trained on {edge:,} positions")
    axes[0, 0].set(xlabel="position", ylabel="nats per token")
    axes[0, 0].legend()
    return dict(figure="longtext", out=save(fig, "longtext"), init_from=init_from, tokens=T, P=P, W=W, max_len=edge, nats_per_token=table)


FIGURES = dict(curve=curve, accuracy=accuracy, times=times, mismatch=mismatch, speed=speed, attention=attention, receptive=receptive,
               longtext=longtext)


def main():
    if _what not in FIGURES:
        raise ValueError(f"the first argument names the figure, {' or '.join(FIGURES)}, not {_what!r}: python -m lab.figures curve")
    if Path(out or "x.png").suffix not in (".png", ".svg", ".pdf") or not Path(out).parent.is_dir():
        raise ValueError(f"out={out!r}: a .png, .svg or .pdf in a folder that is there")
    if _what in ("accuracy", "times", "mismatch", "speed") and not data:
        raise ValueError(f"{_what} reads a file of another script: --data=FILE")
    print(json.dumps(FIGURES[_what]()))


if __name__ == "__main__":
    run(main)
