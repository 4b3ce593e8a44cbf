"""Turns images and videos into tokens and into inputs of towers, by the user's own processor.

How many tokens an image takes depends on its size and on the processor's settings alone; for a video, also on its frames' number
and times. So the processor runs once on a grey image of each size, and the answer is kept; pixels are read only by the rank that
trains on them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hf_longctx.families.family import MediumKind
from hf_longctx.hf.data.chat import DataError, RenderedText
from hf_longctx.hf.data.media.images import MediaFile, image_size, open_image
from hf_longctx.hf.data.media.rows import Medium
from hf_longctx.hf.data.media.videos import Clip, clip_of, open_frames
from hf_longctx.hf.models.media import MediaPositions, media_kinds, token_of, tower_arguments
from hf_longctx.hf.models.towers import wrapper_of
from hf_longctx.runtime.core.chunk_inputs import TowerInputs

# not black: some classes leave tiles out that are zero everywhere
_GREY = (7, 7, 7)
# output of a processor that treats the images of a row together
_TOGETHER = "batch_num_images"


@dataclass(frozen=True, slots=True)
class Expansion:
    """Tokens of an image or video in a row, and the numbers of its `Medium`."""

    ids: tuple[int, ...]
    num_features: int
    grid: tuple[int, ...]
    seconds: float
    num_parts: int
    elements: int


@dataclass
class MediaTokens:
    """Counts and makes the tokens of images and videos with one processor; keeps what it has found for each size.

    Example:
        tokens = MediaTokens(AutoProcessor.from_pretrained("checkpoint"))
        tokens.of_size(1280, 720, "row 0 image 0").num_features
    """

    processor: Any
    # tokens by (width, height), or by the frames of a video and whether marks around it belong to it
    _known: dict[tuple[int, int] | tuple[Clip, bool], Expansion] = field(default_factory=dict, repr=False)

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
        # Llama 4 and Gemma 3 have another one than their placeholders
        own = getattr(self.processor.tokenizer, "image_token", None) if hasattr(self.processor, "boi_token") else None
        name = getattr(self.processor, "patch_token", None) or own or self.processor.image_token
        return int(self.processor.tokenizer.convert_tokens_to_ids(name))

    @cached_property
    def video(self) -> int | None:
        """Id of the token by which texts name a video, and that stands for its features; None for a processor without videos."""
        name = getattr(self.processor, "video_token", None)
        if getattr(self.processor, "video_processor", None) is None or name is None:
            return None
        found = self.processor.tokenizer.convert_tokens_to_ids(name)
        return found if found in self.processor.tokenizer.added_tokens_decoder else None

    @property
    def kinds(self) -> dict[MediumKind, str]:
        """The token by which texts name an image or a video, for each kind that the processor reads."""
        videos: dict[MediumKind, str] = {} if self.video is None else {"video": self.processor.video_token}
        return {"image": self.processor.image_token, **videos}

    @property
    def features(self) -> dict[MediumKind, int]:
        """Ids of the tokens that stand for features."""
        videos: dict[MediumKind, int] = {} if self.video is None else {"video": self.video}
        return {"image": self.feature, **videos}

    @property
    def marks(self) -> tuple[Any, Any]:
        """Ids of the tokens around an image or a video in a text; None if the processor names none."""
        start = getattr(self.processor, "vision_start_token_id", None)
        return start, getattr(self.processor, "vision_end_token_id", None)

    def of_file(self, file: MediaFile, has_marks: bool, where: str) -> Expansion:
        """Returns the tokens of an image or a video, of which headers alone are read. Raises DataError if that is not possible.

        has_marks: whether a video stands between the marks of a text, which some processors replace, too.
        """
        if file.kind == "image":
            return self.of_size(*image_size(file.path, file.content, where), where)
        clip = clip_of(file, self.processor.video_processor, where)
        if (clip, has_marks) not in self._known:
            self._known[clip, has_marks] = self.read_clip(clip, clip.grey(_GREY[0]), has_marks, where)[0]
        return self._known[clip, has_marks]

    def read_clip(self, clip: Clip, frames: Tensor, has_marks: bool, where: str) -> tuple[Expansion, Mapping[str, Any]]:
        """Returns the tokens of a video, and all that the processor makes of its frames [n, 3, height, width]."""
        start, end = self.processor.tokenizer.convert_ids_to_tokens(self.marks) if has_marks else ("", "")
        with self._refusals(f"{len(frames)} frames of {clip.width} x {clip.height} pixels", where):
            found = self.processor(
                text=[f"{start}{self.processor.video_token}{end}"],
                videos=[frames],
                video_metadata=[clip.metadata()],
                do_sample_frames=False,
                return_tensors="pt",
                add_special_tokens=False,
            )
        return self._expansion(found, "video", where), found

    @contextmanager
    def _refusals(self, size: str, where: str) -> Iterator[None]:
        """Context that names what a processor refuses, which may raise errors of any class."""
        try:
            yield
        except Exception as error:
            raise DataError(
                f"{where} ({size}) is refused by {type(self.processor).__name__} ({type(error).__name__}: {str(error)[:200]}); "
                f"change it, or remove the row"
            ) from error

    def _expansion(self, found: Mapping[str, Any], kind: MediumKind, where: str) -> Expansion:
        before, ids, after = self._parts(found["input_ids"][0].tolist())
        own = self.features[kind]
        if own not in ids or (before, after) != (self.ends if kind == "image" else ("", "")):
            raise DataError(
                f"{where}: {type(self.processor).__name__} names no features, or puts text at the ends of "
                f"{'an' if kind == 'image' else 'a'} {kind} that depends on it; switch that off (do_pan_and_scan=False), or use "
                f"another model"
            )
        grid = tuple(found[f"{kind}_grid_thw"][0].tolist()) if f"{kind}_grid_thw" in found else ()
        seconds = float(found["second_per_grid_ts"][0]) if kind == "video" and "second_per_grid_ts" in found else 0.0
        pixels = found.get("pixel_values" if kind == "image" else "pixel_values_videos")
        shape = torch.Size(()) if pixels is None else torch.as_tensor(pixels).shape
        # without a grid: tiles, and their channels, height and width, or patches and their elements
        num_parts = grid[0] if grid else max(1, shape[: -3 if len(shape) > 3 else -2].numel())
        elements = shape.numel() // num_parts if shape else 0
        return Expansion(tuple(ids), ids.count(own), grid, seconds, num_parts, elements)

    @cached_property
    def ends(self) -> tuple[str, str]:
        """Text that the processor puts before and after an image, which a tokenizer may join with the text beside it."""
        from PIL import Image as images

        ids = self._run(images.new("RGB", (64, 64), _GREY), "an image")["input_ids"][0].tolist()
        before, _, after = self._parts(ids)
        return before, after

    def framed(self, rendered: RenderedText) -> RenderedText:
        """Returns a text with these ends around all placeholders, and its spans moved."""
        if not any(self.ends):
            return rendered
        text, (before, after), placeholder = rendered.text, self.ends, self.processor.image_token
        found = [match.start() for match in re.finditer(re.escape(placeholder), text)]

        def moved(place: int) -> int:
            return place + sum(len(before) * (each < place) + len(after) * (each + len(placeholder) <= place) for each in found)

        spans = tuple((moved(start), moved(stop)) for start, stop in rendered.spans)
        return RenderedText(text.replace(placeholder, before + placeholder + after), spans)

    def _parts(self, ids: Sequence[int]) -> tuple[str, list[int], str]:
        """Divides the tokens of an image into text, tokens from the first special one to the last, and text."""
        special = self.processor.tokenizer.added_tokens_decoder
        places = [place for place, token in enumerate(ids) if token in special] or [len(ids), len(ids) - 1]
        texts = (list(ids[: places[0]]), list(ids[places[-1] + 1 :]))
        before, after = (self.processor.tokenizer.decode(each) for each in texts)
        return before, list(ids[places[0] : places[-1] + 1]), after

    def of_size(self, width: int, height: int, where: str) -> Expansion:
        """Returns the tokens of an image of this size. Raises DataError if the processor refuses it."""
        if (width, height) not in self._known:
            from PIL import Image as images

            self._known[width, height] = self.read(images.new("RGB", (width, height), _GREY), where)[0]
        return self._known[width, height]

    def read(self, image: Any, where: str) -> tuple[Expansion, Mapping[str, Any]]:
        """Returns an image's tokens without `ends`, and all that the processor makes of it.

        Raises DataError if the processor refuses it.
        """
        found = self._run(image, where)
        return self._expansion(found, "image", where), found

    def _run(self, image: Any, where: str) -> Mapping[str, Any]:
        with self._refusals(f"{image.width} x {image.height} pixels", where):
            found: Mapping[str, Any] = self.processor(
                text=[self.processor.image_token], images=[[image]], return_tensors="pt", add_special_tokens=False
            )
        return found

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
        given = MediaTokens(processor).feature
    except DataError as error:
        return str(error)
    return (
        f"images are token {given} for the processor ({type(processor).__name__}), but token {found} for the model; use the "
        f"model's own processor"
        if found != given
        else ""
    )


@dataclass(frozen=True)
class FileReader:
    """Opens the images and videos of rows for a model.

    arguments: names of what its towers read of each kind; of_document: None if the model counts tokens.
    """

    made: MediaTokens
    tokens: Mapping[MediumKind, int]
    arguments: Mapping[MediumKind, tuple[str, ...]]
    of_document: MediaPositions | None

    @classmethod
    def of(cls, model: nn.Module, processor: Any) -> FileReader:
        """Makes the reader for a model and its processor, which belong together (`tokens_problem`)."""
        made = MediaTokens(processor)
        tokens = {kind: token for kind, token in made.features.items() if kind in media_kinds(model)}
        arguments = {kind: tower_arguments(model, kind) for kind in tokens}
        return cls(made, tokens, arguments, MediaPositions.of_model(model))

    def tower_inputs(self, medium: Medium, file: Mapping[str, Any], ids: Sequence[int], where: str) -> TowerInputs:
        """Opens an image or a video; raises DataError if it cannot be read, or gives other tokens than those of the row."""
        given = MediaFile.of(medium.kind, file)
        if medium.kind == "image":
            image = open_image(given.path, given.content, where)
            size = f"{image.width} x {image.height} pixels"
            expansion, found = self.made.read(image, where)
        else:
            clip = clip_of(given, self.made.processor.video_processor, where)
            size = f"{len(clip.numbers)} frames of {clip.width} x {clip.height} pixels"
            has_marks = ids[0] == self.made.marks[0]
            expansion, found = self.made.read_clip(clip, open_frames(given, clip, where), has_marks, where)
        if list(expansion.ids) != list(ids):
            raise DataError(
                f"{where} ({size}) takes {len(expansion.ids)} tokens now, but its row has {len(ids)} or others for it; leave the "
                f"files and the processor's settings as they were when the rows were tokenised, or tokenise them again"
            )
        tensors = {name: found[name] for name in self.arguments[medium.kind] if name in found}
        return TowerInputs(medium.kind, {name: torch.as_tensor(each) for name, each in tensors.items()}, expansion.num_features)

    def positions(self, ids: Tensor, media: Sequence[Medium]) -> Tensor | None:
        """Returns positions [3, n] of a document; None for a model that counts tokens."""
        if self.of_document is None:
            return None
        return self.of_document.of(ids, [(each.kind, each.start, each.stop, each.grid, each.seconds) for each in media])


def expanded(
    ids: Sequence[int],
    labels: Sequence[int],
    files: Sequence[MediaFile],
    made: MediaTokens,
    where: str,
    ignored: int,
) -> tuple[list[int], list[int], list[Medium], list[MediaFile]]:
    """Puts tokens of images and videos in place of their placeholders in a tokenised row; returns ids, labels, media and files.

    files: those of each kind in their order; the returned ones have the order of the text. None of these tokens is learnt:
    their label is `ignored`. Raises DataError unless there is one placeholder for each.
    """
    placeholders: dict[int, MediumKind] = {made.placeholder: "image"}
    if made.video is not None:
        placeholders[made.video] = "video"
    places = [(place, placeholders[token]) for place, token in enumerate(ids) if token in placeholders]
    waiting: dict[MediumKind, list[MediaFile]] = {}
    for kind, name in made.kinds.items():
        own, count = [file for file in files if file.kind == kind], sum(each == kind for _, each in places)
        if len(own) != count:
            raise DataError(
                f"{where} has {len(own)} {kind}s but {count} placeholders {name!r} in its text; give as many {kind}s as "
                f"placeholders, and leave the placeholder out of texts"
            )
        waiting[kind] = own
    made.check_number(len(waiting["image"]), where)
    features = set(made.features.values())
    numbers = dict.fromkeys(waiting, 0)
    new_ids: list[int] = []
    new_labels: list[int] = []
    media: list[Medium] = []
    ordered: list[MediaFile] = []
    first = 0
    for place, kind in places:
        name, file = f"{where} {kind} {numbers[kind]}", waiting[kind][numbers[kind]]
        numbers[kind] += 1
        has_marks = kind == "video" and place > first and tuple(ids[place - 1 : place + 2 : 2]) == made.marks
        expansion = made.of_file(file, has_marks, name)
        new_ids += ids[first : place - has_marks]
        new_labels += labels[first : place - has_marks]
        start = len(new_ids)
        if expansion.grid and new_ids and new_ids[-1] in features and expansion.ids[0] in features:
            raise DataError(
                f"{name} stands right behind another image, where classes with positions in height and width cannot tell them "
                f"apart; put the template's marks of an image, or text, between them"
            )
        new_ids += expansion.ids
        new_labels += [ignored] * len(expansion.ids)
        of_towers = expansion.num_parts, expansion.elements
        media.append(Medium(kind, start, len(new_ids), expansion.num_features, expansion.grid, expansion.seconds, *of_towers))
        ordered.append(file)
        first = place + 1 + has_marks
    return [*new_ids, *ids[first:]], [*new_labels, *labels[first:]], media, ordered
