"""verl on a CPU, for tests alone: a platform that verl loads in every process (VERL_USE_EXTERNAL_MODULES=verl_on_cpu), and
weights that reach vLLM's layers although these are packed for the CPU. Ray is told of one GPU that does not exist."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

GIB = 1 << 30


class _CPU(types.ModuleType):
    """Stands for torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        return (lambda *a, **k: 0) if "memory" in name else (lambda *a, **k: None)

    def is_available(self) -> bool:
        return False

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return (16 * GIB, 16 * GIB)

    def get_device_name(self, *_: Any) -> str:
        return "cpu"


_DEVICE = _CPU("cpu_device")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "generic")
    device_module = property(lambda self: _DEVICE)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, i: int) -> None:
        pass

    def synchronize(self, i: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, i: int = 0) -> tuple[None, None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        """verl would ask for "cpu:gloo,cpu:gloo", which torch refuses as a duplicate; so the group is made here."""
        wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
        if not torch.distributed.is_initialized() and all(name in os.environ for name in wanted):
            torch.distributed.init_process_group(
                "gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
