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

    num_unreadable: lines that are no JSON objects, for example one that a kill cut off.
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


def read_journal(folder: Path) -> Journal:
    """Reads the journal in `folder`, without steps that a resumed training ran again, and without earlier trainings.

    Raises FileNotFoundError if there is none, and ValueError if it has no line of a training.
    """
    kept: list[Line] = []
    num_unreadable = 0
    for text in (folder / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines():
        if not text.strip():
            continue
        line = _parsed(text)
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


def _parsed(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int) or not {"kind", "training"} <= set(line):
        return None
    return line


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
