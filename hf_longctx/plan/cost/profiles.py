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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

from hf_longctx.plan.core.serialize import unique_keys
from hf_longctx.plan.core.settings import HardwareSpec
from hf_longctx.plan.cost.cost_model import CostCoefficients, PassCoefficients
from hf_longctx.plan.model.model_spec import ModelSpec

SCHEMA_VERSION = 1

_SHIPPED_PACKAGE = "hf_longctx.recipes"
_SHIPPED_FOLDER = "hardware"
# words in the names of GPUs older than Ampere
_WITHOUT_BF16 = {
    *("k40", "k80", "m4", "m40", "m60", "p4", "p40", "p100", "t4", "t4g", "v100", "v100s", "gtx", "quadro", "titan"),
    *("2060", "2070", "2080"),
}
# words of a device's name that make it another device than one without them
_CHANGING = {"d", "grid", "laptop", "max", "mig", "mobile", "nvl", "pcie", "q", "super", "ti"}
# places in a name where a word begins without a blank: "h100sxm", "rtx4090", "4090ti"
_GLUED = re.compile(r"(?<=\b(?:rtx|gtx))(?=\d)|(?<=\d)(?=(?:sxm\d*|pcie|nvl\d*)\b)|(?<=\d{4})(?=(?:d|ti|super|laptop)\b)")
# largest relative difference of two memory sizes of one device: drivers report up to 7 % more than its name says
_SIZE_TOLERANCE = 0.1
# larger sizes in a name are those of host memory ("GH200 480GB")
_MOST_DEVICE_GB = 400
# largest number of bytes, ranks or keys: larger ones overflow 64 bits in sums
_LARGEST_INTEGER = 10**17
# names in an error message, and how much of a known name must be alike
_NEAREST, _LIKE = 3, 0.6

# fields of `HardwareSpec` with a rate for each number of ranks
RATE_TABLES = ("exchange_bytes_per_s", "gather_bytes_per_s", "scatter_bytes_per_s")

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
        "fp8_ratio": "a number of 0 or more",
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
    # which of its rates were measured, for people; empty if none was
    measured: str = ""
    # devices of a usual node
    ranks_per_node: int = 8
    # dense bf16 FLOP/s of its data sheet, which no rate reaches, for people; 0: unknown
    peak_flops_per_s: float = 0.0

    def calibration(self, model: str) -> ModelCalibration | None:
        """Returns measurements of the model with this name (spelling as for `normal_name`), or None."""
        matching = (known for known in self.models if normal_name(known.model) == normal_name(model))
        return next(matching, None)

    def spec_on(self, ranks_per_node: int) -> HardwareSpec:
        """Returns the rates for nodes of `ranks_per_node` ranks, without gathers that were measured inside a node and now cross.

        Nor, the other way round, with those that crossed nodes and are now inside one.
        """
        gathers, scatters = (
            tuple((ranks, rate) for ranks, rate in table if (ranks <= self.ranks_per_node) == (ranks <= ranks_per_node))
            for table in (self.spec.gather_bytes_per_s, self.spec.scatter_bytes_per_s)
        )
        return dataclasses.replace(self.spec, gather_bytes_per_s=gathers, scatter_bytes_per_s=scatters)


def normal_name(name: str) -> str:
    """Returns `name` in lower case without blanks, dashes, dots and underscores: "A100 40G" and "a100-40g" are equal."""
    return re.sub(r"[\s._-]", "", name.lower())


def profile_to_json(profile: HardwareProfile) -> str:
    """Returns the profile as JSON for `profile_from_json`; raises ValueError if that would refuse it."""
    data: dict[str, Any] = {"schema": SCHEMA_VERSION, "source": profile.source, "formats": profile.formats}
    data["peak_flops_per_s"] = profile.peak_flops_per_s
    data |= {"measured": profile.measured, "ranks_per_node": profile.ranks_per_node}
    data["hardware"] = dataclasses.asdict(profile.spec)
    for name in RATE_TABLES:
        data["hardware"][name] = {str(ranks): rate for ranks, rate in getattr(profile.spec, name)}
    data["models"] = [dataclasses.asdict(model) for model in profile.models]
    data["residuals"] = dict(profile.residuals)
    text = json.dumps(data, indent=2) + "\n"
    if profile_from_json(text) != profile:
        raise ValueError(f"the profile has an entry of {', '.join(RATE_TABLES)} or residuals twice; keep one of each")
    return text


