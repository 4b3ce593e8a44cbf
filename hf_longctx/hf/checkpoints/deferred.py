"""Models whose weights are read only when they have been sharded, so that no rank ever holds more than its own shards.

`load_sharded` makes such a model, and `Shards.divide` reads its weights. Until then, each weight is a single NaN expanded to the
weight's shape: it takes no memory, code that reads shapes, types and devices works (PEFT makes adapters as over real weights), it
cannot be written to, and computing with it gives NaN. Buffers are real, since files do not hold most of them: the constructor of
a second model makes them, whose parameters have no values.

Frozen weights in fp8 are rounded while they are read: each rank rounds its own rows, since each row has its own scale. Matrices
that a checkpoint has in fp8, with a scale for each block, keep their bytes and scales, unless they are to be unpacked: then each
rank unpacks its own rows of one matrix at a time.

If a weight has the same name and shape in the checkpoint as in the model, every rank reads its own slice, and also of experts
that files have in MXFP4 or one by one (`expert_files`). All other weights that transformers fuses or renames are read by
transformers on rank 0, which sends them one at a time.

Packed experts are packed while they are read: each rank packs its own, a few at a time, and keeps blocks of MXFP4 and of fp8 as
they are.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, logging
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import Mxfp4Config

from hf_longctx.hf.checkpoints.expert_files import IN_FP8, SCALE, ExpertWeight, Files, find_experts, read_experts
from hf_longctx.hf.checkpoints.weights import checkpoint_files, read_own, send_from_first
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.packed_experts import expert_modules, packed_parameters
from hf_longctx.hf.models.packed_refusals import refuse_merges_and_files
from hf_longctx.hf.models.quantised import block_size_of, fp8_layers, is_mxfp4, put_in_place
from hf_longctx.runtime.core import fp8
from hf_longctx.runtime.core.binding import class_name
from hf_longctx.runtime.core.products import FP8Linear
from hf_longctx.runtime.parameters.gradients import first_row

# attributes of a model whose weights are still to be read: where they are, and what removes its hook
SOURCE, _HOOK = "longctx_source", "longctx_hidden"
# parts of names that PEFT, and parametrizations of packed weights, add to those of a model's own weights
_ADDED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+|parametrizations)(?=\.)|\.original0$")
# arguments that say where a checkpoint on the hub is
_PLACE = ("revision", "cache_dir", "token", "subfolder", "local_files_only")
_WHOLE = "load the whole model with AutoModelForCausalLM.from_pretrained instead"
_UNREAD = (
    "weights that are still to be read, as a LongContextTrainer does when it starts; call save_model of the trainer, or load "
    "the model with AutoModelForCausalLM.from_pretrained"
)


@dataclass(frozen=True)
class WeightSource:
    """Place from which the weights of a model are still to be read."""

    # local folder with the safetensors files
    folder: str
    # rows and columns of a block of a weight in fp8
    block: tuple[int, int] | None
    # shape of every weight and persistent buffer by its name in the model
    shapes: dict[str, torch.Size]
    # names of those that files hold under the same name and in the same shape
    plain: frozenset[str]
    # weights of experts that files hold in a way from which every rank can read its own
    experts: dict[str, ExpertWeight]
    # for each tensor with several names, these names
    tied: tuple[frozenset[str], ...] = ()
    # reads the whole model
    load: Callable[[], PreTrainedModel] | None = None


def defer_weights(name_or_path: str, **settings: Any) -> PreTrainedModel:
    """Makes the model that `AutoModelForCausalLM.from_pretrained` would load, in evaluation mode, without its weights.

    `settings` go to `from_pretrained`. Not collective. Linear modules with weights in fp8 are `FP8Linear` modules with scales of
    blocks, unless a `quantization_config` in `settings` has `dequantize`; experts in MXFP4 stay so if `pack_experts` packs them.
    Raises ValueError, naming the first, if the checkpoint lacks weights, if weights are quantised in another way, and for buffers
    that the model's constructor does not make again.
    """
    config = config_of(name_or_path, settings)
    asked, stored = settings.get("quantization_config"), getattr(config, "quantization_config", None)
    has_mxfp4 = is_mxfp4(config) and asked is None
    has_blocks = block_size_of(stored) is not None and isinstance(asked, FineGrainedFP8Config | None)
    if (asked or stored) and not has_mxfp4 and not has_blocks:
        raise ValueError(
            f"the weights of {name_or_path} are quantised, of which only those in fp8 with scales of blocks and experts in MXFP4 "
            f"(without quantization_config) are read shard by shard; {_WHOLE}"
        )
    block = block_size_of(stored)
    if has_mxfp4:
        settings = {**settings, "quantization_config": Mxfp4Config(dequantize=True)}
    settings = {**settings, "use_safetensors": True}
    loader: Any = AutoModelForCausalLM.from_pretrained
    shown = settings
    if block is not None:
        # built without transformers' own modules for fp8, which a CPU does not get
        shown = {name: each for name, each in settings.items() if name != "quantization_config"} | {"config": unquantised(config)}
        settings = {**settings, "quantization_config": FineGrainedFP8Config(dequantize=True)}
    with nullcontext() if block is None else _without_warnings():
        model, report = loader(name_or_path, device_map="meta", output_loading_info=True, **shown)
    state = model.state_dict()
    if any(value.dtype == fp8.DTYPE for value in state.values()):
        raise ValueError(f"the config of {name_or_path} names no dtype of the model; give dtype=torch.bfloat16")
    if missing := sorted(set(report["missing_keys"]) & state.keys()):
        raise ValueError(
            f"{name_or_path} lacks {len(missing)} weights of {type(model).__name__} (the first is {missing[0]}), which would be "
            f"random; give a complete checkpoint, or {_WHOLE}"
        )
    config_file: Any = cached_file(name_or_path, CONFIG_NAME, **of_place(settings)[0])
    folder = str(Path(config_file).parent)
    with Files(folder) as files:
        in_files, in_fp8 = files.shapes, files.in_fp8
    # a tensor that comes back as it went in is neither renamed nor changed
    saved = revert_weight_conversion(model, dict(state))
    plain = {name for name, value in state.items() if saved.get(name) is value and in_files.get(name) == value.shape}
    shapes = {name: value.shape for name, value in state.items()}
    if lost := sorted(
        name for name in plain & in_fp8 if block is None or in_files.get(name + SCALE) != _scales(shapes[name], block)
    ):
        raise ValueError(f"{lost[0]} of {name_or_path} is in fp8 without scales of its blocks ({lost[0]}{SCALE}); {_WHOLE}")
    _make_buffers(model)
    _replace(model, {weight: torch.full((), math.nan, dtype=weight.dtype).expand(weight.shape) for weight in model.parameters()})
    if block is not None and not (asked and asked.dequantize):
        _keep_blocks(model, plain & in_fp8, block)
    experts = find_experts(model, shapes, files, block)
    read = partial(loader, name_or_path, **settings)
    _mark(model, WeightSource(folder, block, shapes, frozenset(plain), experts, tuple(_tied(model, shapes)), read))
    deferred: PreTrainedModel = model
    return deferred


def config_of(name_or_path: str, settings: dict[str, Any]) -> PretrainedConfig:
    """Config with which `from_pretrained` would load a checkpoint with these settings."""
    config: PretrainedConfig = settings.get("config") or AutoConfig.from_pretrained(name_or_path, **of_place(settings)[0])
    return config


def unquantised(config: PretrainedConfig) -> PretrainedConfig:
    """Copy of a config that says nothing of how weights are quantised in files."""
    plain = copy.deepcopy(config)
    vars(plain).pop("quantization_config", None)
    return plain


def of_place(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits `settings` into those that say where a checkpoint on the hub is, and all others."""
    place = {name: settings[name] for name in _PLACE if name in settings}
    return place, {name: each for name, each in settings.items() if name not in place}


