"""Dynamic and longrope scaling: under any plan, a document's frequencies follow from its own length, as if it ran alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import SHORT, ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import num_policies, with_policies
from helpers.plans.sliced_plans import sliced_plan
from helpers.ranks.pipeline_steps import stage_step_on_rank
from helpers.ranks.rank_steps import rank_inputs, run_step
from torch import Tensor

from hf_longctx.hf.models.attention import attention_name, num_attention_layers
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import ActivationPolicy, LayerPolicy, MicroBatch, StepPlan, TensorShare
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

CPU = torch.device("cpu")
# two variants of longrope: phi3 scales cosines and sines by a factor from its positions; minicpm3 gives the factor in its config
# and rotates only part of a head
CASES = {
    "dynamic": ModelCase(rope_type="dynamic"),
    "longrope": ModelCase("phi3", rope_type="longrope"),
    "longrope, factor given": ModelCase("minicpm3", rope_type="longrope_narrow"),
}
# lengths on both sides of the limit, and the limit itself; of the two clearly above it, the longer one comes first
LENGTHS = [61, SHORT, SHORT + 1, 40, 9]
ROWS = random_rows(LENGTHS)
# the longest document passes the limit in its second slice; whole documents follow its last slice
SLICES = [[(0, 0, 20)], [(0, 20, 31)], [(0, 31, 61), (4, 0, 9)], [(1, 0, 24), (2, 0, 25)], [(3, 0, 40)]]
RECOMPUTED = LayerPolicy(tuple(TensorShare(name, recompute=1.0) for name in ("attention_output", "qkv", "mlp")))


def recomputed(plan: StepPlan) -> StepPlan:
    """The plan with all layers recomputed in all chunks; it must have one group."""
    (group,) = plan.micro_batches[0].groups
    policies = tuple(ActivationPolicy(chunk.index, 0, (RECOMPUTED,) * 2, 16) for chunk in group.chunks)
    group = replace(group, stages=(replace(group.stages[0], activations=policies),))
    return replace(plan, micro_batches=(MicroBatch((group,)),))


PLANS: dict[str, StepPlan] = {
    "packed": plan_of([[(1, (4, 0, 2, 3, 1))]], LENGTHS, 1),
    "recomputed slices": recomputed(sliced_plan(LENGTHS, SLICES)),
}
# plans on two ranks
SHARED: dict[str, StepPlan] = {
    "ulysses of slices, recomputed": recomputed(sliced_plan(LENGTHS, SLICES, num_ranks=2)),
    "ring, then alone": plan_of([[(2, (4, 0, 2))], [(1, (3,)), (1, (1,))]], LENGTHS, 2, ulysses=1),
}
_STAGED = pipeline_plan(LENGTHS, [[(1, SLICES)]], 2, num_layers=2)
STAGED = with_policies(_STAGED, [ActivationPolicy(0, 0, (RECOMPUTED,) * 2, 16)] * num_policies(_STAGED))


def promoted(kind: str) -> ModelCase:
    """The case with norms that do not round to fp32, for plans that recompute layers."""
    return replace(CASES[kind], promoted=True)


def alone(case: ModelCase) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of plain transformers, with a new rotary embedding for every document."""
    model = build_model(case)

    def renew(module: Any, args: Any) -> None:
        module.model.rotary_emb = type(module.model.rotary_emb)(module.config)

    model.register_forward_pre_hook(renew)
    return reference_step(model, ROWS)


def check(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], is_part: bool = False) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert found[1].keys() <= expected[1].keys() if is_part else found[1].keys() == expected[1].keys()
    assert max(relative_error(gradient, expected[1][name]) for name, gradient in found[1].items()) <= TOLERANCE


