"""
One decoder, GPT, for training from scratch and for Llama / SmolLM2, Qwen2 / R1-Distill and Qwen3 weights.

    from model import GPT
    model = GPT.from_pretrained("data/smollm2")            # after: python data/smollm2/prepare.py
    logits = model(idx, prefix_len=20, window=256)         # (B, T, vocab_size)

The three families are one architecture with three switches: RMSNorm, RoPE, grouped-query attention and SwiGLU
throughout; a bias on q, k and v in Qwen2; a norm on q and k in Qwen3; a head that is or is not the embedding.
The submodules carry the names of Hugging Face's files: a state dict *is* their layout. checkpoint.py reads
and writes the files.

Left out on purpose: dropout, mixtures of experts, biases other than q/k/v. A file that needs them is refused.
"""
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention import upcast
from attn_kernel import decode_attention, prefix_sliding_attention
from checkpoint import MODEL_FILES, hf_config, local_folder, read_config, read_weights, replacing
from sliding_cache import layer_windows


@dataclass
class GPTConfig:
    vocab_size: int = 257          # rows of the embedding; may exceed the tokenizer's entries
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int | None = None   # key/value heads; divides n_head; None = n_head
    n_embd: int = 128
    head_dim: int | None = None    # even, at most 256; None = n_embd // n_head
    n_inner: int | None = None     # width of the SwiGLU; None = 3 n_embd
    max_len: int = 2048            # tokens of the longest training sequence; nothing is cut off at it
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None   # {"rope_type": "llama3" | "yarn", "factor": ..., see ROPE_SCALINGS}
    qkv_bias: bool = False         # Qwen2
    qk_norm: bool = False          # Qwen3
    tied: bool = True              # the head is the embedding
    windows: tuple | None = None   # trained with: one int or None per layer; None = full attention in all
    eos_ids: tuple = ()            # end tokens, as far as config.json knows them; tokenizer.eos_ids has all
    tokenizer: str | None = None   # "bytes" for models from scratch that have no tokenizer file

    def __post_init__(self):
        if min(self.vocab_size, self.n_layer, self.n_head, self.n_embd) < 1 or self.n_kv_head == 0:
            raise ValueError("vocab_size, n_layer, n_head, n_kv_head and n_embd are at least 1")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.n_inner = self.n_inner or 3 * self.n_embd
        self.windows = tuple(self.windows or [None] * self.n_layer)
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}")
        if self.head_dim % 2 or not 2 <= self.head_dim <= 256:
            raise ValueError(f"head_dim={self.head_dim}: an even number up to 256 is supported")
        if self.qkv_bias and self.qk_norm:
            raise ValueError("qkv_bias (Qwen2) and qk_norm (Qwen3) together: no family has both")
        if len(self.windows) != self.n_layer:
            raise ValueError(f"windows has {len(self.windows)} entries, the model {self.n_layer} layers")
        check_rope_scaling(self.rope_scaling)

    @property
    def family(self):
        if self.qk_norm:
            return "qwen3"
        return "qwen2" if self.qkv_bias else "llama"


# --------------------------------------------------------------------------------------------------
# rotary position embeddings

