"""Optimizer states of earlier releases go on bit by bit as those releases read them, and no file of a checkpoint runs code."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.versions import resuming
from helpers.trainers.killed_saves import refusal, run
from helpers.trainers.old_checkpoints import KINDS, merged, train
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from hf_longctx.hf.checkpoints import choice, old_shards
from hf_longctx.hf.checkpoints.choice import archive_fault
from hf_longctx.hf.checkpoints.manifest import MANIFEST_FILE
from hf_longctx.hf.checkpoints.old_shards import SHARDS_FOLDER, UnsafePickle, metadata_fault, old_states, pickled_globals
from hf_longctx.hf.checkpoints.optimizer_states import load_states

KEPT = Path(__file__).parent / "old_checkpoints"
EXPECTED: dict[str, Any] = json.loads((KEPT / "expected.json").read_text())


def checkpoint_of(kind: str, folder: Path) -> str:
    if kind == "low-bit" and find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    target = folder / "checkpoint-2"
    with tarfile.open(KEPT / f"{kind}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return str(target)


@pytest.mark.daily("low-bit")
@resuming
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_as_with_the_release_that_wrote_its_checkpoint(ranks, tmp_path: Path, kind: str) -> None:
    checkpoint, expected = checkpoint_of(kind, tmp_path), EXPECTED[kind]
    found = merged(ranks(2).run(train, kind, kind, str(tmp_path / "out"), checkpoint))
    assert found["states"] == expected["states"] and found["groups"] == expected["groups"]
    # processors may add in another order
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)


@pytest.mark.daily("low-bit-replicated-1")
@resuming
@pytest.mark.parametrize(
    ("kind", "placed", "num_ranks"),
    [
        ("sharded", "sharded", 3),
        ("sharded", "replicated", 1),
        ("sharded", "staged", 4),
        ("staged", "sharded", 2),
        ("whole", "sharded", 3),
        ("low-bit", "replicated", 1),
    ],
)
def test_states_are_the_same_wherever_a_run_goes_on(ranks, tmp_path: Path, kind: str, placed: str, num_ranks: int) -> None:
    checkpoint = checkpoint_of(kind, tmp_path)
    found = merged(ranks(num_ranks).run(train, kind, placed, str(tmp_path / "out"), checkpoint))
    # the last stage calls a tied weight by another name
    expected = {name: each for name, each in EXPECTED[kind]["states"].items() if not name.startswith("lm_head")}
    assert {name: each for name, each in found["states"].items() if name in expected} == expected


class Marker:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle that finds a name as protocol 4 does, and calls it with one argument."""
    return b"\x80\x04" + short(module) + short(name) + b"\x93" + short(argument) + b"\x85R."


STATE, GROUP = "state.0.weight.", "param_groups.0.weight."


def states(**settings: Any) -> dict[str, Any]:
    moments = {f"{STATE}exp_avg": torch.rand(3, 2), f"{STATE}exp_avg_sq": torch.rand(3, 2), f"{STATE}step": torch.tensor(4.0)}
    return moments | {f"{GROUP}{key}": value for key, value in {"lr": 0.5, "betas": (0.9, 0.99), **settings}.items()}


def saved_shards(folder: Path, **settings: Any) -> Path:
    """Shards as earlier releases wrote them."""
    torch.manual_seed(1)
    state_dict_saver.save(states(**settings), checkpoint_id=folder / SHARDS_FOLDER)
    return folder / SHARDS_FOLDER


def read(folder: Path) -> Any:
    """The optimizer of one weight after it has read the shards in a checkpoint."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    load_states(model, optimizer, old_states(folder), None)
    return optimizer


def test_shards_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    folder, expected = saved_shards(tmp_path, foreach=None), states(foreach=True)
    assert metadata_fault(folder / ".metadata") == ""
    state_dict_loader.load(expected, checkpoint_id=folder)
    optimizer = read(tmp_path)
    group, (found,) = optimizer.param_groups[0], optimizer.state.values()
    assert all(torch.equal(value, expected[f"{STATE}{key}"]) for key, value in found.items()) and len(found) == 3
    assert (group["lr"], group["betas"], group["foreach"]) == (0.5, (0.9, 0.99), None)


@pytest.mark.parametrize(
    "content",
    [
        *(lambda marker, number=number: pickle.dumps([Marker(marker)], number) for number in range(6)),
        # a name inside an allowed module
        lambda marker: call("torch.distributed.checkpoint.metadata", "os.mkdir", str(marker)),
        # the class and its arguments in one opcode
        lambda marker: b"(V" + str(marker).encode() + b"\nios\nmkdir\n.",
        # the name by way of the memo
        lambda marker: b"\x80\x04" + short("mkdir") + b"\x940" + short("os") + b"h\x00\x93" + short(str(marker)) + b"\x85R.",
    ],
)
def test_a_table_of_shards_that_names_a_function_is_refused(tmp_path: Path, content: Callable[[Path], bytes]) -> None:
    marker, control = tmp_path / "marker", tmp_path / "control"
    folder = saved_shards(tmp_path)
    (folder / ".metadata").write_bytes(content(marker))
    assert "mkdir" in metadata_fault(folder / ".metadata")
    with pytest.raises(ValueError, match="mkdir, which a full reader would import and may call"):
        read(tmp_path)
    assert not marker.exists()
    # torch's own reader calls the function
    (folder / ".metadata").write_bytes(content(control))
    with pytest.raises(CheckpointException):
        state_dict_loader.load(states(), checkpoint_id=folder)
    assert control.exists()


def attribute(kind: str, name: str) -> bytes:
    """A pickle that calls getattr on a class of torch's table, as Python 3.11.2 writes members of enums."""
    owner = short("torch.distributed.checkpoint.metadata") + short(kind) + b"\x93"
    return b"\x80\x04" + short("builtins") + short("getattr") + b"\x93" + owner + short(name) + b"\x86R."


