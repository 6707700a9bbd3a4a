"""What several tests share: tiny models, and references written apart from the code they judge."""

import torch

from model import GPT, GPTConfig


def tiny_gpt(seed=0, dtype=torch.float64, **changes):
    """A random GPT with weights large enough for attention to be far from uniform."""
    torch.manual_seed(seed)
    config = GPTConfig(**(dict(vocab_size=61, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, head_dim=8, n_inner=48) | changes))
    model = GPT(config).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.25)
    return model


def naive_attention(q, k, v, prefix_len, window, q_start=None, q_prefix=None):
    """Loops over rows, heads and queries in float64: nothing is shared with attn_kernel.py, the mask included."""
    B, H, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    out = torch.zeros(B, H, Tq, D, dtype=torch.float64)
    for b in range(B):
        P = int(prefix_len[b]) if torch.is_tensor(prefix_len) else prefix_len
        start = Tk - Tq if q_start is None else int(q_start[b]) if torch.is_tensor(q_start) else q_start
        for h in range(H):
            for t in range(Tq):
                i = start + t
                keys = [j for j in range(Tk) if j <= i and (window is None or i - window < j or j < P)]
                rows = [(q_prefix if q_prefix is not None and j < P else q)[b, h, t].double() for j in keys]
                scores = torch.stack([(r * k[b, h // (H // Hkv), j].double()).sum() for r, j in zip(rows, keys, strict=True)]) / D**0.5
                out[b, h, t] = torch.softmax(scores, 0) @ v[b, h // (H // Hkv), keys].double()
    return out
