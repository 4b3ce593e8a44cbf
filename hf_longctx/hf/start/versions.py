"""Versions of other packages that are known to work, and checks of those that are installed."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version
from transformers import __version__

# version of TRL whose trainers are tested; in later versions, methods of the same names may do other things
_TRL = "1.16"
# package -> first and last version that is known to work; newer ones may work too, of which `hooks.py` knows what is missing
_KNOWN = {
    "accelerate": ("1.15", "1.15"),
    "datasets": ("4.0", "5.2"),
    "flash_attn": ("2.8", "2.8"),
    "peft": ("0.21", "0.21"),
    "torch": ("2.11", "2.13"),
    "torchao": ("0.18", "0.18"),
    "transformers": ("5.17", "5.24"),
    "trl": (_TRL, _TRL),
}


def version_problems() -> list[str]:
    """Problems with the installed version of transformers."""
    least, _ = _KNOWN["transformers"]
    if Version(__version__) < Version(least):
        return [f"transformers {__version__} is installed, {least} or newer is needed; pip install -U transformers"]
    return []


def trl_problems() -> list[str]:
    """Problems with the installed version of TRL, for runs that use one of its trainers."""
    installed = version("trl")
    if Version(installed).release[:2] != Version(_TRL).release:
        return [f"trl {installed} is installed, but its trainers are tested with {_TRL}; pip install 'trl=={_TRL}.*'"]
    return []


def known_version(package: str) -> str:
    """How to get a version of `package` that is known to work, and which one is installed."""
    least, most = _KNOWN[package]
    major, minor = Version(most).release[:2]
    installed = __version__ if package == "transformers" else version(package)
    return f"pip install '{package}>={least},<{major}.{minor + 1}' ({installed} is installed)"
