"""States of optimizers that update whole weights: who writes them, and how other runs read them, fp32 copies included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_longctx.hf.checkpoints.optimizer_states import (
    OPTIMIZER_FOLDER,
    STATES_INDEX,
    load_states,
    load_whole_optimizer,
    save_states,
    saved_states,
)
from hf_longctx.runtime.parameters.gradients import local_shard
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT, keep_master_weights
from hf_longctx.runtime.parameters.sharded import shard_mesh, shard_model
from hf_longctx.runtime.parameters.whole_weights import owns_weight, step_on_whole_weights


class OwnAdamW(torch.optim.AdamW): ...


class OtherAdamW(torch.optim.AdamW): ...


class Layer(nn.Linear): ...


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(6, 5), Layer(5, 4)).to(dtype)


def optimizer_of(model: nn.Module, kind: type = OwnAdamW) -> Any:
    """An optimizer with fp32 copies, on whole weights where the model is sharded."""
    optimizer = kind(model.parameters(), lr=1e-4)
    step_on_whole_weights(optimizer)
    keep_master_weights(optimizer)
    return optimizer


def stepped(model: nn.Module, optimizer: Any) -> None:
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def rows_of(value: Tensor, num_ranks: int, rank: int) -> Tensor:
    """A rank's rows, which are dealt out as by torch.chunk."""
    parts = value.chunk(num_ranks)
    return parts[rank] if rank < len(parts) else value[:0]


def resumed_from_replicated(folder: str) -> list[str]:
    """Weights whose fp32 copies are not those of the replicated run, bit by bit."""
    twin = model_of()
    replicated = OwnAdamW(twin.parameters(), lr=1e-4)
    keep_master_weights(replicated)
    stepped(twin, replicated)
    file = Path(folder, f"optimizer-{torch.distributed.get_rank()}.pt")
    torch.save(replicated.state_dict(), file)
    mesh, model = shard_mesh("cpu", 2, 60.0), model_of()
    model.load_state_dict(twin.state_dict())
    shard_model(model, ("Layer",), mesh)
    optimizer = optimizer_of(model)
    load_whole_optimizer(optimizer, str(file))
    found, owned = [], 0
    for place, (own, (name, weight)) in enumerate(zip(twin.parameters(), model.named_parameters(), strict=True)):
        copy, state = replicated.state[own][MASTER_WEIGHT], optimizer.state[weight]
        assert not torch.equal(copy, copy.bfloat16().float())
        owned += owns_weight(optimizer, place)
        expected = rows_of(copy, 2, mesh.get_local_rank())
        if MASTER_WEIGHT not in state or not torch.equal(local_shard(state[MASTER_WEIGHT]), expected):
            found.append(name)
        if ("exp_avg" in state) != owns_weight(optimizer, place):
            found.append(f"moments of {name}")
    assert 0 < owned < 4
    return found


def test_fp32_copies_of_a_replicated_run_go_on_in_shards_of_all_ranks(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(resumed_from_replicated, str(tmp_path)) == [[], []]


def saved_in_copies(folder: str) -> list[str]:
    """Names whose states or fp32 copies are others after a restart; all ranks write into one folder."""
    model, again = model_of(), model_of()
    for each in (model, again):
        shard_model(each, ("Layer",), shard_mesh("cpu", 2, 60.0))
    optimizer, fresh = optimizer_of(model), optimizer_of(again)
    stepped(model, optimizer)
    control = torch.distributed.group.WORLD
    save_states(model, optimizer, folder, control)
    torch.distributed.barrier()
    load_states(again, fresh, saved_states(folder), control)
    found = []
    for (name, weight), twin in zip(model.named_parameters(), again.parameters(), strict=True):
        kept, read = optimizer.state[weight], fresh.state[twin]
        if kept.keys() != read.keys() or not all(torch.equal(local_shard(kept[key]), local_shard(read[key])) for key in kept):
            found.append(name)
    return found


def test_one_copy_of_the_shards_writes_states(ranks, tmp_path: Path) -> None:
    assert ranks(4).run(saved_in_copies, str(tmp_path)) == [[], [], [], []]
    names = {name for name, _ in model_of().named_parameters()}
    files = {file.name: {*load_file(file)} for file in (tmp_path / OPTIMIZER_FOLDER).glob("*.safetensors")}
    moments = {name: [file for file, keys in files.items() if f"{name}/exp_avg" in keys] for name in names}
    assert all(len(writers) == 1 for writers in moments.values())
    for name in names:
        masters = [file for file, keys in files.items() if f"{name}/{MASTER_WEIGHT}" in keys]
        pieces = saved_states(tmp_path).weights[name][MASTER_WEIGHT].pieces
        # two rows of ranks have equal shards
        assert len(pieces) == 2 and sorted(masters) == sorted({file for file, *_ in pieces})


def test_states_go_to_an_optimizer_of_their_class_and_to_the_host(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    stepped(model, optimizer)
    save_states(model, optimizer, str(tmp_path), None)
    with pytest.raises(ValueError, match="holds the states of OwnAdamW, but this run has OtherAdamW"):
        load_states(model, OtherAdamW(model.parameters(), lr=1e-4), saved_states(tmp_path), None)
    # states as if saved from a device, into a run whose weights lie on one, and its states on the host
    file = tmp_path / OPTIMIZER_FOLDER / STATES_INDEX
    file.write_text(file.read_text().replace('"on_device": false', '"on_device": true'))
    away = model_of().to("meta")
    hosted = OwnAdamW(away.parameters(), lr=1e-4)
    keep_master_weights(hosted, on_host=True)
    load_states(away, hosted, saved_states(tmp_path), None)
    for weight, twin in zip(model.parameters(), away.parameters(), strict=True):
        kept, read = optimizer.state[weight], hosted.state[twin]
        assert kept.keys() == read.keys() and all(torch.equal(kept[key], read[key]) for key in kept)
