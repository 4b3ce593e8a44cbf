"""Cuts Hugging Face models into pipeline stages: a stage keeps its own modules, and identities replace all others.

Cutting replaces modules and never changes a forward. The layer list keeps its length, so layer numbers, layer types and parameter
names stay those of the whole model. The embedding stays on the first stage, the final norm and the head on the last. Hidden
states from the previous stage enter the model as `inputs_embeds` and leave it as `last_hidden_state`. A probe before the first
step, not a list of classes, proves that nothing else happens to them on the way (learned positions, a scale, dropout).

If output heads are spread, some stages before the last keep the head too. The last stage then returns hidden states behind the
norm for chunks whose head another stage runs, by the model's own forward without layers and norm. So changes that the model makes
before and after its head are made once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_longctx.families.registry import MODULES, family_of_type
from hf_longctx.hf.models.adapters import base_of, hidden_dtype, tied_token_problem
from hf_longctx.hf.models.dropout import outer_dropout
from hf_longctx.hf.models.heads import head_kind, head_of, inner_decoder, is_tied
from hf_longctx.hf.models.logits import head_problem
from hf_longctx.hf.models.refusing import only_stage
from hf_longctx.hf.models.states import mixer_of, num_calls
from hf_longctx.hf.models.towers import num_text_layers, text_part, tower_names, tower_parameters
from hf_longctx.plan.core.types import LayerRange, Ranges
from hf_longctx.runtime.core.binding import bound, put
from hf_longctx.runtime.core.dropout import keys_of
from hf_longctx.runtime.execution.stage_model import LAYER_RANGE_KEYWORD, NO_HEAD_KEYWORD, StageModel
from hf_longctx.runtime.process_groups import with_head

# attribute of a model that was loaded stage by stage, one stage per rank; it holds the layer ranges of all stages
RANGES = "longctx_ranges"
# another, with the share of the output head's work that each stage does; (): the last stage does all of it
OUTPUT_SHARES = "longctx_output_shares"

# words in names of config fields by which layers read more than hidden states from other layers
_SHARING_WORDS = ("num_kv_shared_layers", "kv_sharing", "use_cla", "cla_share", "cross_layer", "hidden_size_per_layer_input")
_NORM_NAMES = (
    "norm",
    "norm_f",
    "ln_f",
    "ln_out",
    "out_norm",
    "final_layernorm",
    "final_layer_norm",
    "embedding_norm",
    "layernorm",
)
_PROBE_TOKENS = 3
# types of settings
PLAIN = (bool, int, float, str, type(None))


class Identity(nn.Module):
    """Returns its first argument; replaces a module that is on another stage, in another layer range or left out.

    replaced: that module. Its plain settings are kept, since decoders read those of their layers. For a decoder layer that
    returns a tuple, the argument comes in a tuple of this length, with what the layer would pass on.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in vars(replaced).items() if isinstance(value, PLAIN)})
        known: int = getattr(replaced, "tuple_length", 0)
        self.tuple_length = known or _tuple_length(type(replaced))
        passed: str = getattr(replaced, "passed_on", "")
        self.passed_on = passed or MODULES.passed_on.get(type(replaced).__name__, "")

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Returns the first argument, positional or passed by any keyword."""
        returned = args[0] if args else next(iter(keywords.values()))
        return (returned, *[keywords.get(self.passed_on)] * (self.tuple_length - 1)) if self.tuple_length else returned


def _tuple_length(kind: type[nn.Module]) -> int:
    """Length of the tuple that a class of decoder layers returns; 0 for a tensor."""
    if inspect.signature(kind.forward).return_annotation is Tensor:
        # newer versions of transformers
        return 0
    return MODULES.tuples.get(kind.__name__, 0)


class StageLayers(nn.ModuleList):
    """The decoder layers of a model; during a forward, only the layers in `seen` are visible, with identities for the others.

    All layers stay registered under their names. Outside of forwards `seen` is None, and all layers are visible.
    """

    seen: range | None = None

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__(layers)
        # in a tuple, so that it is not registered under a name
        self._unseen = (Identity(layers[0]),)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._shown())

    def __getitem__(self, index: Any) -> Any:
        return self._shown()[index]

    def _shown(self) -> list[nn.Module]:
        layers: list[nn.Module] = [module for module in self._modules.values() if module is not None]
        if self.seen is None:
            return layers
        return [layer if number in self.seen else self._unseen[0] for number, layer in enumerate(layers)]


@dataclass(frozen=True)
class Pieces:
    """Names of the modules between which a causal language model or a classifier can be cut."""

    model: PreTrainedModel
    # the model whose output the head reads
    decoder: PreTrainedModel
    # attributes of `decoder`: modules that turn token ids into hidden states, list of layers, modules after the layers
    first: tuple[str, ...]
    layers: str
    last: tuple[str, ...]
    # name of the head in `model`
    head: str

    @property
    def num_layers(self) -> int:
        return len(getattr(self.decoder, self.layers))

    @property
    def output_head(self) -> Any:
        """The module that turns hidden states into logits, or the identity in its place."""
        return self.model.get_submodule(self.head)

    @property
    def is_tied(self) -> bool:
        """Whether class and config say that the head of the whole model shares the embedding's weight."""
        owner: Any = self.model.get_submodule(self.head.rpartition(".")[0])
        return bool(type(owner)._tied_weights_keys) and is_tied(owner)


