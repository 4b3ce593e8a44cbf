"""The pass that makes room: plans stay valid and fit, nothing is changed that fits, and less memory is never faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.sliced_plans import gathers_of
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.settings import GENERIC_GPU, ActivationBudget, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import GroupShape, LayerPolicy, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.groups.placement import PlacedGroup
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import most_tokens
from hf_longctx.plan.model.config import ExpertSpec
from hf_longctx.plan.model.layers import NO_INDEX, IndexSpec
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.plan.policies.fill import MemoryLimits, choose_policy
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.pipeline_run import run_alone
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.room import make_room

MODEL = ModelSpec(4, 256, 704, 8, 2, 32, 4096, 1 << 20, bytes_per_element=2)
LARGE = ModelSpec(32, 4096, 14336, 32, 8, 128, 128256, 1 << 20, bytes_per_element=2)


def costs_of(model: ModelSpec, num_ranks: int = 1, copy_bytes_per_s: float = 5e10, parameters: str = "replicated") -> CostModel:
    hardware = replace(GENERIC_GPU, copy_bytes_per_s=copy_bytes_per_s)
    cluster = ClusterSpec(num_ranks, num_ranks, hardware)
    return CostModel(model, cluster, default_coefficients(model, cluster), parameters=parameters, shard_ranks=num_ranks)


def config_of(costs: CostModel, device_bytes: int, host_bytes: int = 0, tile_tokens: int = 2048, **settings) -> PlannerConfig:
    """Memory for saved tensors on every rank, as a run works it out."""
    model, num_ranks = costs.model, costs.cluster.num_ranks
    budget = ByteModel(model).budget(device_bytes, host_bytes, tile_tokens, is_shared=num_ranks > 1)
    most = max(1, budget.kept_tokens, most_tokens(model, device_bytes, host_bytes, tile_tokens, is_shared=num_ranks > 1))
    degrees = tuple(d for d in (1, 2, 4, 8) if d <= num_ranks)
    return PlannerConfig(most, degrees, activations=budget, **settings)


def made_to_fit(plan: StepPlan, costs: CostModel, budget: ActivationBudget, allows_slices: bool = True) -> StepPlan:
    """The plan with room; steps in one micro-batch have no slices."""
    return make_room(plan, Planning(costs, PlannerConfig(1, (1,), activations=budget, one_micro_batch=not allows_slices)))


def check_memory(plan: StepPlan, costs: CostModel, budget: ActivationBudget) -> None:
    """Every rank of every group is within the budget, whether it keeps everything or not, and the estimate says so."""
    byte_model = ByteModel(costs.model)
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            for position in range(group.degree):
                used = byte_model.moments(group, group.stages[0], position).most
                assert used.peak <= budget.device_bytes and used.host <= budget.host_bytes
    states = byte_model.states(costs.parameters, costs.shard_ranks)
    assert max(evaluate_plan(plan, costs).peak_bytes) == plan.estimate.peak_bytes <= states + budget.device_bytes


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Small models whose workspace differs: in the loss, in attention of few KV heads or chosen keys, caps, norms of heads."""
    num_heads = draw(st.sampled_from([4, 8]))
    return replace(
        MODEL,
        num_layers=draw(st.integers(1, 4)),
        num_heads=num_heads,
        num_kv_heads=draw(st.sampled_from([1, 2, num_heads])),
        vocab_size=draw(st.sampled_from([64, 4096, 50_000])),
        bytes_per_element=draw(st.sampled_from([2, 4])),
        value_head_dim=draw(st.sampled_from([0, 0, 16])),
        qk_norms=draw(st.booleans()),
        caps_scores=draw(st.booleans()),
        drops_weights=draw(st.booleans()),
        index=draw(st.sampled_from([NO_INDEX, NO_INDEX, IndexSpec(64, 4, 16, 4, 2, passes_on=True, most_ranks=4)])),
    )


