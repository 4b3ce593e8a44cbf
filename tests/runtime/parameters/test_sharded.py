"""Sharded parameters: any plan gives the gradients of one plain process, and weights are gathered as often as documented."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.models.reference import BF16_BAND, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import CHUNK_LENGTHS, FBFBFB, FFBFBB, FFFBBB, LAYOUTS, chunks_plan, plan_of, random_steps
from helpers.ranks.rank_steps import check_step, group_pool, mesh, rank_inputs, run_step, step_on_rank, whole
from hypothesis import HealthCheck, Phase, given, settings
from torch.distributed.tensor import DTensor

from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import MicroBatch, Parameters, StepPlan
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters import sums
from hf_longctx.runtime.parameters.sharded import ShardedParameters, shard_mesh, shard_model
from hf_longctx.runtime.parameters.sums import sum_blocks

MODES: tuple[Parameters, ...] = ("sharded", "gathered_per_step", "gathered_per_round")
NAMES = [name for name, (num_ranks, _, _) in LAYOUTS.items() if num_ranks > 1]


@pytest.mark.daily("<1,1>-gathered_per_round")
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_layout_matches_one_plain_process(ranks, name: str, parameters: Parameters) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    plan = plan_of(layout, lengths, num_ranks, parameters=parameters)
    check_step(ranks(num_ranks), ModelCase(promoted=True), plan, lengths)


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize("ulysses,rings", [(1, "none"), (2, "second")], ids=["rings", "hybrid groups and rings"])
def test_rings_match(ranks, ulysses: int, rings: str, parameters: Parameters) -> None:
    num_ranks, layout, lengths = LAYOUTS["<4>,<2,2>,<1,1,1,1>"]
    plan = plan_of(layout, lengths, num_ranks, ulysses, rings, parameters)
    check_step(ranks(num_ranks), ModelCase(promoted=True), plan, lengths)


@pytest.mark.daily("<2,1,1>-False-gathered_per_step")
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["<2,1,1>", "<4>,<2,2>,<1,1,1,1>"])
def test_shards_inside_a_node_with_copies_across_match(ranks, name: str, tied: bool, parameters: Parameters) -> None:
    num_ranks, layout, lengths = LAYOUTS[name]
    plan = plan_of(layout, lengths, num_ranks, parameters=parameters)
    check_step(ranks(num_ranks), ModelCase(promoted=True, tied=tied), plan, lengths, shard_ranks=2)


@pytest.mark.daily("mistral-sharded")
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_every_admitted_class_matches_with_tied_embeddings(ranks, family: str, parameters: Parameters) -> None:
    num_ranks, layout, lengths = LAYOUTS["<2>,<1,1>,<2>"]
    plan = plan_of(layout, lengths, num_ranks, parameters=parameters)
    check_step(ranks(num_ranks), ModelCase(family, promoted=True, tied=True), plan, lengths)


@pytest.mark.daily("orders3-gathered_per_round")
@pytest.mark.parametrize(
    "orders,parameters",
    [
        ((FFFBBB, FFFBBB), "sharded"),
        ((FBFBFB, FBFBFB), "sharded"),
        ((FFBFBB, FFBFBB), "sharded"),
        ((FFFBBB, FFFBBB), "gathered_per_round"),
        # weights are gathered once, so the orders of the ranks may differ
        ((FFFBBB, FBFBFB), "gathered_per_round"),
        ((FFBFBB, FBFBFB), "gathered_per_round"),
    ],
)
def test_several_chunks_of_a_round_match(ranks, orders: tuple[str, str], parameters: Parameters) -> None:
    check_step(ranks(2), ModelCase(promoted=True), chunks_plan(orders, parameters), CHUNK_LENGTHS)


@pytest.mark.daily("bf16")
@pytest.mark.parametrize(
    "case", [ModelCase(dtype=torch.bfloat16), ModelCase(dtype=torch.float32, autocast=True)], ids=["bf16", "autocast"]
)
def test_ranks_with_different_numbers_of_backwards_send_gradients_of_one_dtype(ranks, case: ModelCase) -> None:
    """The first rank adds up over three backwards in fp32, while the second has one, whose gradients are in half precision."""
    plan, rows = chunks_plan((FFFBBB, FFFBBB), "gathered_per_round"), random_rows(CHUNK_LENGTHS)
    packed = plan_of([[(1, (0, 1, 2)), (1, (3, 4, 5))], [(2, (6,))]], CHUNK_LENGTHS, 2)
    first, second = plan.micro_batches
    plan = replace(plan, micro_batches=(MicroBatch((first.groups[0], packed.micro_batches[0].groups[1])), second))
    _, exact = reference_step(build_model(ModelCase()), rows)
    _, plain = reference_step(build_model(case), rows)
    (_, found), *_ = run_step(ranks(2), case, plan, rows)
    errors = [max(relative_error(g[name].double(), exact[name]) for name in exact) for g in (found, plain)]
    assert errors[0] <= min(BF16_BAND, 1.5 * errors[1] + 5e-3)


def sent_in(parameters: Parameters, num_chunks: int) -> torch.dtype:
    """Dtype in which the last backward of a micro-batch sends the gradient of a bf16 weight."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16))
    shard_model(model, ("Linear",), mesh(2))
    handler, sent = ShardedParameters(model, True), []

    def noted(blocks_RK: torch.Tensor, *ranks: Any) -> torch.Tensor:
        sent.append(blocks_RK.dtype)
        return sum_blocks(blocks_RK, *ranks)

    handler.enter_round(parameters)
    with patch.object(sums, "sum_blocks", noted):
        for chunk in range(num_chunks):
            loss = model(torch.ones(1, 1, dtype=torch.bfloat16)).sum()
            handler.before_backward(chunk == num_chunks - 1)
            loss.backward()
            handler.after_backward()
    handler.reduce(None)
    return sent[-1]


