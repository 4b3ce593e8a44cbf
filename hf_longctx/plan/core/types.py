"""The plan of one training step: a frozen tree of plain data that expresses every mechanism of the package.

The tree is step > micro-batch > sequence group > stage (with its actions). In every micro-batch a rank takes part in one group,
as one stage of it. The planner writes plans, the runtime executes them.

A plan contains only JSON values: no tensors, devices, process groups or callables. Sizes are in tokens, layers and bytes; seconds
appear only in `Estimate`, which is not part of a plan's identity (its digest).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

Method = Literal["local", "ulysses", "ring", "hybrid"]
# when ranks gather weights, and when they sum gradients: see the five predicates below
Parameters = Literal["replicated", "gathered_per_round", "gathered_per_step", "gathered_per_node", "sharded"]
TensorClass = Literal["layer_input", "attention_output", "qkv", "mlp"]
ActionKind = Literal["F", "B", "SF", "RF", "SB", "RB", "H"]

METHODS: tuple[str, ...] = get_args(Method)
PARAMETERS: tuple[str, ...] = get_args(Parameters)
TENSOR_CLASSES: tuple[TensorClass, ...] = get_args(TensorClass)
ACTION_KINDS: tuple[str, ...] = get_args(ActionKind)
# kinds of actions that compute
PASSES: tuple[ActionKind, ...] = ("F", "B", "H")


def meets_in_every_pass(parameters: Parameters) -> bool:
    """Whether ranks that share weights meet in every backward, or in every forward too: all run one order of passes.

    "sharded" (ZeRO-3) gathers a layer for each of its forwards and backwards. "gathered_per_step" (ZeRO-2) gathers weights once
    per step and reduces gradients in every backward. "gathered_per_node" does both inside each node, so that only the ranks of a
    node meet. "gathered_per_round" meets in a micro-batch's first forward and last backward only.
    """
    return gathers_every_pass(parameters) or parameters == "gathered_per_step"


def gathers_every_pass(parameters: Parameters) -> bool:
    """Whether each forward and each backward gathers a layer and frees it afterwards, so that two layers are whole at most."""
    return parameters == "sharded" or keeps_node_copies(parameters)


def keeps_node_copies(parameters: Parameters) -> bool:
    """Whether each node has one copy of the weights of a step, in parts on its ranks, from which passes gather layers.

    ZeRO++ (arXiv 2306.10209, section 3.2) keeps such a copy, as hierarchical partitioning (hpZ), from a forward to its backward.
    Here it is made once per step, and gradients add up in parts, too, so that only two exchanges per step cross nodes: of weights
    before the first pass, and of sums of gradients in the last one.
    """
    return parameters == "gathered_per_node"


def frees_every_round(parameters: Parameters) -> bool:
    """Whether gathered layers stay to the end of a micro-batch, whose last backward frees them for the next one to gather."""
    return parameters == "gathered_per_round"


def sums_every_backward(parameters: Parameters, num_stages: int) -> bool:
    """Whether every backward reduce-scatters its gradients; otherwise they wait whole for a micro-batch's last backward.

    "sharded" parameters do so on several stages: there, some chunk is always between its forward and its backward, so that whole
    gradients would stay for the whole step.
    """
    is_each = parameters == "gathered_per_step" or keeps_node_copies(parameters)
    return is_each or (gathers_every_pass(parameters) and num_stages > 1)


_ACTION = re.compile(r"(\d+)(?:\.(\d+))?(F|B|SF|RF|SB|RB|H)(\d+)(?:@(\d+:\d+(?:,\d+:\d+)*))?")


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
    """The tokens of one forward on one stage; `index` numbers the chunks of a group. The dummy chunk has no spans.

    A slice is one span of a long sequence, a pack has whole sequences, and a hybrid has the last slice of a long sequence
    followed by whole short ones.
    """

    index: int
    spans: tuple[Span, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([span.stop - span.start for span in self.spans])

    @property
    def prefix_tokens(self) -> int:
        """Number of earlier tokens of the first span's sequence; their keys and values come from earlier chunks."""
        return self.spans[0].start if self.spans else 0


