"""Writes the weights of a sharded model file by file, so that the writing rank never holds more than one file of them.

`Trainer` writes from a mapping of all whole weights, which for 70 billion parameters in bf16 takes 130 GiB of host memory.
`planned_files` decides from shapes alone, so all ranks gather the same weights in the same order, and `save_files` writes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_longctx.hf.checkpoints.sharded import to_host
from hf_longctx.hf.checkpoints.staged import join_stages, partial_folder, raise_everywhere, save_configs
from hf_longctx.hf.models.refusing import refuses

# most bytes of a file, unless one weight has more
FILE_BYTES = 5 * 10**9
# the name of a weight up to the number of its layer
_LAYER = re.compile(r".*?\.\d+\.")

# names of the model's weights in every file; those of a group become tensors of the file together
Files = list[list[list[str]]]


def planned_files(model: Any) -> Files:
    """The files of all weights; empty for a model whose weights `Trainer` must write from one mapping.

    That is a model that fits into one file, has its own `save_pretrained` or its own code, or whose weights get the names and
    shapes of files only all together, or only from their values.
    """
    if not isinstance(model, PreTrainedModel) or _saves_its_own_way(model):
        return []
    weights = model.state_dict()
    ignored = model._keys_to_ignore_on_save or ()
    shapes = {name: _shape_of(value) for name, value in weights.items() if name not in ignored}
    if sum(map(_num_bytes, shapes.values())) <= FILE_BYTES:
        return []
    # for tensors without values, transformers finds tied weights by the model's parameters
    shapes = remove_tied_weights_from_state_dict(shapes, model)
    try:
        whole = _described(revert_weight_conversion(model, dict(shapes)))
    except Exception:
        # a conversion that looks at values
        return []
    for group_of in (str, _layer_of):
        groups: dict[str, list[str]] = {}
        for name in shapes:
            groups.setdefault(group_of(name), []).append(name)
        if (sizes := _sizes(model, shapes, groups.values(), whole)) is not None:
            return _filled(list(groups.values()), sizes)
    return []


def save_files(model: Any, files: Files, folder: Path, is_writer: bool, control: dist.ProcessGroup | None) -> None:
    """Gathers the weights of one file after the other, on the CPU of ranks with `is_writer`, which write it and free them.

    Collective over all ranks; only one weight at a time is whole on every device. Raises RuntimeError on every rank if one could
    not write; the previous checkpoint in the folder is then unchanged.
    """
    weights, partial, error = model.state_dict(), partial_folder(folder, 0), ""

    def attempt(write: Callable[[], None]) -> None:
        nonlocal error
        try:
            if is_writer and not error:
                write()
        except Exception as problem:
            error = f"rank {dist.get_rank() if control is not None else 0}: {type(problem).__name__}: {problem}"

    def start() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_configs(model, partial)

    attempt(start)
    for number, groups in enumerate(files, start=1):
        tensors: dict[str, Tensor] = {}
        for names in groups:
            own = {}
            for name in names:
                whole = weights[name].full_tensor() if isinstance(weights[name], DTensor) else weights[name]
                own[name] = to_host(whole, is_writer)
            attempt(lambda own=own, tensors=tensors: tensors.update(revert_weight_conversion(model, own)))  # type: ignore[misc]
        attempt(lambda tensors=tensors, number=number: _write(tensors, partial / f"model-{number:05d}.safetensors"))  # type: ignore[misc]
        del tensors
        # all ranks wait here: where they ran ahead, their next collective would wait for a disk
        raise_everywhere(error, control, str(folder))
    attempt(lambda: join_stages(folder, 1))
    raise_everywhere(error, control, str(folder))


def _saves_its_own_way(model: PreTrainedModel) -> bool:
    has_own = "save_pretrained" in vars(model) and not refuses(model, "save_pretrained")
    is_replaced = type(model).save_pretrained is not PreTrainedModel.save_pretrained or has_own
    has_peft = bool(getattr(model, "_hf_peft_config_loaded", False))
    return is_replaced or has_peft or model.is_remote_code() or getattr(model, "hf_quantizer", None) is not None


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata={"format": "pt"})


def _sizes(
    model: PreTrainedModel, shapes: dict[str, Tensor], groups: Iterable[list[str]], whole: dict[str, object]
) -> list[int] | None:
    """Bytes of every group in files; None if groups alone do not give the tensors that all weights together do."""
    found: dict[str, object] = {}
    sizes = []
    for names in groups:
        try:
            own = revert_weight_conversion(model, {name: shapes[name] for name in names})
        except Exception:
            # a conversion that lacks some of its weights raises whatever comes of that
            return None
        if found.keys() & own.keys():
            return None
        found |= _described(own)
        sizes.append(sum(map(_num_bytes, own.values())))
    return sizes if found == whole else None


def _filled(groups: list[list[str]], sizes: list[int]) -> Files:
    """Groups in order, in as few files as hold them."""
    files: Files = []
    left_bytes = 0
    for names, num_bytes in zip(groups, sizes, strict=True):
        if not files or num_bytes > left_bytes:
            files.append([])
            left_bytes = FILE_BYTES
        files[-1].append(names)
        left_bytes -= num_bytes
    return files


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else name


def _shape_of(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _num_bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _described(tensors: dict[str, Tensor]) -> dict[str, object]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}
