"""Which device a policy is on, and what a step takes of its memory. Imports torch alone, so that a recipe's `device` is
checked in a moment."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator

import torch

from lightningrl.errors import ConfigError

__all__ = ["cpu_threads", "pick_device", "return_memory", "watch_memory"]


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """CPU threads of the calling thread's work. Above 1 in one thread of a process only, as far as possible: GNU's
    OpenMP keeps a team for each thread that asked for one, and where all teams together are more than the cores, none
    of them spins from one operation to the next. A step of a small policy on two threads took 0.8 of the time on one
    so, and takes 0.57 (`benchmarks/learner.py threads` of commit dea155b6)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(name: str) -> torch.device:
    """Raises ConfigError where it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda', but torch sees no GPU; use 'auto' or 'cpu', or install a CUDA build of torch"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def return_memory() -> None:
    """Give memory that nobody uses back to the system, where the C library can (glibc): arrays of many sizes, of
    sampling and of learning by turns, else leave it in pieces that the next ones do not fit into."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def watch_memory(device: torch.device) -> Callable[[], dict[str, float]]:
    """From now on; the answer reads, in bytes of a GPU, `gpu_memory_before`, `gpu_memory_peak` and `gpu_memory`, all
    that it has. Of a CPU it reads nothing."""
    if device.type != "cuda":
        return dict[str, float]
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)

    def read() -> dict[str, float]:
        peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
        return {"gpu_memory_before": float(before), "gpu_memory_peak": float(peak), "gpu_memory": float(total)}

    return read
