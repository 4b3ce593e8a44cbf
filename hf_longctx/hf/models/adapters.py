"""PEFT adapters: which kinds and settings are tested, what adapters add to a model, and which parameters are saved with them.

Start-up checks, the planner's `ModelSpec` and adapter checkpoints use these functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import Embedding, Linear, LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel

from hf_longctx.hf.models.heads import head_of, is_tied
from hf_longctx.hf.models.packed_experts import packed_elements
from hf_longctx.hf.models.quantised import is_four_bit, packed_layers
from hf_longctx.hf.models.towers import text_layers
from hf_longctx.plan.model.model_spec import AdapterSpec
from hf_longctx.runtime.activations.adapted_projection import (
    Adapter,
    Projection,
    changed_problem,
    dropout_problem,
    only_multiplies,
    plain_projection,
)
from hf_longctx.runtime.core.torch_versions import trains_several_dtypes

ADAPTER_FILE = "adapter_model.safetensors"

# add a kind only together with its runs in tests/hf/trainer/test_adapter_trainer.py
TESTED_KINDS = ("LORA",)
# name of an adapter that PEFT saves in the model's folder itself; others get a folder inside
_UNNAMED = "default"
# settings of LoraConfig that may have any value, since every value is tested or none affects the computation
_FREE_SETTINGS = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("target_parameters", "trainable_token_indices", "lora_dropout", "ensure_weight_tying", "modules_to_tie"),
}
# settings with several tested values; every other setting must have its default
_SETTINGS: dict[str, tuple[Any, ...]] = {"init_lora_weights": (True, False, "gaussian")}


def is_adapted(model: object) -> bool:
    """Whether `model` was returned by `get_peft_model`."""
    return isinstance(model, PeftModel)


def base_of(model: Any) -> Any:
    """The transformers model inside wrappers (adapters, DDP); `model` itself if it has no wrapper, even if it is sharded."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    inner = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    if inner is not None:
        return inner
    return model.get_base_model() if is_adapted(model) else model


def kind_problems(model: Any) -> list[str]:
    """Returns why adapters of this kind cannot be trained, by name; empty for tested kinds and for models without adapters."""
    if not is_adapted(model):
        # adapters added by transformers' own add_adapter, and PEFT's mixtures of several kinds
        if hasattr(model, "peft_config"):
            return [f"adapters of {type(model).__name__} are not in the tested list; use get_peft_model(model, LoraConfig(...))"]
        return []
    for name, config in model.peft_config.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in TESTED_KINDS or type(config) is not LoraConfig:
            return [
                f"adapters of kind {kind} ({type(config).__name__}{'' if name == _UNNAMED else f', named {name!r}'}) are not in "
                f"the tested list ({', '.join(TESTED_KINDS)}): slices and sequence groups might give silently wrong results with "
                f"them; use LoraConfig"
            ]
    return []


def adapter_problems(model: Any) -> list[str]:
    """Returns why adapters of a tested kind on a tested model cannot be trained; empty if they can, or if there are none."""
    if not is_adapted(model):
        return []
    settings = [problem for config in model.peft_config.values() for problem in _setting_problems(config)]
    return list(dict.fromkeys(settings)) + _module_problems(model)


def _setting_problems(config: LoraConfig) -> list[str]:
    problems, default = [], LoraConfig()
    for name, value in vars(config).items():
        allowed = _SETTINGS.get(name, (getattr(default, name, None),))
        # PEFT itself turns None into empty collections, for example for mixtures of experts
        is_none = isinstance(value, list | tuple | set | dict) and not value and None in allowed
        if name in _FREE_SETTINGS or is_none or any(value is each or value == each for each in allowed):
            continue
        if name == "target_modules_to_tie":
            problems.append(
                f"ensure_weight_tying=True gives {', '.join(sorted(value))} an adapter that shares memory with that of the other "
                f"end, and an optimizer would update both; leave embedding and head out of target_modules, or name them in "
                f"modules_to_save"
            )
        else:
            problems.append(f"LoraConfig {name}={value!r} is not in the tested list; use {' or '.join(map(repr, allowed))}")
    return problems


