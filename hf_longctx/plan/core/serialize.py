"""Writes plans as JSON and reads them back, with a schema version and a digest. Readers refuse unknown fields and versions.

Plans are sent between ranks and stored by the command line in this form. To keep hand-written plans short, actions are one
blank-separated string ("0F0 0F1 0B1 0B0"), and spans are [sequence, start, stop] triples. Everything else is an object with the
field names of `plan/core/types.py`, except for those in `_KEYS`; fields with their default may be omitted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, TypeVar

from hf_longctx.plan.core.messages import shortened, shown
from hf_longctx.plan.core.types import (
    ACTION_KINDS,
    METHODS,
    PARAMETERS,
    TENSOR_CLASSES,
    Action,
    ActivationPolicy,
    Blocks,
    Chunk,
    Estimate,
    LayerPolicy,
    LayerRange,
    MicroBatch,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
    TensorShare,
    TowerRun,
    TowerWork,
)

SCHEMA_VERSION = 1

Row = TypeVar("Row", TowerWork, TowerRun)

# largest integer: exact in floating point, and more than any plan's tokens, ranks or bytes
_MOST = 2**53
# largest float, for seconds and shares, so that sums stay finite
_MOST_NUMBER = 1e15

# field -> type of the items in its tuple; other fields hold plain numbers or strings
_CHILDREN: dict[type, dict[str, type]] = {
    StepPlan: {"micro_batches": MicroBatch},
    MicroBatch: {"groups": SequenceGroup},
    SequenceGroup: {"chunks": Chunk, "stages": StagePlan},
    StagePlan: {"layer_ranges": LayerRange, "activations": ActivationPolicy},
    ActivationPolicy: {"layers": LayerPolicy},
    LayerPolicy: {"shares": TensorShare},
}

_CHOICES: dict[tuple[type, str], tuple[str, ...]] = {
    (StepPlan, "parameters"): PARAMETERS,
    (SequenceGroup, "method"): METHODS,
    (TensorShare, "tensor_class"): TENSOR_CLASSES,
    (Action, "kind"): ACTION_KINDS,
}


# field -> its key in JSON if that is another word
_KEYS = {"layer_range": "part", "layer_ranges": "parts"}


def plan_to_json(plan: StepPlan, indent: int | None = None) -> str:
    """Returns the plan as JSON text; equal plans give equal text."""
    return json.dumps({"schema": SCHEMA_VERSION, **_encode(plan)}, indent=indent, sort_keys=True)


def plan_from_json(text: str) -> StepPlan:
    """Reads a plan from JSON `text`.

    Raises ValueError for another schema version, an unknown or missing field, or a value of the wrong kind or beyond any plan's
    size. The result is well-formed but not validated: call `validate_plan` on it.
    """
    data = parse_json(text, "a plan")
    if not isinstance(data, dict) or type(data.get("schema")) is not int or data["schema"] != SCHEMA_VERSION:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"plan schema {shown(found)} cannot be read; this version reads schema {SCHEMA_VERSION}")
    del data["schema"]
    try:
        plan = _decode(StepPlan, data, "plan")
    except ValueError as error:
        raise ValueError(shortened(str(error))) from None
    assert isinstance(plan, StepPlan)
    return plan


def parse_json(text: str, what: str) -> Any:
    """Parses JSON `text`, called `what` in errors; raises ValueError for invalid or too deeply nested text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply; give fewer lists and objects inside each other") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of a JSON object's fields, as `object_pairs_hook` of `json.loads`; raises ValueError for a field twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice; leave one of them out")
    return found


def plan_digest(plan: StepPlan) -> str:
    """Returns a hash of the plan without its estimate, as 16 hexadecimal digits; all ranks of a run compare it."""
    identity = dataclasses.replace(plan, estimate=Estimate())
    return hashlib.sha256(plan_to_json(identity).encode()).hexdigest()[:16]


def _encode(value: Any) -> Any:
    if isinstance(value, Span):
        return [value.sequence, value.start, value.stop]
    if isinstance(value, tuple) and value and all(isinstance(item, Action) for item in value):
        return " ".join(map(str, value))
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {
            _key(field.name): _encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        }
    return value