def test_gradients_of_several_backwards_are_sent_in_fp32(ranks) -> None:
    """Those of one backward are too, if other ranks may have several."""
    wide, own = torch.float32, torch.bfloat16
    expected = {("sharded", 1): own, ("sharded", 3): wide, ("gathered_per_round", 1): wide, ("gathered_per_step", 3): own}
    for key, dtype in expected.items():
        assert ranks(2).run(sent_in, *key) == [dtype] * 2, key


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize("shard_ranks", [0, 2])
def test_bf16_weights_stay_in_the_band_of_plain_bf16(ranks, parameters: Parameters, shard_ranks: int) -> None:
    num_ranks, layout, lengths = LAYOUTS["<4>,<2,2>,<1,1,1,1>"]
    rows, case = random_rows(lengths), ModelCase(dtype=torch.bfloat16)
    exact_loss, exact = reference_step(build_model(ModelCase()), rows)
    _, plain = reference_step(build_model(case), rows)
    plan = plan_of(layout, lengths, num_ranks, parameters=parameters)
    (loss, found), *_ = run_step(ranks(num_ranks), case, plan, rows, shard_ranks=shard_ranks)
    assert loss == pytest.approx(exact_loss, rel=5e-3)
    errors = [max(relative_error(g[name].double(), exact[name]) for name in exact) for g in (found, plain)]
    assert errors[0] <= min(BF16_BAND, 1.5 * errors[1] + 5e-3)


