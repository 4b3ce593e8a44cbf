"""DeepSpeed configurations in our words: every field translated, refused by name, or named as being without effect."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import TrainingArguments, get_scheduler

from hf_longctx import LongContextConfig, from_deepspeed
from hf_longctx.hf.rules.deepspeed import _BLOCKS, _IDLE_OF_ACCELERATE, _OF_ACCELERATE, FIELDS, translated

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed (pip install deepspeed)"
)

# JSON of transformers' documentation for stage 3, without offloading
ALL_AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto", "sub_group_size": 1e9},
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"), "auto"),
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
ADAM = {"learning_rate": 1e-3, "adam_epsilon": 1e-8, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


# case -> DeepSpeed's configuration on four ranks, fields of `LongContextConfig` beside `parameters`, and of `TrainingArguments`
TRANSLATED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {"parameters": "replicated"}, {}),
    "stage 0": (zero(0), {"parameters": "replicated"}, {}),
    "stage 1": (zero(1), {"parameters": "gathered_per_round"}, {}),
    "stage 2": (zero(2), {"parameters": "gathered_per_round"}, {}),
    "stage 3": (zero(3), {"parameters": "sharded"}, {}),
    "old stage 1": ({"zero_optimization": True}, {"parameters": "gathered_per_round"}, {}),
    "states on the host": (
        zero(2, offload_optimizer={"device": "cpu", "pin_memory": True, "ratio": 1.0}),
        {"parameters": "gathered_per_round", "optimizer_states": "host"},
        {},
    ),
    "weights on the host": (zero(3, offload_param={"device": "CPU"}), {"parameters": "sharded", "layer_weights": "host"}, {}),
    "old names": (
        zero(3, cpu_offload=True, cpu_offload_param=True),
        {"parameters": "sharded", "optimizer_states": "host", "layer_weights": "host"},
        {},
    ),
    "no offloading": (zero(3, offload_param={"device": "none"}, offload_optimizer=None), {"parameters": "sharded"}, {}),
    "blocks of ranks": (zero(3, mics_shard_size=2), {"parameters": "sharded", "shard_ranks": 2}, {}),
    "one block": (zero(3, mics_shard_size=4), {"parameters": "sharded"}, {}),
    "no blocks": (zero(3, mics_shard_size=-1), {"parameters": "sharded"}, {}),
    "copies on nodes": (zero(3, zero_hpz_partition_size=2), {"parameters": "gathered_per_node"}, {}),
    "no copies on nodes": (zero(3, zero_hpz_partition_size=1), {"parameters": "sharded"}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {}, {"bf16": True}),
    "bf16 by its old name": ({"bfloat16": {"enabled": True}}, {}, {"bf16": True}),
    "fp32": ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, {}, {"bf16": False}),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}, {"bf16": True}),
    "overflow": ({"bf16": {"enabled": True, "check_grad_overflow": True}}, {"on_nonfinite": "skip"}, {"bf16": True}),
    "all in bf16": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {"fp32_master_weights": False, "fp32_gradients": False},
        {"bf16": True},
    ),
    "sums in bf16": ({"data_types": {"grad_accum_dtype": "bf16"}}, {"fp32_gradients": False}, {}),
    "sums in fp32": ({"data_types": {"grad_accum_dtype": "fp32"}}, {"fp32_gradients": True}, {}),
    "clipping": ({"gradient_clipping": 0.5}, {}, {"max_grad_norm": 0.5}),
    "no clipping": ({"gradient_clipping": 0}, {}, {"max_grad_norm": 0.0}),
    "local disks": ({"checkpoint": {"use_node_local_storage": True}}, {}, {"save_on_each_node": True}),
    "batches": (
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    ),
    "batches of a rank": (
        {"train_batch_size": 24, "gradient_accumulation_steps": 3},
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    ),
    "accumulated batches": (
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2},
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    ),
    "a step": ({"train_batch_size": 24}, {}, {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}),
    "a rank's batch": ({"train_micro_batch_size_per_gpu": 5}, {}, {"per_device_train_batch_size": 5}),
    "AdamW": ({"optimizer": {"type": "AdamW"}}, {}, ADAM),
    "Adam, which is AdamW": (
        {"optimizer": {"type": "adam", "params": {"lr": 2e-5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}}},
        {},
        {"learning_rate": 2e-5, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.1},
    ),
    "torch's AdamW": ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {}, {**ADAM, "weight_decay": 0.01}),
    "Adam without decay": ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {}, ADAM),
    "constant": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 7}}},
        {},
        {"lr_scheduler_type": "constant_with_warmup", "learning_rate": 1e-4, "warmup_steps": 7},
    ),
    "a step of warm-up": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_min_lr": 0}}},
        {},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    ),
    "linear": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 90}}},
        {},
        {"lr_scheduler_type": "linear", "learning_rate": 1e-3, "warmup_steps": 1000, "max_steps": 90},
    ),
    "cosine": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 90, "cos_min_ratio": 0.1, "warmup_num_steps": 3}}},
        {},
        {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "warmup_steps": 3,
            "max_steps": 90,
        },
    ),
    "all auto": (ALL_AUTO, {"parameters": "sharded"}, {"lr_scheduler_type": "constant_with_warmup"}),
}


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_configuration_has_our_words(tmp_path: Path, name: str) -> None:
    source, config, arguments = TRANSLATED[name]
    found = from_deepspeed(source, num_ranks=4)
    assert found.config == {"parameters": "replicated", **config}
    optim = {"optim": "adamw_torch_fused"} if "optimizer" in source else {}
    assert found.arguments == {**optim, **arguments}
    # the fields are those of the two classes, and the line names them all
    LongContextConfig(**found.config)
    TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **found.arguments)
    assert all(f"{key}={value!r}" in found.line for key, value in (found.config | found.arguments).items())


def test_a_file_a_text_and_a_dictionary_are_the_same(tmp_path: Path, caplog) -> None:
    (file := tmp_path / "ds.json").write_text(json.dumps(ALL_AUTO))
    by_file, by_text, by_value = from_deepspeed(file), from_deepspeed(json.dumps(ALL_AUTO)), from_deepspeed(ALL_AUTO)
    assert by_file.config == by_text.config == by_value.config and by_file.arguments == by_value.arguments
    assert str(file) in by_file.line and caplog.records[0].message == by_file.line


def test_the_line_says_how_results_differ_and_what_has_no_effect() -> None:
    line = from_deepspeed(ALL_AUTO).line
    assert "without effect here: overlap_comm, reduce_bucket_size, sub_group_size, steps_per_print, wall_clock_breakdown" in line
    assert "the warm-up is linear and begins one step earlier than WarmupLR's, which is log by default" in line
    assert "weight_decay spares biases and norms" in line
    plain = from_deepspeed({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0}}}).line
    assert "spares" not in plain and "effect" not in plain


def test_stages_gather_once_per_step() -> None:
    assert from_deepspeed(zero(2), has_stages=True).config == {"parameters": "gathered_per_step"}
    assert from_deepspeed(zero(3), has_stages=True).config == {"parameters": "sharded"}


def test_a_step_is_that_of_the_arguments_where_the_configuration_leaves_them_open() -> None:
    known = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    found = translated({"train_batch_size": 24}, 4, False, known)
    assert found.arguments == known and not found.problems
    (problem,) = translated({"train_batch_size": 25}, 4, False, known).problems
    assert "train_batch_size is 25, but 3 sequences of a rank x 2 accumulated batches x 4 ranks are 24" in problem


ACCELERATE = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 8}


def test_accelerates_yaml_is_read(tmp_path: Path) -> None:
    block = {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero3_init_flag": True,
        "deepspeed_multinode_launcher": "standard",
    }
    (file := tmp_path / "accelerate.yaml").write_text(yaml.safe_dump({**ACCELERATE, "deepspeed_config": block}))
    found = from_deepspeed(file)
    assert found.config == {"parameters": "sharded", "optimizer_states": "host"}
    assert found.arguments == {"bf16": True, "gradient_accumulation_steps": 4, "max_grad_norm": 1.0}
    assert found.line.startswith(f"accelerate's configuration {file} becomes")
    assert from_deepspeed({**ACCELERATE, "deepspeed_config": {}}).config == {"parameters": "gathered_per_round"}
    (inner := tmp_path / "ds.json").write_text(json.dumps(zero(3)))
    assert from_deepspeed({**ACCELERATE, "deepspeed_config": {"deepspeed_config_file": str(inner)}}).config == {
        "parameters": "sharded"
    }


# configuration of accelerate -> the refusal, with the names of its YAML
REFUSED_OF_ACCELERATE: list[tuple[dict[str, Any], str]] = [
    ({"distributed_type": "MULTI_GPU"}, "has no block deepspeed_config"),
    ({"deepspeed_config": {"zero_stag": 3}}, "zero_stag unknown; did you mean zero_stage?"),
    ({"deepspeed_config": {"zero_stage": 4}}, "zero_stage is 4; give at most 3"),
    ({"deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}}, "offload_param_device is 'cpu' with zero_stage 2"),
    ({"mixed_precision": "fp16", "deepspeed_config": {}}, "mixed_precision is 'fp16'; set bf16.enabled"),
    (
        {"deepspeed_config": {"zero_stage": 3, "deepspeed_config_file": "ds.json"}},
        "DeepSpeed's configuration ds.json does not exist",
    ),
]


@pytest.mark.parametrize("source,message", REFUSED_OF_ACCELERATE)
def test_what_accelerates_yaml_asks_in_vain_is_refused(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        from_deepspeed(source)
    assert message in str(error.value)


def test_a_stage_beside_a_file_is_refused_as_accelerate_does(tmp_path: Path) -> None:
    (inner := tmp_path / "ds.json").write_text("{}")
    with pytest.raises(ValueError, match="gives zero_stage beside deepspeed_config_file; leave them out"):
        from_deepspeed({"deepspeed_config": {"zero_stage": 3, "deepspeed_config_file": str(inner)}})


def on(name: str) -> Any:
    """A value with which a refused field asks for something."""
    if name in ("optimizer.params.bias_correction", "optimizer.params.fp32_optimizer_states"):
        return False
    return {switch: 2} if (switch := FIELDS[name].switch) else 16


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    block: dict[str, Any] = value
    if (kind := name.partition(".")[0]) in ("optimizer", "scheduler"):
        block[kind].setdefault("type", {"optimizer": "AdamW", "scheduler": "WarmupLR"}[kind])
    return block


def off(name: str) -> list[Any]:
    """Values with which it asks for nothing."""
    if name in ("optimizer.params.bias_correction", "optimizer.params.fp32_optimizer_states"):
        return [True, None]
    return [None, False, *([{FIELDS[name].switch: False}, {}] if FIELDS[name].switch else [])]


@pytest.mark.parametrize("name", [name for name, row in FIELDS.items() if row.state == "refused"])
def test_a_refused_field_is_named_with_its_value_and_a_remedy(name: str) -> None:
    with pytest.raises(ValueError) as error:
        from_deepspeed(nested(name, on(name)))
    assert f"{name} is {on(name)}" in str(error.value) and FIELDS[name].note in str(error.value)
    for value in off(name):
        from_deepspeed(nested(name, value))


@pytest.mark.parametrize("name", [name for name, row in FIELDS.items() if row.state == "no effect"])
def test_a_field_without_effect_changes_nothing_and_is_named(name: str) -> None:
    found = from_deepspeed(source := nested(name, {"a": 1}))
    plain = from_deepspeed({"optimizer": {"type": "AdamW"}} if "optimizer" in source else {})
    assert found.config == plain.config and found.arguments == plain.arguments
    assert f"without effect here: {name.rsplit('.', 1)[-1]}" in found.line


@pytest.mark.parametrize("name", [name for name, row in FIELDS.items() if row.state == "translated"])
@pytest.mark.parametrize("value", ["sideways", -7, [], {"a": 1}])
def test_a_mistyped_value_is_named_with_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        from_deepspeed(nested(name, value))
    message = str(error.value)
    assert f"{name} is {value!r}" in message
    assert any(word in message for word in ("; give ", "; choose one of ", "; it cannot be negative"))


def test_an_open_stage_is_refused_since_no_argument_names_one() -> None:
    with pytest.raises(ValueError, match=r"zero_optimization\.stage is 'auto' \(str\); give a whole number"):
        from_deepspeed({"zero_optimization": {"stage": "auto"}})


# configuration on four ranks -> the refusal
CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "batches": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        "train_batch_size is 32, but 2 sequences of a rank x 2 accumulated batches x 4 ranks are 16",
    ),
    "an uneven step": (
        {"train_batch_size": 6},
        "train_batch_size is 6, but 1 sequences of a rank x 1 accumulated batches x 4 ranks",
    ),
    "nvme": (
        zero(3, offload_optimizer={"device": "nvme"}),
        "offload_optimizer.device is 'nvme', which is not supported; give 'cpu'",
    ),
    "nvme for weights": (zero(3, offload_param={"device": "nvme"}), "offload_param.device is 'nvme'"),
    "weights on the host": (zero(2, offload_param={"device": "cpu"}), "with zero_optimization.stage 2; give stage 3"),
    "a part of the states": (
        zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        "ratio is 0.5; give 1, all states on the host",
    ),
    "large blocks": (zero(3, mics_shard_size=8), "mics_shard_size is 8 on 4 ranks; give 2 to 4, or -1"),
    "one node": (
        zero(3, zero_hpz_partition_size=4),
        "zero_hpz_partition_size is 4, and the 4 ranks are not several times as many",
    ),
    "uneven nodes": (zero(3, zero_hpz_partition_size=3), "zero_hpz_partition_size is 3, and the 4 ranks are not several"),
    "copies of stage 2": (zero(2, zero_hpz_partition_size=2), "zero_hpz_partition_size is 2 with zero_optimization.stage 2"),
    "blocks of stage 2": (zero(2, mics_shard_size=2), "mics_shard_size is 2 with zero_optimization.stage 2"),
    "moments alone": ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "give both the same"),
    "sums in fp16": ({"data_types": {"grad_accum_dtype": "fp16"}}, "grad_accum_dtype is 'fp16'"),
    "autocast to fp16": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype is 'float16'"),
    "decay in the gradient": (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
        "adam_w_mode is False",
    ),
    "unknown optimizers": ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type is 'OneBitAdam'; choose one of Adam, AdamW"),
    "unknown schedules": ({"scheduler": {"type": "OneCycle"}}, "scheduler.type is 'OneCycle'; choose one of WarmupLR"),
    "no type": ({"optimizer": {"params": {}}}, "optimizer.type is missing"),
    "no steps": ({"scheduler": {"type": "WarmupCosineLR"}}, "total_num_steps is missing, which WarmupCosineLR needs"),
    "least rates": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6}}},
        "warmup_min_lr is 1e-06; give 0",
    ),
    "two rates": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}},
        },
        "warmup_max_lr is 0.0001, but optimizer.params.lr is 1e-05",
    ),
    "a rate by default": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}},
        },
        "warmup_max_lr is 0.001 by default",
    ),
    "betas": ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "betas is [0.9]; give two numbers"),
    "no block": ({"zero_optimization": 3}, "zero_optimization is 3 (int); give a block of fields"),
    "unknown": ({"gradient_cliping": 1.0}, "gradient_cliping is unknown; did you mean gradient_clipping?"),
    "in the wrong place": ({"offload_param": {}}, "offload_param is unknown"),
    "one level up": ({"overlap_comm": True}, "overlap_comm is unknown; did you mean zero_optimization.overlap_comm?"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_values_that_do_not_agree_are_refused_with_both(name: str) -> None:
    source, message = CONFLICTS[name]
    with pytest.raises(ValueError) as error:
        from_deepspeed(source, num_ranks=4)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 2


def test_one_error_names_all_refused_fields() -> None:
    source = {
        "fp16": {"enabled": True},
        "amp": {"enabled": True},
        "zero_optimisation": {},
        **zero(3, zero_quantized_weights=True),
    }
    with pytest.raises(ValueError) as error:
        from_deepspeed({**source, "optimizer": {"type": "Lamb"}})
    assert len(str(error.value).splitlines()) == 6


# text of a file, or none -> the refusal
BAD_FILES: dict[str, tuple[str | bytes | None, str]] = {
    "missing": (None, "does not exist; give the path of a JSON file"),
    "not JSON": ("{'stage': 3}", "is not JSON that can be read"),
    "comments": ('{"a": 1 // one\n}', "is not JSON that can be read"),
    "twice": ('{"amp": {}, "amp": {}}', "'amp' is given twice"),
    "nested": ("[" * 100_000, "is not JSON that can be read"),
    "a list": ("[]", "is a list; give a file, a dictionary"),
    "no text": (b"\xff\xfe\x00", "cannot be read"),
    "large": ("{" + " " * 2**20 + "}", "has 1,048,578 bytes; give a file of at most 1,048,576"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read_is_refused_by_its_path(tmp_path: Path, name: str) -> None:
    text, message = BAD_FILES[name]
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as error:
        from_deepspeed(path)
    assert message in str(error.value) and str(path) in str(error.value)


class Asked(dict[str, Any]):
    """A configuration that records which names are looked up."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def get(self, name: Any, default: Any = None) -> Any:
        self.names.add(name)
        return default

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return False

    def keys(self) -> Any:
        return self


