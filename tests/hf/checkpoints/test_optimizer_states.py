"""Optimizer states come back bit by bit on any number of ranks and blocks, and nothing outside of their folder is read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_longctx.hf.checkpoints.choice import Choice
from hf_longctx.hf.checkpoints.optimizer_states import (
    OPTIMIZER_FOLDER,
    STATES_INDEX,
    load_states,
    save_states,
    saved_states,
)
from hf_longctx.runtime.parameters.gradients import first_row, local_shard
from hf_longctx.runtime.parameters.low_bit import PackedMoment, own_moment
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT, keep_master_weights
from hf_longctx.runtime.parameters.sharded import shard_mesh, shard_model
from hf_longctx.runtime.parameters.whole_weights import owns_weight, step_on_whole_weights


class Layer(nn.Linear): ...


class OwnAdamW(torch.optim.AdamW): ...


KINDS: dict[str, tuple[Callable[..., Any], torch.dtype]] = {
    "AdamW": (lambda groups: torch.optim.AdamW(groups, amsgrad=True), torch.float32),
    "fp32 copies": (lambda groups: torch.optim.AdamW(groups, betas=(0.5, 0.75)), torch.bfloat16),
    "momentum": (lambda groups: torch.optim.SGD(groups, lr=torch.tensor(0.125), momentum=0.5), torch.float64),
    "plain": (lambda groups: torch.optim.SGD(groups, lr=0.1), torch.bfloat16),
    "whole": (OwnAdamW, torch.bfloat16),
}


def run_of(kind: str, sizes: list[int], shard_ranks: int) -> tuple[nn.Module, Any]:
    """A model and its optimizer, in blocks of so many ranks; whole weights without blocks."""
    torch.manual_seed(0)
    make, dtype = KINDS[kind]
    model = nn.Sequential(*(Layer(size, other) for size, other in itertools.pairwise(sizes))).to(dtype)
    model[0].bias.requires_grad_(False)
    if shard_ranks:
        shard_model(model, ("Layer",), shard_mesh("cpu", shard_ranks, 60.0))
    weights = list(model.parameters())
    optimizer = make([{"params": weights[:1], "weight_decay": 0.25}, {"params": []}, {"params": weights[1:], "foreach": False}])
    if kind == "whole":
        step_on_whole_weights(optimizer)
    if dtype == torch.bfloat16:
        keep_master_weights(optimizer)
    return model, optimizer


def expected(name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The whole state, equal on every rank."""
    torch.manual_seed(sum(map(ord, name + key)))
    return torch.rand(shape, dtype=torch.float64).to(dtype)


def save(kind: str, sizes: list[int], shard_ranks: int, folder: str) -> None:
    model, optimizer = run_of(kind, sizes, shard_ranks)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight) if weight.requires_grad else None
    optimizer.step()
    for name, weight in model.named_parameters():
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                whole, own = expected(name, key, tuple(value.shape), value.dtype), local_shard(value)
                own.copy_(whole[first_row(value) :][: len(own)] if value.dim() else whole)
    save_states(model, optimizer, folder, dist.group.WORLD)


def loaded(kind: str, sizes: list[int], shard_ranks: int, folder: str) -> list[str]:
    """States on this rank that are not those of the run that saved them."""
    model, optimizer = run_of(kind, sizes, shard_ranks)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0
    load_states(model, optimizer, saved_states(folder), dist.group.WORLD)
    fresh = run_of(kind, sizes, 0)[1]
    wrong = []
    for place, (name, weight) in enumerate(model.named_parameters()):
        states = optimizer.state.get(weight, {})
        moments = {"AdamW": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}, "momentum": {"momentum_buffer"}, "plain": set()}
        keys = moments.get(kind, {"exp_avg", "exp_avg_sq", "step"}) if weight.requires_grad else set()
        if kind == "whole" and shard_ranks and not owns_weight(optimizer, place):
            keys = set()
        keys = keys | ({MASTER_WEIGHT} if kind in ("fp32 copies", "plain", "whole") and weight.requires_grad else set())
        if keys != states.keys():
            wrong.append(f"{name}: {sorted(states)}")
        for key, value in states.items():
            own = local_shard(value)
            whole = expected(name, key, tuple(value.shape), value.dtype)
            if not torch.equal(own, whole[first_row(value) :][: len(own)] if value.dim() else whole):
                wrong.append(f"{name} {key}")
    for group, other in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        wanted = {key: value for key, value in other.items() if key != "params"}
        if group["params"] and {key: value for key, value in group.items() if key != "params"} != wanted:
            wrong.append(f"{group} is not {wanted}")
    return wrong


