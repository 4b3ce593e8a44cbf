"""The start of planning: what every rank must agree on before groups are made."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import make_trainer, training_arguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.scan import scan_on_every_rank
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.start.setup import TrainingRows, _lengths, checked_degrees, choose_setup
from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec
from hf_longctx.plan.core.types import PARAMETERS, Parameters
from hf_longctx.plan.cost.catalog import spec_name
from hf_longctx.plan.cost.cost_model import CostCoefficients, PassCoefficients, block_sizes, default_coefficients
from hf_longctx.plan.cost.profiles import HardwareProfile, ModelCalibration, profile_to_json, read_profile
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.planning import weight_seconds
from hf_longctx.plan.setup import SHARINGS, Setup


def blocks_of_pool(ranks_on_node: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Ranks per node and sizes of blocks that this rank plans with, on a node of `ranks_on_node[rank]` ranks."""
    arguments: Any = SimpleNamespace(
        bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=dist.get_world_size()
    )
    config = replace(LongContextConfig(), method="hybrid")
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_on_node[dist.get_rank()])):
        setup = choose_setup(config, ModelFacts.of(build_model(ModelCase())), arguments, (1, 2), dist.group.WORLD)
    return setup.costs.cluster.ranks_per_node, block_sizes(setup.planner.degrees, setup.costs)


@pytest.mark.wide
def test_ranks_of_unequal_nodes_make_the_same_groups(ranks) -> None:
    # a node of two ranks and a node of one: groups that only some ranks make would hang the others
    assert ranks(3).run(blocks_of_pool, (2, 2, 1)) == [(1, ())] * 3


def test_blocks_stay_inside_equal_nodes(ranks) -> None:
    assert ranks(4).run(blocks_of_pool, (2, 2, 2, 2)) == [(2, (2,))] * 4


COSTS = CostCoefficients(
    PassCoefficients(3e-6, 4e-4, 0.02, 3e-3, 4e-7), PassCoefficients(7e-6, 9e-4, 0.03, 5e-3, 5e-7), 0.05, "calibrated one day"
)
RATES = HardwareSpec("this machine", 1e11, 5e10, 2**30, 2e9, 1e9, 1e-4, source="measured one day")


def written(path: Path, model: str, rates: HardwareSpec = RATES) -> str:
    """The path of a profile with one calibrated model of this name."""
    profile = HardwareProfile(rates, (ModelCalibration(model, COSTS, 1000, 2**29),))
    path.write_text(profile_to_json(profile))
    return str(path)


@pytest.mark.wide("None-llama", "None-mixtral")
@pytest.mark.parametrize("family", ["llama", "qwen3_5_few", "kimi_linear", "mixtral"])
@pytest.mark.parametrize("tokens_per_rank", [None, 64])
def test_a_device_without_room_is_refused_before_the_first_step_with_settings_that_were_tried(
    family: str, tokens_per_rank: int | None
) -> None:
    model = build_model(ModelCase(family=family, dtype=torch.float32))
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=1)
    states = ByteModel(model_spec(model)).states()
    config = LongContextConfig(device_gib=states / 2**30, tokens_per_rank=tokens_per_rank, max_length=64)
    with pytest.raises(ValueError, match="leave no room for a token") as refusal:
        choose_setup(config, ModelFacts.of(model), arguments, (1,), None)
    match = re.search(r"optimizer_states='host' \(([\d,]+) tokens\)", str(refusal.value))
    # scans of hybrids need more beside the weights than the states of such a small model free
    assert match or family in ("qwen3_5_few", "kimi_linear")
    if match:
        setup = choose_setup(replace(config, optimizer_states="host"), ModelFacts.of(model), arguments, (1,), None)
        fits = int(match[1].replace(",", ""))
        assert fits >= 1 and setup.room_tokens >= min(64, fits, tokens_per_rank or 64)


