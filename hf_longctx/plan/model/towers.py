"""Sizes and costs of the towers that encode images and videos, from a multimodal model's `config.json`, without transformers.

A tower embeds patches of pixels, runs layers in which a patch sees all patches of its image, of its tile, or of its step in time
of a video, in some layers only those of its window, and makes features of some patches each. For P patches and F features, a
forward takes

    2 P (elements of a patch * d + L (4 d^2 + m d f))  +  4 d P (patches seen, over all layers)  +  2 F projector

operations, for L layers of width d with m matrices of d x f in an MLP. A graph that waits for its backward holds

    P * L * (kept * d + kept_inner * f)  elements

of the model's dtype, with a few numbers of norms and attention. `kept` and `kept_inner` are numbers of tensors that a layer
saves; `families/towers.py` has them for every class, and tests count them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hf_longctx.families.towers import TOWER_LAYERS, TOWERS, Tower
from hf_longctx.plan.core.types import TowerWork


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A tower in numbers; empty (no layers) for a model without one, and for classes whose rows have no images."""

    num_layers: int = 0
    hidden_size: int = 0
    # inner features of an MLP, and its matrices
    inner_size: int = 0
    mlp_matrices: int = 2
    num_heads: int = 0
    # elements of the pixels of a patch
    patch_elements: int = 0
    # patches of which a feature is made
    merged_patches: int = 1
    # patches that a patch sees in some layers, and how many layers these are
    window_patches: int = 0
    num_windowed: int = 0
    # multiplications of a feature in the projector, which are its parameters
    projector_products: int = 0
    # see `TowerLayers`
    class_tokens: int = 0
    kept: int = 0
    kept_inner: int = 0
    kept_wide: int = 0
    kept_after: int = 0
    # tables of features that text layers add, besides the first
    num_levels: int = 0
    # last layers whose graph a backward needs, since weights in them or before them are trained, and trained parameters of all
    # parts, adapters included; both 0 for a frozen tower
    graph_layers: int = 0
    trained_parameters: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TowerSpec:
        """Reads the tower of a multimodal model from its `config.json`; an empty spec if sizes are missing."""
        vision, tower = config.get("vision_config"), TOWERS.get(str(config.get("model_type")))
        if not isinstance(vision, Mapping) or tower is None:
            return cls()
        try:
            found = _read(tower, _Sizes.of(config, vision), vision)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            return cls()
        sizes = found.num_layers, found.hidden_size, found.inner_size, found.num_heads, found.patch_elements, found.merged_patches
        return found if min(sizes) > 0 else cls()

    @property
    def is_empty(self) -> bool:
        """Whether no tower is known."""
        return not self.num_layers

    @property
    def layer_parameters(self) -> int:
        """Matrix parameters of a layer."""
        return 4 * self.hidden_size**2 + self.mlp_matrices * self.hidden_size * self.inner_size

    @property
    def num_parameters(self) -> int:
        """Matrix parameters, without tables of positions and heads that images do not use."""
        return self.num_layers * self.layer_parameters + self.patch_elements * self.hidden_size + self.projector_products

    def products(self, medium: TowerWork) -> float:
        """Multiplications by matrices in a forward."""
        layers = self._tokens(medium) * self.num_layers * self.layer_parameters
        embedding = medium.num_parts * medium.patches * self.patch_elements * self.hidden_size
        return layers + embedding + medium.num_features * self.projector_products

    def pair_operations(self, medium: TowerWork) -> float:
        """Operations of attention in a forward."""
        seen = medium.patches + self.class_tokens
        of_layers = self.num_layers * seen - self.num_windowed * max(0, seen - self.window_patches)
        return 4.0 * self.hidden_size * self._tokens(medium) * of_layers

    def operations(self, medium: TowerWork) -> float:
        """All operations of a forward; a product counts as a multiplication and an addition."""
        return 2.0 * self.products(medium) + self.pair_operations(medium)

    @property
    def backward_passes(self) -> float:
        """Operations of a backward for each of a forward: gradients of what layers read, and of trained weights."""
        if self.is_empty:
            return 0.0
        return self.graph_layers / self.num_layers + min(1.0, self.trained_parameters / self.num_parameters)

    def graph_bytes(self, medium: TowerWork, bytes_per_element: int) -> int:
        """Bytes that a forward keeps for its backward, besides pixels and weights."""
        if not self.trained_parameters:
            return 0
        e, d = bytes_per_element, self.hidden_size
        # norms keep four numbers, or two in fp32, and attention the sum of a query's weights for each head
        norms = 8 if self.kept_wide else 4 * e
        wide = self.kept_wide * max(0, 4 - e) * d
        layer = e * (self.kept * d + self.kept_inner * self.inner_size) + wide + 4 * self.num_heads + norms
        # embedding and projector
        ends = e * d * (int(self.graph_layers == self.num_layers) + self.kept_after * (1 + self.num_levels))
        return round(self._tokens(medium) * (self.graph_layers * layer + ends))

    def work_bytes(self, medium: TowerWork, bytes_per_element: int) -> int:
        """Bytes while an image runs, besides its features: what its backward needs, and the tensors of one layer."""
        layer = replace(self, num_layers=1, graph_layers=1, num_levels=0, kept_after=0, trained_parameters=1)
        return self.graph_bytes(medium, bytes_per_element) + layer.graph_bytes(medium, bytes_per_element)

    def feature_bytes(self, medium: TowerWork, bytes_per_feature: int) -> int:
        """Bytes of an image's features of all levels, and of their gradients if the tower is trained."""
        return medium.num_features * (1 + self.num_levels) * bytes_per_feature * (1 + bool(self.trained_parameters))

    def _tokens(self, medium: TowerWork) -> int:
        return medium.num_parts * (medium.patches + self.class_tokens)


