"""Writes values as JSON and reads them back without running code.

Numbers, texts, lists, booleans and None stand for themselves. Everything else is an object with a tag: {"tuple": [...]},
{"dict": [[key, value], ...]}, {"bytes": "00ff"}, for a tensor {"dtype", "shape", "values"}, and for an array or a number of numpy
{"numpy": [dtype, shape, values], "is_scalar"}.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# containers: tag -> their class
_LISTED: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPED: dict[str, type[dict[Any, Any]]] = {"OrderedDict": OrderedDict, "Counter": Counter, "dict": dict}
# other values: tag -> their class, what stands for one, and how it is made of that
_OBJECTS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch.dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda name: dtype_of(name)),
    "torch.device": (torch.device, str, torch.device),
    "torch.Size": (torch.Size, list, torch.Size),
    "complex": (complex, lambda value: [value.real, value.imag], lambda numbers: complex(*numbers)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
}


class Unwritable(ValueError):
    """A value that JSON cannot stand for. Its text is the value's name and class."""


def unwritable(value: Any, name: str) -> Any:
    """Raises `Unwritable` for this value."""
    raise Unwritable(f"{name} is a {class_name(value)}")


def class_name(value: Any) -> str:
    """Full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def tensor_json(value: Tensor, name: str = "") -> dict[str, Any]:
    """A tensor with all its values, in host memory."""
    found = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return {**found, "values": [to_json(each, name) for each in value.flatten().tolist()]}


def to_json(
    value: Any,
    name: str,
    tensor: Callable[[Tensor, str], Any] = tensor_json,
    unknown: Callable[[Any, str], Any] = unwritable,
) -> Any:
    """Returns what stands for a value in JSON.

    name: of the value, to which keys and places of inner values are added. tensor, unknown: what stands for a tensor, and for a
    value that JSON lacks, given the value and its name.
    """
    if isinstance(value, Tensor):
        return tensor(value, name)
    if value is None or type(value) in (bool, int, float, str):
        return value
    for tag, (own_class, write, _) in _OBJECTS.items():
        if isinstance(value, own_class):
            return {tag: write(value)}
    if isinstance(value, np.ndarray | np.generic):
        values = [to_json(each, name, tensor, unknown) for each in value.flatten().tolist()]
        return {"numpy": [value.dtype.str, list(value.shape), values], "is_scalar": isinstance(value, np.generic)}
    if isinstance(value, bool | int | float | str):
        return value
    for tag, own_class in _MAPPED.items():
        if isinstance(value, own_class):
            pairs = [
                [to_json(key, f"a key of {name}", unknown=unknown), to_json(each, f"{name}/{key}", tensor, unknown)]
                for key, each in value.items()
            ]
            return {tag: pairs}
    if isinstance(value, list | tuple | set | frozenset):
        listed = [to_json(each, f"{name}/{place}", tensor, unknown) for place, each in enumerate(value)]
        tag = next((tag for tag, kind in _LISTED.items() if isinstance(value, kind)), "")
        return {tag: listed} if tag else listed
    return unknown(value, name)


def from_json(found: Any, other: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Returns the value for which `found` stands. other: reads objects with a tag that is not known here.

    Raises LookupError, TypeError, ValueError or RuntimeError for anything that `to_json` does not write.
    """
    if isinstance(found, list):
        return [from_json(each, other) for each in found]
    if not isinstance(found, dict):
        return found
    if "values" in found:
        return torch.tensor(from_json(found["values"]), dtype=dtype_of(found["dtype"])).reshape(found["shape"])
    if "numpy" in found:
        dtype, shape, values = found["numpy"]
        array = np.array(from_json(values), dtype=np.dtype(dtype)).reshape(shape)
        return array[()] if found["is_scalar"] else array
    for tag, kind in _LISTED.items():
        if tag in found:
            return kind(from_json(each, other) for each in found[tag])
    for tag, kind in _MAPPED.items():
        if tag in found:
            return kind({from_json(key, other): from_json(each, other) for key, each in found[tag]})
    for tag, (_, _, read) in _OBJECTS.items():
        if tag in found:
            return read(found[tag])
    if other is None:
        raise ValueError(f"no value, but an object with the tags {', '.join(map(repr, found))}")
    return other(found)


def first_difference(found: Any, expected: Any, name: str) -> str:
    """Name of the first value of `expected`, at any level, in whose place `found` has another value or type; else empty.

    name: of `expected` itself, not empty.
    """
    if type(found) is not type(expected):
        return name
    if isinstance(expected, dict):
        if first_difference(list(found), list(expected), name):
            return name
        inner = ((found[key], each, f"{name}/{key}") for key, each in expected.items())
        return next((lost for each in inner if (lost := first_difference(*each))), "")
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return name
        listed = ((own, each, f"{name}/{place}") for place, (own, each) in enumerate(zip(found, expected, strict=True)))
        return next((lost for each in listed if (lost := first_difference(*each))), "")
    if isinstance(expected, set | frozenset):
        return "" if {(type(each), each) for each in found} == {(type(each), each) for each in expected} else name
    if isinstance(expected, Tensor):
        return "" if _is_same_tensor(found, expected) else name
    if isinstance(expected, np.ndarray | np.generic):
        return "" if found.dtype == expected.dtype and found.shape == expected.shape and repr(found) == repr(expected) else name
    # text of a float, since a value that is not a number differs from itself
    is_same = repr(found) == repr(expected) if isinstance(expected, float | complex) else found == expected
    return "" if is_same else name


def _is_same_tensor(found: Tensor, expected: Tensor) -> bool:
    kinds = [(each.dtype, each.shape, each.device, each.layout, each.requires_grad) for each in (found, expected)]
    return kinds[0] == kinds[1] and bool(((found == expected) | ((found != found) & (expected != expected))).all())


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of this name; raises TypeError if it is none."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found
