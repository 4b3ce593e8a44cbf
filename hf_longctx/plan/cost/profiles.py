"""Reads and writes hardware profiles: the rates of one kind of machine as JSON, checked field by field.

A profile has the machine's rates and, if measured, cost coefficients of named models on it. The package ships the profiles in
`recipes/hardware`; others are read from a path. `hf-longctx calibrate` writes them; planner, simulator and the start of a run
read them.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_longctx.plan.core.settings import HardwareSpec
from hf_longctx.plan.cost.cost_model import CostCoefficients, PassCoefficients
from hf_longctx.plan.model.model_spec import ModelSpec

SCHEMA_VERSION = 1

_SHIPPED_PACKAGE = "hf_longctx.recipes"
_SHIPPED_FOLDER = "hardware"
# GPUs older than Ampere, as `normal_name` spells them
_WITHOUT_BF16 = re.compile("t4$|v100|p100|p40$|gtx|^2080|rtx20[678]0|quadrortx|titan")

# allowed values of a profile's field, as described in error messages
_Rule = Literal["text", "a number above 0", "a number of 0 or more", "an integer above 0", "an integer of 0 or more"]

_RULES: dict[type, dict[str, _Rule]] = {
    HardwareSpec: {
        "name": "text",
        "matmul_flops_per_s": "a number above 0",
        "attention_flops_per_s": "a number above 0",
        "device_bytes": "an integer above 0",
        "link_bytes_per_s": "a number above 0",
        "network_bytes_per_s": "a number above 0",
        "message_s": "a number of 0 or more",
        "kernel_s": "a number of 0 or more",
        "backward_matmul": "a number above 0",
        "backward_attention": "a number above 0",
        "copy_bytes_per_s": "a number above 0",
        "host_bytes": "an integer of 0 or more",
        "source": "text",
        "memory_bytes_per_s": "a number of 0 or more",
        "elementwise_bytes_per_s": "a number of 0 or more",
        "tile_keys": "an integer of 0 or more",
    },
    PassCoefficients: {field.name: "a number of 0 or more" for field in dataclasses.fields(PassCoefficients)},
    CostCoefficients: {"step_s": "a number of 0 or more", "source": "text"},
}


@dataclass(frozen=True, slots=True)
class ModelCalibration:
    """Coefficients and memory of one named model, measured on the profile's hardware."""

    model: str
    coefficients: CostCoefficients
    # bytes kept for backward, with the recomputation that the measurement used
    saved_bytes_per_token: int
    # bytes of a device for states and saved tensors
    usable_bytes: int
    # weights, gradients and optimizer states, sharded over all ranks of the job
    state_bytes_per_parameter: int = 16

    def tokens_per_rank(self, model: ModelSpec, num_ranks: int) -> int:
        """Returns the most tokens that fit on a rank besides its share of the states of `model` on `num_ranks` ranks.

        Raises ValueError if the states alone do not fit.
        """
        state_bytes = model.num_parameters * self.state_bytes_per_parameter / num_ranks
        tokens = int((self.usable_bytes - state_bytes) / self.saved_bytes_per_token)
        if tokens < 1:
            raise ValueError(
                f"the states of {self.model} take {state_bytes / 2**30:.1f} GiB on each of {num_ranks} ranks and leave no room "
                f"for tokens in {self.usable_bytes / 2**30:.1f} GiB; use more ranks"
            )
        return tokens


_RULES[ModelCalibration] = {
    "model": "text",
    "saved_bytes_per_token": "an integer above 0",
    "usable_bytes": "an integer above 0",
    "state_bytes_per_parameter": "an integer above 0",
}


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """The rates of one kind of machine, and the models measured on it."""

    # its source is empty for rates that were not measured; a run then measures its own
    spec: HardwareSpec
    models: tuple[ModelCalibration, ...] = ()
    # name of each fit, and its mean relative error
    residuals: tuple[tuple[str, float], ...] = ()
    # origin of each number, in prose
    source: str = ""
    # numbers that its tensor cores multiply, for people
    formats: str = ""

    def calibration(self, model: str) -> ModelCalibration | None:
        """Returns measurements of the model with this name (spelling as for `normal_name`), or None."""
        matching = (known for known in self.models if normal_name(known.model) == normal_name(model))
        return next(matching, None)