def test_getattr_in_a_table_finds_members_of_enums_alone(tmp_path: Path) -> None:
    content = attribute("_MEM_FORMAT_ENCODING", "TORCH_CHANNELS_LAST")
    assert old_shards._Unpickler(io.BytesIO(content)).load() is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    folder = saved_shards(tmp_path)
    (folder / ".metadata").write_bytes(attribute("Metadata", "__init__"))
    with pytest.raises(ValueError, match="reads the attribute '__init__' of an object that is no enum"):
        read(tmp_path)


def test_a_setting_of_the_optimizer_that_names_a_function_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = saved_shards(tmp_path, lr=Marker(marker))
    # the table of shards does not show it
    assert metadata_fault(folder / ".metadata") == "" and not marker.exists()
    with pytest.raises(ValueError, match=r"setting param_groups.0.weight.lr is not read"):
        read(tmp_path)
    assert not marker.exists()
    state_dict_loader.load(states(), checkpoint_id=folder)
    assert marker.exists()


def test_a_tensor_of_a_shard_that_names_a_function_is_refused(tmp_path: Path) -> None:
    marker, content = tmp_path / "marker", io.BytesIO()
    folder = saved_shards(tmp_path)
    metadata = old_shards.read_metadata(folder / ".metadata")
    torch.save(Marker(marker), content)
    for index, stored in metadata.storage_data.items():
        if index.fqn == f"{STATE}exp_avg":
            file = folder / stored.relative_path
            stored.offset, stored.length = file.stat().st_size, len(content.getvalue())
            file.write_bytes(file.read_bytes() + content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="cannot be read: rank 0: Weights only load failed"):
        read(tmp_path)
    assert not marker.exists()


def test_shards_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = saved_shards(tmp_path)
    metadata = old_shards.read_metadata(folder / ".metadata")
    for stored in metadata.storage_data.values():
        stored.relative_path = "../other.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"'../other.distcp', which is no file of its folder"):
        read(tmp_path)


def nested(levels: int) -> Any:
    value: Any = ()
    for _ in range(levels):
        value = (value, value)
    return value


@pytest.mark.parametrize(
    "content,words",
    [
        (pickle.dumps(nested(40)), "nested more than 24 levels deep"),
        (b"\x80\x02]r\xff\xff\xff\x7f.", "numbers its objects beyond"),
        (b"\x80\x04]" + b"\x8c\x02os" + b"(\x93.", "no whole pickle"),
        (b"\x80\x04(\x94.", "no whole pickle"),
        (b"\x80\x04]\x8c\x05mkdir\x93.", "makes up the name"),
        (b"\x80\x02\x82\x01.", "objects outside the file"),
        (b"\x80\x04X\xff\xff\xff\xff", "no whole pickle"),
        (b"", "no whole pickle"),
    ],
)
def test_damaged_and_boundless_pickles_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(UnsafePickle, match=words):
        pickled_globals(content)


def test_tables_and_archives_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_shards(tmp_path)
    torch.save({"lr": [0.5] * 100}, tmp_path / "scheduler.pt")
    assert archive_fault(tmp_path / "scheduler.pt") == ""
    for module in (old_shards, choice):
        monkeypatch.setattr(module, "_MOST_BYTES", 100)
    assert "at most 100 are read" in metadata_fault(folder / ".metadata")
    assert "more than 100 bytes" in archive_fault(tmp_path / "scheduler.pt")


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.daily("staged-optimizer_shards/.metadata-dumps", "sharded-scheduler.pt-dumped")
@resuming
@pytest.mark.parametrize(
    "kind,name,writes",
    [
        ("sharded", "optimizer_shards/.metadata", pickle.dumps),
        ("staged", "optimizer_shards/.metadata", pickle.dumps),
        ("sharded", "scheduler.pt", dumped),
        ("replicated", "optimizer.pt", dumped),
        ("replicated", "rng_state_1.pth", dumped),
    ],
)
def test_every_rank_refuses_a_checkpoint_that_would_run_code(
    ranks, saved, tmp_path: Path, kind: str, name: str, writes: Callable[[Any], bytes]
) -> None:
    out, marker = Path(shutil.copytree(saved(kind)[0], tmp_path / "out")), tmp_path / "marker"
    newest = out / "checkpoint-4"
    # new checkpoints have no table, but one may lie there
    (newest / name).parent.mkdir(exist_ok=True)
    (newest / name).write_bytes(writes(Marker(marker)))
    # whoever can write such a file can also write a manifest, or leave it out
    (newest / MANIFEST_FILE).unlink()
    for refused in ranks(2).run(refusal, kind, str(out), str(newest)):
        assert f"{name} is not read: it names " in refused and "mkdir" in refused and "resume_partial=True" in refused
    # an older one is taken, or the rest of this one
    for first, losses in ranks(2).run(run, kind, str(out), True):
        assert first == 2 and losses == pytest.approx(saved(kind)[1][2:], rel=1e-10)
    shutil.rmtree(out / "checkpoint-6")
    assert ranks(2).run(run, kind, str(out), str(newest), {"resume_partial": True})[1][0] == 4
    assert not marker.exists()
