"""Ends a refused script with one message for all ranks, without tracebacks, and last if the launcher allows it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hf_longctx.plan.core.messages import on_screen

# seconds for which other ranks wait for rank 0's message, until the launcher ends them
_GRACE_S = 15.0
# seconds of that wait without a launcher, after which a rank that was refused alone prints its own message
_ALONE_S = 2.0
# torchrun and accelerate print the file inside a frame as wide as its longest line
_COLUMNS = 110


class RefusedRun(ValueError):
    """Raised for settings, models and data that cannot be trained; with the same message on every rank, except for data."""

    @classmethod
    def of(cls, lines: Iterable[str], headline: str = "this run cannot start") -> RefusedRun:
        """Makes the refusal for a list of problems, a line each."""
        return cls(f"{headline}:\n" + "\n".join(f"- {line}" for line in lines))


# errors that libraries raise unintentionally, without a remedy
_UNMEANT = (AttributeError, KeyError, StopIteration, NotImplementedError)


@contextmanager
def naming_errors(name: str) -> Iterator[None]:
    """Context around other packages' code that makes `name`; explains errors that were not raised on purpose.

    Errors in a user's own code stay unchanged.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # torch raises AttributeError for every missing attribute of a module
        is_meant = "raise " in (frames[-1].line or "") and not isinstance(error, _UNMEANT)
        is_meant = is_meant or "unexpected keyword argument" in str(error)
        if is_meant or not all(map(_is_of_library, frames)):
            raise
        where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
        raise ValueError(
            f"{name} cannot be made of this model, these sets and arguments: {type(error).__name__} in {where}: {error}; the "
            f"traceback above says which of them it had in hand, so try stock code with them first"
        ) from error


@contextmanager
def refusals_last() -> Iterator[None]:
    """Context for a training script, in which a refusal ends the process with only its message.

    Refusals are errors of this package about settings, models and data that cannot be trained, and `SystemExit` with a text.
    The message comes from the first rank of a machine, or from another one that remains after a wait. Under torchrun or
    accelerate the launcher prints it, at the end of the run; otherwise that rank prints it on standard error, and others too
    unless all ranks have the same message. Other errors keep their tracebacks.

        with hf_longctx.refusals_last():
            main()
    """
    try:
        yield
    except RefusedRun as error:
        # a subclass is about data, which perhaps only one rank has read
        _end(str(error), is_shared=type(error) is RefusedRun)
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        _end(error.code, is_shared=False)


def _is_of_library(frame: traceback.FrameSummary) -> bool:
    paths = sysconfig.get_paths()
    places = [paths["stdlib"], paths["purelib"], *(f"{os.sep}{name}{os.sep}" for name in ("hf_longctx", "trl"))]
    return any(place in frame.filename for place in places)


def _end(message: str, is_shared: bool) -> NoReturn:
    """Ends this process with status 1, so that only one rank of the machine shows the message."""
    file, is_first = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("LOCAL_RANK", "0") == "0"
    sys.stdout.flush()
    if not is_first and not (is_shared and file is None):
        # meanwhile the first rank ends, and then the launcher ends this one; if not, only this rank has the message
        time.sleep(_ALONE_S if file is None else _GRACE_S)
    if file is None:
        if is_first or not is_shared:
            print(on_screen(message, sys.stderr), file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    record = {"message": {"message": _wrapped(message), "extraInfo": {"timestamp": str(int(time.time()))}}}
    Path(file).write_text(json.dumps(record))
    raise SystemExit(1) from None


def _wrapped(message: str) -> str:
    columns = min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns)
    wrap = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for line in message.split("\n") for part in wrap.wrap(line) or [""])
