"""Stages that are lent to a sequence's first and last slices give the loss and the gradients of one plain process, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model, with_lora
from helpers.models.token_losses import with_weights
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.sliced_plans import cut
from helpers.ranks.lent_steps import BUGS, lent_plan, lent_step_on_rank, new_optimizer
from helpers.ranks.rank_pool import RankPool
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.lending import is_lent, lent_order
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.core.types import Action, ActivationPolicy, MicroBatch, Span, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.execution.checks import refuse_unsupported


def check(
    pool: RankPool, case: ModelCase, plan: StepPlan, lora: bool = True, num_steps: int = 1, bug: str = "", weighted: bool = False
) -> None:
    """Asserts that every rank has the reference's losses, gradients and weights, and ran what was planned."""
    rows = random_rows(list(plan.lengths))
    rows = with_weights(rows) if weighted else rows
    reference = with_lora(build_model(case)) if lora else build_model(case)
    optimizer = new_optimizer(reference)
    expected_losses = [reference_step(reference, rows, case.loss)[0]]
    for _ in range(num_steps):
        loss, expected = reference_step(reference, rows, case.loss)
        expected_losses.append(loss)
        optimizer.step()
    results = pool.run(lent_step_on_rank, case, plan_to_json(plan), rows, lora, num_steps, bug)
    for rank, (losses, gradients, weights, words) in enumerate(results):
        assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
        assert gradients.keys() == expected.keys()
        errors = {name: relative_error(gradients[name], expected[name]) for name in expected}
        assert max(errors.values()) <= TOLERANCE, (rank, errors)
        for name, parameter in reference.named_parameters():
            if name in weights:
                assert relative_error(weights[name], parameter.detach()) <= TOLERANCE, (rank, name)
        assert words == lent_words(plan, rank), rank


def lent_words(plan: StepPlan, rank: int) -> list[str]:
    """Actions that a rank takes part in, in the plan's order; in micro-batches with lent slices without the messages."""
    stage, _ = plan.place(rank)
    groups = [group for group, _ in plan.for_rank(rank).rounds]
    return [
        str(action)
        for group in groups
        for action in (lent_order(group)[stage] if is_lent(group) else group.stages[stage].actions)
    ]


def one_sequence(sizes: list[int], num_stages: int, degree: int = 1, num_layers: int = 4) -> StepPlan:
    chunks = [[span] for span in cut(0, sizes)]
    return lent_plan(pipeline_plan([sum(sizes)], [[(degree, chunks)]], num_stages, num_layers=num_layers))


@pytest.mark.daily("one slice")
@pytest.mark.parametrize("sizes", [[15, 11, 9, 5], [12, 13], [23]], ids=["steady", "none alone", "one slice"])
def test_two_stages_match_one_plain_process(ranks, sizes) -> None:
    check(ranks(2), ModelCase(num_layers=4), one_sequence(sizes, 2))


@pytest.mark.wide
def test_four_stages_match(ranks) -> None:
    check(ranks(4), ModelCase("qwen3", num_layers=5), one_sequence([15, 11, 9, 8, 7], 4, num_layers=5))


def test_stages_of_two_ranks_match(ranks) -> None:
    check(ranks(4), ModelCase("qwen3", num_layers=4), one_sequence([15, 11, 9, 5], 2, degree=2))


# windows shorter and longer than slices; sinks; a softcap; values with another head size than keys
@pytest.mark.daily("gpt_oss")
@pytest.mark.parametrize("family", ["mistral_window", "gpt_oss", "gemma2", "deepseek_v3"])
def test_patterns_match(ranks, family: str) -> None:
    attention = "eager" if family == "gpt_oss" else "sdpa"
    plan = one_sequence([15, 11, 9, 5], 2, num_layers=2)
    check(ranks(2), ModelCase(family, promoted=True, attention=attention), plan, lora=False)


@pytest.mark.daily("case0")
@pytest.mark.parametrize("case", [ModelCase(rope_type="dynamic"), ModelCase("phi3", promoted=True, rope_type="longrope")])
def test_shared_slices_have_the_frequencies_of_the_whole_sequence(ranks, case: ModelCase) -> None:
    check(ranks(2), case, one_sequence([15, 11, 9, 5], 2, num_layers=2), lora=False)


def test_two_optimizer_steps_match(ranks) -> None:
    check(ranks(2), ModelCase(num_layers=4), one_sequence([15, 11, 9, 5], 2), num_steps=2)


@pytest.mark.daily("first slices")
@pytest.mark.parametrize("sides", [(True, False), (False, True)], ids=["first slices", "last slices"])
def test_one_side_alone_matches(ranks, sides) -> None:
    plan = pipeline_plan([40], [[(1, [[span] for span in cut(0, [15, 11, 9, 5])])]], 2)
    check(ranks(2), ModelCase(num_layers=4), lent_plan(plan, *sides))