@needs_deepspeed
def test_the_table_has_every_name_that_deepspeed_reads() -> None:
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

    asked = Asked()
    config.DeepSpeedConfig._initialize_params(object.__new__(config.DeepSpeedConfig), asked)
    names = asked.names | set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    names |= {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    for block, model in {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "bf16": DeepSpeedBF16Config,
    }.items():
        names |= {f"{block}.{field.alias or name}" for name, field in model.model_fields.items()}
    assert names - set(FIELDS) - _BLOCKS == {"bfloat16"}


def test_the_names_of_accelerates_yaml_are_known() -> None:
    from accelerate.commands.launch import launch_command_parser

    options = {
        action.dest
        for group in launch_command_parser()._action_groups
        if group.title == "DeepSpeed Arguments"
        for action in group._group_actions
    }
    assert options == {*_OF_ACCELERATE, *_IDLE_OF_ACCELERATE, "deepspeed_config_file"}


@needs_deepspeed
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_linear_schedule_is_deepspeeds_one_step_earlier(kind: str) -> None:
    from deepspeed.runtime import lr_schedules

    params: dict[str, Any] = {"warmup_num_steps": 4, "warmup_type": "linear"}
    params |= {"total_num_steps": 12} if kind != "WarmupLR" else {}
    params |= {"warmup_max_lr": 0.1} if kind != "WarmupCosineLR" else {}
    found = from_deepspeed({"scheduler": {"type": kind, "params": params}}).arguments
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2)]
    theirs = getattr(lr_schedules, kind)(optimizers[0], **params)
    ours = get_scheduler(
        found["lr_scheduler_type"], optimizers[1], found["warmup_steps"], 12, found.get("lr_scheduler_kwargs") or {}
    )
    rates: list[list[float]] = [[], []]
    for _ in range(12):
        for each, optimizer, schedule in zip(rates, optimizers, (theirs, ours), strict=True):
            each.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    # the warm-up of all kinds, and the decay of all but cosine, which begins a step earlier within DeepSpeed
    assert rates[0][1:5] == pytest.approx(rates[1][:4])
    shift = 0 if kind == "WarmupCosineLR" else 1
    assert rates[0][5 + shift :] == pytest.approx(rates[1][5 : 12 - shift]) and not any(map(math.isnan, rates[0]))
