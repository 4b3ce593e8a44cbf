"""Finds the images and videos of a conversation: in parts of its messages, or in columns beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_longctx.families.family import MediumKind
from hf_longctx.hf.data.chat import DataError, Message
from hf_longctx.hf.data.fields import IMAGE_COLUMNS, VIDEO_COLUMNS
from hf_longctx.hf.data.media.images import MediaFile, reference_of
from hf_longctx.hf.data.media.videos import video_of

_COLUMNS: dict[MediumKind, tuple[str, ...]] = {"image": IMAGE_COLUMNS, "video": VIDEO_COLUMNS}
# keys by which a part gives its own image or video
_OWN = ("image", "video", "path", "url", "bytes")


def media_of_row(row: dict[str, Any], where: str) -> dict[MediumKind, list[Any]]:
    """Takes the columns of images and videos out of a row, and returns them in order; a column holds one or a list."""
    return {kind: _column(row, kind, names, where) for kind, names in _COLUMNS.items()}


def _column(row: dict[str, Any], kind: MediumKind, names: Sequence[str], where: str) -> list[Any]:
    found = [(name, value) for name in names if (value := row.pop(name, None)) is not None]
    filled = [(name, list(value) if isinstance(value, list | tuple) else [value]) for name, value in found]
    filled = [(name, value) for name, value in filled if value]
    if len(filled) > 1:
        raise DataError(f"{where} has {kind}s in both columns {' and '.join(name for name, _ in filled)}; keep one of them")
    return filled[0][1] if filled else []


def file_of(kind: MediumKind, value: Any, where: str) -> MediaFile:
    """Returns the image or video that a row gives by a value. Raises DataError for other values."""
    return MediaFile("image", *reference_of(value, where)) if kind == "image" else video_of(value, where)


def place_media(
    messages: list[Message], given: Mapping[MediumKind, Sequence[Any]], placeholders: Mapping[MediumKind, str], where: str
) -> tuple[list[Message], list[MediaFile]]:
    """Returns messages with plain parts {type: image} and {type: video}, and the file of each, those of a kind in order.

    given: those of the row's columns, which belong to the parts without a file of their own. Without such parts they stand
    before the first text of a user, as TRL places them, unless texts have as many placeholders. placeholders: of the kinds that
    the processor reads. Raises DataError unless all have a place.
    """
    waiting = {kind: list(enumerate(values)) for kind, values in given.items()}
    found: dict[MediumKind, list[MediaFile]] = {"image": [], "video": []}
    if others := [kind for kind, values in given.items() if values and kind not in placeholders]:
        raise DataError(f"{where} has a column with a {others[0]}, which the processor does not read; remove the row")
    placed = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                kind: MediumKind = part.get("type")
                if kind not in found:
                    parts.append(part)
                    continue
                if kind not in placeholders:
                    raise DataError(f"{where} message {number} has a {kind}, which the processor does not read; remove the row")
                found[kind].append(_file(kind, part, waiting[kind], f"{where} message {number}"))
                parts.append({"type": kind})
            message = message | {"content": parts}
        placed.append(message)
    lone: list[MediumKind] = []
    for kind, placeholder in placeholders.items():
        left = waiting[kind]
        if left and found[kind]:
            raise DataError(
                f"{where} has {len(given[kind])} {kind}s in its columns, but {len(given[kind]) - len(left)} parts "
                f"{{type: {kind}}} for them; give as many parts as {kind}s"
            )
        found[kind] += [file_of(kind, value, f"{where} {kind} {number}") for number, value in left]
        if left and sum(_num_placeholders(message, placeholder) for message in placed) != len(left):
            lone += [kind] * len(left)
    return _before_first_user(placed, lone, where) if lone else placed, [*found["image"], *found["video"]]


def _file(kind: MediumKind, part: Message, waiting: list[tuple[int, Any]], where: str) -> MediaFile:
    own = [part] if part.get("frames") is not None else [part[name] for name in _OWN if part.get(name) is not None]
    if own:
        return file_of(kind, own[0], f"{where} {kind}")
    if not waiting:
        raise DataError(
            f"{where} has a part {{type: {kind}}} without {'an' if kind == 'image' else 'a'} {kind}; give it as {{type: {kind}, "
            f"path: ...}}, or one more {kind} in the column '{kind}s'"
        )
    number, value = waiting.pop(0)
    return file_of(kind, value, f"{where}: {kind} {number} of the row")


def _num_placeholders(message: Message, placeholder: str) -> int:
    content = message.get("content")
    texts = [part.get("text", "") for part in content] if isinstance(content, list) else [content or ""]
    return sum(str(text).count(placeholder) for text in texts)


def _before_first_user(messages: list[Message], kinds: Sequence[MediumKind], where: str) -> list[Message]:
    """Puts images and videos before the first text of a user."""
    for number, message in enumerate(messages):
        if message["role"] == "user":
            content = message.get("content")
            texts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            own = message | {"content": [*({"type": kind} for kind in kinds), *texts]}
            return [*messages[:number], own, *messages[number + 1 :]]
    raise DataError(
        f"{where} has {len(kinds)} {kinds[0]}s and no message of a user in which they could stand; write parts "
        f"{{type: {kinds[0]}}}"
    )