def _module_problems(model: PeftModel) -> list[str]:
    base = base_of(model)
    problems = []
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    if other := next((module for _, module in layers if not _is_tested(module)), None):
        problems.append(
            f"an adapter is on module {type(other.get_base_layer()).__name__}, which is not tested; target Linear modules and "
            f"the embedding only"
        )
    if any(module.merged for _, module in layers):
        problems.append("the adapters are merged into the weights; call model.unmerge_adapter()")
    if any(module.disable_adapters for _, module in layers):
        problems.append("the adapters are disabled; call model.base_model.enable_adapter_layers()")
    ends = {"embedding": base.get_input_embeddings(), "head": head_of(base)}
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and not any(module is end for end in ends.values()):
            problems.append(f"modules_to_save has {name}, but only the embedding and the head are tested there; leave it out")
    if is_tied(base) and any(isinstance(end, ModulesToSaveWrapper) for end in ends.values()) and not saves_tied(model):
        problems.append(
            "modules_to_save has the embedding or the head, which are one tied weight (tie_word_embeddings) and would become "
            "two; set LoraConfig(ensure_weight_tying=True), leave them out, or use a model whose embeddings are not tied"
        )
    saved = {id(parameter) for parameter in adapter_parameters(model)}
    lost = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in saved]
    if lost:
        problems.append(
            f"{len(lost)} trained weights outside the adapters would not be saved with them (the first is {lost[0]}); freeze "
            f"them, or name their module in modules_to_save"
        )
    return problems


def _is_tested(layer: BaseTunerLayer) -> bool:
    """Whether an adapter is on a linear module, plain or four-bit, or on the embedding or on single tokens of it.

    On a four-bit linear module PEFT's adapter has its own class. `hf.models.expert_adapters` checks those on single weights.
    """
    if type(layer) in (Linear, Embedding, TrainableTokensLayer, ParamWrapper):
        return True
    return isinstance(layer, LoraLayer) and is_four_bit(layer.get_base_layer())


def saves_tied(model: Any) -> bool:
    """Whether adapters train copies of embedding and head, which are one tied weight."""
    base = base_of(model)
    ends = [end for end in (base.get_input_embeddings(), head_of(base)) if isinstance(end, ModulesToSaveWrapper)]
    weights = [{name: id(own.weight) for name, own in end.modules_to_save.items()} for end in ends]
    return len(ends) == 2 and weights[0] == weights[1]


def tied_token_problem(model: Any) -> str:
    """Returns why stages cannot train adapter weights that both ends of a tied embedding use; empty if there are none."""
    if saves_tied(model):
        return (
            "ensure_weight_tying=True trains one copy of a tied embedding and head (modules_to_save), and two pipeline stages "
            "would have to share it; use stages=1, or leave modules_to_save out"
        )
    wrappers = [module for module in model.modules() if isinstance(module, TrainableTokensWrapper)]
    if not any(wrapper.token_adapter.tied_adapter for wrapper in wrappers):
        return ""
    return (
        "trainable_token_indices train an embedding that is tied to the head, and two pipeline stages would have to share that "
        "adapter; use stages=1, or leave trainable_token_indices out"
    )


def shard_problems(model: Any) -> list[str]:
    """Returns why trained weights cannot be sharded: FSDP2 may sum all gradients of a unit in one dtype. Empty if they can be."""
    base = base_of(model)
    if trains_several_dtypes() or not isinstance(base, PreTrainedModel):
        return []
    layers = [list(layer.parameters()) for layer in text_layers(base)]
    inside = {id(parameter) for layer in layers for parameter in layer}
    for unit in (*layers, [parameter for parameter in model.parameters() if id(parameter) not in inside]):
        if len(dtypes := {parameter.dtype for parameter in unit if parameter.requires_grad}) > 1:
            return [
                f"weights of one layer, or embedding and head, are trained in {' and '.join(sorted(map(str, dtypes)))}, but in "
                f"torch {torch.__version__} a shard's unit has gradients of one dtype; install torch 2.12 or newer, or use "
                f"parameters='replicated'"
            ]
    return []