@dataclass(frozen=True, slots=True)
class Action:
    """One instruction of one stage for one chunk.

    F and B compute. SF sends activations to the next layer range of the model and RF receives them from the previous one; SB and
    RB do the same for gradients in the other direction. H computes output head and loss of a chunk, forward and backward, on a
    stage before the last one; the forward of a chunk without H on the last stage includes them. layer_range: index of one of the
    stage's (several with interleaving); for H and its messages RF and SB, the number of these, since the head comes after all
    layer ranges. lenders: (stage, position) of ranks that would idle and take part in the chunk's tokens (lending: SPPO's
    multiplexed sequence partitioning).
    """

    kind: ActionKind
    stage: int
    chunk: int
    layer_range: int = 0
    lenders: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        layer_range = f".{self.layer_range}" if self.layer_range else ""
        lenders = "@" + ",".join(f"{stage}:{position}" for stage, position in self.lenders) if self.lenders else ""
        return f"{self.stage}{layer_range}{self.kind}{self.chunk}{lenders}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parses an action, for example "2F0", "2SB0", "2.1F0" or "2F0@3:0,3:1"."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action; write STAGE[.LAYER_RANGE]KIND CHUNK[@STAGE:POSITION,...] without blanks, for "
                f"example '2F0' or '2.1F0@3:0', with KIND one of {', '.join(ACTION_KINDS)}"
            )
        stage, layer_range, kind, chunk, lenders = match.groups()
        pairs = [pair.split(":") for pair in lenders.split(",")] if lenders else []
        return cls(
            kind=kind,  # type: ignore[arg-type]
            stage=int(stage),
            chunk=int(chunk),
            layer_range=int(layer_range or 0),
            lenders=tuple((int(stage), int(position)) for stage, position in pairs),
        )


@dataclass(frozen=True, slots=True)
class TensorShare:
    """Shares of a chunk's tokens whose saved tensors of one class are recomputed, offloaded or kept; they sum to 1.

    The shares are consecutive token ranges in the order of the fields, from the front of the chunk on.
    """

    tensor_class: TensorClass
    recompute: float = 0.0
    host: float = 0.0
    device: float = 0.0

    @property
    def total(self) -> float:
        return self.recompute + self.host + self.device

    def cuts(self, num_tokens: int) -> tuple[int, int]:
        """Returns the token indices at which the recomputed and the host share end; the device has the rest."""
        recomputed, on_host = self.recompute * num_tokens, (self.recompute + self.host) * num_tokens
        return min(num_tokens, round(recomputed)), min(num_tokens, round(on_host))


_ON_DEVICE = {tensor_class: TensorShare(tensor_class, device=1.0) for tensor_class in TENSOR_CLASSES}


@dataclass(frozen=True, slots=True)
class LayerPolicy:
    """Shares of every class of one layer's saved tensors. A class without a share stays on the device.

    head_pieces: number of pieces of the layer's KV heads in which attention runs; with several, Q, K and V are recomputed.
    """

    shares: tuple[TensorShare, ...] = ()
    head_pieces: int = 1

    def share(self, tensor_class: TensorClass) -> TensorShare:
        """Returns the share of one class; by default everything on the device."""
        for share in self.shares:
            if share.tensor_class == tensor_class:
                return share
        return _ON_DEVICE[tensor_class]

    @property
    def keeps_everything(self) -> bool:
        return all(share.device == share.total for share in self.shares)


# tokens per tile of the loss, and of everything if memory is short
LEAST_TILE_TOKENS = 2048
# tokens per tile of norms and MLPs, chosen by memory
TILE_SIZES = (8192, 4096, LEAST_TILE_TOKENS)


