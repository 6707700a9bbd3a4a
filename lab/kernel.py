"""
python -m lab.bench kernel: forward, backward and one step of decoding for every length and window, by
    ours         prefix + window by attn_kernel.py: Triton on CUDA, the block-sparse PyTorch path elsewhere
    flex         the same mask by FlexAttention (CUDA)
    flash-attn   a plain window without the prefix, by the flash_attn package where it is installed (CUDA)
    sdpa mask    the same mask as a dense (T, T) matrix, by scaled_dot_product_attention, up to a length
    sdpa full    full causal attention; its decoding reads T keys where ours reads P + W

Times are the fastest of several runs. FLOPs are those of the visible pairs of query and key alone, 4 D per
pair forward and 10 D backward; shares are of the rates that a large matrix product and a copy reach on this
machine. SDPA and flash-attn get repeated key heads, outside of the timing, where they are slow without.
"""
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attention import visible
from attn_kernel import decode_attention, flex_block_mask, flex_compiled, prefix_sliding_attention
from device import device_and_dtype
from evals.table import print_table
from lab.measure import are_counts, machine_rates, name_of, note, peak_bytes, rounded, seconds

PEERS = ("sdpa mask", "sdpa full", "flex", "flash-attn")


@dataclass
class Case:
    """What is measured."""
    device: torch.device
    dtype: torch.dtype
    batch: int
    rows: int           # sequences of a step of decoding
    n_head: int
    n_kv_head: int
    head_dim: int
    prefix_len: int
    window: int = 0
    length: int = 0

    def __post_init__(self):
        self.generator = torch.Generator(self.device).manual_seed(0)

    def random(self, batch, heads, length):
        shape = batch, heads, length, self.head_dim
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=self.generator)


@dataclass
class Peer:
    """Somebody's attention for given inputs."""
    run: Callable
    inputs: list        # what it is differentiated by
    pairs: int          # visible pairs of query and key


def kernel(keys):
    case, lengths, windows = case_of(keys)
    device = case.device
    flops, bandwidth = machine_rates(device, case.dtype, keys.repeats)
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"{device}, {torch.get_num_threads()} threads"
    print(f"{name}: {name_of(case.dtype)} matrix product {flops / 1e12:.3g} TFLOP/s, "
          f"copy {bandwidth / 1e9:.3g} GB/s; batch {case.batch}, {case.n_head} query and {case.n_kv_head} "
          f"key heads of {case.head_dim}, P={case.prefix_len}; decoding {case.rows} rows")
    table = []
    for case.window in windows:
        for case.length in lengths:
            table += measure(case, flops, bandwidth, keys)
    note()
    print_table(table)
    compared = ratios(table)
    print("\nforward and backward together, ours against others and against half the length")
    print_table(compared)
    known = [{key: value for key, value in row.items() if value is not None} for row in compared]
    return dict(
        device=name, dtype=name_of(case.dtype),
        matrix_tflop_per_s=flops / 1e12, copy_gb_per_s=bandwidth / 1e9,
        P=case.prefix_len, batch=case.batch, rows=case.rows, n_head=case.n_head, n_kv_head=case.n_kv_head,
        head_dim=case.head_dim, table=table, ratios=known)


def case_of(keys):
    """(Case, lengths, windows) of the keys of lab/bench.py. ValueError for those that cannot be measured."""
    device, dtype = device_and_dtype(keys.device, keys.dtype)
    if device.type == "cuda":
        lengths, windows = (4096, 8192, 16384, 32768, 65536, 131072), (2048, 4096, 8192)
        heads = dict(n_head=32, n_kv_head=8, head_dim=128)
    else:
        lengths, windows = (2048, 4096, 8192, 16384), (512,)
        heads = dict(n_head=4, n_kv_head=2, head_dim=64)
    heads |= {name: getattr(keys, name) for name in heads if getattr(keys, name) is not None}
    lengths, windows = keys.lengths or lengths, keys.windows or windows
    rows = 16 if keys.rows is None else keys.rows
    if not are_counts(keys.repeats, *lengths, *windows, keys.batch, rows, *heads.values()):
        raise ValueError(f"lengths={lengths}, windows={windows}, batch={keys.batch}, rows={rows}, "
                         f"repeats={keys.repeats} and heads={heads} are whole numbers of at least 1")
    if keys.prefix_len < 0 or heads["n_head"] % heads["n_kv_head"]:
        raise ValueError(f"prefix_len={keys.prefix_len} is at least 0, and n_head={heads['n_head']} a "
                         f"multiple of n_kv_head={heads['n_kv_head']}")
    return Case(device, dtype, keys.batch, rows, **heads, prefix_len=keys.prefix_len), lengths, windows


