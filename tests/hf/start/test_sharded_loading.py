"""Models that are loaded shard by shard: bit for bit those that are loaded whole, in every rank's memory only its shards."""

from __future__ import annotations

import gc
import re
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from helpers.measures.allocations import measure
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import SKEWED, LossRecorder, training_arguments
from peft import LoraConfig, get_peft_model

from hf_longctx import LongContextConfig, LongContextTrainer, load_sharded
from hf_longctx.hf.checkpoints.deferred import defer_weights
from hf_longctx.hf.checkpoints.weights import gather_weights
from hf_longctx.hf.run.placement import Shards
from hf_longctx.runtime.parameters.sharded import shard_mesh

SHARDED = {"parameters": "sharded", "tokens_per_rank": 64}


def loaded(folder: str, settings: LongContextConfig, **loading: Any) -> Any:
    """A model of `load_sharded`, with the config of the model beside that of the run."""
    return load_sharded(folder, settings, config=transformers.AutoConfig.from_pretrained(folder), **loading)


def with_adapters(model: Any, **settings: Any) -> Any:
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings))


def trained(folder: str, rows: Any, is_whole: bool, config: dict[str, Any], lora: dict[str, Any] | None, **arguments: Any) -> Any:
    """Losses of a training, its weights at the start and at the end, and all buffers."""
    args = training_arguments(
        f"{folder}/out", max_steps=3, per_device_train_batch_size=8 // torch.distributed.get_world_size(), **arguments
    )
    # the other run is only what this one is compared with
    settings = LongContextConfig(**{**SHARDED, **config}, report_steps=False, timeline_steps=0, self_test=not is_whole)
    # grouped products of experts do not support fp64
    loading = {"experts_implementation": "eager"}
    load = transformers.AutoModelForCausalLM.from_pretrained if is_whole else partial(loaded, settings=settings)
    model: Any = load(folder, **loading)
    if lora is not None:
        model = with_adapters(model, **lora)
    trainer = LongContextTrainer(model=model, args=args, train_dataset=datasets.Dataset.from_list(rows), longctx_config=settings)
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer._placed_model()
    first = {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    last = {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}
    return recorder.losses, first, last, dict(trainer.model.named_buffers())


def refusals(folder: str, config: dict[str, Any], changes: list[str]) -> list[str]:
    """Why a trainer does not start with a model of `load_sharded`, for every change that is made to the model."""
    args = training_arguments(f"{folder}/out", per_device_train_batch_size=4)
    rows = datasets.Dataset.from_list(random_rows([9] * 16))
    errors = []
    for change in changes:
        settings = LongContextConfig(**{**SHARDED, **config})
        model: Any = load_sharded(folder, LongContextConfig(**SHARDED))
        if change == "dora":
            model = with_adapters(model, use_dora=True)
        if change == "new head":
            model.lm_head = torch.nn.Linear(32, model.config.vocab_size, bias=False)
        if change == "more rows":
            model.lm_head.weight = torch.nn.Parameter(torch.full((3, 32), torch.nan))
        if change == "tied":
            model.lm_head.weight = model.model.embed_tokens.weight
        try:
            LongContextTrainer(model=model, args=args, train_dataset=rows, longctx_config=settings)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_what_reading_later_would_undo_is_refused_by_name(ranks, tmp_path: Path) -> None:
    build_model(ModelCase(dtype=torch.float32)).save_pretrained(tmp_path)
    for dora, head, more, tied in ranks(2).run(refusals, str(tmp_path), {}, ["dora", "new head", "more rows", "tied"]):
        assert "lora_magnitude_vector.default.weight was computed from weights that load_sharded has not read yet" in dora
        assert all("lm_head.weight was changed after load_sharded, which has not read it yet" in each for each in (head, more))
        assert "lm_head.weight and model.embed_tokens.weight were made one weight after load_sharded" in tied
    for (whole_run,) in ranks(2).run(refusals, str(tmp_path), {"parameters": "replicated"}, [""]):
        assert "give load_sharded and the trainer the same config" in whole_run
    for (staged,) in ranks(2).run(refusals, str(tmp_path), {"parameters": "replicated", "stages": 2}, [""]):
        assert "load_sharded" in staged


def test_incomplete_and_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    model = build_model(ModelCase(dtype=torch.float32))
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lacks 1 weights .*model.layers.1.mlp.up_proj.weight"):
        defer_weights(str(tmp_path))
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantised"):
        defer_weights(str(tmp_path))


MIB = 2**20


def peak_mib(folder: str, reads_whole: bool) -> tuple[float, float, float]:
    """MiB by which this process grew at most while it loaded and sharded a model; MiB of its shards, and of the whole model."""
    # first, since it says how many ranks there are
    training_arguments(f"{folder}/out")
    settings = LongContextConfig(**SHARDED)
    shards = Shards(shard_mesh("cpu", torch.distributed.get_world_size(), 60.0), torch.device("cpu"), True)
    gc.collect()
    # makes the present size the peak
    Path("/proc/self/clear_refs").write_text("5")
    before = host_mib("VmRSS")
    if reads_whole:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = load_sharded(folder, settings, dtype=torch.float32)
    shards.divide(model)
    peak = host_mib("VmHWM") - before
    weights = [weight.detach() for weight in model.parameters()]
    own = sum(weight.to_local().nbytes for weight in weights)
    return peak, own / MIB, sum(weight.numel() * 4 for weight in weights) / MIB


def host_mib(field: str) -> float:
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024  # type: ignore[union-attr]


def saving_mib(folder: str) -> tuple[float, float]:
    """Most MiB of tensors that this rank made while rank 0 gathered the weights of a sharded model, and MiB of the model."""
    training_arguments(f"{folder}/out")
    model = load_sharded(folder, LongContextConfig(**SHARDED), dtype=torch.float32)
    Shards(shard_mesh("cpu", torch.distributed.get_world_size(), 60.0), torch.device("cpu"), True).divide(model)
    # allocations and not the process's size, since the allocator keeps freed memory
    peak, _, kept = measure(lambda: gather_weights(model, torch.distributed.get_rank() == 0))
    assert bool(kept) == (torch.distributed.get_rank() == 0)
    return peak / MIB, sum(weight.numel() * 4 for weight in model.parameters()) / MIB


def wide_llama(folder: Path) -> None:
    """Saves a model of 52 million weights, none of which takes more than 8 MiB in fp32, in files of 8 MB."""
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, vocab_size=4096
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu").to(torch.bfloat16).save_pretrained(folder, max_shard_size="8MB")


@pytest.mark.wide
def test_ranks_that_save_no_weights_hold_few_of_them(ranks, tmp_path: Path) -> None:
    wide_llama(tmp_path)
    (writer, total), *others = ranks(4).run(saving_mib, str(tmp_path))
    assert writer >= total
    # a weight of 8 MiB, as it comes from the ranks and as one tensor, this rank's shard of it, one that gloo has yet to free, and
    # a norm of 2 KiB
    assert all(peak <= 28.1 for peak, _ in others), others


@pytest.mark.wide
def test_each_of_four_ranks_holds_its_shards_and_no_more(ranks, tmp_path: Path) -> None:
    wide_llama(tmp_path)
    found = ranks(4).run(peak_mib, str(tmp_path), False)
    for peak, own, total in found:
        # 8 MiB each for the largest weight, for the pages of the largest file, and for what Python and gloo take
        assert own + 24 < total / 2
        assert peak < own + 24
    # a rank that loads the model whole; some of its memory may be free from before
    assert all(peak > 0.75 * total for peak, _, total in ranks(4).run(peak_mib, str(tmp_path), True))


CASES: dict[str, tuple[ModelCase, int, dict[str, Any], dict[str, Any] | None]] = {
    "tied": (ModelCase(tied=True), 2, {}, None),
    "bf16, copies of shards": (ModelCase(dtype=torch.bfloat16), 4, {"shard_ranks": 2}, None),
    "fused experts": (ModelCase(family="mixtral"), 2, {"parameters": "gathered_per_round"}, None),
    "spread experts": (ModelCase(family="mixtral"), 2, {"expert_ranks": 2}, None),
    "adapters, layers on the host": (ModelCase(dtype=torch.float32), 2, {"layer_weights": "host"}, {}),
    "adapters and a trained head": (ModelCase(dtype=torch.float32), 2, {}, {"modules_to_save": ["lm_head"]}),
}


@pytest.mark.daily("fused experts", "adapters and a trained head")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_is_bit_for_bit_that_of_a_model_loaded_whole(ranks, tmp_path: Path, name: str) -> None:
    case, num_ranks, config, lora = CASES[name]
    model = build_model(case)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    rows = random_rows(SKEWED)
    found = ranks(num_ranks).run(trained, str(tmp_path), rows, False, config, lora)
    expected = ranks(num_ranks).run(trained, str(tmp_path), rows, True, config, lora)
    for (losses, *states), (true_losses, *true_states) in zip(found, expected, strict=True):
        assert losses == true_losses
        assert len(losses) == 3
        for own, true in zip(states, true_states, strict=True):
            assert own.keys() == true.keys()
            assert [name for name in true if not torch.equal(own[name], true[name])] == []


def saved_and_resumed(folder: str, family: str, rows: Any, is_whole: bool) -> list[float]:
    """Saves a model before anything else, trains two steps, and returns the losses of two more in a second run."""
    losses = []
    for steps in (2, 4):
        settings = LongContextConfig(**SHARDED, report_steps=False, timeline_steps=0, self_test=not is_whole and steps == 2)
        load = transformers.AutoModelForCausalLM.from_pretrained if is_whole else partial(loaded, settings=settings)
        args = training_arguments(
            f"{folder}/out", max_steps=steps, save_strategy="steps", save_steps=2, per_device_train_batch_size=4
        )
        model: Any = load(folder, experts_implementation="eager")
        trainer = LongContextTrainer(
            model=model, args=args, train_dataset=datasets.Dataset.from_list(rows), longctx_config=settings
        )
        if steps == 2:
            trainer.save_model(f"{folder}/first")
        recorder = LossRecorder()
        recorder.attach(trainer)
        trainer.train(resume_from_checkpoint=steps == 4)
        losses = recorder.losses
    return losses


@pytest.mark.wide("mixtral")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_saving_at_once_and_resuming(ranks, tmp_path: Path, family: str) -> None:
    expected = build_model(ModelCase(family=family, tied=family == "llama")).state_dict()
    losses = []
    for is_whole in (False, True):
        folder = tmp_path / str(is_whole)
        build_model(ModelCase(family=family, tied=family == "llama")).save_pretrained(folder)
        losses.append(ranks(2).run(saved_and_resumed, str(folder), family, random_rows(SKEWED), is_whole))
        first = transformers.AutoModelForCausalLM.from_pretrained(folder / "first").state_dict()
        assert all(torch.equal(first[name], value) for name, value in expected.items())
    assert losses[0] == losses[1]
    assert len(losses[0][0]) == 2