NO_TOWER = TowerSpec()


class _Sizes(NamedTuple):
    """Sizes of a config under one name each."""

    hidden: int
    inner: int
    # width of the text model
    text: int
    merged: int
    # sizes of projectors, by the names of the config
    more: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any], vision: Mapping[str, Any]) -> _Sizes:
        text = config.get("text_config")
        own = text if isinstance(text, Mapping) else config
        hidden = int(vision.get("embed_dim") or vision["hidden_size"])
        inner = int(vision.get("intermediate_size") or vision.get("mlp_ratio", 4) * hidden)
        return cls(hidden, inner, int(own["hidden_size"]), _merged_patches(config, vision), {**vision, **config})


def _merged_patches(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """Patches of which a feature is made."""
    sizes = {**vision, **config}
    for name in ("spatial_merge_size", "downsample_factor", "scale_factor", "pooling_kernel_size"):
        if sizes.get(name):
            return int(sizes[name]) ** 2
    if sizes.get("merge_kernel_size"):
        height, width = sizes["merge_kernel_size"]
        return int(height * width)
    if ratio := sizes.get("downsample_ratio") or sizes.get("pixel_shuffle_ratio"):
        return round(1 / float(ratio) ** 2)
    if tokens := sizes.get("mm_tokens_per_image"):
        return int((vision["image_size"] // vision["patch_size"]) ** 2 // tokens)
    return 1


def _gated(s: _Sizes) -> int:
    inner = int(s.more.get("alignment_intermediate_size") or s.text)
    return s.merged * s.hidden * inner + inner // 2 * s.text


def _llama4(s: _Sizes) -> int:
    middle, out = int(s.more["projector_input_dim"]), int(s.more["projector_output_dim"])
    return s.inner * middle + middle * out + int(s.more["vision_output_dim"]) * s.text


def _between(s: _Sizes) -> int:
    middle = int(s.more["projector_hidden_size"])
    return s.merged * s.hidden * middle + middle * s.text


def _glm(s: _Sizes) -> int:
    out = int(s.more["out_hidden_size"])
    return s.merged * s.hidden * out + out * out + 3 * out * s.inner


def _qwen(s: _Sizes) -> int:
    wide, levels = s.merged * s.hidden, len(s.more.get("deepstack_visual_indexes") or ())
    # the first of these classes has the width of the text model under the name of its own
    out = int(s.more.get("out_hidden_size") or s.text)
    return (1 + levels) * (wide * wide + wide * out)


# name in `Tower` -> multiplications of a feature
_PROJECTORS: dict[str, Callable[[_Sizes], int]] = {
    "linear": lambda s: s.hidden * s.text,
    "merged_linear": lambda s: s.merged * s.hidden * s.text,
    "mlp": lambda s: s.merged * s.hidden * s.text + s.text * s.text,
    "merger_and_mlp": lambda s: s.merged * s.hidden * s.hidden + s.hidden * s.text + s.text * s.text,
    "wide_mlp": lambda s: (s.merged * s.hidden) ** 2 + s.merged * s.hidden * s.text,
    "in_space_and_time": lambda s: 5 * (s.merged * s.hidden) ** 2 + s.merged * s.hidden * s.text,
    "gated": _gated,
    "adapter": _llama4,
    "middle": _between,
    "downsampled": _glm,
    "levels": _qwen,
}


def _read(tower: Tower, sizes: _Sizes, vision: Mapping[str, Any]) -> TowerSpec:
    kind = TOWER_LAYERS.get(str(vision.get("model_type", "")), tower.layers)
    num_layers = int(vision.get("depth") or vision["num_hidden_layers"])
    side = vision["patch_size"]
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = int(vision.get("num_channels") or vision.get("in_channels") or vision.get("in_chans") or 3)
    windowed, window = 0, 0
    if (full := vision.get("fullatt_block_indexes")) is not None and vision.get("window_size"):
        windowed, window = num_layers - len(full), (int(vision["window_size"]) // int(height)) ** 2
    activation = vision.get("hidden_act") or vision.get("hidden_activation") or kind.activation
    inner = int(vision["out_hidden_size"]) if tower.projector == "downsampled" else sizes.inner
    return TowerSpec(
        num_layers=num_layers,
        hidden_size=sizes.hidden,
        inner_size=inner,
        mlp_matrices=3 if kind.gated_mlp else 2,
        num_heads=int(vision.get("num_heads") or vision["num_attention_heads"]),
        patch_elements=channels * int(vision.get("temporal_patch_size") or 1) * int(height) * int(width),
        merged_patches=sizes.merged,
        window_patches=window,
        num_windowed=windowed,
        projector_products=_PROJECTORS[tower.projector](sizes),
        class_tokens=kind.class_tokens,
        kept=kind.kept,
        # a gate keeps both inputs and their parts; sigmoids keep one more than other activations
        kept_inner=4 if kind.gated_mlp else 3 if activation == "quick_gelu" else 2,
        kept_wide=kind.kept_wide,
        kept_after=tower.kept_after,
        num_levels=len(vision.get("deepstack_visual_indexes") or ()),
    )
