"""Damaged checkpoints are passed over or refused by the names of their files, or taken in part where the settings ask for it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.models.versions import resuming
from helpers.trainers.killed_saves import refusal, run

from hf_longctx.hf.checkpoints.choice import Choice, choose
from hf_longctx.hf.checkpoints.manifest import MANIFEST_FILE

Act = Callable[[Path], Any]


def removed(name: str) -> Act:
    return lambda folder: (folder / name).unlink()


def flipped(name: str) -> Act:
    def act(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return act


def halved(name: str) -> Act:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-40])


def written(name: str, text: str) -> Act:
    return lambda folder: (folder / name).write_text(text)


def of_step_2(name: str) -> Act:
    return lambda folder: shutil.copy(folder.with_name("checkpoint-2") / name, folder / name)


# damage -> (what is done to the newest checkpoint, words of the message, parts that start anew; None: it is never resumed)
DAMAGES: dict[str, tuple[Act, str, set[str] | None]] = {
    "no weights": (removed("model.safetensors"), "model.safetensors is missing", None),
    "short weights": (halved("model.safetensors"), "model.safetensors has ", None),
    "a byte of the weights": (flipped("model.safetensors"), "model.safetensors is damaged", None),
    "weights of another step": (of_step_2("model.safetensors"), "model.safetensors is damaged", None),
    "no optimizer": (removed("optimizer.pt"), "optimizer.pt is missing", {"optimizer"}),
    "a byte of the optimizer": (flipped("optimizer.pt"), "optimizer.pt is damaged", {"optimizer"}),
    "no schedule": (removed("scheduler.pt"), "scheduler.pt is missing", {"optimizer"}),
    "no random numbers": (removed("rng_state_1.pth"), "rng_state_1.pth is missing", {"rng"}),
    "no state": (removed("trainer_state.json"), "trainer_state.json is missing", {"state"}),
    "another state": (of_step_2("trainer_state.json"), "trainer_state.json is that of step 2, not of step 4", {"state"}),
    "half a state": (halved("trainer_state.json"), "trainer_state.json cannot be read", {"state"}),
    "no record": (removed("longctx_data.json"), "longctx_data.json is missing", {"data"}),
    "half a record": (halved("longctx_data.json"), "longctx_data.json cannot be read", {"data"}),
    "a record of something else": (written("longctx_data.json", "[]"), "longctx_data.json is not a data record", {"data"}),
    "a record of another step": (of_step_2("longctx_data.json"), "longctx_data.json is that of step 2, not of step 4", {"data"}),
    "a byte of the manifest": (flipped(MANIFEST_FILE), f"{MANIFEST_FILE} ", {"state"}),
    "another manifest": (of_step_2(MANIFEST_FILE), f"{MANIFEST_FILE} is that of step 2", {"state"}),
}
# JSON files of a checkpoint that a resume reads -> parts that start anew; None: it is never resumed
READ: dict[str, set[str] | None] = {"config.json": None, "generation_config.json": None}
READ |= {"trainer_state.json": {"state"}, "longctx_data.json": {"data"}, MANIFEST_FILE: {"state"}}
CONTENTS = {
    "empty": b"",
    "binary": bytes(range(256)),
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "half": b'{"model_type": "lla',
    "nested": b"[" * 100_000,
    "a list": b"[1, 2]",
    "a word": b'"x"',
    "null": b"null",
}
DAMAGES |= {
    f"{content} {name}": ((lambda folder, name=name, text=text: (folder / name).write_bytes(text)), name, anew)
    for name, anew in READ.items()
    for content, text in CONTENTS.items()
}
# damages that are noticed without a manifest
SEEN_WITHOUT = ["no weights", "short weights", "no optimizer", "no schedule", "no random numbers", "no state", "another state"]
SEEN_WITHOUT += [f"{content} {name}" for name in READ if name != MANIFEST_FILE for content in CONTENTS]
SEEN_WITHOUT += ["half a state", "half a record", "a record of something else", "a record of another step"]


@pytest.fixture
def copied(saved, tmp_path: Path) -> Callable[[str], Path]:
    def folder(kind: str) -> Path:
        return Path(shutil.copytree(saved(kind)[0], tmp_path / "out"))

    return folder


def chosen(asked: Any, out: Path, takes_partial: bool = False, skips_data: bool = False) -> Any:
    return choose(asked, out, True, Choice(takes_partial, skips_data, None))


def hide_manifests(out: Path) -> None:
    for file in out.glob(f"*/{MANIFEST_FILE}"):
        file.unlink()


# a file is read by one function whatever it is called, and it fails in one of three ways
FURTHER = {f"{content} {name}" for name in list(READ)[1:] for content in CONTENTS if content not in ("binary", "half", "a list")}


@pytest.mark.wide("no weights-True")
@pytest.mark.parametrize(
    "name,has_manifest",
    [
        pytest.param(name, has_manifest, marks=[pytest.mark.wide] * (name in FURTHER))
        for has_manifest, names in ((True, DAMAGES), (False, SEEN_WITHOUT))
        for name in names
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(copied, caplog, name: str, has_manifest: bool) -> None:
    out = copied("replicated")
    act, words, anew = DAMAGES[name]
    if not has_manifest:
        hide_manifests(out)
        words = words.replace("has ", "is cut short")
    newest = out / "checkpoint-4"
    act(newest)
    with pytest.raises(ValueError, match="checkpoint-4 cannot be resumed") as refused:
        chosen(str(newest), out)
    assert words in str(refused.value) and "resume_from_checkpoint=True" in str(refused.value)
    # the message says how to take a part, if that can be done
    assert ("resume_partial=True" in str(refused.value)) == (anew is not None)
    with caplog.at_level(logging.WARNING):
        assert chosen(True, out).folder.name == "checkpoint-2"
    assert "passed over checkpoint-4" in caplog.text and words in caplog.text
    if anew is None:
        with pytest.raises(ValueError, match="cannot be resumed"):
            chosen(str(newest), out, takes_partial=True)
    else:
        taken = chosen(str(newest), out, takes_partial=True)
        assert taken.folder == newest and taken.anew == anew and "what starts anew" in caplog.text
    # with only damaged ones there is nothing to start anew over silently
    shutil.rmtree(out / "checkpoint-2")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be resumed:\n- checkpoint-4: "):
        chosen(True, out)


def test_a_whole_checkpoint_is_taken_and_an_old_one_is_said(copied, caplog) -> None:
    out = copied("replicated")
    for asked in (True, "true", "True", str(out / "checkpoint-4")):
        assert chosen(asked, out).folder.name == "checkpoint-4"
    assert caplog.text == ""
    # files that nobody resumes from may change
    (out / "checkpoint-4" / "config.json").unlink()
    shutil.copytree(out / "checkpoint-4", out / "kept")
    assert chosen(True, out).folder.name == "checkpoint-4" and chosen(str(out / "kept"), out).anew == frozenset()
    hide_manifests(out)
    assert chosen(True, out).folder.name == "checkpoint-4"
    assert "what is in them was not checked" in caplog.text


def test_an_empty_or_missing_folder_starts_anew_and_says_so(tmp_path: Path, caplog) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        caplog.clear()
        assert chosen(True, folder) is None and "the training starts at its first step" in caplog.text
    with pytest.raises(ValueError, match="is no folder"):
        chosen(str(tmp_path / "none"), tmp_path)


def test_the_record_does_not_matter_where_data_are_not_skipped(copied) -> None:
    out = copied("replicated")
    removed("longctx_data.json")(out / "checkpoint-4")
    assert chosen(True, out, skips_data=True).folder.name == "checkpoint-4"


def test_the_manifest_lists_every_file_and_the_place_in_the_stream(saved) -> None:
    for kind, num_stages, parameters in (("stream", 1, "replicated"), ("sharded", 1, "sharded"), ("staged", 2, "replicated")):
        folder = saved(kind)[0] / "checkpoint-4"
        text = json.loads((folder / MANIFEST_FILE).read_text())
        files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        files.pop(MANIFEST_FILE)
        assert {name: found[0] for name, found in text["files"].items()} == files
        assert (text["format"], text["step"], text["num_ranks"]) == (1, 4, 2)
        assert (text["num_stages"], text["parameters"], text["weights_only"]) == (num_stages, parameters, False)
        assert text["data"] == json.loads((folder / "longctx_data.json").read_text()) and text["data"]["step"] == 4
        assert (text["data"]["cursor"] is not None) == (kind == "stream")
        assert not [path for path in saved(kind)[0].iterdir() if path.name.startswith(".")]


@pytest.mark.daily("another state-0")
@resuming
@pytest.mark.parametrize("name,first", [("no optimizer", 4), ("no random numbers", 4), ("another state", 0), ("no record", 4)])
def test_a_run_takes_a_part_where_asked(ranks, saved, copied, name: str, first: int) -> None:
    kind = "stream" if name == "no record" else "replicated"
    out, straight = copied(kind), saved(kind)[1]
    DAMAGES[name][0](out / "checkpoint-4")
    newest = str(out / "checkpoint-4")
    for refused in ranks(2).run(refusal, kind, newest, newest):
        assert DAMAGES[name][1] in refused and "resume_partial=True" in refused
    for found, losses in ranks(2).run(run, kind, str(out), newest, {"resume_partial": True}):
        assert found == first
        # weights are those of the checkpoint; only the step after them shows fresh states
        is_same = [loss == pytest.approx(other, rel=1e-10) for loss, other in zip(losses, straight[first:], strict=True)]
        assert is_same == {"no random numbers": [True, True], "no optimizer": [True, False]}.get(name, [False] * len(is_same))


@pytest.mark.wide
@resuming
@pytest.mark.parametrize(
    "kind,act,words",
    [
        ("sharded", removed("optimizer/rank-1.safetensors"), "optimizer/rank-1.safetensors is missing"),
        ("sharded", flipped("optimizer/rank-0.safetensors"), "optimizer/rank-0.safetensors is damaged"),
        ("staged", flipped("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors is damaged"),
        ("stream", flipped("longctx_data.json"), "longctx_data.json "),
    ],
)
def test_every_rank_refuses_what_one_of_them_finds(ranks, saved, copied, kind: str, act: Act, words: str) -> None:
    out = copied(kind)
    act(out / "checkpoint-4")
    for refused in ranks(2).run(refusal, kind, str(out), str(out / "checkpoint-4")):
        assert words in refused
    for first, losses in ranks(2).run(run, kind, str(out), True):
        assert first == 2 and losses == pytest.approx(saved(kind)[1][2:], rel=1e-10)
