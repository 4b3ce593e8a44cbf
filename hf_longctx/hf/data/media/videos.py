"""Finds the videos of rows, and reads from them the frames that a processor takes.

A video is a file, whose frames PyAV decodes, or a list of its frames with their times. How many frames a processor takes from a
file depends on their number and rate, which the file's header says: lengths are counted without decoding pixels.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_longctx.hf.data.chat import DataError
from hf_longctx.hf.data.media.images import MediaFile, image_size, named, open_image, reference_of
from hf_longctx.hf.data.media.images import readable as readable_file

_FORMS = "a path, bytes, or {frames: [...], fps: ...} or {frames: [...], times: [...]} with images and their times in seconds"
# settings of a video processor that its choice of frames does not get
_NOT_SAMPLED = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames of a video that a processor takes: their size, and their numbers among `num_frames` frames, `rate` per second."""

    width: int
    height: int
    numbers: tuple[float, ...]
    num_frames: float
    rate: float

    def metadata(self) -> Any:
        """Returns what processors read beside pixels."""
        from transformers.video_utils import VideoMetadata

        made: Any = VideoMetadata
        size = {"width": self.width, "height": self.height}
        return made(total_num_frames=self.num_frames, fps=self.rate, frames_indices=list(self.numbers), **size)

    def grey(self, grey: int) -> Tensor:
        """Returns frames [n, 3, height, width] of one colour, uint8, in memory of one pixel."""
        return torch.full((1, 3, 1, 1), grey, dtype=torch.uint8).expand(len(self.numbers), 3, self.height, self.width)


def video_of(value: Any, where: str) -> MediaFile:
    """Returns the video that a row gives by such a value. where: its name in messages. Raises DataError for other values."""
    if isinstance(value, list | tuple):
        raise DataError(f"{where} is a list of {len(value)} frames without their times; give {{frames: [...], fps: ...}}")
    if not isinstance(value, Mapping) or value.get("frames") is None:
        return MediaFile("video", *reference_of(value, where, _FORMS))
    frames = tuple(MediaFile("image", *reference_of(each, f"{where} frame {i}")) for i, each in enumerate(value["frames"]))
    rate: Any = value.get("fps")
    times: Any = value.get("times")
    if (rate is None) == (times is None) or (rate is not None and not rate > 0):
        raise DataError(f"{where} has fps={rate!r} and times={times!r:.40}; give one of both, fps above 0")
    found = [number / rate for number in range(len(frames))] if times is None else [float(each) for each in times]
    if not frames or len(found) != len(frames) or found != sorted(set(found)) or found[0] < 0:
        raise DataError(
            f"{where} has {len(frames)} frames and {len(found)} times ({str(found)[:40]}); give every frame a later time than "
            f"the one before it"
        )
    return MediaFile("video", frames=frames, times=tuple(found))


def clip_of(file: MediaFile, processor: Any, where: str) -> Clip:
    """Returns the frames that a video processor takes of a video, by headers alone. Raises DataError if they cannot be read."""
    if file.frames:
        sizes = {image_size(each.path, each.content, f"{where} frame {i}") for i, each in enumerate(file.frames)}
        if len(sizes) > 1:
            raise DataError(f"{where} has frames of {len(sizes)} sizes ({str(sorted(sizes))[:60]}); give all of them one size")
        count = len(file.times)
        # so many frames with the mean distance of these
        span = (file.times[-1] - file.times[0]) * count / (count - 1) if count > 1 else 1.0
        return Clip(*sizes.pop(), file.times, span, 1.0)
    with _opened(file, where) as (container, stream):
        width, height, rate = stream.width, stream.height, float(stream.average_rate or 0)
        # some containers do not say it
        num_frames = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
    if not (rate > 0 and num_frames):
        raise DataError(f"{where}{named(file.path)} has {num_frames} frames, {rate:g} per second; give its frames with times")
    whole = Clip(width, height, tuple(range(num_frames)), num_frames, rate)
    if not processor.do_sample_frames:
        return whole
    names = [name for name in processor.valid_kwargs.__annotations__ if name not in _NOT_SAMPLED]
    with readable_file(where, file.path):
        found = processor.sample_frames(metadata=whole.metadata(), **{name: getattr(processor, name, None) for name in names})
    return Clip(width, height, tuple(int(each) for each in found), num_frames, rate)


def open_frames(file: MediaFile, clip: Clip, where: str) -> Tensor:
    """Returns the pixels of a clip's frames [n, 3, height, width], uint8. Raises DataError if they cannot be read."""
    if file.frames:
        images = [np.asarray(open_image(each.path, each.content, f"{where} frame {i}")) for i, each in enumerate(file.frames)]
    else:
        images = _decoded(file, clip.numbers, where)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def _decoded(file: MediaFile, numbers: Sequence[float], where: str) -> list[Any]:
    found: dict[float, Any] = {}
    wanted, last = {*numbers}, max(numbers)
    with _opened(file, where) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                found[number] = frame.to_ndarray(format="rgb24")
            if number >= last:
                break
    if missing := [number for number in numbers if number not in found]:
        raise DataError(f"{where}{named(file.path)} ends before its frame {missing[0]}; correct the file, or remove the row")
    return [found[number] for number in numbers]


@contextmanager
def _opened(file: MediaFile, where: str) -> Iterator[tuple[Any, Any]]:
    """Context with a video's file and the stream of its pictures."""
    try:
        import av
    except ImportError as error:
        raise DataError(
            f"{where} is the file of a video, which PyAV decodes ({error}); install it (pip install av), or give the frames with "
            f"their times"
        ) from error
    with readable_file(where, file.path), av.open(file.path if file.path is not None else io.BytesIO(file.content or b"")) as own:
        if not own.streams.video:
            raise DataError(f"{where}{named(file.path)} has no pictures; give a video, or remove the row")
        yield own, own.streams.video[0]
