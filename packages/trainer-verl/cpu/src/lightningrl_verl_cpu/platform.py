"""verl's platform "cpu": gloo instead of NCCL, torch.cpu instead of torch.cuda, Ray's logical GPUs as places.

verl/__init__.py imports this module in every process that imports verl, before anything asks for the platform: first
through VERL_USE_EXTERNAL_MODULES, then through the entry point group `verl.plugins`.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from lightningrl_verl_cpu import shims
from lightningrl_verl_cpu.settings import is_active

__all__ = ["CpuPlatform"]


class _Device(types.ModuleType):
    """torch.cpu, and stand-ins for what verl calls on torch.<device> beside it."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        try:
            return _STAND_INS[name]
        except KeyError:
            raise AttributeError(
                f"the CPU platform has no {name!r}; add a stand-in to lightningrl_verl_cpu.platform"
            ) from None


def _free_and_total(device: Any = None) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_STAND_INS: dict[str, Callable[..., Any]] = {
    "get_device_name": _constant("CPU"),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "mem_get_info": _free_and_total,
    **{f"{which}memory_{what}": _constant(0) for which in ("", "max_") for what in ("allocated", "reserved")},
    **{
        name: _constant(None)
        for name in (
            "empty_cache",
            "ipc_collect",
            "manual_seed",
            "manual_seed_all",
            "reset_peak_memory_stats",
            "set_device",
        )
    },
}

_DEVICE = _Device("lightningrl_verl_cpu.device")


class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """One process, one "device": the CPU."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "generic"

    @property
    def device_module(self) -> types.ModuleType:
        return _DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # only VERL_PLATFORM chooses it

    def current_device(self) -> torch.device:
        # not an index: verl does tensor.to(get_device_id()) (workers/engine/fsdp/transformer_impl.py:730, 1552)
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"  # ray.init(num_gpus=N) gives a machine without any N logical ones

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def is_ipc_supported(self) -> bool:
        return False  # weights go through shared memory

    def cudart(self) -> None:
        return None


if is_active():
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    shims.apply()
