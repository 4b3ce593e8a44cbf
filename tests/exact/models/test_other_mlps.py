"""Layers whose MLP has another name, several parts or no module of its own, under policies: gradients of plain Hugging Face."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.measures.class_sweep import SLICES, Lora, lone_step, model_in_wide_floats, patched, reference, worst
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import TOLERANCE, random_rows, reference_step, worst_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import newest
from helpers.plans.pipeline_plans import LENGTHS as STAGED
from helpers.plans.pipeline_plans import SLICED, pipeline_plan
from helpers.plans.policies import num_policies, replayed, with_policies
from helpers.plans.sliced_plans import sliced_plan
from helpers.ranks.pipeline_steps import stage_step_on_rank

from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import ActivationPolicy, LayerPolicy, LayerRange, MicroBatch, StepPlan, TensorShare
from hf_longctx.runtime.activations.engine import ActivationEngine, Rerun
from hf_longctx.runtime.activations.host_tier import HostTier

pytestmark = newest

LENGTHS, TILE_TOKENS = [30, 7, 17, 1], 8
# class -> modules of its MLP
TILED = {
    "GraniteMoeForCausalLM": ("router", "output_linear"),
    "GraniteMoeHybridForCausalLM": ("input_linear", "output_linear"),
    "NemotronHForCausalLM": ("up_proj", "down_proj"),
}
WHOLE = {
    "BloomForCausalLM": ("dense_h_to_4h", "dense_4h_to_h"),
    "DbrxForCausalLM": ("Wqkv", "out_proj"),
    "MptForCausalLM": ("up_proj", "down_proj"),
    "OPTForCausalLM": ("fc1", "fc2"),
    "RobertaForCausalLM": ("intermediate.dense", "output.dense"),
    "ZayaForCausalLM": ("q_proj", "o_proj"),
}
CLASSES = {**TILED, **WHOLE}
# first layers keep and offload inputs and outputs of attention, others recompute everything from an input on the host
MIXED = (replayed(0.25, 0.5, 1.0, 0.5), replayed(1.0, mlp=1.0, input_host=1.0))
TILED_MLP = (replayed(0.25, 0.5, 0.25, 0.5), replayed(1.0, mlp=0.5, input_host=1.0))


def policy_error(name: str, plan: StepPlan, lora: Lora = ()) -> float:
    """The largest relative error of loss and gradients under a plan with policies, on one rank with a host tier."""
    expected, tier = reference(name, lora), HostTier.on(torch.device("cpu"), 2**24)
    with wide_floats():
        model = patched(model_in_wide_floats(name, lora))
        engine = ActivationEngine(layer_modules(model), tier)
        found = lone_step(model, plan, engine)
    assert tier.stored_bytes == 0
    return worst(found, expected)


def under(plan: StepPlan, name: str, policies: tuple[LayerPolicy, ...]) -> StepPlan:
    """The plan of one group on one rank with these policies in turn for all layers of a class, in tiles."""
    (group,) = plan.micro_batches[0].groups
    num_layers = len(layer_modules(build_any(name, is_random=False)))
    layers = tuple(itertools.islice(itertools.cycle(policies), num_layers))
    activations = tuple(ActivationPolicy(chunk.index, 0, layers, TILE_TOKENS) for chunk in group.chunks)
    stage = replace(group.stages[0], layer_ranges=(LayerRange(0, num_layers),), activations=activations)
    return replace(plan, micro_batches=(MicroBatch((replace(group, stages=(stage,)),)),))


@pytest.mark.daily("OPTForCausalLM")
@pytest.mark.parametrize("name", CLASSES)
def test_slices_that_recompute_and_offload_match(name: str) -> None:
    plan = under(sliced_plan(LENGTHS, SLICES), name, TILED_MLP if name in TILED else MIXED)
    assert policy_error(name, plan) <= TOLERANCE


@pytest.mark.daily("OPTForCausalLM")
@pytest.mark.parametrize("name", CLASSES)
def test_adapters_of_such_layers_match(name: str) -> None:
    lora: Lora = (("r", 2), ("lora_alpha", 8), ("target_modules", CLASSES[name]))
    if name == "GraniteMoeForCausalLM":
        lora = (("r", 2), ("lora_alpha", 8), ("target_modules", ("q_proj", "o_proj")))
    plan = under(sliced_plan(LENGTHS, SLICES), name, TILED_MLP if name in TILED else MIXED)
    assert policy_error(name, plan, lora) <= TOLERANCE


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MptForCausalLM", "OPTForCausalLM", "RobertaForCausalLM"])
def test_layers_that_run_once_more_to_make_the_next_input_match(name: str) -> None:
    made: list[int] = []
    first = replayed(1.0, input_host=0.5)
    again = replace(first, shares=(TensorShare("layer_input", recompute=1.0), *first.shares[1:]))
    plan = under(sliced_plan(LENGTHS, [[(number, 0, length) for number, length in enumerate(LENGTHS)]]), name, (first, again))
    with patch.object(Rerun, "__call__", lambda rerun: made.append(1) or rerun._run(rerun.slot.fetch_input())):
        assert policy_error(name, plan) <= TOLERANCE
    # the input of the second layer was kept nowhere
    assert made == [1]


@pytest.mark.parametrize(
    "name,reason",
    [
        ("BloomForCausalLM", "BloomMLP takes more than hidden states"),
        ("OPTForCausalLM", "OPTDecoderLayer has no module that is its MLP"),
        ("ZayaForCausalLM", "ZayaSparseMoeBlock takes more than hidden states"),
    ],
)
def test_a_share_of_an_mlp_that_cannot_run_alone_is_refused(name: str, reason: str) -> None:
    engine = ActivationEngine(layer_modules(patched(model_in_wide_floats(name, ()))))
    kept = ActivationPolicy(3, 0, (replayed(1.0), replayed(1.0, mlp=0.75)), TILE_TOKENS)
    with pytest.raises(ValueError, match=f"chunk 3, layer 1: 0.25 of mlp is kept, but {reason}, so a replay runs all of it"):
        engine.check(kept)
    engine.check(replace(kept, layers=kept.layers[:1]))
    # layers that keep everything keep their MLPs too
    engine.check(replace(kept, layers=(LayerPolicy(), replayed(1.0))))


def calls_of(name: str, module: str, policies: tuple[LayerPolicy, ...]) -> list[int]:
    """Tokens in each call of a module of the first layer that has it, as a hook of a user sees them."""
    with wide_floats():
        model, seen = patched(model_in_wide_floats(name, ())), []
        found = next(each for path, each in model.named_modules() if path.endswith(module))
        found.register_forward_hook(lambda hooked, inputs, output: seen.append(inputs[0].shape[-2]))
        plan = under(sliced_plan([30], [[(0, 0, 30)]]), name, policies)
        lone_step(model, plan, ActivationEngine(layer_modules(model), HostTier.on(torch.device("cpu"), 2**24)))
    return seen


def test_hooks_see_whole_mlps_and_inside_them_tiles() -> None:
    tiles = [8, 8, 8, 6]
    # the replay stops inside the last MLP of a layer; the first runs once more, since that one saves its input after it
    assert calls_of("GraniteMoeHybridForCausalLM", "shared_mlp", (replayed(1.0),)) == [30]
    assert calls_of("GraniteMoeHybridForCausalLM", "shared_mlp.input_linear", (replayed(1.0),)) == tiles * 2
    assert calls_of("GraniteMoeHybridForCausalLM", "block_sparse_moe.router", (replayed(1.0),)) == tiles * 3
    assert calls_of("NemotronHForCausalLM", "3.mixer.up_proj", (replayed(1.0),)) == tiles * 2
    assert calls_of("OPTForCausalLM", "fc1", (replayed(1.0),)) == [30, 30]
    assert calls_of("BloomForCausalLM", "dense_h_to_4h", (replayed(1.0),)) == [30, 30]


def test_kept_tokens_of_both_mlps_of_a_layer_wait_for_backward() -> None:
    with wide_floats():
        model = patched(model_in_wide_floats("GraniteMoeHybridForCausalLM", ()))
        engine, held = ActivationEngine(layer_modules(model), HostTier.on(torch.device("cpu"), 2**24)), []

        def note(*_: Any) -> None:
            slots = held_activations[0].slots.values() if held_activations else ()
            held.append([[record.kept_bytes for record in slot.mlps] for slot in slots])

        held_activations: list[Any] = []
        begin = engine.begin
        engine.begin = lambda *args: held_activations.append(begin(*args)) or held_activations[-1]  # type: ignore[method-assign]
        model.lm_head.register_forward_hook(note)
        plan = under(sliced_plan([30], [[(0, 0, 30)]]), "GraniteMoeHybridForCausalLM", (replayed(1.0, mlp=0.5),))
        lone_step(model, plan, engine)
    assert len(held[0]) == 2 and all(len(records) == 2 and min(records) > 0 for records in held[0])


def wide_stage_steps(case: ModelCase, plans_json: list[str], rows: Any) -> list[Any]:
    """Runs `stage_step_on_rank` for some plans."""
    with wide_floats():
        return [stage_step_on_rank(case, plan_json, rows)[:2] for plan_json in plans_json]


@pytest.mark.wide
def test_stages_that_recompute_and_offload_match(ranks) -> None:
    case, rows = ModelCase("granite_hybrid", num_layers=4), random_rows(STAGED)
    plan = pipeline_plan(STAGED, [[(1, SLICED)]], 2, num_layers=4)
    policy = ActivationPolicy(0, 0, TILED_MLP * 2, 0)
    plans = [plan, with_policies(plan, [policy] * num_policies(plan))]
    with wide_floats():
        loss, expected = reference_step(build_model(case), rows)
    results = ranks(2).run(wide_stage_steps, case, [plan_to_json(each) for each in plans], rows)
    for steps in zip(*results, strict=True):
        assert {name for _, gradients in steps for name in gradients} == expected.keys()
        for step in steps:
            assert worst_error(step, (loss, {name: expected[name] for name in step[1]})) <= TOLERANCE
