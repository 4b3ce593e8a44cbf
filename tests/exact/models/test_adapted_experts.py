"""Adapters on weights of experts: any plan gives the loss and gradients of plain PEFT, which adds them to copies of weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models.reference import TOLERANCE, random_rows, reference_step, worst_error
from helpers.models.tiny_models import MOE_FAMILIES, ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.pipeline_steps import check_pipeline, stage_executor
from helpers.ranks.rank_steps import check_layout_step, check_step, rank_inputs, whole
from peft.tuners.lora import ParamWrapper

from hf_longctx.hf.models import expert_adapters
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.experts import router_balance
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.packed_experts import packed_weight, unpacked_copy
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import LayerPolicy, StepPlan, TensorShare
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core.expert_products import PackedMatrices, Part
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

CPU = torch.device("cpu")
LENGTHS = [30, 7, 17, 1]
WHOLE = [[(number, 0, length) for number, length in enumerate(LENGTHS)]]
SLICES = [[(0, 0, 9)], [(0, 9, 13)], [(0, 13, 30), (1, 0, 7), (3, 0, 1)], [(2, 0, 17)]]
BALANCE = 2.0
MIXED = "0F3 0B3 0F0 0F1 0F2 0B2 0B1 0B0"
OFFLOADED = LayerPolicy((TensorShare("layer_input", host=1.0), TensorShare("mlp", recompute=0.3, host=0.4, device=0.3)))
OFFLOADED_INPUT = LayerPolicy((TensorShare("layer_input", host=1.0), TensorShare("mlp", recompute=1.0, device=0.0)))
STEPS = {
    "packed": sliced_plan(LENGTHS, WHOLE),
    "slices": sliced_plan(LENGTHS, SLICES),
    "mixed": sliced_plan(LENGTHS, SLICES, MIXED),
    "recomputed": same_policy(sliced_plan(LENGTHS, SLICES, MIXED), replayed(0.5, mlp=0.5), OFFLOADED, tile_tokens=16),
}
# with the names by which PEFT means experts and router, and twice the rank for two matrices in one
ALL_LINEAR = (("r", 2), ("lora_alpha", 3), ("target_modules", "all-linear"))
EXPERTS = (
    ("r", 2),
    ("lora_alpha", 4),
    ("target_modules", ["q_proj"]),
    ("target_parameters", ["experts.gate_up_proj", "experts.down_proj"]),
    ("rank_pattern", {r".*gate_up_proj": 3}),
)


def case_of(family: str, **changes: Any) -> ModelCase:
    attention = "eager" if family == "gpt_oss" else "sdpa"
    return ModelCase(family, promoted=True, attention=attention, **{"lora": EXPERTS, "balance": BALANCE, **changes})


def lone_step(case: ModelCase, plan: StepPlan, rows: Any, has_engine: bool = False) -> tuple[float, dict[str, Any]]:
    model = build_model(case)
    assert case.packed or any(isinstance(module, ParamWrapper) for module in model.modules())
    patch_model(model)
    FusedLayers("").bind(model)
    engine = ActivationEngine(layer_modules(model), HostTier.on(CPU, 2**22)) if has_engine else None
    routers = router_balance(model, CPU)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU, routers=routers)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    result = executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], num_labels, engine=engine)
    return float(result.loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.wide("mixtral-lora0-recomputed", "olmoe-lora4-packed", "mixtral-lora0-slices", "mixtral-lora0-mixed")
@pytest.mark.parametrize("plan", STEPS)
@pytest.mark.parametrize(
    "family,lora",
    # PEFT takes all-linear to leave the experts of other classes out
    [
        *((family, EXPERTS) for family in MOE_FAMILIES),
        *((family, ALL_LINEAR) for family in ("mixtral", "qwen3_moe_dense", "olmoe")),
    ],
)
def test_every_plan_has_the_gradients_of_peft(family: str, lora: Any, plan: str) -> None:
    case, rows = case_of(family, lora=lora), random_rows(LENGTHS)
    found = lone_step(case, STEPS[plan], rows, has_engine=plan == "recomputed")
    assert worst_error(found, reference_step(build_model(case), rows)) <= TOLERANCE


@pytest.mark.daily("gpt_oss-<3>-1")
@pytest.mark.parametrize(
    "family,layout,ulysses",
    [("mixtral", "<2>,<1,1> with an idle rank", 0), ("qwen3_moe", "fewer tokens than ranks", 0), ("gpt_oss", "<3>", 1)],
)
def test_groups_and_rings(ranks, family: str, layout: str, ulysses: int) -> None:
    num_ranks, groups, lengths = LAYOUTS[layout]
    check_layout_step(ranks(num_ranks), case_of(family), groups, lengths, ulysses=ulysses)


@pytest.mark.daily("gathered_per_round-qwen3_moe")
@pytest.mark.parametrize("family,lora", [("qwen3_moe", ALL_LINEAR), ("gpt_oss", EXPERTS)], ids=["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_shards(ranks, family: str, lora: Any, parameters: Any) -> None:
    num_ranks, groups, lengths = LAYOUTS["<2>,<1,1> with an idle rank"]
    check_layout_step(ranks(num_ranks), case_of(family, lora=lora), groups, lengths, parameters=parameters)


@pytest.mark.daily("qwen3_moe_dense-<2,1,1>-2")
@pytest.mark.parametrize("layout,shard_ranks", [("<4>,<2,2>,<1,1,1,1>", 0), ("<2,1,1>", 2)])
@pytest.mark.parametrize("family", ["qwen3_moe_dense", "gpt_oss"])
def test_experts_spread_over_ranks(ranks, family: str, layout: str, shard_ranks: int) -> None:
    num_ranks, groups, lengths = LAYOUTS[layout]
    plan = plan_of(groups, lengths, num_ranks, parameters="sharded")
    check_step(ranks(num_ranks), case_of(family, spread=True), plan, lengths, shard_ranks)


def test_an_adapter_dealt_to_another_rank_is_found(ranks) -> None:
    num_ranks, groups, lengths = LAYOUTS["<2,1,1>"]
    plan = plan_of(groups, lengths, num_ranks, parameters="sharded")
    with pytest.raises(AssertionError):
        check_step(ranks(num_ranks), case_of("mixtral", spread=True), plan, lengths, bug="adapters of another rank's experts")


@pytest.mark.daily("qwen3_moe_dense")
@pytest.mark.parametrize("family", ["qwen3_moe_dense", "gpt_oss"])
def test_stages(ranks, family: str) -> None:
    chunks = [*([span] for span in cut(0, [15, 11, 14])), [(1, 0, 9), (2, 0, 7)]]
    plan = pipeline_plan([40, 9, 7], [[(1, chunks)]], 2, num_layers=2)
    check_pipeline(ranks(2), case_of(family), plan)


def accumulating_on_rank(case: ModelCase, plans: list[str], rows: list[Any]) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of this rank's stage after a step that accumulates over all plans."""
    steps = [plan_from_json(text) for text in plans]
    executor, engine = stage_executor(case, steps[0])
    num_labels = sum(label != -100 for each in rows for row in each for label in row["labels"][1:])
    rank, loss = executor.pool.rank, 0.0
    work = [(plan.for_rank(rank), rank_inputs(plan, each, rank)["chunks"]) for plan, each in zip(steps, rows, strict=True)]
    if case.balance:
        # rows of all plans count before the first backward
        executor.route(work)
    for number, (path, chunks) in enumerate(work):
        loss += float(executor.run(path, chunks, num_labels, reduce=number == len(steps) - 1, engine=engine).loss)
    return loss, {name: whole(p.grad) for name, p in executor.model.named_parameters() if p.grad is not None}


