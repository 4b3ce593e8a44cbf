"""Supports Adam's moments in 8 or 4 bits: their bytes, reproducible rounding, and transfer between checkpoints.

The optimizers are torchao's `AdamW8bit` and `AdamW4bit`, which also update shards. A moment consists of codes and one fp32 scale
for each block of elements (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861; Li et al., "Memory
Efficient Optimizers with 4-bit States", arXiv 2309.01507). Blocks divide a rank's own shard. A shard with few elements, or with
an incomplete block, keeps plain moments.

States and optimizers are recognised by the names of their classes, so torchao need not be installed otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_longctx.runtime.parameters.gradients import local_shard

# elements of a block, as set by transformers, and fewest elements of a tensor with quantised moments
BLOCK_ELEMENTS, _LEAST_ELEMENTS = 256, 4096
# state -> whether it is signed
MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}


def why_no_torchao() -> str:
    """Describes why torchao cannot be imported; empty if it can, and has then registered its states as safe to load."""
    try:
        import_module("torchao.optim")
    except ImportError as error:
        return str(error)
    return ""


def is_low_bit(value: Any) -> bool:
    """Whether a state, or its shard on this rank, is stored in a few bits."""
    return _is_torchao(type(local_shard(value)), "OptimState") if isinstance(value, Tensor) else False


def has_low_bit_moments(optimizer: Any) -> bool:
    """Whether `optimizer` is one of torchao's with low-bit moments."""
    return _is_torchao(type(optimizer), "Adam")