def lone_step(model: Any, plan: StepPlan) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a one-rank plan in this process."""
    engine = ActivationEngine(layer_modules(model), HostTier.on(CPU, 2**24), OutputHead(output_head(model)))
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU)
    num_labels = sum(label != -100 for row in ROWS for label in row["labels"][1:])
    result = executor.run(plan.for_rank(0), rank_inputs(plan, ROWS, 0)["chunks"], num_labels, engine=engine)
    return float(result.loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def state(model: Any) -> dict[str, Any]:
    """State that rotary embeddings keep from one forward to the next."""
    embedding = model.model.rotary_emb
    plain = {name: value for name, value in vars(embedding).items() if isinstance(value, (int, float, str))}
    return (
        plain
        | {name: value.tolist() for name, value in embedding.named_buffers()}
        | {"long": hasattr(embedding, "long_inv_freq")}
    )


@pytest.mark.daily("dynamic")
@pytest.mark.parametrize("kind", CASES)
def test_documents_on_both_sides_of_the_limit_match_whatever_ran_before(kind: str) -> None:
    expected = alone(promoted(kind))
    model = build_model(promoted(kind))
    patch_model(model)
    # a copy follows documents as the model does
    copied = copy.deepcopy(model)
    long = torch.zeros(1, 100, dtype=torch.int64)
    for each, plan, has_history in ((copied, PLANS["packed"], False), (model, PLANS["recomputed slices"], True)):
        if has_history:
            each(long, use_cache=False)
        before = state(each)
        check(lone_step(each, plan), expected)
        assert state(each) == before


def test_documents_matter() -> None:
    """The reference gives other results if all documents have the frequencies of the longest one, or unscaled ones."""
    for kind in CASES:
        loss, _ = alone(CASES[kind])
        for length in (SHORT, 61):
            model = build_model(CASES[kind])
            model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
            fixed = model.model.rotary_emb
            fixed.rope_type = "default"
            assert abs(reference_step(model, ROWS)[0] - loss) > 1e-6


@pytest.mark.daily("ring, then alone-dynamic")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("name", SHARED)
def test_shards_know_the_whole_length_of_a_document(ranks, name: str, kind: str) -> None:
    expected = alone(promoted(kind))
    for found in run_step(ranks(2), promoted(kind), SHARED[name], ROWS):
        check(found, expected)


@pytest.mark.daily("longrope, factor given")
@pytest.mark.parametrize("kind", CASES)
def test_stages_match(ranks, kind: str) -> None:
    expected = alone(promoted(kind))
    for loss, gradients, *_ in ranks(2).run(stage_step_on_rank, promoted(kind), plan_to_json(STAGED), ROWS):
        check((loss, gradients), expected, is_part=True)


@pytest.mark.parametrize("kind", CASES)
def test_nothing_is_left_in_the_model_and_without_a_plan_it_is_plain(kind: str) -> None:
    plain, model = build_model(CASES[kind]), build_model(CASES[kind])
    name, hooks = attention_name(model), len(model.model._forward_pre_hooks)
    patch_model(model)
    lone_step(model, PLANS["packed"])
    # padded rows: transformers takes the frequencies of the longest row for all
    ids_BS = torch.tensor([row["input_ids"][:9] * 4 for row in ROWS])
    for ids in (ids_BS, ids_BS[:, :30], ids_BS[:, :7]):
        assert torch.equal(model(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)
    assert torch.equal(model.generate(ids_BS[:1], max_new_tokens=4), plain.generate(ids_BS[:1], max_new_tokens=4))
    restore_attention(model, name)
    assert state(model) == state(plain) and "forward" not in vars(model.model.rotary_emb)
    assert len(model.model._forward_pre_hooks) == hooks


def test_rotary_embeddings_that_others_run_are_refused() -> None:
    model = build_model(CASES["longrope"])
    patch_model(model)
    model.model.rotary_emb.forward = lambda x, position_ids: (x[..., :8] * 0, x[..., :8] * 0)
    with pytest.raises(RuntimeError, match="Phi3Model does not run its rotary embeddings itself"):
        lone_step(model, PLANS["packed"])
