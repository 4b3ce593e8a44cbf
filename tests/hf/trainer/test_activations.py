"""Activation policies and slices from a trainer's own plans: whatever memory forces, training is that of plain HF."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
from helpers.models.reference import random_rows, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import tiny_costs
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import make_stock_trainer, quiet_config
from helpers.trainers.trainer_runs import LossRecorder, make_trainer, plain_training
from transformers import Trainer, TrainerCallback

from hf_longctx import LongContextCallback
from hf_longctx.hf.models.activations import ActivationRuntime, slab_rate
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.start import setup as advice
from hf_longctx.hf.start.setup import allocator_advice, has_expandable_segments, slow_tiles, tf32_offer
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import RankPlan, StepPlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import most_tokens
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core.host_copies import PlainCopies
from hf_longctx.runtime.process_groups import GroupPool

CASE = ModelCase(promoted=True)
LENGTHS = [61, 13, 50, 5, 44, 8, 21, 34, 3, 58, 13, 8, 5, 21, 40, 3]
# several epochs of two steps, and steps after the cost model is fitted
NUM_STEPS = 12
# tokens that a rank keeps everything of: with tiles and recomputation it then has room for the longest row
KEPT_TOKENS = 33


def gib_of_tokens(tokens: int, num_ranks: int = 1, shards: int = 1, case: ModelCase = CASE) -> float:
    """GiB of a device that keeps everything of so many tokens of the tiny model."""
    spec = model_spec(build_model(case))
    parameters = "sharded" if shards > 1 else "replicated"
    return (ByteModel(spec).states(parameters, shards) + ByteModel(spec).kept_bytes(tokens)) / 2**30


class PlanRecorder(LossRecorder):
    """Losses and plans of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[StepPlan] = []
        self.lines: list[str] = []

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        recorded = trainer.longctx_run.report.step_done

        def step_done(plan: StepPlan, result: Any) -> None:
            self.plans.append(plan)
            recorded(plan, result)

        trainer.longctx_run.report.step_done = step_done


def uses(plans: list[StepPlan]) -> set[str]:
    """Features that the plans used for chunks that did not fit: slices, tiles, recompute, host."""
    found = set()
    for group in (group for plan in plans for micro_batch in plan.micro_batches for group in micro_batch.groups):
        found |= {"slices"} if len(group.chunks) > 1 else set()
        for policy in group.stages[0].activations:
            found |= {"tiles"} if policy.tile_tokens else set()
            shares = [share for layer in policy.layers for share in layer.shares]
            found |= {"recompute" for share in shares if share.recompute}
            found |= {"host" for share in shares if share.host}
    return found


# losses of all steps, what the plans used, the weights behind them
Training = tuple[list[float], set[str], dict[str, torch.Tensor]]


def train(config: dict[str, Any], arguments: dict[str, Any] | None = None) -> Training:
    recorder = PlanRecorder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, random_rows(LENGTHS), folder, config, {"max_steps": NUM_STEPS, **(arguments or {})})
        recorder.attach(trainer)
        trainer.train()
    # the model has its own layers back
    assert all("forward" not in vars(mlp) for modules in layer_modules(trainer.model) for mlp in modules.mlps)
    weights = {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    return recorder.losses, uses(recorder.plans), weights


def expect_plain(losses: list[float], weights: dict[str, torch.Tensor]) -> None:
    expected_losses, expected = plain_training(CASE, random_rows(LENGTHS), NUM_STEPS)
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    assert max(relative_error(weights[name], expected[name]) for name in expected) <= 1e-10


# name -> (ranks, settings, what the plans must have used)
RUNS: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "recompute": (1, {"device_gib": gib_of_tokens(KEPT_TOKENS), "tile_tokens": 16}, {"recompute", "tiles"}),
    "untiled": (1, {"device_gib": gib_of_tokens(42), "tile_tokens": 0}, {"recompute"}),
    "host": (1, {"device_gib": gib_of_tokens(KEPT_TOKENS), "tile_tokens": 16, "host_gib": 0.01}, {"recompute", "tiles", "host"}),
    "two ranks": (2, {"device_gib": gib_of_tokens(20), "tile_tokens": 8, "degrees": [1, 2]}, {"tiles"}),
    "two shards": (
        2,
        {"device_gib": gib_of_tokens(20, 2, 2), "tile_tokens": 8, "parameters": "sharded"},
        {"tiles"},
    ),
}


@pytest.mark.daily("host")
@pytest.mark.parametrize("name", RUNS)
def test_training_under_policies_follows_one_plain_process(ranks, name: str) -> None:
    num_ranks, config, expected = RUNS[name]
    for losses, used, weights in ranks(num_ranks).run(train, config):
        assert used >= expected
        expect_plain(losses, weights)


