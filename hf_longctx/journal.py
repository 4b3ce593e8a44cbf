"""Journal of a run: `journal.jsonl` in its output folder, to which rank 0 appends one JSON object per line.

Trainings write it, `hf-longctx report` reads it. Nothing is ever changed or removed in the file. A run that resumes says from
which step it goes on, and the reader then leaves out the lines of steps that ran again.

Every line has `kind`, `training` and `step`:

    start    a training begins after optimizer step `step`: versions, devices, model, settings
    step     one plan has run: seconds, bytes, tokens, layout, predicted and measured
    log      what the trainer logged: loss, learning rate, results of evaluations
    end      the training has ended, with the timeline of its last steps
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOURNAL = "journal.jsonl"

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Journal:
    """Lines of one training from its first step to the last, with those of earlier processes that it goes on from.

    num_unreadable: lines that are none of a journal, for example one that a kill cut off or that an editor changed.
    """

    lines: tuple[Line, ...]
    num_unreadable: int = 0

    def of(self, kind: str) -> list[Line]:
        """All lines of one kind, in the order in which they were written."""
        return [line for line in self.lines if line["kind"] == kind]


def append_lines(folder: Path, lines: list[Line]) -> None:
    """Appends lines to the journal in `folder`, which is made if needed; numbers that JSON lacks become null."""
    path = folder / JOURNAL
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(_plain(line), separators=(",", ":"), allow_nan=False, default=str) + "\n" for line in lines)
    with path.open("ab+") as file:
        # a kill may have cut off the last line, which must not swallow the next one
        if file.tell() and not _ends_a_line(file):
            text = f"\n{text}"
        file.write(text.encode())


def read_journal(folder: Path, is_full: bool = False) -> Journal:
    """Reads the journal in `folder`, without steps that a resumed training ran again, and without earlier trainings.

    is_full: lines are also unreadable if they lack a value that a report needs, not only if one is of a wrong kind.
    Raises FileNotFoundError if there is none, and ValueError if it has no line of a training.
    """
    kept: list[Line] = []
    num_unreadable = 0
    for text in (folder / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines():
        if not text.strip():
            continue
        line = _parsed(text, is_full)
        if line is None:
            num_unreadable += 1
            continue
        if line["kind"] == "start":
            kept = _before(kept, line)
        kept.append(line)
    if not any(line["kind"] == "start" for line in kept):
        raise ValueError(f"{folder / JOURNAL} has no line that begins a training; give the output_dir of one")
    return Journal(tuple(kept), num_unreadable)


def _before(lines: list[Line], start: Line) -> list[Line]:
    """Lines that belong to the training which begins with `start`: its own evaluations, or what it goes on from."""
    own, step = start["training"], start["step"]
    if not step:
        return [line for line in lines if line["training"] == own]
    return [line for line in lines if line["training"] != own and line["step"] <= step]


def _parsed(text: str, is_full: bool) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(line, dict) and isinstance(logs := line.get("logs"), dict):
        # no chart shows these: a loss that is not finite is null, and callbacks log what they like
        line["logs"] = {name: value for name, value in logs.items() if isinstance(value, str | list | dict) or _is_number(value)}
    if not _fits(line, {"kind": str, "training": str, "step": _is_count}, True):
        return None
    return line if _fits(line, _SHAPES.get(line["kind"], {}), is_full) else None


def _is_number(value: Any) -> bool:
    """Whether it is a number that sums and products of a report stay finite with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _is_count(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_time(value: Any) -> bool:
    """Whether it is a number of seconds since 1970, before the year 5138."""
    return _is_number(value) and 0 <= value < 1e11


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


_BYTES = dict.fromkeys(("device_peak", "saved", "kv_book", "host"), _is_number)
_EVENT = (_is_count, str, str, _is_number, _is_number, str)
# Shapes of lines, by kind. A value has a type or a test. A list has the shape of its items, and a tuple stands for a list with a
# shape for each item. An object has shapes by name (with "?": may be missing or null), or one for all texts or whole numbers.
_SHAPES: dict[str, Any] = {
    "start": {
        **{"time": _is_time, "opening": str, "versions": {str: str}, "arguments": {str: object}},
        **{"settings": {str: object}, "changed": [str]},
        "machine": {"ranks": _is_positive, "device": str, "device_type": str, "device_bytes": _is_number, "command": [str]},
        "model": {"class": str, "precision": str, "parameters": _is_number},
    },
    "step": {
        **{"loss?": _is_number, "measured_s": _is_positive, "predicted_s?": _is_positive, "tokens": _is_number},
        **{"operations": _is_number, "padding_share": _is_share, "layout": str, "group_tokens": {int: _is_number}},
        **{"lengths": {int: _is_number}, "sequences?": [_is_positive], "solve_s": _is_number, "seconds": {str: _is_number}},
        **{"bytes": _BYTES, "predicted_bytes": _BYTES, "idle_share?": _is_number, "predicted_idle?": _is_number},
        "rank_seconds?": dict.fromkeys(("compute", "exchange", "idle", "copies"), _is_number),
        **{"labels?": _is_number, "wall_s?": _is_number, "plan_wait_s?": _is_number},
    },
    "log": {"logs": {str: _is_number}},
    "end": {"timeline": {"steps": [_is_count], "panels": {str: [_EVENT]}}},
}


def _fits(value: Any, shape: Any, is_full: bool) -> bool:
    """Whether a value has a shape of `_SHAPES`; is_full: with everything that may not be missing."""
    if isinstance(shape, type):
        return isinstance(value, shape)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(_fits, value, shape, [is_full] * len(shape)))
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(each, shape[0], is_full) for each in value)
    if not isinstance(shape, dict):
        return bool(shape(value))
    return isinstance(value, dict) and all(_has(value, name, own, is_full) for name, own in shape.items())


def _has(value: dict[str, Any], name: Any, shape: Any, is_full: bool) -> bool:
    if name is str or name is int:
        return all((name is str or _is_whole(key)) and _fits(each, shape, is_full) for key, each in value.items())
    key = name.removesuffix("?")
    if key not in value or (value[key] is None and key != name):
        return key != name or not is_full
    return _fits(value[key], shape, is_full)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20


def _plain(value: Any) -> Any:
    """The value with null in place of numbers that are not finite, and text in place of keys that are none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")