def accumulated(num_rounds: int, num_chunks: int, fp32_gradients: bool) -> float:
    """Gradient of a bf16 weight over both ranks: one chunk gives 1, all others 2^-9, which bf16 would round away when added."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16))
    shard_model(model, ("Linear",), mesh(2), fp32_gradients)
    parameters = ShardedParameters(model, fp32_gradients)
    for step_round in range(num_rounds):
        parameters.enter_round("sharded")
        for chunk in range(num_chunks):
            value = 2.0**-9 if step_round or chunk else 1.0
            loss = (model(torch.ones(1, 1, dtype=torch.bfloat16)) * value).sum()
            parameters.before_backward(chunk == num_chunks - 1)
            loss.backward()
            parameters.after_backward()
    parameters.reduce(None)
    return float(whole(model[0].weight.grad)[0])


def transposed_on_rank() -> torch.Tensor:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False))
    model[0].weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    shard_model(model, ("Linear",), mesh(2))
    return whole(model[0].weight.detach())


def test_a_transposed_weight_is_sharded_like_any_other(ranks) -> None:
    for weight in ranks(2).run(transposed_on_rank):
        assert torch.equal(weight, torch.arange(6.0).view(2, 3).t())


@pytest.mark.daily("1-65")
@pytest.mark.parametrize("num_rounds,num_chunks", [(65, 1), (1, 65), (13, 5)])
def test_small_chunks_and_rounds_are_not_rounded_away(ranks, num_rounds: int, num_chunks: int) -> None:
    # two ranks of 1 + 64 / 512 each
    assert ranks(2).run(accumulated, num_rounds, num_chunks, True) == [2.25] * 2
    assert max(ranks(2).run(accumulated, num_rounds, num_chunks, False)) < 2.25


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
def test_random_plans_match(ranks, parameters: Parameters) -> None:
    @settings(max_examples=4, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
    @given(random_steps(4))
    def matches(step: tuple[list, list[int]]) -> None:
        plan = plan_of(*step, 4, parameters=parameters)
        check_step(ranks(4), ModelCase(promoted=True), plan, step[1], shard_ranks=2)

    matches()


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Replaces one step of the gradient reduction by a wrong one."""
    if bug == "mean over ranks":
        with patch.object(sums, "sum_blocks", lambda blocks_RK, *ranks: sum_blocks(blocks_RK, *ranks) / len(blocks_RK)):
            yield
    elif bug == "only the last chunk counts":
        with patch.object(ShardedParameters, "before_backward", forget_earlier_chunks):
            yield
    else:
        yield


def forget_earlier_chunks(self: ShardedParameters, *flags: bool) -> None:
    for parameter in self.model.parameters():
        parameter.grad = None
    _BEFORE_BACKWARD(self, *flags)


_BEFORE_BACKWARD = ShardedParameters.before_backward


