"""Turns images into tokens and into inputs of towers, by the user's own processor.

How many tokens an image takes depends on its size and on the processor's settings alone. So the processor runs once on a grey
image of each size, and the answer is kept; pixels are read only by the rank that trains on them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hf_longctx.families.family import MediumKind
from hf_longctx.hf.data.chat import DataError
from hf_longctx.hf.data.media.images import image_size, open_image
from hf_longctx.hf.data.media.rows import Medium
from hf_longctx.hf.models.media import MediaPositions, image_arguments, token_of
from hf_longctx.hf.models.towers import wrapper_of
from hf_longctx.runtime.core.chunk_inputs import TowerInputs

# not black: some classes leave tiles out that are zero everywhere
_GREY = (7, 7, 7)
# output of a processor that treats the images of a row together
_TOGETHER = "batch_num_images"


@dataclass(frozen=True, slots=True)
class Expansion:
    """Tokens of an image in a row, how many of them stand for a feature, and the grid of its patches."""

    ids: tuple[int, ...]
    num_features: int
    grid: tuple[int, ...]


@dataclass
class ImageTokens:
    """Counts and makes the tokens of images with one processor; keeps what it has found for each size.

    Example:
        tokens = ImageTokens(AutoProcessor.from_pretrained("checkpoint"))
        tokens.of_size(1280, 720, "row 0 image 0").num_features
    """

    processor: Any
    # tokens by (width, height)
    _known: dict[tuple[int, int], Expansion] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # `datasets` finds cached results by the pickled encoder
        return {"processor": self.processor, "_known": {}}

    @cached_property
    def placeholder(self) -> int:
        """Id of the token by which a chat template or a text names an image."""
        ids = self.processor.tokenizer.convert_tokens_to_ids([self.processor.image_token])
        if ids[0] is None or ids[0] not in self.processor.tokenizer.added_tokens_decoder:
            raise DataError(
                f"the processor ({type(self.processor).__name__}) names images by {self.processor.image_token!r}, which is no "
                f"token of its own; use the tokenizer that belongs to it"
            )
        return int(ids[0])

    @cached_property
    def feature(self) -> int:
        """Id of the token that stands for a feature of an image."""
        # Llama 4 has another one than its placeholder
        name = getattr(self.processor, "patch_token", None) or self.processor.image_token
        return int(self.processor.tokenizer.convert_tokens_to_ids(name))

    def of_size(self, width: int, height: int, where: str) -> Expansion:
        """Returns the tokens of an image of this size. Raises DataError if the processor refuses it."""
        if (width, height) not in self._known:
            from PIL import Image as images

            self._known[width, height] = self.read(images.new("RGB", (width, height), _GREY), where)[0]
        return self._known[width, height]

    def read(self, image: Any, where: str) -> tuple[Expansion, Mapping[str, Any]]:
        """Returns an image's tokens, and all that the processor makes of it. Raises DataError if the processor refuses it."""
        try:
            found = self.processor(
                text=[self.processor.image_token], images=[[image]], return_tensors="pt", add_special_tokens=False
            )
        # a processor may raise errors of any class
        except Exception as error:
            raise DataError(
                f"{where} ({image.width} x {image.height} pixels) is refused by {type(self.processor).__name__} "
                f"({type(error).__name__}: {str(error)[:200]}); change the image, or remove the row"
            ) from error
        ids = tuple(found["input_ids"][0].tolist())
        special = self.processor.tokenizer.added_tokens_decoder
        if not ids or ids[0] not in special or ids[-1] not in special:
            raise DataError(
                f"{where}: {type(self.processor).__name__} puts text at the ends of an image, which a tokenizer may join with "
                f"the text beside it; such processors are not supported"
            )
        grid = tuple(found["image_grid_thw"][0].tolist()) if "image_grid_thw" in found else ()
        return Expansion(ids, ids.count(self.feature), grid), found

    def check_number(self, number: int, where: str) -> None:
        """Raises DataError for a row with more images than the processor treats one by one."""
        if number > 1 and self._joins:
            raise DataError(
                f"{where} has {number} images, but {type(self.processor).__name__} gives an image another number of tokens in a "
                f"row with several; give rows with one image"
            )

    @cached_property
    def _joins(self) -> bool:
        from PIL import Image as images

        return _TOGETHER in self.processor.image_processor(images.new("RGB", (64, 64), _GREY), return_tensors="pt")