def own_dtypes(model: nn.Module) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """(dtypes of the model's own weights, dtypes of adapter weights); all of packed layers is left out."""
    added = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, LoraLayer)
        for name, parameter in module.named_parameters()
        if not name.startswith("base_layer.")
    }
    packed = {id(parameter) for layer in packed_layers(model).values() for parameter in layer.parameters()}
    packed |= packed_elements(model).keys()
    dtypes: tuple[set[torch.dtype], set[torch.dtype]] = (set(), set())
    for parameter in model.parameters():
        if id(parameter) not in packed:
            dtypes[id(parameter) in added].add(parameter.dtype)
    return dtypes


def hidden_dtype(model: Any) -> torch.dtype:
    """Dtype of hidden states, which is that of the model's own weights, except those that its class keeps in fp32.

    `model` may be one pipeline stage.
    """
    own, _ = own_dtypes(model)
    if own:
        # start-up refuses a model that mixes others (`mixed_problems`)
        return min(own, key=lambda dtype: dtype.itemsize)
    # a stage may have only norms without weights and packed layers
    asked = getattr(base_of(model).config, "dtype", None)
    dtype: torch.dtype = asked if isinstance(asked, torch.dtype) else base_of(model).dtype
    return dtype


def kept_in_fp32(model: Any) -> Callable[[str], bool]:
    """Returns whether transformers loads a weight of a name in fp32 into `model`, whose other weights are in half precision."""
    # its pattern for names, as `from_pretrained` makes it (core_model_loading.py)
    kept = [each.replace("*", ".*") for each in base_of(model)._get_dtype_plan(hidden_dtype(model))]
    pattern = re.compile("|".join(kept))
    return lambda name: bool(kept) and pattern.search(name.replace("base_layer.", "")) is not None


def mixed_problems(model: Any) -> list[str]:
    """Returns why a model's own weights have several dtypes, if its class does not keep some in fp32; empty if they may have."""
    dtypes, _ = own_dtypes(model)
    if len(dtypes) < 2:
        return []
    hidden, is_kept = hidden_dtype(model), kept_in_fp32(model)
    packed = {id(parameter) for layer in packed_layers(model).values() for parameter in layer.parameters()}
    for name, parameter in base_of(model).named_parameters():
        if parameter.dtype == hidden or id(parameter) in packed or "lora_" in name:
            continue
        if parameter.dtype != torch.float32 or not is_kept(name):
            return [
                f"the model mixes weights of {', '.join(sorted(map(str, dtypes)))} (first {name}, which "
                f"{type(base_of(model)).__name__} does not keep in fp32); load it in one dtype"
            ]
    return []


def trained_sizes(model: Any) -> AdapterSpec:
    """Sizes of the trained weights in the layer with the most, and in embedding and head; zeros without adapters.

    `model` may be one pipeline stage.
    """
    if not is_adapted(model):
        return AdapterSpec()
    base = base_of(model)
    sizes = [_trained(layer) for layer in text_layers(base)] or [(0, 0)]
    head = head_of(base)
    first, last = _trained(base.get_input_embeddings()), (0, 0) if head is None else _trained(head)
    return AdapterSpec(
        layer_parameters=max(count for count, _ in sizes),
        layer_bytes=max(num_bytes for _, num_bytes in sizes),
        first_parameters=first[0],
        first_bytes=first[1],
        last_parameters=last[0],
        last_bytes=last[1],
    )


def largest_adapters(specs: Sequence[AdapterSpec]) -> AdapterSpec:
    """The maximum of each number over `specs`; a flag is set if any of them sets it."""
    return AdapterSpec(*(max(getattr(spec, field.name) for spec in specs) for field in fields(AdapterSpec)))