# (ranks, ranks of a block or 0)
PLACES = st.sampled_from([(1, 0), (2, 0), (2, 2), (3, 3), (4, 2), (4, 4)])


@pytest.mark.wide
@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    first=PLACES,
    then=PLACES,
)
def test_states_come_back_on_any_number_of_ranks_and_blocks(
    ranks, tmp_path_factory: pytest.TempPathFactory, kind: str, sizes: list[int], first: tuple[int, int], then: tuple[int, int]
) -> None:
    folder = tmp_path_factory.mktemp("states")
    # whole weights without blocks are saved by `Trainer`
    first = first if first[1] else (2, 2)
    ranks(first[0]).run(save, kind, sizes, first[1], str(folder))
    for wrong in ranks(then[0]).run(loaded, kind, sizes, then[1], str(folder)):
        assert wrong == []
    # each row of a tensor is in one file
    files = [load_file(file) for file in (folder / OPTIMIZER_FOLDER).glob("*.safetensors")]
    index = saved_states(folder)
    stored = {f"{name}/{key}": value for name, states in index.weights.items() for key, value in states.items()}
    assert sum(len(file) for file in files) == sum(len(getattr(value, "pieces", ())) for value in stored.values())
    assert {file.name for file in (folder / OPTIMIZER_FOLDER).glob("*.safetensors")} == index.files