@pytest.mark.quick
def test_stages_whose_gathered_weights_do_not_fit_are_refused_with_bytes_limit_and_remedy() -> None:
    facts = ModelFacts.of(build_model(ModelCase(num_layers=8, dtype=torch.float32)))
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=4)
    whole, shards = (most_states(model_spec(facts.model), parameters) / 2**30 for parameters in ("gathered_per_step", "sharded"))
    assert shards < 0.9 * whole
    unsharded = ByteModel(model_spec(facts.model)).most_states(layer_ranges(8, 2), "replicated", 1) / 2**30
    cases: tuple[tuple[Parameters, float, str], ...] = (
        ("replicated", unsharded, "use parameters='sharded'"),
        ("gathered_per_step", whole, "use parameters='sharded'"),
        ("sharded", shards, "use more ranks, a smaller model or a larger device"),
    )
    for parameters, gib, remedy in cases:
        config = LongContextConfig(stages=2, parameters=parameters, device_gib=gib, max_length=64, spread_head=False)
        with pytest.raises(ValueError) as refusal:
            choose_setup(config, facts, arguments, (1, 2), None)
        gathered = "" if parameters == "replicated" else ", with what it gathers beside its shards,"
        assert f"({parameters}) take {gib:.3g} GiB on a rank of 2 stages{gathered} and leave" in str(refusal.value)
        assert str(refusal.value).endswith(f"leave no room for a token in {gib:.3g} GiB; {remedy}")


def test_shards_of_one_stage_without_room_are_refused_with_what_a_rank_gathers() -> None:
    facts = ModelFacts.of(build_model(ModelCase(num_layers=8, dtype=torch.float32)))
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=4)
    config = LongContextConfig(parameters="sharded", device_gib=1e-5, max_length=64)
    with pytest.raises(ValueError, match="GiB on a rank, with what it gathers beside its shards, and leave no room"):
        choose_setup(config, facts, arguments, (1, 2, 4), None)


def most_states(spec: ModelSpec, parameters: Parameters) -> int:
    """Bytes of the states on the fullest rank of two stages of two ranks each."""
    return ByteModel(spec).most_states(layer_ranges(spec.num_layers, 2), parameters, 2)


@pytest.mark.quick
def test_the_longest_row_that_is_accepted_can_be_planned() -> None:
    # formulas alone take 64 tokens in this ring, and the plan of 8 is refused
    model = build_model(ModelCase(family="deepseek_v2", dtype=torch.float32))
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=2)
    states = ByteModel(model_spec(model)).states()
    for share in (1.0, 1.05, 1.1, 1.15, 1.2):
        config = LongContextConfig(device_gib=share * states / 2**30, tokens_per_rank=64, max_length=64)
        config = replace(config, parameters="sharded", method="ring")
        try:
            setup = choose_setup(config, ModelFacts.of(model), arguments, (1, 2), None)
        except ValueError:
            continue
        longest = min(64, setup.room_tokens)
        assert plan_step(0, [longest], setup.costs, setup.planner).lengths == (longest,)


def lone_setup(hardware: str) -> Setup:
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=1)
    return choose_setup(LongContextConfig(hardware=hardware), ModelFacts.of(build_model(ModelCase())), arguments, (1,), None)


def test_a_profile_with_this_model_gives_its_coefficients_and_rates(tmp_path: Path) -> None:
    spec = model_spec(build_model(ModelCase()))
    costs = lone_setup(written(tmp_path / "hardware.json", spec_name(spec))).costs
    assert costs.coefficients == COSTS
    # memory is that of the device at hand
    assert costs.cluster.hardware == replace(RATES, device_bytes=lone_setup("").costs.cluster.hardware.device_bytes)


def test_a_profile_is_of_a_model_with_kernels_or_without() -> None:
    spec = model_spec(build_model(ModelCase()))
    fused = replace(spec, fuses_norms=True, fuses_gates=True, fuses_rotary=True)
    assert spec_name(fused) == f"{spec_name(spec)}, norms and gates and rotary embeddings as kernels"


