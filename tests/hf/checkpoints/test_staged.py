"""Checkpoints of stages: one ordinary checkpoint out, states back at any number of stages, and nothing lost when a rank dies."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models.reference import relative_error
from helpers.models.staged_models import even_ranges, family_model
from helpers.ranks.pipeline_steps import stage_mesh
from helpers.ranks.rank_pool import RankFailure
from helpers.trainers.stage_training import RankStage, new_optimizer, rank_stage, set_whole_gradients, train_stage, whole_training
from safetensors.torch import load_file
from torch import Tensor

from hf_longctx.hf.checkpoints import weights as weights_module
from hf_longctx.hf.checkpoints.optimizer_states import load_states, save_states, saved_states
from hf_longctx.hf.checkpoints.weights import gather_weights, load_stage_weights, load_weights, save_stages, stage_names
from hf_longctx.hf.models.cutting import cut_model
from hf_longctx.hf.ranks.agreement import control_group
from hf_longctx.hf.run.placement import StagedPlacement
from hf_longctx.runtime.parameters.sharded import shard_model

NORM = 50.0
# (stages, whether parameters are sharded inside a stage), on four ranks
LAYOUTS = [(2, True), (4, False), (2, False)]


def save(own: RankStage, folder: str, **settings: Any) -> None:
    save_stages(own.stage, folder, own.pool.ranks_per_stage, own.control, **settings)


def read(own: RankStage, folder: str) -> None:
    """Reads the weights of a model none of whose weights are fused."""
    load_stage_weights(own.stage, folder, dict, None)


def train_and_save(folder: str, num_stages: int, tied: bool, is_sharded: bool, heads: tuple[int, ...] = ()) -> None:
    own = rank_stage(num_stages, tied, is_sharded, heads=heads)
    optimizer = new_optimizer(own.parameters)
    train_stage(own, optimizer, range(2), NORM)
    save(own, folder, max_shard_size="20KB")
    save_states(own.stage.model, optimizer, folder, own.control, stage_names(own.stage, is_saved=True))


def resume(
    folder: str, num_stages: int, tied: bool, is_sharded: bool, heads: tuple[int, ...] = (), steps: range = range(2, 4)
) -> dict[str, Tensor]:
    """Weights after more steps, from a checkpoint."""
    own = rank_stage(num_stages, tied, is_sharded, build=zero_model, heads=heads)
    optimizer = new_optimizer(own.parameters)
    read(own, folder)
    names = stage_names(own.stage, is_saved=False)
    load_states(own.stage.model, optimizer, saved_states(folder), own.control, names)
    train_stage(own, optimizer, steps, NORM)
    return own.weights()


def zero_model(family: str, tied: bool) -> Any:
    model = family_model(family, tied)
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def assert_weights(folder: Path, expected: Any) -> None:
    """Assert that `from_pretrained` reads the expected model, with no weight missing or left over."""
    found, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(found) is type(expected)
    assert found.config.tie_word_embeddings == expected.config.tie_word_embeddings
    weights = found.state_dict()
    assert sorted(weights) == sorted(expected.state_dict())
    assert max(relative_error(weights[name], value) for name, value in expected.state_dict().items()) <= 1e-12


@pytest.mark.wide
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("num_stages", "is_sharded"), LAYOUTS)
def test_stages_write_one_ordinary_checkpoint_and_resume_from_it_at_any_number(
    ranks, tmp_path: Path, num_stages: int, is_sharded: bool, tied: bool
) -> None:
    folder = str(tmp_path)
    ranks(4).run(train_and_save, folder, num_stages, tied, is_sharded)
    assert_weights(tmp_path, whole_training(range(2), tied, NORM)[0])
    assert (tmp_path / "generation_config.json").exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    # tied weights once, as in the model
    assert set(index["weight_map"]) == {name for name, _ in family_model("llama", tied).named_parameters()}
    assert set(index["weight_map"].values()) == {file.name for file in tmp_path.glob("*.safetensors")}
    assert not list(tmp_path.glob("*.partial"))
    expected = dict(whole_training(range(4), tied, NORM)[0].named_parameters(remove_duplicate=False))
    for layout in LAYOUTS if not tied else [(4, True)]:
        for weights in ranks(4).run(resume, folder, layout[0], tied, layout[1]):
            assert max(relative_error(weight, expected[name].detach()) for name, weight in weights.items()) <= 1e-12


# stages before the last that have the head too, and how many of all give it a gradient beside that of the embedding
HEADS = [(2, True, (0,), 1), (4, False, (1, 2), 3), (4, False, (0, 1, 2), 3), (2, False, (0,), 1)]


@pytest.mark.wide
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("num_stages", "is_sharded", "heads", "num_apart"), HEADS)
def test_a_head_of_several_stages_is_saved_once_and_resumes_in_every_layout(
    ranks, tmp_path: Path, num_stages: int, is_sharded: bool, heads: tuple[int, ...], num_apart: int, tied: bool
) -> None:
    # on the first stage, a tied head is the embedding
    num_heads = num_apart if tied else len(heads) + 1
    ranks(4).run(train_and_save, str(tmp_path), num_stages, tied, is_sharded, heads)
    assert_weights(tmp_path, whole_training(range(2), tied, NORM, num_heads=num_heads)[0])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {name for name, _ in family_model("llama", tied).named_parameters()}
    assert set(saved_states(str(tmp_path)).weights) == set(index["weight_map"])
    expected = dict(whole_training(range(2), tied, NORM, num_heads=num_heads)[0].named_parameters(remove_duplicate=False))
    # without more steps, since other layouts give the head other gradients
    for stages, sharded, own_heads in [(*LAYOUTS[0], ()), *(each[:3] for each in HEADS)]:
        for weights in ranks(4).run(resume, str(tmp_path), stages, tied, sharded, own_heads, range(0)):
            assert max(relative_error(weight, expected[name].detach()) for name, weight in weights.items()) <= 1e-12
    # states of the optimizer too, in the same layout and on whole models
    more = dict(whole_training(range(4), tied, NORM, num_heads=num_heads)[0].named_parameters(remove_duplicate=False))
    for weights in ranks(4).run(resume, str(tmp_path), num_stages, tied, is_sharded, heads):
        assert max(relative_error(weight, more[name].detach()) for name, weight in weights.items()) <= 1e-12
    for weights in ranks(4).run(resume_whole, str(tmp_path), tied, num_heads):
        assert max(relative_error(weight, more[name].detach()) for name, weight in weights.items()) <= 1e-12


def resume_whole(folder: str, tied: bool, num_heads: int = 1) -> dict[str, Tensor]:
    """Weights of the whole model on every rank, after two more steps from a checkpoint."""
    model = zero_model("llama", tied)
    optimizer = new_optimizer(model.parameters())
    load_weights(model, folder)
    load_states(model, optimizer, saved_states(folder), None)
    for step in range(2, 4):
        set_whole_gradients(model, step, tied, num_heads)
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save_whole(folder: str, tied: bool) -> None:
    """A checkpoint of a run without stages, whose parameters are sharded over all ranks."""
    model = family_model("llama", tied)
    shard_model(model, tuple(model._no_split_modules), stage_mesh(1, dist.get_world_size()))
    optimizer = new_optimizer(model.parameters())
    for step in range(2):
        set_whole_gradients(model, step, tied)
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
    weights = gather_weights(model, dist.get_rank() == 0)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=weights)
    save_states(model, optimizer, folder, dist.group.WORLD)


@pytest.mark.wide
@pytest.mark.parametrize("tied", [False, True])
def test_runs_with_stages_and_without_resume_from_each_other(ranks, tmp_path: Path, tied: bool) -> None:
    expected = dict(whole_training(range(4), tied, NORM)[0].named_parameters(remove_duplicate=False))
    staged, whole = str(tmp_path / "staged"), str(tmp_path / "whole")
    ranks(4).run(train_and_save, staged, 2, tied, True)
    ranks(4).run(save_whole, whole, tied)
    for weights in (*ranks(4).run(resume_whole, staged, tied), *ranks(4).run(resume, whole, 2, tied, True)):
        assert max(relative_error(weight, expected[name].detach()) for name, weight in weights.items()) <= 1e-12


def with_adapters(family: str, tied: bool) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = family_model(family, tied)
    torch.manual_seed(5)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()


def save_adapters(folder: str, is_sharded: bool) -> dict[str, Tensor]:
    """This stage's weights, read again after they were written."""
    own = rank_stage(2, True, is_sharded, build=with_adapters)
    optimizer = new_optimizer(own.parameters)
    train_stage(own, optimizer, range(2), NORM)
    save(own, folder)
    for parameter in own.parameters:
        if parameter.requires_grad:
            parameter.detach().zero_()
    read(own, folder)
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        read(own, f"{folder}/other")
    return own.weights()