def normal_name(name: str) -> str:
    """Returns `name` in lower case without blanks, dashes, dots and underscores: "A100 40G" and "a100-40g" are equal."""
    return re.sub(r"[\s._-]", "", name.lower())


def profile_to_json(profile: HardwareProfile) -> str:
    """Returns the profile as JSON for `profile_from_json`; raises ValueError if that would refuse it."""
    data: dict[str, Any] = {"schema": SCHEMA_VERSION, "source": profile.source, "formats": profile.formats}
    data["hardware"] = dataclasses.asdict(profile.spec)
    data["hardware"]["exchange_bytes_per_s"] = {str(ranks): rate for ranks, rate in profile.spec.exchange_bytes_per_s}
    data["models"] = [dataclasses.asdict(model) for model in profile.models]
    data["residuals"] = dict(profile.residuals)
    text = json.dumps(data, indent=2) + "\n"
    if profile_from_json(text) != profile:
        raise ValueError("the profile has an entry of exchange_bytes_per_s or of residuals twice; keep one of each")
    return text


def profile_from_json(text: str, file: str = "profile") -> HardwareProfile:
    """Reads a profile from JSON `text`, called `file` in error messages.

    Raises ValueError with file, field, value and the allowed values for anything that is not a complete profile.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: this is not a hardware profile in JSON ({error}); hf-longctx calibrate writes one") from None
    found = data.get("schema") if isinstance(data, dict) else data
    if type(found) is not int or found != SCHEMA_VERSION:
        raise ValueError(f"{file}: schema is {found!r}; this version reads hardware profiles of schema {SCHEMA_VERSION}")
    _check_names(data, ("schema", "source", "hardware"), ("formats", "models", "residuals"), file)
    models = data.get("models", [])
    if not isinstance(models, list):
        raise ValueError(f"{file}: models is {models!r}; a list of objects is needed")
    return HardwareProfile(
        spec=_hardware(data["hardware"], f"{file}: hardware"),
        models=tuple(_calibration(model, f"{file}: models[{i}]") for i, model in enumerate(models)),
        residuals=_table(data.get("residuals", {}), "a number of 0 or more", f"{file}: residuals"),
        source=_value(data["source"], "text", f"{file}: source"),
        formats=_value(data.get("formats", ""), "text", f"{file}: formats"),
    )


def read_profile(name_or_path: str | Path) -> HardwareProfile:
    """Reads the shipped profile with this name, or the file at this path.

    Case and separators do not matter, nor do further words: "H100 SXM" and "NVIDIA H100 80GB HBM3" are "h100".

    Raises ValueError with the names of the shipped profiles if there is neither, and for devices on which bf16 is slow.
    """
    shipped = _shipped_profiles()
    name = str(name_or_path)
    for known, text in shipped.items():
        if normal_name(known) == normal_name(name):
            return profile_from_json(text, f"{known}.json")
    if not Path(name).is_file():
        words = {word.rstrip("b") for word in _words(name)}
        found = _of_device(name)
        of_size = [known for known in found if words & set(_sizes(known))] or found
        if len(of_size) == 1:
            return read_profile(of_size[0])
        if _WITHOUT_BF16.search(normal_name(name)):
            raise ValueError(
                f"hardware {name!r} has no tensor cores for bf16, in which runs multiply; use a GPU of Ampere (A100, A10G, RTX "
                f"3090) or newer, or give the path of a profile that `hf-longctx calibrate` has measured"
            )
        raise ValueError(
            f"hardware {name!r} is neither a shipped profile ({', '.join(found or shipped)}) nor the path of a profile; give one "
            f"of these"
        )
    return profile_from_json(Path(name).read_text(encoding="utf-8"), name)


def profile_of_device(name: str, device_bytes: int) -> HardwareProfile | None:
    """Returns the shipped profile for a device name from a driver ("NVIDIA H200"); None for other devices.

    It has as many words of the name as possible ("h100-pcie" before "h100"), and the memory nearest to `device_bytes`.
    """
    found = [read_profile(known) for known in _of_device(name)]
    return min(found, key=lambda profile: abs(profile.spec.device_bytes - device_bytes), default=None)


def _of_device(name: str) -> list[str]:
    """Returns the shipped profiles whose words are all in `name`, memory sizes apart; of these the ones with the most words."""
    own = {known: set(known.split("-")) - set(_sizes(known)) for known in profile_names()}
    found = {known: len(words) for known, words in own.items() if words <= _words(name)}
    return [known for known, count in found.items() if count == max(found.values())]


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _sizes(known: str) -> list[str]:
    """Returns the memory size in the name of a profile, as "80g", which a driver's name may not have."""
    return re.findall("(?<=-)[0-9]+g$", known)