def stage_problems(model: nn.Module) -> list[str]:
    """Returns why the layers of `model` cannot be cut into stages, naming the class; empty if they can."""
    inner = base_of(model)
    name, config = type(inner).__name__, getattr(inner, "config", None)
    if not isinstance(inner, PreTrainedModel) or config is None:
        return [f"{name} is not a transformers model, so it cannot be cut into pipeline stages; use stages=1"]
    if config.is_encoder_decoder:
        return [f"{name} is an encoder-decoder, whose layers do not form one chain; use stages=1"]
    problems = [
        f"{name} cannot be cut into pipeline stages: with {field}={value!r} its layers read more from each other than hidden "
        f"states; use stages=1"
        for field, value in sorted(config.get_text_config().to_dict().items())
        if any(word in field for word in _SHARING_WORDS) and value
    ]
    if "shared" in (getattr(config.get_text_config(), "indexer_types", None) or ()):
        problems.append(
            f"{name} cannot be cut into pipeline stages: layers with indexer_types='shared' take the keys that an earlier layer "
            f"has chosen, which stages do not send each other; use stages=1"
        )
    if problem := tied_token_problem(model):
        problems.append(problem)
    if model is not inner and not family_of_type(config.model_type).adapted_stages:
        problems.append(f"peft passes no hidden states to {name}, so stages cannot run its adapters; use stages=1")
    try:
        pieces = find_pieces(model)
        num_layers = pieces.num_layers
        if outer := outer_dropout(model, pieces.layers):
            problems.append(f"dropout {outer} stands before or after the layers, so every stage would run it; use stages=1")
        if num_layers != (num_calls := num_text_layers(inner)):
            problems.append(
                f"{name} cannot be cut into pipeline stages: it has {num_layers} layers, but calls attention {num_calls} times; "
                f"use stages=1"
            )
    except ValueError as error:
        problems.append(str(error))
    return problems


