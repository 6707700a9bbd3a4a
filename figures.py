"""
Pictures of what was measured, from the files that the other scripts leave behind.

    python figures.py curve --logs=out-rl-passes/log.csv                             # reward and length, into curve.png
    python figures.py curve --logs=out-a/log.csv,out-b/log.csv --labels="prefix and window,window alone" --out=rl.svg

curve: share solved and mean trace length against the step, one line per log of train_rl.py; dots are held-out problems.
"""
import sys

logs = "out-rl/log.csv"  # log.csv of one or more runs, separated by commas
labels = ""              # their names in the legend, separated by commas; "" = their folders
out = "curve.png"        # the picture: .png, .svg or .pdf

_what = sys.argv.pop(1) if __name__ == "__main__" and sys.argv[1:] and sys.argv[1][0] != "-" else None

from configurator import configure, run

configure(globals())

import csv
import json
from pathlib import Path


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


def curve():
    from matplotlib import pyplot as plt

    paths = [Path(path) for path in logs.split(",")]
    names = labels.split(",") if labels else [str(path.parent) for path in paths]
    if len(names) != len(paths):
        raise ValueError(f"labels={labels!r}: {len(names)} names for {len(paths)} logs")
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for path, name in zip(paths, names, strict=True):
        log = read_log(path)
        if not log.get("solved"):
            raise ValueError(f"{path} has no column solved: it is no log of train_rl.py")
        for ax, column, held_out in zip(axes, ("solved", "length_mean"), ("eval_solved", "eval_length"), strict=True):
            line, = ax.plot(*zip(*log[column], strict=True), label=name)
            if log.get(held_out):
                ax.plot(*zip(*log[held_out], strict=True), "o", color=line.get_color())
    for ax, title in zip(axes, ("share solved", "tokens per trace"), strict=True):
        ax.set(title=title, xlabel="step")
        ax.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[0].legend()
    fig.savefig(out, metadata={"Date": None} if out.endswith(".svg") else None)
    return dict(figure="curve", out=out)


FIGURES = dict(curve=curve)


def main():
    if _what not in FIGURES:
        raise ValueError(f"the first argument names the figure, {' or '.join(FIGURES)}, not {_what!r}: python figures.py curve")
    print(json.dumps(FIGURES[_what]()))


if __name__ == "__main__":
    run(main)
