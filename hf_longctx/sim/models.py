"""Reads a model for a forecast without building it: a named shape, a config.json, or the folder of a checkpoint.

Models of the Hugging Face hub are found in the local cache, without loading `huggingface_hub`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hf_longctx.families.registry import traits_of
from hf_longctx.plan.core.serialize import parse_json
from hf_longctx.plan.cost.catalog import named_config, named_model
from hf_longctx.plan.model.config import check_fields, has_position_table, kept_reason, kernels_of_config, miscounted_reason
from hf_longctx.plan.model.model_spec import ModelSpec


def read_model(name_or_path: str, bytes_per_element: int) -> ModelSpec:
    """Reads the spec of a named shape, of a config.json, or of the folder of a checkpoint."""
    path = _config_path(name_or_path)
    if path is None:
        try:
            return named_model(short_name(name_or_path), bytes_per_element)
        except ValueError as error:
            hub = name_or_path if name_or_path.count("/") == 1 else "OWNER/NAME"
            given = "" if hub == name_or_path else f", and --model {hub} then finds it there"
            raise ValueError(f"{error}; `hf download {hub} config.json` puts one into the hub's local cache{given}") from None
    config = _read_config(path)
    try:
        return _sound(ModelSpec.from_config(config, bytes_per_element))
    except KeyError as error:
        raise _unreadable(path, f"it has no {error.args[0]}") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        # valid fields may contradict each other
        reason = error if isinstance(error, ValueError) else f"its fields contradict each other ({error})"
        raise _unreadable(path, reason) from None


def _sound(model: ModelSpec) -> ModelSpec:
    """Returns the spec; raises ValueError if a size that is a divisor in formulas is 0."""
    sizes = {"head_dim": model.head_dim, "num_key_value_heads": model.num_kv_heads, "layer_products": model.layer_products}
    if empty := [name for name, size in sizes.items() if size < 1]:
        raise ValueError(f"its fields contradict each other: {', '.join(empty)} would be below 1")
    return model


def _config_path(name_or_path: str) -> Path | None:
    """Returns the config.json of a name or path; None for the name of a shape. Raises ValueError if it does not exist."""
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(
                f"the folder {name_or_path!r} has no config.json; give the folder of a checkpoint, or the name of a model"
            )
    if not path.is_file() and path.suffix == ".json":
        raise ValueError(f"the model config {name_or_path!r} does not exist; give another path, or the name of a model")
    return path if path.is_file() else None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(path.read_text(encoding="utf-8"), "the file")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(config, dict):
        raise _unreadable(path, f"it holds {type(config).__name__}, not an object of fields")
    try:
        check_fields(config)
    except ValueError as error:
        raise _unreadable(path, error) from None
    return config


def _unreadable(path: Path, reason: object) -> ValueError:
    return ValueError(f"{path} cannot be read as a model config: {reason}; give the config.json of a causal language model")


def _config_of(name_or_path: str) -> dict[str, Any]:
    """Returns the fields of a model's config.json, or of the catalogue's; none for GPTs and unknown names."""
    path = _config_path(name_or_path)
    return _read_config(path) if path is not None else named_config(short_name(name_or_path)) or {}


def experts_in(name_or_path: str) -> str:
    """Returns the format of the experts in this model's own checkpoints; empty if they are not packed."""
    return traits_of(_config_of(name_or_path)).experts_in


def kept_because(name_or_path: str) -> str:
    """Describes why a run of this model keeps everything; empty if it may recompute."""
    return kept_reason(_config_of(name_or_path))


def miscounted_because(name_or_path: str) -> str:
    """Describes why a model has other parameters than are counted from its config; empty if it has about as many."""
    return miscounted_reason(_config_of(name_or_path))


def most_positions(name_or_path: str, model: ModelSpec) -> int:
    """Returns the positions of a model if they cannot be extended, so that a run refuses longer sequences; else 0.

    GPTs of the catalogue are no checkpoints, and may have any number of positions.
    """
    return model.max_positions if has_position_table(_config_of(name_or_path)) else 0


def short_name(name: str) -> str:
    """Removes the owner of a name on the Hub: "Qwen/Qwen3-8B" becomes "Qwen3-8B"."""
    return name.rpartition("/")[2]


def kernels_of(name_or_path: str) -> dict[str, Any]:
    """Returns the fields of `ModelSpec` for functions of this model's layers that run as kernels if layers are compiled."""
    return kernels_of_config(_config_of(name_or_path))


def cached_folder(name: str) -> Path | None:
    """Returns the cached snapshot of the hub model `name` ("Qwen/Qwen3-8B") with a config.json; None if there is none.

    It is the revision of `main`, or else the newest snapshot.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or Path(name).exists():
        return None
    folder = _cache() / f"models--{name.replace('/', '--')}"
    snapshots = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    main = folder / "refs" / "main"
    if main.is_file():
        wanted = folder / "snapshots" / main.read_text().strip() / "config.json"
        snapshots = [wanted, *snapshots] if wanted.is_file() else snapshots
    return snapshots[0].parent if snapshots else None


def _cache() -> Path:
    """Returns the folder of the hub's cache, by the variables of `huggingface_hub`."""
    if found := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(found).expanduser()
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"
