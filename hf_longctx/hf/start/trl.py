"""Support for TRL's trainers: some run under full plans, some under the callback alone, the others are refused with a reason.

`SFTTrainer` prepares model and dataset inside its own constructor, so a mixin in front of it checks them afterwards. Its loss
is the token mean of the cross-entropy, and so is the loss of plans. Plans therefore replace its `compute_loss`, `training_step`
and `prediction_step`, which would only add entropy and token accuracy to the log (evaluations under plans log both).
`DPOTrainer` needs log-probabilities of pairs of whole sequences, which an exchange around each forward gives it
(`stock/exchange.py`). TRL is never imported here.
"""

from __future__ import annotations

from typing import Any

import datasets

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.scan import LOSS_WEIGHTS, WEIGHTS
from hf_longctx.hf.models.quantised import four_bit_layers
from hf_longctx.hf.start.stages import loaded_ranges
from hf_longctx.hf.start.versions import trl_problems

# add a trainer only together with its runs in tests/hf/trainer/test_trl_trainers.py
_PLANNED = "SFTTrainer"
_ALONE = {"SFTConfig": "SFTTrainer", "DPOConfig": "DPOTrainer"}
# columns that the collator of SFTTrainer reads; SFTTrainer also writes columns that nobody uses
_READ = ("input_ids", "labels", "seq_lengths")
# columns that plans read or refuse, although the collator would leave them out
_KEPT = (LOSS_WEIGHTS, *WEIGHTS)


def trl_class(cls: type) -> type | None:
    """The class of TRL that `cls` is or inherits from; None if there is none."""
    return next((base for base in cls.__mro__ if base.__module__.split(".", 1)[0] == "trl"), None)


def is_planned(cls: type) -> bool:
    """Whether `cls` is the trainer of TRL whose loss plans compute too, or a subclass of it outside of TRL."""
    found = trl_class(cls)
    return found is not None and found.__name__ == _PLANNED


def is_replaced(cls: type) -> bool:
    """Whether plans are known to do the same work as the methods of exactly this class."""
    return cls.__name__ == _PLANNED and trl_class(cls) is cls


def trainer_problems(trainer: type, args: Any, config: LongContextConfig) -> list[str]:
    """Reasons why a trainer of TRL cannot run full plans with these arguments; empty for trainers that are not of TRL."""
    found = trl_class(trainer)
    if found is None:
        return []
    if not is_planned(trainer):
        remedy = (
            "pass LongContextCallback(config) in callbacks=[...] and leave LongContextMixin and attach out"
            if found.__name__ == "DPOTrainer"
            else "use SFTTrainer, the trainer of TRL that runs full plans"
        )
        return [
            f"{found.__name__} computes its loss from whole sequences, or generates them, but full plans train the token mean of "
            f"the cross-entropy; {remedy}"
        ]
    return trl_problems() + offloading_problems(args) + _sft_problems(args, config)


def prepared_model_problems(model: Any) -> list[str]:
    """Reasons why the model that a trainer of TRL has prepared cannot run under plans."""
    problems = []
    if loaded_ranges(model) is not None:
        problems.append("a model of load_pipeline_stage is not tested with trainers of TRL; pass the whole model")
    if four_bit_layers(model):
        problems.append("four-bit weights are not tested with trainers of TRL; use LongContextTrainer")
    return problems


def alone_problems(args: Any) -> list[str]:
    """Reasons why the trainer of TRL that takes these arguments cannot train under the callback alone."""
    found = trl_class(type(args))
    if found is None:
        return []
    if found.__name__ not in _ALONE:
        return [
            f"{found.__name__} is for a trainer of TRL whose forwards are not tested under plans; use "
            f"{' or '.join(_ALONE.values())}"
        ]
    return trl_problems() + offloading_problems(args)


def offloading_problems(args: Any) -> list[str]:
    """Problems with hooks on saved tensors, which would interfere with what plans offload and recompute."""
    if not getattr(args, "activation_offloading", False):
        return []
    return [
        "activation_offloading=True would move tensors that plans offload themselves; leave it out and set "
        "LongContextConfig(host_gib=...)"
    ]


def _sft_problems(args: Any, config: LongContextConfig) -> list[str]:
    problems = []
    for name in ("packing", "eval_packing"):
        if getattr(args, name, None):
            problems.append(
                f"{name}=True makes rows of several documents, each of which plans would train as one document; set "
                f"{name}=False, since plans pack whole documents themselves, or use the callback in callbacks=[...] alone, which "
                f"keeps TRL's rows"
            )
    if (loss := getattr(args, "loss_type", "nll")) != "nll":
        problems.append(
            f"loss_type={loss!r} is not the token mean of the cross-entropy that plans train; set loss_type='nll', or use the "
            f"callback in callbacks=[...] alone"
        )
    if factor := getattr(args, "label_smoothing_factor", 0):
        problems.append(
            f"label_smoothing_factor={factor!r} is not tested with trainers of TRL; pass the loss of a token as token_loss=..., "
            f"or use LongContextTrainer"
        )
    limit = getattr(args, "max_length", None)
    if limit is not None and config.max_length is not None and limit < config.max_length:
        problems.append(
            f"max_length={limit} of the SFTConfig cuts every row before plans see it, but LongContextConfig has max_length "
            f"{config.max_length}; set SFTConfig(max_length=None), or give both the same value"
        )
    return problems


def read_columns(trainer: type, dataset: Any) -> Any:
    """The dataset with weights and the columns that a collator of TRL reads; the same object if it has no others."""
    is_known = isinstance(dataset, datasets.Dataset | datasets.IterableDataset) and dataset.column_names is not None
    if not is_planned(trainer) or not is_known or "input_ids" not in dataset.column_names:
        return dataset
    read = [name for name in dataset.column_names if name in (*_READ, *_KEPT)]
    return dataset if len(read) == len(dataset.column_names) else dataset.select_columns(read)