def measure(case, flops, bandwidth, keys):
    """The rows of the table for one window and one length."""
    table = []
    q, k, v = (case.random(case.batch, heads, case.length).requires_grad_()
               for heads in (case.n_head, case.n_kv_head, case.n_kv_head))    # (B, H or Hkv, T, D)
    grad = case.random(case.batch, case.n_head, case.length)                  # (B, H, T, D)
    for name, peer in peers(case, q, k, v, keys.dense_up_to).items():
        note(f"{name} at T={case.length}, W={case.window}")
        try:
            forward, backward, peak = times_of(peer, grad, case.device, keys.repeats)
            step, n_slots = decoder(name, case)
            decode = seconds(step, case.device, keys.repeats) if step else None
        except torch.OutOfMemoryError:
            print(f"{name} at T={case.length}, W={case.window}: out of memory, left out", file=sys.stderr)
            continue
        work = 4 * case.head_dim * peer.pairs * case.batch * case.n_head
        read = 2 * case.rows * case.n_kv_head * n_slots * case.head_dim * case.dtype.itemsize
        table.append(rounded(
            W=case.window, T=case.length, impl=name, forward_ms=1e3 * forward, backward_ms=1e3 * backward,
            forward_tflop_per_s=work / forward / 1e12, forward_share=work / forward / flops,
            backward_tflop_per_s=2.5 * work / backward / 1e12, backward_share=2.5 * work / backward / flops,
            peak_mb=peak / 1e6,
            decode_ms=1e3 * decode if step else None,
            decode_gb_per_s=read / decode / 1e9 if step else None,
            decode_share=read / decode / bandwidth if step else None))
    return table


def peers(case, q, k, v, dense_up_to):
    """{name: Peer} of everybody who can do these inputs."""
    P, W, T, device = case.prefix_len, case.window, case.length, case.device
    group = case.n_head // case.n_kv_head
    some, every = visible_pairs(T, P, W), T * (T + 1) // 2
    found = {"ours": Peer(lambda: prefix_sliding_attention(q, k, v, P, W), [q, k, v], some)}
    if device.type == "cuda":
        mask = flex_block_mask(q, k, torch.tensor([P], device=device), W, torch.tensor([0], device=device))
        flex = flex_compiled()
        found["flex"] = Peer(lambda: flex(q, k, v, block_mask=mask, enable_gqa=group > 1), [q, k, v], some)
        try:
            from flash_attn import flash_attn_func
        except ImportError:
            pass
        else:
            x = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]   # (B, T, H, D)
            found["flash-attn"] = Peer(
                lambda: flash_attn_func(*x, causal=True, window_size=(W - 1, 0)), x, visible_pairs(T, 0, W))
    k_all, v_all = (x.detach().repeat_interleave(group, 1).requires_grad_() for x in (k, v))    # (B, H, T, D)
    attend, inputs = F.scaled_dot_product_attention, [q, k_all, v_all]
    if T <= dense_up_to:
        i = torch.arange(T, device=device)
        dense = visible(i[:, None], i, P, W)                                  # (T, T)
        found["sdpa mask"] = Peer(lambda: attend(*inputs, attn_mask=dense), inputs, some)
    found["sdpa full"] = Peer(lambda: attend(*inputs, is_causal=True), inputs, every)
    return found


def visible_pairs(T, P, W):
    """How many (query, key) pairs the mask leaves in a sequence of T tokens."""
    i = torch.arange(T)
    return int((torch.clamp(i + 1, max=W) + (i - W + 1).clamp(0, P)).sum())


def times_of(peer, grad, device, repeats):
    """(seconds forward, seconds backward, bytes at the peak of both)"""
    def backward_of(y, keep):
        # flash-attn has heads and tokens the other way round; random is random
        torch.autograd.grad(y, peer.inputs, grad.reshape(y.shape), retain_graph=keep)

    forward = seconds(peer.run, device, repeats)
    backward = seconds(functools.partial(backward_of, peer.run(), True), device, repeats)
    return forward, backward, peak_bytes(lambda: backward_of(peer.run(), False), device)


def decoder(name, case):
    """(a function without arguments that decodes one token of case.rows sequences, the slots it reads)"""
    n_slots = {"ours": case.prefix_len + case.window, "sdpa full": case.length}.get(name, 0)
    if not n_slots:
        return None, 0
    q, k, v = (case.random(case.rows, heads, length) for heads, length in (
        (case.n_head, 1), (case.n_kv_head, n_slots), (case.n_kv_head, n_slots)))
    if name == "ours":
        full = torch.full((case.rows,), n_slots, device=case.device)
        return lambda: decode_attention(q, k, v, full), n_slots
    grouped = case.n_head != case.n_kv_head
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped), n_slots


def ratios(table):
    """What the length costs us, and what it costs others: a row for each window and length."""
    rows = {(row["W"], row["T"], row["impl"]): row for row in table}
    total = {place: row["forward_ms"] + row["backward_ms"] for place, row in rows.items()}
    compared = []
    for (W, T, impl), ours in total.items():
        if impl != "ours":
            continue
        row = dict(W=W, T=T)
        for peer in PEERS:
            key = f"times_faster_than_{peer.replace(' ', '_').replace('-', '_')}"
            row[key] = total[W, T, peer] / ours if (W, T, peer) in total else None
        half = rows.get((W, T // 2, "ours"))
        row |= dict(time_for_twice_the_length=None, memory_for_twice_the_length=None)
        if half:
            peak_mb = rows[W, T, "ours"]["peak_mb"]
            row["time_for_twice_the_length"] = ours / total[W, T // 2, "ours"]
            row["memory_for_twice_the_length"] = peak_mb / max(half["peak_mb"], 1e-9)
        compared.append(rounded(**row))
    columns = [key for key in compared[0] if any(row[key] is not None for row in compared)]
    return [{key: row[key] for key in columns} for row in compared]
