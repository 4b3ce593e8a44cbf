"""TRL's trainers: which of them run under plans, which under the callback alone, and why the others do not.

`SFTTrainer` prepares model and dataset inside its own constructor, so a mixin in front of it checks them behind that. Its loss
is the token mean of the cross-entropy, as that of plans, which replace its `compute_loss`, `training_step` and
`prediction_step`: what these add is entropy and token accuracy in the log. `DPOTrainer` needs log-probabilities of whole
sequences, two by two, which an exchange around each forward gives it (`exchange.py`). TRL is never imported here.
"""

from __future__ import annotations

from typing import Any

import datasets

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.quantised import four_bit_layers
from hf_longctx.hf.start.stages import loaded_ranges
from hf_longctx.hf.start.versions import trl_problems

# a trainer gets in with its runs in tests/hf/trainer/test_trl_trainers.py, never without
_PLANNED = "SFTTrainer"
_ALONE = {"SFTConfig": "SFTTrainer", "DPOConfig": "DPOTrainer"}
# the columns that SFTTrainer lets its collator read; it writes others and does not use them
_READ = ("input_ids", "labels", "seq_lengths")


def trl_class(cls: type) -> type | None:
    """The class of TRL that `cls` is or comes from, if any."""
    return next((base for base in cls.__mro__ if base.__module__.split(".", 1)[0] == "trl"), None)


def is_planned(cls: type) -> bool:
    """Whether `cls` is TRL's trainer whose loss is that of plans, or a subclass outside of TRL."""
    found = trl_class(cls)
    return found is not None and found.__name__ == _PLANNED


def is_replaced(cls: type) -> bool:
    """Whether methods of exactly this class are known to mean what plans do in their place."""
    return cls.__name__ == _PLANNED and trl_class(cls) is cls


def trainer_problems(trainer: type, args: Any, config: LongContextConfig) -> list[str]:
    """What keeps a trainer of TRL, with these arguments, from running full plans; empty for trainers of others."""
    found = trl_class(trainer)
    if found is None:
        return []
    if not is_planned(trainer):
        remedy = (
            "pass LongContextCallback(config) in callbacks=[...] and leave LongContextMixin and attach out"
            if found.__name__ == "DPOTrainer"
            else "SFTTrainer is the trainer of TRL that runs them"
        )
        return [
            f"{found.__name__} makes its loss of whole sequences or generates them, where full plans train the token mean of the "
            f"cross-entropy; {remedy}"
        ]
    return trl_problems() + offloading_problems(args) + _sft_problems(args, config)


def prepared_model_problems(model: Any) -> list[str]:
    """What keeps the model that a trainer of TRL has made ready from running under plans."""
    problems = []
    if loaded_ranges(model) is not None:
        problems.append("a model of load_pipeline_stage is not tested with trainers of TRL; pass the whole model")
    if four_bit_layers(model):
        problems.append("weights of four bits are not tested with trainers of TRL; use LongContextTrainer")
    return problems


def alone_problems(args: Any) -> list[str]:
    """What keeps the trainer of TRL that these arguments are for from training under the callback alone."""
    found = trl_class(type(args))
    if found is None:
        return []
    if found.__name__ not in _ALONE:
        return [
            f"{found.__name__} is for a trainer of TRL whose forwards are not tested under plans; tested are "
            f"{' and '.join(_ALONE.values())}"
        ]
    return trl_problems() + offloading_problems(args)


def offloading_problems(args: Any) -> list[str]:
    """Hooks on saved tensors that would see what plans offload and recompute."""
    if not getattr(args, "activation_offloading", False):
        return []
    return [
        "activation_offloading=True would move what plans place themselves; leave it out and set LongContextConfig(host_gib=...)"
    ]


def _sft_problems(args: Any, config: LongContextConfig) -> list[str]:
    problems = []
    for name in ("packing", "eval_packing"):
        if getattr(args, name, None):
            problems.append(
                f"{name}=True makes rows of several documents, of which plans would make one; leave packing to the plans, which "
                f"pack whole documents ({name}=False), or use the callback in callbacks=[...] alone, which keeps TRL's rows"
            )
    if (loss := getattr(args, "loss_type", "nll")) != "nll":
        problems.append(
            f"loss_type={loss!r} is not the token mean of the cross-entropy, which plans train; set loss_type='nll', or use the "
            f"callback in callbacks=[...] alone"
        )
    limit = getattr(args, "max_length", None)
    if limit is not None and config.max_length is not None and limit < config.max_length:
        problems.append(
            f"max_length={limit} of the SFTConfig cuts every row before plans see it, but LongContextConfig has max_length "
            f"{config.max_length}; set SFTConfig(max_length=None), or both to the same"
        )
    return problems


def read_columns(trainer: type, dataset: Any) -> Any:
    """The dataset as the collator of a trainer of TRL sees it; the same object where there is nothing to leave out."""
    is_known = isinstance(dataset, datasets.Dataset | datasets.IterableDataset) and dataset.column_names is not None
    if not is_planned(trainer) or not is_known or "input_ids" not in dataset.column_names:
        return dataset
    read = [name for name in dataset.column_names if name in _READ]
    return dataset if len(read) == len(dataset.column_names) else dataset.select_columns(read)