@pytest.mark.daily("False")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_adapters_of_all_stages_are_one_adapter(ranks, tmp_path: Path, is_sharded: bool) -> None:
    results = ranks(4).run(save_adapters, str(tmp_path), is_sharded)
    expected, _ = whole_training(range(2), True, NORM, build=with_adapters)
    of_whole = expected.state_dict()
    for loaded in results:
        assert max(relative_error(value, of_whole[name]) for name, value in loaded.items()) <= 1e-12
    found = peft.PeftModel.from_pretrained(family_model("llama", True), str(tmp_path), autocast_adapter_dtype=False)
    weights = {name: value for name, value in found.state_dict().items() if "lora_" in name}
    assert len(weights) == len(load_file(tmp_path / "adapter_model.safetensors")) == 7 * 4
    assert max(relative_error(value, expected.state_dict()[name]) for name, value in weights.items()) <= 1e-12
    assert not list(tmp_path.glob("model*")) and not list(tmp_path.glob("*.partial"))


def mixture(family: str, tied: bool) -> Any:
    """A model whose files hold every expert alone, and whose layers hold all of them in one weight."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 7}
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **more, pad_token_id=0))


def save_mixture(folder: str, num_stages: int, is_sharded: bool, heads: tuple[int, ...]) -> dict[str, Tensor]:
    """This stage's weights, read again after they were written and lost."""
    own = rank_stage(num_stages, False, is_sharded, build=mixture, heads=heads)
    save(own, folder)
    with torch.no_grad():
        for parameter in own.parameters:
            parameter.zero_()
    placement = StagedPlacement(own.stage, None, own.pool, even_ranges(num_stages))
    assert placement.load(own.stage.model, folder)
    return own.weights()