@pytest.mark.parametrize("examples", [3, pytest.param(12, marks=pytest.mark.wide)])
@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_random_slices_match(ranks, examples: int, num_stages: int) -> None:
    pool = ranks(num_stages)

    @settings(max_examples=examples, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.lists(st.integers(num_stages, 12), min_size=num_stages - 1, max_size=num_stages + 3),
        st.sampled_from([(True, True), (True, True), (True, False), (False, True)]),
        st.sampled_from(["llama", "qwen3"]),
    )
    def matches(sizes: list[int], sides: tuple[bool, bool], family: str) -> None:
        # with only a few tokens some gradients would be nothing but rounding
        sizes[0] += 8
        plan = pipeline_plan([sum(sizes)], [[(1, [[span] for span in cut(0, sizes)])]], num_stages)
        check(pool, ModelCase(family, num_layers=4), lent_plan(plan, *sides))

    matches()


def refused() -> dict[str, tuple[StepPlan, str]]:
    """Name of a setting -> (plan with that setting, which is not executed; text of the refusal)."""
    plan = one_sequence([15, 11, 9, 5], 2)
    (group,) = plan.micro_batches[0].groups
    first, last = group.stages

    def changed(**changes: Any) -> StepPlan:
        return replace(plan, micro_batches=(MicroBatch((replace(group, **changes),)),))

    def swapped(words: dict[str, str]) -> StepPlan:
        actions = tuple(Action.parse(words.get(str(action), str(action))) for action in first.actions)
        return changed(stages=(replace(first, actions=actions), last))

    ring = replace(one_sequence([23], 2).micro_batches[0].groups[0], positions=(0, 1), method="ring")
    policy = ActivationPolicy(0, tile_tokens=4)
    tail = replace(group.chunks[3], spans=(group.chunks[3].spans[0], Span(1, 0, 3)))
    back_first = replace(first, actions=tuple(sorted(first.actions, key=lambda action: (action.chunk < 2, action.kind == "B"))))
    return {
        "sharded": (replace(plan, parameters="sharded"), "so every rank needs all weights, but parameters='sharded'"),
        "policies": (changed(stages=(replace(first, activations=(policy,)), last)), "activation policies"),
        "ring": (replace(plan, micro_batches=(MicroBatch((ring,)),)), "a ring group with 1 layer range"),
        "hybrid chunk": (changed(chunks=(*group.chunks[:3], tail)), "ranks can be lent only to slices of one sequence"),
        "backward alone": (swapped({"0F0@1:0": "0F0"}), "the chunks of stage 0 are run by stages"),
        "in the middle": (swapped({"0F1": "0F1@1:0", "0B1": "0B1@1:0", "0F0@1:0": "0F0", "0B0@1:0": "0B0"}), "are run by"),
        "a position": (swapped({"0F0@1:0": "0F0@1:1", "0B0@1:0": "0B0@1:1"}), "must be run at the group's positions"),
        "another order": (changed(stages=(back_first, last)), "with lent ranks all forwards must come first, then all backwards"),
        "few tokens": (one_sequence([1, 20, 1], 2), "1 tokens cannot be run by 2 stages"),
    }


@pytest.mark.parametrize("name", refused())
def test_what_is_not_executed_is_refused_by_name(name: str) -> None:
    plan, message = refused()[name]
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(plan.for_rank(0), has_all_stages=True)


@pytest.mark.daily("lenders' gradients of keys and values are left out")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(ranks, bug: str) -> None:
    with pytest.raises(AssertionError):
        check(ranks(2), ModelCase(num_layers=4), one_sequence([15, 11, 9, 5], 2), bug=bug)


def test_trained_weights_match_too(ranks) -> None:
    check(ranks(2), ModelCase(num_layers=4, tied=True), one_sequence([15, 11, 9], 2), lora=False)


def test_rounds_with_and_without_lending_match(ranks) -> None:
    """First two groups of one rank side by side whose stages are lent, then packs and a hybrid whose stages are not."""
    batches = [
        [(1, [[span] for span in cut(0, [12, 9, 8])]), (1, [[span] for span in cut(1, [11, 10])])],
        [(2, [[(2, 0, 9), (3, 0, 7)], [(4, 0, 8)], [(4, 8, 15), (5, 0, 4)]])],
    ]
    plan = pipeline_plan([29, 21, 9, 7, 15, 4], batches, 2)
    lent = lent_plan(replace(plan, lengths=(29, 21), micro_batches=plan.micro_batches[:1]))
    plan = validate_plan(replace(plan, micro_batches=(*lent.micro_batches, *plan.micro_batches[1:])))
    check(ranks(4), ModelCase("qwen3", num_layers=4), plan)


@pytest.mark.daily("focal-True")
@pytest.mark.parametrize("loss,weighted", [("", True), ("focal", True), ("smoothed", False)])
def test_weights_and_other_losses_match(ranks, loss: str, weighted: bool) -> None:
    check(ranks(2), ModelCase(num_layers=4, loss=loss), one_sequence([13, 9, 8, 6], 2), weighted=weighted)