def test_everything_is_kept_if_asked_for(ranks) -> None:
    ((_, used, _),) = ranks(1).run(train, {"device_gib": gib_of_tokens(70), "activations": "keep"})
    assert used == set()


class _Plans(TrainerCallback):
    """Collects the plans of a callback alone."""

    def __init__(self, callback: LongContextCallback, plans: list[StepPlan]) -> None:
        self.callback, self.plans = callback, plans

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        if self.callback.exchange is not None and self.callback.exchange.last_plan is not None:
            self.plans.append(self.callback.exchange.last_plan)

    on_step_end = on_substep_end


def train_stock(mode: str, config: dict[str, Any], case: ModelCase = CASE) -> Training:
    """A stock trainer in one process with the callback attached or alone."""
    callback = LongContextCallback(quiet_config(**config))
    recorder, plans = PlanRecorder(), []
    with tempfile.TemporaryDirectory() as folder:
        # two batches of four, so that a step of the callback alone is several plans
        arguments = {"max_steps": NUM_STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        trainer = make_stock_trainer(
            case, random_rows(LENGTHS), folder, arguments, callbacks=[callback] if mode == "alone" else []
        )
        if mode == "attached":
            callback.attach(trainer)
            recorder.attach(trainer)
        trainer.add_callback(_Plans(callback, plans))
        trainer.train()
    assert type(trainer) is Trainer
    assert all("forward" not in vars(mlp) for modules in layer_modules(trainer.model) for mlp in modules.mlps)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return losses, uses(plans + recorder.plans), weights


@pytest.mark.daily("alone-16")
@pytest.mark.parametrize("tile_tokens", [16, 0])
@pytest.mark.parametrize("mode", ["attached", "alone"])
def test_the_callback_brings_it_to_a_stock_trainer_in_one_process(mode: str, tile_tokens: int) -> None:
    # alone, a batch is one micro-batch
    tokens = 42 if mode == "attached" else 108
    losses, used, weights = train_stock(mode, {"device_gib": gib_of_tokens(tokens), "tile_tokens": tile_tokens})
    assert used >= {"recompute"} | ({"tiles"} if tile_tokens else set())
    expected_losses, expected = plain_training(CASE, random_rows(LENGTHS), NUM_STEPS)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert max(relative_error(weights[name], expected[name]) for name in expected) <= 1e-10


@pytest.mark.wide
@pytest.mark.parametrize("mode,family", [("attached", "gemma2"), ("alone", "gemma2"), ("alone", "granite")])
def test_a_stock_trainer_trains_changed_logits_in_tiles(mode: str, family: str) -> None:
    # capped scores of attention need more room beside what is kept
    case, tokens = ModelCase(family, promoted=True), {"attached": 50, "alone": 170 if family == "gemma2" else 108}[mode]
    config = {"device_gib": gib_of_tokens(tokens, case=case), "tile_tokens": 16}
    losses, used, weights = train_stock(mode, config, case)
    assert "tiles" in used
    expected_losses, expected = plain_training(case, random_rows(LENGTHS), NUM_STEPS)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert max(relative_error(weights[name], expected[name]) for name in expected) <= 1e-10


def test_evaluation_of_long_rows_makes_no_logits_as_a_whole(tmp_path) -> None:
    rows = random_rows(LENGTHS)
    config = {"device_gib": gib_of_tokens(KEPT_TOKENS), "tile_tokens": 16}
    wide = make_trainer(CASE, rows, str(tmp_path), {}, eval_dataset=datasets.Dataset.from_list(rows))
    narrow = make_trainer(CASE, rows, str(tmp_path), config, eval_dataset=datasets.Dataset.from_list(rows))
    assert narrow.evaluate()["eval_loss"] == pytest.approx(wide.evaluate()["eval_loss"], rel=1e-12)
    # the model has its own layers and head back, so that it may be copied or given to another trainer
    assert not any("forward" in vars(module) for module in (narrow.model.lm_head, *narrow.model.model.layers))
    assert narrow.longctx_run.activations.tier is None and wide.longctx_run.activations.engine(wide.model, _no_plan()) is None


def test_more_host_memory_than_there_is_is_refused_before_anything_starts(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"host_gib is 100000.0 for each of 1 ranks of a node, which has .* GiB available"):
        make_trainer(CASE, random_rows(LENGTHS), str(tmp_path), {"host_gib": 1e5})


@pytest.mark.wide
def test_step_lines_compare_predicted_and_measured_bytes(tmp_path, capsys) -> None:
    config = {"device_gib": gib_of_tokens(KEPT_TOKENS), "tile_tokens": 16, "host_gib": 0.01, "report_steps": True}
    make_trainer(CASE, random_rows(LENGTHS), str(tmp_path), config, {"max_steps": 2, "logging_steps": 1}).train()
    found = re.findall(
        r"held ([\d.]+) MiB predicted, ([\d.]+) MiB measured, ([\d.]+) MiB of ([\d.]+) on the host", capsys.readouterr().out
    )
    assert found
    for predicted, measured, host, expected_host in found:
        assert predicted == measured and host == expected_host


@pytest.mark.daily("200")
@pytest.mark.parametrize("kept_tokens", [200, KEPT_TOKENS])
def test_the_slab_has_what_plans_need_before_each_step(kept_tokens: int, tmp_path) -> None:
    sizes: list[int] = []
    settings = {"device_gib": gib_of_tokens(kept_tokens), "tile_tokens": 16, "host_gib": 0.01, "calibration_steps": 0}
    recorder = PlanRecorder()
    trainer = make_trainer(CASE, random_rows(LENGTHS), str(tmp_path), settings, {"max_steps": 2})
    runtime = trainer.longctx_run.activations
    at_start = 0 if runtime._tier is None else runtime._tier.slab.capacity_bytes
    recorder.attach(trainer)
    done = trainer.longctx_run.report.step_done

    def step_done(plan: StepPlan, result: Any) -> None:
        sizes.append(0 if runtime._tier is None else runtime._tier.slab.capacity_bytes)
        assert runtime._tier is None or runtime._tier.slab.beside_bytes == 0
        done(plan, result)

    trainer.longctx_run.report.step_done = step_done
    trainer.train()
    needed = [plan.estimate.host_bytes for plan in recorder.plans]
    assert len(sizes) == 2 and all(size >= need for size, need in zip(sizes, needed, strict=True))
    if kept_tokens == KEPT_TOKENS:
        # made at the start for the longest rows, and a small part of what it may be
        assert max(needed) and 0 < at_start <= sizes[-1] < 0.01 * 2**30 / 4
    else:
        assert not any(sizes) and not at_start


def test_a_slab_is_replaced_by_one_of_at_least_twice_its_size() -> None:
    runtime = ActivationRuntime(torch.device("cpu"), 1000 * 64, lambda rate: None)
    made = []
    for needed in (0, 64, 64, 65 * 64, 66 * 64, 74 * 64, 500 * 64, 1000 * 64, 2000 * 64):
        runtime.reserve(needed)
        made.append(0 if runtime._tier is None else runtime._tier.slab.capacity_bytes // 64)
    assert made == [0, 2, 2, 74, 148, 148, 563, 1000, 1000]
    # a slab that was full in one step is large enough in the next one
    runtime = ActivationRuntime(torch.device("cpu"), 1000 * 64, lambda rate: None)
    runtime.reserve(100 * 64)
    held = runtime._tier.store(torch.zeros(300 * 64, dtype=torch.uint8))
    assert runtime._tier.slab.beside_bytes >= 300 * 64
    del held
    # other ranks do not know of the piece before the next message
    runtime.reserve(1)
    assert runtime._tier.slab.beside_bytes
    runtime.agree(runtime.beside_bytes)
    runtime.reserve(1)
    assert runtime._tier.slab.capacity_bytes == 1000 * 64 and not runtime._tier.slab.beside_bytes
    runtime.close()
    runtime.reserve(64)
    assert runtime._tier.slab.capacity_bytes == 113 * 64


def slabs_of_steps(folder: str, is_stock: bool) -> list[int]:
    """Bytes of this rank's slab after each of three steps, if rank 1's slab is too full for it in the first one."""
    rank, rows = torch.distributed.get_rank(), random_rows(LENGTHS)
    settings = {"device_gib": gib_of_tokens(KEPT_TOKENS, 2), "tile_tokens": 16, "host_gib": 0.01, "calibration_steps": 0}
    sizes: list[int] = []

    class Filling(TrainerCallback):
        """Takes memory on rank 1 that no plan knows of."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            tier = runtime._tier
            sizes.append(tier.slab.capacity_bytes)
            if state.global_step == 1 and rank == 1:
                taken = tier.slab.take(1, tier.slab.capacity_bytes + 64)
                assert tier.slab.beside_bytes
                for _, run in taken:
                    tier.slab.give(run, ())

    quick = {"max_steps": 3, "per_device_train_batch_size": 2}
    if is_stock:
        callback = LongContextCallback(quiet_config(**settings))
        trainer = make_stock_trainer(CASE, rows, folder, quick, callbacks=[Filling(), callback])
        begun = callback.on_train_begin

        def on_train_begin(*arguments: Any, **keywords: Any) -> None:
            nonlocal runtime
            begun(*arguments, **keywords)
            runtime = callback.exchange.activations

        callback.on_train_begin = on_train_begin
        runtime: Any = None
    else:
        trainer = make_trainer(CASE, rows, folder, settings, quick)
        trainer.add_callback(Filling())
        runtime = trainer.longctx_run.activations
    trainer.train()
    return sizes


@pytest.mark.daily("callback")
@pytest.mark.parametrize("is_stock", [False, True], ids=["trainer", "callback"])
def test_all_ranks_replace_their_slabs_between_the_same_steps(ranks, is_stock: bool, tmp_path) -> None:
    first, second = ranks(2).run(slabs_of_steps, str(tmp_path), is_stock)
    assert first == second
    # two pieces of one slab are larger than the slab
    assert first[1] > first[0] > 0


def test_a_device_without_room_for_a_token_is_refused(tmp_path) -> None:
    states_gib = ByteModel(model_spec(build_model(CASE))).states() / 2**30
    with pytest.raises(ValueError, match=r"take 0\.00043\d* GiB on a rank and leave no room for a token in 0\.00043"):
        make_trainer(CASE, random_rows(LENGTHS), str(tmp_path), {"device_gib": states_gib})


@pytest.mark.wide
def test_the_opening_line_names_the_operator_and_the_room(tmp_path, capsys) -> None:
    config = {"device_gib": gib_of_tokens(KEPT_TOKENS), "tile_tokens": 16, "report_steps": True}
    make_trainer(CASE, random_rows(LENGTHS), str(tmp_path), config, {"max_steps": 1}).train()
    lines = capsys.readouterr().out.splitlines()
    spec = model_spec(build_model(CASE))
    most = most_tokens(spec, ByteModel(spec).kept_bytes(KEPT_TOKENS), 0, 16, head_pieces=spec.head_pieces(1))
    assert lines[0] == "plans for 1 rank on cpu: micro-batches within its memory, whose long sequences may be sliced"
    assert lines[1].startswith("memory of a rank: 0.00 GiB of weights, gradients and optimizer states; ")
    assert lines[1].endswith(
        f"kept up to {KEPT_TOKENS} tokens on a rank, recomputed as needed up to {most}, in 0.0 GiB beside the model"
    )
    assert re.match(r"training: 1 steps; an epoch has \d+, which take about [\d.]+ m?s \(a guess from rated speeds", lines[2])
    assert lines[3].startswith(f"written to {tmp_path}: ") and f"hf-longctx report {tmp_path} " in lines[3]
    assert lines[4] == "attention: torch's own for whole documents, cpu_flash for tiles of rings, slices and replayed layers"


def test_a_gpu_is_advised_to_use_memory_without_gaps() -> None:
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in allocator_advice("cuda", {})
    assert not allocator_advice("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert not allocator_advice("cpu", {})


def test_expandable_segments_are_read_from_the_environment() -> None:
    assert has_expandable_segments("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"})
    assert has_expandable_segments("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments: True"})
    assert not has_expandable_segments("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})
    assert not has_expandable_segments("cuda", {})
    assert not has_expandable_segments("cpu", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_tiles_without_a_fast_operator_are_named_on_gpus() -> None:
    model = named_model("llama-3.1-8b")
    for changes, dtype, words in (
        ({}, torch.float32, "needs bf16=True, head sizes of at most 256 that 8 divides; here heads have 128 elements in float32"),
        ({"caps_scores": True}, torch.bfloat16, "the package flash-attn or flash-attn-4"),
        ({"drops_weights": True}, torch.bfloat16, "dropout of its weights makes all tiles plain matrices"),
    ):
        assert words in slow_tiles(replace(model, **changes), torch.device("cuda"), dtype)
        assert not slow_tiles(replace(model, **changes), torch.device("cpu"), dtype)


def test_tf32_is_offered_where_products_of_fp32_would_be_faster() -> None:
    assert "TrainingArguments(tf32=True)" in tf32_offer((8, 0), torch.float32, "none")
    assert "right to about 1e-3 instead of 1e-6" in tf32_offer((9, 0), torch.float32, "ieee")
    # an older GPU, no product in fp32, and TF32 that is on
    assert not tf32_offer((7, 5), torch.float32, "none")
    assert not tf32_offer((9, 0), torch.bfloat16, "none")
    assert not tf32_offer((9, 0), torch.float32, "tf32")
    with patch.object(advice, "device_capability", lambda device: (9, 0)):
        line = slow_tiles(named_model("llama-3.1-8b"), torch.device("cuda"), torch.float32)
    assert line.endswith(tf32_offer((9, 0), torch.float32, "none"))


def test_copies_over_a_slab_are_measured_and_later_plans_count_on_them() -> None:
    rate = slab_rate(HostTier(2**20, PlainCopies()), torch.device("cpu"))
    assert rate > 1e6
    source = PlanSource(GroupPool((1,), timeout_s=1.0), tiny_costs(1), PlannerConfig(64, (1,)))
    source.set_copy_rate(rate)
    assert source.costs.cluster.hardware.copy_bytes_per_s == rate


def _no_plan() -> RankPlan:
    return RankPlan(0, 0, "replicated", ())