def sum_adapters(specs: Sequence[AdapterSpec]) -> AdapterSpec:
    """The sum of each number over `specs`; a flag is set if any of them sets it."""
    found = {field.name: [getattr(spec, field.name) for spec in specs] for field in fields(AdapterSpec)}
    return AdapterSpec(**{name: any(each) if isinstance(each[0], bool) else sum(each) for name, each in found.items()})


def lora_layers(module: nn.Module) -> dict[str, Any]:
    """Projections inside `module` with an active adapter, by name.

    An embedding is none, since its adapter looks rows up; nor are weights of experts (`hf.models.expert_adapters`).
    """
    found = ((name, each) for name, each in module.named_modules() if isinstance(each, LoraLayer) and _active(each))
    return {name: each for name, each in found if not isinstance(each, ParamWrapper)}


def _active(layer: Any) -> list[str]:
    """Names of the active adapters of a projection."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def tile_bytes(layers: Sequence[Any], hidden: torch.dtype, is_autocast: bool) -> int:
    """Bytes that adapters in MLPs take for every token of a tile: what they save, and the most that one makes besides."""
    made = (_made_bytes(each, hidden, is_autocast) for each in layers)
    return sum(saved_bytes(each, hidden, is_autocast) for each in layers) + max(made, default=0)


def _made_bytes(layer: Any, hidden: torch.dtype, is_autocast: bool) -> int:
    """Bytes per token that the adapters of a projection make besides its output and what they save, while they run.

    In one node with the projection: the gradient of the product with the first matrix. Beside other modules: the sum, a new
    output. In PEFT's own code: an adapter's output, and that times a number.
    """
    made = 0
    for name in _active(layer):
        element: int = layer.lora_B[name].weight.element_size()
        element = min(2, element) if is_autocast else element
        if plain_adapter(layer) is None or _copies_input(layer, name, hidden, is_autocast):
            made = max(made, 2 * layer.out_features * element)
        else:
            made = max(made, element * (len(layer.lora_A[name].weight) if is_in_node(layer) else layer.out_features))
    return made


def is_in_node(layer: Any) -> bool:
    """Whether PEFT's code for a projection can be replaced by one node that adds a plain adapter inside the product."""
    base = layer.base_layer
    is_plain = type(layer) is Linear and only_multiplies(base) and getattr(base, "block", None) is None
    drops = any(type(layer.lora_dropout[name]) is not nn.Identity for name in _active(layer))
    return is_plain and not drops and not any(each.requires_grad for each in base.parameters())


def cut_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes per token that adapters on some projections take if attention runs in pieces of heads.

    These hold products of the first matrices, as saved, and sums of them and of their gradients, in at least fp32.
    """
    layers: list[Any] = [module for module in modules if type(module) is Linear]
    weights = [layer.lora_A[name].weight for layer in layers for name in _active(layer)]
    return sum(len(weight) * (weight.element_size() + 2 * max(4, weight.element_size())) for weight in weights)


def _trained(module: nn.Module) -> tuple[int, int]:
    """(number of trained parameters, their bytes)."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in trained)


def plain_adapter(layer: Any) -> Adapter | None:
    """The adapter of a projection, if it is the only active one and only multiplies by two matrices and a number.

    None if a hook would see their inputs or outputs. The module below the adapter may be of any kind.
    """
    found = _active_adapters(layer)
    if isinstance(found, str) or len(found) != 1:
        return None
    (adapter,) = found
    return adapter if adapter.first.bias is None and adapter.second.bias is None else None


def copies_input(layer: Any, hidden: torch.dtype, is_autocast: bool) -> bool:
    """Whether an adapter of a projection saves a copy of its input: in another dtype than `hidden`, or after dropout.

    hidden: dtype of hidden states. is_autocast: matrices are multiplied in bf16 for any dtype of the weights. Then under plans
    a plain adapter reads bf16 hidden states as they are (`hf.models.kernels`), while PEFT casts them to its dtype.
    """
    return any(_copies_input(layer, name, hidden, is_autocast) for name in _active(layer))


