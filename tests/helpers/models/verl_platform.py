"""A platform for verl without an accelerator, of which it has none of its own."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, get_platform


class _Module:
    """The functions of `torch.cuda` that verl calls, without a device."""

    def __getattr__(self, name: str) -> Any:
        return {"mem_get_info": lambda: (2**30, 2**31)}.get(name, lambda *args, **kwargs: 0)


class _Cpu(PlatformBase):
    device_name, vendor_name, device_module = "cpu", "cpu", _Module()
    communication_backend_name, visible_devices_envvar = "gloo", "NO_DEVICES"

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()


def _nothing(self: Any, *args: Any, **kwargs: Any) -> Any:
    return None


# other abstract methods have nothing to do here
for _name in PlatformBase.__abstractmethods__ - set(vars(_Cpu)):
    setattr(_Cpu, _name, _nothing)
_Cpu.__abstractmethods__ = frozenset()


def use_cpu() -> None:
    """Lets verl run on the CPU in this process, with engines that are registered for CUDA alone too."""
    os.environ["VERL_PLATFORM"] = "cpu"
    PlatformRegistry.register("cpu")(_Cpu)
    assert get_platform().device_name == "cpu"
