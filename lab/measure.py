"""How to time, to weigh and to take turns: what all benchmarks share."""
import ctypes
import sys
import threading
import time

import psutil
import torch


def note(text=""):
    """What goes on at the moment, on a line of standard error that the next note overwrites."""
    print(text.ljust(78)[:78], end="\r", file=sys.stderr, flush=True)


def synchronize(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def timed(run, device):
    """Seconds of one run()."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def seconds(run, device, repeats):
    """The time of run(), the fastest of `repeats` times: what else the machine does can only add to it."""
    run()
    return min(timed(run, device) for _ in range(repeats))


def take_turns(runs, device, turns, title):
    """The median time of each of the functions {label: run}: in every turn one call that is not counted, and
    up to four that are."""
    times = {label: [] for label in runs}
    for turn in range(turns):
        for label, run in runs.items():
            note(f"{title}: turn {turn + 1} of {turns}, {label}")
            for n in range(5):
                took = timed(run, device)
                # The first call finds the processor's caches full of what ran before. A long one does not
                # feel that.
                if n > 0 or took > 1:
                    times[label].append(took)
                if took > 0.3 and n > 0 or took > 1:
                    break
    note()
    return {label: sorted(measured)[len(measured) // 2] for label, measured in times.items()}


def peak_bytes(run, device):
    """By how much memory grows at most while run() runs: what CUDA counts, or the process, seen every
    millisecond."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)    # freed memory that the process keeps would hide what is used anew
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return peak - before


def machine_rates(device, dtype, repeats):
    """What this machine reaches: FLOP/s of a large matrix product, bytes/s of a copy (reads and writes)."""
    n, n_bytes = (8192, 2**30) if device.type == "cuda" else (2048, 2**27)
    a = torch.randn(n, n, device=device, dtype=dtype)
    x = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    flops = 2 * n**3 / seconds(lambda: a @ a, device, repeats)
    return flops, 2 * n_bytes / seconds(lambda: y.copy_(x), device, repeats)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def are_counts(*numbers):
    """Whether all are whole numbers of at least 1."""
    return all(type(n) is int and n >= 1 for n in numbers)


def rounded(**row):
    """A row of a table, its floats to four digits."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
