"""Tiny fp64 models with towers that run, rows with images for them, and plain transformers on one document at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from helpers.models.any_model import build_any, wide_floats
from torch import Tensor

from hf_longctx.families.family import MediumKind
from hf_longctx.hf.data.media.rows import Medium
from hf_longctx.hf.models.media import MediaPositions, around_text, feature_tables, media_kinds, token_of, token_types_name
from hf_longctx.plan.core.types import Blocks
from hf_longctx.runtime.core.chunk_inputs import TowerInputs

IMAGE, VIDEO, START, END = 60, 61, 58, 59
# larger ids stand for images
_NUM_TEXT_IDS = 50
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_QWEN = {"patch_size": 4, "spatial_merge_size": 2, "num_position_embeddings": 16}
_CLIP = {
    **{"image_size": 16, "patch_size": 4, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32},
    "intermediate_size": 48,
}
_TILES = [[16, 32], [32, 16], [32, 32]]

Pixels = Callable[[Any, torch.Generator, int], dict[str, Tensor]]


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _grid(is_flat: bool = True, **more: int) -> Pixels:
    """Patches of images of different sizes, with their grid."""

    def make(model: Any, generator: torch.Generator, number: int) -> dict[str, Tensor]:
        vision = model.config.vision_config
        height, width = ((4, 6), (8, 4), (4, 4), (6, 6))[number % 4]
        side, times = vision.patch_size, getattr(vision, "temporal_patch_size", 1) or 1
        shape = (3 * times * side * side,) if is_flat else (3, side, side)
        pixels = _random(generator, height * width, *shape)
        grid = torch.tensor([[1, height, width]])
        return {"pixel_values": pixels, "image_grid_thw": grid, **{name: torch.tensor([each]) for name, each in more.items()}}

    return make


def _tiles(*numbers: int, sizes: Sequence[tuple[int, int]] = (), has_sizes: bool = True) -> Pixels:
    """Tiles of images; `numbers`: of tiles, as dimensions before the channels. sizes: of the images, one after another."""

    def make(model: Any, generator: torch.Generator, number: int) -> dict[str, Tensor]:
        size = sizes[number % len(sizes)] if sizes else (16, 16)
        height, width = (16, 16) if numbers == (1, 5) else size
        found = {"pixel_values": _random(generator, *numbers, 3, height, width)}
        return found | ({"image_sizes": torch.tensor([size])} if sizes and has_sizes else {})

    return make


def _lfm(model: Any, generator: torch.Generator, number: int) -> dict[str, Tensor]:
    height, width = ((4, 6), (6, 4), (4, 4))[number % 3]
    pixels = _random(generator, 1, height * width, 3 * model.config.vision_config.patch_size**2)
    mask = torch.ones(1, height * width, dtype=torch.int64)
    return {"pixel_values": pixels, "spatial_shapes": torch.tensor([[height, width]]), "pixel_attention_mask": mask}


def _video(model: Any, generator: torch.Generator, number: int) -> dict[str, Tensor]:
    """Patches of a video of two or three pairs of frames, with their grid."""
    vision = model.config.vision_config
    times, height, width = ((2, 4, 6), (3, 4, 4))[number % 2]
    pixels = _random(generator, times * height * width, 3 * vision.temporal_patch_size * vision.patch_size**2)
    return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[times, height, width]])}


def _gemma4(model: Any, generator: torch.Generator, number: int) -> dict[str, Tensor]:
    vision = model.config.vision_config
    height, width = (vision.pooling_kernel_size * each for each in ((2, 2), (2, 3), (3, 1))[number % 3])
    places = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), -1).view(1, -1, 2)
    pixels = torch.rand(1, height * width, 3 * vision.patch_size**2, generator=generator, dtype=torch.float64)
    # images have as many patches as the largest
    missing = 6 * vision.pooling_kernel_size**2 - height * width
    pads = F.pad(pixels, (0, 0, 0, missing)), F.pad(places, (0, 0, 0, missing), value=-1)
    return dict(zip(("pixel_values", "image_position_ids"), pads, strict=True))


_GEMMA4 = {
    **{"model_type": "gemma4_vision", "patch_size": 4, "num_hidden_layers": 2, "position_embedding_size": 16, "hidden_size": 32},
    **{"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2},
}
_LLAMA4 = {
    **_CLIP,
    **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim", "hidden_size"), 32),
    **{"pixel_shuffle_ratio": 0.5, "intermediate_size": 128},
}
_MEDIUM = {"patch_size": 4, "image_size": 16}
# name of a class -> settings of its config, and what its towers read for an image
CASES: dict[str, tuple[dict[str, Any], Pixels]] = {
    "Qwen2VLForConditionalGeneration": ({"vision_config": {"patch_size": 4, "embed_dim": 32, "hidden_size": 32}}, _grid()),
    "Qwen2_5_VLForConditionalGeneration": (
        {
            "vision_config": {"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]},
            "text_config": {"layer_types": ["full_attention", "sliding_attention"], "max_window_layers": 0},
        },
        _grid(),
    ),
    "Qwen3VLForConditionalGeneration": ({"vision_config": _QWEN, "text_config": {"num_hidden_layers": 3}}, _grid()),
    "Qwen3VLMoeForConditionalGeneration": ({"vision_config": _QWEN, "text_config": {"num_hidden_layers": 3}}, _grid()),
    "Qwen3_5ForConditionalGeneration": ({"vision_config": _QWEN}, _grid()),
    "Qwen3_5MoeForConditionalGeneration": ({"vision_config": _QWEN}, _grid()),
    "Glm4vForConditionalGeneration": ({"vision_config": _MEDIUM}, _grid()),
    "Glm46VForConditionalGeneration": ({"vision_config": _MEDIUM}, _grid()),
    "Ernie4_5_VLMoeForConditionalGeneration": ({"vision_config": {"patch_size": 4}}, _grid()),
    "PaddleOCRVLForConditionalGeneration": ({"vision_config": {"patch_size": 4, "image_size": 24}}, _grid(is_flat=False)),
    "VideoLlama3ForConditionalGeneration": ({"vision_config": {"patch_size": 4}}, _grid(image_merge_sizes=2)),
    "Kimi_K25ForConditionalGeneration": (
        {"vision_config": {"patch_size": 4}, "projection_hidden_size": 32},
        _grid(is_flat=False),
    ),
    "LlavaForConditionalGeneration": ({"vision_config": _CLIP}, _tiles(1)),
    "LlavaNextForConditionalGeneration": (
        {"vision_config": _CLIP, "image_grid_pinpoints": _TILES},
        _tiles(1, 5, sizes=[(30, 32), (32, 29)]),
    ),
    "LlavaOnevisionForConditionalGeneration": (
        {"vision_config": _CLIP, "image_grid_pinpoints": _TILES},
        _tiles(1, 5, sizes=[(30, 32), (32, 29)]),
    ),
    "InternVLForConditionalGeneration": ({"vision_config": _CLIP | {"image_size": [16, 16], "patch_size": [4, 4]}}, _tiles(2)),
    "AyaVisionForConditionalGeneration": ({"vision_config": _CLIP}, _tiles(2)),
    "Mistral3ForConditionalGeneration": ({"vision_config": _CLIP}, _tiles(1, sizes=[(16, 24), (24, 16)])),
    "LightOnOcrForConditionalGeneration": ({"vision_config": _CLIP}, _tiles(1, sizes=[(16, 24), (24, 16)])),
    "Idefics3ForConditionalGeneration": ({"vision_config": _CLIP, "scale_factor": 2}, _tiles(1, 2)),
    "SmolVLMForConditionalGeneration": ({"vision_config": _CLIP, "scale_factor": 2}, _tiles(1, 2)),
    "Llama4ForConditionalGeneration": ({"vision_config": _LLAMA4}, _tiles(2)),
    "Gemma3ForConditionalGeneration": (
        {
            **{"vision_config": _CLIP | {"image_size": 32}, "mm_tokens_per_image": 16},
            "text_config": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        },
        _tiles(1, sizes=[(32, 32)], has_sizes=False),
    ),
    "Gemma4ForConditionalGeneration": (
        {
            "vision_config": _GEMMA4,
            "text_config": {
                **{"use_bidirectional_attention": "vision", "sliding_window": 3, "hidden_size_per_layer_input": 0},
                "num_kv_shared_layers": 0,
            },
        },
        _gemma4,
    ),
    "Lfm2VlForConditionalGeneration": ({"vision_config": _CLIP | {"num_patches": 16}}, _lfm),
}


@dataclass(frozen=True)
class MediaCase:
    """A class with rows of images. layouts: documents; a number is so many tokens of text, "i" an image, "v" a video."""

    name: str
    layouts: tuple[tuple[int | str, ...], ...] = ((5, "i", 7, "i", 9), (11,), (3, "i", 12), ("i", 6, "i"))
    # names of weights that begin with these are frozen
    frozen: tuple[str, ...] = ()
    # 0: that of the settings
    num_layers: int = 0
    # settings of the text model in place of those in `CASES`
    text: Mapping[str, Any] | None = None
    # those of the tower
    vision: Mapping[str, Any] | None = None

    def build(self) -> Any:
        """The tiny model."""
        settings, _ = CASES[self.name]
        settings = settings if self.text is None else settings | {"text_config": dict(self.text)}
        settings = settings if self.vision is None else settings | {"vision_config": dict(self.vision)}
        has_video = self.name not in ("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration")
        tokens = _TOKENS if has_video else {"image_token_id": IMAGE}
        if self.num_layers:
            # layers of several kinds are listed one by one
            kinds = getattr(build_any(self.name, "sdpa", **{**tokens, **settings}).config.get_text_config(), "layer_types", None)
            changes: dict[str, Any] = {"num_hidden_layers": self.num_layers}
            if kinds:
                changes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(self.num_layers)]
            settings = settings | {"text_config": settings.get("text_config", {}) | changes}
        model = build_any(self.name, "sdpa", **{**tokens, **settings})
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                values = torch.linspace(0.25, 0.5, parameter.numel(), dtype=parameter.dtype)
                parameter.data = values.log().view_as(parameter)
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        return model

    def rows(self, model: Any, seed: int = 3) -> tuple[list[dict[str, Any]], TinyReader]:
        """Rows of the layouts, and what opens their images: a medium's path is its number."""
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        make = CASES[self.name][1]
        opened: list[TowerInputs] = []
        rows = []
        for layout in self.layouts:
            ids: list[int] = []
            media: list[dict[str, Any]] = []
            files: list[dict[str, Any]] = []
            for part in layout:
                if isinstance(part, int):
                    ids += [rng.randrange(_NUM_TEXT_IDS) for _ in range(part)]
                    continue
                kind: MediumKind = "image" if part == "i" else "video"
                tensors = (make if part == "i" else _video)(model, generator, len(opened))
                with torch.no_grad(), wide_floats():
                    count = num_features(model, kind, tensors)
                grid = tensors.get(f"{kind}_grid_thw")
                begin = len(ids)
                given = () if grid is None else tuple(grid[0].tolist())
                # marks around an image, so that two of them are never side by side
                if part == "i" or not self.name.startswith("Qwen3"):
                    ids += [START, *[IMAGE if part == "i" else VIDEO] * count, END]
                else:
                    # each pair of frames has its time before it
                    for _ in range(given[0]):
                        ids += [rng.randrange(_NUM_TEXT_IDS), START, *[VIDEO] * (count // given[0]), END]
                seconds = 0.75 if part == "v" and self.name.startswith("Qwen2_5") else 0.0
                media.append(Medium(kind, begin, len(ids), count, given, seconds).as_item())
                files.append({"path": str(len(opened))})
                opened.append(TowerInputs(kind, tensors, count))
            labels = [-100 if token >= _NUM_TEXT_IDS or rng.random() < 0.2 else token for token in ids]
            rows.append({"input_ids": ids, "labels": labels, "media": media, "media_files": files})
        positions = MediaPositions.of_model(model)
        return rows, TinyReader(tuple(opened), positions, {kind: token_of(model.config, kind) for kind in media_kinds(model)})


def num_features(model: Any, kind: MediumKind, tensors: dict[str, Tensor]) -> int:
    around = around_text(model)
    try:
        feature_tables(around, TowerInputs(kind, tensors, 0))
    except ValueError as error:
        return int(str(error).split(" give ")[1].split()[0])
    raise AssertionError("no features")


@dataclass(frozen=True)
class TinyReader:
    """Hands out what towers read, from a list."""

    opened: tuple[TowerInputs, ...]
    of_document: MediaPositions | None
    tokens: dict[MediumKind, Any]

    def tower_inputs(self, medium: Medium, file: Any, ids: Sequence[int], where: str) -> TowerInputs:
        return self.opened[int(file["path"])]

    def positions(self, ids: Tensor, media: Sequence[Medium]) -> Tensor | None:
        if self.of_document is None:
            return None
        return self.of_document.of(ids, [(each.kind, each.start, each.stop, each.grid, each.seconds) for each in media])


def num_labels(rows: list[dict[str, Any]]) -> int:
    return sum(label != -100 for row in rows for label in row["labels"][1:])


def plain_step(model: Any, rows: list[dict[str, Any]], reader: TinyReader) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of plain transformers, one document at a time."""
    model.zero_grad()
    total, count = 0.0, num_labels(rows)
    if type(model).__name__.startswith("Llama4"):
        # transformers 5.24 forgets it
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast

        MoeCausalLMOutputWithPast.image_outputs = None
    with wide_floats():
        for row in rows:
            given = [reader.opened[int(item["path"])].tensors for item in row["media_files"]]
            names = {name for each in given for name in each}
            inputs: dict[str, Any] = {name: _batched([each[name] for each in given if name in each]) for name in names}
            ids = torch.tensor([row["input_ids"]])
            if given and (named := token_types_name(model)):
                inputs[named] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
            if seconds := [item["seconds"] for item in row["media"] if item["seconds"]]:
                inputs["second_per_grid_ts"] = torch.tensor(seconds)
            logits = model(input_ids=ids, **inputs, use_cache=False).logits[0, :-1].double()
            loss = F.cross_entropy(logits, torch.tensor(row["labels"][1:]), ignore_index=-100, reduction="sum") / count
            total += float(loss.detach())
            loss.backward()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def blocks_of(rows: list[dict[str, Any]]) -> tuple[Blocks, ...]:
    """The ranges of each row's tokens that stand for features of an image."""
    found = []
    for row in rows:
        groups = itertools.groupby(range(len(row["input_ids"])), key=lambda place: row["input_ids"][place] == IMAGE)
        places = [list(group) for is_image, group in groups if is_image]
        found.append(tuple((each[0], each[-1] + 1) for each in places))
    return tuple(found)


def _batched(tensors: list[Tensor]) -> Tensor:
    """One tensor of all images, padded to the largest, as processors do."""
    if tensors[0].dim() != 4 or len({each.shape for each in tensors}) == 1:
        return torch.cat(tensors)
    height, width = (max(each.shape[dim] for each in tensors) for dim in (2, 3))
    return torch.cat([F.pad(each, (0, width - each.shape[3], 0, height - each.shape[2])) for each in tensors])


def worst_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest relative error of a gradient in text, projectors and towers; a gradient that is missing counts as zero."""
    assert found.keys() <= expected.keys(), found.keys() - expected.keys()
    errors: dict[str, float] = {}
    for name, gradient in expected.items():
        is_text = any(word in name for word in ("language_model", "text_model", "lm_head"))
        is_projector = any(word in name for word in ("merger", "projector", "connector", "resampler"))
        part = "text" if is_text else "projector" if is_projector else "tower"
        scale = float(gradient.abs().max())
        # biases of keys have no gradient but noise
        if scale > 1e-12:
            own = found.get(name, torch.zeros_like(gradient))
            errors[part] = max(errors.get(part, 0.0), float((own - gradient).abs().max()) / scale)
    return errors
