r"""
Makes prefix_sliding_rl.jsonl: the problems that the paper trains on (prefixsliding/train_v6_filtered on the hub).

    pip install datasets
    python data/prefix_sliding_rl/prepare.py               # or, of a local file with such columns as below:
    python data/prefix_sliding_rl/prepare.py mine.jsonl    # .jsonl or .csv
    python train_rl.py config/rl_qwen3_1p7b_80gb.py --task=jsonl:data/prefix_sliding_rl/prefix_sliding_rl.jsonl

Questions are looked for in the columns question, problem and prompt: a text, or a list of chat messages of which the user's is taken.
Answers in answer, ground_truth, final_answer and solution; of a worked text, what its \boxed{} holds. Left out are rows without
question or answer, and those that ask for a proof, an explanation or several things (rows.verifiable). How hard the problems are for
a model is not seen here: see the tasks rated:<path> of tasks.py.
"""
import sys
from pathlib import Path

sys.path += map(str, Path(__file__).resolve().parents[1:3])

from rows import cell, read_rows, verifiable, write_problems

from configurator import run
from tasks import find_answer


def lines(rows):
    """Rows of the data set -> problems as the jsonl source of tasks.py reads them, without those that cannot be verified."""
    out = []
    for row in rows:
        question, answer = cell(row, "question", "problem", "prompt"), cell(row, "answer", "ground_truth", "final_answer", "solution")
        if isinstance(question, list):
            try:
                question = "\n\n".join(message["content"] for message in question if message["role"] == "user")
            except (KeyError, TypeError):
                raise ValueError(f'not a list of {{"role": ..., "content": a text}}: {question!r:.80}') from None
        if isinstance(answer, str):
            answer = find_answer(answer) or (answer if len(answer) < 100 and "\n" not in answer else None)       # else a worked text
        if question and answer is not None and verifiable(str(question)):
            out.append(dict(question=question, answer=answer))
    return out


def main():
    rows = read_rows(sys.argv[1:], "prefixsliding/train_v6_filtered", split="train")
    made = lines(rows)
    print(f"{len(rows) - len(made):,} of {len(rows):,} rows are left out", file=sys.stderr)
    write_problems(Path(__file__).with_name("prefix_sliding_rl.jsonl"), made)


if __name__ == "__main__":
    run(main)
