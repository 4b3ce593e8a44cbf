"""Prints the record of a class as its tiny model tells it: `PYTHONPATH=tests python tests/helpers/models/family_record.py NAME`.

NAME is a causal language model of transformers, such as `LlamaForCausalLM`. Below the record stand facts that a config, with the
record of today, still tells otherwise than the model. `hf_longctx/families/family.py` says what else a record may hold.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from helpers.models.any_model import build_any

from hf_longctx.families.family import Traits
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.spec import config_spec, model_spec
from hf_longctx.hf.run.run import _covered

# fields of `ModelSpec` and of `Traits` with one name that a model tells by its modules
_TOLD = ("tiles_mlps", "tiles_norms", "qk_norms", "cuts_heads")
# fields of a spec that the size of a model, its dtype or its adapters change
_OTHERS = ("bytes_per_element", "idle_parameters", "can_keep_qkv", "tiles_final_norm")


def record(name: str) -> str:
    """The record of a class, and a line for each fact in which a forecast differs from a run."""
    model: Any = build_any(name, is_random=False)
    run, forecast = asdict(model_spec(model)), asdict(config_spec(model.config))
    traits: dict[str, Any] = {field: run[field] for field in _TOLD if run[field] != getattr(Traits(), field)}
    covered = _covered(FusedLayers("compile"), model)
    # those of convolutions follow from the mixers' functions
    if kernels := tuple(field.removeprefix("fuses_") for field, has in covered.items() if has and "convolutions" not in field):
        traits["kernels"] = kernels
    if problem := activation_problem(model):
        traits["keeps_all"] = problem
    modules = {type(module).__name__ for module in model.modules()}
    found = {
        "experts": tuple(sorted(each for each in modules if each.endswith("Experts"))),
        "routers": tuple(sorted(each for each in modules if each.endswith("Router"))),
    }
    folder, types = type(model).__module__.split(".")[-2], (model.config.get_text_config().model_type,)
    parts = [repr(folder), repr(name), *([] if types == (folder,) else [f"types={types!r}"])]
    for key, kind, given in (("traits", "Traits", traits), ("modules", "Modules", {k: v for k, v in found.items() if v})):
        if given:
            parts.append(f"{key}={kind}({', '.join(f'{field}={value!r}' for field, value in given.items())})")
    differing = [key for key in run if key not in _OTHERS and run[key] != forecast[key]]
    lines = [f"# {key}: {run[key]!r} by the model, {forecast[key]!r} by its config" for key in differing]
    return "\n".join([f"Family({', '.join(parts)}),", *lines])


if __name__ == "__main__":
    print(record(sys.argv[1]))
