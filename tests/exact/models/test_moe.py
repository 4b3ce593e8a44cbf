"""Mixtures of experts: any plan gives the loss and gradients of plain Hugging Face, with one balance of experts for the step.

Routers compute their softmax in fp32, but token by token and from logits that agree to 1e-15, so plans still agree to 1e-12.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models.reference import TOLERANCE, balance_of, random_rows, reference_step, relative_error, worst_error
from helpers.models.tiny_models import MOE_FAMILIES, ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, chunks_plan, plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.pipeline_steps import check_pipeline
from helpers.ranks.rank_steps import check_layout_step, check_step, group_pool, rank_inputs, run_step
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.experts import router_balance
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import ActivationPolicy, LayerPolicy, MicroBatch, StepPlan, TensorShare
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.round import StepResult
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

CPU = torch.device("cpu")
LENGTHS = [30, 7, 17, 1]
WHOLE = [[(number, 0, length) for number, length in enumerate(LENGTHS)]]
SLICES = [[(0, 0, 9)], [(0, 9, 13)], [(0, 13, 30), (1, 0, 7), (3, 0, 1)], [(2, 0, 17)]]
# coefficient with which the balancing loss weighs about as much as the cross-entropy
BALANCE = 2.0
# order in which some backwards come before other forwards
MIXED = "0F3 0B3 0F0 0F1 0F2 0B2 0B1 0B0"


def case_of(family: str, **changes: Any) -> ModelCase:
    return ModelCase(family, promoted=True, attention="eager" if family == "gpt_oss" else "sdpa", **changes)


def lone_step(case: ModelCase, plan: StepPlan, rows: Any, has_engine: bool = False) -> tuple[StepResult, dict[str, Any]]:
    model = build_model(case)
    patch_model(model)
    engine = ActivationEngine(layer_modules(model), HostTier.on(CPU, 2**22)) if has_engine else None
    routers = router_balance(model, CPU)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU, routers=routers)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    result = executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], num_labels, engine=engine)
    return result, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_reference_balances_as_transformers_does() -> None:
    model, rows = build_model(case_of("mixtral", balance=BALANCE)), random_rows(LENGTHS)
    with torch.no_grad():
        routed = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).router_logits for row in rows]
    of_layers = tuple(torch.cat(rows_of) for rows_of in zip(*routed, strict=True))
    # transformers sums in fp32, hence the tolerance
    assert float(balance_of(routed, model.config)) == pytest.approx(float(load_balancing_loss_func(of_layers, 4, 2)), rel=1e-6)


OFFLOADED = LayerPolicy((TensorShare("layer_input", host=1.0), TensorShare("mlp", recompute=0.3, host=0.4, device=0.3)))


@pytest.mark.wide("mixtral-mixed", "mixtral-recomputed", "mixtral-slices", "gpt_oss-packed")
@pytest.mark.parametrize("plan", ["packed", "slices", "mixed", "recomputed"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_class_matches_with_the_balance_of_the_step(family: str, plan: str) -> None:
    case, rows = case_of(family, balance=BALANCE), random_rows(LENGTHS)
    steps = {
        "packed": sliced_plan(LENGTHS, WHOLE),
        "slices": sliced_plan(LENGTHS, SLICES),
        "mixed": sliced_plan(LENGTHS, SLICES, MIXED),
        "recomputed": same_policy(sliced_plan(LENGTHS, SLICES, MIXED), replayed(0.5, mlp=0.5), OFFLOADED, tile_tokens=16),
    }
    result, gradients = lone_step(case, steps[plan], rows, has_engine=plan == "recomputed")
    assert worst_error((float(result.loss), gradients), reference_step(build_model(case), rows)) <= TOLERANCE


def test_a_step_that_raised_leaves_no_balance_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, rows, others = sliced_plan(LENGTHS, WHOLE), random_rows(LENGTHS), random_rows(LENGTHS, seed=1)
    model = build_model(case_of("mixtral", balance=BALANCE))
    patch_model(model)
    executor = StepExecutor(
        whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU, routers=router_balance(model, CPU)
    )

    def run(own: Any) -> StepResult:
        num_labels = sum(label != -100 for row in own for label in row["labels"][1:])
        return executor.run(plan.for_rank(0), rank_inputs(plan, own, 0)["chunks"], num_labels)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="broken"):
        patched.setattr(executor, "_reduce", broken)
        run(rows)
    found, expected = run(others), lone_step(case_of("mixtral", balance=BALANCE), plan, others)[0]
    assert float(found.aux_loss) == pytest.approx(float(expected.aux_loss), rel=1e-12)


def broken() -> None:
    raise RuntimeError("broken")


@pytest.mark.daily("qwen3_moe_dense")
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_without_a_balance_there_is_none(family: str) -> None:
    case, rows = case_of(family), random_rows(LENGTHS)
    result, gradients = lone_step(case, sliced_plan(LENGTHS, SLICES, MIXED), rows)
    assert result.aux_loss is None
    assert worst_error((float(result.loss), gradients), reference_step(build_model(case), rows)) <= TOLERANCE


@pytest.mark.daily("qwen3_moe-fewer tokens than ranks-0")
@pytest.mark.parametrize(
    "family,layout,ulysses",
    [
        ("mixtral", "<2>,<1,1> with an idle rank", 0),
        ("qwen3_moe", "fewer tokens than ranks", 0),
        ("qwen2_moe", "<2>", 1),
        ("olmoe", "<2>,<1,1>,<2>", 0),
        # three ranks divide four heads unevenly; each has the sinks of its heads
        ("gpt_oss", "<3>", 0),
        ("gpt_oss", "<3>", 1),
    ],
)
def test_groups_and_rings_match_without_their_dummy_tokens(ranks, family: str, layout: str, ulysses: int) -> None:
    num_ranks, groups, lengths = LAYOUTS[layout]
    check_layout_step(ranks(num_ranks), case_of(family, balance=BALANCE), groups, lengths, ulysses=ulysses)


@pytest.mark.daily("sharded-qwen3_moe")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_sharded_experts_match(ranks, family: str, parameters: Any) -> None:
    num_ranks, groups, lengths = LAYOUTS["<2>,<1,1> with an idle rank"]
    check_layout_step(ranks(num_ranks), case_of(family, balance=BALANCE), groups, lengths, parameters=parameters)


# all ranks are one block, in groups of different sizes and with idle ranks; or two blocks that may run different micro-batches
@pytest.mark.daily("mixtral-<2,1,1>-2")
@pytest.mark.parametrize("layout,shard_ranks", [("<4>,<2,2>,<1,1,1,1>", 0), ("<2,1,1>", 2)])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe_dense", "gpt_oss"])
def test_experts_spread_over_ranks_match(ranks, family: str, layout: str, shard_ranks: int) -> None:
    num_ranks, groups, lengths = LAYOUTS[layout]
    plan = plan_of(groups, lengths, num_ranks, parameters="sharded")
    check_step(ranks(num_ranks), case_of(family, balance=BALANCE, spread=True), plan, lengths, shard_ranks)


def test_ranks_replay_layers_with_spread_experts_together(ranks) -> None:
    num_ranks, groups, lengths = LAYOUTS["<2,1,1>"]
    plan = plan_of(groups, lengths, num_ranks, parameters="sharded")
    kept, *replaying = plan.micro_batches[0].groups
    # each group has another policy: none, a replay in tiles of one layer, offloads and a replay that would keep a part of the MLP
    policies = [((LayerPolicy(), replayed(0.5)), 4), ((OFFLOADED, replayed(mlp=0.5)), 8)]
    changed = [
        replace(group, stages=(replace(group.stages[0], activations=(ActivationPolicy(0, 0, layers, tile_tokens),)),))
        for group, (layers, tile_tokens) in zip(replaying, policies, strict=True)
    ]
    plan = validate_plan(replace(plan, micro_batches=(MicroBatch((kept, *changed)),)))
    check_step(ranks(num_ranks), case_of("qwen3_moe_dense", balance=BALANCE, spread=True), plan, lengths)


def test_adapters_beside_spread_experts_match(ranks) -> None:
    lora = (("r", 2), ("lora_alpha", 4), ("target_modules", ["q_proj", "v_proj"]))
    num_ranks, groups, lengths = LAYOUTS["<2>,<1,1> with an idle rank"]
    plan = plan_of(groups, lengths, num_ranks, parameters="sharded")
    check_step(ranks(num_ranks), case_of("mixtral", balance=BALANCE, lora=lora, spread=True), plan, lengths)


def test_adapters_on_attention_match(ranks) -> None:
    lora = (("r", 2), ("lora_alpha", 4), ("target_modules", ["q_proj", "v_proj"]))
    num_ranks, groups, lengths = LAYOUTS["<2>"]
    check_layout_step(ranks(num_ranks), case_of("mixtral", balance=BALANCE, lora=lora), groups, lengths)


@pytest.mark.daily("qwen3_moe_dense")
@pytest.mark.parametrize("family", ["qwen3_moe_dense", "gpt_oss"])
def test_stages_match(ranks, family: str) -> None:
    chunks = [*([span] for span in cut(0, [15, 11, 14])), [(1, 0, 9), (2, 0, 7)]]
    plan = pipeline_plan([40, 9, 7], [[(1, chunks)]], 2, num_layers=2)
    check_pipeline(ranks(2), case_of(family, balance=BALANCE), plan)


TOGETHER, APART = "0F0 0F1 0F2 0B2 0B1 0B0", "0F0 0B0 0F1 0B1 0F2 0B2"
CHUNK_LENGTHS = [13, 7, 5, 17, 3, 2, 19]


def three_chunks(orders: tuple[str, str], parameters: Any) -> StepPlan:
    """Plan of two ranks in one micro-batch, each with three chunks of one sequence."""
    plan = chunks_plan(orders, parameters)
    return replace(plan, lengths=plan.lengths[:6], micro_batches=plan.micro_batches[:1])


@pytest.mark.daily("orders1-replicated")
@pytest.mark.parametrize(
    "orders,parameters",
    [((TOGETHER, TOGETHER), "sharded"), ((TOGETHER, APART), "replicated"), ((APART, APART), "sharded")],
)
def test_ranks_agree_on_the_balance_in_any_order(ranks, orders: tuple[str, str], parameters: Any) -> None:
    plan, rows, case = three_chunks(orders, parameters), random_rows(CHUNK_LENGTHS[:6]), case_of("mixtral", balance=BALANCE)
    expected = reference_step(build_model(case), rows)
    for found in run_step(ranks(2), case, plan, rows):
        assert worst_error(found, expected) <= TOLERANCE


@pytest.mark.daily("-1")
@pytest.mark.parametrize("words,num_passes", [("", 1), (MIXED, 2)])
def test_routing_runs_again_only_where_a_backward_comes_before_a_forward(words: str, num_passes: int) -> None:
    model, rows, plan = (
        build_model(case_of("mixtral", balance=BALANCE)),
        random_rows(LENGTHS),
        sliced_plan(LENGTHS, SLICES, words),
    )
    patch_model(model)
    calls: list[int] = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, inputs, outputs: calls.append(len(outputs[0])))
    executor = StepExecutor(whole_model(model, 2), GroupPool((1,), 1.0), CPU, routers=router_balance(model, CPU))
    result = executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], 1)
    assert sum(calls) == num_passes * sum(LENGTHS)
    assert result.router_load is not None and 1 <= float(result.router_load) <= 4 / 2


# (micro-batches of (degree, sequences), lengths) of each plan of a step
PLANS = [([[(2, (0,))], [(1, (1,)), (1, (2,))]], [31, 7, 5]), ([[(2, (0,))]], [1])]
ROWS = [random_rows(lengths, seed=seed) for seed, (_, lengths) in enumerate(PLANS)]


def two_steps(case: ModelCase, plans_json: list[str]) -> tuple[str, list[Any]]:
    """Runs two steps with all plans; returns the error for plans without `route`, and losses and gradients of the steps."""
    pool, plans, model = group_pool(), [plan_from_json(text) for text in plans_json], build_model(case)
    patch_model(model)
    executor = StepExecutor(whole_model(model, 2), pool, CPU, routers=router_balance(model, CPU))
    count = sum(label != -100 for rows in ROWS for row in rows for label in row["labels"][1:])
    work = [(p.for_rank(pool.rank), rank_inputs(p, rows, pool.rank)["chunks"]) for p, rows in zip(plans, ROWS, strict=True)]
    with pytest.raises(ValueError, match=r"call route\(\)") as refused:
        executor.run(*work[0], count, reduce=False)
    steps = []
    for _ in range(2):
        model.zero_grad()
        executor.route(work)
        total = 0.0
        for place, (path, chunks) in enumerate(work):
            total += float(executor.run(path, chunks, count, reduce=place == len(work) - 1).loss)
            executor.evaluate(path, chunks)
        steps.append((total, {name: p.grad.clone() for name, p in model.named_parameters()}))
    return str(refused.value), steps


def test_several_plans_of_a_step_have_one_balance(ranks) -> None:
    case = case_of("qwen3_moe", balance=BALANCE)
    plans = [plan_to_json(plan_of(layout, lengths, 2)) for layout, lengths in PLANS]
    expected = reference_step(build_model(case), [row for rows in ROWS for row in rows])
    for _, steps in ranks(2).run(two_steps, case, plans):
        assert max(worst_error(step, expected) for step in steps) <= TOLERANCE


@pytest.mark.daily("dtype0-2e-05")
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_grouped_products_stay_close_to_fp64(dtype: torch.dtype, tolerance: float) -> None:
    rows = random_rows(LENGTHS)
    exact = reference_step(build_model(case_of("qwen3_moe", balance=BALANCE)), rows)
    model = build_model(case_of("qwen3_moe", balance=BALANCE, dtype=dtype))
    model.set_experts_implementation("grouped_mm")
    patch_model(model)
    executor = StepExecutor(whole_model(model, 2), GroupPool((1,), 1.0), CPU, routers=router_balance(model, CPU))
    plan = sliced_plan(LENGTHS, SLICES, MIXED)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    loss = float(executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], num_labels).loss)
    assert loss == pytest.approx(exact[0], rel=tolerance)
    errors = [relative_error(p.grad.double(), exact[1][name]) for name, p in model.named_parameters()]
    assert sorted(errors)[len(errors) // 2] <= tolerance
