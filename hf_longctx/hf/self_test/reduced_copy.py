"""Makes a copy of a model with few layers and few token ids, but at full width and equal in all that plans use.

`self_test.check` runs it. Two layers are of one kind if their modules have equal classes, settings, shapes of all weights, and
functions that users put on them: hooks, and methods that replace those of the class. The copy, with hooks, has the first layer of
every kind, and at least two layers, under their own numbers; all other layers pass on their input. Towers are left out or, for
rows with images, have fewer layers, too. Embedding and head keep the first token ids. Windows and attention chunks too long to be
filled are shortened, in the config and in every module, as are position steps for scaling queries. In a copy of another
precision, packed weights are unpacked. The model itself is unchanged.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.families.registry import MODULES
from hf_longctx.hf.checkpoints.deferred import forget_source, is_unread, source_of
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.cutting import PLAIN, Identity
from hf_longctx.hf.models.heads import head_kind, head_of
from hf_longctx.hf.models.logits import head_problem, logit_change
from hf_longctx.hf.models.packed_experts import pack_copies, packed_weights, unpacked_copy
from hf_longctx.hf.models.quantised import in_full, own_elements, packed_layers, put_in_place
from hf_longctx.hf.models.spec import WINDOW_FIELDS, decoder_layers, layer_types, layer_window
from hf_longctx.hf.models.states import leave_kernels_out, mixers_of
from hf_longctx.hf.models.towers import tower_names, tower_parameters
from hf_longctx.hf.self_test.independent import independent_copy
from hf_longctx.runtime.core.binding import HOOKS, global_hooks, is_written_by, own_forward
from hf_longctx.runtime.core.products import FP8Linear

# number of token ids that the copy keeps
NUM_TOKEN_IDS = 1024
# setting with the number of keys that an index chooses for a token
_MOST_CHOSEN = "index_topk"
# setting with the number of positions that share one scale of queries, and its largest value in a copy
_STEP, _LONGEST_STEP = "floor_scale", 8
# attributes and settings with a token id
_TOKEN_ID = re.compile(r"\w+_token_(id|index)")
# layers at the end of a tower that a copy keeps beside the first of every kind
_LAST_LAYERS = 2
# settings that differ between layers without changing the computation
_NUMBERS = ("layer_idx", "training")
_NOISE = 0.02
# packages whose hooks treat tokens one by one
_LIBRARIES = ("accelerate", "hf_longctx", "peft", "torch", "transformers", "trl")
# attribute with a forward that accelerate has wrapped
_WRAPPED_FORWARD = "_original_forward"


@dataclass
class ReducedCopy:
    """Copy of a model, with its layers by their numbers in the whole model."""

    model: Any
    layers: dict[int, nn.Module]
    # description of each layer's attention pattern
    patterns: dict[int, str]
    # the most tokens that each layer's attention sees; 0: all
    windows: dict[int, int]
    # token ids below this number may be used
    num_token_ids: int
    # number of layers of the whole model
    whole_layers: int
    # whether windows or choices of keys are shorter than the model's
    was_shortened: bool
    # most keys that an index chooses for a token
    most_chosen: int
    # attention calls in one forward
    attention_calls: int
    # false if the copy has all layers, because the model cannot run without some of them
    is_cut: bool

    def give_up(self) -> None:
        """Drops the model and its layers; keeps the facts about them."""
        self.model, self.layers = None, {}

    @property
    def embedding(self) -> nn.Module:
        """The module that turns token ids into hidden states."""
        module: nn.Module = base_of(self.model).get_input_embeddings()
        return module


@dataclass(frozen=True)
class ChosenLayers:
    """The layers of a model, of which its copies have some."""

    model: Any
    layers: Sequence[nn.Module]
    # numbers of the layers that copies have
    kept: Sequence[int]
    # false if copies have all layers, because the model cannot run without some of them
    is_cut: bool
    # whether copies have towers
    has_towers: bool = False

    @classmethod
    def of(cls, model: Any, boundaries: Sequence[int], has_towers: bool = False) -> ChosenLayers:
        """Chooses layers of `model`. boundaries: first layers of the layer ranges of stages; each range keeps a layer."""
        pieces, layers = decoder_layers(model)
        if pieces is None:
            return cls(model, layers, range(len(layers)), False, has_towers)
        types = layer_types(base_of(model).config.get_text_config(), len(layers))
        return cls(model, layers, chosen_layers(layers, types, boundaries), True, has_towers)

    @cached_property
    def base(self) -> Any:
        """The model without its adapters."""
        return base_of(self.model)

    @cached_property
    def left_out(self) -> list[nn.Module]:
        """The modules that copies do not have: layers, and towers that rows of text do not run, or layers of these."""
        towers = map(self.base.get_submodule, tower_names(self.base))
        idle = [tower for tower in towers if type(tower).__name__ not in MODULES.run_on_text]
        others = [layer for tower in idle for layer in _left_out_of_tower(self.base, tower)] if self.has_towers else idle
        return [*(layer for place, layer in enumerate(self.layers) if place not in self.kept), *others]

    @cached_property
    def packed(self) -> list[Any]:
        """Linear modules with weights of few bits that copies have."""
        owners = [self.layers[place] for place in self.kept]
        owners += map(self.base.get_submodule, tower_names(self.base)) if self.has_towers else []
        left_out = {id(module) for each in self.left_out for module in each.modules()}
        return [each for owner in owners for each in packed_layers(owner).values() if id(each) not in left_out]


def _left_out_of_tower(base: Any, tower: nn.Module) -> list[nn.Module]:
    """Returns the layers of a tower that its copy does not have; none if the config reads outputs of other layers by number."""
    if getattr(base.config, "vision_feature_layer", -1) not in range(-1 - _LAST_LAYERS, 0):
        return []
    found: list[nn.Module] = []
    for layers in (module for module in tower.modules() if isinstance(module, nn.ModuleList)):
        if all(isinstance(layer, GradientCheckpointingLayer) and _says_what_it_returns(layer) for layer in layers):
            firsts = {_kind(layer): number for number, layer in reversed([*enumerate(layers)])}
            kept = {*firsts.values(), *range(len(layers) - _LAST_LAYERS, len(layers))}
            found += [layer for number, layer in enumerate(layers) if number not in kept]
    inner = {id(module) for layer in found for module in layer.modules() if module is not layer}
    return [layer for layer in found if id(layer) not in inner]


def _says_what_it_returns(layer: nn.Module) -> bool:
    """Whether the forward of a layer's class is annotated; Llama 4's returns a tuple and is not."""
    return inspect.signature(type(layer).forward).return_annotation is not inspect.Signature.empty


def reduced_copy(chosen: ChosenLayers, longest_window: int, dtype: torch.dtype | None, seed: int = 0) -> ReducedCopy:
    """Makes a reduced copy of a model in `dtype` (None: the model's own) that shares no memory with the model's weights.

    longest_window: tokens to which longer windows are shortened. Weights that are all zero get noise, since zeros would hide
    errors.
    """
    model, layers, kept = chosen.model, chosen.layers, chosen.kept
    memo: dict[int, Any] = {id(layer): Identity(layer) for layer in chosen.left_out}
    base = chosen.base
    num_token_ids = _cut_vocabulary(base, memo)
    is_unread_yet = source_of(model) is not None
    if dtype is not None or is_unread_yet:
        # packed layers multiply in a fixed precision, so replace them by their unpacked weights
        memo |= {id(packed): in_full(packed) for packed in chosen.packed}
    # PEFT's own forward cannot add adapters to packed experts; plans unpack the codes that the copies keep
    packed_experts = {id(each): each for place in kept for each, _, _ in packed_weights(layers[place])}
    for each in packed_experts.values():
        unpacked_copy(each, memo, dtype)
    names = {id(module): name for name, module in model.named_modules()}
    copied = independent_copy(model, memo)
    own = {place: copied.get_submodule(names[id(layers[place])]) for place in kept}
    inner = base_of(copied)
    if is_unread_yet:
        _make_weights(copied, seed)
        pack_copies(copied)
        for packed in chosen.packed:
            _round_again(copied, names[id(packed)], inner.dtype, packed.block, is_full=dtype is not None)
    if chosen.has_towers:
        _rename_tokens(copied, num_token_ids)
    config = inner.config.get_text_config()
    was_shortened = _shorten_windows(copied, inner.config, longest_window)
    generator = torch.Generator().manual_seed(seed)
    for parameter in copied.parameters():
        if parameter.is_floating_point() and not parameter.any():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * _NOISE
            parameter.data.copy_(noise)
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if dtype is not None:
        _make_plain(inner)
    types = layer_types(config, len(layers))
    # parts that rows of text skip are gone from the copy
    num_calls = num_attention_layers(inner if mixers_of(copied) else base)
    windows = {place: layer_window(own[place], config, types[place]) for place in kept}
    return ReducedCopy(
        copied.train(),
        own,
        {place: _words(types[place], windows[place]) for place in kept},
        windows,
        num_token_ids,
        len(layers),
        was_shortened,
        max((getattr(module, _MOST_CHOSEN, 0) for place in kept for module in own[place].modules()), default=0),
        # all layers call attention equally often, in some classes twice, perhaps also layers with a state
        num_calls if mixers_of(copied) else num_calls * len(kept) // len(layers),
        chosen.is_cut,
    )


def num_elements(chosen: ChosenLayers) -> int:
    """Counts elements in the weights of a copy, with packed weights unpacked."""
    model = chosen.model
    left_out = {id(p) for module in chosen.left_out for p in module.parameters()}
    left_out |= set() if chosen.has_towers else {id(p) for p in tower_parameters(model)}
    memo: dict[int, Any] = {}
    _cut_vocabulary(chosen.base, memo)
    counts, own = own_elements(model), dict(model.named_parameters())
    return sum(memo[id(p)].numel() if id(p) in memo else counts[name] for name, p in own.items() if id(p) not in left_out)


def chosen_layers(layers: Sequence[nn.Module], types: Sequence[str], boundaries: Sequence[int]) -> tuple[int, ...]:
    """Returns the layers to keep: the first of every kind, one in every layer range of a stage, and at least two."""
    kinds: dict[Any, int] = {}
    for place, layer in enumerate(layers):
        kinds.setdefault((types[place], _kind(layer)), place)
    kept = set(kinds.values())
    for first, stop in zip(boundaries, [*boundaries[1:], len(layers)], strict=True):
        if not kept & set(range(first, stop)):
            kept.add(first)
    if len(kept) == 1 and len(layers) > 1:
        kept.add(len(layers) - 1 if 0 in kept else 0)
    return tuple(sorted(kept))


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Returns a key of a layer's kind, without layer numbers and values of weights."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        settings = [
            (key, repr(value))
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key not in _NUMBERS and _is_plain(value)
        ]
        weights = [(key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in module.named_parameters(recurse=False)]
        parts.append((name, type(module).__qualname__, tuple(settings), tuple(weights), _added_functions(module)))
    return tuple(parts)


def _added_functions(module: nn.Module) -> tuple[Any, ...]:
    """Returns hooks of `module` and functions among its own attributes, which may change its results; ours by name."""
    hooks = [(name, id(_function(hook))) for name in HOOKS for hook in getattr(module, name).values()]
    functions = [
        (key, _function(value))
        for key, value in sorted(vars(module).items())
        if inspect.isroutine(value) or isinstance(value, partial) or (key == "forward" and callable(value))
    ]
    own = [(key, getattr(f, "func", f).__qualname__ if package_of(f) == "hf_longctx" else _same(f)) for key, f in functions]
    return (*hooks, *own)


def _same(function: Any) -> Any:
    """Returns a key of a function; activations of transformers are partials, a new one in every layer."""
    if isinstance(function, partial):
        return _same(_function(function.func)), repr(function.args), repr(function.keywords)
    return id(function)


def has_user_functions(model: nn.Module) -> bool:
    """Whether some module has a hook or a forward that is not a library's, and may do anything to its tokens."""
    return any(True for _ in user_functions(model))


def user_functions(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yields hooks and forwards that are not a library's: module, name of the kind, and the function.

    Global hooks count as those of the model.
    """
    for name, hook in global_hooks():
        if is_user_function(function := _function(hook)):
            yield model, f"a hook of all modules ({name})", function
    for module in model.modules():
        own = vars(module)
        found = [(f"a hook ({name[1:-1]})", hook) for name in HOOKS for hook in own[name].values()]
        forwards = (own_forward(module), own.get(_WRAPPED_FORWARD))
        found += [("a forward of its own", forward) for forward in forwards if forward is not None]
        for kind, value in found:
            if is_user_function(function := _function(value)):
                yield module, kind, function


def is_user_function(function: Any) -> bool:
    """Whether a function is from none of the packages whose hooks and forwards treat tokens one by one."""
    return package_of(function) not in _LIBRARIES or not is_written_by(function, *_LIBRARIES, "")


def user_forward(model: nn.Module) -> str:
    """Returns the name of a user's function that replaces or hooks the forward of `model`; empty if there is none."""
    for module in (model, base_of(model)):
        replaced = [each for each in (own_forward(module), vars(module).get(_WRAPPED_FORWARD)) if each is not None]
        for function in (*replaced, *module._forward_hooks.values()):
            if is_user_function(_function(function)):
                return str(getattr(function, "__qualname__", type(function).__qualname__))
    return ""


def _function(value: Any) -> Any:
    """Returns the function of a method, which layers may share; any other value unchanged."""
    return getattr(value, "__func__", value)


def package_of(function: Any) -> str:
    """Returns the package that defines a function, even after `functools.wraps`; for an object, that of its class."""
    if isinstance(function, partial):
        return package_of(_function(function.func))
    defined: Any = function if inspect.isroutine(function) else type(function)
    name = getattr(function, "__globals__", {}).get("__name__") or defined.__module__ or ""
    return str(name).split(".")[0]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(each, PLAIN) for each in value.values())
    if isinstance(value, list | tuple):
        return all(isinstance(each, PLAIN) for each in value)
    return isinstance(value, PLAIN)


def _cut_vocabulary(base: Any, memo: dict[int, Any]) -> int:
    """Puts the first rows of embedding and head into `memo`, if both are plain modules; returns the number of usable ids."""
    embedding, head = base.get_input_embeddings(), head_of(base)
    if head_kind(base) != "next_token":
        # a classifier has no row of its head for a token id
        head = embedding
    num_rows = embedding.weight.shape[0], getattr(head, "weight", embedding.weight).shape[0]
    num_ids: int = min(num_rows)
    if not (
        isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear | nn.Embedding) and not hasattr(head, "base_layer")
    ):
        return num_ids
    if hasattr(embedding, "base_layer") or num_rows[0] != num_rows[1]:
        return num_ids
    hidden = () if head_problem(base) else logit_change(base).hidden_ids
    kept = min(num_ids, 1 + max(NUM_TOKEN_IDS - 1, embedding.padding_idx or 0, *hidden))
    for parameter in (embedding.weight, head.weight, getattr(head, "bias", None)):
        if isinstance(parameter, nn.Parameter):
            memo[id(parameter)] = nn.Parameter(parameter.detach()[:kept].clone(), parameter.requires_grad)
    return kept


