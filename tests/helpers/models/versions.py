"""Marks and skips for what the oldest supported transformers cannot do itself, which newer ones can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

# the version with which docs/models.md was written, and on which nothing is skipped
NEWEST_TESTED = Version("5.24")
is_older = Version(transformers.__version__) < NEWEST_TESTED
# a later version may have further classes, which are refused as unknown
is_newer = Version(transformers.__version__).release[:2] > NEWEST_TESTED.release

# older ones restore an optimizer to "cpu:0", which torch does not know
resuming = pytest.mark.skipif(is_older, reason="this transformers cannot resume on CPU ranks")
newest = pytest.mark.skipif(is_older, reason=f"tests what transformers {NEWEST_TESTED} does")


# inputs beside tokens without which plain forwards of some classes fail on rows of text, where they have no effect
_GIVEN: dict[str, Callable[[Any, Tensor], dict[str, Any]]] = {
    # one image of zeros, which no token reads, as its processor gives it
    "IdeficsForVisionText2Text": lambda _, ids: {
        "pixel_values": torch.zeros(*ids.shape[:1], 1, 3, 28, 28, dtype=torch.float64),
        "image_attention_mask": torch.zeros(*ids.shape, 1, dtype=torch.int64),
    },
    "Kosmos2ForConditionalGeneration": lambda hidden_size, ids: {
        "image_embeds": torch.zeros(1, 0, hidden_size, dtype=torch.float64),
        "image_embeds_position_mask": torch.zeros_like(ids),
    },
    "Molmo2ForConditionalGeneration": lambda _, ids: {"mm_token_type_ids": torch.zeros_like(ids)},
    **dict.fromkeys(
        ("Blip2ForConditionalGeneration", "InstructBlipForConditionalGeneration", "InstructBlipVideoForConditionalGeneration"),
        # features of an image that no token stands for
        lambda hidden_size, _: {
            **{"pixel_values": None, "qformer_input_ids": None},
            "mm_encoder_outputs": dict.fromkeys(
                ("image", "video"),
                SimpleNamespace(
                    pooler_output=torch.ones(1, 3, hidden_size, dtype=torch.float64), qformer_outputs=None, vision_outputs=None
                ),
            ),
        },
    ),
}


def completed(model: Any) -> Any:
    """Mends a class whose plain forward fails in transformers 5.24 on rows of text, for want of something that has no effect."""
    name = type(model).__name__
    if name == "Llama4ForConditionalGeneration":
        model.language_model.register_forward_hook(lambda _, __, output: vars(output).setdefault("image_outputs"))
    if name == "Kosmos2ForConditionalGeneration":
        # it fills a mask in fp32 with the least number of fp64
        make = type(decoder := model.text_model.model)._prepare_decoder_attention_mask
        decoder._prepare_decoder_attention_mask = lambda mask, shape, hidden, *args: make(
            decoder, mask, shape, torch.empty(0, dtype=torch.bfloat16), *args
        )
    if given := _GIVEN.get(name):
        size = model.config.get_text_config().hidden_size
        model.register_forward_pre_hook(
            lambda _, args, keywords: (args, {**keywords, **given(size, keywords["input_ids"])}), with_kwargs=True
        )
    return model


def class_or_skip(name: str) -> Any:
    """A class of transformers; for one that lacks it, a function that raises what `skipping_unbuildable` takes for a skip."""

    def absent(*_: Any, **__: Any) -> Any:
        raise AttributeError(f"transformers {transformers.__version__} has no {name}")

    return getattr(transformers, name, absent)


@contextmanager
def skipping_unbuildable() -> Iterator[None]:
    """Context that skips a test whose model an older transformers fails to build from a config that newer ones read."""
    try:
        yield
    except (AttributeError, KeyError) as error:
        if not is_older:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot build this model: {error!r}")