def find_pieces(model: nn.Module) -> Pieces:
    """Finds where `model`, plain or with adapters, can be cut, by its config's pipeline plan or else by the kinds of its modules.

    Every weight must belong to the embedding, to exactly one layer, to the norm or to the head. Raises ValueError naming the
    weights for which that is not so.
    """
    inner = base_of(model)
    refused = f"{type(inner).__name__} cannot be cut into pipeline stages: "
    remedy = "; use stages=1"
    text = text_part(inner)
    # a text model without the head is a decoder itself; the rest of a multimodal model stays with the first stage
    decoder: Any = inner_decoder(text) or (text if text is not inner else None)
    if not isinstance(inner, PreTrainedModel) or decoder is None:
        raise ValueError(f"{refused}it has no decoder with a head{remedy}")
    head = head_of(inner)
    name_of_head = next((name for name, module in inner.named_modules() if module is head), "")
    around = text.named_children() if decoder is not text else ()
    # the dropout before a classifier runs on the last stage, as its head does
    others = [name for name, module in around if module is not decoder and module is not head and type(module) is not nn.Dropout]
    if not name_of_head or others:
        found = f"it has {', '.join(others)} besides" if others else "it has no output embeddings after"
        raise ValueError(f"{refused}{found} its decoder{remedy}")
    first, layers, last = _planned(decoder) or _recognised(decoder)
    if len(layers) != 1 or not isinstance(getattr(decoder, layers[0]), nn.ModuleList) or not first or not last:
        raise ValueError(
            f"{refused}its decoder must be an embedding, one ModuleList of layers and a norm; found embedding {first}, "
            f"layers {layers}, norm {last}{remedy}"
        )
    placed = (*first, *layers, *last)
    stray = [name for name, _ in decoder.named_parameters() if name.split(".")[0] not in placed]
    if stray:
        raise ValueError(f"{refused}no stage would have its weights {', '.join(stray[:3])}{remedy}")
    owners: dict[int, int] = {}
    for number, layer in enumerate(getattr(decoder, layers[0])):
        for name, parameter in layer.named_parameters():
            if owners.setdefault(id(parameter), number) != number:
                raise ValueError(f"{refused}layers {owners[id(parameter)]} and {number} share the weight {name}{remedy}")
    return Pieces(inner, decoder, first, layers[0], last, name_of_head)


def spread_head_problem(model: nn.Module) -> str:
    """Returns why only the last stage can run the output head of `model`; empty if others can too, or for a stage without it."""
    if problems := stage_problems(model):
        return problems[0]
    pieces = find_pieces(model)
    head, embedding, width = pieces.output_head, pieces.model.get_input_embeddings(), pieces.decoder.config.hidden_size
    if isinstance(head, Identity):
        return ""
    if head_kind(model) != "next_token":
        return "its head is that of a classifier"
    if text_part(pieces.model) is not pieces.model or tower_names(pieces.model):
        return "it has parts beside its text model"
    if type(head) is not nn.Linear or [name for name, _ in head.named_parameters()] != ["weight"]:
        return f"its head is a {type(head).__name__} with an adapter, a bias or packed weights, and not a plain nn.Linear"
    if pieces.is_tied and not isinstance(embedding, nn.Embedding | Identity):
        return f"its head shares the weight of a {type(embedding).__name__} with an adapter"
    if head.in_features != width or head.weight.dtype != _passed_dtype(model):
        return f"its head reads {head.in_features} features in {head.weight.dtype}, unlike its layers"
    return head_problem(model)


def stages_of_heads(output_shares: Sequence[float]) -> tuple[int, ...]:
    """Returns the stages before the last that run output heads, given the share of the heads' work that each stage does."""
    return tuple(stage for stage, share in enumerate(output_shares[:-1]) if share)


def cut_model(model: nn.Module, ranges: Ranges, stage: int, keeps_tie: bool = False, head_stages: Sequence[int] = ()) -> None:
    """Reduces `model` in place to what stage `stage` of `len(ranges)` needs; a single stage is left unchanged.

    `ranges[s]`: the layer ranges of stage s; `check_ranges` says in which order they must cover the layers. With tied embeddings,
    the last stage keeps the shared weight as the weight of its head. `keeps_tie`: later stages keep an embedding that is tied to
    the head, until `drop_embedding` removes it. `head_stages`: stages before the last that keep the head too. `model` may be on
    the meta device, since nothing is computed. Raises ValueError for ranges that do not cover the model's layers, and for models
    that cannot be cut.
    """
    if problems := stage_problems(model):
        raise ValueError("; ".join(problems))
    pieces = find_pieces(model)
    check_ranges(ranges, pieces.num_layers)
    if len(ranges) == 1:
        return
    # on the meta device nothing is tied yet
    if not pieces.model.get_input_embeddings().weight.is_meta:
        check_ties(pieces)
    _keep_layers(pieces, ranges[stage])
    if stage:
        _drop_towers(pieces.model)
    if stage and not (keeps_tie and pieces.is_tied):
        drop_embedding(pieces)
    if stage < len(ranges) - 1:
        _drop(pieces.decoder, pieces.last)
        if stage not in head_stages:
            drop_head(pieces)


