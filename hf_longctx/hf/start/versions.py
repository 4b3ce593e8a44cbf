"""Versions of the libraries that the package works with."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version
from transformers import __version__

_MINIMUM = "5.17"


# its trainers' methods are known by what they did in this version
_TRL = "1.16"


def version_problems() -> list[str]:
    """What is wrong with the installed transformers."""
    if Version(__version__) < Version(_MINIMUM):
        return [f"transformers {__version__} is installed, {_MINIMUM} or newer is needed; pip install -U transformers"]
    return []


def trl_problems() -> list[str]:
    """What is wrong with the installed TRL, where one of its trainers is used."""
    installed = version("trl")
    if Version(installed).release[:2] != Version(_TRL).release:
        return [f"trl {installed} is installed, its trainers are tested with {_TRL}; pip install 'trl=={_TRL}.*'"]
    return []
