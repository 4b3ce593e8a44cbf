"""Finds and opens the images of rows: files, bytes, images of `datasets` and PIL images.

A reference is a path or the content of a file. Sizes come from a file's header and its orientation, without decoding pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hf_longctx.families.family import MediumKind
from hf_longctx.hf.data.chat import DataError

Found = TypeVar("Found")

# EXIF tag of the orientation, and its values that exchange width and height
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
_FORMS = "a path, bytes, {path: ..., bytes: ...} (an image of datasets that is not decoded) or a PIL image"


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image or video of a row: the path or the content of a file or, for a video, frames and their times in seconds."""

    kind: MediumKind
    path: str | None = None
    content: bytes | None = None
    frames: tuple[MediaFile, ...] = ()
    times: tuple[float, ...] = ()

    @classmethod
    def of(cls, kind: MediumKind, item: Mapping[str, Any]) -> MediaFile:
        """Reads an item of the column `media_files`."""
        frames = tuple(cls("image", each.get("path"), each.get("bytes")) for each in item.get("frames") or ())
        return cls(kind, item.get("path"), item.get("bytes"), frames, tuple(item.get("times") or ()))

    def as_item(self) -> dict[str, Any]:
        """Returns the item of the column `media_files`."""
        frames = [{"path": each.path, "bytes": each.content} for each in self.frames]
        return {"path": self.path, "bytes": self.content, "frames": frames, "times": list(self.times)}


def reference_of(value: Any, where: str, forms: str = _FORMS) -> tuple[str | None, bytes | None]:
    """Returns the path and the content of an image in a row, one of which is None. where: name of the image in messages.

    forms: values that may stand there.

    A PIL image becomes a PNG file, which loses nothing. Raises DataError for an address of the web and for other values.
    """
    if isinstance(value, str | Path):
        path = str(value)
        if "://" in path or path.startswith("data:"):
            raise DataError(
                f"{where} is the address {path!r:.60}, and loaders read files alone; download the images, and give their paths"
            )
        return path, None
    if isinstance(value, bytes):
        return None, value
    if isinstance(value, dict) and (value.get("bytes") is not None or value.get("path") is not None):
        # a path beside bytes is only the name that the file had
        return (None, value["bytes"]) if value.get("bytes") is not None else reference_of(value["path"], where, forms)
    if hasattr(value, "save") and hasattr(value, "size"):
        file = io.BytesIO()
        value.save(file, "PNG")
        return None, file.getvalue()
    raise DataError(f"{where} is {value!r:.60} ({type(value).__name__}), expected {forms}")


def image_size(path: str | None, content: bytes | None, where: str) -> tuple[int, int]:
    """Returns width and height of an image as it is shown, from its file's header. Raises DataError if it cannot be read."""

    def read(image: Any) -> tuple[int, int]:
        width, height = image.size
        return (height, width) if image.getexif().get(_ORIENTATION) in _TURNED else (width, height)

    return _opened(path, content, where, read)


def open_image(path: str | None, content: bytes | None, where: str) -> Any:
    """Returns the pixels of an image as it is shown, in RGB, as a PIL image. Raises DataError if it cannot be read."""
    from PIL import ImageOps

    return _opened(path, content, where, lambda image: ImageOps.exif_transpose(image).convert("RGB"))


def _opened(path: str | None, content: bytes | None, where: str, read: Callable[[Any], Found]) -> Found:
    with readable(where, path), _file(path, content) as file:
        from PIL import Image as images

        with images.open(file) as image:
            num_frames = getattr(image, "n_frames", 1)
            if num_frames != 1:
                raise DataError(f"{where}{named(path)} has {num_frames} frames; give one image, or its frames one by one")
            return read(image)


@contextmanager
def _file(path: str | None, content: bytes | None) -> Iterator[Any]:
    if path is None:
        yield io.BytesIO(content or b"")
        return
    with Path(path).open("rb") as file:
        yield file


@contextmanager
def readable(where: str, path: str | None) -> Iterator[None]:
    """Context that raises DataError for files that are missing, damaged or of another kind."""
    try:
        yield
    except DataError:
        raise
    except ImportError as error:
        raise DataError(f"{where} is an image, which needs pillow ({error}); install it (pip install pillow)") from error
    # decoders raise errors of many classes for damaged files
    except Exception as error:
        raise DataError(
            f"{where}{named(path)} cannot be read ({type(error).__name__}: {str(error)[:200]}); correct the file, or remove "
            f"the row"
        ) from error


def named(path: str | None) -> str:
    """Returns the path of a file for messages."""
    return "" if path is None else f" ({path})"