def test_a_profile_of_another_model_gives_rates_and_says_so(tmp_path: Path, caplog) -> None:
    path = written(tmp_path / "hardware.json", "llama-3.1-8b")
    costs = lone_setup(path).costs
    assert costs.coefficients == default_coefficients(costs.model, costs.cluster)
    assert costs.coefficients.source == "measured one day"
    assert f"hardware {path}: only its rates are used, since it was calibrated for other models (llama-3.1-8b)" in caplog.text
    assert "than this one (2 layers of 32 and 48" in caplog.text


def test_a_shipped_guess_changes_the_rates_and_is_still_measured_by_the_run() -> None:
    costs = lone_setup("H100").costs
    assert costs.cluster.hardware.link_bytes_per_s == read_profile("h100").spec.link_bytes_per_s
    assert not costs.coefficients.is_measured


def profile_of_rank(paths: tuple[str, str]) -> float:
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=2)
    config = LongContextConfig(hardware=paths[dist.get_rank()])
    setup = choose_setup(config, ModelFacts.of(build_model(ModelCase())), arguments, (1, 2), dist.group.WORLD)
    return setup.costs.coefficients.step_s


def test_the_file_of_the_first_rank_holds_for_all(ranks, tmp_path: Path) -> None:
    name = spec_name(model_spec(build_model(ModelCase())))
    paths = [written(tmp_path / file, name) for file in ("a.json", "b.json")]
    Path(paths[1]).write_text(Path(paths[1]).read_text().replace('"step_s": 0.05', '"step_s": 0.07'))
    assert ranks(2).run(profile_of_rank, tuple(paths)) == [0.05, 0.05]


