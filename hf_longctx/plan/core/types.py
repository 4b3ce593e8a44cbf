"""The plan: one frozen tree of plain data for every mechanism of the package.

step > micro-batch > sequence group > stage (actions). A rank's work is one path per micro-batch.

If a value cannot be JSON it is not part of a plan: no tensors, devices, process groups or callables here. Sizes are in
tokens, layers and bytes; seconds appear only in `Estimate`, which is not part of a plan's identity (its digest).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["local", "ulysses", "ring", "hybrid"]
Parameters = Literal["replicated", "gathered_per_round", "sharded"]
TensorClass = Literal["layer_input", "attention_output", "qkv", "mlp"]
ActionKind = Literal["F", "B", "SF", "RF", "SB", "RB", "D2H", "H2D", "FREE"]

METHODS: tuple[str, ...] = get_args(Method)
PARAMETERS: tuple[str, ...] = get_args(Parameters)
TENSOR_CLASSES: tuple[TensorClass, ...] = get_args(TensorClass)
ACTION_KINDS: tuple[str, ...] = get_args(ActionKind)

_ACTION = re.compile(r"(\d+)(?:\.(\d+))?(F|B|SF|RF|SB|RB|D2H|H2D|FREE)(\d+)(?:@(\d+:\d+(?:,\d+:\d+)*))?")


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open token range [start, stop) of one sequence."""

    sequence: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of one forward on one stage; `index` is its place in its group. No spans: the dummy chunk.

    A slice holds one span of a long sequence, a pack holds whole sequences, a hybrid starts with a tail slice.
    """

    index: int
    spans: tuple[Span, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)

    @property
    def prefix_tokens(self) -> int:
        """Earlier tokens of the first span's sequence, whose keys and values this chunk must find."""
        return self.spans[0].start if self.spans else 0


@dataclass(frozen=True, slots=True)
class Action:
    """One instruction of one stage for one chunk.

    F, B compute; SF, RF send and receive activations to and from the next part; SB, RB send and receive gradients; D2H,
    H2D move saved tensors to and from the host; FREE drops a chunk's keys and values. `part` is the stage's layer range
    (interleaving). `helpers` are (stage, position) pairs of idle ranks that share the chunk's tokens (SPPO's multiplexed
    sequence partitioning).
    """

    kind: ActionKind
    stage: int
    chunk: int
    part: int = 0
    helpers: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        part = f".{self.part}" if self.part else ""
        helpers = "@" + ",".join(f"{stage}:{position}" for stage, position in self.helpers) if self.helpers else ""
        return f"{self.stage}{part}{self.kind}{self.chunk}{helpers}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action written as `text`, for example "2F0", "2SB0", "2.1F0" or "2F0@3:0,3:1"."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action; write STAGE[.PART]KIND CHUNK[@STAGE:POSITION,...] without blanks, for "
                f"example '2F0' or '2.1F0@3:0', with KIND one of {', '.join(ACTION_KINDS)}"
            )
        stage, part, kind, chunk, helpers = match.groups()
        pairs = [pair.split(":") for pair in helpers.split(",")] if helpers else []
        return cls(
            kind=kind,  # type: ignore[arg-type]
            stage=int(stage),
            chunk=int(chunk),
            part=int(part or 0),
            helpers=tuple((int(stage), int(position)) for stage, position in pairs),
        )


@dataclass(frozen=True, slots=True)
class TensorShare:
    """Where the saved tensors of one class go: shares of a chunk's tokens, front to back, that sum to 1."""

    tensor_class: TensorClass
    recompute: float = 0.0
    nvme: float = 0.0
    host: float = 0.0
    device: float = 0.0

    @property
    def total(self) -> float:
        return self.recompute + self.nvme + self.host + self.device

    def cuts(self, num_tokens: int) -> tuple[int, int, int]:
        """Where of `num_tokens` tokens the recomputed, the NVMe and the host part end; the device has the rest."""
        ends = (self.recompute, self.recompute + self.nvme, self.recompute + self.nvme + self.host)
        first, second, third = (min(num_tokens, round(end * num_tokens)) for end in ends)
        return first, second, third


