"""Facts about towers of images that planning needs and configs lack. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TowerLayers:
    """Layers of a kind of towers."""

    # tensors of hidden size that a layer saves for backward besides those of its MLP's inner size, and how many are in fp32
    kept: int
    kept_wide: int = 0
    # MLPs have a gate
    gated_mlp: bool = False
    # tokens of an image that are no patches
    class_tokens: int = 0
    # activation of MLPs if the config names none
    activation: str = ""


@dataclass(frozen=True, slots=True)
class Tower:
    """The tower of a multimodal class."""

    # those of a tower whose own `model_type` is not in `TOWER_LAYERS`, since some classes take any tower
    layers: TowerLayers
    # name of the matrices after the layers, see `hf_longctx/plan/model/towers.py`
    projector: str
    # tensors of hidden size that are saved for each patch after the layers
    kept_after: int = 3


_PLAIN = TowerLayers(8)
_CLIP = TowerLayers(8, class_tokens=1, activation="quick_gelu")
_PIXTRAL = TowerLayers(10, kept_wide=2, gated_mlp=True)
_ROTATED = TowerLayers(9)
_ROTATED_IN_FP32 = TowerLayers(11, activation="quick_gelu")
_RMS_NORMS = TowerLayers(13, kept_wide=2, gated_mlp=True)

# `model_type` of a tower's config -> its layers
TOWER_LAYERS: Mapping[str, TowerLayers] = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _PLAIN,
    "siglip2_vision_model": _PLAIN,
    "pixtral": _PIXTRAL,
}
# `model_type` of a multimodal class -> its tower
TOWERS: Mapping[str, Tower] = {
    "aya_vision": Tower(_PLAIN, "gated"),
    "ernie4_5_vl_moe": Tower(_ROTATED_IN_FP32, "in_space_and_time", 11),
    "gemma3": Tower(_PLAIN, "linear"),
    "gemma4": Tower(TowerLayers(19, kept_wide=13, gated_mlp=True), "linear"),
    "glm46v": Tower(_RMS_NORMS, "downsampled", 9),
    "glm4v": Tower(_RMS_NORMS, "downsampled", 9),
    "idefics3": Tower(_PLAIN, "merged_linear"),
    "internvl": Tower(TowerLayers(10, class_tokens=1), "mlp"),
    "kimi_k25": Tower(_ROTATED, "wide_mlp", 6),
    "lfm2_vl": Tower(_PLAIN, "middle"),
    "lighton_ocr": Tower(_PIXTRAL, "merger_and_mlp"),
    "llama4": Tower(TowerLayers(8, class_tokens=1), "adapter"),
    "llava": Tower(_CLIP, "mlp"),
    "llava_next": Tower(_CLIP, "mlp"),
    "llava_onevision": Tower(_PLAIN, "mlp"),
    "mistral3": Tower(_PIXTRAL, "merger_and_mlp"),
    "paddleocr_vl": Tower(_ROTATED, "wide_mlp"),
    "qwen2_5_vl": Tower(_RMS_NORMS, "levels"),
    "qwen2_vl": Tower(_ROTATED_IN_FP32, "levels"),
    "qwen3_5": Tower(_ROTATED_IN_FP32, "levels"),
    "qwen3_5_moe": Tower(_ROTATED_IN_FP32, "levels"),
    "qwen3_vl": Tower(_ROTATED_IN_FP32, "levels"),
    "qwen3_vl_moe": Tower(_ROTATED_IN_FP32, "levels"),
    "smolvlm": Tower(_PLAIN, "merged_linear"),
    "video_llama_3": Tower(_ROTATED, "mlp"),
}
