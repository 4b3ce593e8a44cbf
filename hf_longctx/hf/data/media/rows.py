"""Reads the media of a tokenised row, and cuts them like its tokens.

A tokenised row with images has a column `media`: for each image or video, in the order of its tokens, the range of tokens that
its placeholder became, how many of these stand for a feature, and the grid of its patches where the model's positions depend on
it. A second column, `media_files`, has a path or the content of a file for each, which is opened when a rank needs a token of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from datasets import List, Value
from torch import Tensor

from hf_longctx.families.family import MediumKind
from hf_longctx.plan.core.types import TowerWork
from hf_longctx.plan.model.towers import TowerSpec
from hf_longctx.runtime.core.chunk_inputs import ChunkMedia, FeatureExchange, TowerInputs

# type of the column `media`
MEDIA_FEATURE = List(
    {
        "kind": Value("string"),
        "start": Value("int64"),
        "stop": Value("int64"),
        "num_features": Value("int64"),
        "grid": List(Value("int64")),
        "seconds": Value("float64"),
        "num_parts": Value("int64"),
        "elements": Value("int64"),
    }
)
_FILE = {"path": Value("string"), "bytes": Value("binary")}
# type of the column `media_files`; path or bytes is null, or both for a video of frames
FILES_FEATURE = List({**_FILE, "frames": List(_FILE), "times": List(Value("float64"))})


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or video in a row. Its tokens are [start, stop), of which `num_features` stand for a feature."""

    kind: MediumKind
    start: int
    stop: int
    num_features: int
    # number of patches in time, height and width; empty if positions do not depend on it
    grid: tuple[int, ...] = ()
    # from one patch in time to the next; 0 if positions do not depend on it
    seconds: float = 0.0
    # tiles or steps in time that towers treat apart
    num_parts: int = 1
    # numbers of the pixels of each part; 0 in rows of earlier versions
    elements: int = 0

    @property
    def num_planned(self) -> int:
        """Number of images that plans know it as: steps in time of a video."""
        return self.num_parts if self.kind == "video" else 1

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> Medium:
        """Reads an item of the column `media`."""
        grid = tuple(map(int, item.get("grid") or ()))
        seconds = float(item.get("seconds") or 0.0)
        parts = int(item.get("num_parts") or 1), int(item.get("elements") or 0)
        return cls(item["kind"], int(item["start"]), int(item["stop"]), int(item["num_features"]), grid, seconds, *parts)

    def as_item(self) -> dict[str, Any]:
        """Returns the item of the column `media`."""
        return asdict(self) | {"grid": list(self.grid)}


