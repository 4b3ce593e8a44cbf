"""Puts features of images and videos in place of the embeddings of their tokens, in chunks of plans that have some.

The change sits right before the decoder, where every class has merged its inputs: it takes embeddings in place of token ids,
positions in time, height and width in classes with M-RoPE, and features that are added after its first layers. Towers run in the
forward of every chunk with a token of the image, on the ranks that hold these tokens, or on the ranks of the group to which the
plan deals them, and only for these images. Dealt features travel to the ranks of their tokens, and their gradients back. So no
features wait between chunks, and gradients of trained towers arrive in the chunk's own backward: each rank has those of the
images that it ran, and the step sums them over ranks like all others. Graphs of trained towers are kept until then while the plan
leaves room for them; otherwise towers run again in the backward, image by image (`TowerGraphs`).

A pipeline has towers on its first stage, whose first layer range takes features. All others get positions alone.

Without a plan, and for chunks of text alone, every forward stays that of its class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from hf_longctx.families.family import MediumKind
from hf_longctx.hf.models.attention import sees_both_ways
from hf_longctx.hf.models.heads import inner_decoder
from hf_longctx.hf.models.towers import text_part, text_path, tower_names, wrapper_family, wrapper_of
from hf_longctx.runtime.attention.layout import GroupLayout
from hf_longctx.runtime.core.chunk_inputs import FeatureExchange, TowerInputs
from hf_longctx.runtime.states.passing import exchange

# attribute of a decoder: handle of the hook before it; of the text model with it: its `TowerGraphs`
_HANDLE, _GRAPHS = "_longctx_media_handle", "_longctx_tower_graphs"
# fields of a config with the token that stands for a feature of an image or a video
_TOKENS: dict[MediumKind, tuple[str, ...]] = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
# attribute of text models whose layers get inputs of their own, which they make of token ids
_LAYER_INPUTS = "hidden_size_per_layer_input"
# methods of the module around a text model that run its towers
_METHODS: dict[MediumKind, str] = {"image": "get_image_features", "video": "get_video_features"}


def media_kinds(model: nn.Module) -> tuple[MediumKind, ...]:
    """Kinds of media that rows of this model may have; empty for a model of text and for classes that were not tested."""
    wrapper = wrapper_of(model)
    if wrapper is None:
        return ()
    return tuple(kind for kind in wrapper_family(model).media if token_of(wrapper.config, kind) is not None)


def token_of(config: Any, kind: MediumKind) -> int | None:
    """Id of the token that stands for a feature of such a medium; None if the config names none."""
    found = (getattr(config, name, None) for name in _TOKENS[kind])
    return next((each for each in found if isinstance(each, int) and each >= 0), None)


def around_text(model: nn.Module) -> Any:
    """The module around the text model, which runs the towers."""
    wrapper = wrapper_of(model)
    assert wrapper is not None
    return wrapper.get_submodule(text_path(wrapper).rpartition(".")[0])


def num_added_levels(model: nn.Module) -> int:
    """Number of the first layers after which features are added to hidden states."""
    return _num_levels(around_text(model)) - 1


def tower_arguments(model: nn.Module, kind: MediumKind) -> tuple[str, ...]:
    """Names of the tensors that a model's towers read for an image or a video."""
    return tuple(inspect.signature(inspect.unwrap(getattr(around_text(model), _METHODS[kind]))).parameters)


def token_types_name(model: nn.Module) -> str:
    """The keyword by which the forward of a model's class gets the types of tokens; empty if it needs none."""
    # a subclass of the user's may pass it on without naming it
    forwards = [vars(kind)["forward"] for kind in type(around_text(model)).__mro__ if "forward" in vars(kind)]
    keywords = {name for forward in forwards for name in inspect.signature(forward).parameters}
    return next((name for name in ("mm_token_type_ids", "token_type_ids") if name in keywords), "")


def sees_images_both_ways(model: nn.Module) -> bool:
    """Whether tokens of an image see each other both ways in some layer of a model's text model."""
    return any(map(sees_both_ways, text_part(model).modules()))