def processor_problem(processor: Any) -> str:
    """Returns why rows with images cannot be read with a processing class; empty if they can."""
    if not isinstance(processor, ProcessorMixin):
        return (
            f"rows have images, but processing_class is {type(processor).__name__}, which reads text alone; pass the model's "
            f"processor (AutoProcessor.from_pretrained), which checkpoints need, too"
        )
    missing = [name for name in ("image_processor", "image_token", "tokenizer") if getattr(processor, name, None) is None]
    return f"the processor ({type(processor).__name__}) has no {missing[0]}, so it reads no images" if missing else ""


def tokenizer_of(processor: Any) -> PreTrainedTokenizerBase:
    """Returns a processor's tokenizer with the processor's chat template. Raises DataError for one that reads no images."""
    if problem := processor_problem(processor):
        raise DataError(problem)
    tokenizer: PreTrainedTokenizerBase = processor.tokenizer
    if (template := getattr(processor, "chat_template", None)) and template != tokenizer.chat_template:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def tokens_problem(model: nn.Module, processor: Any) -> str:
    """Returns why a processor does not belong to a model: they name features of images differently. Empty if it does."""
    wrapper: Any = wrapper_of(model)
    found = token_of(wrapper.config, "image")
    try:
        given = ImageTokens(processor).feature
    except DataError as error:
        return str(error)
    return (
        f"images are token {given} for the processor ({type(processor).__name__}), but token {found} for the model; use the "
        f"model's own processor"
        if found != given
        else ""
    )


@dataclass(frozen=True)
class ImageReader:
    """Opens the images of rows for a model. arguments: names of what its towers read; of_document: None if it counts tokens."""

    images: ImageTokens
    tokens: Mapping[MediumKind, int]
    arguments: tuple[str, ...]
    of_document: MediaPositions | None

    @classmethod
    def of(cls, model: nn.Module, processor: Any) -> ImageReader:
        """Makes the reader for a model and its processor, which belong together (`tokens_problem`)."""
        images = ImageTokens(processor)
        return cls(images, {"image": images.feature}, image_arguments(model), MediaPositions.of_model(model))

    def tower_inputs(self, medium: Medium, file: Mapping[str, Any], ids: Sequence[int], where: str) -> TowerInputs:
        """Opens an image; raises DataError if it cannot be read, or gives other tokens than those of the row."""
        image = open_image(file.get("path"), file.get("bytes"), where)
        expansion, found = self.images.read(image, where)
        if list(expansion.ids) != list(ids):
            raise DataError(
                f"{where} ({image.width} x {image.height} pixels) takes {len(expansion.ids)} tokens now, but its row has "
                f"{len(ids)} or others for it; leave the images and the processor's settings as they were when the rows were "
                f"tokenised, or tokenise them again"
            )
        tensors = {name: found[name] for name in self.arguments if name in found}
        return TowerInputs(medium.kind, {name: torch.as_tensor(each) for name, each in tensors.items()}, expansion.num_features)

    def positions(self, ids: Tensor, media: Sequence[Medium]) -> Tensor | None:
        """Returns positions [3, n] of a document; None for a model that counts tokens."""
        if self.of_document is None:
            return None
        return self.of_document.of(ids, [(each.kind, each.start, each.stop, each.grid) for each in media])


def expanded(
    ids: Sequence[int],
    labels: Sequence[int],
    references: Sequence[tuple[str | None, bytes | None]],
    images: ImageTokens,
    where: str,
    ignored: int,
) -> tuple[list[int], list[int], list[Medium]]:
    """Puts the tokens of images in place of their placeholders in a tokenised row; returns ids, labels and media.

    None of these tokens is learnt: their label is `ignored`. Raises DataError unless there is one placeholder for each image.
    """
    places = [place for place, token in enumerate(ids) if token == images.placeholder]
    if len(places) != len(references):
        raise DataError(
            f"{where} has {len(references)} images but {len(places)} placeholders {images.processor.image_token!r} in its text; "
            f"give as many images as placeholders, and leave the placeholder out of texts"
        )
    images.check_number(len(references), where)
    new_ids: list[int] = []
    new_labels: list[int] = []
    media: list[Medium] = []
    first = 0
    for number, (place, (path, content)) in enumerate(zip(places, references, strict=True)):
        name = f"{where} image {number}"
        expansion = images.of_size(*image_size(path, content, name), name)
        new_ids += ids[first:place]
        new_labels += labels[first:place]
        start = len(new_ids)
        if expansion.grid and media and media[-1].stop == start:
            raise DataError(
                f"{name} stands right behind another image, where classes with positions in height and width cannot tell them "
                f"apart; put the template's marks of an image, or text, between them"
            )
        new_ids += expansion.ids
        new_labels += [ignored] * len(expansion.ids)
        media.append(Medium("image", start, len(new_ids), expansion.num_features, expansion.grid))
        first = place + 1
    return [*new_ids, *ids[first:]], [*new_labels, *labels[first:]], media