# problem -> ((text in the file, its replacement), text in the message)
BROKEN = {
    "negative": (('"pair_s": 3e-06', '"pair_s": -3e-06'), "forward.pair_s is -3e-06; a number of 0 or more is needed"),
    "missing": (('"token_s": 0.0004,', ""), "field 'token_s' is missing"),
    "no rate": (('"link_bytes_per_s": 2000000000.0', '"link_bytes_per_s": 0'), "link_bytes_per_s is 0; a number above 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_profile_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    written(path, "llama-3.1-8b")
    (old, new), message = BROKEN[name]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match="this run cannot start") as refused:
        make_trainer(ModelCase(), random_rows([20] * 8), str(tmp_path), {"hardware": str(path)})
    assert f"- hardware: {path}" in str(refused.value) and message in str(refused.value)


def test_a_profile_that_is_nowhere_is_refused_with_the_shipped_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hardware 'h900' is neither a shipped profile") as refused:
        make_trainer(ModelCase(), random_rows([20] * 8), str(tmp_path), {"hardware": "h900"})
    assert "h100" in str(refused.value)


def test_a_calibrated_run_predicts_its_first_step(tmp_path: Path, capsys) -> None:
    path = written(tmp_path / "hardware.json", spec_name(model_spec(build_model(ModelCase()))))
    config = {"hardware": path, "report_steps": True}
    make_trainer(ModelCase(), random_rows([20] * 32), str(tmp_path), config, {"max_steps": 3, "logging_steps": 1}).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert all("predicted 324 ms)" in line for line in lines), lines


def planner_of(settings: dict[str, Any]) -> Any:
    """The planner's config for a run on one rank with these settings."""
    arguments: Any = SimpleNamespace(bf16=False, optim="adamw_torch", device=torch.device("cpu"), world_size=1)
    return choose_setup(LongContextConfig(**settings), ModelFacts.of(build_model(ModelCase())), arguments, (1,), None).planner


@pytest.mark.parametrize("name", ["time_aware", "nested", "node_aligned"])
def test_switches_reach_the_planner_one_by_one(name: str) -> None:
    default = planner_of({})
    assert (default.time_aware, default.nested, default.node_aligned) == (True, True, True)
    assert planner_of({name: False}) == replace(default, **{name: False})


def degrees_of_run(settings: dict[str, Any], folder: str) -> tuple[int, ...] | str:
    """The degrees that this rank allows under these settings, or the refusal."""
    args = training_arguments(folder)
    try:
        return checked_degrees(
            LongContextConfig(**settings), ModelFacts.of(build_model(ModelCase())), args, None, [], dist.group.WORLD
        )
    except ValueError as error:
        return str(error)


def test_all_degrees_are_every_number_of_ranks_unless_the_method_has_none(ranks, tmp_path: Path) -> None:
    assert ranks(4).run(degrees_of_run, {"degrees": "all"}, str(tmp_path)) == [(1, 2, 3, 4)] * 4
    assert ranks(4).run(degrees_of_run, {}, str(tmp_path)) == [(1, 2, 4)] * 4
    for found in ranks(4).run(degrees_of_run, {"degrees": "all", "method": "ulysses"}, str(tmp_path)):
        assert "degree 3 is neither a power of two nor all 4 ranks, as Ulysses requires; use method 'auto'" in found


# links on which gathers take long, so that ways to share weights differ
SLOW_LINKS = replace(RATES, link_bytes_per_s=2e7, network_bytes_per_s=2e7, memory_bytes_per_s=1e10)
# lengths of a set of which a step reads every other row, without the longest
AUTO_LENGTHS = [20, 60, 20, 12] * 128


def cpu_arguments(num_ranks: int, num_rows: int) -> Any:
    """Arguments of a trainer, as far as a setup reads them. num_rows: of a rank in a step."""
    return SimpleNamespace(
        bf16=False,
        optim="adamw_torch",
        device=torch.device("cpu"),
        world_size=num_ranks,
        per_device_train_batch_size=num_rows,
        disable_tqdm=True,
    )


def auto_setup(hardware: str, gib: float, **settings: Any) -> Setup:
    """The setup of a run on four ranks."""
    arguments = cpu_arguments(4, 2)
    rows = TrainingRows(datasets.Dataset.from_list(random_rows(AUTO_LENGTHS)))
    config = LongContextConfig(**{"hardware": hardware, "device_gib": gib, "max_length": 64, **settings})
    facts = ModelFacts.of(build_model(ModelCase(num_layers=4, dtype=torch.float32)))
    num_ranks = 4 // config.stages if isinstance(config.stages, int) else 4
    return choose_setup(config, facts, arguments, tuple(d for d in (1, 2, 4) if d <= num_ranks), None, rows)


@pytest.mark.daily("2-1.3")
@pytest.mark.parametrize("stages,share", [(1, 0.9), (1, 1.3), (1, 4.0), (2, 1.3), (2, 4.0)])
def test_auto_shares_parameters_in_the_way_that_is_fastest_for_a_step(tmp_path: Path, stages: int, share: float) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(profile_to_json(HardwareProfile(SLOW_LINKS, ())))
    whole = ByteModel(model_spec(build_model(ModelCase(num_layers=4, dtype=torch.float32)))).states() / stages / 2**30
    # the head on one stage, so that states of stages are a share of the whole
    found = auto_setup(str(path), share * whole, stages=stages, parameters="auto", spread_head=False)
    seconds = {}
    for parameters in PARAMETERS:
        try:
            setup = auto_setup(str(path), share * whole, stages=stages, parameters=parameters, spread_head=False)
            plan_step(0, [60], setup.costs, setup.planner)
            plan = plan_step(0, [20, 20] * 4, setup.costs, setup.planner)
        except ValueError:
            continue
        more = weight_seconds(plan, setup.costs)
        seconds[parameters] = plan.estimate.counted_s + more.sum_s + more.update_s - more.hidden_s
    assert found.placement.parameters == min(seconds, key=lambda each: seconds[each]), seconds
    assert found.placement.shard_ranks == (1 if found.placement.parameters == "replicated" else 4 // stages)
    assert found.notes and "fastest for a step among those that fit" in found.notes[0]


def test_auto_keeps_the_ranks_of_a_shard_and_weights_that_are_read_in_shards(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(profile_to_json(HardwareProfile(SLOW_LINKS, ())))
    ways: tuple[tuple[Parameters, ...], ...] = (SHARINGS, SHARINGS[:-1])
    for deferred, allowed in zip((None, True), ways, strict=True):
        with patch("hf_longctx.hf.start.setup.source_of", lambda base, deferred=deferred: deferred):
            found = auto_setup(str(path), 1.0, parameters="auto", shard_ranks=2).placement
        assert found.parameters in allowed and found.shard_ranks == (1 if found.parameters == "replicated" else 2)
        assert (found.parameters == "replicated") == (deferred is None)


def test_the_rows_are_read_once_for_all_choices() -> None:
    arguments: Any = SimpleNamespace(disable_tqdm=True, per_device_train_batch_size=1, world_size=1)
    rows = TrainingRows(datasets.Dataset.from_list(random_rows([20, 30])), must_fit=True)
    with patch("hf_longctx.hf.start.setup.scan_on_every_rank", wraps=scan_on_every_rank) as scans:
        lengths = _lengths(rows, arguments, 64, 64, (), None)
        assert lengths.must_hold == lengths.longest() == 30
    assert scans.call_count == 1


def test_auto_needs_gathers_where_seconds_were_measured(tmp_path: Path) -> None:
    name = spec_name(model_spec(build_model(ModelCase(num_layers=4, dtype=torch.float32))))
    path = written(tmp_path / "hardware.json", name)
    with pytest.raises(ValueError, match=r"parameters='auto' compares seconds .*hf-longctx calibrate.* name one of replicated, "):
        auto_setup(path, 1.0, parameters="auto")
    known = replace(RATES, gather_bytes_per_s=((2, 1e9),), scatter_bytes_per_s=((2, 1e9),))
    path = written(tmp_path / "hardware.json", name, known)
    # ranks with shards sum no whole gradients
    assert COSTS.step_s > 0
    for parameters, step_s in (("replicated", COSTS.step_s), ("sharded", 0.0)):
        assert auto_setup(path, 1.0, parameters=parameters).costs.coefficients.step_s == step_s
    assert auto_setup(path, 1.0, parameters="auto").notes


def shared_on_rank(deferred: tuple[bool | None, ...]) -> tuple[Any, tuple[str, ...]]:
    """How parameters are shared, and the notes, on a rank whose weights are read in shards, or not."""
    arguments = cpu_arguments(2, 4)
    rows = TrainingRows(datasets.Dataset.from_list(random_rows([20] * 8)))
    config = LongContextConfig(parameters="auto", device_gib=1.0, max_length=64, tokens_per_rank=30)
    cluster = patch("hf_longctx.hf.start.setup.cluster_spec", lambda *_: ClusterSpec(2, 2, SLOW_LINKS))
    with cluster, patch("hf_longctx.hf.start.setup.source_of", lambda _: deferred[dist.get_rank()]):
        setup = choose_setup(config, ModelFacts.of(build_model(ModelCase())), arguments, (1, 2), dist.group.WORLD, rows)
    return setup.costs.parameters, setup.notes


def test_ranks_that_would_choose_otherwise_share_parameters_as_the_first_one_chose(ranks) -> None:
    alone = [ranks(2).run(shared_on_rank, (each, each))[0] for each in (True, None)]
    assert alone[0][0] != alone[1][0], "both choose alike"
    assert ranks(2).run(shared_on_rank, (True, None)) == [alone[0]] * 2
    assert ranks(2).run(shared_on_rank, (None, True)) == [alone[1]] * 2