# What each kind of rope_scaling needs beside "rope_type"
ROPE_SCALINGS = {
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def check_rope_scaling(scaling):
    if not scaling:
        return
    kind = scaling.get("rope_type")
    if kind not in ROPE_SCALINGS:
        raise ValueError(f"rope scaling {kind!r} is not supported, only {', '.join(ROPE_SCALINGS)}")
    lacking = [key for key in ROPE_SCALINGS[kind] if scaling.get(key) is None]
    if lacking:
        raise ValueError(f"rope scaling {kind!r} lacks {', '.join(lacking)}")


def rope_frequencies(config):
    """The angle per position of each pair of dimensions, (head_dim / 2,) float32 on the CPU, and the factor
    on cos and sin. To reach beyond the original length, pairs that turn fast keep their frequency, and that
    of the slow ones is divided by a factor."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    freqs = 1.0 / config.rope_theta**exponents                                        # (D / 2,)
    scaling = config.rope_scaling
    if not scaling:
        return freqs, 1.0
    if scaling["rope_type"] == "llama3":
        keep, amplitude = llama3_keep(freqs, scaling), 1.0
    else:
        keep, amplitude = yarn_keep(config), yarn_amplitude(scaling)
    return freqs * keep + freqs / scaling["factor"] * (1 - keep), amplitude


def llama3_keep(freqs, scaling):
    """How much of each frequency stays, 0 to 1, (D / 2,): linear in its turns over the original length."""
    turns = scaling["original_max_position_embeddings"] * freqs / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    return ((turns - low) / (high - low)).clamp(0, 1)


def yarn_keep(config):
    """The same for YaRN (arXiv 2309.00071): linear in the number of the pair, from the one that turns
    beta_fast times over the original length to the one that turns beta_slow times."""
    scaling, dim = config.rope_scaling, config.head_dim

    def pair_that_turns(times):
        positions_per_radian = scaling["original_max_position_embeddings"] / (times * 2 * math.pi)
        return dim * math.log(positions_per_radian) / (2 * math.log(config.rope_theta))

    first = pair_that_turns(scaling.get("beta_fast") or 32)
    last = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    pairs = torch.arange(dim // 2, device="cpu")
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def yarn_amplitude(scaling):
    """The factor on cos and sin by which YaRN sharpens the attention over longer sequences."""
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]

    def amplitude(mscale):
        return 0.1 * mscale * math.log(max(scaling["factor"], 1)) + 1

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return amplitude(mscale) / amplitude(mscale_all)
    return amplitude(1)


def rotate(x, cos, sin):
    """Turn the pairs (x[d], x[d + D/2]) of x (B, H, T, D) by angles whose cos and sin are (B, 1, T, D/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


# ----------------------------------------------------------------------------------------------------
# the model

class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        y = upcast(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, D, bias = config.n_embd, config.head_dim, config.qkv_bias
        self.head_dim, self.qk_norm = D, config.qk_norm
        self.q_proj = nn.Linear(C, config.n_head * D, bias=bias)
        self.k_proj = nn.Linear(C, config.n_kv_head * D, bias=bias)
        self.v_proj = nn.Linear(C, config.n_kv_head * D, bias=bias)
        self.o_proj = nn.Linear(config.n_head * D, C, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(D, config.norm_eps)
            self.k_norm = RMSNorm(D, config.norm_eps)

    def heads(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x, attend):
        q = self.heads(self.q_proj(x))                                 # (B, H, T, D)
        k = self.heads(self.k_proj(x))                                 # (B, Hkv, T, D)
        v = self.heads(self.v_proj(x))                                 # (B, Hkv, T, D)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        y = attend(q, k, v)                                            # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))               # (B, T, n_embd)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.down_proj = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, attend):
        x = x + self.self_attn(self.input_layernorm(x), attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config.vocab_size, config.n_embd),
            layers=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            norm=RMSNorm(config.n_embd, config.norm_eps)))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.checkpointing = False    # keep each layer's input only: the backward computes it anew
        freqs, self.rope_factor = rope_frequencies(config)
        self.register_buffer("freqs", freqs, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = p.size(1) ** -0.5                                # outputs as large as inputs
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * config.n_layer)           # so many are added to the residual stream
                elif name.endswith("lm_head.weight"):
                    std /= 10                                          # the first guess is to be an even one
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.tie()

    def tie(self):
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn, recurse=True):
        freqs = self.freqs
        super()._apply(fn, recurse)
        # .bfloat16() must not reach them: angles would be wrong by radians at 32k
        self.freqs = freqs.to(self.freqs.device)
        return self

    def forward(self, idx, prefix_len=None, window=None, *, positions=None, rope="continue"):
        """Logits (B, T, vocab_size) of token ids idx (B, T), right-padded, under the mask of
        attention.visible by index.

        prefix_len: int, (B,) or None = 0. window: int, None (full attention), or a list with one of these per
        layer. positions (B, T): for RoPE only; default the index. rope: "continue" | "reset", see features.
        Raises ValueError."""
        return self.lm_head(self.features(idx, prefix_len, window, positions=positions, rope=rope))

    def features(self, idx, prefix_len=None, window=None, *, positions=None, rope="continue",
                 cache=None, rows=slice(None), n_new=None):
        """What the head is applied to, (B, T, n_embd). With a SlidingCache, idx continues the given rows of
        it by n_new tokens each (int or one per row, default T); prefix_len, window and positions are then
        those of the cache.

        rope="continue": every token keeps its absolute position. rope="reset": distances are those of a
        sequence from which the gap between prefix and window was cut out. Scores depend on distances only,
        so keys stay as they were cached: window keys meet the query rotated at its position, prefix keys a
        second query, rotated at min(position, P + W - 1)."""
        if rope not in ("continue", "reset"):
            raise ValueError(f"rope={rope!r}: 'continue' or 'reset'")
        T, plan = idx.size(1), None
        if cache is None:
            windows = layer_windows(self.config, window)
            P = torch.as_tensor(0 if prefix_len is None else prefix_len, device=idx.device).reshape(-1)
            if positions is None:
                positions = torch.arange(T, device=idx.device)[None]   # (1, T)
        elif prefix_len is window is positions is None:
            plan = cache.advance(T if n_new is None else n_new, rows)
            windows, P, positions = cache.windows, plan.prefix_len, plan.positions
        else:
            raise ValueError("prefix_len, window and positions are the cache's: do not give them again")

        x = self.model.embed_tokens(idx)                               # (B, T, n_embd)
        turn, turn_prefix = self.rotation(positions, x.dtype), {}
        if rope == "reset":
            for w in set(windows) - {None}:
                turn_prefix[w] = self.rotation(torch.minimum(positions, P[:, None] + w - 1), x.dtype)

        def attend(layer, q, k, v):    # q (B, H, T, D); k, v (B, Hkv, T, D) -> (B, H, T, D)
            w, start, q_prefix = windows[layer], None, None
            if w in turn_prefix:
                q_prefix = rotate(q, *turn_prefix[w]).to(v.dtype)
            q = rotate(q, *turn).to(v.dtype)                           # dtypes differ only under autocast
            k = rotate(k, *turn).to(v.dtype)
            if plan is not None and plan.decoding:
                keys, values, lengths = cache.append(plan, layer, k, v)
                return decode_attention(q, keys, values, lengths, prefix_len=P, q_prefix=q_prefix)
            if plan is not None:
                k, v, start = cache.extend(plan, layer, k, v)          # what the rows held comes first
            return prefix_sliding_attention(q, k, v, P, w, q_start=start, q_prefix=q_prefix)

        for layer, block in enumerate(self.model.layers):
            args = x, partial(attend, layer)
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, *args, use_reentrant=False)
            else:
                x = block(*args)
        return self.model.norm(x)

    def rotation(self, positions, dtype):
        """cos and sin (1 | B, 1, T, D / 2) of the angles of RoPE at the positions (1 | B, T)."""
        angles = positions[:, None, :, None].float() * self.freqs      # float32 always
        return (angles.cos() * self.rope_factor).to(dtype), (angles.sin() * self.rope_factor).to(dtype)

    @classmethod
    def from_pretrained(cls, path_or_hub_name, *, dtype=torch.float32, device="cpu"):
        """A model from a Hugging Face folder (config.json and one or more .safetensors) or a hub name such
        as "Qwen/Qwen3-1.7B". Every tensor must be there, in its shape, and be used: FileNotFoundError and
        ValueError name what is not."""
        folder = local_folder(path_or_hub_name, MODEL_FILES)
        config = GPTConfig(**read_config(folder))
        with torch.device("meta"):
            model = cls(config)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        weights = read_weights(folder, shapes, dtype, device)
        model.load_state_dict(weights, strict=False, assign=True)  # not strict: a tied head comes once
        model.tie()
        return model.to(device).eval()

    def save_pretrained(self, path):
        """Write config.json and model.safetensors, which from_pretrained and transformers read. Each file
        is written beside the old one and renamed, so that a reader or a killed run never meets half a
        file."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().cpu().contiguous() for name, p in self.named_parameters()}
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        with replacing(folder / "model.safetensors") as file:
            save_file(weights, file, metadata={"format": "pt"})
        # The index of older, sharded weights would win over the new file
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        with replacing(folder / "config.json") as file:
            config = hf_config(self.config) | {"dtype": dtype}
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
