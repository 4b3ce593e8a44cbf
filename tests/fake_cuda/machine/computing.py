"""The fake device's arithmetic: every aten operation on CUDA tensors runs its CPU kernel on the same memory.

Views, allocations and copies between host and device stay torch's own, so they reach `runtime.cpp`. Copies that CUDA cannot do by
one plain copy (other dtypes or gaps) are split as torch splits them: into kernels, which are computed, and one plain copy.
"""

from __future__ import annotations

from typing import Any

import torch
from fake_cuda.machine.attention import attend, is_attention
from fake_cuda.machine.device import FakeDevice
from helpers.measures.cudnn_plans import CudnnPlans
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten

# operations that torch itself does, because they compute nothing
_OWN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.resize_.default,
    aten.record_stream.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.lift_fresh.default,
    aten._pin_memory.default,
    aten.is_pinned.default,
    aten._fused_sdp_choice.default,
}
# operations whose result has a shape or a Python value that depends on values, for which the host waits
_WAITING = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::unique_dim",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
    "aten::bincount",
}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Computing(TorchDispatchMode):
    """Dispatch mode that computes for the fake device.

    plans: cuDNN's plans. num_temporaries: copies that took a dense temporary on the device first. loads_lazily: the first run of
    each operation waits for an idle device, as the first launch of a CUDA kernel does.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device, self.plans = device, CudnnPlans()
        self.num_temporaries, self.loads_lazily = 0, False
        self._loaded: set[Any] = set()
        self._generators: dict[int, tuple[torch.Generator, torch.Generator]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        if any(isinstance(x, Tensor) and type(x) not in _PLAIN for x in flat):
            # FakeTensor runs nothing, and DTensor comes again with its local tensors
            is_fake = any(type(x).__name__ in ("FakeTensor", "FunctionalTensor") for x in flat)
            return func(*args, **kwargs) if is_fake else NotImplemented
        device = kwargs.get("device")
        is_on_device = any(_is_on_device(x) for x in flat) or (device is not None and torch.device(device).type == "cuda")
        if not is_on_device or func.namespace == "c10d":
            return func(*args, **kwargs)
        if func in _OWN or _is_view(func):
            return func(*args, **kwargs)
        self._load(func)
        if func is aten._local_scalar_dense.default:
            self.device.advance()
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._to_copy.default:
            return self._to_copy(*args, **kwargs)
        if waiting := self._waits(func, args):
            self.device.note_wait(waiting)
        self.device.advance()
        if is_attention(func._schema.name):
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
            workspace = _workspace(func._schema.name, defaults | given)
            found = _on_device(attend(self.plans, func._schema.name, tree_map(_on_host, defaults | given)))
            del workspace
            return found
        return self._compute(func, args, kwargs)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        originals: dict[int, tuple[Tensor, Tensor]] = {}

        def there(x: Any) -> Any:
            if _is_on_device(x):
                twin = _on_host(x)
                originals[id(twin)] = (twin, x)
                return twin
            if isinstance(x, torch.device) and x.type == "cuda":
                return torch.device("cpu")
            return self._generator(x) if isinstance(x, torch.Generator) else x

        args, kwargs = tree_map(there, (args, kwargs))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        found = func(*args, **kwargs)
        return tree_map(lambda x: originals[id(x)][1] if id(x) in originals else _on_device(x), found)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if _is_one_copy(target, source):
            return aten.copy_.default(target, source, non_blocking)
        if target.is_cuda and source.is_cuda:
            self.device.advance()
            _on_host(target).copy_(_on_host(source))
            return target
        # from here on as torch's copies between devices: dense in the target's dtype where the source lies, one plain copy, ...
        if source.is_cuda:
            self.device.advance()
            self.num_temporaries += 1
            dense = _on_device(_on_host(source).to(target.dtype).expand_as(target).contiguous())
        else:
            dense = source.to(target.dtype).expand_as(target).contiguous()
        if target.is_contiguous():
            aten.copy_.default(target, dense, non_blocking)
            return target
        # ... and from there into the target's gaps
        arrived = torch.empty_like(dense, device=target.device)
        aten.copy_.default(arrived, dense, non_blocking and target.is_cuda)
        self.device.advance()
        _on_host(target).copy_(_on_host(arrived))
        return target

    def _to_copy(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        device = x.device if device is None else torch.device(device)
        leaves = x.is_cuda and device.type == "cpu" and non_blocking
        kept = torch.preserve_format if memory_format is None else memory_format
        out = torch.empty_like(x, dtype=dtype, device=device, pin_memory=bool(pin_memory or leaves), memory_format=kept)
        return self._copy(out, x, non_blocking)

    def _generator(self, generator: torch.Generator) -> torch.Generator:
        """The generator on the CPU that stands for one of the device."""
        if generator.device.type == "cpu":
            return generator
        if id(generator) not in self._generators:
            twin = torch.Generator().manual_seed(generator.initial_seed())
            self._generators[id(generator)] = generator, twin
        return self._generators[id(generator)][1]

    def forget_loaded(self, loads_lazily: bool) -> None:
        """Lets every operation load anew; `loads_lazily`: see the class."""
        self.loads_lazily = loads_lazily
        self._loaded.clear()

    def _load(self, func: Any) -> None:
        if self.loads_lazily and func not in self._loaded:
            self._loaded.add(func)
            self.device.advance_all()

    def _waits(self, func: Any, args: Any) -> str:
        """Name of the operation if the host would wait for its result; empty if not."""
        name = str(func._schema.name) + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
        if name in _WAITING or func._schema.name in _WAITING:
            return name
        masks = args[1] if func in _INDEXED else ()
        is_masked = any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in masks or ())
        return f"{name} by a mask" if is_masked else ""


def _workspace(name: str, arguments: dict[str, Any]) -> list[Tensor]:
    """Device memory that a backward of attention takes while it runs, by the source of FlashAttention 2.

    A sum of the queries' gradients in fp32, and gradients of keys and values for every query head.
    """
    if not name.endswith("_backward"):
        return []
    q, k = arguments["query"], arguments["key"]
    expanded = [torch.empty_like(q) for _ in range(2 if k.numel() < q.numel() else 0)]
    return [torch.empty_like(q, dtype=torch.float32), *expanded]


def _is_on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _is_one_copy(target: Tensor, source: Tensor) -> bool:
    """Whether torch copies by one plain copy of bytes: equal dtypes and equal dense layouts."""
    is_alike = target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride()
    is_contiguous = target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
    return (is_alike and _is_dense(target)) or (is_contiguous and target.shape == source.shape)


def _is_dense(x: Tensor) -> bool:
    return x.numel() == 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _on_host(x: Any) -> Any:
    """CPU tensor in the memory of a CUDA tensor; anything else unchanged."""
    if not _is_on_device(x):
        return x
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.size(), x.stride())


def _on_device(found: Any) -> Any:
    """Results of a CPU kernel, with every tensor in memory of the device."""

    def there(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_cuda:
            return x
        out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda")
        _on_host(out).copy_(x)
        return out

    return tree_map(there, found)