@pytest.mark.wide
@given(
    models(),
    st.lists(st.integers(1, 30_000), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.integers(300, 8_000),
    st.sampled_from([0, 1 << 26]),
    st.sampled_from([0, 512, 2048]),
    st.sampled_from(["replicated", "sharded"]),
    st.sampled_from(["auto", "ulysses"]),
)
@settings(max_examples=100, deadline=None)
def test_plans_are_valid_and_fit(
    model: ModelSpec,
    lengths: list[int],
    num_ranks: int,
    kept_tokens: int,
    host_bytes: int,
    tile_tokens: int,
    parameters: str,
    method: str,
) -> None:
    costs = replace(costs_of(model, num_ranks, parameters=parameters), method=method)
    device_bytes = ByteModel(model).kept_bytes(kept_tokens, is_shared=num_ranks > 1)
    config = config_of(costs, device_bytes, host_bytes, tile_tokens)
    # copies on their way to the host take device memory, so a sequence that fits only with the host may be refused
    longest = config_of(costs, device_bytes, 0, tile_tokens).tokens_per_rank * config.degrees[-1]
    lengths = [min(length, longest) for length in lengths]
    plan = plan_step(0, lengths, costs, config)
    validate_plan(plan)
    assert config.activations is not None
    check_memory(plan, costs, config.activations)
    # the bound counts gathers, too
    assert plan.estimate.lower_bound_s <= plan.estimate.counted_s * (1 + 1e-9)
    assert plan_digest(plan_step(0, lengths, costs, config)) == plan_digest(plan)


@pytest.mark.parametrize(
    "num_tokens,device_bytes,host_bytes",
    [(5469, 1 << 26, 14635910), (4078, 1 << 26, 13062719), (6296, 3 << 25, 4427547), (3850, 1 << 26, 11658376)],
)
def test_a_full_host_is_not_exceeded_by_rounding(num_tokens: int, device_bytes: int, host_bytes: int) -> None:
    # copies are all but free, so that the host is what binds
    costs = costs_of(MODEL, copy_bytes_per_s=1e13)
    config = config_of(costs, device_bytes, host_bytes, 512)
    plan = plan_step(0, [num_tokens], costs, config)
    assert config.activations is not None
    assert 0.9 * host_bytes < plan.estimate.host_bytes <= host_bytes


def test_ranks_without_sequences_need_no_slices_where_nothing_is_wholly_kept() -> None:
    config = PlannerConfig(4_000, (1,), activations=ActivationBudget(0, 1 << 26, 0, 512))
    plan = plan_step(0, [500], costs_of(MODEL, 4), config)
    assert plan.layout == "<1,1,1,1>"


@given(st.lists(st.integers(1, 4_000), min_size=1, max_size=8), st.sampled_from([1, 2]))
@settings(max_examples=8, deadline=None)
def test_what_fits_as_it_is_keeps_everything(lengths: list[int], num_ranks: int) -> None:
    costs = costs_of(MODEL, num_ranks)
    config = config_of(costs, ByteModel(MODEL).kept_bytes(4_000, is_shared=num_ranks > 1))
    kept = plan_step(0, lengths, costs, replace(config, activations=None, tokens_per_rank=4_000))
    assert plan_digest(plan_step(0, lengths, costs, config)) == plan_digest(kept)


def test_one_long_sequence_is_recomputed_and_short_ones_are_not() -> None:
    # a model whose seconds are not those of starting kernels
    costs = costs_of(LARGE)
    config = config_of(costs, ByteModel(LARGE).kept_bytes(8_000))
    plan = plan_step(0, [60_000, 7_900, 7_800, 7_700], costs, config)
    policies = {
        tuple(sorted(span.sequence for chunk in group.chunks for span in chunk.spans)): group.stages[0].activations
        for micro_batch in plan.micro_batches
        for group in micro_batch.groups
    }
    # sharing a micro-batch with the long one would have them computed again
    assert [policies[i,] for i in (1, 2, 3)] == [()] * 3
    assert policies[0,]


def test_ranks_that_share_experts_replay_the_same_layers() -> None:
    experts = ExpertSpec(token_rows=2 * LARGE.num_layers, num_layers=LARGE.num_layers, num_experts=8, num_ranks=4)
    costs = costs_of(replace(LARGE, experts=experts), 4, parameters="sharded")
    # groups of one rank, so that the long sequence is one of four groups
    config = replace(config_of(costs, ByteModel(costs.model).kept_bytes(8_000, is_shared=True)), degrees=(1,))
    plan = plan_step(0, [14_000, 7_000, 6_900, 6_800], costs, config)
    mixed = 0
    for micro_batch in plan.micro_batches:
        replays = [
            {place for policy in group.stages[0].activations for place, layer in enumerate(policy.layers) if is_replay(layer)}
            for group in micro_batch.groups
        ]
        assert replays == [replays[0]] * len(replays)
        tokens = [max(shard_tokens(group.chunks[0], group.shape)) for group in micro_batch.groups]
        mixed += bool(replays[0]) and min(tokens) <= config.activations.kept_tokens < max(tokens)
        whole = [layer.share("mlp").recompute for g in micro_batch.groups for p in g.stages[0].activations for layer in p.layers]
        assert set(whole) <= {0.0, 1.0}
    # some group would have kept everything
    assert mixed
    check_memory(plan, costs, config.activations)


def is_replay(layer: LayerPolicy) -> bool:
    return not layer.keeps_everything


@pytest.mark.wide
@pytest.mark.parametrize("host_bytes", [0, 1 << 34])
def test_more_memory_is_never_predicted_slower(host_bytes: int) -> None:
    costs = costs_of(LARGE)
    seconds = []
    for gib in (12, 16, 24, 32, 48, 64, 96, 160):
        config = config_of(costs, gib << 30, host_bytes)
        if config.tokens_per_rank >= 32_768:
            seconds.append(plan_step(0, [32_768], costs, config).estimate.step_s)
    assert len(seconds) > 4
    assert seconds == sorted(seconds, reverse=True)
    # in the end nothing is left to compute again but the tiles
    assert seconds[0] > seconds[-1] * 1.05


def test_the_host_is_used_where_copies_hide_and_refused_where_they_do_not() -> None:
    fast, slow = costs_of(LARGE, copy_bytes_per_s=5e10), costs_of(LARGE, copy_bytes_per_s=1e7)
    config = config_of(fast, 24 << 30, 64 << 30)
    with_host = plan_step(0, [65_536], fast, config)
    without = plan_step(0, [32_768], slow, config)
    assert with_host.estimate.host_bytes > 1 << 30
    # computation hides only few copies
    assert without.estimate.host_bytes < with_host.estimate.host_bytes / 20


def test_what_cannot_fit_is_named() -> None:
    costs = costs_of(MODEL)
    config = replace(config_of(costs, 1 << 26), tokens_per_rank=1 << 20)
    with pytest.raises(ValueError, match=r"1000000 tokens on 1 ranks do not fit .* 0.06 GiB of a device and 0.00 GiB"):
        plan_step(0, [1_000_000], costs, config)


def test_the_judge_counts_what_policies_add() -> None:
    costs = costs_of(MODEL)
    config = config_of(costs, ByteModel(MODEL).kept_bytes(2_000))
    plan = plan_step(0, [16_000], costs, config)
    plain = replace(
        plan,
        micro_batches=tuple(
            replace(mb, groups=tuple(replace(g, stages=(replace(g.stages[0], activations=()),)) for g in mb.groups))
            for mb in plan.micro_batches
        ),
    )
    ((group,),) = (micro_batch.groups for micro_batch in plan.micro_batches)
    # nothing may go to the host, so what is added runs again: matrix products of the layers, and attention
    forward, qkv = costs.coefficients.forward, MODEL.qkv_parameters / MODEL.layer_parameters
    products_s, added = forward.token_s * (1 - MODEL.head_share) / 4, 0.0
    for policy in group.stages[0].activations:
        (span,) = group.chunks[policy.chunk].spans
        for layer in policy.layers:
            attention, of_qkv, mlp = (layer.share(name).recompute for name in ("attention_output", "qkv", "mlp"))
            again = attention * span.num_tokens
            added += products_s * span.num_tokens * (of_qkv * qkv + mlp * (1 - qkv))
            added += forward.pair_s / 4 * again * (span.start + again / 2)
    run, kept = evaluate_plan(plan, costs), evaluate_plan(plain, costs)
    assert added > 0
    assert run.step_s == pytest.approx(kept.step_s + added, rel=1e-12)
    assert run_alone(group, costs).times[-1][1] == pytest.approx(run.step_s - run.once_s, rel=1e-12)
    assert run.peak_bytes < kept.peak_bytes


def test_slices_come_where_a_layer_does_not_fit_as_a_whole() -> None:
    """Untiled, one layer of all tokens works on more than there is; slices work on a part of it."""
    costs = costs_of(MODEL)
    config = config_of(costs, 512 << 20, tile_tokens=0)
    length = config.tokens_per_rank + 4_000
    plan = plan_step(0, [length], costs, replace(config, tokens_per_rank=length))
    ((group,),) = (micro_batch.groups for micro_batch in plan.micro_batches)
    assert len(group.chunks) > 1
    validate_plan(plan)
    kept = plan_step(0, [length], costs, replace(config, tokens_per_rank=length, activations=None))
    assert config.activations is not None
    with pytest.raises(ValueError, match="do not fit"):
        made_to_fit(kept, costs, config.activations, allows_slices=False)


@pytest.mark.parametrize(
    "parameters,shard_ranks,is_alone", [("replicated", 4, True), ("sharded", 2, True), ("sharded", 4, False)]
)
def test_a_group_is_cut_alone_or_in_step_with_those_that_share_its_weights(
    parameters: str, shard_ranks: int, is_alone: bool
) -> None:
    costs = replace(costs_of(MODEL, 4, parameters=parameters), shard_ranks=shard_ranks)
    config = config_of(costs, 512 << 20, tile_tokens=0)
    assert config.activations is not None
    length = 2 * (config.tokens_per_rank + 4_000)
    layout = [[PlacedGroup(0, 2, (0,)), PlacedGroup(2, 1, (1,)), PlacedGroup(3, 1, (2,))]]
    kept = build_plan(0, [length, 500, 500], layout, {1: GroupShape(1), 2: GroupShape(2, 2)}, costs)
    with pytest.raises(ValueError, match="do not fit"):
        made_to_fit(kept, costs, config.activations, allows_slices=False)
    plan = validate_plan(made_to_fit(kept, costs, config.activations))
    assert plan.layout == "<2,1,1>"
    long, *short = plan.micro_batches[0].groups
    assert len(long.chunks) > 1 and all(chunk.spans for chunk in long.chunks)
    # short documents are never cut, but run beside dummy chunks
    assert all(sum(bool(chunk.spans) for chunk in group.chunks) == 1 for group in short)
    assert [len(group.chunks) for group in short] == [1 if is_alone else len(long.chunks)] * 2
    check_memory(
        replace(plan, estimate=replace(plan.estimate, peak_bytes=max(evaluate_plan(plan, costs).peak_bytes))),
        costs,
        config.activations,
    )


@st.composite
def crowded_plans(draw: st.DrawFn) -> tuple[StepPlan, CostModel, ActivationBudget]:
    """Random groups side by side whose weights are sharded in blocks, with room for about what the largest has in slices."""
    num_ranks, tile_tokens = draw(st.sampled_from([(2, 0), (4, 0), (4, 0), (4, 512)]))
    blocks = draw(st.sampled_from([size for size in (2, 4) if num_ranks % size == 0]))
    costs = replace(costs_of(MODEL, num_ranks, parameters="sharded"), shard_ranks=blocks)
    config = config_of(costs, draw(st.sampled_from([256, 400, 512])) << 20, draw(st.sampled_from([0, 1 << 26])), tile_tokens)
    assert config.activations is not None
    layout, lengths = [], []
    for _ in range(draw(st.integers(1, 2))):
        groups, first = [], 0
        while first < num_ranks:
            degree = draw(st.sampled_from([d for d in (1, 1, 2, 4) if first % d == 0 and first + d <= num_ranks]))
            # some a little longer than what fits whole
            shares = draw(st.lists(st.sampled_from([0.01, 0.1, 0.5, 1.02, 1.1]), min_size=first == 0, max_size=3))
            own = [int(degree * config.tokens_per_rank * share / (1 + (place > 0) * 3)) for place, share in enumerate(shares)]
            if own:
                groups.append(PlacedGroup(first, degree, tuple(range(len(lengths), len(lengths) + len(own)))))
            lengths += own
            first += degree
        layout.append(groups)
    shapes = {degree: GroupShape(degree, degree) for degree in (1, 2, 4)}
    return build_plan(0, lengths, layout, shapes, costs), costs, config.activations


@pytest.mark.wide
@given(crowded_plans())
@settings(max_examples=60, deadline=None)
def test_ranks_of_a_block_gather_weights_in_one_order(drawn: tuple[StepPlan, CostModel, ActivationBudget]) -> None:
    kept, costs, budget = drawn
    try:
        plan = made_to_fit(kept, costs, budget)
    except ValueError:
        # without slices there is no more room
        with pytest.raises(ValueError, match="do not fit"):
            made_to_fit(kept, costs, budget, allows_slices=False)
        return
    run = evaluate_plan(plan, costs)
    plan = validate_plan(replace(plan, estimate=replace(plan.estimate, peak_bytes=max(run.peak_bytes))))
    check_memory(plan, costs, budget)
    orders = [gathers_of(plan.for_rank(rank).rounds) for rank in range(plan.num_ranks)]
    for rank, order in enumerate(orders):
        assert order == orders[rank // plan.block_ranks * plan.block_ranks]
    event("in step" if any(len(group.chunks) > 1 for each in plan.micro_batches for group in each.groups) else "whole")


def test_slices_of_a_ring_fit_on_each_of_its_ranks() -> None:
    model = replace(MODEL, windows=(None, None, 3000, 3000))
    costs = replace(costs_of(model, 3), method="ring")
    config = config_of(costs, 256 << 20, 64 << 20, tile_tokens=0)
    assert config.activations is not None
    num_tokens = config.tokens_per_rank + 4_000
    plan = plan_step(0, [3 * num_tokens], costs, replace(config, degrees=(3,), tokens_per_rank=num_tokens))
    ((group,),) = (micro_batch.groups for micro_batch in plan.micro_batches)
    assert group.method == "ring" and len(group.chunks) > 1
    check_memory(plan, costs, config.activations)
    # a ring recomputes attention of all tokens, or of none
    shares = [layer.share("attention_output").recompute for each in group.stages[0].activations for layer in each.layers]
    assert set(shares) <= {0.0, 1.0}


def test_tokens_that_are_said_to_fit_get_policies_where_their_bytes_do_not() -> None:
    costs, byte_model = costs_of(MODEL), ByteModel(MODEL)
    budget = ActivationBudget(8_000, byte_model.kept_bytes(2_000), 0, 512)
    plan = plan_step(0, [3_000, 1_500], costs, PlannerConfig(4_000, (1,), activations=budget))
    check_memory(plan, costs, budget)
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    assert [bool(group.stages[0].activations) for group in groups] == [group.num_tokens > 2_000 for group in groups]
    assert len(groups) == 2


@pytest.mark.wide
def test_many_long_sequences_are_planned_in_bounded_time_and_still_fit() -> None:
    """Beyond the first groups no programs are solved, and what the greedy order finds is near them."""
    costs = costs_of(LARGE, 8)
    config = config_of(costs, 60 << 30, 32 << 30)
    lengths = [60_000 + 37 * index for index in range(200)]
    plan = plan_step(0, lengths, costs, config)
    assert config.activations is not None
    check_memory(plan, costs, config.activations)
    added = []
    for group in (group for micro_batch in plan.micro_batches for group in micro_batch.groups):
        kept = replace(group, stages=(replace(group.stages[0], activations=()),))
        own_s, kept_s = (run_alone(each, costs).times[-1][1] for each in (group, kept))
        added.append(1 - kept_s / own_s)
    # groups differ by a few tokens, so what is added should too
    assert max(added) < min(added) + 0.05


def test_a_program_that_takes_too_much_of_the_host_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(MODEL)
    config = config_of(costs, ByteModel(MODEL).kept_bytes(2_000), 1 << 22)

    def generous(slots, limits: MemoryLimits, **settings):
        return choose_policy(slots, replace(limits, host_bytes=1e12), **settings)

    monkeypatch.setattr("hf_longctx.plan.room.room.choose_policy", generous)
    plan = plan_step(0, [12_000], costs, config)
    assert 0 < plan.estimate.host_bytes <= 1 << 22