def take_experts_out(model: nn.Module) -> dict[str, Tensor]:
    """Makes the weights of experts plain attributes, so that a loader does not read them; returns them by name.

    model: on the meta device.
    """
    found = {}
    for path, experts in expert_modules(model):
        for name, weight in list(experts.named_parameters(recurse=False)):
            if weight.dim() == 3:
                del experts._parameters[name]
                # the loader draws weights of modules for which it found some missing
                vars(experts)[name] = found[f"{path}.{name}"] = weight.data
    return found


def defer_experts(model: Any, folder: str, weights: dict[str, Tensor]) -> None:
    """Puts weights that `take_experts_out` removed back into a loaded model, as ones that are still to be read from `folder`.

    Raises ValueError, naming the first, if files do not have them in a way from which every rank can read its own.
    """
    shapes = {name: weight.shape for name, weight in weights.items()}
    for name, weight in weights.items():
        path, _, own = name.rpartition(".")
        experts = model.get_submodule(path)
        del vars(experts)[own]
        unread = torch.full((), math.nan, dtype=weight.dtype).expand(weight.shape)
        experts.register_parameter(own, nn.Parameter(unread))
    # those that were used while the model was loaded are not those of experts
    vars(model).pop("_weight_conversions", None)
    with Files(folder) as files:
        found = find_experts(model, shapes, files)
    if lost := sorted(shapes.keys() - found.keys()):
        raise ValueError(
            f"{folder} has no weights for {len(lost)} of the experts' weights (the first is {lost[0]}) that can be packed while "
            f"they are read; give a complete checkpoint, or leave packs_experts out"
        )
    _mark(model, WeightSource(folder, None, shapes, frozenset(), found))


