"""Weights of experts in checkpoint files, of which every rank reads its own experts, a few at a time.

A model has one weight for all experts of a layer. Files have it as it is, perhaps by another name, in blocks of MXFP4 (GPT-OSS),
or as tensors of single experts, which are strided views of the matrix of an expert (gate and up one after the other, turned or
not), perhaps in fp8 with a scale for each block (DeepSeek). So packed experts are read without a whole weight in bf16: blocks of
MXFP4 and fp8 are copied as they are, and others are packed a few experts at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from hf_longctx.hf.checkpoints.weights import checkpoint_files
from hf_longctx.hf.models.packed_experts import PackedWeight, expert_modules
from hf_longctx.plan.core.sharding import UNPACKED_AT_ONCE
from hf_longctx.runtime.core import fp8
from hf_longctx.runtime.core.expert_products import PackedMatrices
from hf_longctx.runtime.parameters.gradients import first_row

# names in files of the parts of a weight in MXFP4, and elements of a block
_BLOCKS, _SCALES, _BLOCK = "{}_blocks", "{}_scales", 32
# dtype of a tensor in a file, and end of the name of its scales, after that of the tensor
IN_FP8, SCALE = "F8_E4M3", "_scale_inv"
# number of a layer in a name
_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensors of single experts: their name, with `{}` for the expert's number, and which elements of its matrix they hold."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """A weight of all experts of a layer, as files have it: in MXFP4, in pieces of every expert, or else as it is."""

    # in files; of pieces, in the model
    name: str
    # [experts, K inputs, N outputs] of a transposed class, else [experts, N, K]
    shape: torch.Size
    is_transposed: bool
    is_mxfp4: bool = False
    pieces: tuple[Piece, ...] = ()
    # rows and columns of a block of pieces in fp8; None: they are not
    block: tuple[int, int] | None = None

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields names and shapes of all tensors of files that make up the weight."""
        num_experts, inputs, outputs = self.shape if self.is_transposed else (self.shape[0], self.shape[2], self.shape[1])
        if self.is_mxfp4:
            own = num_experts, outputs, inputs // _BLOCK
            yield from ((_BLOCKS.format(self.name), (*own, _BLOCK // 2)), (_SCALES.format(self.name), own))
        elif self.pieces:
            for piece, expert in ((piece, expert) for piece in self.pieces for expert in range(num_experts)):
                yield piece.name.format(expert), piece.shape
                if self.block is not None:
                    scales = tuple(-(-size // own) for size, own in zip(piece.shape, self.block, strict=True))
                    yield piece.name.format(expert) + SCALE, scales
        else:
            yield self.name, self.shape

    def values(self, files: Files, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Reads the weights of some experts, on the CPU."""
        if self.is_mxfp4:
            weight_EKN = PackedMatrices(*self.blocks(files, start, stop), "mxfp4").unpacked(0, stop - start, dtype)
            return weight_EKN if self.is_transposed else weight_EKN.transpose(1, 2)
        if not self.pieces:
            return files.read(self.name, start, stop).to(dtype)
        weight = torch.empty(stop - start, *self.shape[1:], dtype=dtype)
        for expert in range(start, stop):
            for piece in self.pieces:
                first, name = weight.stride(0) * (expert - start) + piece.offset, piece.name.format(expert)
                found = files.read(name)
                if self.block is not None:
                    found = fp8.unpacked(found.view(torch.uint8), files.read(name + SCALE).float(), self.block, dtype)
                weight.as_strided(piece.shape, piece.strides, first).copy_(found)
        return weight

    def keeps_fp8(self, num_scales: int) -> bool:
        """Whether its scales of blocks can be those of a matrix that has so many for each row."""
        num_inputs = self.shape[2]
        is_in_rows = not self.is_transposed and all(piece.strides == (num_inputs, 1) for piece in self.pieces)
        return self.block is not None and is_in_rows and self.block[1] % (num_inputs // num_scales) == 0

    def rows_in_fp8(self, files: Files, start: int, stop: int, num_scales: int) -> tuple[Tensor, Tensor]:
        """Reads bytes [experts, N, K] and scales, as bytes [experts, N, 4 scales], of some experts with `keeps_fp8`."""
        assert self.block is not None
        _, outputs, inputs = self.shape
        codes = torch.empty(stop - start, outputs, inputs, dtype=torch.uint8)
        scales = torch.empty(stop - start, outputs, num_scales)
        columns = torch.arange(num_scales) * (inputs // num_scales) // self.block[1]
        for expert in range(start, stop):
            for piece in self.pieces:
                row, name = piece.offset // inputs, piece.name.format(expert)
                rows = slice(row, row + piece.shape[0])
                codes[expert - start, rows] = files.read(name).view(torch.uint8)
                of_rows = files.read(name + SCALE).float().repeat_interleave(self.block[0], 0)[: piece.shape[0]]
                scales[expert - start, rows] = of_rows[:, columns]
        return codes, scales.view(torch.uint8)

    def blocks(self, files: Files, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Reads the codes [experts, N, K / 2] and scales [experts, N, K / 32] of some experts in MXFP4."""
        return files.read(_BLOCKS.format(self.name), start, stop).flatten(2), files.read(_SCALES.format(self.name), start, stop)


class Files:
    """The tensors of a checkpoint by name. One file is open at a time: the process's memory counts the pages of open files."""

    def __init__(self, folder: str) -> None:
        self.shapes: dict[str, torch.Size] = {}
        # names of those in fp8
        self.in_fp8: set[str] = set()
        self._paths: dict[str, Path] = {}
        self._stack, self._path = ExitStack(), Path()
        self._reader: Any = None
        for path in checkpoint_files(folder):
            with safe_open(path, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    found = reader.get_slice(name)
                    self._paths[name], self.shapes[name] = path, torch.Size(found.get_shape())
                    self.in_fp8 |= {name} if found.get_dtype() == IN_FP8 else set()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._reader = None
        self._stack.close()

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Reads a tensor, or some of its rows."""
        if self._reader is None or self._path != self._paths[name]:
            self._stack.close()
            self._path = self._paths[name]
            self._reader = self._stack.enter_context(safe_open(self._path, framework="pt", device="cpu"))
        found: Tensor = self._reader.get_slice(name)[start:stop]
        return found


def find_experts(
    model: Any, shapes: Mapping[str, torch.Size], files: Files, block: tuple[int, int] | None = None
) -> dict[str, ExpertWeight]:
    """Finds the weights of experts in files, by name in the model; leaves out those that files have in another way.

    shapes: of tensors by their names in the model. block: rows and columns of the blocks of weights in fp8.
    """
    found: dict[str, ExpertWeight] = {}
    known: _Known = {}
    for path, experts in expert_modules(model):
        for name in (name for name, shape in shapes.items() if name.rpartition(".")[0] == path and len(shape) == 3):
            plain = ExpertWeight(name, shapes[name], bool(experts.is_transposed))
            other = _converted(model, plain, known)
            in_blocks = [replace(other, block=block)] if block is not None and other.pieces else []
            for weight in (plain, replace(plain, is_mxfp4=True), other, *in_blocks):
                tensors = {tensor: torch.Size(shape) for tensor, shape in weight.tensors()}
                # those in fp8 have scales
                in_fp8 = {tensor for tensor in tensors if tensor in files.in_fp8}
                is_known = in_fp8 == ({each for each in tensors if not each.endswith(SCALE)} if weight.block else set())
                if is_known and all(files.shapes.get(tensor) == shape for tensor, shape in tensors.items()):
                    found[name] = weight
                    break
    return found


# the name that files have for a weight of all experts, if any, and pieces of single experts, by the name of the weight in the
# model; without the numbers of layers, by which alone names of other layers differ
_Known = dict[tuple[str, torch.Size], tuple[str, tuple[Piece, ...]]]


def _converted(model: Any, plain: ExpertWeight, known: _Known) -> ExpertWeight:
    """The weight with the name, or the pieces, that transformers would write; unchanged if it writes something else."""
    number = next(iter(_LAYER.findall(plain.name)), "")
    key = plain.name.replace(number, "..", 1), plain.shape
    if key not in known:
        name, pieces = _written(model, plain)
        known[key] = name.replace(number, "..", 1), tuple(replace(p, name=p.name.replace(number, "..", 1)) for p in pieces)
    name, pieces = known[key]
    own = tuple(replace(piece, name=piece.name.replace("..", number, 1)) for piece in pieces)
    return replace(plain, name=name.replace("..", number, 1), pieces=own)


def _written(model: Any, plain: ExpertWeight) -> tuple[str, tuple[Piece, ...]]:
    """Finds the name or the pieces by what transformers makes of a weight of two experts whose elements are numbered."""
    numbers = torch.arange(2 * plain.shape[1:].numel(), dtype=torch.int32).view(2, *plain.shape[1:])
    unchanged: tuple[str, tuple[Piece, ...]] = plain.name, ()
    try:
        written = revert_weight_conversion(model, {plain.name: numbers})
    except Exception:
        # a conversion that lacks some of its weights raises whatever comes of that
        return unchanged
    if len(written) == 1 and torch.equal(next(iter(written.values())), numbers):
        return next(iter(written)), ()
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for name, values in written.items():
        if values.dim() != 2 or min(values.shape) < 2:
            return unchanged
        first, strides = int(values[0, 0]), (int(values[1, 0] - values[0, 0]), int(values[0, 1] - values[0, 0]))
        if min(strides) < 1 or not torch.equal(values, numbers.as_strided(values.shape, strides, first)):
            return unchanged
        expert, offset = divmod(first, numbers[0].numel())
        pieces[expert].append(Piece(name, tuple(values.shape), strides, offset))
    found = tuple(replace(own, name=_numbered(own.name, other.name)) for own, other in zip(*pieces, strict=False))
    is_whole = sum(piece.shape[0] * piece.shape[1] for piece in found) == numbers[0].numel()
    is_alike = all(replace(own, name="") == replace(other, name="") for own, other in zip(*pieces, strict=False))
    return (plain.name, found) if is_whole and is_alike and all(piece.name for piece in found) else unchanged


def _numbered(zero: str, one: str) -> str:
    """A name with `{}` for the number of the expert, from those of experts 0 and 1; empty if they differ by more."""
    parts = [*zip(zero.split("."), one.split("."), strict=False)]
    numbers = [place for place, (left, right) in enumerate(parts) if left != right]
    if len(numbers) != 1 or parts[numbers[0]] != ("0", "1") or zero.count(".") != one.count("."):
        return ""
    return ".".join("{}" if place == numbers[0] else left for place, (left, _) in enumerate(parts))


@torch.no_grad()
def read_experts(files: Files, weight: ExpertWeight, target: Tensor | tuple[PackedWeight, Tensor, Tensor]) -> None:
    """Fills a weight, or codes and scales of a packed one, with the experts of this rank, a few at a time."""
    parts = (target,) if isinstance(target, Tensor) else target[1:]
    own = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
    first = first_row(parts[0])
    for start in range(0, len(own[0]), UNPACKED_AT_ONCE):
        stop = min(start + UNPACKED_AT_ONCE, len(own[0]))
        chosen = files, first + start, first + stop
        if isinstance(target, Tensor):
            values: tuple[Tensor, ...] = (weight.values(*chosen, target.dtype),)
        elif weight.is_mxfp4 and target[0].kind == "mxfp4":
            values = weight.blocks(*chosen)
        elif target[0].kind == "fp8" and weight.keeps_fp8(own[1].shape[2] // 4):
            values = weight.rows_in_fp8(*chosen, own[1].shape[2] // 4)
        else:
            values = target[0].right_inverse(weight.values(*chosen, target[0].like.dtype).to(own[0].device))
        for part, value in zip(own, values, strict=True):
            part[start:stop].copy_(value)
