"""Records in a checkpoint which weights its run trained, and compares them when a run resumes.

An ordinary `optimizer.pt` numbers its states and names no weight, so they may go to other weights of equal shape if groups were
changed. States by name lack those of weights that were frozen. Both are found here, by name, before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_longctx.hf.checkpoints.manifest import read_json, write_json
from hf_longctx.plan.core.messages import listed

TRAINED_FILE = "longctx_trained.json"
_REMEDY = (
    "freeze and group weights as in that run, or load the model from that folder and train it anew, without resuming (see "
    "docs/guides/checkpoints.md)"
)


@dataclass(frozen=True)
class TrainedWeights:
    """Names of the weights that a run trains.

    trained: weights that are not frozen. groups: weights in each group of the optimizer, frozen ones too; None where none is made
    yet.
    """

    trained: list[str]
    groups: list[list[str]] | None = None

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any = None, left_out: str = "") -> TrainedWeights:
        """The weights of a model, and of its optimizer if there is one. left_out: a weight that another stage names."""
        names = {id(weight): name for name, weight in model.named_parameters()}
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad and name != left_out]
        if optimizer is None:
            return cls(trained)
        groups = [
            [names.get(id(weight), f"a weight {tuple(weight.shape)} outside the model") for weight in group["params"]]
            for group in optimizer.param_groups
        ]
        return cls(trained, [[name for name in group if name != left_out] for group in groups])

    @classmethod
    def joined(cls, parts: Sequence[TrainedWeights]) -> TrainedWeights:
        """The weights of all pipeline stages, of which several ranks may have the same."""
        trained = list(dict.fromkeys(name for part in parts for name in part.trained))
        if any(part.groups is None for part in parts):
            return cls(trained)
        groups: list[dict[str, None]] = [{} for _ in range(max(len(part.groups or ()) for part in parts))]
        for part in parts:
            for group, names in zip(groups, part.groups or (), strict=False):
                group.update(dict.fromkeys(names))
        return cls(trained, [list(group) for group in groups])

    def write(self, folder: Path) -> None:
        """Writes the record of a checkpoint."""
        write_json(folder / TRAINED_FILE, asdict(self))

    def problem_with(self, folder: Path, is_by_number: bool) -> str:
        """Returns why this run cannot continue with a checkpoint's states; empty if it can, or if there is no record.

        is_by_number: states belong to weights by their order, not by name.
        """
        try:
            saved = TrainedWeights(**read_json(folder / TRAINED_FILE))
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, TypeError) as error:
            return f"{folder}: {TRAINED_FILE} cannot be read ({type(error).__name__}); resume from another checkpoint"
        # weights that a callback unfreezes without giving them to the optimizer are frozen again when the run resumes
        then, now = set(saved.trained), set(self.trained)
        updated = then if saved.groups is None else {name for group in saved.groups for name in group}
        lost = [name for name in saved.trained if name in updated and name not in now]
        added = [name for name in self.trained if name not in then]
        found = _differing(lost, added, "of the model's weights", "frozen", "trained")
        if not found and saved.groups is not None and self.groups is not None:
            found = _differing_groups(saved.groups, self.groups, is_by_number)
        return f"{folder} was saved by a run that trained other weights: {found}; {_REMEDY}" if found else ""


def _differing(lost: Sequence[str], added: Sequence[str], what: str, gone: str, there: str) -> str:
    """Says which weights a checkpoint has alone (`lost`), and which a run has alone (`added`); empty if there are none."""
    parts = [f"{len(lost)} {what} were {there} then and are {gone} or missing now ({listed(lost)})"] if lost else []
    parts += [f"{len(added)} {what} were {gone} or missing then and are {there} now ({listed(added)})"] if added else []
    return ", and ".join(parts)


def _differing_groups(saved: list[list[str]], now: list[list[str]], is_by_number: bool) -> str:
    """Says how the groups of two optimizers differ; groups without weights count only where states are numbered."""
    if not is_by_number:
        saved, now = ([group for group in groups if group] for groups in (saved, now))
    old, new = ({name: number for number, group in enumerate(groups) for name in group} for groups in (saved, now))
    lost, added = ([name for name in names if name not in others] for names, others in ((old, new), (new, old)))
    if found := _differing(lost, added, "weights", "outside the optimizer", "in it"):
        return found
    if len(saved) != len(now):
        return f"its optimizer had {len(saved)} groups of weights and has {len(now)} now"
    if moved := [name for name, number in old.items() if new[name] != number]:
        return (
            f"{len(moved)} weights were in other groups of its optimizer ({moved[0]} in group {old[moved[0]]}, now in group "
            f"{new[moved[0]]})"
        )
    if is_by_number and (first := next((pair for pair in _pairs(saved, now) if pair[0] != pair[1]), None)):
        return f"its optimizer had its weights in another order ({first[0]} where {first[1]} is now)"
    return ""


def _pairs(saved: list[list[str]], now: list[list[str]]) -> Iterator[tuple[str, str]]:
    for old, new in zip(saved, now, strict=True):
        yield from zip(old, new, strict=True)


@contextmanager
def explained(checkpoint: str | None) -> Iterator[None]:
    """Context that says in our words what torch says of numbered states that do not fit, where a checkpoint names no weights."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("loaded state dict"):
            raise
        raise ValueError(
            f"the states in {checkpoint} are those of other weights ({error}), and it has no {TRAINED_FILE} that names them; "
            f"{_REMEDY}"
        ) from error


def check_sizes(saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError, in torch's words, if numbered states do not fit the groups of an optimizer."""
    if len(saved) != len(groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if any(len(old["params"]) != len(new["params"]) for old, new in zip(saved, groups, strict=True)):
        raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group")