def tower_work(medium: Medium, tower: TowerSpec) -> list[TowerWork]:
    """Returns the `num_planned` works of a tower: an image, or each step of a video as if all had equally many tokens."""
    each, start, stop = medium.num_parts, medium.start, medium.stop
    merged = -(-medium.num_features * tower.merged_patches // each)
    patches = max(1, medium.elements // tower.patch_elements if medium.elements else merged)
    if medium.kind == "image":
        return [TowerWork(start, stop, each, patches, medium.num_features)]
    bounds = [start + (stop - start) * step // each for step in range(each + 1)]
    return [TowerWork(*bound, 1, patches, max(1, medium.num_features // each)) for bound in pairwise(bounds)]


class MediaReader(Protocol):
    """Reads pixels of media for a model's towers, and positions for its text model."""

    @property
    def tokens(self) -> Mapping[MediumKind, int]:
        """Id of the token that stands for a feature, of every kind of media that the model reads."""

    def tower_inputs(self, medium: Medium, file: Mapping[str, Any], ids: Sequence[int], where: str) -> TowerInputs:
        """Opens a medium, an item of `media_files`. ids: its tokens in the row. where: name of the medium in messages.

        Raises ValueError if it cannot be opened, or gives other tokens than those of the row.
        """

    def positions(self, ids: Tensor, media: Sequence[Medium]) -> Tensor | None:
        """Returns positions [3, n] of a whole document with these ids [n]; None if its model counts tokens."""


@dataclass(frozen=True, slots=True)
class SequenceMedia:
    """Media of n consecutive tokens of a sequence."""

    # for each image and each step in time of a video; None if no token of the image or video is needed
    inputs: tuple[TowerInputs | None, ...]
    # row at which the features of each begin in the table of all media of the sequence
    firsts: tuple[int, ...]
    # [n], row of that table for every token; -1 for text
    rows: Tensor
    # [3, n], positions in time, height and width; None for a model that counts tokens
    positions: Tensor | None
    # number of each of `inputs` in the plan's media of the sequence
    numbers: tuple[int, ...] = ()
    # rows of all tokens of the sequence, as `rows`; None for a stage without towers
    all_rows: Tensor | None = None
    # numbers in the plan and rows of the table that each image and video has
    counts: tuple[tuple[int, int], ...] = ()

    def kept(self, keeps: Mapping[int, bool]) -> SequenceMedia:
        """Returns these media with `TowerInputs.keeps` by their numbers in the plan."""
        pairs = zip(self.inputs, self.numbers, strict=True)
        inputs = (each and replace(each, keeps=keeps.get(number)) for each, number in pairs)
        return replace(self, inputs=tuple(inputs))

    def cut(self, begin: int, end: int) -> SequenceMedia:
        """Returns tokens [begin, end) of these."""
        positions = None if self.positions is None else self.positions[:, begin:end]
        return replace(self, rows=self.rows[begin:end], positions=positions)


def sequence_media(
    ids: Tensor,
    media: Sequence[tuple[Medium, Any]],
    needed: Sequence[tuple[int, int]],
    reader: MediaReader,
    where: str,
    dealt: Collection[int] = (),
    has_tokens: bool = True,
) -> SequenceMedia:
    """Reads the media of a document with these ids [n], of which a rank needs the token ranges `needed`.

    media: each with its item of `media_files`, perhaps as a value of Arrow, whose content is then copied only if it is opened.
    where: name of the row in messages. dealt: numbers of media, as the plan counts them, that the rank runs for others.
    has_tokens: whether it has tokens of the document, and so needs their positions. Opens only media that are dealt to the rank,
    or have a feature in its ranges. Raises ValueError if a medium cannot be opened, or if its tokens are not those of the row.
    """
    rows = torch.full_like(ids, -1)
    inputs: list[TowerInputs | None] = []
    firsts: list[int] = []
    numbers: list[int] = []
    counts: list[tuple[int, int]] = []
    num_rows = num_planned = 0
    for number, (medium, file) in enumerate(media):
        if medium.kind not in reader.tokens:
            raise ValueError(f"{where} has a {medium.kind}, which is not read for this model; remove such rows")
        places = medium.start + (ids[medium.start : medium.stop] == reader.tokens[medium.kind]).nonzero().view(-1)
        if len(places) != medium.num_features:
            raise ValueError(
                f"{where} has {len(places)} tokens for features of {medium.kind} {number}, but its media say "
                f"{medium.num_features}; tokenise the row again with the model's processor"
            )
        rows[places] = torch.arange(num_rows, num_rows + len(places))
        first, num_rows = num_rows, num_rows + len(places)
        is_needed = any(bool(((places >= begin) & (places < end)).any()) for begin, end in needed)
        # a plan counts the steps of a video, unless the row is of an earlier version
        before, num_steps = num_planned, medium.num_planned
        num_planned += num_steps
        counts.append((num_steps, len(places)))
        if not is_needed and not any(before <= number < num_planned for number in dealt):
            inputs.append(None)
            firsts.append(first)
            numbers.append(before)
            continue
        given = file.as_py() if hasattr(file, "as_py") else file
        own = ids[medium.start : medium.stop].tolist()
        for part in _steps(reader.tower_inputs(medium, given, own, f"{where} {medium.kind} {number}")):
            inputs.append(part)
            firsts.append(first)
            numbers.append(before + (first - (num_rows - len(places))) * num_steps // len(places))
            first += part.num_features
    positions = reader.positions(ids, [medium for medium, _ in media]) if has_tokens else None
    return SequenceMedia(tuple(inputs), tuple(firsts), rows, positions, tuple(numbers), rows, tuple(counts))


def _steps(whole: TowerInputs) -> list[TowerInputs]:
    """Divides a video into its steps in time, which towers of all classes with videos treat apart; an image stays whole."""
    if whole.kind == "image":
        return [whole]
    grid, patches = whole.tensors["video_grid_thw"], whole.tensors["pixel_values_videos"]
    num_steps = int(grid[0, 0])
    one = torch.tensor([1, *grid[0, 1:].tolist()]).unsqueeze(0)
    return [
        TowerInputs("video", {"pixel_values_videos": part, "video_grid_thw": one}, whole.num_features // num_steps)
        for part in patches.chunk(num_steps)
    ]


def _joined(media: Sequence[TowerInputs]) -> list[TowerInputs]:
    """Joins neighbouring steps of videos of one size, so that towers run them together."""
    found: list[list[TowerInputs]] = []
    for each in media:
        before = found[-1][0] if found else each
        is_step = bool(found) and each.kind == before.kind == "video" and each.keeps == before.keeps
        if is_step and torch.equal(each.tensors["video_grid_thw"], before.tensors["video_grid_thw"]):
            found[-1].append(each)
        else:
            found.append([each])
    return [_together(steps) if len(steps) > 1 else steps[0] for steps in found]


def _together(steps: Sequence[TowerInputs]) -> TowerInputs:
    grid = steps[0].tensors["video_grid_thw"] * torch.tensor([len(steps), 1, 1])
    patches = torch.cat([each.tensors["pixel_values_videos"] for each in steps])
    num_features = sum(each.num_features for each in steps)
    return replace(steps[0], tensors={"pixel_values_videos": patches, "video_grid_thw": grid}, num_features=num_features)


def positions_alone(ids: Tensor, media: Sequence[Medium], reader: MediaReader) -> SequenceMedia | None:
    """Returns the positions of a document with these ids [n], for a stage without towers; None for a model that counts tokens."""
    positions = reader.positions(ids, media)
    return None if positions is None else SequenceMedia((), (), torch.full_like(ids, -1), positions)


def dealt_media(
    places: Sequence[Sequence[tuple[int, int, int]]],
    place: int,
    sequences: Mapping[int, SequenceMedia],
    runs: Mapping[tuple[int, int], int],
    positions: Tensor | None,
) -> ChunkMedia:
    """Makes the media of a rank's shard of a chunk whose images the plan deals to the ranks of its group.

    places: for each rank its pieces, with their sequence (-1 for dummies) and token range in it. place: that of this rank.
    sequences: media of all sequences of the chunk that have any. runs: rank that runs each image, by sequence and number.
    positions: [3, T] or None.
    """
    owners = {
        i: _owners(own, {number: rank for (other, number), rank in runs.items() if other == i}) for i, own in sequences.items()
    }
    none = torch.zeros(0, dtype=torch.int64)
    # rows that each rank needs, by sequence
    needed = [[(i, _features_in(sequences[i], begin, end)) for i, begin, end in pieces if i in sequences] for pieces in places]
    runs_row = {i: torch.zeros(len(each), dtype=torch.bool) for i, each in owners.items()}
    for i, wanted in itertools.chain.from_iterable(needed):
        runs_row[i][wanted[owners[i][wanted] == place]] = True
    # the table of this rank, and the row of it for every row of a sequence
    media: list[TowerInputs] = []
    table, num_rows = {i: torch.full_like(each, -1) for i, each in owners.items()}, 0
    for i, own in sequences.items():
        for inputs, first in zip(own.inputs, own.firsts, strict=True):
            # media that were not opened have no row here
            if inputs is not None and bool(runs_row[i][first : first + inputs.num_features].any()):
                media.append(inputs)
                table[i][first : first + inputs.num_features] = num_rows + torch.arange(inputs.num_features)
                num_rows += inputs.num_features
        if bool((table[i][runs_row[i]] < 0).any()):
            raise AssertionError(f"a medium of sequence {i} was not opened")
    sends = [torch.cat([none, *(table[i][wanted[owners[i][wanted] == place]] for i, wanted in each)]) for each in needed]
    own_places, first = [none], 0
    for i, begin, end in places[place]:
        if i in sequences:
            own_places.append(first + (_rows_in(sequences[i], begin, end) >= 0).nonzero().view(-1))
        first += end - begin
    source = torch.cat([none, *(owners[i][wanted] for i, wanted in needed[place])])
    rows = torch.empty_like(source)
    # rows arrive rank after rank, and from each in the order of the tokens
    rows[source.argsort(stable=True)] = torch.arange(len(source))
    receives = tuple(int((source == rank).sum()) for rank in range(len(places)))
    return ChunkMedia(
        tuple(_joined(media)), torch.cat(own_places), rows, positions, exchange=FeatureExchange(tuple(sends), receives)
    )


def _owners(media: SequenceMedia, runs: Mapping[int, int]) -> Tensor:
    """Returns the rank that runs every row of a sequence's table. runs: that of each number in a chunk.

    The plan knows steps of a video by about equal shares of its tokens. A row whose step the plan puts into another chunk has the
    rank of the nearest step here.
    """
    found, number = [torch.zeros(0, dtype=torch.int64)], 0
    for count, num_rows in media.counts:
        known = [each for each in range(number, number + count) if each in runs]
        distances = ([(abs(each - own), each) for each in known] for own in range(number, number + count))
        ranks = [runs[min(each)[1]] if each else -1 for each in distances]
        found.append(torch.tensor(ranks)[torch.arange(num_rows) * count // max(1, num_rows)])
        number += count
    return torch.cat(found)


def _rows_in(media: SequenceMedia, begin: int, end: int) -> Tensor:
    """Returns the row of the table for a sequence's tokens [begin, end); -1 for text."""
    assert media.all_rows is not None
    return media.all_rows[begin:end]


def _features_in(media: SequenceMedia, begin: int, end: int) -> Tensor:
    """Returns the rows of the table for those of a sequence's tokens [begin, end) that stand for a feature."""
    found = _rows_in(media, begin, end)
    return found[found >= 0]


def joined_positions(parts: Sequence[tuple[int, SequenceMedia | None, Tensor]]) -> Tensor | None:
    """Joins positions [3, n] of all pieces; None for a model that counts tokens."""
    if all(own is None or own.positions is None for _, own, _ in parts):
        return None
    each = (counted.expand(3, -1) if own is None or own.positions is None else own.positions for _, own, counted in parts)
    return torch.cat(list(each), dim=1)


def chunk_media(parts: Sequence[tuple[int, SequenceMedia | None, Tensor]]) -> ChunkMedia | None:
    """Joins the media of a rank's shard of a chunk; None without any.

    parts: for every piece its sequence, the media of its tokens, and their positions [n].
    """
    if all(own is None for _, own, _ in parts):
        return None
    taken: dict[tuple[int, int], int] = {}
    media: list[TowerInputs] = []
    places, rows = [], []
    first, num_rows = 0, 0
    for sequence, own, counted in parts:
        if own is not None and len(here := (own.rows >= 0).nonzero().view(-1)):
            mapped = own.rows[here].clone()
            numbers = torch.searchsorted(torch.tensor(own.firsts), mapped, right=True) - 1
            for number in numbers.unique().tolist():
                if (inputs := own.inputs[number]) is None:
                    raise AssertionError(f"medium {number} of sequence {sequence} was not opened")
                if (sequence, number) not in taken:
                    taken[sequence, number] = num_rows
                    media.append(inputs)
                    num_rows += inputs.num_features
                mapped[numbers == number] += taken[sequence, number] - own.firsts[number]
            places.append(here + first)
            rows.append(mapped)
        first += len(counted)
    none = torch.zeros(0, dtype=torch.int64)
    placed, mapped_rows = (torch.cat(each) if each else none for each in (places, rows))
    return ChunkMedia(tuple(_joined(media)), placed, mapped_rows, joined_positions(parts))