def gradients_with_bug(bug: str, plan_json: str, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    with planted(bug):
        return step_on_rank(ModelCase(), plan_json, rows)[1]


@pytest.mark.daily("only the last chunk counts")
@pytest.mark.parametrize("bug", ["", "mean over ranks", "only the last chunk counts"])
def test_planted_bug_is_noticed(ranks, bug: str) -> None:
    plan, rows = chunks_plan((FFFBBB, FFFBBB), "gathered_per_round"), random_rows(CHUNK_LENGTHS)
    _, expected = reference_step(build_model(ModelCase()), rows)
    for gradients in ranks(2).run(gradients_with_bug, bug, plan_to_json(plan), rows):
        worst = max(relative_error(gradients[name], expected[name]) for name in expected)
        assert worst > 0.1 if bug else worst <= 1e-6


def collectives_of_a_step(plan_json: str, rows: list[dict[str, list[int]]], shard_ranks: int) -> tuple[Counter[str], bool]:
    """Counts of gathers, reductions and sums over copies in a step and an evaluation, and whether the model ends sharded."""
    plan, pool = plan_from_json(plan_json), group_pool()
    model = build_model(ModelCase(dtype=torch.float32))
    patch_model(model)
    shard_model(model, model._no_split_modules, mesh(shard_ranks))
    executor = StepExecutor(whole_model(model, 2), pool, torch.device("cpu"))
    chunks = rank_inputs(plan, rows, pool.rank)["chunks"]
    calls: Counter[str] = Counter()
    original = torch.distributed.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        calls["copies"] += kwargs["group"] in mesh(shard_ranks).get_all_groups()
        return original(*args, **kwargs)

    with patch.object(torch.distributed, "all_reduce", all_reduce):
        with torch.profiler.profile() as step:
            executor.run(plan.for_rank(pool.rank), chunks, 10)
        with torch.profiler.profile() as evaluation:
            executor.evaluate(plan.for_rank(pool.rank), chunks)
    calls["gathers"] = num_events(step, "FSDP::all_gather")
    calls["reductions"] = num_events(step, "FSDP::sum_gradients")
    calls["evaluation"] = num_events(evaluation, "FSDP::all_gather")
    return calls, all(isinstance(parameter, DTensor) for parameter in model.parameters())


def num_events(profile: torch.profiler.profile, label: str) -> int:
    """Profiler regions of FSDP2 with this label; the name of a unit may follow in brackets."""
    return sum(event.name.split(" ")[0] == label for event in profile.events())


# three units: two layers and the rest; first the micro-batch of one chunk, then that of three
@pytest.mark.wide
@pytest.mark.parametrize(
    "parameters,shard_ranks,gathers,evaluation",
    [
        # each forward and each backward gathers a layer, but for the first one of a pass with which the pass before it ended, at
        # three turns; the rest is gathered once
        ("sharded", 2, 2 * 2 * 4 - 3 + 1, 2 * 4 + 1),
        ("gathered_per_round", 2, 2 * 2 + 1, 3),
    ],
)
def test_weights_are_gathered_as_often_as_the_plan_says(
    ranks, parameters: Parameters, shard_ranks: int, gathers: int, evaluation: int
) -> None:
    plan, rows = chunks_plan((FFFBBB, FFFBBB), parameters), random_rows(CHUNK_LENGTHS)
    for calls, is_sharded in ranks(2).run(collectives_of_a_step, plan_to_json(plan), rows, shard_ranks):
        assert calls["gathers"] == gathers
        # once per micro-batch and unit, whatever the number of chunks
        assert calls["reductions"] == 2 * 3
        assert calls["evaluation"] == evaluation
        assert is_sharded


@pytest.mark.wide
def test_copies_are_summed_once_per_step(ranks) -> None:
    num_ranks, layout, lengths = LAYOUTS["<4>,<2,2>,<1,1,1,1>"]
    plan = plan_of(layout, lengths, num_ranks, parameters="sharded")
    for calls, _ in ranks(4).run(collectives_of_a_step, plan_to_json(plan), random_rows(lengths), 2):
        assert calls["reductions"] == 3 * 3
        # after the last micro-batch: which weights have gradients, and one bucket of them
        assert calls["copies"] == 2


def steps_around_an_error(plan_json: str, rows: list[dict[str, list[int]]]) -> list[dict[str, torch.Tensor]]:
    """Whole gradients of a step, and of the same step after one, and an evaluation, that raised inside a layer."""
    plan, pool = plan_from_json(plan_json), group_pool()
    model = build_model(ModelCase(promoted=True, dtype=torch.bfloat16))
    patch_model(model)
    shard_model(model, model._no_split_modules, mesh(2))
    executor = StepExecutor(whole_model(model, 2), pool, torch.device("cpu"))
    path, chunks = plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"]
    num_backwards = 0

    def fail(gradient: torch.Tensor) -> None:
        nonlocal num_backwards
        num_backwards += 1
        if num_backwards == 2:
            raise ArithmeticError

    def watch(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    def refuse(module: Any, args: Any) -> None:
        raise ArithmeticError

    found = []
    for fails in (False, True, False):
        model.zero_grad()
        if fails:
            # the layer is gathered by then, and the next gather may have begun
            hook = model.model.layers[1].mlp.up_proj.register_forward_pre_hook(refuse)
            with pytest.raises(ArithmeticError):
                executor.evaluate(path, chunks)
            hook.remove()
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        hook = model.model.layers[0].mlp.up_proj.register_forward_hook(watch)
        num_backwards = 0 if fails else 10
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            executor.run(path, chunks, 40)
        hook.remove()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        found.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    return [found[0], found[2]]


@pytest.mark.daily("sharded")
@pytest.mark.parametrize("parameters", MODES)
def test_a_step_that_raised_leaves_nothing_to_the_next_one(ranks, parameters: Parameters) -> None:
    plan, rows = chunks_plan((FFBFBB, FFBFBB), parameters), random_rows(CHUNK_LENGTHS)
    for before, after in ranks(2).run(steps_around_an_error, plan_to_json(plan), rows):
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


def losses_of_a_loop(plan_json: str, rows: list[dict[str, list[int]]], first: str) -> list[float]:
    """Losses of a loop without plans on a sharded model, after nothing, a step of a plan, or a gather of all weights."""
    plan, pool = plan_from_json(plan_json), group_pool()
    model = build_model(ModelCase())
    patch_model(model)
    shard_model(model, model._no_split_modules, mesh(2))
    executor = StepExecutor(whole_model(model, 2), pool, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if first == "plan":
        executor.run(plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"], 40)
    elif first == "gather":
        model.unshard()
    ids_1T, losses = torch.tensor([rows[0]["input_ids"]]), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(input_ids=ids_1T, labels=ids_1T).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
def test_a_loop_of_ones_own_is_the_same_after_a_plan(ranks, parameters: Parameters) -> None:
    plan, rows = chunks_plan((FFBFBB, FFBFBB), parameters), random_rows(CHUNK_LENGTHS)
    expected, *others = (ranks(2).run(losses_of_a_loop, plan_to_json(plan), rows, first) for first in ("", "plan", "gather"))
    assert others == [expected, expected]
    assert len({*expected[0]}) == 4


def refusals() -> list[str]:
    """Error messages of this rank for wrong combinations of plan, model and mesh."""
    pool, found = group_pool(), []
    plain, sharded = build_model(ModelCase()), build_model(ModelCase())
    shard_model(sharded, sharded._no_split_modules, mesh(2))
    tries = (
        lambda: StepExecutor(whole_model(plain, 2), pool, torch.device("cpu")).run(plan_of_mode("sharded").for_rank(0), [], 1),
        lambda: StepExecutor(whole_model(sharded, 2), pool, torch.device("cpu")).evaluate(
            plan_of_mode("replicated").for_rank(0), []
        ),
        lambda: shard_model(plain, ("NoSuchLayer",), mesh(2)),
        lambda: shard_mesh("cpu", 3, 1.0),
    )
    for attempt in tries:
        try:
            attempt()
        except ValueError as error:
            found.append(str(error))
    return found


def plan_of_mode(parameters: Parameters) -> StepPlan:
    return plan_of([[(2, (0,))]], [9], 2, parameters=parameters)


def test_what_does_not_fit_is_refused_by_name(ranks) -> None:
    for found in ranks(2).run(refusals):
        assert found == [
            "the plan expects sharded parameters, but this model is not sharded; apply shard_model to it",
            "the plan expects replicated parameters, but this model is sharded; plan with parameters='sharded'",
            "LlamaForCausalLM has no layers of class NoSuchLayer to shard; name the class of its layers",
            "shard_ranks is 3, which does not divide the 2 ranks of a stage (without stages: of the run); choose a divisor",
        ]


class Wrapper(torch.nn.Module):
    """A module that a user put around a layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def prefetched(wrapper: Any, range_layers: tuple[int, ...]) -> list[int | None]:
    """The layer that the backward of each layer gathers in advance; None for none."""
    model: Any = build_model(ModelCase(num_layers=4))
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = layer if wrapper is None else wrapper(layer)
    shard_model(model, ("LlamaDecoderLayer",), mesh(2))
    parameters = ShardedParameters(model, True, 1, range_layers)
    places = {id(layer._get_fsdp_state()): place for place, layer in enumerate(parameters.layers)}
    found = [layer._get_fsdp_state()._states_to_backward_prefetch for layer in parameters.layers]
    return [places.get(id(each)) for (each,) in found]


@pytest.mark.daily("Sequential")
@pytest.mark.parametrize("wrapper", [None, Wrapper, torch.nn.Sequential])
def test_a_backward_gathers_the_layer_before_also_if_modules_are_wrapped_around_layers(ranks, wrapper: Any) -> None:
    assert ranks(2).run(prefetched, wrapper, (4,)) == [[None, 0, 1, 2]] * 2
    # the first layer of a range follows none of this stage
    assert ranks(2).run(prefetched, wrapper, (2, 2)) == [[None, 0, None, 2]] * 2
