"""Puts two small images into documents of the self-test, for plans and for the plain model alike.

The run's own processor makes them, and the copy's towers, of fewer layers, run them. The plain model reads them by the forward of
its class. So what a class does to images elsewhere than in its towers (in its own forward, by a hook) is found, as are wrong
places, positions and features that layers add. Tokens of images get ids that the copy's smaller vocabulary has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from hf_longctx.hf.data.chat import DataError
from hf_longctx.hf.data.fields import MEDIA, MEDIA_FILES
from hf_longctx.hf.data.media.processors import FileReader
from hf_longctx.hf.data.media.rows import Medium
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.media import MediaPositions, sees_images_both_ways, token_of, token_types_name
from hf_longctx.hf.models.towers import wrapper_of
from hf_longctx.hf.self_test.probe_plans import LONE, LONG, PACKED
from hf_longctx.plan.core.types import Blocks
from hf_longctx.runtime.core.chunk_inputs import TowerInputs
from hf_longctx.runtime.core.loss import IGNORE_INDEX

# widths and heights to try; the two images with the fewest tokens are taken
_SIZES = ((64, 96), (112, 64), (224, 224), (336, 224))
# documents with an image, and which: packed ones, one of them cut into slices, and a lone one
_IMAGES = {PACKED[0]: 0, LONG: 1, LONE[0]: 0}


@dataclass(frozen=True)
class ProbeImage:
    """An image of the test: which of its tokens stand for a feature, what towers read, and the grid of its patches."""

    is_feature: tuple[bool, ...]
    inputs: TowerInputs
    grid: tuple[int, ...]


@dataclass(frozen=True)
class ProbeReader(FileReader):
    """Hands the images of the test to plans; a row names them by number."""

    images: tuple[TowerInputs, ...] = ()

    def tower_inputs(self, medium: Medium, file: Mapping[str, Any], ids: Sequence[int], where: str) -> TowerInputs:
        """Returns what towers read of an image."""
        return self.images[file["number"]]


@dataclass(frozen=True)
class ProbeImages:
    """The images of the test, and the reader by which a run opens its own."""

    images: tuple[ProbeImage, ...]
    own: FileReader

    @classmethod
    def of(cls, model: nn.Module, processor: Any) -> ProbeImages:
        """Makes two small images of random pixels. Raises DataError if the processor reads no image of the sizes tried."""
        from PIL import Image as images

        own, found = FileReader.of(model, processor), []
        generator = torch.Generator().manual_seed(0)
        failed: DataError | None = None
        for width, height in _SIZES:
            pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
            try:
                expansion, made = own.made.read(images.fromarray(pixels.numpy()), "an image of the self-test")
            except DataError as error:
                failed = error
                continue
            tensors = {name: torch.as_tensor(made[name]) for name in own.arguments["image"] if name in made}
            is_feature = tuple(token == own.tokens["image"] for token in expansion.ids)
            inputs = TowerInputs("image", tensors, expansion.num_features)
            found.append(ProbeImage(is_feature, inputs, expansion.grid))
        if not found:
            assert failed is not None
            raise failed
        found.sort(key=lambda image: len(image.is_feature))
        return cls((found[0], found[min(1, len(found) - 1)]), own)

    def longer(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Returns the lengths of the documents with their images."""
        return tuple(length + len(self._image_of(number)) for number, length in enumerate(lengths))

    def blocks(self, model: nn.Module, lengths: Sequence[int]) -> tuple[Blocks, ...]:
        """Returns the tokens that see each other both ways in documents of these lengths; () for causal models."""
        if not sees_images_both_ways(model):
            return ()
        found: list[Blocks] = []
        for number, length in enumerate(lengths):
            start, runs = self._start(number, length), []
            for is_feature, group in groupby(self._image_of(number)):
                stop = start + len(tuple(group))
                runs += [(start, stop)] if is_feature else []
                start = stop
            found.append(tuple(runs))
        return tuple(found)

    def put_into(self, rows: Sequence[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """Returns the rows, of these lengths, with images in place of some of their tokens, and with what plans read of them."""
        token, changed = _token(model), []
        for number, row in enumerate(rows):
            image, ids, labels = self._image_of(number), list(row["input_ids"]), list(row["labels"])
            start = self._start(number, len(ids))
            media: list[dict[str, Any]] = []
            if image:
                stop = start + len(image)
                ids[start:stop] = [token if is_feature else ids[start + i] for i, is_feature in enumerate(image)]
                labels[start:stop] = [IGNORE_INDEX] * len(image)
                media.append(Medium("image", start, stop, sum(image), self.images[_IMAGES[number]].grid).as_item())
            files = [{"number": _IMAGES[number]}] if image else []
            changed.append(row | {"input_ids": ids, "labels": labels, MEDIA: media, MEDIA_FILES: files})
        return changed

    def reader(self, model: nn.Module) -> ProbeReader:
        """Returns what gives plans of a copy of the model these images."""
        images = tuple(self._inputs(each, model) for each in self.images)
        return ProbeReader(self.own.made, {"image": _token(model)}, self.own.arguments, MediaPositions.of_model(model), images)

    def plain_inputs(self, row: Mapping[str, Any], model: nn.Module, ids_1T: Tensor) -> dict[str, Any]:
        """Returns what the forward of a copy's class reads beside token ids; empty for a row of text or the start of one."""
        if not row[MEDIA] or row[MEDIA][0]["stop"] > ids_1T.shape[1]:
            return {}
        (file,) = row[MEDIA_FILES]
        inputs = self._inputs(self.images[file["number"]], model)
        given = {name: tensor.to(ids_1T.device) for name, tensor in inputs.tensors.items()}
        if named := token_types_name(model):
            given[named] = (ids_1T == _token(model)).long()
        return given

    def words(self) -> str:
        """Describes the images for the log."""
        return f"images of {' and '.join(str(len(each.is_feature)) for each in self.images)} tokens"

    def _image_of(self, number: int) -> tuple[bool, ...]:
        return self.images[_IMAGES[number]].is_feature if number in _IMAGES else ()

    def _start(self, number: int, length: int) -> int:
        """The first token of a document's image: at the very start, or so that the first of three slices ends inside of it."""
        size = len(self._image_of(number))
        return min(max(1, length // 3 - size // 2), length - size - 1) if number == LONG else 0

    @staticmethod
    def _inputs(image: ProbeImage, model: Any) -> TowerInputs:
        """Returns what towers read, in the precision of a model."""
        dtype = base_of(model).dtype
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in image.inputs.tensors.items()
        }
        return TowerInputs("image", tensors, image.inputs.num_features)


def _token(model: nn.Module) -> int:
    """Id of the token that stands for a feature of an image."""
    wrapper: Any = wrapper_of(model)
    token = token_of(wrapper.config, "image")
    assert token is not None
    return token
