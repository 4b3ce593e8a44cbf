"""FSDP configurations in our words, each with one line, and names for what has no such words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_longctx import LongContextConfig
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.rules.training_arguments import hidden_from_trainer, translate

PLAIN = LaunchEnvironment(8, 4, "no", "no", uses_fsdp=True, uses_deepspeed=False, fsdp_reshard="true", fsdp_offload=False)


class OfEightRanks(TrainingArguments):
    world_size = 8


def arguments(folder: Path, **changes: Any) -> OfEightRanks:
    args = OfEightRanks(str(folder), use_cpu=True, report_to="none")
    for name, value in changes.items():
        setattr(args, name, value)
    return args


# strategy -> what our settings become
STRATEGIES: dict[str, dict[str, Any]] = {
    "true": {"parameters": "sharded"},
    "full_shard": {"parameters": "sharded"},
    "false": {"parameters": "gathered_per_round"},
    "shard_grad_op": {"parameters": "gathered_per_round"},
    "no_shard": {"parameters": "replicated"},
    "hybrid_shard": {"parameters": "sharded", "shard_ranks": 4},
    "5": {"parameters": "gathered_per_round", "shard_ranks": 4},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("origin", ["accelerate", "arguments"])
def test_strategies_have_our_words(tmp_path: Path, strategy: str, origin: str) -> None:
    if origin == "accelerate":
        launch, args = replace(PLAIN, fsdp_reshard=strategy), arguments(tmp_path)
    else:
        launch = replace(PLAIN, uses_fsdp=False)
        args = arguments(tmp_path, fsdp=True, fsdp_config={"reshard_after_forward": strategy})
    before = LongContextConfig(max_length=64)
    found = translate(before, args, launch)
    assert found.config == replace(before, **STRATEGIES[strategy]) and before.parameters == "replicated"
    (line,) = found.lines
    assert all(f"{name}={value!r}" in line for name, value in STRATEGIES[strategy].items())
    assert found.problems == ()


def test_own_settings_come_first(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    own = LongContextConfig(parameters="gathered_per_round", shard_ranks=2)
    found = translate(own, args, PLAIN)
    assert found.config == own and "is replaced by LongContextConfig(parameters='gathered_per_round')" in found.lines[0]
    staged = translate(LongContextConfig(stages=2), args, PLAIN)
    assert staged.config.parameters == "sharded"


@pytest.mark.parametrize("stages", [2, "auto"])
@pytest.mark.parametrize("strategy", ["false", "shard_grad_op", "2", "hybrid_shard_zero2"])
def test_zero2_gathers_once_per_step_in_stages(tmp_path: Path, strategy: str, stages: Any) -> None:
    found = translate(LongContextConfig(stages=stages, interleave=2), arguments(tmp_path), replace(PLAIN, fsdp_reshard=strategy))
    assert found.config == LongContextConfig(stages=stages, interleave=2, parameters="gathered_per_step")
    assert "parameters='gathered_per_step'" in found.lines[0]


# kind of a wish without words of ours -> the launcher's settings, the arguments, and the remedy
UNTRANSLATED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "offload": ({"fsdp_offload": True}, {}, "layer_weights='host', optimizer_states='host'"),
    "offload in arguments": ({}, {"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "optimizer_states='host'"),
    "xla": ({}, {"fsdp": True, "fsdp_config": {"xla": True}}, "leave xla out of fsdp_config"),
    "strategy": ({"fsdp_reshard": "sideways"}, {}, "the sharding strategy 'sideways', which is none of"),
    "empty weights": ({"loads_on_first": True}, {}, "set fsdp_cpu_ram_efficient_loading: false"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", UNTRANSLATED)
def test_what_has_no_words_is_refused_by_name(tmp_path: Path, name: str) -> None:
    launched, changes, remedy = UNTRANSLATED[name]
    (problem,) = translate(LongContextConfig(), arguments(tmp_path, **changes), replace(PLAIN, **launched)).problems
    assert remedy in problem


@pytest.mark.parametrize(
    "activations,words", [("auto", "becomes LongContextConfig(activations='auto')"), ("keep", "has no effect")]
)
def test_checkpointing_is_one_line_whoever_asks(tmp_path: Path, activations: Any, words: str) -> None:
    config, alone = LongContextConfig(activations=activations), replace(PLAIN, uses_fsdp=False)
    by_name = translate(config, arguments(tmp_path, gradient_checkpointing=True), alone).lines
    by_fsdp = translate(config, arguments(tmp_path), replace(PLAIN, fsdp_recomputes=True)).lines[1:]
    for lines in (by_name, by_fsdp):
        assert len(lines) == 1 and words in lines[0]
    assert translate(config, arguments(tmp_path), alone).lines == ()


ZERO3 = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


def test_deepspeeds_configuration_fills_what_is_left_open(tmp_path: Path) -> None:
    alone = replace(PLAIN, uses_fsdp=False)
    args = arguments(tmp_path, deepspeed={**ZERO3, "gradient_clipping": "auto"})
    found = translate(LongContextConfig(max_length=64), args, alone)
    assert found.config == LongContextConfig(max_length=64, parameters="sharded", layer_weights="host")
    assert len(found.lines) == 1 and found.problems == ()
    own = LongContextConfig(parameters="gathered_per_step", stages=2)
    found = translate(own, arguments(tmp_path, deepspeed={"zero_optimization": {"stage": 3}}), alone)
    assert found.config == own and found.lines[0].endswith("parameters='gathered_per_step' of LongContextConfig stays")
    staged = translate(LongContextConfig(stages=2), arguments(tmp_path, deepspeed={"zero_optimization": {"stage": 2}}), alone)
    assert staged.config.parameters == "gathered_per_step"


# DeepSpeed's configuration on eight ranks -> the arguments, and the refusal
AGAINST: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"gradient_clipping": 0.5}, {}, "asks for max_grad_norm=0.5, but max_grad_norm is 1.0; give both the same"),
    ({"bf16": {"enabled": True}}, {}, "asks for bf16=True, but bf16 is False"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, {"learning_rate": 1e-4}, "asks for learning_rate=0.001"),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5}}}, {"learning_rate": 1e-3}, "max_steps is -1"),
    ({"train_batch_size": 64}, {"per_device_train_batch_size": 4}, "are 32; give numbers that agree"),
    ({"fp16": {"enabled": True}}, {}, "fp16 is {'enabled': True}; set bf16.enabled"),
    ("nowhere.json", {}, "nowhere.json does not exist"),
]


@pytest.mark.parametrize("source,changes,message", AGAINST)
def test_arguments_against_deepspeeds_configuration_are_refused_with_both_values(
    tmp_path: Path, source: Any, changes: dict[str, Any], message: str
) -> None:
    args = arguments(tmp_path, deepspeed=source, **changes)
    found = translate(LongContextConfig(), args, replace(PLAIN, uses_fsdp=False))
    assert message in "\n".join(found.problems) and found.config == LongContextConfig()


def test_optimizer_and_schedule_are_deepspeeds_whatever_the_arguments_say(tmp_path: Path) -> None:
    source = {"optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}}
    source |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    args = arguments(tmp_path, deepspeed=source, optim="adafactor")
    assert translate(LongContextConfig(), args, replace(PLAIN, uses_fsdp=False)).problems == ()
    with hidden_from_trainer(args):
        assert (args.optim, args.lr_scheduler_type, args.deepspeed) == ("adamw_torch_fused", "constant_with_warmup", None)
    assert (args.optim, args.lr_scheduler_type, args.deepspeed) == ("adafactor", "linear", source)
    # one of the two forms of the same optimizer is left as it is
    args.optim = "adamw_torch"
    with hidden_from_trainer(args):
        assert args.optim == "adamw_torch"


def test_a_launcher_that_asks_for_deepspeed_after_the_arguments_were_made_is_refused(tmp_path: Path) -> None:
    launch = replace(PLAIN, uses_fsdp=False, uses_deepspeed=True)
    (problem,) = translate(LongContextConfig(), arguments(tmp_path), launch).problems
    assert "the training arguments were made before; make them after" in problem