@pytest.mark.daily("2-False-heads2", "2-True-heads3")
@pytest.mark.parametrize("num_stages,is_sharded,heads", [*((*each, ()) for each in LAYOUTS), *(each[:3] for each in HEADS)])
def test_fused_weights_are_written_and_read_as_files_have_them(
    ranks, tmp_path: Path, num_stages: int, is_sharded: bool, heads: tuple[int, ...]
) -> None:
    expected = mixture("", False).state_dict()
    for loaded in ranks(4).run(save_mixture, str(tmp_path), num_stages, is_sharded, heads):
        assert any(".mlp.experts." in name for name in loaded)
        assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "model.layers.6.mlp.experts.3.up_proj.weight" in index["weight_map"]
    assert_weights(tmp_path, mixture("", False))


def save_again(folder: str, step: int) -> None:
    own = rank_stage(2, False, False)
    train_stage(own, new_optimizer(own.parameters), range(step), NORM)
    save(own, folder)


@pytest.mark.wide
def test_a_folder_may_be_saved_to_again(ranks, tmp_path: Path) -> None:
    family_model("llama").save_pretrained(tmp_path)
    for step in (1, 2, 3):
        ranks(2).run(save_again, str(tmp_path), step)
        assert_weights(tmp_path, whole_training(range(step), False, NORM)[0])
        assert len(list(tmp_path.glob("*.safetensors"))) == 2


def die_while_saving(folder: str, when: str) -> str:
    """The error on this rank."""
    own = rank_stage(2, False, False)
    train_stage(own, new_optimizer(own.parameters), range(2), NORM)
    write, measure = weights_module._save_own, weights_module._tensor_bytes

    def dying(model: Any, partial: Path, *args: Any) -> None:
        write(model, partial, *args)
        if own.stage.stage:
            file = next(partial.glob("*.safetensors"))
            file.write_bytes(file.read_bytes()[:1000])
            if when == "killed":
                os._exit(1)
            raise OSError("no space left")

    def full(file: Path) -> int:
        if file.parent.name == "stage-1.partial":
            raise OSError("no space left")
        return measure(file)

    if when == "joining":
        weights_module._tensor_bytes = full
    else:
        weights_module._save_own = dying
    try:
        save(own, folder)
    except RuntimeError as error:
        return str(error)
    finally:
        weights_module._save_own, weights_module._tensor_bytes = write, measure