def _decode(kind: type, data: Any, path: str) -> Any:
    if kind is Span:
        return _decode_span(data, path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected an object with the fields of {kind.__name__}, found {shown(data)}")
    fields = {_key(field.name): field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(data) - set(fields)):
        raise ValueError(f"{path}: unknown field {shown(unknown[0])} of {kind.__name__}; known are {', '.join(fields)}")
    values = {fields[key].name: _decode_field(kind, fields[key].name, data[key], f"{path}.{key}") for key in data}
    missing = [key for key, field in fields.items() if key not in data and field.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{path}: field {missing[0]!r} of {kind.__name__} is missing")
    return kind(**values)


def _key(name: str) -> str:
    return _KEYS.get(name, name)


def _decode_field(kind: type, name: str, value: Any, path: str) -> Any:
    if kind is StagePlan and name == "actions":
        if not isinstance(value, str) and value != []:
            raise ValueError(f"{path}: expected actions in one string, for example '0F0 0B0', found {shown(value)}")
        try:
            return tuple(Action.parse(word) for word in value.split()) if value else ()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if kind is Chunk and name == "spans":
        return tuple(_decode_span(item, f"{path}[{i}]") for i, item in enumerate(_items(value, path)))
    if kind is StepPlan and name == "estimate":
        return _decode(Estimate, value, path)
    if (child := _CHILDREN.get(kind, {}).get(name)) is not None:
        return tuple(_decode(child, item, f"{path}[{i}]") for i, item in enumerate(_items(value, path)))
    if (choices := _CHOICES.get((kind, name))) is not None and value not in choices:
        raise ValueError(f"{path}: {shown(value)} is not one of {', '.join(choices)}")
    return _decode_plain(kind, name, value, path)


def _decode_plain(kind: type, name: str, value: Any, path: str) -> Any:
    """Decodes a number, a string, a list of integers or a list of such lists, checked against the field's annotation."""
    annotation = str(kind.__annotations__[name])
    if annotation == "int":
        return _integer(value, path)
    if annotation == "float":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path}: expected a number, found {shown(value)}")
        if not abs(value) <= _MOST_NUMBER:
            raise ValueError(f"{path}: {shown(value)} is not a number that a plan can have")
        return float(value)
    if annotation.startswith("tuple[int"):
        return _integers(value, path)
    if annotation.startswith("tuple[tuple[int"):
        return tuple(_integers(item, f"{path}[{i}]") for i, item in enumerate(_items(value, path)))
    if annotation == "tuple[Blocks, ...]":
        return tuple(_decode_blocks(item, f"{path}[{i}]") for i, item in enumerate(_items(value, path)))
    if annotation == "tuple[Media, ...]":
        return tuple(_decode_rows(TowerWork, item, f"{path}[{i}]") for i, item in enumerate(_items(value, path)))
    if annotation == "tuple[TowerRun, ...]":
        return _decode_rows(TowerRun, value, path)
    if not isinstance(value, str):
        raise ValueError(f"{path}: expected a string, found {shown(value)}")
    return value


def _decode_blocks(data: Any, path: str) -> Blocks:
    found = [_integers(item, f"{path}[{i}]") for i, item in enumerate(_items(data, path))]
    if wrong := [each for each in found if len(each) != 2]:
        raise ValueError(f"{path}: expected [begin, end], found {shown(list(wrong[0]))}")
    return tuple((begin, end) for begin, end in found)


def _decode_rows(kind: type[Row], data: Any, path: str) -> tuple[Row, ...]:
    """Decodes lists of as many integers as a `NamedTuple` has fields."""
    found = [_integers(item, f"{path}[{i}]") for i, item in enumerate(_items(data, path))]
    names = kind._fields
    if wrong := [each for each in found if len(each) != len(names)]:
        raise ValueError(f"{path}: expected [{', '.join(names)}], found {shown(list(wrong[0]))}")
    return tuple(kind(*each) for each in found)


def _decode_span(data: Any, path: str) -> Span:
    items = _items(data, path)
    if len(items) != 3:
        raise ValueError(f"{path}: expected [sequence, start, stop], found {shown(data)}")
    return Span(*(_integer(item, path) for item in items))


def _items(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{path}: expected a list, found {shown(value)}")
    return value


def _integers(value: Any, path: str) -> tuple[int, ...]:
    return tuple(_integer(item, f"{path}[{i}]") for i, item in enumerate(_items(value, path)))


def _integer(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{path}: expected an integer, found {shown(value)}")
    if abs(value) > _MOST:
        raise ValueError(f"{path}: {shown(value)} is larger than any number of tokens, ranks or bytes in a plan")
    return value