def stage_model(model: nn.Module, ranges: Ranges, stage: int, head_stages: Sequence[int] = ()) -> StageModel:
    """Describes a stage for the executor, after binding a forward to `model` that runs one layer range of the stage.

    `model` was cut by `cut_model`, with the same `head_stages`. Call this once per model, before the model is sharded. Raises
    ValueError for a model that changes hidden states before its layers or after them, since every stage would repeat that change,
    and for one whose head cannot be spread.
    """
    heads = with_head(len(ranges), head_stages)
    if len(heads) > 1 and stage in heads and (problem := _spreading_problem(model, ranges)):
        raise ValueError(f"the output head of {type(base_of(model)).__name__} cannot be spread: {problem}; set spread_head=False")
    pieces = find_pieces(model)
    if len(ranges) > 1:
        _check_passes(pieces)
        _bind_layer_ranges(pieces, ranges, stage)
    sharing = tuple(sorted({0, *heads})) if pieces.is_tied else heads
    is_shared = len(sharing) > 1 and stage in sharing
    shared = pieces.output_head if stage in heads else pieces.model.get_input_embeddings()
    return StageModel(
        model=model,
        stage=stage,
        num_stages=len(ranges),
        attention_layers=tuple(layer_range.num_layers for layer_range in ranges[stage]),
        hidden_size=int(pieces.decoder.config.hidden_size),
        hidden_dtype=_passed_dtype(model),
        calls=_calls(pieces, ranges[stage]),
        tied=next(name for name, value in model.named_parameters() if value is shared.weight) if is_shared else "",
        tied_stages=sharing if is_shared else (),
        dropout=keys_of(model),
        head_stages=heads[:-1],
    )


def _spreading_problem(model: nn.Module, ranges: Ranges) -> str:
    if len(ranges) == 1 or len(ranges[0]) > 1:
        return f"it was cut into {len(ranges)} stage(s) of {len(ranges[0])} layer range(s), and not into several stages of one"
    return spread_head_problem(model)


def stages_that_lend(model: nn.Module, ranges: Ranges) -> tuple[StageModel, ...]:
    """Describes all stages of `model`, which stays whole, for runs whose stages lend their ranks to other stages.

    Call this once per model. `ranges`: as for `cut_model`, one per stage. Raises ValueError for models that cannot be cut.
    """
    if problems := stage_problems(model):
        raise ValueError("; ".join(problems))
    pieces = find_pieces(model)
    check_ranges(ranges, pieces.num_layers)
    layers = tuple(own for (own,) in ranges)
    _keep_layers(pieces, layers)
    _check_passes(pieces)
    _bind_layer_ranges(pieces, (layers,), 0)
    size, dtype = int(pieces.decoder.config.hidden_size), _passed_dtype(model)
    return tuple(
        StageModel(
            *(model, stage, len(layers), (own.num_layers,), size, dtype),
            first_range=stage,
            dropout=keys_of(model),
            calls=_calls(pieces, [own]),
        )
        for stage, own in enumerate(layers)
    )


def _passed_dtype(model: nn.Module) -> torch.dtype:
    """Dtype of hidden states between layers, which some models keep in fp32 although their weights are not."""
    dtype, is_wide = hidden_dtype(model), getattr(base_of(model).config, "residual_in_fp32", False)
    return torch.promote_types(dtype, torch.float32) if is_wide and mixer_of(base_of(model)) else dtype


def _calls(pieces: Pieces, ranges: Sequence[LayerRange]) -> tuple[int, ...]:
    """Number of calls in each layer range that get the plan; empty unless layers have mixers with a state."""
    layers = list(getattr(pieces.decoder, pieces.layers))
    owned = (layers[own.first_layer : own.first_layer + own.num_layers] for own in ranges)
    return tuple(sum(map(num_calls, each)) for each in owned) if mixer_of(pieces.model) else ()


