"""Memory of a run: the room for tokens counts exchanges and kept tensors, and a limit above it is not planned with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.cost_models import cost_model

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.start import setup as start_setup
from hf_longctx.hf.start.setup import TrainingRows, choose_setup, threads_advice
from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import most_tokens
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.setup import DeviceMemory, Measured, Placement


def test_room_counts_the_exchanges_of_groups() -> None:
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=2)
    spec = model_spec(build_model(ModelCase()))
    config = LongContextConfig(device_gib=(ByteModel(spec).states() + ByteModel(spec).kept_bytes(40)) / 2**30, tile_tokens=16)
    alone, shared = (
        choose_setup(config, ModelFacts.of(build_model(ModelCase())), arguments, degrees, None).planner
        for degrees in [(1,), (1, 2)]
    )
    for planner, is_shared in ((alone, False), (shared, True)):
        room_of = planner.activations
        assert room_of is not None and room_of.kept_tokens == ByteModel(spec).kept_tokens(room_of.device_bytes, is_shared) <= 40
        room = room_of.device_bytes, room_of.host_bytes, room_of.tile_tokens
        ways = {
            "is_shared": is_shared,
            "reruns": True,
            "block_ranks": 1 + is_shared,
            "head_pieces": spec.head_pieces(1 + is_shared),
        }
        assert planner.tokens_per_rank == most_tokens(spec, *room, **ways)
    assert 40 < shared.tokens_per_rank < alone.tokens_per_rank


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_wholly_kept_fits_into_the_budget(family: str, is_half: bool) -> None:
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=1)
    model = build_model(ModelCase(family=family, dtype=torch.bfloat16 if is_half else torch.float32))
    spec = replace(model_spec(model), has_master_weights=True)
    assert spec.qk_norms == (family == "qwen3")
    config = LongContextConfig(device_gib=(ByteModel(spec).states() + 2**22) / 2**30, tile_tokens=16)
    found = choose_setup(config, ModelFacts.of(model), arguments, (1,), None).planner.activations
    assert found is not None and found.device_bytes == 2**22
    least, more = (ByteModel(spec).kept_bytes(found.kept_tokens + extra) for extra in (0, 1))
    assert least <= found.device_bytes < more


@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_more_tokens_than_memory_holds_are_not_planned_with_and_it_is_said(activations: str, caplog) -> None:
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=1)
    spec = model_spec(build_model(ModelCase()))
    gib = (ByteModel(spec).states() + ByteModel(spec).kept_bytes(40)) / 2**30
    config = LongContextConfig(device_gib=gib, tile_tokens=16, tokens_per_rank=5000, activations=activations)
    planner = choose_setup(config, ModelFacts.of(build_model(ModelCase())), arguments, (1,), None).planner
    assert (planner.tokens_per_rank < 500) == (activations == "auto") == ("tokens_per_rank 5000 is more than" in caplog.text)


def test_communicators_and_a_reference_model_take_a_part_of_the_memory_that_the_user_gave() -> None:
    # the default group, all four ranks for sums at the end and early ones, and pairs: four communicators of half a GiB
    costs = cost_model("exchange", 4)
    states = ByteModel(costs.model).states()
    memory = replace(DeviceMemory.by_formula(costs.model, 2**40), usable_bytes=states + 4 * 2**30, host_bytes=2**30)
    placement = Placement(4, "replicated", 1, (1, 2), costs.method)
    for takes_memory, expected in ((False, 4 * 2**30), (True, 4 * 2**29)):
        found = Measured(costs, memory, is_given=True, has_communicators=takes_memory).memory_on(placement, costs)
        assert (found.left_bytes(*placement.sharing), found.host_bytes) == (expected, 2**30)
    # half of the states: the reference has no gradients, and is shared as the model is
    sharded = replace(placement, parameters="sharded", shard_ranks=4)
    beside = Measured(costs, memory, reference_bytes=states // 2).memory_on(sharded, costs)
    assert memory.usable_bytes - beside.usable_bytes == states // 2 * memory.state_bytes("sharded", 4) // states


BF16 = ModelCase(dtype=torch.bfloat16)


def auto_setup(gib: float, lengths: list[int], case: ModelCase = BF16, num_ranks: int = 1, **settings: Any) -> Any:
    """The setup of a run that chooses the place of optimizer states for rows of these lengths."""
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), disable_tqdm=True)
    arguments.world_size = num_ranks
    config = LongContextConfig(**{"device_gib": gib, "tile_tokens": 16, "optimizer_states": "auto", **settings})
    rows = [{"input_ids": [3] * length} for length in lengths]
    return choose_setup(config, ModelFacts.of(build_model(case)), arguments, (1,), None, TrainingRows(rows or None))


def test_states_move_to_the_host_from_the_first_token_without_room(monkeypatch) -> None:
    monkeypatch.setattr(start_setup, "host_bytes", lambda: (2**33, 2**34))
    spec = replace(model_spec(build_model(ModelCase(dtype=torch.bfloat16))), has_master_weights=True)
    gib = (ByteModel(spec).states() + ByteModel(spec).kept_bytes(20)) / 2**30
    room = auto_setup(gib, [20], optimizer_states="device").room_tokens
    assert 20 <= room < spec.max_positions
    for longest, on_host in ((room, False), (room + 1, True)):
        setup = auto_setup(gib, [5, longest, 7])
        assert setup.costs.model.updates_on_host == on_host
        (line,) = setup.notes
        assert line.startswith(f"optimizer states: on the {'host' if on_host else 'device'}; ")
        assert f"the longest sequence has {longest} tokens, and {room} fit " in line
        assert ("of host memory now free" in line) == on_host
        assert setup == replace(
            auto_setup(gib, [5, longest, 7], optimizer_states="host" if on_host else "device"), notes=setup.notes
        )
    # a stream, or no set, may be as long as the settings allow
    assert auto_setup(gib, []).costs.model.updates_on_host
    assert not auto_setup(gib, [], max_length=room).costs.model.updates_on_host
    assert not auto_setup(gib, [room + 1], tokens_per_rank=room).costs.model.updates_on_host
    # without host memory they stay where they are, and the line says why
    monkeypatch.setattr(start_setup, "host_bytes", lambda: (2**10, 2**30))
    setup = auto_setup(gib, [room + 1])
    assert not setup.costs.model.updates_on_host and "of the 0.00 GiB of host memory now free" in setup.notes[0]
    with pytest.raises(
        ValueError, match=r"'auto' finds no room\. On the device: weights.*On the host: optimizer_states='host' n"
    ):
        auto_setup(ByteModel(spec).states() / 2**30, [20])


def test_layers_move_to_the_host_from_the_first_token_without_room(monkeypatch) -> None:
    # free memory of a machine changes from one look to the next
    monkeypatch.setattr(start_setup, "host_bytes", lambda: (2**33, 2**34))
    case = replace(BF16, num_layers=6)
    spec = replace(model_spec(build_model(case)), has_master_weights=True)
    gib = (ByteModel(spec).states("sharded", 2) + ByteModel(spec).kept_bytes(20)) / 2**30
    run: dict[str, Any] = {"case": case, "num_ranks": 2, "parameters": "sharded", "optimizer_states": "device"}
    room = auto_setup(gib, [20], **run).room_tokens
    for longest, on_host in ((room, False), (room + 1, True)):
        place = "host" if on_host else "device"
        setup, given = (auto_setup(gib, [5, longest, 7], **run, layer_weights=kind) for kind in ("auto", place))
        assert setup.costs.model.layers_on_host == on_host and setup.room_tokens >= longest
        assert setup.notes[0].startswith(f"weights of layers: on the {place}; the longest sequence has {longest} tokens")
        assert setup == replace(given, notes=setup.notes)
    # beside the choice for optimizer states, which go to the host first
    both = auto_setup(gib, [room + 1], **{**run, "optimizer_states": "auto"}, layer_weights="auto")
    assert both.costs.model.updates_on_host and not both.costs.model.layers_on_host
    assert len(both.notes) == 2
    # weights that do not fit when nothing computes are refused, and so is host memory that is not there
    away = ByteModel(replace(spec, layers_on_host=True))
    with pytest.raises(ValueError, match="layer_weights='host': between steps, weights of layers come back"):
        auto_setup((away.resting("sharded", 2) - 1) / 2**30, [20], **run, layer_weights="host")
    monkeypatch.setattr(start_setup, "host_bytes", lambda: (2**10, 2**30))
    with pytest.raises(ValueError, match=r"^layer_weights='host' needs 0\.0 GiB of host memory on every rank"):
        auto_setup(gib, [20], **run, layer_weights="host")


def test_idle_cores_are_named_where_the_cpu_updates_weights() -> None:
    spec = replace(model_spec(build_model(ModelCase())), updates_on_host=True)
    cluster = ClusterSpec(8, 8, GENERIC_GPU)
    costs = CostModel(spec, cluster, default_coefficients(spec, cluster))
    assert "set OMP_NUM_THREADS=12 " in threads_advice(costs, "cuda", 1, 96)
    assert "for all of the 96 cores" in threads_advice(costs, "cuda", 6, 96)
    assert not threads_advice(costs, "cuda", 7, 96) and not threads_advice(costs, "cpu", 1, 96)
    assert not threads_advice(replace(costs, model=replace(spec, updates_on_host=False)), "cuda", 1, 96)


def test_sequences_longer_than_a_chunk_may_be_have_the_room_of_slices() -> None:
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=2)
    model = build_model(ModelCase(dtype=torch.float32))
    model.config.max_position_embeddings = 2**20
    settings = {"parameters": "sharded", "device_gib": 0.125, "host_gib": 0.0}

    def setup_of(**more: Any) -> Any:
        return choose_setup(LongContextConfig(**settings, **more), ModelFacts.of(model), arguments, (1, 2), None)

    # nothing longer is asked for than one chunk holds
    in_chunks = setup_of(max_length=1024)
    assert in_chunks.planner.longest_tokens == 0
    found = setup_of()
    assert 1.05 * in_chunks.room_tokens < found.room_tokens == found.planner.room_tokens < found.max_length
    assert found.planner.tokens_per_rank == in_chunks.planner.tokens_per_rank
    plan = plan_step(0, [found.room_tokens, 900, found.room_tokens // 3], found.costs, found.planner)
    assert plan.estimate.peak_bytes <= 2**27
    assert setup_of(max_length=found.room_tokens - 7).room_tokens == found.room_tokens - 7
    # a number that the user gives is not raised, and a step of one micro-batch has no slices
    given = setup_of(tokens_per_rank=in_chunks.planner.tokens_per_rank // 2)
    assert given.planner.tokens_per_rank == in_chunks.planner.tokens_per_rank // 2
    assert given.room_tokens == given.planner.room_tokens == 2 * given.planner.tokens_per_rank
    assert found.in_one_micro_batch().room_tokens == in_chunks.room_tokens
