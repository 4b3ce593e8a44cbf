"""Checkpoints of sharded models in files of limited size: what plain transformers reads back, in the memory of one file."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.measures.allocations import measure
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_pool import RankFailure
from helpers.trainers.trainer_runs import make_trainer, training_arguments
from safetensors.torch import load_file

from hf_longctx.hf.checkpoints import weights as weights_module
from hf_longctx.hf.checkpoints.weights import gather_weights, planned_files, save_files
from hf_longctx.hf.ranks.agreement import control_group
from hf_longctx.hf.run.placement import ShardedPlacement, Shards
from hf_longctx.runtime.parameters.sharded import shard_mesh

MIB = 2**20


def shard(model: Any) -> None:
    Shards(shard_mesh("cpu", dist.get_world_size(), 60.0), torch.device("cpu"), True).divide(model)


def tiny_mixtral(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **changes))


def wide_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 4096}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def saved(folder: str, family: str, file_bytes: int) -> tuple[int, int]:
    """Peak bytes of tensors made while a sharded model was saved, and the number of its files."""
    training_arguments(f"{folder}/out")
    model = {"mixtral": tiny_mixtral, "tied": lambda: tiny_mixtral(tie_word_embeddings=True), "llama": wide_llama}[family]()
    shard(model)
    control, is_writer = control_group(60.0), dist.get_rank() == 0
    whole = gather_weights(model, is_writer)
    with patch.object(weights_module, "FILE_BYTES", file_bytes):
        files = planned_files(model)
    assert files
    peak, _, _ = measure(lambda: save_files(model, files, Path(folder), is_writer, control))
    if is_writer:
        loaded, report = getattr(transformers, type(model).__name__.removeprefix("FSDP")).from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(report.values()), report
        found = loaded.state_dict()
        assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
        plain = {name: value for name, value in transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
        assert plain.keys() == whole.keys()
    return peak, len(files)


@pytest.mark.daily("tied")
@pytest.mark.parametrize("family", ["mixtral", "tied"])
def test_weights_come_back_as_they_were(ranks, tmp_path: Path, family: str) -> None:
    for _, num_files in ranks(2).run(saved, str(tmp_path), family, 30_000):
        assert num_files > 3
    # names and shapes of files are those that `save_pretrained` writes
    (tmp_path / "stock").mkdir()
    model = tiny_mixtral(tie_word_embeddings=family == "tied")
    model.save_pretrained(tmp_path / "stock")
    stock = load_file(tmp_path / "stock" / "model.safetensors")
    found = {name: value for file in tmp_path.glob("*.safetensors") for name, value in load_file(file).items()}
    assert found.keys() == stock.keys() and all(torch.equal(found[name], stock[name]) for name in stock)
    assert not list(tmp_path.glob("*.partial"))
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / name).read_text() == (tmp_path / "stock" / name).read_text()


@pytest.mark.wide
def test_the_writer_of_four_ranks_holds_one_file(ranks, tmp_path: Path) -> None:
    (writer, num_files), *others = ranks(4).run(saved, str(tmp_path), "llama", 16 * MIB)
    total = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert num_files >= 6 and total > 100 * MIB
    # one file, and weights of 8 MiB as they come from the ranks and as one tensor; threads of gloo may let go of some late
    assert writer < total / 2, writer / MIB
    assert all(peak < total / 2 for peak, _ in others), others


def failed_save(folder: str) -> str:
    training_arguments(f"{folder}/out")
    model = tiny_mixtral()
    shard(model)
    control = control_group(60.0)
    written: list[Path] = []

    def full_disk(tensors: Any, file: Path) -> None:
        written.append(file)
        if len(written) == 3:
            raise OSError(28, "No space left on device")

    with patch.object(weights_module, "FILE_BYTES", 30_000), patch.object(weights_module, "_write", full_disk):
        try:
            save_files(model, planned_files(model), Path(folder), dist.get_rank() == 0, control)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_disk_that_fills_is_an_error_on_every_rank_and_the_old_files_stay(ranks, tmp_path: Path) -> None:
    tiny_mixtral().save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    for error in ranks(2).run(failed_save, str(tmp_path)):
        assert "could not be written, and the previous one is unchanged" in error and "No space left on device" in error
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob("model-*.safetensors"))


def killed_save(folder: str, place: str, num_done: int) -> None:
    """Saves another model to `folder`, and ends the writing process after so many files, or changes to the folder."""
    training_arguments(f"{folder}/out")
    model = tiny_mixtral()
    shard(model)
    torch.nn.init.ones_(model.model.norm.weight.data)
    control, calls = control_group(60.0), itertools.count()
    owner, name = {"write": (weights_module, "_write"), "replace": (Path, "replace")}[place]
    original = getattr(owner, name)

    def dying(*arguments: Any) -> Any:
        if next(calls) == num_done:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    with patch.object(weights_module, "FILE_BYTES", 30_000), patch.object(owner, name, dying):
        save_files(model, planned_files(model), Path(folder), dist.get_rank() == 0, control)


def two_writers(folder: str) -> list[str]:
    """Names of the weights that this rank is to write, if both ranks write to one folder."""
    training_arguments(f"{folder}/out")
    model = tiny_mixtral()
    mesh = shard_mesh("cpu", dist.get_world_size(), 60.0)
    placement = ShardedPlacement(Shards(mesh, torch.device("cpu"), True), control_group(60.0))
    placement.prepare(model)
    with patch.object(weights_module, "FILE_BYTES", 30_000):
        weights = placement.save(model, folder, is_writer=True)
    assert not placement.writes_weights
    return sorted(weights or ())


def test_nodes_that_all_write_get_all_weights_at_once_since_they_may_see_one_folder(ranks, tmp_path: Path) -> None:
    names = sorted(tiny_mixtral().state_dict())
    assert ranks(2).run(two_writers, str(tmp_path)) == [names, names]


class NamedTokenizer:
    """A stand-in that writes one file."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