def check_ranges(ranges: Ranges, num_layers: int) -> None:
    """Raises ValueError unless layer range 0 of every stage, then range 1 of every stage and so on, are all layers in order."""
    num_ranges = {len(own) for own in ranges}
    if len(num_ranges) != 1:
        raise ValueError(f"stages have {sorted(num_ranges)} layer ranges each; give every stage the same number of them")
    virtual = [own[place] for place in range(num_ranges.pop()) for own in ranges]
    if len(virtual) > num_layers:
        raise ValueError(
            f"{len(ranges)} stages of {len(virtual) // len(ranges)} layer ranges need {len(virtual)} layers, but the model has "
            f"{num_layers}; use fewer stages or ranges"
        )
    ends = [0, *(each.first_layer + each.num_layers for each in virtual)]
    starts = [*(each.first_layer for each in virtual), num_layers]
    if ends != starts or any(each.num_layers < 1 for each in virtual):
        found = ", ".join(f"{each.first_layer}+{each.num_layers}" for each in virtual)
        raise ValueError(
            f"the layer ranges {found} (first layer + number of layers) do not cover the {num_layers} layers in order; let every "
            f"range begin where the one before it ends, with at least one layer"
        )


def _planned(decoder: PreTrainedModel) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] | None:
    """Names of embedding, layers and norm according to the config's pipeline plan; None if the config has no plan."""
    plan = getattr(decoder.config, "base_model_pp_plan", None)
    if not plan:
        return None
    names = tuple(plan)
    lists = tuple(name for name in names if isinstance(getattr(decoder, name, None), nn.ModuleList))
    if len(lists) != 1:
        return names, lists, ()
    index = names.index(lists[0])
    return names[:index], lists, names[index + 1 :]


