"""The real SmolLM2-135M-Instruct against transformers: logits, windows by a 4-D mask, greedy text, and the positions beyond training."""

import pytest
import torch
import transformers

from attention import visible
from engine import generate
from model import GPT
from sliding_cache import SlidingCache
from tokenizer import load_tokenizer

TEXT = """A lighthouse is a tower with a light that is given off by a system of lamps and lenses; it serves as a navigational aid
for maritime pilots at sea or on inland waterways. Lighthouses mark dangerous coastlines, hazardous shoals, reefs, rocks, and safe
entries to harbours; they also assist in aerial navigation."""


@pytest.fixture(scope="module")
def real(smollm2):
    hf = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager").eval()
    return hf, GPT.from_pretrained(smollm2), load_tokenizer(smollm2)


@torch.no_grad()
def test_logits_equal_transformers(real):
    hf, model, tokenizer = real
    idx = torch.tensor([tokenizer.encode(TEXT)])
    want = hf(idx).logits
    assert (model(idx) - want).abs().max() < 2e-4
    loss = torch.nn.functional.cross_entropy(model(idx)[0, :-1], idx[0, 1:])
    assert loss < 4.5  # it knows English: uniform would be 10.8


@torch.no_grad()
def test_windows_equal_transformers_under_the_same_mask(real):
    hf, model, tokenizer = real
    idx = torch.tensor([tokenizer.encode(TEXT)])
    i, j = torch.arange(idx.size(1))[:, None], torch.arange(idx.size(1))
    for P, W in ((12, 16), (4, 24), (0, 24)):
        # Eager attention, which adds the mask. Without a prefix the real model is so ill-conditioned that transformers' own two
        # implementations differ by 1e-3 in float32.
        mask = torch.zeros(1, 1, idx.size(1), idx.size(1)).masked_fill(~visible(i, j, P, W), float("-inf"))
        assert (model(idx, P, W) - hf(idx, attention_mask=mask).logits).abs().max() < 2e-4
        assert (model(idx, P, W) - model(idx)).abs().max() > 1  # the window matters to a real model


@torch.no_grad()
def test_greedy_text_equals_transformers(real):
    hf, model, tokenizer = real
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    want = hf.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    done = generate(model, [prompt], 24, temperature=0, stop_ids=tokenizer.eos_ids)[0]
    assert done.tokens == want[: len(done.tokens)] and "Paris" in tokenizer.decode(done.tokens)
    assert done.finish_reason == "stop" and len(done.tokens) == len(want)


@pytest.mark.parametrize("rope", ["continue", "reset"])
@torch.no_grad()
def test_decoding_equals_one_masked_forward(real, rope):
    _, model, tokenizer = real
    idx = torch.tensor([tokenizer.encode(TEXT + TEXT)[:72]])
    cache = SlidingCache(model.config, 1, 10, 12)
    x = [model.features(idx[:, :20], rope=rope, cache=cache)] + [
        model.features(idx[:, t : t + 1], rope=rope, cache=cache) for t in range(20, 72)
    ]
    assert (model.lm_head(torch.cat(x, 1)) - model(idx, 10, 12, rope=rope)).abs().max() < 5e-4