def profile_from_json(text: str, file: str = "profile") -> HardwareProfile:
    """Reads a profile from JSON `text`, called `file` in error messages.

    Raises ValueError with file, field, value and the allowed values for anything that is not a complete profile.
    """
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: this is not a hardware profile in JSON ({error}); hf-longctx calibrate writes one") from None
    found = data.get("schema") if isinstance(data, dict) else data
    if type(found) is not int or found != SCHEMA_VERSION:
        raise ValueError(f"{file}: schema is {found!r}; this version reads hardware profiles of schema {SCHEMA_VERSION}")
    optional = ("formats", "peak_flops_per_s", "measured", "ranks_per_node", "models", "residuals")
    _check_names(data, ("schema", "source", "hardware"), optional, file)
    models = data.get("models", [])
    if not isinstance(models, list):
        raise ValueError(f"{file}: models is {models!r}; a list of objects is needed")
    return HardwareProfile(
        spec=_hardware(data["hardware"], f"{file}: hardware"),
        models=tuple(_calibration(model, f"{file}: models[{i}]") for i, model in enumerate(models)),
        residuals=_table(data.get("residuals", {}), "a number of 0 or more", f"{file}: residuals"),
        source=_value(data["source"], "text", f"{file}: source"),
        formats=_value(data.get("formats", ""), "text", f"{file}: formats"),
        peak_flops_per_s=_value(data.get("peak_flops_per_s", 0.0), "a number of 0 or more", f"{file}: peak_flops_per_s"),
        measured=_value(data.get("measured", ""), "text", f"{file}: measured"),
        ranks_per_node=_value(data.get("ranks_per_node", 8), "an integer above 0", f"{file}: ranks_per_node"),
    )


def read_profile(name_or_path: str | Path) -> HardwareProfile:
    """Reads the shipped profile with this name, or the file at this path.

    Case and separators do not matter, nor do further words that do not change the device: "H100 SXM" and "NVIDIA H100 80GB HBM3"
    are "h100", but "H200 NVL" and "H100 64GB" are no shipped profiles.

    Raises ValueError with the nearest names for an unknown one, with the path if there is no such file, and for devices on which
    bf16 is slow.
    """
    shipped = _shipped_profiles()
    name = str(name_or_path)
    for known, text in shipped.items():
        if normal_name(known) == normal_name(name):
            return profile_from_json(text, f"{known}.json")
    if Path(name).is_file():
        return profile_from_json(Path(name).read_text(encoding="utf-8"), name)
    if isinstance(name_or_path, Path) or name.lower().endswith(".json") or "/" in name or "\\" in name:
        what = "is not a file" if Path(name).exists() else "does not exist"
        raise ValueError(
            f"hardware {name!r} {what}; give the path of a profile that `hf-longctx calibrate` has written, or the name of a "
            f"shipped one ({', '.join(shipped)})"
        )
    sizes = [int(number) * 10**9 for number in re.findall(r"\b(\d+)g(?:i?b)?\b", name.lower())]
    found = _of_device(name, [size for size in sizes if size <= _MOST_DEVICE_GB * 10**9])
    if len(found) == 1:
        return found[0]
    if _WITHOUT_BF16 & _words(name):
        raise ValueError(
            f"hardware {name!r} has no tensor cores for bf16, in which runs multiply; use a GPU of Ampere (A100, A10G, RTX "
            f"3090) or newer, or give the path of a profile that `hf-longctx calibrate` has measured"
        )
    near = nearest_profiles(name)
    nearest = f"the nearest are {', '.join(near)}" if near else f"known are {', '.join(shipped)}"
    raise ValueError(
        f"hardware {name!r} is neither a shipped profile ({nearest}) nor the path of a profile; give one of these, or measure "
        f"the device with `hf-longctx calibrate`"
    )


