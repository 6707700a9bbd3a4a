"""
Makes gpqa.jsonl: the 198 questions of GPQA Diamond with four choices each, to evaluate on (Idavidrein/gpqa on the hub).

    pip install datasets
    hf auth login                                   # the data set is gated: accept its terms on huggingface.co/datasets/Idavidrein/gpqa
    python data/gpqa/prepare.py                     # or, of a local file with the same columns, such as the authors' gpqa_diamond.csv:
    python data/gpqa/prepare.py gpqa_diamond.csv    # .jsonl or .csv
    python tasks.py jsonl:data/gpqa/gpqa.jsonl --held_out=None

Its authors ask that no question is put anywhere in plain text: keep the file to yourself.
"""
import sys
from pathlib import Path

sys.path += map(str, Path(__file__).resolve().parents[1:3])

from rows import cell, read_rows, write_problems

from configurator import run
from tasks import numbered

SEED = 1  # of the order of the choices


def lines(rows):
    """Rows of the data set -> problems as the jsonl source of tasks.py reads them. The order of the choices depends on SEED and the
    question alone. The answer is their index, from 0, which cannot be mistaken where a choice reads "B" or two read alike."""
    out = []
    for row in rows:
        choices = [cell(row, name) for name in ("Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)))]
        question = cell(row, "Question")
        order = numbered("gpqa", SEED, question).sample(range(4), 4)
        out.append(dict(question=question, choices=[choices[i] for i in order], answer=order.index(0)))
    return out


def main():
    write_problems(Path(__file__).with_name("gpqa.jsonl"), lines(read_rows(sys.argv[1:], "Idavidrein/gpqa", "gpqa_diamond", split="train")))


if __name__ == "__main__":
    run(main)