def small_tile(tile_tokens: int) -> int:
    """Returns tokens per tile of the loss, and of everything if memory is short, for this `tile_tokens`; 0: untiled."""
    return min(tile_tokens, LEAST_TILE_TOKENS)


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """Policies of one chunk on one layer range, layer by layer; layers beyond the list keep everything.

    tile_tokens: tokens per tile of norms and MLP; the loss has tiles of at most `LEAST_TILE_TOKENS`, since logits are wide. 0:
    untiled. leaving_layers: number of layers whose tensors may be on their way to the host at the same time. If there are more
    than one, the last of them may still be leaving during the next backward; a forward waits for them first.
    """

    chunk: int
    layer_range: int = 0
    layers: tuple[LayerPolicy, ...] = ()
    tile_tokens: int = 0
    leaving_layers: int = 1

    @property
    def loss_tile_tokens(self) -> int:
        """Tokens per tile of the loss; 0: untiled."""
        return small_tile(self.tile_tokens)


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Contiguous decoder layers [first_layer, first_layer + num_layers)."""

    first_layer: int
    num_layers: int


# ascending ranges [begin, end) of a sequence's tokens that see each other both ways, as those of an image do in some models
Blocks = tuple[tuple[int, int], ...]


class TowerWork(NamedTuple):
    """Work of towers for an image, or for a step in time of a video, whose tokens are [start, stop) of their sequence.

    num_parts: tiles whose patches see each other. patches: those of each part.
    """

    start: int
    stop: int
    num_parts: int
    patches: int
    num_features: int


# for every image of a sequence, in order
Media = tuple[TowerWork, ...]


class TowerRun(NamedTuple):
    """Run of a group's towers for an image, or for a step in time of a video, in a chunk with a token of it."""

    chunk: int
    sequence: int
    # in the media of the sequence
    number: int
    # 1: its graph waits for the chunk's backward; 0: a trained tower runs once more there
    keeps: int = 1
    # rank of the group that runs it for all; -1: every rank with tokens of it runs it
    rank: int = -1


