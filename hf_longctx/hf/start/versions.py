"""Checks of the versions of transformers and TRL."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version
from transformers import __version__

_MINIMUM = "5.17"


# version of TRL whose trainers are tested; in later versions, methods of the same names may do other things
_TRL = "1.16"


def version_problems() -> list[str]:
    """Problems with the installed version of transformers."""
    if Version(__version__) < Version(_MINIMUM):
        return [f"transformers {__version__} is installed, {_MINIMUM} or newer is needed; pip install -U transformers"]
    return []


def trl_problems() -> list[str]:
    """Problems with the installed version of TRL, for runs that use one of its trainers."""
    installed = version("trl")
    if Version(installed).release[:2] != Version(_TRL).release:
        return [f"trl {installed} is installed, but its trainers are tested with {_TRL}; pip install 'trl=={_TRL}.*'"]
    return []
