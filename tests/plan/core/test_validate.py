"""Check every invariant of a plan: the hand-written plans keep all of them, and a plan that breaks one is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers.plans.fixture_plans import FIXTURE_NAMES, edited, fixture

from hf_longctx.plan.core.serialize import plan_digest, plan_from_json, plan_to_json
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    LayerPolicy,
    LayerRange,
    MicroBatch,
    Parameters,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
    TensorShare,
)
from hf_longctx.plan.core.validate import PlanError, describe_plan, schedule_grid, validate_plan

_GROUP = "micro_batches__0__groups__0"
_FLEXSP_SECOND = "micro_batches__1__groups"


def refused(plan: StepPlan, message: str) -> str:
    """The text of the error that `plan` raises, which must match `message`."""
    with pytest.raises(PlanError, match=message) as error:
        validate_plan(plan)
    return str(error.value)


def with_group(plan: StepPlan, **changes: Any) -> StepPlan:
    """`plan` with fields of the first group of its first micro-batch replaced, for values that JSON would refuse."""
    first = plan.micro_batches[0]
    group = dataclasses.replace(first.groups[0], **changes)
    changed = dataclasses.replace(first, groups=(group, *first.groups[1:]))
    return dataclasses.replace(plan, micro_batches=(changed, *plan.micro_batches[1:]))


def with_stage(plan: StepPlan, stage: int, **changes: Any) -> StepPlan:
    """`plan` with fields of one stage of that group replaced."""
    stages = list(plan.micro_batches[0].groups[0].stages)
    stages[stage] = dataclasses.replace(stages[stage], **changes)
    return with_group(plan, stages=tuple(stages))


def with_actions(plan: StepPlan, stage: int, text: str) -> StepPlan:
    return with_stage(plan, stage, actions=tuple(Action.parse(word) for word in text.split()))


def swapped(plan: StepPlan, stage: int, first: str, second: str) -> StepPlan:
    """`plan` with two actions of one stage exchanged."""
    words = [str(action) for action in plan.micro_batches[0].groups[0].stages[stage].actions]
    a, b = words.index(first), words.index(second)
    words[a], words[b] = words[b], words[a]
    return with_actions(plan, stage, " ".join(words))


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_every_hand_written_plan_is_valid(name: str) -> None:
    plan = fixture(name)
    assert validate_plan(plan) is plan


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_the_description_names_every_micro_batch_chunk_and_action(name: str) -> None:
    plan = fixture(name)
    text = describe_plan(plan)
    assert plan_digest(plan) in text
    for micro_batch in plan.micro_batches:
        assert micro_batch.layout in text
        for group in micro_batch.groups:
            assert schedule_grid(group) in text
            for chunk in group.chunks:
                for span in chunk.spans:
                    assert f"{span.sequence}[{span.start}:{span.stop}]" in text
    assert ("dummy" in text) == (name == "flexsp")


# shape


@pytest.mark.parametrize("changes", [{"num_stages": 0}, {"ranks_per_stage": 0}, {"num_stages": -1}])
def test_a_plan_without_stages_or_ranks_is_refused(changes: dict[str, Any]) -> None:
    refused(edited("flexsp", **changes), "at least one stage and one rank")


def test_a_plan_without_micro_batches_is_refused() -> None:
    refused(edited("flexsp", micro_batches=[]), "at least one micro-batch")


def test_unknown_parameters_are_refused() -> None:
    refused(dataclasses.replace(fixture("flexsp"), parameters="frozen"), "'frozen' is not one of replicated")


@pytest.mark.parametrize("length", [0, -3])
def test_an_empty_sequence_is_refused(length: int) -> None:
    refused(edited("flexsp", lengths__4=length), f"sequence 4 has {length} tokens")


# cover


def test_a_span_of_an_unknown_sequence_is_refused() -> None:
    refused(
        edited("flexsp", **{f"{_GROUP}__chunks__0__spans__1": [10, 0, 3000]}), "names sequence 10, but the plan has 10 sequences"
    )
    refused(
        edited("flexsp", **{f"{_GROUP}__chunks__0__spans__1": [-1, 0, 3000]}), "names sequence -1, but the plan has 10 sequences"
    )


@pytest.mark.parametrize("span", [[1, 0, 3001], [1, -1, 3000], [1, 5, 5], [1, 9, 3]])
def test_an_empty_span_or_one_outside_its_sequence_is_refused(span: list[int]) -> None:
    refused(
        edited("flexsp", **{f"{_GROUP}__chunks__0__spans__1": span}), "is empty or outside its sequence, which has 3000 tokens"
    )


def test_a_token_planned_twice_is_refused() -> None:
    # sequence 6 runs in micro-batch 0 and again in micro-batch 2
    refused(
        edited("flexsp", **{f"{_GROUP}__chunks__0__spans": [[0, 0, 24000], [1, 0, 3000], [6, 0, 800]]}),
        "sequence 6: tokens 0 to 800 are planned twice",
    )
    refused(edited("seq1f1b", **{f"{_GROUP}__chunks__1__spans": [[0, 26000, 48000]]}), "tokens 26000 to 27000 are planned twice")


def test_a_token_never_planned_is_refused() -> None:
    refused(
        edited("flexsp", **{f"{_GROUP}__chunks__0__spans": [[0, 0, 24000]]}), "sequence 1: tokens 0 to 3000 are never planned"
    )
    refused(edited("seq1f1b", **{f"{_GROUP}__chunks__1__spans": [[0, 27001, 48000]]}), "tokens 27000 to 27001 are never planned")
    refused(edited("seq1f1b", lengths__0=65537), "sequence 0: tokens 65536 to 65537 are never planned")


# positions


@pytest.mark.parametrize("positions", [[], [1, 0], [0, 0]])
def test_positions_must_ascend_without_repeats(positions: list[int]) -> None:
    refused(edited("flexsp", **{f"{_FLEXSP_SECOND}__0__positions": positions}), "micro-batch 1: .*empty, repeated or not asc")


@pytest.mark.parametrize("positions", [[3, 4], [-1, 0]])
def test_positions_must_lie_on_the_stage(positions: list[int]) -> None:
    refused(
        edited("flexsp", **{f"{_FLEXSP_SECOND}__0__positions": positions}),
        r"micro-batch 1: positions .* are not all within 0\.\.3",
    )


def test_a_position_in_two_groups_of_a_micro_batch_is_refused() -> None:
    refused(edited("flexsp", **{f"{_FLEXSP_SECOND}__2__positions": [1]}), "micro-batch 1: position 1 is in two groups")


@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_only_replicated_parameters_may_leave_ranks_out(parameters: str) -> None:
    validate_plan(fixture("nested"))
    message = refused(edited("nested", parameters=parameters), r"micro-batch 1: positions \[2, 3\] have no group")
    assert "dummy chunk" in message


def test_a_rank_that_takes_no_part_in_the_step_is_refused() -> None:
    refused(edited("nested", ranks_per_stage=5), r"positions \[4\] take part in no micro-batch")


# groups


def test_an_unknown_method_is_refused() -> None:
    refused(with_group(fixture("flexsp"), method="magic"), r"micro-batch 0, group \(0, 1, 2, 3\): method 'magic'")


@pytest.mark.parametrize(
    ("path", "method"), [(_GROUP, "local"), (f"{_FLEXSP_SECOND}__1", "ulysses"), (f"{_FLEXSP_SECOND}__1", "ring")]
)
def test_local_means_one_rank_and_one_rank_is_local(path: str, method: str) -> None:
    refused(edited("flexsp", **{f"{path}__method": method}), f"method '{method}' does not fit")


def test_chunks_are_numbered_in_order() -> None:
    refused(edited("flexsp", **{f"{_GROUP}__chunks__0__index": 1}), "chunk indices must be 0, 1")
    refused(edited("seq1f1b", **{f"{_GROUP}__chunks__2__index": 1}), "chunk indices must be 0, 1")


def test_a_group_without_chunks_is_refused() -> None:
    refused(edited("flexsp", micro_batches__2__groups__3__chunks=[]), "chunk indices must be .* at least one")


def test_a_group_needs_a_plan_for_every_stage_in_order() -> None:
    stages = fixture("seq1f1b").micro_batches[0].groups[0].stages
    refused(with_group(fixture("seq1f1b"), stages=stages[:1]), "one stage plan for each of the 2 stages")
    refused(with_group(fixture("seq1f1b"), stages=stages[::-1]), "one stage plan for each of the 2 stages")
    refused(edited("flexsp", num_stages=2), "one stage plan for each of the 2 stages")


# slices


def test_a_slice_stands_at_the_head_of_its_chunk() -> None:
    # the last slice of sequence 0 after the short sequence 2
    plan = edited("infinipipe", **{f"{_GROUP}__chunks__2__spans": [[2, 0, 1200], [0, 46000, 60000]]})
    refused(plan, "chunk 2 holds a slice of sequence 0 after another span")


def test_slices_of_a_sequence_are_in_order() -> None:
    plan = fixture("seq1f1b")
    chunks = plan.micro_batches[0].groups[0].chunks
    shuffled = (chunks[0], *(dataclasses.replace(chunks[a], index=b) for a, b in ((2, 1), (1, 2))), chunks[3])
    refused(with_group(plan, chunks=shuffled), "chunk 1 starts sequence 0 at token 48000, .* end at 27000")


def test_slices_of_a_sequence_stay_in_one_group() -> None:
    data = {
        f"{_GROUP}__chunks__2__spans": [[3, 0, 12000]],
        "micro_batches__0__groups__1__chunks__2__spans": [[0, 48000, 65536]],
    }
    refused(edited("seq1f1b", **data), r"group \(1,\): chunk 2 starts sequence 0 at token 48000, .* end at 0")


# layer ranges


@pytest.mark.parametrize(
    "ranges",
    [
        [{"first_layer": 0, "num_layers": 0}, {"first_layer": 4, "num_layers": 2}],
        [{"first_layer": 0, "num_layers": 5}, {"first_layer": 4, "num_layers": 2}],
        [{"first_layer": 4, "num_layers": 2}, {"first_layer": 0, "num_layers": 2}],
        [{"first_layer": -1, "num_layers": 2}, {"first_layer": 4, "num_layers": 2}],
    ],
)
def test_layer_ranges_are_ascending_and_do_not_overlap(ranges: list[dict[str, int]]) -> None:
    refused(edited("interleaved", **{f"{_GROUP}__stages__0__parts": ranges}), "expected at least one layer from")


def test_a_stage_without_layers_is_refused() -> None:
    refused(
        edited("flexsp", **{f"{_GROUP}__stages__0__parts": []}),
        "every stage needs the same number of layer ranges, at least one; found",
    )


def test_interleaved_ranges_do_not_free_weights_per_micro_batch() -> None:
    refused(
        edited("interleaved", parameters="gathered_per_round"), "freed with the last backward of a whole stage; use 'sharded'"
    )


def test_all_stages_have_the_same_number_of_layer_ranges() -> None:
    plan = fixture("interleaved")
    one_range = with_stage(plan, 1, layer_ranges=plan.micro_batches[0].groups[0].stages[1].layer_ranges[:1], activations=())
    words = [action for action in one_range.micro_batches[0].groups[0].stages[1].actions if action.layer_range == 0]
    refused(with_stage(one_range, 1, actions=tuple(words)), r"same number of layer ranges, at least one; found \[1, 2\]")


# compute


def test_the_grid_marks_the_action_at_fault() -> None:
    message = refused(swapped(fixture("seq1f1b"), 0, "0B2", "0B1"), "0B1 runs before the next slice of its sequence")
    assert message.count(">") == message.count("<") == 1
    assert ">0B1<" in message
    grid = message.splitlines()[1:]
    assert grid[0].startswith("  stage 0: 0F0 0SF0 0F1")
    assert grid[1].startswith("  stage 1: 1RF0 1F0 1RF1")


def test_an_action_of_another_stage_is_refused() -> None:
    assert ">1B0<" in refused(with_actions(fixture("flexsp"), 0, "0F0 1B0"), "1B0 does not belong to stage 0")


def test_an_unknown_kind_is_refused() -> None:
    action = Action("X", 0, 0)  # type: ignore[arg-type]
    plan = fixture("flexsp")
    actions = (*plan.micro_batches[0].groups[0].stages[0].actions, action)
    assert ">0X0<" in refused(with_stage(plan, 0, actions=actions), "0X0 does not belong")


@pytest.mark.parametrize("text", ["0F1", "0.1F0"])
def test_an_action_of_an_unknown_chunk_or_layer_range_is_refused(text: str) -> None:
    message = refused(with_actions(fixture("flexsp"), 0, f"0F0 {text} 0B0"), "names a chunk or layer range that does not exist")
    assert f">{text}<" in message


def test_an_action_of_a_negative_chunk_is_refused() -> None:
    plan = fixture("flexsp")
    actions = (*plan.micro_batches[0].groups[0].stages[0].actions, Action("SF", 0, -1))
    refused(with_stage(plan, 0, actions=actions), "names a chunk or layer range that does not exist")


@pytest.mark.parametrize("text", ["0F0 0F0 0B0", "0F0 0B0 0B0"])
def test_nothing_is_computed_twice(text: str) -> None:
    message = refused(with_actions(fixture("flexsp"), 0, text), "runs twice")
    assert message.count(">") == 1


@pytest.mark.parametrize(("text", "missing"), [("0F0", "0B0"), ("", "0F0")])
def test_every_chunk_runs_forward_and_backward(text: str, missing: str) -> None:
    refused(with_actions(fixture("flexsp"), 0, text), f"{missing} is missing")


def test_every_layer_range_runs_forward_and_backward() -> None:
    words = [action for action in fixture("interleaved").micro_batches[0].groups[0].stages[0].actions if str(action) != "0.1B1"]
    refused(with_stage(fixture("interleaved"), 0, actions=tuple(words)), r"0\.1B1 is missing")


def test_a_forward_precedes_its_backward() -> None:
    assert ">0B0<" in refused(with_actions(fixture("flexsp"), 0, "0B0 0F0"), "0B0 runs before its forward")


def test_slices_run_forward_in_order() -> None:
    message = refused(
        swapped(fixture("seq1f1b"), 0, "0F0", "0F1"), r"0F1 runs before the previous slice of its sequence \(chunk 0\)"
    )
    assert ">0F1<" in message


def test_slices_run_backward_in_reverse() -> None:
    message = refused(swapped(fixture("sppo"), 0, "0B3", "0B2"), r"0B2 runs before the next slice of its sequence \(chunk 3\)")
    assert ">0B2<" in message


def test_a_hybrid_chunk_waits_for_the_slices_of_its_tail() -> None:
    # chunk 4 holds the last slice of sequence 1 and two short sequences; chunk 3 holds the first slice of sequence 1
    refused(swapped(fixture("infinipipe"), 1, "1B4", "1B3"), r"1B3 runs before the next slice .* \(chunk 4\)")


def test_packs_may_run_backward_in_any_order() -> None:
    for text in ("0F0 0F1 0B0 0B1", "0F0 0F1 0B1 0B0", "0F1 0F0 0B0 0B1", "0F0 0B0 0F1 0B1"):
        validate_plan(edited("nested", micro_batches__1__groups__0__stages__0__actions=text))


# lenders


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0SF0", "0SF0@1:0", "only F and B can be lent ranks"),
        ("0F0@1:0,1:1", "0F0@1:0,1:0", "names a lender twice"),
        ("0F0@1:0,1:1", "0F0@0:0", "lender stage 0, which must be another stage"),
        ("0F0@1:0,1:1", "0F0@2:0", "lender stage 2, which must be another stage"),
        ("0F0@1:0,1:1", "0F0@1:2", "lender position 2, but a stage has 2"),
    ],
)
def test_lenders_are_ranks_of_other_stages_and_take_part_only_in_compute(old: str, new: str, message: str) -> None:
    plan = fixture("lent")
    words = [new if str(action) == old else str(action) for action in plan.micro_batches[0].groups[0].stages[0].actions]
    assert f">{new}<" in refused(with_actions(plan, 0, " ".join(words)), message)


# policies


@pytest.mark.parametrize("changes", [{"chunk": 1}, {"layer_range": 1}, {"chunk": -1}, {"layer_range": -1}])
def test_a_policy_of_an_unknown_chunk_or_layer_range_is_refused(changes: dict[str, int]) -> None:
    policy = fixture("layer_first").micro_batches[0].groups[0].stages[0].activations[0]
    plan = with_stage(fixture("layer_first"), 0, activations=(dataclasses.replace(policy, **changes),))
    refused(plan, "names an unknown chunk or layer range")


def test_two_policies_of_one_chunk_are_refused() -> None:
    policy = fixture("layer_first").micro_batches[0].groups[0].stages[0].activations[0]
    refused(with_stage(fixture("layer_first"), 0, activations=(policy, policy)), "is given twice")


def test_a_policy_fits_the_layers_of_its_layer_range() -> None:
    policy = ActivationPolicy(chunk=0, layers=(LayerPolicy(),) * 5)
    refused(with_stage(fixture("layer_first"), 0, activations=(policy,)), "has 5 layers, but the range has 4")
    # layer range 1 has two layers although the stage has four
    policy = ActivationPolicy(chunk=0, layer_range=1, layers=(LayerPolicy(),) * 3)
    refused(with_stage(fixture("interleaved"), 0, activations=(policy,)), "has 3 layers, but the range has 2")


def test_a_negative_tile_is_refused() -> None:
    refused(with_stage(fixture("layer_first"), 0, activations=(ActivationPolicy(0, tile_tokens=-1),)), "tile_tokens -1")


@pytest.mark.parametrize(
    "share",
    [
        TensorShare("mlp"),
        TensorShare("mlp", recompute=0.5),
        TensorShare("mlp", host=0.75, device=0.5),
        TensorShare("mlp", host=1.5, device=-0.5),
        TensorShare("mlp", device=float("nan")),
    ],
)
def test_shares_are_non_negative_and_sum_to_one(share: TensorShare) -> None:
    policy = ActivationPolicy(0, layers=(LayerPolicy((share,)),))
    refused(with_stage(fixture("layer_first"), 0, activations=(policy,)), "of mlp must be >= 0 and sum to 1")


def test_shares_may_miss_one_by_rounding() -> None:
    thirds = TensorShare("mlp", recompute=1 / 3, host=0.333333333, device=1 / 3)
    validate_plan(with_stage(fixture("layer_first"), 0, activations=(ActivationPolicy(0, layers=(LayerPolicy((thirds,)),)),)))


def test_an_unknown_tensor_class_is_refused() -> None:
    share = TensorShare("heads", device=1.0)  # type: ignore[arg-type]
    policy = ActivationPolicy(0, layers=(LayerPolicy((share,)),))
    refused(with_stage(fixture("layer_first"), 0, activations=(policy,)), "tensor class 'heads' is not one of")


# links


def test_gradients_are_received_in_the_order_they_are_sent() -> None:
    # packs may run backward in any order, but sender and receiver must use the same one
    path = "micro_batches__0__groups__1__stages__0__actions"
    plan = edited("pp_sp_replicas", **{path: "0F0 0SF0 0F1 0SF1 0RB1 0B1 0RB0 0B0"})
    message = refused(
        plan,
        r"stage 1 sends SB of \(layer range, chunk\) \[\(0, 0\), \(0, 1\)\] to stage 0, which receives \[\(0, 1\), \(0, 0\)\]",
    )
    assert "stage 0: 0F0 0SF0" in message


def test_activations_are_received_in_the_order_they_are_sent() -> None:
    path = "micro_batches__0__groups__1__stages__0__actions"
    plan = edited("pp_sp_replicas", **{path: "0F1 0SF1 0F0 0SF0 0RB0 0B0 0RB1 0B1"})
    refused(
        plan,
        r"stage 0 sends SF of \(layer range, chunk\) \[\(0, 1\), \(0, 0\)\] to stage 1, which receives \[\(0, 0\), \(0, 1\)\]",
    )


def test_a_send_without_its_receive_is_refused() -> None:
    plan = fixture("seq1f1b")
    words = [action for action in plan.micro_batches[0].groups[0].stages[1].actions if str(action) != "1RF3"]
    refused(with_stage(plan, 1, actions=tuple(words)), "sends SF of .* to stage 1, which receives")


def test_every_chunk_crosses_every_link_once() -> None:
    plan = fixture("seq1f1b")
    for stage, lost in ((0, "0SF3"), (1, "1RF3")):
        words = [action for action in plan.micro_batches[0].groups[0].stages[stage].actions if str(action) != lost]
        plan = with_stage(plan, stage, actions=tuple(words))
    refused(plan, "SF of stage 0 layer range 0 must move every chunk once")


@pytest.mark.parametrize(
    ("stage", "first", "second", "message"),
    [
        (1, "1RF0", "1F0", "1F0 runs before its RF"),
        (0, "0F0", "0SF0", "0SF0 runs before its F"),
        (0, "0RB3", "0B3", "0B3 runs before its RB"),
        (1, "1B3", "1SB3", "1SB3 runs before its B"),
    ],
)
def test_receives_precede_and_sends_follow_their_compute(stage: int, first: str, second: str, message: str) -> None:
    assert f">{second}<" in refused(swapped(fixture("seq1f1b"), stage, first, second), message)


def test_stages_that_wait_for_each_other_are_refused() -> None:
    # stage 0 waits for the gradient of chunk 1 before it sends chunk 1 to stage 1
    plan = with_actions(fixture("pp_sp_replicas"), 0, "0F0 0SF0 0F1 0RB1 0SF1 0B1 0RB0 0B0")
    message = refused(plan, "waits for ever: deadlock")
    assert ">0RB1<" in message


def test_a_deadlock_between_layer_ranges_is_found() -> None:
    # stage 0 can receive chunk 0 for its layer range 1 only after stage 1 has run range 0 of that chunk
    words = "0.1RF0 0F0 0SF0 0F1 0SF1 0.1F0 0.1SF0 0.1RF1 0.1F1 0.1SF1 0.1RB0 0.1B0 0.1SB0 0.1RB1 0.1B1 0.1SB1 0RB0 0B0 0RB1 0B1"
    assert ">0.1RF0<" in refused(with_actions(fixture("interleaved"), 0, words), "waits for ever: deadlock")


def test_the_first_layer_range_receives_no_activations_and_the_last_no_gradients() -> None:
    text = "0RF0 0F0 0SF0 0F1 0SF1 0RB1 0B1 0RB0 0B0"
    assert ">0RF0<" in refused(with_actions(fixture("pp_sp_replicas"), 0, text), "has no partner on another stage")
    text = "1RF0 1F0 1RF1 1F1 1RB1 1B1 1SB1 1B0 1SB0"
    assert ">1RB1<" in refused(with_actions(fixture("pp_sp_replicas"), 1, text), "has no partner on another stage")


@pytest.mark.parametrize(
    ("stage", "text"),
    [(1, "1RF0 1F0 1SF0 1RF1 1F1 1B1 1SB1 1B0 1SB0"), (0, "0F0 0SF0 0F1 0SF1 0RB1 0B1 0RB0 0B0 0SB0")],
)
def test_a_send_that_nobody_receives_is_refused(stage: int, text: str) -> None:
    refused(with_actions(fixture("pp_sp_replicas"), stage, text), "0SB0|1SF0")


@pytest.mark.parametrize("text", ["0RF0 0F0 0B0", "0F0 0SF0 0B0", "0F0 0RB0 0B0", "0F0 0B0 0SB0"])
def test_a_plan_of_one_stage_neither_sends_nor_receives(text: str) -> None:
    refused(with_actions(fixture("flexsp"), 0, text), "[RS][FB]0")


def test_messages_of_two_layer_ranges_keep_one_order_on_their_link() -> None:
    # stage 0 sends range 0 of chunks 0 and 1, then range 1 of chunk 0; stage 1 receives range 1 of chunk 0 in between
    words = "1RF0 1F0 1SF0 1.1RF0 1.1F0 1RF1 1F1 1SF1 1.1RF1 1.1F1 1.1B0 1.1SB0 1.1B1 1.1SB1 1RB0 1B0 1SB0 1RB1 1B1 1SB1"
    sends = "0F0 0SF0 0F1 0SF1 0.1RF0 0.1F0 0.1SF0 0.1RF1 0.1F1 0.1SF1 0.1RB0 0.1B0 0.1SB0 0.1RB1 0.1B1 0.1SB1 0RB0 0B0 0RB1 0B1"
    refused(with_actions(with_actions(fixture("interleaved"), 0, sends), 1, words), "receives")


def test_layer_ranges_of_one_stage_run_in_the_order_of_their_layers() -> None:
    ranges = [{"first_layer": 0, "num_layers": 2}, {"first_layer": 2, "num_layers": 2}]
    paths = {f"{_GROUP}__stages__0__parts": ranges, f"{_GROUP}__stages__0__activations": []}
    good = "0F0 0.1F0 0.1B0 0B0"
    validate_plan(edited("layer_first", **paths, **{f"{_GROUP}__stages__0__actions": good}))
    for bad in ("0.1F0 0F0 0.1B0 0B0", "0F0 0.1F0 0B0 0.1B0"):
        refused(edited("layer_first", **paths, **{f"{_GROUP}__stages__0__actions": bad}), "runs before")


# order under sharded parameters


def test_sharded_parameters_need_one_order_of_kinds_in_all_groups() -> None:
    def plan(parameters: str, second: str) -> StepPlan:
        changes = {"parameters": parameters}
        for index, actions in ((1, "0F0 0F1 0B0 0B1"), (2, second)):
            chunks = [{"index": 0, "spans": [[3 + (index == 2), 0, 2000]]}, {"index": 1, "spans": [[6 + index, 0, 500]]}]
            changes |= {
                f"{_FLEXSP_SECOND}__{index}__chunks": chunks,
                f"{_FLEXSP_SECOND}__{index}__stages__0__actions": actions,
            }
        third = f"{_FLEXSP_SECOND}__0"
        changes[f"{third}__chunks"] = [{"index": 0, "spans": [[2, 0, 9000]]}, {"index": 1}]
        changes[f"{third}__stages__0__actions"] = "0F0 0F1 0B1 0B0"
        changes["lengths"] = [24000, 3000, 9000, 2000, 2000, 1200, 800, 500, 500, 2000]
        changes["micro_batches__2__groups__1__chunks__0__spans"] = [[5, 0, 1200]]
        changes["micro_batches__2__groups__2__chunks__0"] = {"index": 0}
        return edited("flexsp", **changes)

    # groups may run their chunks in different orders as long as F and B alternate in the same way
    validate_plan(plan("sharded", "0F1 0F0 0B0 0B1"))
    validate_plan(plan("gathered_per_round", "0F0 0B0 0F1 0B1"))
    message = refused(plan("sharded", "0F0 0B0 0F1 0B1"), "micro-batch 1: with these parameters all groups must run passes in")
    assert "group (2,)" in message
    assert "group (3,)" in message


def test_sharded_parameters_need_equal_numbers_of_chunks_in_all_groups() -> None:
    plan = edited(
        "flexsp",
        **{
            f"{_FLEXSP_SECOND}__2__chunks": [{"index": 0, "spans": [[4, 0, 3900]]}, {"index": 1, "spans": [[5, 0, 1200]]}],
            f"{_FLEXSP_SECOND}__2__stages__0__actions": "0F0 0B0 0F1 0B1",
        },
    )
    refused(plan, "with these parameters all groups")


# memory


def test_the_predicted_peak_stays_within_the_limit() -> None:
    plan = fixture("flexsp")
    assert validate_plan(plan, limit_bytes=30 * 2**30) is plan
    with pytest.raises(PlanError, match=r"need 30\.00 GiB on a rank, but the limit is 29\.00 GiB; lower tokens_per_rank"):
        validate_plan(plan, limit_bytes=29 * 2**30)


def test_saved_tensors_stay_within_the_limit_of_the_host() -> None:
    plan = fixture("flexsp")
    plan = dataclasses.replace(plan, estimate=dataclasses.replace(plan.estimate, host_bytes=3 * 2**30))
    assert validate_plan(plan, host_limit_bytes=3 * 2**30) is plan and validate_plan(plan) is plan
    with pytest.raises(PlanError, match=r"put 3\.00 GiB on the host of a rank, but the limit is 0\.00 GiB; allow more host"):
        validate_plan(plan, host_limit_bytes=0)


def test_a_plan_error_is_a_value_error_and_survives_the_round_trip_of_the_plan() -> None:
    plan = with_actions(fixture("flexsp"), 0, "0B0 0F0")
    with pytest.raises(ValueError, match="runs before its forward"):
        validate_plan(plan_from_json(plan_to_json(plan)))


def test_the_grid_has_a_line_per_stage() -> None:
    group = SequenceGroup((0,), "local", (), (StagePlan(0, (), (Action("F", 0, 0), Action("B", 0, 0))), StagePlan(1, (), ())))
    assert schedule_grid(group, (0, 1)) == "  stage 0: 0F0 >0B0<\n  stage 1: "


def shared_heads(parameters: Parameters, *texts: tuple[str, str]) -> StepPlan:
    """Groups of one rank on each of two stages, with two whole sequences each, and these actions of both stages."""
    groups = []
    for place, own in enumerate(texts):
        chunks = tuple(Chunk(index, (Span(2 * place + index, 0, 8),)) for index in range(2))
        stages = tuple(
            StagePlan(stage, (LayerRange(stage, 1),), tuple(map(Action.parse, text.split()))) for stage, text in enumerate(own)
        )
        groups.append(SequenceGroup((place,), "local", chunks, stages))
    return StepPlan(0, (8,) * 2 * len(texts), 2, len(texts), parameters, (MicroBatch(tuple(groups)),))


OF_0 = (
    "0F0 0SF0 0F1 0SF1 0.1RF0 0.1H0 0.1SB0 0RB0 0B0 0RB1 0B1",
    "1RF0 1F0 1SF0 1RF1 1F1 1RB0 1B0 1SB0 1B1 1SB1",
)
OF_1 = (
    "0F0 0SF0 0F1 0SF1 0.1RF1 0.1H1 0.1SB1 0RB0 0B0 0RB1 0B1",
    "1RF0 1F0 1RF1 1F1 1SF1 1B0 1SB0 1RB1 1B1 1SB1",
)


def test_groups_that_share_weights_run_the_heads_of_the_same_chunks_elsewhere() -> None:
    validate_plan(shared_heads("sharded", OF_0, OF_0))
    validate_plan(shared_heads("gathered_per_round", OF_0, OF_1))
    refused(shared_heads("sharded", OF_0, OF_1), "micro-batch 0: with these parameters all groups must run passes in")


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("0.1H0", "0H0", "0H0 names a chunk or layer range that does not exist"),
        ("0.1H0", "0.2H0", "0.2H0 names a chunk or layer range that does not exist"),
        ("0.1RF0 0.1H0", "0.1H0 0.1RF0", "0.1H0 runs before its RF"),
        ("0.1SB0 ", "", "S?B of .* to stage 1, which receives"),
        ("0.1RF0 0.1H0 0.1SB0", "0.1RF0 0.1SB0", "0.1RF0 belongs to an output head, which runs once"),
        ("0.1RF0 0.1H0 0.1SB0 0RB0 0B0", "0RB0 0B0 0.1RF0 0.1H0 0.1SB0", "waits for ever: deadlock"),
        ("0.1H0", "0.1H0 0.1H0", "0.1H0 runs twice"),
    ],
)
def test_heads_on_other_stages_have_their_messages(wrong: str, right: str, message: str) -> None:
    first, last = OF_0
    refused(shared_heads("replicated", (first.replace(wrong, right), last)), message)


def test_the_last_stage_runs_the_other_heads_itself() -> None:
    first, last = OF_0
    last = last.replace("1F1", "1F1 1.1RF1 1.1H1 1.1SB1")
    refused(shared_heads("replicated", (first, last)), "1.1RF1 belongs to an output head, which runs once, on a stage")