@pytest.mark.daily("gpt_oss-lora1-False-sharded-None")
@pytest.mark.parametrize("parameters,balance", [("sharded", None), ("gathered_per_step", None), ("sharded", BALANCE)])
@pytest.mark.parametrize(
    "family,lora,spread", [("qwen3_moe", ALL_LINEAR, False), ("gpt_oss", EXPERTS, False), ("qwen3_moe_dense", EXPERTS, True)]
)
def test_accumulated_steps_of_sharded_stages(
    ranks, family: str, lora: Any, spread: bool, parameters: Any, balance: float | None
) -> None:
    case = case_of(family, lora=lora, spread=spread, balance=balance)
    chunks = [*([span] for span in cut(0, [15, 11, 14])), [(1, 0, 9), (2, 0, 7)]]
    groups = ([(1, chunks), (1, [[(3, 0, 13)]])], [(2, [[(0, 0, 9)], [(0, 9, 17), (1, 0, 12)]])])
    lengths = [40, 9, 7, 13], [17, 12]
    plans = [
        pipeline_plan(each, [group], 2, num_layers=2, parameters=parameters) for each, group in zip(lengths, groups, strict=True)
    ]
    rows = [random_rows(each, seed=number) for number, each in enumerate(lengths)]
    expected = reference_step(build_model(case), [row for each in rows for row in each])
    names = set()
    for loss, gradients in ranks(4).run(accumulating_on_rank, case, [plan_to_json(plan) for plan in plans], rows):
        names |= gradients.keys()
        assert worst_error((loss, gradients), (expected[0], {name: expected[1][name] for name in gradients})) <= TOLERANCE
    assert names == expected[1].keys()


