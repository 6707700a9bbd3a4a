"""
What the data/<name>/prepare.py have in common: from a data set, of the hub or a local file, to a file that the task jsonl:<path> reads.
"""
import csv
import json
import re
from pathlib import Path

from checkpoint import replacing
from sources.jsonl import read_problem


def read_rows(local, hub_name, config=None, *, split):
    """The rows of a data set, as dicts: of the .jsonl or .csv file that `local` (a list of arguments) names, or, if that is empty, of the
    hub's. FileNotFoundError if they cannot be had, ValueError if they are no rows."""
    if not local:
        try:
            from datasets import load_dataset
        except ImportError:
            raise ValueError(f"{hub_name} comes from the hub, which needs a package: pip install datasets") from None
        try:
            return list(load_dataset(hub_name, config, split=split))
        except Exception as error:  # of whatever lies between here and the hub
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise FileNotFoundError(f"{hub_name!r} could not be fetched from the hub: {reason}") from None
    path = Path(local[0])
    if len(local) > 1 or path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"{' '.join(local)!r}: one .jsonl or .csv file, or nothing, for the hub's {hub_name}")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file)) if path.suffix == ".csv" else [json.loads(line) for line in file if line.strip()]
    except (ValueError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path}: not a {path.suffix} file in utf-8: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: each line must be a JSON object")
    return rows


def cell(row, *columns):
    """What stands in the first of these columns of a row that is not empty, a text without the space around it; None if all are empty.
    ValueError that names the columns there are, if these are not among them."""
    if not any(column in row for column in columns):
        raise ValueError(f"a row has no column {' or '.join(map(repr, columns))}, only {', '.join(map(repr, row))}")
    cells = (value.strip() if isinstance(value, str) else value for value in map(row.get, columns))
    return next((value for value in cells if value not in (None, "", [])), None)


def write_problems(path, lines):
    """Write dicts as the lines of a file for `jsonl`. ValueError, and no file, if there are none or it would refuse one of them."""
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    for number, text in enumerate(texts, 1):
        read_problem(text, f"{path.name}, line {number}")
    if not texts:
        raise ValueError(f"{path.name}: there is no problem to write")
    with replacing(path) as file:
        file.write_text("".join(text + "\n" for text in texts), encoding="utf-8", newline="\n")
    print(json.dumps(dict(file=str(path), problems=len(texts))))


OPEN = re.compile(r"\b(prove|write\s+a\s+proof|(show|demonstrate)\s+that|justify|explain|"
                  r"how\s+(would|could|can|should|might|do|does|did|is|are|was|were|will))\b", re.IGNORECASE)
# "(a) Find", or "a) Find" where a sentence begins: not f(a), (0, a)
ITEM = r"(?<!\S)(?:\*\*)?\({0}\)(?:\*\*)?\s+[\w$\\]|(?:^|[.?!:;]\s|\n)\s*{0}\)\s"


def verifiable(question):
    """Whether a short answer to a question (a text) can be checked: it asks for no proof or explanation, and for one thing, not for
    (a) and (b). The paper drops questions with "How", too; here "how many", "how far" and their like stay, as their answers are numbers,
    and so does "how to", which is often part of a story."""
    parts = (all(re.search(ITEM.format(number), question) for number in first_two) for first_two in (("a", "b"), ("i", "ii")))
    return not OPEN.search(question) and not any(parts)
