"""Seconds of the optimizer are those of the bytes that it reads and writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import LayerRange, Parameters
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.planning import WeightSeconds, piped_s, weight_seconds

SPEC = replace(named_model("llama-3.2-1b"), has_master_weights=True)
HARDWARE = replace(GENERIC_GPU, memory_bytes_per_s=1e12)


@pytest.mark.parametrize("parameters", ["replicated", "sharded"])
def test_the_optimizer_reads_and_writes_all_states_once(parameters: Parameters) -> None:
    share = 1 if parameters == "replicated" else 4

    def update_s(spec: object = SPEC, hardware: object = HARDWARE) -> float:
        cluster = ClusterSpec(4, 4, hardware)  # type: ignore[arg-type]
        coefficients = default_coefficients(spec, cluster)  # type: ignore[arg-type]
        costs = CostModel(SPEC, cluster, coefficients, parameters=parameters, shard_ranks=share)
        plan = plan_step(0, (4000, 2000, 1000), costs, PlannerConfig(4000, (1, 2, 4)))
        return weight_seconds(plan, replace(costs, model=spec)).update_s  # type: ignore[arg-type]

    # 20 bytes a parameter, read and written at 1 TB/s
    assert update_s() == pytest.approx(2 * 20 * SPEC.num_parameters / share / 1e12, rel=1e-6)
    assert update_s(hardware=GENERIC_GPU) == 0
    # on the host, the CPU reads and writes 16 bytes a parameter, and fp32 gradients of the largest part, the embedding; meanwhile
    # 6 bytes a parameter travel, but not those of the first and the last part; 6 stay on the device
    part = SPEC.vocab_size * SPEC.hidden_size
    cpu_bytes, copied_bytes = 2 * (16 * SPEC.num_parameters + 4 * part), 6 * part
    on_host_s = (cpu_bytes + copied_bytes) / GENERIC_GPU.copy_bytes_per_s + 2 * 6 * SPEC.num_parameters / 1e12
    assert update_s(replace(SPEC, updates_on_host=True)) == pytest.approx(on_host_s / share, rel=1e-6)


def test_the_longest_of_copies_and_updates_hides_the_others() -> None:
    # by hand: four parts of (1, 3, 0.5) seconds; the second stage begins at 1, works for 12 and the last part leaves at 13.5
    assert piped_s([4.0, 12.0, 2.0], 4) == 13.5
    assert piped_s([4.0, 12.0, 2.0], 1) == 18.0
    # where the link is the slowest, updates hide behind it
    assert piped_s([12.0, 4.0, 2.0], 4) == 12.0 + 1.5


def test_a_stage_updates_its_own_weights_on_the_host() -> None:
    spec = replace(SPEC, updates_on_host=True)
    costs = CostModel(spec, ClusterSpec(2, 2, GENERIC_GPU), default_coefficients(spec, ClusterSpec(2, 2, GENERIC_GPU)))
    half = spec.num_layers // 2
    layers = ((LayerRange(0, half),), (LayerRange(half, half),))
    staged = plan_step(0, (2000,), costs, PlannerConfig(4000, (1,), stages=layers))
    whole = plan_step(0, (2000,), costs, PlannerConfig(4000, (1,)))
    assert staged.num_stages == 2 and whole.num_stages == 1
    # half of the layers and the embedding, which both stages have
    counted = half * spec.layer_weights + spec.vocab_size * spec.hidden_size
    ratio = weight_seconds(staged, costs).update_s / weight_seconds(whole, costs).update_s
    assert ratio == pytest.approx(counted / spec.num_parameters, rel=0.1)


def hidden_s(num_ranks: int, length: int, spec: ModelSpec = SPEC) -> tuple[float, WeightSeconds]:
    """Seconds of the last backward of one document, and those of the weights."""
    cluster = ClusterSpec(num_ranks, num_ranks, GENERIC_GPU)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    plan = plan_step(0, (length,), costs, PlannerConfig(length, (1,)))
    (group,) = plan.micro_batches[0].groups[:1]
    return costs.backward_s(group.chunks[-1], group.shape, spec.num_layers), weight_seconds(plan, costs)


def test_copies_to_the_host_hide_beside_the_last_backward_of_a_rank_alone() -> None:
    spec = replace(SPEC, updates_on_host=True)
    backward_s, found = hidden_s(1, 4000, spec)
    # by hand: one part is the embedding; layers but the first leave during the backward, as far as the link allows
    embedding = spec.vocab_size * spec.hidden_size
    out_s = 4 * (spec.num_parameters - embedding) / GENERIC_GPU.copy_bytes_per_s
    left = (spec.num_layers - 1) / spec.num_layers * min(out_s, backward_s)
    num_parts = spec.num_parameters / embedding
    assert 0 < found.hidden_s == pytest.approx(left / num_parts, rel=1e-3)
    # the update itself stays
    assert found.hidden_s < 0.1 * found.update_s
    # states on the device send nothing, and ranks that sum gradients send them later
    assert hidden_s(1, 4000)[1].hidden_s == 0
    assert hidden_s(2, 4000, spec)[1].hidden_s == pytest.approx(hidden_s(2, 4000)[1].hidden_s)


@pytest.mark.parametrize("network", [1e7, 1e9])
def test_stages_with_the_head_sum_its_gradient_while_stages_before_them_end(network: float) -> None:
    hardware = replace(GENERIC_GPU, network_bytes_per_s=network)
    cluster = ClusterSpec(4, 1, hardware)
    model = replace(named_model("llama-3.2-1b"), tied_embeddings=False, num_head_stages=2)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), parameters="replicated", shard_ranks=1)
    layers = tuple((LayerRange(4 * stage, 4),) for stage in range(4))
    plan = plan_step(0, (4000,) * 4, costs, PlannerConfig(4000, (1,), stages=layers, output_shares=(0.0, 0.0, 0.5, 0.5)))
    (group,) = plan.micro_batches[0].groups
    found, tied = (weight_seconds(plan, each) for each in (costs, replace(costs, model=replace(model, tied_embeddings=True))))
    # each of two ranks sends the fp32 gradient once, each of three four thirds of it
    sent_s = 4 * model.vocab_size * model.hidden_size / network
    assert found.sum_s == pytest.approx(sent_s, rel=1e-3) and tied.sum_s == pytest.approx(4 / 3 * sent_s, rel=1e-3)
    # the first two stages run the backward of the last chunk after those with the head
    backward_s = costs.backward_s(group.chunks[-1], group.shape, 4)
    assert found.left_s == pytest.approx(max(0.0, found.sum_s - 2 * backward_s), rel=1e-3, abs=1e-3)
    assert tied.left_s == pytest.approx(tied.sum_s, rel=1e-3)