class MediaPatch:
    """Gives the decoder features in place of embeddings of images and videos, and their positions."""

    def needed(self, model: nn.Module) -> bool:
        """Whether rows of the model may have images or videos."""
        return bool(media_kinds(model))

    def apply(self, model: nn.Module) -> None:
        """Hooks the decoder itself, since what calls it differs: early stages of a pipeline call it without its head."""
        text = text_part(model)
        decoder: Any = inner_decoder(text) or text
        if _HANDLE not in vars(decoder):
            hook = partial(_with_media, around_text(model), text, sees_images_both_ways(model))
            setattr(decoder, _HANDLE, decoder.register_forward_pre_hook(hook, with_kwargs=True))
            vars(text)[_GRAPHS] = TowerGraphs()

    def undo(self, model: nn.Module) -> None:
        """Removes the hook."""
        for module in model.modules():
            if (handle := vars(module).pop(_HANDLE, None)) is not None:
                handle.remove()
            vars(module).pop(_GRAPHS, None)


def tower_graphs(model: nn.Module) -> TowerGraphs | None:
    """Returns what decides about graphs of a patched model's towers; None for a model whose rows have no images."""
    return vars(text_part(model)).get(_GRAPHS)


class TowerGraphs:
    """Keeps the graph of an image's towers until the chunk's backward, or runs the towers again in it, as the plan says.

    Where the plan does not know the towers, a graph is kept while all that wait fit into `room_bytes`, which the running plan
    leaves free on the device; the room is 0 until `begin`. One that takes little more than its features, as that of a trained
    projector behind frozen towers, is then always kept, since nothing would be gained. Towers that run again do so image by
    image, so that at most one graph is made at a time.
    """

    def __init__(self) -> None:
        self.room_bytes = 0
        # bytes of graphs that wait for their backward
        self.waiting_bytes = 0
        # number of input elements of an image -> bytes of its graph, counted, and whether it takes little more than its features
        self._counted: dict[int, tuple[int, bool]] = {}

    def begin(self, room_bytes: int) -> None:
        """Begins a plan that leaves so many bytes of the device free."""
        self.room_bytes, self.waiting_bytes = max(0, room_bytes), 0

    def features(self, around: Any, medium: TowerInputs) -> list[Tensor]:
        """Returns the `feature_tables` of an image or video."""
        if not torch.is_grad_enabled() or medium.keeps:
            return feature_tables(around, medium)
        if medium.keeps is not None:
            return self._again(around, medium)
        num_bytes, is_small = self.graph_bytes(around, medium)
        if not is_small and self.waiting_bytes + num_bytes > self.room_bytes:
            return self._again(around, medium)
        tables = feature_tables(around, medium)
        if not is_small and tables[0].requires_grad:
            self.waiting_bytes += num_bytes
            tables[0].register_hook(lambda _: self._free(num_bytes))
        return tables

    @staticmethod
    def _again(around: Any, medium: TowerInputs) -> list[Tensor]:
        # towers draw no random numbers, see `tower_dropout`
        tables: list[Tensor] = checkpoint(feature_tables, around, medium, use_reentrant=False, preserve_rng_state=False)
        return tables

    def _free(self, num_bytes: int) -> None:
        self.waiting_bytes = max(0, self.waiting_bytes - num_bytes)

    def graph_bytes(self, around: Any, medium: TowerInputs) -> tuple[int, bool]:
        """Returns bytes that the graph of an image keeps for backward, and whether they are little more than its features'.

        Images that have between half and all of the input elements of a counted one are taken to need in proportion as many;
        for others the towers run once, and what their graph would keep is counted and dropped.
        """
        size = sum(each.numel() for each in medium.tensors.values())
        known = min((other for other in self._counted if size <= other <= 2 * size), default=0)
        if not known:
            self._counted[known := size] = counted_graph(around, medium)
        num_bytes, is_small = self._counted[known]
        return num_bytes * size // known, is_small


# a graph of at most so many bytes for each byte of features is always kept
_SMALL_GRAPH = 4


def counted_graph(around: Any, medium: TowerInputs) -> tuple[int, bool]:
    """Counts bytes that towers save for the backward of an image, without keeping them, and compares them with its features."""
    known = {StorageWeakRef(weight.untyped_storage()) for weight in around.parameters() if not isinstance(weight, DTensor)}
    known |= {StorageWeakRef(each.untyped_storage()) for each in medium.tensors.values()}
    total = 0

    def count(saved: Tensor) -> Tensor:
        nonlocal total
        # several operations may save one tensor; no other gets its place, and its memory is free
        if (storage := StorageWeakRef(saved.untyped_storage())) not in known:
            known.add(storage)
            total += saved.untyped_storage().nbytes()
        return nothing

    nothing = torch.empty(0)
    with saved_tensors_hooks(count, lambda _: nothing):
        tables = feature_tables(around, medium)
    return total, total <= _SMALL_GRAPH * sum(each.nbytes for each in tables)