def profile_of_device(name: str, device_bytes: int) -> HardwareProfile | None:
    """Returns the shipped profile for a device name from a driver ("NVIDIA H200"); None for other devices.

    It has as many words of the name as possible ("h100-pcie" before "h100"), and about `device_bytes` of memory.
    """
    found = _of_device(name, [device_bytes])
    return min(found, key=lambda profile: abs(profile.spec.device_bytes - device_bytes), default=None)


# dense bf16 FLOP/s from data sheets of devices without a profile, by patterns of their names
_OTHER_PEAKS = {r"\bH800\b": 989e12, r"\bA800\b|\bA100\b.*PCI": 312e12, r"\bA40\b": 149.7e12, r"\bL40\b": 181e12}


def peak_of_device(name: str) -> float | None:
    """Returns dense bf16 FLOP/s on the data sheet of a device, by torch's name for it; None for others, such as CPUs."""
    found = [profile.peak_flops_per_s for profile in _of_device(name, ())]
    others = (peak for pattern, peak in _OTHER_PEAKS.items() if re.search(pattern, name))
    return max(found, default=0.0) or next(others, None)


def nearest_profiles(name: str) -> tuple[str, ...]:
    """Returns the names of the shipped profiles that are most like `name`, the likest first; () if none is like it."""
    likeness = {}
    for known in profile_names():
        ratios = [max(SequenceMatcher(None, own, word).ratio() for word in _words(name)) for own in _own_words(known)]
        likeness[known] = sum(ratios) / len(ratios)
    return tuple(sorted((known for known in likeness if likeness[known] >= _LIKE), key=lambda known: -likeness[known])[:_NEAREST])


def _of_device(name: str, sizes: Sequence[int]) -> list[HardwareProfile]:
    """Returns the shipped profiles for a device of this name with memory of all `sizes` in bytes.

    All their words are in `name`, memory sizes apart, and so are in theirs all words of `name` that change the device. Of several
    profiles those with the most words are taken. "cpu" says too little of a machine to stand for it in a longer name.
    """
    words = _words(name)
    own = {known: _own_words(known) for known in profile_names() if known != "cpu"}
    fitting = {known: own[known] for known in own if own[known] <= words and words & _CHANGING <= own[known]}
    most = max(map(len, fitting.values()), default=0)
    profiles = [read_profile(known) for known in fitting if len(fitting[known]) == most]
    return [profile for profile in profiles if all(_is_size(size, profile.spec.device_bytes) for size in sizes)]


def _is_size(found_bytes: int, named_bytes: int) -> bool:
    return abs(found_bytes - named_bytes) <= _SIZE_TOLERANCE * named_bytes


def _words(name: str) -> set[str]:
    """Returns the words of a device's name; "rtx" is one if only the number of a card is given."""
    words = set(re.split(r"[^a-z0-9]+", _GLUED.sub(" ", name.lower())))
    return words | {"rtx"} if any(re.fullmatch(r"\d{4}", word) for word in words) else words


def _own_words(known: str) -> set[str]:
    """Returns the words of a profile's name without its memory size ("80g"), which a driver's name may not have."""
    return set(re.sub("-[0-9]+g$", "", known).split("-"))


def profile_names() -> tuple[str, ...]:
    """Returns the names of the shipped profiles."""
    return tuple(_shipped_profiles())


def _shipped_profiles() -> dict[str, str]:
    folder = importlib.resources.files(_SHIPPED_PACKAGE) / _SHIPPED_FOLDER
    files = {file.name.removesuffix(".json"): file for file in folder.iterdir() if file.name.endswith(".json")}
    return {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}


def _hardware(data: Any, path: str) -> HardwareSpec:
    values = _checked(HardwareSpec, data, path, RATE_TABLES)
    for table in (name for name in RATE_TABLES if name in data):
        rates = _table(data[table], "a number above 0", f"{path}.{table}")
        values[table] = tuple((_num_ranks(name, f"{path}.{table}"), rate) for name, rate in rates)
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
    if isinstance(value, int) and rule.startswith("an integer") and value > _LARGEST_INTEGER:
        raise ValueError(f"{path} is {value:.2g}; at most {_LARGEST_INTEGER:.2g} is possible")
    return float(value) if rule.startswith("a number") else value
