"""A function of a package that may be installed, which is used only if it proves correct."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any


@dataclass
class PackageFunction:
    """A function that a package has if it is installed."""

    # name of the distribution, for messages
    package: str
    # module that defines the function
    module: str
    name: str
    # keyword arguments that the function must take
    arguments: tuple[str, ...]
    # device type on which it runs
    device_type: str = "cuda"

    @property
    def is_installed(self) -> bool:
        """Whether the package is found, without importing it."""
        try:
            return importlib.util.find_spec(self.module.partition(".")[0]) is not None
        except ValueError:
            # a module that was made by hand
            return True

    @property
    def label(self) -> str:
        """Name of the function, and name and version of its package."""
        versions = [each.version for each in importlib.metadata.distributions(name=self.package)]
        return f"{self.name} of {self.package} {versions[0] if versions else '(version unknown)'}"

    @property
    def keywords(self) -> tuple[str, ...]:
        """Names of all keyword arguments with which it is called."""
        return self.arguments

    @cached_property
    def function(self) -> Callable[..., Any]:
        """Imports the function. Raises ImportError or AttributeError if missing, TypeError if it lacks arguments."""
        found: Callable[..., Any] = getattr(import_module(self.module), self.name)
        known = inspect.signature(found).parameters
        if missing := [name for name in self.keywords if name not in known]:
            # further keywords may be taken and ignored
            raise TypeError(f"it has no argument {' and '.join(missing)}")
        return found

    def problem_in(self, check: Callable[[], str]) -> str:
        """Describes why the function is not used: what `check` says or raises, or that it is missing; empty if it is right."""
        if not self.is_installed:
            return f"{self.package} is not installed"
        try:
            return check()
        # the package is not used, whatever its function raises
        except Exception as problem:
            return f"its check failed with {type(problem).__name__}: {problem}"