def _rename_tokens(copied: Any, num_token_ids: int) -> None:
    """Gives a copy's tokens with a name of their own, such as that of an image, ids that its vocabulary has."""
    configs = [config for module in copied.modules() if isinstance(config := vars(module).get("config"), PretrainedConfig)]
    found = [
        (own, name, value)
        for own in {id(owner): vars(owner) for owner in (*copied.modules(), *configs)}.values()
        for name, value in own.items()
        if isinstance(value, int) and value >= num_token_ids and _TOKEN_ID.fullmatch(name)
    ]
    renamed = {value: num_token_ids - 1 - place for place, value in enumerate(sorted({value for _, _, value in found}))}
    for own, name, value in found:
        own[name] = renamed[value]


def _make_weights(copied: Any, seed: int) -> None:
    """Gives random weights, equal on all ranks, to the copy of a model whose weights were not read yet."""
    forget_source(copied)
    base = base_of(copied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in base.modules():
            if any(is_unread(weight) for weight in module.parameters(recurse=False)):
                base._init_weights(module)
        for weight in filter(is_unread, base.parameters()):
            weight.data.normal_(0.0, _NOISE)


def _round_again(copied: Any, name: str, dtype: torch.dtype, block: tuple[int, int] | None, is_full: bool) -> None:
    """Rounds a random weight that stands for one in fp8, whose scales are of rows or of blocks.

    is_full: it stays in a plain module, rounded and unpacked.
    """
    plain: Any = copied.get_submodule(name)
    rounded = FP8Linear.rounded(plain.weight.to(dtype), plain.bias)
    if block is not None:
        shape = [-(-size // own) for size, own in zip(plain.weight.shape, block, strict=True)]
        rounded = FP8Linear(rounded.weight.detach(), rounded.scale.detach().mean().expand(shape).clone(), block, plain.bias)
    if is_full:
        plain.weight.data = in_full(rounded).weight.data
    else:
        put_in_place(copied, name, rounded)


def _make_plain(base: Any) -> None:
    """Disables features that a copy in another precision cannot run: kernels of experts and states, and router statistics."""
    leave_kernels_out(base)
    for config in {id(each): each for each in (base.config, base.config.get_text_config())}.values():
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
    if getattr(base.config, "_experts_implementation", None) not in (None, "eager"):
        base.set_experts_implementation("eager")


def _shorten_windows(model: Any, config: Any, longest: int) -> bool:
    """Shortens windows, attention chunks and choices of keys to `longest` tokens, and position steps.

    Returns whether a window, an attention chunk or a choice was shortened.
    """
    owners = [*model.modules(), *{id(each): each for each in (config, config.get_text_config())}.values()]
    long = [
        (owner, name, most)
        for owner in owners
        for name, most in (
            *((name, longest) for name in WINDOW_FIELDS),
            # keys that are each made of several tokens are fewer
            (_MOST_CHOSEN, longest if "compress_rate" not in vars(owner) else longest // owner.compress_rate // 2 or 1),
            (_STEP, _LONGEST_STEP),
        )
        if isinstance(value := vars(owner).get(name), int) and not isinstance(value, bool) and value > most
    ]
    for owner, name, most in long:
        setattr(owner, name, most)
    return any(name != _STEP for _, name, _ in long)


def _words(layer_type: str, window: int) -> str:
    """Describes a layer, as in "sliding_attention, window 6"."""
    kind = layer_type or ("sliding_attention" if window else "full_attention")
    if not window:
        return kind
    return f"{kind}, {'chunks of' if layer_type.startswith('chunked') else 'window'} {window}"