# layer ranges of every stage (several with interleaving)
Ranges = tuple[tuple[LayerRange, ...], ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers, actions and activation policies of one stage for one sequence group. A chunk without a policy keeps everything."""

    stage: int
    layer_ranges: tuple[LayerRange, ...]
    actions: tuple[Action, ...]
    activations: tuple[ActivationPolicy, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(layer_range.num_layers for layer_range in self.layer_ranges)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The way in which `degree` ranks share attention: blocks of `ulysses` neighbours split heads, and blocks form a ring.

    One block of all ranks is plain Ulysses; blocks of one rank are a plain ring.
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
    """Ranks that share the tokens of their chunks."""

    # within a stage (the "sp" axis), not over the job
    positions: tuple[int, ...]
    method: Method
    chunks: tuple[Chunk, ...]
    stages: tuple[StagePlan, ...]
    # number of neighbours that split heads within each block of the ring, only for method "hybrid"
    ulysses_degree: int = 0
    # all images of all chunks; (): there are none, or the plan does not know them, and towers keep what the running step has room
    # for
    towers: tuple[TowerRun, ...] = ()

    @classmethod
    def of(
        cls, shape: GroupShape, positions: Sequence[int], chunks: tuple[Chunk, ...], stages: tuple[StagePlan, ...] = ()
    ) -> SequenceGroup:
        """Makes a group of the ranks at these positions, which share attention in this shape."""
        ulysses_degree = shape.ulysses if shape.method == "hybrid" else 0
        return cls(tuple(positions), shape.method, chunks, stages, ulysses_degree)

    @property
    def degree(self) -> int:
        return len(self.positions)

    @property
    def head_stages(self) -> dict[int, int]:
        """Returns the stage that runs the output head of each chunk, in the order of these stages, without the last stage's."""
        if len(self.stages) < 2:
            return {}
        return {action.chunk: stage.stage for stage in self.stages for action in stage.actions if action.kind == "H"}

    @property
    def shape(self) -> GroupShape:
        """Degree and method together; raises ValueError for a hybrid whose blocks do not divide its ranks."""
        ulysses = {"local": 1, "ulysses": self.degree, "ring": 1, "hybrid": self.ulysses_degree}[self.method]
        if ulysses < 1 or self.degree % ulysses:
            raise ValueError(
                f"a hybrid group of {self.degree} ranks cannot have blocks of {ulysses} ranks; ulysses_degree must divide "
                f"{self.degree}"
            )
        return GroupShape(self.degree, ulysses)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def dealt(self, chunk: Chunk) -> dict[tuple[int, int], int]:
        """Returns the rank of the group that runs each image of a chunk, by sequence and number.

        Empty if every rank runs the images of its own tokens.
        """
        return {(run.sequence, run.number): run.rank for run in self.towers if run.chunk == chunk.index and run.rank >= 0}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequence groups that run at the same time. Ranks that share parameters start and end it together, but not with turns."""

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
    """Predicted time and memory of a plan, and how the plan was found. Not part of the plan's digest."""

    # seconds without gathers of sharded weights
    step_s: float = 0.0
    # no plan of these sequences takes fewer seconds, gathers included
    lower_bound_s: float = 0.0
    peak_bytes: int = 0
    host_bytes: int = 0
    solve_s: float = 0.0
    solver: str = ""
    # source of the cost coefficients ("default" until something was measured)
    cost_source: str = "default"
    # seconds of gathers, counted on top while the plan was chosen
    gathers_s: float = 0.0

    @property
    def counted_s(self) -> float:
        """Seconds by which plans are compared."""
        return self.step_s + self.gathers_s

    @property
    def gap(self) -> float:
        """Counted seconds above the lower bound, as a share of it; 0 without a bound."""
        return max(0.0, self.counted_s / self.lower_bound_s - 1) if self.lower_bound_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepSequences:
    """The sequences of a step: their tokens, and the blocks and images of each; (): no sequence has any."""

    lengths: tuple[int, ...]
    blocks: tuple[Blocks, ...] = ()
    media: tuple[Media, ...] = ()
    # whether any rank of a group may run an image, or those alone that have tokens of it
    deals_images: bool = True


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's path through a step: its group and stage in every micro-batch in which it takes part."""

    rank: int
    step: int
    parameters: Parameters
    rounds: tuple[tuple[SequenceGroup, StagePlan], ...]
    # property of the whole plan, which a rank cannot derive from its own path
    forwards_first: bool = False
    # index in `rounds` of every pass (F, B and H) in running order; (): one round after the other
    turns: tuple[int, ...] = ()
    # those of the plan
    blocks: tuple[Blocks, ...] = ()

    def blocks_of(self, chunk: Chunk) -> tuple[Blocks, ...]:
        """Returns the blocks of each document of a chunk; () if none of them has any."""
        found = tuple(self.blocks[span.sequence] for span in chunk.spans) if self.blocks else ()
        return found if any(found) else ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that all ranks do for one optimizer update. `rank = stage * ranks_per_stage + position`."""

    step: int
    lengths: tuple[int, ...]
    num_stages: int
    ranks_per_stage: int
    parameters: Parameters
    micro_batches: tuple[MicroBatch, ...]
    estimate: Estimate = Estimate()
    # with sharded parameters, the number of consecutive positions that share one copy of them and run every micro-batch
    # together; 0: all positions of a stage
    shard_ranks: int = 0
    # with parameters that are gathered per node, the number of consecutive positions on one node; 0 otherwise
    node_ranks: int = 0
    # one schedule through the step: for every stage, the micro-batch of each of its passes (F, B and H) in running order, so that
    # a micro-batch begins while those before it still drain; (): one micro-batch after the other
    turns: tuple[tuple[int, ...], ...] = ()
    # the blocks of every sequence, in which no slice ends; (): no sequence has any
    blocks: tuple[Blocks, ...] = ()
    # the images of every sequence, whose towers cost seconds; (): no sequence has any
    media: tuple[Media, ...] = ()

    @property
    def block_ranks(self) -> int:
        """Number of consecutive positions that share one copy of the parameters."""
        return 1 if self.parameters == "replicated" else self.shard_ranks or self.ranks_per_stage

    @property
    def meeting_ranks(self) -> int:
        """Number of consecutive positions that meet in every pass if any do (`meets_in_every_pass`)."""
        return self.node_ranks if keeps_node_copies(self.parameters) else self.block_ranks

    @property
    def sequences(self) -> StepSequences:
        return StepSequences(self.lengths, self.blocks, self.media)

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.ranks_per_stage

    @property
    def layout(self) -> str:
        """The layouts of all micro-batches in order, for example "<2>,<1,1>"."""
        return ",".join(micro_batch.layout for micro_batch in self.micro_batches)

    @property
    def folded_layouts(self) -> tuple[str, ...]:
        """Group degrees of equal neighbouring micro-batches, repeats counted, for example "<32,8x4>" and "<1x64> x3"."""
        layouts = [
            ",".join(
                _times(str(degree), "x", len(list(same)))
                for degree, same in groupby(sorted((group.degree for group in micro_batch.groups), reverse=True))
            )
            for micro_batch in self.micro_batches
        ]
        return tuple(_times(f"<{layout}>", " x", len(list(same))) for layout, same in groupby(layouts))

    @property
    def folded_layout(self) -> str:
        """All `folded_layouts` in one line: "<32,8x4> <1x64> x3" for four micro-batches."""
        return " ".join(self.folded_layouts)

    def in_step(self, micro_batch: MicroBatch) -> tuple[tuple[int, ...], ...]:
        """Returns sets of groups of a micro-batch, by index, that must run the same order of forwards and backwards.

        If ranks of a block meet in every pass (`meets_in_every_pass`), its groups wait for one another there, as do the groups of
        two blocks that a group spans.
        """
        groups = micro_batch.groups
        if not meets_in_every_pass(self.parameters) or len(groups) == 1:
            return tuple((place,) for place in range(len(groups)))
        block_ranks = self.meeting_ranks
        # for each block, the first block that is in step with it
        first = list(range(self.ranks_per_stage // block_ranks))
        for group in groups:
            own = {first[position // block_ranks] for position in group.positions}
            if len(own) > 1:
                first = [min(own) if each in own else each for each in first]
        found: dict[int, list[int]] = {}
        for place, group in enumerate(groups):
            found.setdefault(first[group.positions[0] // block_ranks], []).append(place)
        return tuple(map(tuple, found.values()))

    @property
    def forwards_first(self) -> bool:
        """Whether every rank runs all its forwards first, without waiting for another rank's backward."""
        if self.num_stages > 1 or len(self.micro_batches) > 1:
            return False
        kinds = ("".join(action.kind for action in group.stages[0].actions) for group in self.micro_batches[0].groups)
        return all(each.rfind("F") < each.find("B") for each in kinds)

    def place(self, rank: int) -> tuple[int, int]:
        """Returns stage and position of global rank `rank`."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not in this plan, which has {self.num_ranks} ranks")
        return divmod(rank, self.ranks_per_stage)

    def for_rank(self, rank: int) -> RankPlan:
        """Returns the group and stage of global rank `rank` in each of its micro-batches, in order."""
        stage, position = self.place(rank)
        found = [
            (index, (group, group.stages[stage]))
            for index, micro_batch in enumerate(self.micro_batches)
            for group in micro_batch.groups
            if position in group.positions
        ]
        rounds = {index: place for place, (index, _) in enumerate(found)}
        turns = tuple(rounds[index] for index in self.turns[stage] if index in rounds) if self.turns else ()
        return RankPlan(rank, self.step, self.parameters, tuple(own for _, own in found), self.forwards_first, turns, self.blocks)


def _times(text: str, sign: str, count: int) -> str:
    return f"{text}{sign}{count}" if count > 1 else text


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
