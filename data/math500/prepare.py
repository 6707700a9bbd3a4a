"""
Makes math500.jsonl: the 500 problems of MATH-500, to evaluate on (HuggingFaceH4/MATH-500 on the hub).

    pip install datasets
    python data/math500/prepare.py                  # or, of a local file with the columns problem and answer:
    python data/math500/prepare.py mine.jsonl       # .jsonl or .csv
    python tasks.py jsonl:data/math500/math500.jsonl --held_out=None

The worked solutions stay behind: train_sft.py would learn from them.
"""
import sys
from pathlib import Path

sys.path += map(str, Path(__file__).resolve().parents[1:3])

from rows import cell, read_rows, write_problems

from configurator import run


def lines(rows):
    """Rows of the data set -> problems as the jsonl source of tasks.py reads them."""
    return [dict(question=cell(row, "problem"), answer=cell(row, "answer")) for row in rows]


def main():
    write_problems(Path(__file__).with_name("math500.jsonl"), lines(read_rows(sys.argv[1:], "HuggingFaceH4/MATH-500", split="test")))


if __name__ == "__main__":
    run(main)
