"""
One decoder, GPT, for training from scratch and for Llama / SmolLM2, Qwen2 / R1-Distill and Qwen3 weights.

    from model import GPT
    model = GPT.from_pretrained("data/smollm2")            # after: python data/smollm2/prepare.py
    logits = model(idx, prefix_len=20, window=256)         # (B, T, vocab_size), every layer sees its prefix and the last 256 tokens

The three families are one architecture with three switches: RMSNorm, RoPE, grouped-query attention and SwiGLU throughout, a bias
on q, k and v in Qwen2, a norm on q and k in Qwen3, and a head that is or is not the embedding. The submodules carry the names
of Hugging Face's files, so that a state dict *is* their layout and nothing has to be renamed.

Left out on purpose: dropout, mixtures of experts, and biases other than q/k/v; a file that needs them is refused by name.
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
from checkpoint import MODEL_FILES, local_folder, read_json, read_weights, replacing
from sliding_cache import layer_windows

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


# ---------------------------------------------------------------------------------------------------------------------
# configuration

@dataclass
class GPTConfig:
    vocab_size: int = 257          # rows of the embedding; may exceed the tokenizer's entries
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int | None = None   # key/value heads; divides n_head; None = n_head
    n_embd: int = 128
    head_dim: int | None = None    # even, at most 256; None = n_embd // n_head
    n_inner: int | None = None     # width of the SwiGLU; None = 3 n_embd
    max_len: int = 2048            # tokens of the longest training sequence; informative, nothing is cut off at it
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None   # {"rope_type": "llama3" | "yarn", "factor": ..., "original_max_position_embeddings": ...}
    qkv_bias: bool = False         # Qwen2
    qk_norm: bool = False          # Qwen3
    tied: bool = True              # the head is the embedding
    windows: tuple | None = None   # windows the model was trained with: one int or None per layer; None = full attention in all
    eos_ids: tuple = ()            # end tokens, as far as config.json knows them; tokenizer.eos_ids has all
    tokenizer: str | None = None   # "bytes" for models from scratch that have no tokenizer file

    def __post_init__(self):
        if min(self.vocab_size, self.n_layer, self.n_head, self.n_embd) < 1 or self.n_kv_head == 0:
            raise ValueError("vocab_size, n_layer, n_head, n_kv_head and n_embd are at least 1")
        self.n_kv_head, self.head_dim = self.n_kv_head or self.n_head, self.head_dim or self.n_embd // self.n_head
        self.n_inner = self.n_inner or 3 * self.n_embd
        self.windows = tuple(self.windows or [None] * self.n_layer)
        self.rope_scaling = dict(self.rope_scaling) if self.rope_scaling else None
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}")
        if self.head_dim % 2 or not 2 <= self.head_dim <= 256:
            raise ValueError(f"head_dim={self.head_dim}: an even number up to 256 is supported")
        if self.qkv_bias and self.qk_norm:
            raise ValueError("qkv_bias (Qwen2) and qk_norm (Qwen3) together: no Hugging Face architecture has both")
        if len(self.windows) != self.n_layer:
            raise ValueError(f"windows has {len(self.windows)} entries, the model {self.n_layer} layers")
        rope_frequencies(self)  # an unknown kind of scaling raises here and not in the first forward

    @property
    def family(self):
        return "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama"

    @classmethod
    def from_hf(cls, d, where="config.json"):
        """From the contents of a Hugging Face config.json. Raises ValueError that names what is missing or not supported."""
        family = d.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise ValueError(f"{where}: model_type {family!r} is not supported, only {', '.join(FAMILIES)}")
        for key, allowed in (("hidden_act", ("silu",)), ("attention_bias", (False,)), ("mlp_bias", (False,)),
                             ("quantization_config", (None,)), ("partial_rotary_factor", (None, 1.0))):
            if d.get(key, allowed[0]) not in allowed:
                raise ValueError(f"{where}: {key}={d[key]!r} is not supported, only {allowed[0]!r}")
        missing = [key for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                   "max_position_embeddings") if d.get(key) is None]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}")
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                    "head_dim", "max_position_embeddings", "sliding_window", "max_window_layers"):
            if d.get(key) is not None and (type(d[key]) is not int or d[key] < (key != "max_window_layers")):
                raise ValueError(f"{where}: {key}={d[key]!r} is no whole number of at least 1")
        n_layer, n_head = d["num_hidden_layers"], d["num_attention_heads"]
        # transformers 5 keeps theta and scaling together, older files apart, with "type" for "rope_type" in the oldest
        rope = d.get("rope_parameters") or d.get("rope_scaling") or {}
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"{where}: rope parameters {rope!r} are not supported, only one set for all layers")
        rope = dict(rope)
        theta = rope.pop("rope_theta", d.get("rope_theta", 10000.0))
        if not isinstance(theta, int | float) or theta <= 1:
            raise ValueError(f"{where}: rope_theta={theta!r} is no number above 1")
        rope.setdefault("rope_type", rope.pop("type", "default"))
        if rope["rope_type"] != "default":
            rope.setdefault("original_max_position_embeddings", d["max_position_embeddings"])
        windows = None
        if d.get("use_sliding_window") and d.get("sliding_window"):  # a sliding_window that is not used is off
            first = d.get("max_window_layers", 28)
            types = d.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(n_layer)]
            windows = tuple(d["sliding_window"] if t == "sliding_attention" else None for t in types)
        eos = d.get("eos_token_id")
        return cls(
            vocab_size=d["vocab_size"], n_layer=n_layer, n_head=n_head, n_kv_head=d.get("num_key_value_heads") or n_head,
            n_embd=d["hidden_size"], head_dim=d.get("head_dim") or (128 if family == "qwen3" else d["hidden_size"] // n_head),
            n_inner=d["intermediate_size"], max_len=d["max_position_embeddings"], norm_eps=d.get("rms_norm_eps", 1e-6),
            rope_theta=theta, rope_scaling=None if rope["rope_type"] == "default" else rope, qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3", tied=d.get("tie_word_embeddings", False), windows=windows,
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,), tokenizer=d.get("tokenizer"))

    def to_hf(self):
        """The contents of a config.json that transformers (4 and 5) and from_hf read."""
        d = dict(architectures=[FAMILIES[self.family]], model_type=self.family, vocab_size=self.vocab_size, hidden_size=self.n_embd,
                 intermediate_size=self.n_inner, num_hidden_layers=self.n_layer, num_attention_heads=self.n_head,
                 num_key_value_heads=self.n_kv_head, head_dim=self.head_dim, hidden_act="silu", rms_norm_eps=self.norm_eps,
                 max_position_embeddings=self.max_len, rope_theta=self.rope_theta, rope_scaling=self.rope_scaling,
                 attention_bias=False, tie_word_embeddings=self.tied,
                 eos_token_id=list(self.eos_ids) if len(self.eos_ids) > 1 else next(iter(self.eos_ids), None), bos_token_id=None)
        sizes = {w for w in self.windows if w is not None}
        if len(sizes) > 1 or sizes and self.family == "llama":
            raise ValueError(f"windows={self.windows}: Hugging Face's config.json has room for one size, and none in a Llama")
        if sizes:
            d.update(use_sliding_window=True, sliding_window=sizes.pop(), max_window_layers=0,
                     layer_types=["full_attention" if w is None else "sliding_attention" for w in self.windows])
        return d | ({"tokenizer": self.tokenizer} if self.tokenizer else {})


# ---------------------------------------------------------------------------------------------------------------------
# rotary position embeddings

def rope_frequencies(config):
    """The angle per position of each pair of dimensions, (head_dim / 2,) float32 on the CPU, and the factor on cos and sin.
    llama3: Llama 3.1's blend by wavelength. yarn: arXiv 2309.00071, with its attention factor. Raises ValueError otherwise."""
    dim, base, r = config.head_dim, config.rope_theta, config.rope_scaling
    freqs = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if r is None:
        return freqs, 1.0
    kind = r.get("rope_type", r.get("type"))
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"rope scaling {kind!r} is not supported, only default, llama3 and yarn")
    needs = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}[kind]
    lacking = [key for key in (*needs, "original_max_position_embeddings") if r.get(key) is None]
    if lacking:
        raise ValueError(f"rope scaling {kind!r} lacks {', '.join(lacking)}")
    factor, length = r["factor"], r["original_max_position_embeddings"]
    if kind == "llama3":
        turns = length * freqs / (2 * math.pi)                                        # over the original length
        keep = ((turns - r["low_freq_factor"]) / (r["high_freq_factor"] - r["low_freq_factor"])).clamp(0, 1)
        return freqs * keep + freqs / factor * (1 - keep), 1.0

    def dimension(turns):  # the (fractional) dimension that turns this often over the original length
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(r.get("beta_fast") or 32), dimension(r.get("beta_slow") or 1)
    if r.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    keep = 1 - ((torch.arange(dim // 2, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)

    def mscale(m):
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    scale = r.get("attention_factor")
    if scale is None:
        m, m_all = r.get("mscale"), r.get("mscale_all_dim")
        scale = mscale(m) / mscale(m_all) if m and m_all else mscale(1)
    return freqs * keep + freqs / factor * (1 - keep), scale


def rotate(x, cos, sin):
    """RoPE: turn the pairs (x[d], x[d + D/2]) of x (B, H, T, D) by angles whose cos and sin are (B, 1, T, D/2)."""
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

        prefix_len: int, (B,) or None = 0. window: int, None (full attention), or a list with one of these
        per layer. positions (B, T): for RoPE only; default the index. rope: "continue" | "reset", see features.
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
        """A model from a Hugging Face folder (config.json and one or more .safetensors) or a hub name such as "Qwen/Qwen3-1.7B".

        Every tensor must be there, in its shape, and be used: FileNotFoundError and ValueError name what is not."""
        folder = local_folder(path_or_hub_name, MODEL_FILES)
        config = GPTConfig.from_hf(read_json(folder / "config.json"), folder / "config.json")
        with torch.device("meta"):
            model = cls(config)
        weights = read_weights(folder, {name: p.shape for name, p in model.named_parameters()}, dtype, device)
        model.load_state_dict(weights, strict=False, assign=True)                     # read_weights was strict; a tied head comes once
        model.tie()
        return model.to(device).eval()

    def save_pretrained(self, path):
        """Write config.json and model.safetensors, which from_pretrained and transformers read. Each file is written beside the old
        one and renamed, so that a reader or a killed run never meets half a file."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().cpu().contiguous() for name, p in self.named_parameters()}  # a tied head comes once
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        with replacing(folder / "model.safetensors") as file:
            save_file(weights, file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)              # of older, sharded weights: it would win
        with replacing(folder / "config.json") as file:
            file.write_text(json.dumps(self.config.to_hf() | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
