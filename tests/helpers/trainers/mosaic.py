"""mosaicml-streaming, whose image datasets import torchvision, which in turn needs a torch of the same build."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from transformers.utils import is_torchvision_available

# modules of torchvision, and the names that mosaicml-streaming imports from them
_NAMES = {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset", "CIFAR10"),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
}


def mosaic() -> Any:
    """The module `streaming`; skips the test where it is not installed. Empty classes stand in for those of torchvision."""
    if importlib.util.find_spec("streaming") is None:
        pytest.skip("needs mosaicml-streaming")
    # asked first, since transformers keeps the answer
    if is_torchvision_available():
        return pytest.importorskip("streaming", exc_type=ImportError)
    with pytest.MonkeyPatch.context() as patch:
        for name, inside in _NAMES.items():
            module = ModuleType(name)
            module.__path__, module.__spec__ = [], ModuleSpec(name, None)
            for each in inside:
                setattr(module, each, type(each, (), {}))
            patch.setitem(sys.modules, name, module)
        return pytest.importorskip("streaming", exc_type=ImportError)