@given(
    shape=st.tuples(st.integers(1, 12), st.sampled_from([128, 256, 512])),
    bits=st.sampled_from([8, 4]),
    ends=st.sets(st.integers(1, 11)),
    first=st.integers(0, 11),
    num_rows=st.integers(0, 12),
)
def test_rows_of_packed_moments_are_those_of_the_whole(
    shape: tuple[int, int], bits: int, ends: set[int], first: int, num_rows: int
) -> None:
    torch.manual_seed(0)
    first = min(first, shape[0])
    num_rows = min(num_rows, shape[0] - first)
    row = shape[1]
    cuts = [end for end in sorted(ends) if end < shape[0] and end * row % 256 == 0]
    if shape[0] * row % 256:
        return
    qmap, whole, parts = torch.rand(2**bits), [], []
    for low, high in zip([0, *cuts], [*cuts, shape[0]], strict=True):
        count = (high - low) * row
        codes = torch.randint(256, (count * bits // 8,), dtype=torch.uint8)
        scale = torch.rand(count // 256)
        # high halves of a byte come first
        numbers = codes if bits == 8 else torch.stack([codes // 16, codes % 16], dim=1).flatten()
        whole.append((qmap[numbers.int()] * scale.repeat_interleave(256)).view(high - low, row))
        if low < first + num_rows and high > first:
            packed = PackedMoment(codes.view(high - low, row) if bits == 8 else codes, scale, qmap, (high - low, row))
            assert (packed.bits, packed.block_size) == (bits, 256)
            parts.append((low, packed))
    weight = nn.Parameter(torch.zeros(num_rows, row))
    found = own_moment(torch.optim.AdamW([weight]), "exp_avg", parts, weight, first)
    assert torch.equal(found, torch.cat(whole)[first : first + num_rows]) if num_rows else not found.numel()


def saved_alone(folder: Path, **values: Any) -> tuple[nn.Module, Any]:
    """One step of AdamW on one weight, saved after its group got these settings."""
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    optimizer.param_groups[0].update(values)
    save_states(model, optimizer, str(folder), None)
    return model, optimizer


def test_settings_keep_their_types_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    held = {"betas": (0.1 + 0.2, 1e-300), "lr": torch.tensor(0.1), "many": [1, None, {"a": True}], "far": float("inf")}
    # torch's restricted reader, which earlier releases used, knows these, too
    held |= {"kept_in": torch.bfloat16, "where": torch.device("cpu"), "by_pair": {(1, "a"): {2, 3}}, "raw": b"\xff", "z": 1 - 2j}
    model, optimizer = saved_alone(tmp_path, **held)
    optimizer.param_groups[0].update(dict.fromkeys(held))
    load_states(model, optimizer, saved_states(tmp_path), None)
    found = optimizer.param_groups[0]
    assert {key: found[key] for key in held if key != "lr"} == {key: value for key, value in held.items() if key != "lr"}
    assert isinstance(found["betas"], tuple) and torch.equal(found["lr"], held["lr"]) and found["lr"].dtype == torch.float32
    model, optimizer = saved_alone(tmp_path, odd=torch.nn.ReLU())
    with pytest.raises(
        ValueError, match=r"setting odd is not read, since it is an object of torch\.nn\.modules\.activation\.ReLU"
    ):
        load_states(model, optimizer, saved_states(tmp_path), None)


@pytest.mark.parametrize(
    "state",
    [
        torch.arange(6.0)[::2],
        torch.arange(6.0).view(3, 2)[:, :1],
        torch.arange(3.0)[:1].expand(4),
        torch.arange(3).to(torch.uint16),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j, 3j]),
    ],
)
def test_a_state_of_any_layout_and_dtype_comes_back(tmp_path: Path, state: Tensor) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = OwnAdamW(model.parameters())
    step_on_whole_weights(optimizer)
    optimizer.state[model.weight] = {"state": state}
    save_states(model, optimizer, str(tmp_path), None)
    optimizer.state.clear()
    load_states(model, optimizer, saved_states(tmp_path), None)
    found = optimizer.state[model.weight]["state"]
    assert found.dtype == state.dtype and torch.equal(found, state)


def test_an_index_names_files_of_its_folder_alone(tmp_path: Path) -> None:
    saved_alone(tmp_path)
    file = tmp_path / OPTIMIZER_FOLDER / STATES_INDEX
    file.write_text(file.read_text().replace("rank-0.safetensors", "../rank-0.safetensors"))
    with pytest.raises(ValueError, match=r"'../rank-0.safetensors', which is no file of its folder"):
        saved_states(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"weights": {"a": {"b": {"pieces": 1}}}, "groups": []}', "[" * 10**5),
        '{"weights": {"a": {"b": {"values": [1, 2], "dtype": "int64", "shape": [3]}}}, "groups": []}',
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    saved_alone(tmp_path)
    (tmp_path / OPTIMIZER_FOLDER / STATES_INDEX).write_text(content)
    with pytest.raises(ValueError, match=r"index.json (cannot be read|is no index of optimizer states)"):
        saved_states(tmp_path)


def test_rows_that_no_file_has_and_weights_that_it_does_not_know_are_refused(tmp_path: Path) -> None:
    model, optimizer = saved_alone(tmp_path)
    file = tmp_path / OPTIMIZER_FOLDER / STATES_INDEX
    index = json.loads(file.read_text())
    index["weights"]["weight"]["exp_avg"]["pieces"][0][2] = 1
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no file has all rows of weight/exp_avg"):
        load_states(model, optimizer, saved_states(tmp_path), None)
    other = nn.Sequential(model)
    with pytest.raises(ValueError, match=r"cannot be read: it has no states of 0.weight"):
        load_states(other, optimizer, saved_states(tmp_path), None)


def test_files_without_a_manifest_are_looked_at(tmp_path: Path) -> None:
    saved_alone(tmp_path)
    states = tmp_path / OPTIMIZER_FOLDER
    own = [each.text for each in Choice(False, False, None).findings(tmp_path) if each.part == "optimizer"]
    assert own == []
    whole = (states / "rank-0.safetensors").read_bytes()
    for act, words in (
        (lambda: (states / "rank-0.safetensors").write_bytes(whole[:-1]), "optimizer/rank-0.safetensors is cut short"),
        ((states / "rank-0.safetensors").unlink, "optimizer/rank-0.safetensors is missing"),
        ((states / STATES_INDEX).unlink, "optimizer/index.json is missing, so not all ranks have written their shards"),
    ):
        act()
        assert [each.text for each in Choice(False, False, None).findings(tmp_path) if each.part == "optimizer"] == [words]