def test_a_rank_that_fails_to_write_is_named_everywhere_and_leaves_the_old_checkpoint(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_again, str(tmp_path), 1)
    expected = whole_training(range(1), False, NORM)[0]
    for when, rank in (("raised", 1), ("joining", 0)):
        for error in ranks(2).run(die_while_saving, str(tmp_path), when):
            assert re.fullmatch(
                rf"the checkpoint in .* could not be written, .* unchanged: rank {rank}: OSError: no space left; make room.*",
                error,
            )
        assert_weights(tmp_path, expected)
    # files that were left behind do no harm
    ranks(2).run(save_again, str(tmp_path), 3)
    assert_weights(tmp_path, whole_training(range(3), False, NORM)[0])
    assert not list(tmp_path.glob("*.partial"))


def write_stages(folder: Path, model: Any) -> None:
    """Writes the files of two stages of `model` to a folder, where they are not joined yet."""
    for stage in range(2):
        own, ranges = copy.deepcopy(model), even_ranges(2)
        cut_model(own, ranges, stage)
        partial = folder / f"stage-{stage}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        weights_module._save_own(own, partial, own.state_dict(), "5GB")


def number_of_model(folder: Path, models: list[Any]) -> int:
    """The number of the model that `from_pretrained` reads from the folder."""
    found, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = found.state_dict()
    same = [all(torch.equal(weights[name], value) for name, value in model.state_dict().items()) for model in models]
    return same.index(True)


def stop_at(number: int, patch: Any) -> None:
    """Lets the change of this number to a folder fail, as if the process died before it."""
    calls = itertools.count(1)

    def stopping(method: Any) -> Any:
        def call(path: Path, *args: Any, **keywords: Any) -> Any:
            if next(calls) == number:
                raise OSError("stopped")
            return method(path, *args, **keywords)

        return call

    for name in ("replace", "unlink"):
        patch.setattr(Path, name, stopping(getattr(Path, name)))


@pytest.mark.wide
@pytest.mark.parametrize("is_single", [True, False])
def test_a_folder_is_the_old_or_the_new_checkpoint_wherever_joining_stops(tmp_path: Path, monkeypatch, is_single: bool) -> None:
    models = [family_model("llama", num_hidden_layers=7) for _ in range(3)]
    for number, model in enumerate(models):
        model.lm_head.weight.data.add_(number)
        model.model.layers[0].mlp.up_proj.weight.data.add_(number)
    if is_single:
        models[0].save_pretrained(tmp_path)
    else:
        write_stages(tmp_path, models[0])
        weights_module.join_stages(tmp_path, 2)
    current, following, num_stopped = 0, 1, 0
    # late ones first, so that others follow on what they leave behind
    for stop in range(10, -1, -1):
        write_stages(tmp_path, models[following])
        with monkeypatch.context() as patch:
            stop_at(stop, patch)
            try:
                weights_module.join_stages(tmp_path, 2)
                allowed = [following]
            except OSError:
                allowed = [current, following]
                num_stopped += 1
        found = number_of_model(tmp_path, models)
        assert found in allowed, stop
        # which the next one must not touch
        current, following = found, (found + 1) % 3
    assert allowed == [found] and len(list(tmp_path.glob("*.safetensors"))) == 2
    assert num_stopped >= 6


def save_slowly(folder: str) -> None:
    """Saves two stages, of which the last one writes for longer than the control group waits."""
    own = rank_stage(2, False, False)
    write = weights_module._save_own

    def slow(*args: Any) -> None:
        time.sleep(2.5 * own.stage.stage)
        write(*args)

    weights_module._save_own = slow
    try:
        save_stages(own.stage, folder, own.pool.ranks_per_stage, control_group(1.0))
    finally:
        weights_module._save_own = write


def test_writing_may_take_longer_than_collectives_wait(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_slowly, str(tmp_path))
    assert_weights(tmp_path, family_model("llama", False))


def load_other(folder: str) -> str:
    own = rank_stage(2, False, False)
    try:
        read(own, folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_checkpoint_without_a_weight_of_the_stage_is_refused(ranks, tmp_path: Path) -> None:
    family_model("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    first, last = ranks(2).run(load_other, str(tmp_path))
    assert first == ""
    assert "lacks 36 weights of the model (the first is model.layers.3.self_attn.q_proj.weight)" in last


# the last one, since it ends its pool
@pytest.mark.wide
def test_a_rank_that_is_killed_while_it_writes_leaves_the_old_checkpoint(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_again, str(tmp_path), 1)
    with pytest.raises(RankFailure, match="the process ended"):
        ranks(2).run(die_while_saving, str(tmp_path), "killed")
    assert_weights(tmp_path, whole_training(range(1), False, NORM)[0])
