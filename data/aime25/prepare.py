"""
Makes aime25.jsonl: the 30 problems of AIME 2025, to evaluate on (math-ai/aime25 on the hub). Their answers are whole numbers, 0 to 999.

    pip install datasets
    python data/aime25/prepare.py                   # or, of a local file with the columns problem and answer:
    python data/aime25/prepare.py mine.jsonl        # .jsonl or .csv
    python tasks.py jsonl:data/aime25/aime25.jsonl --held_out=None
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
    write_problems(Path(__file__).with_name("aime25.jsonl"), lines(read_rows(sys.argv[1:], "math-ai/aime25", split="test")))


if __name__ == "__main__":
    run(main)
