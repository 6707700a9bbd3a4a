"""
lab/compare.py: what it counts and shows, and a whole run, short.

    python -m pytest tests/test_compare.py
"""
import json
import subprocess
import sys

from conftest import ROOT

from lab import compare


def test_what_is_counted_and_shown():
    forgot, remembered = "the sea " * 100, "Marlow met Biscuit. " + "the sea " * 100 + "Ellery at last."
    assert [compare.count_names(text) for text in (forgot, remembered)] == [0, 3]
    assert compare.passage([forgot, remembered]).startswith("the last mention in completion 2\n")
    assert "Ellery" in compare.passage([forgot, remembered]) and "Marlow" not in compare.passage([forgot, remembered])
    assert compare.passage([forgot]).startswith("no mention, this is how completion 1 ends\n")


def test_a_short_run(smollm2):
    command = [sys.executable, "-m", "lab.compare", "--num_samples=2", "--max_new_tokens=6", "--last=6", "--window=8"]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    rows = {row["policy"]: row for row in report["table"]}
    assert [*rows] == ["sliding", "streaming", "full", "prefix_sliding"]
    cache = {policy: row["cache_bytes"] for policy, row in rows.items()}
    token = 2 * 30 * 3 * 64 * 2                                     # keys and values, layers, heads, their size, bfloat16
    assert cache["sliding"] == 2 * 8 * token and cache["full"] == 2 * (report["prompt_tokens"] + 6) * token
    assert result.stdout.count("--- ") == 4


def test_a_wrong_policy_is_named():
    command = [sys.executable, "-m", "lab.compare", "--policies=full,slidng"]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "'slidng'" in result.stderr