def _recognised(decoder: PreTrainedModel) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of embedding, layers and norm according to the modules themselves, for configs without a plan."""
    try:
        embedding = decoder.get_input_embeddings()
    except NotImplementedError:
        # a module around a decoder
        embedding = None
    first = tuple(name for name, module in decoder.named_children() if module is embedding)
    lists = tuple(name for name, module in decoder.named_children() if isinstance(module, nn.ModuleList))
    return first, lists, tuple(name for name, _ in decoder.named_children() if name in _NORM_NAMES)


def _keep_layers(pieces: Pieces, ranges: Sequence[LayerRange]) -> None:
    layers = getattr(pieces.decoder, pieces.layers)
    kept = {
        number
        for layer_range in ranges
        for number in range(layer_range.first_layer, layer_range.first_layer + layer_range.num_layers)
    }
    for number in range(len(layers)):
        if number not in kept:
            layers[number] = Identity(layers[number])
    setattr(pieces.decoder, pieces.layers, StageLayers(layers))


def _drop(owner: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        setattr(owner, name, Identity(getattr(owner, name)))


def _drop_towers(model: nn.Module) -> None:
    """Removes all parts of a multimodal model but its text model and head; the first stage keeps them."""
    for path in tower_names(model):
        owner, _, name = path.rpartition(".")
        _drop(model.get_submodule(owner), (name,))
    lone = {id(parameter) for parameter in tower_parameters(model)}
    for path in [path for path, parameter in model.named_parameters() if id(parameter) in lone]:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, None)


def drop_embedding(pieces: Pieces) -> None:
    """Removes the embedding from the model of a later stage. Idempotent."""
    _drop(pieces.decoder, pieces.first)
    forget_ties(pieces)


def drop_head(pieces: Pieces) -> None:
    """Removes the head from the model of a stage before the last. Idempotent."""
    owner, _, name = pieces.head.rpartition(".")
    _drop(pieces.model.get_submodule(owner), (name,))
    forget_ties(pieces)


def check_ties(pieces: Pieces) -> None:
    """Raises ValueError if the config ties head and embedding, but they have two different weights."""
    embedding, head = pieces.model.get_input_embeddings(), pieces.output_head
    if pieces.is_tied and head.weight is not embedding.weight:
        raise ValueError(
            f"the config of {type(pieces.model).__name__} ties the head to the embedding, but their weights differ; set "
            f"tie_word_embeddings=False in the config"
        )


def forget_ties(pieces: Pieces) -> None:
    """Keeps transformers from tying weights again, since a stage may lack one of the modules that share a weight."""
    owner: Any
    for owner in (module for module in pieces.model.modules() if isinstance(module, PreTrainedModel)):
        owner._tied_weights_keys = None
        owner.all_tied_weights_keys = {}


def _bind_layer_ranges(pieces: Pieces, ranges: Ranges, stage: int) -> None:
    """Binds a forward that runs one layer range: the model's own forward for the last one, the decoder's for all others.

    After the ranges of the stage comes the head alone, by the model's own forward without layers and norm.
    """
    whole, decoder = pieces.model.forward, pieces.decoder
    own = (*ranges[stage], LayerRange(0, 0))

    def forward(*args: Any, **keywords: Any) -> Any:
        layer_range = keywords.pop(LAYER_RANGE_KEYWORD, None)
        if layer_range is None and len(ranges) == 1:
            return whole(*args, **keywords)
        if layer_range is None:
            raise RuntimeError(only_stage(pieces.model, stage, len(ranges)))
        is_last = (stage, layer_range) == (len(ranges) - 1, len(ranges[stage]) - 1)
        has_head = (is_last or layer_range == len(ranges[stage])) and not keywords.pop(NO_HEAD_KEYWORD, False)
        with _only(pieces, own[layer_range], has_norm=is_last):
            return whole(*args, **keywords) if has_head else decoder(*args, **keywords)

    put(pieces.model, "forward", bound(pieces.model, forward))


@contextmanager
def _only(pieces: Pieces, layer_range: LayerRange, has_norm: bool) -> Iterator[None]:
    """Context in which the decoder runs only `layer_range`, and the final norm only if `has_norm`."""
    decoder = pieces.decoder
    layers, norms = getattr(decoder, pieces.layers), {name: getattr(decoder, name) for name in pieces.last}
    layers.seen = range(layer_range.first_layer, layer_range.first_layer + layer_range.num_layers)
    if not has_norm:
        _drop(decoder, pieces.last)
    try:
        yield
    finally:
        layers.seen = None
        for name, norm in norms.items():
            setattr(decoder, name, norm)


@torch.no_grad()
def _check_passes(pieces: Pieces) -> None:
    """Raises ValueError unless the decoder without layers and norm returns hidden states exactly as it got them."""
    weight = next(parameter for parameter in pieces.model.parameters() if parameter.is_floating_point())
    shape = (1, _PROBE_TOKENS, pieces.decoder.config.hidden_size)
    probe_1TC = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(weight.device, hidden_dtype(pieces.model))
    positions = torch.arange(1, _PROBE_TOKENS + 1, device=weight.device).unsqueeze(0)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=weight.device)
    calls: list[str] = []
    with _only(pieces, LayerRange(0, 0), has_norm=False):
        for name in pieces.last:
            getattr(pieces.decoder, name).register_forward_hook(lambda *_, name=name: calls.append(name))
        output = pieces.decoder(
            inputs_embeds=probe_1TC, position_ids=positions, attention_mask=mask, use_cache=False, return_dict=True
        )
    if repeated := [name for name in pieces.last if calls.count(name) > 1]:
        raise ValueError(
            f"{type(pieces.model).__name__} cannot be cut into pipeline stages: it also runs {', '.join(repeated)} before its "
            f"first layer, but only the last stage has that module; use stages=1"
        )
    found: Tensor = output.last_hidden_state
    if found.shape != probe_1TC.shape or not torch.equal(found, probe_1TC):
        raise ValueError(
            f"{type(pieces.model).__name__} cannot be cut into pipeline stages: it changes hidden states before its first layer "
            f"or after its last one (learned positions, a scale, dropout), which every stage would repeat; use stages=1"
        )


def loaded_ranges(model: nn.Module) -> Ranges | None:
    """The layer ranges of all stages if `model` was loaded as one stage alone; None for a whole model."""
    ranges: Ranges | None = getattr(model, RANGES, None)
    return ranges


def loaded_output_shares(model: nn.Module) -> tuple[float, ...]:
    """The shares of the output head's work for which `model` was loaded as one stage; () if the last stage does all of it."""
    shares: tuple[float, ...] = getattr(model, OUTPUT_SHARES, ())
    return shares
