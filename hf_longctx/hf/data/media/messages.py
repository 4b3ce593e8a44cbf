"""Finds the images of a conversation: in parts of its messages, or in a column beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_longctx.hf.data.chat import DataError, Message
from hf_longctx.hf.data.fields import IMAGE_COLUMNS
from hf_longctx.hf.data.media.images import reference_of

# keys by which a part gives its own image
_OWN = ("image", "path", "url", "bytes")

Reference = tuple[str | None, bytes | None]


def images_of_row(row: dict[str, Any], where: str) -> list[Any]:
    """Takes the columns of images out of a row, and returns their images in order; a column holds one or a list."""
    found = [(name, value) for name in IMAGE_COLUMNS if (value := row.pop(name, None)) is not None]
    filled = [(name, list(value) if isinstance(value, list | tuple) else [value]) for name, value in found]
    filled = [(name, value) for name, value in filled if value]
    if len(filled) > 1:
        raise DataError(f"{where} has images in both columns {' and '.join(name for name, _ in filled)}; keep one of them")
    return filled[0][1] if filled else []


def place_images(
    messages: list[Message], images: Sequence[Any], placeholder: str, where: str
) -> tuple[list[Message], list[Reference]]:
    """Returns the messages with plain parts {type: image}, and the reference of every image in order of its place.

    images: those of the row's columns, which belong to the parts without an image of their own. Without such parts they stand
    before the first text of a user, as TRL places them, unless texts have as many placeholders. Raises DataError unless all
    images have a place.
    """
    waiting = list(enumerate(images))
    references: list[Reference] = []
    placed, num_parts = [], 0
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                if part.get("type") != "image":
                    parts.append(part)
                    continue
                num_parts += 1
                references.append(_reference(part, waiting, f"{where} message {number}"))
                parts.append({"type": "image"})
            message = message | {"content": parts}
        placed.append(message)
    if waiting and not num_parts:
        own = [(reference_of(image, f"{where} image {number}")) for number, image in waiting]
        if sum(_num_placeholders(message, placeholder) for message in placed) == len(own):
            return placed, own
        return _before_first_user(placed, len(own), where), own
    if waiting:
        raise DataError(
            f"{where} has {len(images)} images in its columns, but {len(images) - len(waiting)} parts {{type: image}} for them; "
            f"give as many parts as images"
        )
    return placed, references


def _reference(part: Message, waiting: list[tuple[int, Any]], where: str) -> Reference:
    own = [part[name] for name in _OWN if part.get(name) is not None]
    if own:
        return reference_of(own[0], f"{where} image")
    if not waiting:
        raise DataError(
            f"{where} has a part {{type: image}} without an image; give it as {{type: image, path: ...}}, or one more image in "
            f"the column 'images'"
        )
    number, image = waiting.pop(0)
    return reference_of(image, f"{where}: image {number} of the row")


def _num_placeholders(message: Message, placeholder: str) -> int:
    content = message.get("content")
    texts = [part.get("text", "") for part in content] if isinstance(content, list) else [content or ""]
    return sum(str(text).count(placeholder) for text in texts)


def _before_first_user(messages: list[Message], count: int, where: str) -> list[Message]:
    """Puts images before the first text of a user."""
    for number, message in enumerate(messages):
        if message["role"] == "user":
            content = message.get("content")
            texts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            own = message | {"content": [*({"type": "image"} for _ in range(count)), *texts]}
            return [*messages[:number], own, *messages[number + 1 :]]
    raise DataError(f"{where} has {count} images and no message of a user in which they could stand; write parts {{type: image}}")