def _mark(model: nn.Module, source: WeightSource) -> None:
    """Marks `model` as one whose weights are still to be read, which writes no files until then, nor do its adapters."""
    setattr(model, SOURCE, source)
    setattr(model, _HOOK, model.register_state_dict_post_hook(_hide_unread))
    # models with weights in fp8 refuse for good
    vars(model).setdefault("save_pretrained", MethodType(_save_pretrained, model))


def _save_pretrained(model: Any, *args: Any, **keywords: Any) -> Any:
    if source_of(model) is None:
        return type(model).save_pretrained(model, *args, **keywords)
    raise RuntimeError(f"save_pretrained of {class_name(model)} would write NaN for {_UNREAD}")


def _hide_unread(model: Any, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    """Takes the values of all tensors in `state` that are NaN, or computed from such, so that a file cannot have them.

    Raises RuntimeError if adapters train a copy of a weight, for which PEFT would write NaN.
    """
    source = source_of(model)
    assert source is not None
    for name in [name for name in state if name.startswith(prefix)]:
        value, own = state[name], _own_name(name.removeprefix(prefix))
        if value.is_meta or not (is_unread(value) or (own not in source.shapes and bool(value.isnan().any()))):
            continue
        if ".modules_to_save." in name:
            raise RuntimeError(
                f"{own} (modules_to_save) would be NaN in the state_dict() of {class_name(model)}, among {_UNREAD}"
            )
        state[name] = torch.empty_like(value, device="meta")


def source_of(model: Any) -> WeightSource | None:
    """The source from which weights of `model` are still to be read; None for a model that has its weights."""
    source: WeightSource | None = getattr(base_of(model), SOURCE, None)
    return source


def forget_source(model: Any) -> None:
    """Marks `model` as one that has its weights."""
    base = base_of(model)
    delattr(base, SOURCE)
    vars(base).pop(_HOOK).remove()
    if getattr(vars(base).get("save_pretrained"), "__func__", None) is _save_pretrained:
        del vars(base)["save_pretrained"]


def is_unread(weight: Tensor) -> bool:
    """Whether a tensor, which is no shard, stands for a weight that is still to be read."""
    if not weight.numel():
        return False
    first = weight.detach().flatten()[:1]
    # weights in fp8 are bytes
    first = first.view(fp8.DTYPE).float() if first.dtype == torch.uint8 else first
    return first.is_floating_point() and bool(first.isnan())


def deferred_problems(model: Any) -> list[str]:
    """Changes to a model whose weights are still to be read that reading would undo or could not follow; else empty."""
    source = source_of(model)
    if source is None:
        return []
    base = base_of(model)
    problems, found = [], set()
    scales, packed = {id(scale) for scale in _scale_weights(base).values()}, packed_parameters(base)
    for name, weight in base.named_parameters(remove_duplicate=False):
        own = _own_name(name)
        found.add(own)
        shape = packed[id(weight)][0](*packed[id(weight)][1:]).shape if id(weight) in packed else weight.shape
        if own in source.shapes and (shape != source.shapes[own] or not is_unread(weight)):
            problems.append(f"{own} was changed after load_sharded, which has not read it yet; {_WHOLE}, and change that")
        if own not in source.shapes and id(weight) not in scales and bool(weight.detach().isnan().any()):
            problems.append(
                f"{name} was computed from weights that load_sharded has not read yet, as DoRA and trained rows of "
                f"the embedding are; {_WHOLE}"
            )
    for names in _tied(base, source.shapes):
        if not any(names <= others for others in source.tied):
            problems.append(
                f"{' and '.join(sorted(names))} were made one weight after load_sharded, which has read neither yet; "
                f"{_WHOLE}, and tie them there"
            )
    found |= {_own_name(name) for name, _ in base.named_buffers()}
    if lost := sorted(source.shapes.keys() - found):
        problems.append(f"{lost[0]} was removed after load_sharded; {_WHOLE}, and remove it there")
    return problems[:1]


def without_placeholders(model: Any) -> None:
    """Puts weights that are still to be read on the meta device, as FSDP2 wants them; does nothing for other models."""
    if (source := source_of(model)) is not None:
        base = base_of(model)
        scales = _scale_weights(base)
        named = [weight for name, weight in base.named_parameters() if _own_name(name) in source.shapes]
        named += [scales[id(weight)] for weight in named if id(weight) in scales]
        unread = [weight for weight in named if not isinstance(weight, DTensor) and is_unread(weight)]
        _replace(model, {weight: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for weight in unread})


@torch.no_grad()
def read_deferred(model: Any, device: torch.device) -> None:
    """Reads the weights of a sharded model that has none yet, each rank its own shards, to `device`; ignores other models.

    No rank holds more on its host than its shards and one weight, of experts a few, except rank 0 where transformers must convert
    weights that are no experts: it holds the whole model. Collective over all ranks. Raises ValueError if the checkpoint cannot
    be read.
    """
    source = source_of(model)
    if source is None:
        return
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    base = base_of(model)
    tensors = {**dict(base.named_parameters(remove_duplicate=False)), **dict(base.named_buffers())}
    targets: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if (own := _own_name(name)) in source.shapes:
            targets.setdefault(own, []).append(tensor)
    packed, scales = packed_parameters(base), _scale_weights(base)
    done: set[int] = set()
    with Files(source.folder) as files:
        for name, weight in source.experts.items():
            for target in targets[name]:
                if id(target) in packed or name not in source.plain:
                    read_experts(files, weight, packed.get(id(target), target))
                    done.add(id(target))
    for path in checkpoint_files(source.folder):
        with safe_open(path, framework="pt", device="cpu") as reader:
            for name in sorted(source.plain.intersection(reader.keys())):
                for target in (each for each in targets[name] if id(each) not in done):
                    scale, found = scales.get(id(target)), reader.get_slice(name)
                    found_scale = reader.get_slice(name + SCALE) if found.get_dtype() == IN_FP8 else None
                    if scale is not None and found_scale is not None and scale.shape == torch.Size(found_scale.get_shape()):
                        read_own(target, _Bytes(found))
                        read_own(scale, found_scale)
                    elif scale is not None or found_scale is not None:
                        _read_changed(target, scale, found, (found_scale, source.block), base.dtype)
                    else:
                        read_own(target, found)
                    done.add(id(target))
    # a tied weight is one tensor under two names
    rest = {name: found for name, found in sorted(targets.items()) if any(id(target) not in done for target in found)}
    rounded = {name: f"{name} scale" for name, found in rest.items() if id(found[0]) in scales}
    rest |= {scale: [scales[id(target)] for target in rest[name]] for name, scale in rounded.items()}

    def load() -> dict[str, Tensor]:
        assert source.load is not None
        whole = source.load().state_dict()
        for name, scale in rounded.items():
            if (parts := packed.get(id(rest[name][0]))) is not None:
                whole[name], whole[scale] = parts[0].right_inverse(whole[name].to(parts[0].like.dtype))
                continue
            values_NC, whole[scale] = fp8.rows_in_fp8(whole[name])
            whole[name] = values_NC.view(torch.uint8)
        return whole

    if rest:
        send_from_first(load, rest, dist.group.WORLD if dist.is_initialized() else None)
    forget_source(model)


def _scale_weights(base: nn.Module) -> dict[int, nn.Parameter]:
    """The scales of weights in fp8 or in four bits by the ids of these."""
    scales: dict[int, nn.Parameter] = {id(layer.weight): layer.scale for layer in fp8_layers(base).values()}
    return scales | {place: own for place, (_, _, own) in packed_parameters(base).items()}


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Context in which transformers does not list scales as tensors that the model does not have."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


class _Bytes:
    """A slice of `safe_open` whose elements in fp8 are read as bytes."""

    def __init__(self, found: Any) -> None:
        self.found, self.get_shape = found, found.get_shape

    def __getitem__(self, place: Any) -> Tensor:
        found: Tensor = self.found[place]
        return found.view(torch.uint8)


def _read_changed(
    target: Tensor, scale_N1: Tensor | None, found: Any, blocks: tuple[Any, tuple[int, int] | None], dtype: torch.dtype
) -> None:
    """Reads this rank's rows of a matrix in a file, a slice of `safe_open`, whose numbers are not those of the model.

    scale_N1: rows are rounded to fp8, and these are their scales; None: they are not. blocks: scales of the blocks of a matrix in
    fp8, which is unpacked (None for another one), and the size of a block. dtype: of the model's own weights.
    """
    if torch.Size(found.get_shape()) != target.shape:
        raise ValueError(
            f"the checkpoint has a weight of shape {found.get_shape()}, but the model one of {tuple(target.shape)}; {_WHOLE}"
        )
    first, num_rows = (first_row(target), len(target.to_local())) if isinstance(target, DTensor) else (0, len(target))
    if not num_rows:
        return
    scales, block = blocks
    if scales is None:
        rows_nC = found[first : first + num_rows].to(dtype)
    else:
        # whole blocks of rows
        height = block[0] if block is not None else 1
        begin, stop = first // height, -(-(first + num_rows) // height)
        bytes_nC = found[begin * height : first + num_rows].view(torch.uint8)
        rows_nC = fp8.unpacked(bytes_nC, scales[begin:stop].float(), block, dtype)[first - begin * height :]
    values = [(target, rows_nC)]
    if scale_N1 is not None:
        values_nC, scale_n1 = fp8.rows_in_fp8(rows_nC)
        values = [(target, values_nC.view(torch.uint8)), (scale_N1, scale_n1)]
    for each, value in values:
        (each.to_local() if isinstance(each, DTensor) else each).copy_(value)


def _scales(shape: torch.Size, block: tuple[int, int]) -> torch.Size | None:
    """Shape of the scales of a matrix in fp8; None for a tensor that is no matrix."""
    return torch.Size(-(-size // own) for size, own in zip(shape, block, strict=True)) if len(shape) == 2 else None


def _keep_blocks(model: nn.Module, names: Collection[str], block: tuple[int, int]) -> None:
    """Puts modules with placeholders for bytes and scales in place of linear modules with these weights."""
    nan = torch.full((1, 1), math.nan)
    for name in names:
        place = name.rpartition(".")[0]
        linear = model.get_submodule(place)
        if type(linear) is nn.Linear and name.endswith(".weight"):
            shape: Any = _scales(linear.weight.shape, block)
            bytes_NC = nan.to(fp8.DTYPE).view(torch.uint8).expand(linear.weight.shape)
            put_in_place(model, place, FP8Linear(bytes_NC, nan.expand(shape), block, linear.bias).train(linear.training))
    refuse_merges_and_files(model, fp8_layers(model).values(), "in fp8")


def _tied(model: nn.Module, shapes: Collection[str]) -> list[frozenset[str]]:
    """Names of every parameter that has several of the names `shapes`."""
    names: dict[int, set[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if (own := _own_name(name)) in shapes:
            names.setdefault(id(weight), set()).add(own)
    return [frozenset(found) for found in names.values() if len(found) > 1]


def _own_name(name: str) -> str:
    """The name of a weight in the model without adapters."""
    return _ADDED.sub("", name)


def _make_buffers(model: Any) -> None:
    """Gives `model` the buffers that its constructor makes; raises ValueError, naming it, for a buffer that it does not make."""
    with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        twin: Any = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=model.config.dtype)
    made: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            own = twin.get_submodule(path)._buffers.get(name)
            if own is None or own.is_meta or own.shape != buffer.shape:
                raise ValueError(f"the constructor of {type(model).__name__} does not make its buffer {path}.{name}; {_WHOLE}")
            module._buffers[name] = made.setdefault(id(buffer), own.to(buffer.dtype))


def _replace(model: nn.Module, values: dict[nn.Parameter, Tensor]) -> None:
    """Puts parameters with new values in the places of these parameters, which may have several places."""
    new = {weight: nn.Parameter(value, requires_grad=weight.requires_grad) for weight, value in values.items()}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight in new:
                module._parameters[name] = new[weight]