def _with_media(
    around: Any, text: nn.Module, needs_blocks: bool, decoder: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of a decoder in a chunk with images or videos; None, which leaves them, in any other."""
    context = keywords.get("longctx")
    if context is None or context.media is None:
        return None
    media = context.media
    changed = dict(keywords)
    if media.positions is not None:
        # the first row counts tokens, as masks read it
        changed["position_ids"] = torch.cat([keywords["position_ids"].unsqueeze(0), media.positions.unsqueeze(1)])
    if keywords.get("input_ids") is None:
        # features are part of the hidden states of earlier layers
        return args, changed
    has_images = bool(len(media.places)) or media.exchange is not None
    trained = _trained_beside(around, text) if media.reaches_all else []
    if not has_images and not trained:
        return args, changed
    if needs_blocks and len(media.places) and not context.blocks:
        raise RuntimeError(
            f"the plan names no blocks of tokens that see each other both ways, but those of images do in "
            f"{type(decoder).__name__}; plan steps with `StepSequences`"
        )
    ids_1T = keywords["input_ids"]
    if getattr(decoder, _LAYER_INPUTS, None):
        # tokens of images are padding there, and for their embeddings, too
        ids_1T = ids_1T.index_fill(1, media.places, decoder.config.pad_token_id)
        changed["per_layer_inputs"] = decoder.get_per_layer_inputs(ids_1T)
    embeds_1TC = decoder.get_input_embeddings()(ids_1T)
    changed["input_ids"] = None
    if trained:
        embeds_1TC = _Reaching.apply(embeds_1TC, *trained)
    if not has_images:
        return args, changed | {"inputs_embeds": embeds_1TC}
    graphs = vars(text)[_GRAPHS]
    tables = [graphs.features(around, each) for each in media.media]
    # one level for embeddings, then those that layers add
    levels = [torch.cat(level).to(embeds_1TC.dtype) for level in zip(*tables, strict=True)]
    if media.exchange is not None:
        # a rank that runs no towers has tables without rows
        levels = levels or [embeds_1TC.new_zeros(0, embeds_1TC.shape[2])] * _num_levels(around)
        levels = _exchanged(levels, media.exchange, bool(_trained_beside(around, text)), context.layout)
    levels = [level.index_select(0, media.rows) for level in levels]
    changed["inputs_embeds"] = embeds_1TC.index_copy(1, media.places, levels[0].unsqueeze(0))
    if len(levels) > 1 and len(media.places):
        is_medium_1T = torch.zeros_like(keywords["input_ids"], dtype=torch.bool)
        changed["visual_pos_masks"] = is_medium_1T.index_fill(1, media.places, True)
        changed["deepstack_visual_embeds"] = levels[1:]
    return args, changed


def _exchanged(levels: Sequence[Tensor], rows_between: FeatureExchange, is_trained: bool, layout: GroupLayout) -> list[Tensor]:
    """Returns the rows [n, C] of every level that the ranks of a group run for this one, rank after rank.

    Gradients go back to the rank that ran the towers. All ranks take part in that if any weight of the towers is trained
    (`is_trained`), even those that run or need none, and otherwise none does: features of frozen towers may require gradients all
    the same, by hooks such as those of `enable_input_require_grads`.
    """
    rows_NK = torch.cat(list(levels), dim=1)
    rows_NK = rows_NK if is_trained else rows_NK.detach()
    sends = [rows_NK.index_select(0, each).reshape(-1) for each in rows_between.sends]
    receives = [count * rows_NK.shape[1] for count in rows_between.receives]
    anchor = rows_NK.new_zeros(()).requires_grad_(is_trained)
    received = exchange(sends, receives, [anchor], layout)
    return list(received.view(-1, rows_NK.shape[1]).chunk(len(levels), dim=1))


def _num_levels(around: Any) -> int:
    """Number of tables of features that towers make: for embeddings, and for layers that add some."""
    vision = getattr(around.config, "vision_config", None)
    return 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _trained_beside(around: Any, text: nn.Module) -> list[nn.Parameter]:
    """Returns the trained weights of the towers in the module around a text model."""
    own = {id(weight) for weight in text.parameters()}
    return [weight for weight in around.parameters() if weight.requires_grad and id(weight) not in own]


class _Reaching(torch.autograd.Function):
    """Passes embeddings on, and gives weights beside them gradients of zero."""

    @staticmethod
    def forward(ctx: Any, embeds_1TC: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        return embeds_1TC.view_as(embeds_1TC)

    @staticmethod
    def backward(ctx: Any, gradient_1TC: Tensor) -> tuple[Tensor, ...]:
        weights, ctx.weights = ctx.weights, ()
        return gradient_1TC, *map(torch.zeros_like, weights)


def feature_tables(around: Any, medium: TowerInputs) -> list[Tensor]:
    """Runs the towers for one image or video. Returns its features [n, C], then those that layers add, one table per level.

    around: the module around the text model. Raises ValueError if there are not as many features as tokens.
    """
    method = getattr(around, _METHODS[medium.kind])
    output = method(**_settings(around.config, method), **medium.tensors, return_dict=True)
    found = getattr(output, "pooler_output", None)
    if found is None:
        # the class projects features in its own forward
        flat = output.last_hidden_state
        found = around.multi_modal_projector(flat.reshape(-1, flat.shape[-1]))
    levels = [found, *(getattr(output, "deepstack_features", None) or ())]
    tables = [torch.cat(list(each)) if isinstance(each, list | tuple) else each for each in levels]
    tables = [each.reshape(-1, each.shape[-1]) for each in tables]
    if any(len(each) != medium.num_features for each in tables):
        raise ValueError(
            f"the towers of {type(around).__name__} give {len(tables[0])} features for a medium ({medium.kind}) of "
            f"{medium.num_features} tokens; use the processor that belongs to the model"
        )
    return tables


def _settings(config: PretrainedConfig, method: Any) -> dict[str, Any]:
    """Settings of the config that some classes hand to their towers in their own forward."""
    names = inspect.signature(inspect.unwrap(method)).parameters
    return {name: getattr(config, name) for name in names if name.startswith("vision_") and hasattr(config, name)}


@dataclass(frozen=True, slots=True)
class MediaPositions:
    """Positions in time, height and width of a document's tokens, as a model's class makes them, without its weights.

    kind: class of the module around the text model. It is what loaders' workers need of the model.
    """

    kind: type[Any]
    config: PretrainedConfig

    @classmethod
    def of_model(cls, model: nn.Module) -> MediaPositions | None:
        """Returns None for a model that counts tokens."""
        around = around_text(model)
        if not hasattr(around, "get_rope_index"):
            return None
        # sharding puts a class of torch in front of the model's own
        kind = next(each for each in type(around).__mro__ if not each.__name__.startswith("FSDP"))
        return cls(kind, around.config)

    def of(self, ids_n: Tensor, media: Sequence[tuple[MediumKind, int, int, tuple[int, ...], float]]) -> Tensor:
        """Returns positions [3, n]. media: kind, token range, grid, and seconds between patches of each, in order."""
        owner = object.__new__(self.kind)
        nn.Module.__init__(owner)
        owner.config = self.config
        types_n = torch.zeros_like(ids_n)
        grids: dict[str, list[tuple[int, ...]]] = {}
        for kind, start, stop, grid, _ in media:
            own = types_n[start:stop]
            own[ids_n[start:stop] == token_of(self.config, kind)] = 1 if kind == "image" else 2
            grids.setdefault(f"{kind}_grid_thw", []).append(grid)
        given: dict[str, Tensor] = {name: torch.tensor(each) for name, each in grids.items()}
        if "second_per_grid_ts" in inspect.signature(inspect.unwrap(self.kind.get_rope_index)).parameters:
            # in fp32, as processors give them
            given["second_per_grid_ts"] = torch.tensor([each[4] for each in media if each[0] == "video"], dtype=torch.float32)
        found: Tensor = owner.get_rope_index(ids_n.unsqueeze(0), mm_token_type_ids=types_n.unsqueeze(0), **given)[0]
        return found[:, 0]


def tower_dropout(model: nn.Module) -> list[str]:
    """Names of modules of towers that drop something in training."""
    return [f"{name} ({rate:g})" for name, rate in _rates(model) if rate]


def _rates(model: nn.Module) -> Iterator[tuple[str, float]]:
    wrapper = wrapper_of(model)
    assert wrapper is not None
    for tower in tower_names(wrapper):
        for name, module in wrapper.get_submodule(tower).named_modules():
            rates = [getattr(module, field, 0.0) for field in ("p", "attention_dropout", "dropout", "drop_prob")]
            yield f"{tower}.{name}".rstrip("."), max((each for each in rates if isinstance(each, float)), default=0.0)
