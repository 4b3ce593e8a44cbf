"""FSDP configurations in our words, each with one line, and names for what has no such words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_longctx import LongContextConfig
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.rules.training_arguments import translate

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
