"""Processors of multimodal classes with a tokenizer that is built on the spot, and images made by code."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import transformers
from helpers.models.chats import byte_tokenizer
from helpers.models.versions import is_older
from PIL import Image

# special tokens of all families below
_TOKENS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>"),
    *("<fake_token_around_image>", "<global-img>", "<|image|>", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
# template with parts, which marks what the assistant says; `{image}` stands for a family's own text of an image
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.content is string %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|end|>' }}{% endif %}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}{{ 'IMAGE' }}"
    "{% elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif message.role == 'assistant' %}{% generation %}{{ part.text }}{% endgeneration %}{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}"
    "{% if message.role == 'assistant' %}{% generation %}{{ '<|end|>' }}{% endgeneration %}{% else %}{{ '<|end|>' }}{% endif %}"
    "{% endif %}{% endfor %}"
)
# folder -> processor, image processor and its settings, settings of the processor, what its template writes for an image
_FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], str]] = {
    "qwen3_vl": (
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorPil",
        {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}},
        {},
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLProcessor",
        "Qwen2VLImageProcessorPil",
        {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}},
        {},
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "llava": (
        "LlavaProcessor",
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "<image>",
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessorPil",
        {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        "<image>",
    ),
    "llava_next": (
        "LlavaNextProcessor",
        "LlavaNextImageProcessorPil",
        {
            **{"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        },
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "<image>",
    ),
    "idefics3": (
        "Idefics3Processor",
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        {"image_seq_len": 4},
        "<image>",
    ),
    "internvl": (
        "InternVLProcessor",
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 16, "width": 16}, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 4},
        "<IMG_CONTEXT>",
    ),
    "glm4v": (
        "Glm4vProcessor",
        "Glm4vImageProcessorPil",
        {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 128, "longest_edge": 4096}},
        {},
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "gemma3": (
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        {"size": {"height": 32, "width": 32}},
        {"image_seq_length": 16},
        "<start_of_image>",
    ),
    "gemma4": (
        "Gemma4Processor",
        "Gemma4ImageProcessorPil",
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        {"feature_extractor": None, "video_processor": None, "image_seq_length": 70},
        "<|image|>",
    ),
}
FOLDERS = tuple(_FAMILIES)


# processors of videos, which need torchvision
_VIDEOS = {"qwen3_vl": "Qwen3VLVideoProcessor", "qwen2_5_vl": "Qwen2VLVideoProcessor"}


def tiny_processor(folder: str, has_videos: bool = False) -> Any:
    """The processor of a family, with small images and few tokens. has_videos: it reads videos, too."""
    if folder in ("idefics3", "gemma4") and is_older:
        pytest.skip("this transformers opens its images, or makes its processor, with torchvision")
    name, image_processor, of_images, settings, text = _FAMILIES[folder]
    tokenizer = byte_tokenizer(_TEMPLATE.replace("IMAGE", text))
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS)})
    if folder == "internvl":
        for token, value in {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"}.items():
            setattr(tokenizer, f"{token}_token", value)
            setattr(tokenizer, f"{token}_token_id", tokenizer.convert_tokens_to_ids(value))
        tokenizer.video_token = "<|video_pad|>"
    if folder.startswith("gemma"):
        own = "<image_soft_token>" if folder == "gemma3" else "<|image|>"
        ends = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "boa": "<|vision_start|>", "eoa": "<|vision_end|>"}
        for token, value in (ends | {"image": own}).items():
            setattr(tokenizer, f"{token}_token", value)
            setattr(tokenizer, f"{token}_token_id", tokenizer.convert_tokens_to_ids(value))
    made = getattr(transformers, image_processor)(**of_images)
    kind = getattr(transformers, name)
    if has_videos:
        size = {"shortest_edge": 64, "longest_edge": 4096}
        ways = {
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": size,
            "fps": 2.0,
            "min_frames": 2,
            "do_sample_frames": True,
        }
        videos = getattr(transformers, _VIDEOS[folder])(**ways)
        return kind(image_processor=made, tokenizer=tokenizer, video_processor=videos, **settings)

    # processors of videos need torchvision
    class Tiny(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [
                "image_processor",
                "tokenizer",
                *(name for name in settings if name in ("feature_extractor", "video_processor")),
            ]

    Tiny.__name__ = Tiny.__qualname__ = name
    return Tiny(image_processor=made, tokenizer=tokenizer, **settings)


def chat(*parts: Any, answer: str = "it is an answer") -> list[dict[str, Any]]:
    """A conversation whose user says these parts: a text, or a dict."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    """The content of a file with this image."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()
