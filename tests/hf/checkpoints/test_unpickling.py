"""No file of a checkpoint runs code when a run resumes: what a pickle names is read first, and refused on every rank."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.versions import resuming
from helpers.trainers.killed_saves import refusal, run
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from hf_longctx.hf.checkpoints import unpickling
from hf_longctx.hf.checkpoints.manifest import MANIFEST_FILE
from hf_longctx.hf.checkpoints.unpickling import UnsafePickle, archive_fault, load_shards, metadata_fault, pickled_globals


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


def states() -> dict[str, Any]:
    return {"w.exp_avg": torch.zeros(3, 2), "lr": 0.0, "betas": (0.0, 0.0), "foreach": True}


def saved_states(folder: Path) -> Path:
    state_dict_saver.save({"w.exp_avg": torch.ones(3, 2), "lr": 0.5, "betas": (0.9, 0.99), "foreach": None}, checkpoint_id=folder)
    return folder


def test_shards_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    folder, loaded, expected = saved_states(tmp_path / "shards"), states(), states()
    assert metadata_fault(folder / ".metadata") == ""
    load_shards(loaded, folder)
    state_dict_loader.load(expected, checkpoint_id=folder)
    assert loaded.pop("w.exp_avg").equal(expected.pop("w.exp_avg")) and loaded == expected
    assert loaded == {"lr": 0.5, "betas": (0.9, 0.99), "foreach": None}


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
    folder = saved_states(tmp_path / "shards")
    (folder / ".metadata").write_bytes(content(marker))
    assert "mkdir" in metadata_fault(folder / ".metadata")
    with pytest.raises(ValueError, match="mkdir, which a full reader would import and may call"):
        load_shards(states(), folder)
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
    assert unpickling._Unpickler(io.BytesIO(content)).load() is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    folder = saved_states(tmp_path / "shards")
    (folder / ".metadata").write_bytes(attribute("Metadata", "__init__"))
    with pytest.raises(ValueError, match="reads the attribute '__init__' of an object that is no enum"):
        load_shards(states(), folder)


def test_a_setting_of_the_optimizer_that_names_a_function_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "shards"
    state_dict_saver.save({**states(), "lr": Marker(marker)}, checkpoint_id=folder)
    # the table of shards does not show it
    assert metadata_fault(folder / ".metadata") == "" and not marker.exists()
    with pytest.raises(ValueError, match="setting lr is not read"):
        load_shards(states(), folder)
    assert not marker.exists()
    state_dict_loader.load(states(), checkpoint_id=folder)
    assert marker.exists()


def test_a_tensor_of_a_shard_that_names_a_function_is_refused(tmp_path: Path) -> None:
    marker, content = tmp_path / "marker", io.BytesIO()
    folder = saved_states(tmp_path / "shards")
    metadata = unpickling.read_metadata(folder / ".metadata")
    torch.save(Marker(marker), content)
    for index, stored in metadata.storage_data.items():
        if index.fqn == "w.exp_avg":
            file = folder / stored.relative_path
            stored.offset, stored.length = file.stat().st_size, len(content.getvalue())
            file.write_bytes(file.read_bytes() + content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="cannot be read: rank 0: Weights only load failed"):
        load_shards(states(), folder)
    assert not marker.exists()


def test_shards_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = saved_states(tmp_path / "shards")
    metadata = unpickling.read_metadata(folder / ".metadata")
    for stored in metadata.storage_data.values():
        stored.relative_path = "../other.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"'../other.distcp', which is no file of its folder"):
        load_shards(states(), folder)


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
    folder = saved_states(tmp_path / "shards")
    torch.save({"lr": [0.5] * 100}, tmp_path / "scheduler.pt")
    assert archive_fault(tmp_path / "scheduler.pt") == ""
    monkeypatch.setattr(unpickling, "_MOST_BYTES", 100)
    assert "at most 100 are read" in metadata_fault(folder / ".metadata")
    assert "more than 100 bytes" in archive_fault(tmp_path / "scheduler.pt")


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


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