def moment_bytes(shapes: Iterable[Sequence[int]], bits: int, shard_ranks: int = 1) -> float:
    """Returns bytes of both moments per element of weights of these shapes, counting fp32 for moments that are not quantised.

    A mean over the elements of the rank with the most bytes among `shard_ranks`; 0 without weights.
    """
    first_bytes = last_bytes = count = 0
    for shape in shapes:
        num_rows, row = (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)
        own = -(-num_rows // shard_ranks)
        first_bytes += _bytes_of(own * row, bits)
        last_bytes += _bytes_of(max(0, num_rows - own * (shard_ranks - 1)) * row, bits)
        count += num_rows * row
    return max(first_bytes, last_bytes) * shard_ranks / count if count else 0.0


def _bytes_of(count: int, bits: int) -> int:
    if count < _LEAST_ELEMENTS or count % BLOCK_ELEMENTS:
        return 8 * count
    # codes, scales, and the table of values of codes
    return 2 * (count * bits // 8 + 4 * count // BLOCK_ELEMENTS + 4 * 2**bits)


def widen_shards(optimizer: Any) -> None:
    """Makes `optimizer` support low-bit moments for shards of weights in any dtype; whole weights stay unchanged.

    torchao 0.18 computes with such moments in fp32, but declares those of shards in the weights' dtype, so that its step fails.
    """
    make = optimizer._new_buffer

    def new_buffer(optimizer: Any, parameter: Tensor, signed: bool) -> Tensor:
        if not isinstance(parameter, DTensor) or parameter.dtype == torch.float32:
            made: Tensor = make(parameter, signed)
            return made
        wide: Tensor = make(torch.empty_like(parameter, dtype=torch.float32), signed)
        # plain ones get the dtype that loading a checkpoint gives them
        return wide if is_low_bit(wide) else torch.zeros_like(parameter)

    optimizer._new_buffer = MethodType(new_buffer, optimizer)


def seed_steps(optimizer: Optimizer, seed: int) -> None:
    """Makes steps of `optimizer` draw random numbers from `seed` and the step's number, without changing any random state.

    Stochastic rounding is then equal for copies of a weight on several ranks, also after a resume. Shards draw separate numbers.
    """
    run = optimizer.step

    def step(optimizer: Optimizer, closure: Any = None) -> Any:
        weight = next(parameter for group in optimizer.param_groups for parameter in group["params"])
        number = max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
        shard = weight.device_mesh.get_local_rank() if isinstance(weight, DTensor) else 0
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            torch.manual_seed(hash((seed, number, shard)) % 2**63)
            return run(closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


@torch.no_grad()
def settle_moments(optimizer: Any) -> None:
    """Converts moments from another optimizer's checkpoint to the format of `optimizer`: low-bit or plain."""
    is_wanted = has_low_bit_moments(optimizer)
    for parameter, state in optimizer.state.items():
        for name in MOMENTS.keys() & state.keys():
            value: Any = local_shard(state[name])
            if not is_wanted:
                # shards of another optimizer are read as plain tensors
                state[name] = value.dequantize().to(value.dtype) if is_low_bit(value) else state[name]
                continue
            stored = _stored_like(optimizer, name, torch.empty_like(parameter, dtype=state[name].dtype))
            is_same = type(local_shard(stored)) is type(value)
            if not is_same or stored.dtype != state[name].dtype:
                local_shard(stored).copy_(value.dequantize() if is_low_bit(value) and not is_same else value)
                state[name] = stored
    # schedules of torchao's optimizers change a tensor, which other optimizers may not accept
    takes_tensor = isinstance(optimizer.defaults.get("lr"), Tensor)
    for group in optimizer.param_groups:
        if is_wanted:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
        elif isinstance(group["lr"], Tensor) and not takes_tensor:
            group["lr"] = float(group["lr"])


@dataclass(frozen=True, slots=True)
class PackedMoment:
    """A moment of few bits as files hold it. qmap: what each code stands for; None if codes are floating-point numbers."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor | None
    shape: Sequence[int]

    @classmethod
    def of(cls, value: Any) -> PackedMoment:
        """The parts of a state that `is_low_bit`, without copying them."""
        return cls(value.codes, value.scale, getattr(value, "qmap", None), value.shape)

    @property
    def bits(self) -> int:
        """Bits of an element; codes of 4 bits are packed in pairs."""
        return 8 * self.codes.numel() // math.prod(self.shape)

    @property
    def block_size(self) -> int:
        """Elements that share one scale."""
        return math.prod(self.shape) // len(self.scale)

    def plain(self) -> Tensor:
        """The moment in fp32, as torchao computes it."""
        codes = torch.stack([self.codes >> 4, self.codes & 0b1111], dim=-1) if self.bits == 4 else self.codes
        values = codes.float() if self.qmap is None else self.qmap[codes.int()]
        return (values.view(len(self.scale), -1) * self.scale.view(-1, 1)).view(tuple(self.shape))


# some rows of a state: the first one, and the values of all
Part = tuple[int, Tensor | PackedMoment]


@torch.no_grad()
def own_moment(optimizer: Any, name: str, parts: Sequence[Part], parameter: Tensor, first: int) -> Tensor:
    """A moment as `optimizer` stores it for `parameter`, or for this rank's shard of it, whose rows begin at `first`.

    parts: together they hold at least these rows, in order. Codes and scales are kept if all parts are cut between blocks;
    otherwise the moment is rounded anew.
    """
    shard = torch.empty_like(parameter, dtype=torch.float32)
    stored = _stored_like(optimizer, name, shard) if has_low_bit_moments(optimizer) else shard
    own: Any = local_shard(stored)
    row = math.prod(own.shape[1:])
    cuts = [(max(first, start), min(first + len(own), start + value.shape[0]), start, value) for start, value in parts]
    if is_low_bit(own) and all(_is_cut_between_blocks(own, row, first, cut) for cut in cuts):
        for low, high, start, value in cuts:
            assert isinstance(value, PackedMoment)
            for into, source in ((own.codes, value.codes), (own.scale, value.scale)):
                each = math.prod(value.shape) // source.numel()
                wanted = source.view(-1)[(low - start) * row // each : (high - start) * row // each]
                into.view(-1)[(low - first) * row // each : (high - first) * row // each].copy_(wanted)
    elif cuts:
        plain = [
            (value.plain() if isinstance(value, PackedMoment) else value)[low - start : high - start]
            for low, high, start, value in cuts
        ]
        own.copy_(torch.cat(plain).to(own.device))
    return stored


def _is_cut_between_blocks(own: Any, row: int, first: int, cut: tuple[int, int, int, Tensor | PackedMoment]) -> bool:
    """Whether a part has the bits and blocks of `own`, and is cut between blocks of both."""
    low, high, start, value = cut
    kind = PackedMoment.of(own)
    if not isinstance(value, PackedMoment) or (value.bits, value.block_size) != (kind.bits, kind.block_size):
        return False
    return not any(end * row % kind.block_size for end in (low - first, low - start, high - low))


def _stored_like(optimizer: Any, name: str, value: Tensor) -> Tensor:
    """Makes a moment of zeros with the shape, dtype and shards of `value`, in the format of `optimizer`."""
    stored: Tensor = optimizer._new_buffer(value, MOMENTS[name])
    return stored


def _is_torchao(kind: type, prefix: str) -> bool:
    module, name = kind.__module__, kind.__name__
    return module.startswith(("torchao.optim.", "torchao.prototype.low_bit_optim.")) and name.startswith(prefix)
