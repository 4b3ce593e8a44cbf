"""Ends a refused script with one message: once for all ranks, without tracebacks, and last where a launcher allows it."""

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

# seconds for which other ranks wait for rank 0's message, after which the launcher ends them
_GRACE_S = 15.0
# seconds of that wait where no launcher ends them, so that a rank that was refused alone says so itself
_ALONE_S = 2.0
# torchrun and accelerate print the file as part of a frame that is as wide as its longest line
_COLUMNS = 110


class RefusedRun(ValueError):
    """Raised for settings, models and data that cannot be trained; on every rank with the same message, unless it is data."""

    @classmethod
    def of(cls, lines: Iterable[str], headline: str = "this run cannot start") -> RefusedRun:
        """The refusal of a list of problems, a line each."""
        return cls(f"{headline}:\n" + "\n".join(f"- {line}" for line in lines))


# errors that libraries raise for code of others, without a word about what to change
_UNMEANT = (AttributeError, KeyError, StopIteration, NotImplementedError)


@contextmanager
def naming_errors(name: str) -> Iterator[None]:
    """Context of other packages' code that makes `name`: says what failed in errors that they did not raise on purpose.

    Errors in a user's own code stay as they are.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # torch raises AttributeError for every name that a module does not have
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
    """Context for a training script, under which a refusal ends the process with its message alone.

    Refusals are what this package raises for settings, models and data that cannot be trained, and `SystemExit` with a text.
    The first rank of a machine says it, or another one that is still there after a wait. Under torchrun or accelerate the
    launcher prints the message, as the last thing of the run; otherwise that rank prints it on standard error, and others too
    unless all ranks are sure to have the same message. Other errors keep their tracebacks.

        with hf_longctx.refusals_last():
            main()
    """
    try:
        yield
    except RefusedRun as error:
        # a subclass is about data, which one rank alone may have read
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
    """Ends this process with status 1; only the message of one rank of the machine remains."""
    file, is_first = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("LOCAL_RANK", "0") == "0"
    sys.stdout.flush()
    if not is_first and not (is_shared and file is None):
        # the first rank ends meanwhile, and its launcher then ends this one; if it does not, nobody else has the message
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