ATTENTION = (("r", 2), ("lora_alpha", 4), ("target_modules", ["q_proj", "v_proj"]))


@pytest.mark.daily(
    "qwen3_moe-nf4-on experts-packed",
    "qwen3_moe-nf4-on attention-packed",
    "gpt_oss-mxfp4-on experts-packed",
    "qwen3_moe-fp8-on experts-packed",
)
@pytest.mark.parametrize("plan", STEPS)
@pytest.mark.parametrize("lora", [EXPERTS, ATTENTION], ids=["on experts", "on attention"])
@pytest.mark.parametrize("family,packed", [("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8")])
def test_experts_in_four_bits(family: str, packed: str, lora: Any, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the tiny models have four experts
    monkeypatch.setattr(expert_adapters, "packed_weight", lambda *which: unpacked_in_turn(packed_weight(*which)))
    case, rows = case_of(family, lora=lora, packed=packed), random_rows(LENGTHS)
    plain = build_model(case)
    # PEFT's own forward cannot add adapters to packed weights
    for module in list(plain.modules()):
        for name, child in list(module.named_children()):
            if hasattr(child, "parametrizations"):
                setattr(module, name, unpacked_copy(child))
    # experts are unpacked anew for every call, so that no MLP runs in tiles
    whole = same_policy(sliced_plan(LENGTHS, SLICES, MIXED), replayed(0.5), OFFLOADED_INPUT, tile_tokens=16)
    found = lone_step(case, whole if plan == "recomputed" else STEPS[plan], rows, has_engine=plan == "recomputed")
    assert worst_error(found, reference_step(plain, rows)) <= TOLERANCE


def unpacked_in_turn(found: PackedMatrices | None) -> PackedMatrices | None:
    return None if found is None else replace(found, at_once=3)


@pytest.mark.parametrize("packed", ["", "mxfp4"])
def test_replays_leave_experts_to_their_backward(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[bool] = []
    own = Part.add_to
    monkeypatch.setattr(Part, "add_to", lambda part, *given: (sums.append(len(given) == 3), own(part, *given))[1])
    model, rows = build_model(case_of("qwen3_moe", balance=None, packed=packed)), random_rows(LENGTHS)
    patch_model(model)
    FusedLayers("").bind(model)
    engine = ActivationEngine(layer_modules(model), HostTier.on(CPU, 2**22))
    # one tile of all tokens
    plan = same_policy(STEPS["packed"], replayed(), replayed(0.5), tile_tokens=64)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU)
    for trials in (1, 0):
        sums.clear()
        executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], 1, engine=engine)
        # two layers add up outputs in their first run alone; two more runs of a few tokens find this out, one without outputs
        assert (sums.count(True), sums.count(False)) == (2 * (1 + trials), 2 * (1 + 2 * trials))


@pytest.mark.daily("sharded")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_shards_of_experts_in_four_bits(ranks, parameters: Any) -> None:
    num_ranks, groups, lengths = LAYOUTS["<2>,<1,1> with an idle rank"]
    case = case_of("gpt_oss", lora=ATTENTION, packed="mxfp4")
    check_layout_step(ranks(num_ranks), case, groups, lengths, parameters=parameters)


def test_stages_of_experts_in_four_bits(ranks) -> None:
    chunks = [*([span] for span in cut(0, [15, 11, 14])), [(1, 0, 9), (2, 0, 7)]]
    plan = pipeline_plan([40, 9, 7], [[(1, chunks)]], 2, num_layers=2)
    check_pipeline(ranks(2), case_of("gpt_oss", lora=ATTENTION, packed="mxfp4"), plan)


def test_routers_whose_logits_are_tied() -> None:
    case, rows = case_of("qwen3_moe", lora=EXPERTS, balance=None), random_rows(LENGTHS)

    def build() -> Any:
        model = build_model(case)
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.data[1::2] = weight.data[::2]
        return model

    model = build()
    patch_model(model)
    FusedLayers("").bind(model)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    result = executor.run(STEPS["slices"].for_rank(0), rank_inputs(STEPS["slices"], rows, 0)["chunks"], num_labels)
    found = float(result.loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert worst_error(found, reference_step(build(), rows)) <= TOLERANCE