def _copies_input(layer: Any, name: str, hidden: torch.dtype, is_autocast: bool) -> bool:
    if isinstance(layer.lora_dropout[name], nn.Dropout):
        return True
    if is_autocast:
        return hidden != torch.bfloat16 or plain_adapter(layer) is None
    dtype: torch.dtype = layer.lora_A[name].weight.dtype
    return dtype != hidden


def saved_bytes(layer: Any, hidden: torch.dtype, is_autocast: bool) -> int:
    """Bytes per token that the adapters of a projection save for backward; inputs that they read without a copy do not count.

    Each saves a copy of its input (`copies_input`) and the output of its first matrix, in the dtype of the matrix product (bf16
    under autocast). DoRA also saves the product with the frozen weight, the output of the adapter, and the sum of both.
    """
    kept = 0
    for name in _active(layer):
        first = layer.lora_A[name].weight
        element = max(first.element_size(), hidden.itemsize)
        kept_element = min(2, first.element_size()) if is_autocast else first.element_size()
        kept += layer.in_features * kept_element if _copies_input(layer, name, hidden, is_autocast) else 0
        kept += first.shape[0] * kept_element
        kept += 3 * layer.out_features * element if layer.use_dora[name] else 0
    return kept


def read_projection(module: Any) -> Projection | str:
    """The linear module of a projection and its active adapters, or why they cannot be cut by heads."""
    if type(module) is not Linear:
        return plain_projection(module)
    layer: Any = module
    base = plain_projection(layer.base_layer)
    if problem := changed_problem(layer) or (base if isinstance(base, str) else ""):
        return problem
    found = _active_adapters(layer)
    return found if isinstance(found, str) else Projection(layer.base_layer, found)


def _active_adapters(layer: Any) -> tuple[Adapter, ...] | str:
    """The active adapters of a projection, or why one of them does more than LoRA with plain matrices."""
    if layer.merged:
        return "has adapters that are merged into its weight"
    adapters = []
    for name in () if layer.disable_adapters else layer.active_adapters:
        if name not in layer.lora_A:
            continue
        if name in layer.lora_variant:
            return f"has an adapter of another kind than LoRA ({type(layer.lora_variant[name]).__name__})"
        first, second, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        for found in (plain_projection(first), plain_projection(second), dropout_problem(dropout)):
            if isinstance(found, str) and found:
                return f"has an adapter that {found}"
        casts = getattr(layer, "cast_input_dtype_enabled", True)
        adapters.append(Adapter(first, second, dropout, float(layer.scaling[name]), casts))
    return tuple(adapters)


def adapter_files(model: Any) -> dict[str, dict[str, nn.Parameter]]:
    """Parameters of every adapter, active or not: its folder in a checkpoint -> name in the file -> parameter.

    PEFT gives each adapter a folder of its name, but puts the one named "default" into the checkpoint's folder itself.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    return {
        "" if name == _UNNAMED else name: get_peft_model_state_dict(
            model, state_dict=own, adapter_name=name, save_embedding_layers=False
        )
        for name in model.peft_config
    }


def adapter_parameters(model: Any) -> list[nn.Parameter]:
    """Parameters of all adapters, each once."""
    found = {id(each): each for weights in adapter_files(model).values() for each in weights.values()}
    return list(found.values())


def saved_parameters(model: Any) -> list[nn.Parameter]:
    """Parameters that PEFT may write into the adapter's folder: those of adapters, embedding and head.

    It writes embedding and head if they have adapters or if the vocabulary was resized. To find out the latter it may ask the
    Hub, so ranks must not depend on its choice.
    """
    base = base_of(model)
    ends = [end for end in (base.get_input_embeddings(), head_of(base)) if isinstance(end, nn.Module)]
    found = [*adapter_parameters(model), *(parameter for end in ends for parameter in end.parameters())]
    return list({id(parameter): parameter for parameter in found}.values())