def profile_names() -> tuple[str, ...]:
    """Returns the names of the shipped profiles."""
    return tuple(_shipped_profiles())


def _shipped_profiles() -> dict[str, str]:
    folder = importlib.resources.files(_SHIPPED_PACKAGE) / _SHIPPED_FOLDER
    files = {file.name.removesuffix(".json"): file for file in folder.iterdir() if file.name.endswith(".json")}
    return {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r} is given twice; keep one")
    return data


def _hardware(data: Any, path: str) -> HardwareSpec:
    values = _checked(HardwareSpec, data, path, ("exchange_bytes_per_s",))
    if "exchange_bytes_per_s" in data:
        exchange_path = f"{path}.exchange_bytes_per_s"
        rates = _table(data["exchange_bytes_per_s"], "a number above 0", exchange_path)
        values["exchange_bytes_per_s"] = tuple((_num_ranks(name, exchange_path), rate) for name, rate in rates)
    return HardwareSpec(**values)


def _calibration(data: Any, path: str) -> ModelCalibration:
    values = _checked(ModelCalibration, data, path, ("coefficients",))
    coefficients, path = data["coefficients"], f"{path}.coefficients"
    passes = ("forward", "backward")
    measured = _checked(CostCoefficients, coefficients, path, passes)
    measured |= {name: PassCoefficients(**_checked(PassCoefficients, coefficients[name], f"{path}.{name}")) for name in passes}
    return ModelCalibration(coefficients=CostCoefficients(**measured), **values)


def _checked(kind: type, data: Any, path: str, nested: tuple[str, ...] = ()) -> dict[str, Any]:
    """Checks the plain fields of `data` by their rules in `_RULES[kind]` and returns them; the caller checks `nested`."""
    if not isinstance(data, dict):
        raise ValueError(f"{path} is {data!r}; an object with the fields of {kind.__name__} is needed")
    has_default = {field.name: field.default is not dataclasses.MISSING for field in dataclasses.fields(kind)}
    required = tuple(name for name, has in has_default.items() if not has)
    _check_names(data, required, tuple(has_default), path)
    return {name: _value(data[name], rule, f"{path}.{name}") for name, rule in _RULES[kind].items() if name in data}


def _check_names(data: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...], path: str) -> None:
    known = tuple(dict.fromkeys((*required, *optional)))
    for name in data:
        if name not in known:
            raise ValueError(f"{path}: field {name!r} (value {data[name]!r}) is unknown; known are {', '.join(known)}")
    for name in required:
        if name not in data:
            raise ValueError(f"{path}: field {name!r} is missing; needed are {', '.join(required)}")


def _table(data: Any, rule: _Rule, path: str) -> tuple[tuple[str, float], ...]:
    if not isinstance(data, dict):
        raise ValueError(f"{path} is {data!r}; an object of names and numbers is needed")
    return tuple((name, _value(value, rule, f"{path}.{name}")) for name, value in data.items())


def _num_ranks(name: str, path: str) -> int:
    if not re.fullmatch("[1-9][0-9]*", name) or int(name) < 2:
        raise ValueError(f"{path}: {name!r} is not a number of ranks; an integer of 2 or more is needed")
    return int(name)


def _value(value: Any, rule: _Rule, path: str) -> Any:
    if rule == "text":
        is_allowed = isinstance(value, str)
    elif isinstance(value, bool) or not isinstance(value, int if rule.startswith("an integer") else int | float):
        is_allowed = False
    else:
        # convert to float first: JSON integers may be huge, and NaN fails every comparison
        number = float(value) if abs(value) < 1e300 else math.inf
        is_allowed = math.isfinite(number) and (number > 0 or (number == 0 and rule.endswith("0 or more")))
    if not is_allowed:
        raise ValueError(f"{path} is {value!r}; {rule} is needed")
    return float(value) if rule.startswith("a number") else value