@dataclass(frozen=True, slots=True)
class LayerPolicy:
    """Where one layer's saved tensors go. A class that is not named stays on the device."""

    shares: tuple[TensorShare, ...] = ()

    def share(self, tensor_class: TensorClass) -> TensorShare:
        """The share of one class, named or not."""
        named = (share for share in self.shares if share.tensor_class == tensor_class)
        return next(named, TensorShare(tensor_class, device=1.0))

    @property
    def keeps_everything(self) -> bool:
        return all(share.device == share.total for share in self.shares)


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """Policies of one chunk on one part, layer by layer; layers beyond the list keep everything.

    `tile_tokens` is the token tile of norms, MLP and loss inside a layer; 0 means untiled.
    """

    chunk: int
    part: int = 0
    layers: tuple[LayerPolicy, ...] = ()
    tile_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Contiguous decoder layers [first_layer, first_layer + num_layers)."""

    first_layer: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage does for one sequence group. No activation policy for a chunk means: keep everything."""

    stage: int
    parts: tuple[LayerRange, ...]
    actions: tuple[Action, ...]
    activations: tuple[ActivationPolicy, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(part.num_layers for part in self.parts)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How `degree` ranks share attention: blocks of `ulysses` neighbours share heads, and the blocks stand in a ring.

    The pure methods are its ends: one block of all ranks is Ulysses, blocks of one rank are a ring.
    """

    degree: int
    ulysses: int = 1

    @property
    def num_blocks(self) -> int:
        return self.degree // self.ulysses

    @property
    def method(self) -> Method:
        if self.degree == 1:
            return "local"
        return "ulysses" if self.num_blocks == 1 else "ring" if self.ulysses == 1 else "hybrid"


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Ranks that share the tokens of their chunks. `positions` lie on the "sp" axis; they are not global ranks.

    `ulysses_degree` belongs to method "hybrid" alone: how many neighbours share heads inside the ring.
    """

    positions: tuple[int, ...]
    method: Method
    chunks: tuple[Chunk, ...]
    stages: tuple[StagePlan, ...]
    ulysses_degree: int = 0

    @property
    def degree(self) -> int:
        return len(self.positions)

    @property
    def shape(self) -> GroupShape:
        """Degree and method in one; raises ValueError for a hybrid whose blocks do not divide its ranks."""
        ulysses = {"local": 1, "ulysses": self.degree, "ring": 1, "hybrid": self.ulysses_degree}[self.method]
        if ulysses < 1 or self.degree % ulysses:
            raise ValueError(f"a hybrid group of {self.degree} ranks cannot have blocks of {ulysses} ranks")
        return GroupShape(self.degree, ulysses)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One round of sequence groups. All ranks of a stage enter and leave it together unless parameters are replicated."""

    groups: tuple[SequenceGroup, ...]

    @property
    def layout(self) -> str:
        """The group degrees in the order of their positions, for example "<2,1,1>"."""
        ordered = sorted(self.groups, key=lambda group: group.positions)
        return "<" + ",".join(str(group.degree) for group in ordered) + ">"

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the planner expects of a plan. Not part of the plan's digest.

    `cost_source` says where the cost coefficients came from ("default" until something was measured).
    """

    step_s: float = 0.0
    lower_bound_s: float = 0.0
    peak_bytes: int = 0
    host_bytes: int = 0
    solve_s: float = 0.0
    solver: str = ""
    cost_source: str = "default"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's path through a step: its group and stage in every micro-batch it takes part in.

    forwards_first: the plan's property of that name, which a rank cannot see of its own path.
    """

    rank: int
    step: int
    parameters: Parameters
    rounds: tuple[tuple[SequenceGroup, StagePlan], ...]
    forwards_first: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything all ranks do for one optimizer update. `rank = stage * ranks_per_stage + position`.

    shard_ranks: with sharded parameters, blocks of so many consecutive positions share one copy and run every micro-batch
    together; 0: all positions of a stage.
    """

    step: int
    lengths: tuple[int, ...]
    num_stages: int
    ranks_per_stage: int
    parameters: Parameters
    micro_batches: tuple[MicroBatch, ...]
    estimate: Estimate = Estimate()
    shard_ranks: int = 0

    @property
    def block_ranks(self) -> int:
        """How many consecutive positions enter and leave micro-batches together."""
        return 1 if self.parameters == "replicated" else self.shard_ranks or self.ranks_per_stage

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.ranks_per_stage

    @property
    def layout(self) -> str:
        """The layouts of all micro-batches in order, for example "<2>,<1,1>"."""
        return ",".join(micro_batch.layout for micro_batch in self.micro_batches)

    @property
    def forwards_first(self) -> bool:
        """Whether every rank runs all its forwards before any backward, and waits for no other rank's backward before."""
        if self.num_stages > 1 or len(self.micro_batches) > 1:
            return False
        kinds = ("".join(action.kind for action in group.stages[0].actions) for group in self.micro_batches[0].groups)
        return all(each.rfind("F") < each.find("B") for each in kinds)

    def place(self, rank: int) -> tuple[int, int]:
        """Stage and position of global rank `rank`."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not in this plan of {self.num_ranks} ranks")
        return divmod(rank, self.ranks_per_stage)

    def for_rank(self, rank: int) -> RankPlan:
        """The rounds of global rank `rank`, in order."""
        stage, position = self.place(rank)
        rounds = tuple(
            (group, group.stages[stage])
            for micro_batch in self.micro_batches
            for group in micro_batch.groups
            if position in group.positions
        )
        return RankPlan(rank, self.step, self.parameters, rounds, self.forwards_first)
