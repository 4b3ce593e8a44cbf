"""Chooses the checkpoint from which a run resumes, after comparing its files with its manifest on every rank.

Checkpoints of plain transformers and of earlier versions have no manifest: only that their files are there and not cut short can
be checked. The trainer calls `choose` before it reads anything.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from hf_longctx.hf.checkpoints.manifest import (
    DATA_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    DamagedManifest,
    Manifest,
    dealt,
    file_sum,
    part_of,
    read_json,
    read_manifest,
    read_record,
)
from hf_longctx.hf.checkpoints.old_shards import METADATA_FILE, SHARDS_FOLDER, WHOLE_FOLDER, metadata_fault, named_foreign
from hf_longctx.hf.checkpoints.optimizer_states import OPTIMIZER_FOLDER, STATES_INDEX, has_states, saved_states
from hf_longctx.hf.checkpoints.staging import is_whole, recover, step_of
from hf_longctx.hf.checkpoints.weights import INDEX_FILE, WEIGHTS_FILE
from hf_longctx.hf.models.adapters import ADAPTER_FILE
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.runtime.parameters.low_bit import why_no_torchao

logger = logging.getLogger(__name__)

# parts that a run may start anew, in the words of the log; weights are not among them
_ANEW = {
    "optimizer": "the optimizer's states and the learning-rate schedule",
    "rng": "random numbers",
    "state": "the count of steps, the optimizer's states, the learning-rate schedule, random numbers and the order of the data",
    "data": "the record of the data (a stream starts at its beginning)",
}
# endings of the files that `torch.save` writes
_ARCHIVES = (".pt", ".pth", ".bin")
# most bytes of the list of objects in such a file
_MOST_BYTES = 2**30
# start of the names of states that have few bits
_OF_TORCHAO = "torchao.optim."
# files that transformers and PEFT parse where they read weights
_CONFIGS = ("config.json", "adapter_config.json", "generation_config.json")
_OLD_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A fault of a checkpoint. part: the part that a run cannot resume."""

    part: str
    text: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """The folder to resume from, and the parts that start anew although the run resumes: keys of `_ANEW`."""

    folder: Path
    anew: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings by which a checkpoint is chosen."""

    # take a checkpoint whose weights are sound even if other parts are not
    takes_partial: bool
    # the data start anew in any case, so their record is not checked
    skips_data: bool
    control: dist.ProcessGroup | None

    @property
    def _rank(self) -> int:
        return 0 if self.control is None else dist.get_rank()

    def newest(self, run_dir: Path) -> Chosen | None:
        """The newest complete checkpoint of an output folder; None, with a warning, if there is no checkpoint at all.

        Logs on rank 0 which ones are passed over and why. Raises ValueError on every rank if there are some, but none can be
        resumed. Collective.
        """
        names = gather_objects(_checkpoints(run_dir) if self._rank == 0 else [], self.control)[0]
        refused: list[tuple[str, list[Finding]]] = []
        for name in names:
            if not (found := self.findings(run_dir / name)):
                self._log_choice(run_dir / name, refused)
                return Chosen(run_dir / name)
            refused.append((name, found))
        for name, found in refused if self.takes_partial else []:
            if not any(each.part == "weights" for each in found):
                return self._partly(run_dir / name, found)
        if not names:
            if self._rank == 0:
                logger.warning("%s has no checkpoint to resume from: the training starts at its first step", run_dir)
            return None
        listed = "\n".join(f"- {name}: {_texts(found)}" for name, found in refused)
        raise ValueError(
            f"no checkpoint in {run_dir} can be resumed:\n{listed}\nResume from another folder, start anew in another "
            f"output_dir, or set LongContextConfig(resume_partial=True) to go on from a checkpoint whose weights are there"
        )

    def named(self, folder: Path) -> Chosen:
        """The checkpoint in this folder; raises ValueError on every rank, naming files, if it cannot be resumed. Collective."""
        found = self.findings(folder)
        if not found:
            self._log_choice(folder, [])
            return Chosen(folder)
        if self.takes_partial and not any(each.part == "weights" for each in found):
            return self._partly(folder, found)
        remedy = "resume_from_checkpoint=True takes the newest complete checkpoint of output_dir"
        if not any(each.part == "weights" for each in found):
            anew = "; ".join(_ANEW[part] for part in sorted(_anew(found)))
            remedy = f"{remedy}, and LongContextConfig(resume_partial=True) resumes this one but starts anew: {anew}"
        raise ValueError(f"{folder} cannot be resumed: {_texts(found)}; {remedy}")

    def loaded(self, folder: Path) -> None:
        """Raises ValueError on every rank if a stock trainer has just resumed from a checkpoint that is not whole. Collective.

        With `takes_partial`, files may be missing that a stock trainer does without; damaged ones were read already.
        """
        found = self.findings(folder)
        if found and not (self.takes_partial and all(each.text.endswith("is missing") for each in found)):
            whole = next((name for name in _checkpoints(folder.parent) if is_whole(folder.parent / name)), None)
            remedy = f"pass {folder.parent / whole}, which is complete" if whole else "start anew in another output_dir"
            raise ValueError(f"{folder} cannot be resumed: {_texts(found)}; {remedy}")
        if found:
            self._partly(folder, found)
        else:
            self._log_choice(folder, [])

    def findings(self, folder: Path) -> list[Finding]:
        """All faults of a checkpoint that any rank sees; equal on all ranks. Collective.

        Files are read once in full, shared out among the ranks that see one folder.
        """
        manifest, own = _looked_at(folder)
        found = self._joined(own)
        if not found and any(gather_objects(manifest is not None, self.control)):
            # the folder may be another one on each node; all ranks compare sums, or none does
            found = self._joined([] if manifest is not None else [Finding("state", f"{MANIFEST_FILE} is missing on one node")])
            if not found and manifest is not None:
                found = self._joined(self._compare_sums(folder, manifest))
        return [each for each in found if each.part != "data" or not self.skips_data]

    def _compare_sums(self, folder: Path, manifest: Manifest) -> list[Finding]:
        stat = (folder / MANIFEST_FILE).stat()
        # a copy on another node's disk is another file, which that node's ranks read
        keys = gather_objects((stat.st_ino, stat.st_mtime_ns), self.control)
        ranks = [rank for rank, key in enumerate(keys) if key == keys[self._rank]]
        sizes = {name: each.num_bytes for name, each in manifest.files.items() if part_of(name)}
        found = []
        for name in dealt(sizes, dict.fromkeys(sizes, ranks)).get(self._rank, []):
            try:
                is_same = file_sum(folder / name) == manifest.files[name]
            except OSError as error:
                found.append(Finding(part_of(name) or "", f"{name} cannot be read ({error})"))
                continue
            if not is_same:
                found.append(Finding(part_of(name) or "", f"{name} is damaged: its checksum is not the one in {MANIFEST_FILE}"))
        return found

    def _joined(self, own: list[Finding]) -> list[Finding]:
        return sorted({each for found in gather_objects(own, self.control) for each in found})

    def _partly(self, folder: Path, found: list[Finding]) -> Chosen:
        chosen = Chosen(folder, _anew(found))
        if self._rank == 0:
            anew = "; ".join(_ANEW[part] for part in sorted(chosen.anew))
            logger.warning("resuming from %s in part (%s); what starts anew: %s", folder, _texts(found), anew)
        return chosen

    def _log_choice(self, folder: Path, passed_over: list[tuple[str, list[Finding]]]) -> None:
        if self._rank:
            return
        for name, found in passed_over:
            logger.warning("passed over %s: %s", name, _texts(found))
        if passed_over:
            logger.warning("resuming from %s, the newest complete checkpoint", folder)
        if not (folder / MANIFEST_FILE).exists():
            logger.warning(
                "%s has no %s, as checkpoints of plain transformers and of earlier versions: its files are there, but what is in "
                "them was not checked",
                folder,
                MANIFEST_FILE,
            )


def choose(asked: str | bool | None, run_dir: Path, is_local_main: bool, choice: Choice) -> Chosen | None:
    """The checkpoint that `resume_from_checkpoint=asked` means; None: the training starts at its first step. Collective.

    Before that, removes unfinished files of a killed run from `run_dir`.
    """
    rank = 0 if choice.control is None else dist.get_rank()
    PartialState().wait_for_everyone()
    # ranks of other nodes look after rank 0, whose folder may be theirs as well
    for is_turn in (rank == 0, is_local_main and rank != 0):
        try:
            for line in recover(run_dir) if is_turn else []:
                logger.warning(line)
        except OSError as error:
            logger.warning("%s could not be cleared up: %s", run_dir, error)
        PartialState().wait_for_everyone()
    if asked is None or asked is False:
        return None
    # command lines give words
    asked = asked is True or (str(asked).lower() == "true" and not Path(asked).is_dir()) or asked
    return choice.newest(run_dir) if asked is True else choice.named(Path(str(asked)))


def _checkpoints(run_dir: Path) -> list[str]:
    """Names of the checkpoints in an output folder, the newest first."""
    steps = {path.name: step_of(path) for path in run_dir.iterdir() if path.is_dir()} if run_dir.is_dir() else {}
    found = {name: step for name, step in steps.items() if step is not None}
    return sorted(found, key=lambda name: -found[name])


def _looked_at(folder: Path) -> tuple[Manifest | None, list[Finding]]:
    """The manifest of a checkpoint, and what this rank finds wrong without reading whole files."""
    if not folder.is_dir():
        return None, [Finding("weights", f"{folder} is no folder")]
    try:
        manifest = read_manifest(folder)
    except DamagedManifest as error:
        return None, [Finding("state", str(error)), *_plain_findings(folder), *_unsafe_findings(folder)]
    if manifest is None:
        return None, _plain_findings(folder) + _unsafe_findings(folder)
    own = _config_findings(folder) + _size_findings(folder, manifest) + _state_findings(folder, manifest.contents.step)
    return manifest, own + _unsafe_findings(folder)


def _size_findings(folder: Path, manifest: Manifest) -> list[Finding]:
    found = []
    for name, expected in manifest.files.items():
        if (part := part_of(name)) is None:
            continue
        try:
            size = (folder / name).stat().st_size
        except OSError:
            found.append(Finding(part, f"{name} is missing"))
            continue
        if size != expected.num_bytes:
            found.append(Finding(part, f"{name} has {size} bytes and was written with {expected.num_bytes}"))
    if manifest.contents.weights_only:
        found.append(Finding("optimizer", "it was saved with save_only_model=True, so it holds weights only"))
    if manifest.contents.data is not None and DATA_FILE not in manifest.files:
        found.append(Finding("data", f"{DATA_FILE} is missing"))
    return found


def _state_findings(folder: Path, step: int | None) -> list[Finding]:
    """Faults of the trainer's state and the data record, which must be those of `step`, if that is known."""
    found = []
    if step is not None and step_of(folder) not in (None, step):
        found.append(Finding("state", f"{MANIFEST_FILE} is that of step {step}"))
    step = step_of(folder) if step is None else step
    try:
        state = read_json(folder / STATE_FILE)
        TrainerState(**state)
        if step is not None and state["global_step"] != step:
            found.append(Finding("state", f"{STATE_FILE} is that of step {state['global_step']}, not of step {step}"))
    except FileNotFoundError:
        found.append(Finding("state", f"{STATE_FILE} is missing"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        found.append(Finding("state", f"{STATE_FILE} cannot be read ({type(error).__name__})"))
    try:
        record = read_record(folder) or {}
        if step is not None and record.get("step", step) != step:
            found.append(Finding("data", f"{DATA_FILE} is that of step {record['step']}, not of step {step}"))
    except ValueError as error:
        found.append(Finding("data", str(error)))
    return found


def _plain_findings(folder: Path) -> list[Finding]:
    """Files that are missing or cut short in a checkpoint without a manifest."""
    found = _config_findings(folder) + _weight_findings(folder)
    shards = folder / SHARDS_FOLDER
    if has_states(folder):
        found += _state_file_findings(folder)
    elif shards.is_dir():
        if not (shards / METADATA_FILE).is_file():
            found.append(
                Finding("optimizer", f"{SHARDS_FOLDER}/{METADATA_FILE} is missing, so not all ranks have written their shards")
            )
    elif not (folder / "optimizer.bin").is_file() and not (folder / WHOLE_FOLDER).is_dir():
        found += _torch_findings(folder, "optimizer.pt", "optimizer")
    found += _torch_findings(folder, "scheduler.pt", "scheduler")
    ranks = [re.fullmatch(r"rng_state_(\d+)\.pth", path.name) for path in folder.iterdir()]
    numbers = [int(match[1]) for match in ranks if match]
    names = [f"rng_state_{rank}.pth" for rank in range(max(2, max(numbers) + 1))] if numbers else ["rng_state.pth"]
    for name in names:
        found += _torch_findings(folder, name, "rng")
    return found + _state_findings(folder, None)


def _state_file_findings(folder: Path) -> list[Finding]:
    """Files of the optimizer's states that are missing or cut short."""
    if not (folder / OPTIMIZER_FOLDER / STATES_INDEX).is_file():
        return [Finding("optimizer", f"{OPTIMIZER_FOLDER}/{STATES_INDEX} is missing, so not all ranks have written their shards")]
    try:
        names = saved_states(folder).files
    except ValueError as error:
        return [Finding("optimizer", str(error))]
    found = []
    for name in sorted(names):
        if not (folder / OPTIMIZER_FOLDER / name).is_file():
            found.append(Finding("optimizer", f"{OPTIMIZER_FOLDER}/{name} is missing"))
        elif not _is_safetensors(folder / OPTIMIZER_FOLDER / name):
            found.append(Finding("optimizer", f"{OPTIMIZER_FOLDER}/{name} is cut short"))
    return found


def _config_findings(folder: Path) -> list[Finding]:
    """Configs that are read with the weights and hold no object of fields. Anybody may edit them, or leave them out."""
    found = []
    for name in _CONFIGS:
        try:
            if not isinstance(read_json(folder / name), dict):
                found.append(Finding("weights", f"{name} holds no object of fields"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            found.append(Finding("weights", f"{name} cannot be read ({type(error).__name__})"))
    return found


def _weight_findings(folder: Path) -> list[Finding]:
    index, single = folder / INDEX_FILE, folder / WEIGHTS_FILE
    # an adapter with a name has a folder of its own
    adapters = sorted((*folder.glob(ADAPTER_FILE), *folder.glob(f"*/{ADAPTER_FILE}")))
    files = [single]
    if adapters:
        files = adapters
    elif index.exists() and not single.exists():
        try:
            files = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [Finding("weights", f"{INDEX_FILE} cannot be read ({type(error).__name__})")]
    elif not single.exists() and _has_other_weights(folder):
        # weights that only transformers reads, which says itself what they lack
        return []
    found = []
    for file in files:
        if not file.is_file():
            found.append(Finding("weights", f"{file.name} is missing"))
        elif not _is_safetensors(file):
            found.append(Finding("weights", f"{file.name} is cut short"))
    return found


def _has_other_weights(folder: Path) -> bool:
    inner = [child for child in folder.iterdir() if child.is_dir() and any(child.glob("adapter_model.*"))]
    return bool(inner) or any((folder / name).exists() for name in _OLD_WEIGHTS)


def _is_safetensors(file: Path) -> bool:
    """Whether a safetensors file has as many bytes as its header says."""
    try:
        with file.open("rb") as opened:
            num_header = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(min(num_header, file.stat().st_size)))
        end = max((each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"), default=0)
        return file.stat().st_size == 8 + num_header + int(end)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return False


def _torch_findings(folder: Path, name: str, part: str) -> list[Finding]:
    """A file of `torch.save` is an archive, whose list of contents comes last."""
    if not (folder / name).is_file():
        return [Finding(part, f"{name} is missing")]
    return [] if zipfile.is_zipfile(folder / name) else [Finding(part, f"{name} is cut short")]


def _unsafe_findings(folder: Path) -> list[Finding]:
    """Pickles that name something other than what torch writes, so that reading them in full could run code."""
    found = []
    for file in sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _ARCHIVES):
        # other checks find files that are cut short
        if (part := part_of(file.name)) and zipfile.is_zipfile(file) and (fault := archive_fault(file)):
            found.append(Finding(part, f"{file.name} is not read: {fault}"))
    if fault := metadata_fault(folder / SHARDS_FOLDER / METADATA_FILE):
        found.append(Finding("optimizer", f"{SHARDS_FOLDER}/{METADATA_FILE} is not read: {fault}"))
    return found


def archive_fault(file: Path) -> str:
    """Returns why torch's restricted reader would refuse a file of `torch.save` as unsafe; empty if it would not."""
    try:
        with zipfile.ZipFile(file) as archive:
            if any(each.file_size > _MOST_BYTES for each in archive.infolist() if each.filename.endswith("data.pkl")):
                return f"its list of objects has more than {_MOST_BYTES} bytes"
        with safe_globals():
            foreign = get_unsafe_globals_in_checkpoint(str(file))
            # the package, if it is installed, names its safe classes to torch
            if any(name.startswith(_OF_TORCHAO) for name in foreign) and not why_no_torchao():
                foreign = get_unsafe_globals_in_checkpoint(str(file))
    except OSError:
        return ""
    except Exception as error:
        return f"it is no file of torch.save ({type(error).__name__})"
    return named_foreign(foreign)


def _anew(found: list[Finding]) -> frozenset[str]:
    """Parts that start anew under these findings: the schedule and the optimizer together, and everything without the state."""
    parts = {"optimizer" if each.part == "scheduler" else each.part for each in found}
    return frozenset({"state"} if "state" in parts else parts)


def _texts(found: list[Finding]) -> str:
    return ", ".join(each.text for each in found)