def resumed(folder: str, file_bytes: int) -> dict[str, torch.Tensor]:
    """Weights after four steps, the last two resumed from a checkpoint."""
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    config = {"parameters": "sharded", "tokens_per_rank": 64}
    with patch.object(weights_module, "FILE_BYTES", file_bytes):
        for start in (None, f"{folder}/checkpoint-2"):
            trainer = make_trainer(ModelCase(), random_rows([9, 20, 31, 12] * 4), folder, config, arguments)
            trainer.train(resume_from_checkpoint=start)
        trainer.processing_class, trainer.data_collator = None, SimpleNamespace(tokenizer=NamedTokenizer())
        trainer.save_model(f"{folder}/last")
    return gather_weights(trainer.model, True)


def test_a_trainer_saves_and_resumes_from_such_files(ranks, tmp_path: Path) -> None:
    whole, _ = ranks(2).run(resumed, str(tmp_path / "one"), 10**9)
    found, _ = ranks(2).run(resumed, str(tmp_path / "many"), 20_000)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert len(list((tmp_path / "many" / "checkpoint-2").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "one" / "checkpoint-2" / "model.safetensors").exists()
    assert all((tmp_path / kind / "last" / "tokenizer.json").exists() for kind in ("one", "many"))
    last = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many" / "last", dtype="auto").state_dict()
    assert all(torch.equal(last[name], whole[name]) for name in whole)


def test_models_that_save_in_their_own_way_are_left_to_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "FILE_BYTES", 1000)
    model = build_model(ModelCase())
    assert planned_files(model)
    kind = type(model)
    own = type("Own", (kind,), {"save_pretrained": lambda self, *arguments, **keywords: None})
    model.__class__ = own
    assert not planned_files(model)
    model.__class__ = kind
    monkeypatch.setattr(weights_module, "FILE_BYTES", 10**9)
    assert not planned_files(model)


def test_weights_whose_names_come_from_all_or_from_values_are_left_to_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "FILE_BYTES", 1000)
    model = build_model(ModelCase())

    def of_values(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"{name}.{float(value.sum()):.0f}": value for name, value in weights.items()}

    def summed(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"sum of {str(tuple(value.shape)).replace('.', '')}": value for value in weights.values()}

    for conversion in (of_values, summed):
        monkeypatch.setattr(weights_module, "revert_weight_conversion", conversion)
        assert not planned_files(model)


# the last one, since it ends its pool
@pytest.mark.wide
@pytest.mark.parametrize("is_single", [True, False])
@pytest.mark.parametrize("place,num_done", [("write", 2), ("replace", 1), ("replace", 4)])
def test_a_writer_that_is_killed_leaves_the_old_checkpoint(
    ranks, tmp_path: Path, is_single: bool, place: str, num_done: int
) -> None:
    # files as many as the new ones, under their names, or one
    tiny_mixtral().save_pretrained(tmp_path, max_shard_size="50GB" if is_single else 30_000)
    with pytest.raises(RankFailure, match="the process ended"):
        ranks(2).run(killed_save, str(tmp_path), place, num_done)
    found, right = transformers.MixtralForCausalLM.from_pretrained(tmp_path).state_dict(), tiny_mixtral().state_dict()
    assert all(torch.equal(found[name], right[name]) for name in right)
    # the next save makes up for it
    ranks(2).run(saved, str(tmp_path), "mixtral", 60_000)
    assert not list(tmp_path.glob("*.partial"))
    listed = set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert listed == {file.name for file in tmp_path.glob("*.safetensors")}
