"""Training with moments of 8 and 4 bits: equal to torchao on one process, counted in plans, and carried by every checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import make_trainer, plain_training_with, train_on_rank
from torch import Tensor
from transformers import TrainingArguments

from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.rules.callbacks import ALONE
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.runtime.parameters.gradients import local_shard
from hf_longctx.runtime.parameters.low_bit import is_low_bit, moment_bytes
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")

# on two ranks every shard of a matrix has whole blocks, and norms are plain on any number of ranks
WIDE = ModelCase(num_heads=32, num_kv_heads=32, promoted=True)
BF16 = replace(WIDE, promoted=False, dtype=torch.bfloat16)
NAMES = {8: "adamw_torch_8bit", 4: "adamw_torch_4bit"}
CONSTANT = {"lr_scheduler_type": "constant", "warmup_steps": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "replicated": {"tokens_per_rank": 64},
    "sharded": {"tokens_per_rank": 64, "parameters": "sharded"},
    "staged": {"stages": 2, "tokens_per_rank": 64},
    # on four ranks
    "sharded stages": {"stages": 2, "tokens_per_rank": 32, "parameters": "sharded"},
    "stages gathered per step": {"stages": 2, "tokens_per_rank": 32, "parameters": "gathered_per_step"},
}
Values = dict[str, Tensor]


def uncompiled() -> Any:
    """Lets torchao run its step as it is written; compiling it takes half a minute for each shape."""
    return torch.compiler.set_stance("force_eager")


def train_quickly(*args: Any) -> Any:
    with uncompiled():
        return train_on_rank(*args)


@pytest.fixture(scope="module")
def stock(rows) -> Callable[[ModelCase, int], tuple[list[float], Values]]:
    """Losses and last weights of a plain loop on one process, with torchao's optimizer of so many bits, or torch's (32)."""
    import torchao.optim

    kinds = {8: torchao.optim.AdamW8bit, 4: torchao.optim.AdamW4bit}

    @cache
    def run(case: ModelCase, bits: int) -> tuple[list[float], Values]:
        def optimizer_of(model: torch.nn.Module, step: int) -> torch.optim.Optimizer | None:
            if step:
                return None
            weights = list(model.parameters())
            groups: list[dict[str, Any]] = [
                {"params": [p for p in weights if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
            ]
            # transformers sets this block size for both
            return kinds[bits](groups, lr=1e-2, block_size=256) if bits < 32 else torch.optim.AdamW(groups, lr=1e-2)

        with uncompiled():
            return plain_training_with(optimizer_of, case, rows, 4)

    return run


@pytest.mark.parametrize("bits", NAMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_training_follows_torchao_on_one_process(ranks, rows, stock, name: str, bits: int) -> None:
    losses, weights = stock(WIDE, bits)
    arguments = {**CONSTANT, "max_steps": 4, "optim": NAMES[bits], "max_grad_norm": 0.5}
    num_ranks = 4 if CONFIGS[name]["tokens_per_rank"] == 32 else 2
    for found, _, last in ranks(num_ranks).run(train_quickly, WIDE, rows, CONFIGS[name], arguments, timeout_s=300.0):
        assert found == pytest.approx(losses, rel=1e-10)
        for key, value in last.items():
            # a stage has some of the weights
            assert (value - weights[key]).abs().max() <= 1e-10 * weights[key].abs().max(), key
    # or the comparison would hold for plain moments, too
    assert stock(WIDE, 32)[0][2:] != pytest.approx(losses[2:], rel=1e-6)


def train(rows: Any, folder: str, config: dict[str, Any], arguments: dict[str, Any], resume: str) -> tuple[Values, set[str]]:
    """Trains bf16 weights; returns moments and master weights of this rank's stage, and which moments have few bits here."""
    saving = {"max_steps": 2, "learning_rate": 1e-3, **CONSTANT, "save_strategy": "steps", "save_steps": 2}
    # equally many sequences in a step of 1, 2, 3 and 4 ranks
    arguments = {"per_device_train_batch_size": 12 // dist.get_world_size(), **arguments}
    with uncompiled():
        trainer = make_trainer(BF16, rows, folder, config, {**saving, **arguments})
        trainer.train(resume_from_checkpoint=resume or None)
    return values_of(trainer)


def values_of(trainer: Any) -> tuple[Values, set[str]]:
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    values: Values = {}
    few_bits = set()
    for parameter, state in trainer._plain_optimizer.state.items():
        for key in {"exp_avg", "exp_avg_sq", MASTER_WEIGHT} & state.keys():
            name = f"{names[parameter]} {key}"
            few_bits |= {name} if is_low_bit(state[key]) else set()
            values[name] = unpacked(state[key])
    values |= {name: whole(weight.detach()).clone() for weight, name in names.items()}
    return values, few_bits


def unpacked(state: Tensor) -> Tensor:
    """The whole state, plain; shards of one state may have few bits on some ranks alone."""
    own: Any = local_shard(state)
    plain = own.dequantize() if is_low_bit(own) else own.clone()
    if own is state:
        return plain
    shape, mesh = state.shape, state.device_mesh
    return torch.distributed.tensor.DTensor.from_local(
        plain, mesh, state.placements, run_check=False, shape=shape, stride=state.stride()
    ).full_tensor()


@pytest.fixture(scope="module")
def runs(ranks, rows, tmp_path_factory) -> dict[tuple[str, int, int], tuple[Path, Values]]:
    """Folder and values of runs, by placement, ranks and bits."""
    made = {}
    for name, num_ranks, bits in [
        *((name, 2, 8) for name in CONFIGS),
        ("sharded", 2, 4),
        ("replicated", 2, 4),
        ("sharded", 3, 8),
    ]:
        folder = tmp_path_factory.mktemp(f"{name}{num_ranks}{bits}")
        found = ranks(num_ranks).run(train, rows, str(folder), CONFIGS[name], {"optim": NAMES[bits]}, "")
        assert any(few for _, few in found)
        made[name, num_ranks, bits] = folder, {key: value for values, _ in found for key, value in values.items()}
    return made


# names of moments whose shards have whole blocks on two ranks, and plain moments on three
DOWN = "down_proj"


@resuming
@pytest.mark.parametrize(
    "first,num_ranks,then,bits",
    [
        (("replicated", 2, 8), 1, "replicated", 8),
        (("sharded", 2, 8), 2, "sharded", 8),
        (("sharded", 2, 8), 4, "sharded", 8),
        (("sharded", 2, 8), 3, "sharded", 8),
        (("sharded", 3, 8), 2, "sharded", 8),
        (("sharded", 2, 4), 3, "sharded", 4),
        (("sharded", 2, 4), 1, "replicated", 4),
        (("replicated", 2, 4), 2, "sharded", 4),
        (("replicated", 2, 8), 3, "sharded", 8),
        (("sharded", 2, 8), 2, "staged", 8),
        (("staged", 2, 8), 2, "sharded", 8),
    ],
)
def test_moments_pass_through_checkpoints(ranks, rows, runs, tmp_path: Path, first, num_ranks: int, then: str, bits: int) -> None:
    folder, saved = runs[first]
    # no step is left to do
    resumed = ranks(num_ranks).run(
        train, rows, str(tmp_path), CONFIGS[then], {"optim": NAMES[bits]}, str(folder / "checkpoint-2")
    )
    seen = {key for found, _ in resumed for key in found}
    assert seen == set(saved)
    for found, few_bits in resumed:
        for name, value in found.items():
            if first[1] == 3 and num_ranks == 2 and DOWN in name and "exp_avg" in name:
                # plain moments are rounded, now that their shards have whole blocks
                assert any(DOWN in each for each in few_bits)
                assert (value - saved[name]).norm() < 0.02 * saved[name].norm()
                assert not torch.equal(value, saved[name])
            else:
                assert torch.equal(value, saved[name]), name


@resuming
@pytest.mark.parametrize(
    "name,first", [("replicated", "adamw_torch"), ("replicated", "adamw_torch_4bit"), ("sharded", "adamw_torch")]
)
def test_moments_of_another_optimizer_are_rounded_to_these_bits(ranks, rows, tmp_path: Path, name: str, first: str) -> None:
    pool = ranks(2)
    before = pool.run(train, rows, str(tmp_path / "a"), CONFIGS[name], {"optim": first}, "")[0][0]
    # steps that follow find a rate that they can use
    further = {"optim": NAMES[8], "max_steps": 3}
    pool.run(train, rows, str(tmp_path / "b"), CONFIGS[name], further, str(tmp_path / "a" / "checkpoint-2"))
    same = {"optim": NAMES[8]}
    found, few_bits = pool.run(train, rows, str(tmp_path / "c"), CONFIGS[name], same, str(tmp_path / "a" / "checkpoint-2"))[0]
    assert len(few_bits) >= 28
    for key in few_bits:
        assert (found[key] - before[key]).norm() < 0.05 * before[key].norm(), key


def refused_at_resume(rows: Any, folder: str, config: dict[str, Any], arguments: dict[str, Any], resume: str) -> str:
    try:
        train(rows, folder, config, arguments, resume)
    except ValueError as error:
        return str(error)
    return ""


@resuming
def test_shards_with_moments_of_other_bits_are_refused(ranks, rows, runs, tmp_path: Path) -> None:
    checkpoint = str(runs["sharded", 2, 4][0] / "checkpoint-2")
    for found in ranks(2).run(refused_at_resume, rows, str(tmp_path), CONFIGS["sharded"], {"optim": NAMES[8]}, checkpoint):
        assert "its moments have another number of bits; set optim as it was in its run" in found


def held_bytes(rows: Any, folder: str, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[int, float, int]:
    """Bytes of an optimizer's states after a step, and of a moment by plans; bytes of the states with which plans count."""
    with uncompiled():
        trainer = make_trainer(BF16, rows, folder, config, {"max_steps": 1, **arguments})
        trainer.train()
    held = 0
    for state in trainer._plain_optimizer.state.values():
        for value in state.values():
            own: Any = local_shard(value)
            parts = [own.codes, own.scale, own.qmap] if is_low_bit(own) else [own] if own.dim() else []
            held += sum(part.numel() * part.element_size() for part in parts)
    spec = trainer.longctx_run.setup.costs.model
    assert spec == replace(
        model_spec(trainer.model),
        has_master_weights=spec.has_master_weights,
        saves_kv_once=spec.saves_kv_once,
        index=spec.index,
        moment_bytes=spec.moment_bytes,
    ) or config.get("parameters")
    return held, spec.moment_bytes, ByteModel(spec).states()


@pytest.mark.parametrize("bits", NAMES)
@pytest.mark.parametrize("copies", [True, False])
def test_plans_count_them(ranks, rows, tmp_path: Path, bits: int, copies: bool) -> None:
    config = {"tokens_per_rank": 64, "fp32_master_weights": copies}
    ((held, per_weight, planned),) = ranks(1).run(held_bytes, rows, str(tmp_path), config, {"optim": NAMES[bits]})
    count = sum(weight.numel() for weight in build_model(BF16).parameters())
    assert per_weight == pytest.approx(2 * (bits / 8 + 4 / 256), rel=0.1)
    # weights and gradients in bf16, gradients' sums in fp32
    assert planned == pytest.approx(8 * count + held, rel=0.02)


def test_shards_with_few_elements_count_as_plain(ranks, rows, tmp_path: Path) -> None:
    config = {"tokens_per_rank": 64, "parameters": "sharded"}
    for num_ranks in (2, 4):
        arguments = {"optim": NAMES[8]}
        found = ranks(num_ranks).run(held_bytes, rows, str(tmp_path / str(num_ranks)), config, arguments)
        count = sum(weight.numel() for weight in build_model(BF16).parameters())
        # the rest are master weights
        assert max(held for held, _, _ in found) == pytest.approx((found[0][1] + 4) * count / num_ranks, rel=0.01)
    assert moment_bytes([(64, 64)], 8) < 3 < moment_bytes([(64, 64)], 8, 2) == 8


BY_CHANCE = {"optim": NAMES[8], "optim_args": "bf16_stochastic_round=True", "learning_rate": 1e-5}


@resuming
@pytest.mark.parametrize("name", ["replicated", "sharded"])
def test_bf16_weights_without_copies_are_rounded_by_chance_and_alike_on_all_ranks(ranks, rows, tmp_path: Path, name: str) -> None:
    config = {**CONFIGS[name], "fp32_master_weights": False, "replica_check_steps": 1}
    pool = ranks(2)
    longer = {**BY_CHANCE, "max_steps": 4}
    both = pool.run(train, rows, str(tmp_path / "a"), config, longer, "")
    values = both[0][0]
    assert all(torch.equal(value, both[1][0][key]) for key, value in values.items())
    start = dict(build_model(BF16).named_parameters())
    moved = {key: float((value != start[key]).float().mean()) for key, value in values.items() if key in start}
    # most updates of 1e-5 are far below the steps of bf16 here, so that some weights move a whole step
    assert 0.005 < moved["model.layers.0.self_attn.q_proj.weight"] < 0.3
    # an interrupted run draws the same numbers
    again = pool.run(
        train, rows, str(tmp_path / "b"), config, {**BY_CHANCE, "max_steps": 4}, str(tmp_path / "a" / "checkpoint-2")
    )
    assert all(torch.equal(value, again[0][0][key]) for key, value in values.items())


def refusal(rows: Any, folder: str, config: dict[str, Any], arguments: dict[str, Any], case: ModelCase = BF16) -> str:
    try:
        make_trainer(case, rows, folder, config, arguments)
    except ValueError as error:
        return str(error)
    return ""


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "host": ({"optimizer_states": "host"}, {}, "optimizer_states='host' has no effect on it"),
    "auto": ({"optimizer_states": "auto"}, {}, "optimizer_states='auto' has no effect on it"),
    "blocks": ({}, {"optim_args": "block_size=128"}, "sets block_size, which transformers hands to adamw_torch_8bit as text"),
    "copies": ({}, {"optim_args": "bf16_stochastic_round=True"}, "set fp32_master_weights=False, or leave it out"),
    "stages": (
        {"stages": 2, "fp32_master_weights": False},
        {"optim_args": "bf16_stochastic_round=True"},
        "would round the copies of a tied weight apart on stages=2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_few_bits_is_refused_by_name(ranks, rows, tmp_path: Path, name: str) -> None:
    config, arguments, message = REFUSED[name]
    for found in ranks(2).run(refusal, rows, str(tmp_path), config, {"optim": NAMES[8], **arguments}):
        assert message in found


@pytest.mark.parametrize("value", ["True", "1", "yes"])
def test_ranks_of_ddp_would_round_apart_so_a_callback_alone_refuses_it(tmp_path: Path, value: str) -> None:
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "optim": NAMES[8], "report_to": "none"}
    rules = {"callback-and-rounding": ALONE["callback-and-rounding"]}

    def found(**changes: Any) -> list[str]:
        return refusals(rules, Facts(args=TrainingArguments(**arguments, **changes), num_ranks=2))

    assert "by other random numbers" in found(optim_args=f"bf16_stochastic_round={value}")[0]
    assert found() == found(optim_args="bf16_stochastic_round=False") == []
