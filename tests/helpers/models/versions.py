"""Marks and skips for what the oldest supported transformers cannot do itself, which newer ones can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import transformers
from packaging.version import Version

# the version with which docs/models.md was written, and on which nothing is skipped
NEWEST_TESTED = Version("5.24")
is_older = Version(transformers.__version__) < NEWEST_TESTED
# a later version may have further classes, which are refused as unknown
is_newer = Version(transformers.__version__).release[:2] > NEWEST_TESTED.release

# older ones restore an optimizer to "cpu:0", which torch does not know
resuming = pytest.mark.skipif(is_older, reason="this transformers cannot resume on CPU ranks")
newest = pytest.mark.skipif(is_older, reason=f"tests what transformers {NEWEST_TESTED} does")


def completed(model: Any) -> Any:
    """Mends a class whose plain forward fails in transformers 5.24, since it reads `image_outputs` that nothing gives."""
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.language_model.register_forward_hook(lambda _, __, output: vars(output).setdefault("image_outputs"))
    return model


def class_or_skip(name: str) -> Any:
    """A class of transformers; for one that lacks it, a function that raises what `skipping_unbuildable` takes for a skip."""

    def absent(*_: Any, **__: Any) -> Any:
        raise AttributeError(f"transformers {transformers.__version__} has no {name}")

    return getattr(transformers, name, absent)


@contextmanager
def skipping_unbuildable() -> Iterator[None]:
    """Context that skips a test whose model an older transformers fails to build from a config that newer ones read."""
    try:
        yield
    except (AttributeError, KeyError) as error:
        if not is_older:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot build this model: {error!r}")
