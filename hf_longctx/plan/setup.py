"""The setup of a run or a forecast: the numbers with which planning starts.

A run measures its ranks (`hf/start/setup.py`), a forecast assumes them (`sim/scenario.py`). Both state the user's settings as
`Wishes`. From there on every number is decided here, once: the places of states and layers, the number of pipeline stages, the
sharding of parameters, the tokens of a rank, and the longest sequence. The same formulas find changes that would allow a longer
one. With NCCL every communicator takes device memory; with gloo, on CPU devices, none does.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

from hf_longctx.plan.core.settings import (
    GENERIC_GPU,
    ActivationBudget,
    ClusterSpec,
    GroupMethod,
    PlannerConfig,
    default_degrees,
    usable_share_bytes,
)
from hf_longctx.plan.core.types import (
    GroupShape,
    Parameters,
    Ranges,
    StepPlan,
    frees_every_round,
    gathers_every_pass,
    keeps_node_copies,
)
from hf_longctx.plan.cost.cost_model import CostModel, block_sizes
from hf_longctx.plan.cost.traffic import group_shapes, plainest_shape
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import may_rerun, most_tokens
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.memory.stage import node_bytes
from hf_longctx.plan.memory.teacher import TeacherBytes
from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec, PackedSpec, split_adapters
from hf_longctx.plan.pipeline.search import NotFaster
from hf_longctx.plan.pipeline.stages import balanced_ranges, layer_ranges, stage_layers
from hf_longctx.plan.planner import plan_step, step_bound_s
from hf_longctx.plan.policies.fit import longest_alone
from hf_longctx.plan.predict.planning import counted_step_s
from hf_longctx.plan.stage_count import StageOption, StageOptions, StageSetup, stage_counts, stage_options

Place = Literal["device", "host", "auto"]

_GIB = 2**30
# slices are tried for sequences of up to so many times the tokens of one chunk, unless their length has a limit
_MOST_MORE = 4
# stop bisecting for the longest sequence that can be planned at a hundredth of its length
_ROOM_PRECISION = 100
# ways to share parameters among the ranks of a stage by choice, from most gathers and most room for activations to least
SHARINGS: tuple[Parameters, ...] = ("sharded", "gathered_per_node", "gathered_per_step", "gathered_per_round", "replicated")
# parameters are replicated by choice only if a rank still has room for this many tokens
_LEAST_TOKENS = 512
# bytes of a communicator of NCCL: 544 to 688 MB were measured on four A100 (NVIDIA/nccl issue 964), and a single allocation of
# 512 MiB (issue 2363)
COMMUNICATOR_BYTES = 2**29
# hidden states and gradients, within the pipeline and from its one end to the other
_LANES_EACH_WAY = 2
# a remedy holds so many times the tokens at least
_LEAST_GAIN = 1.05
# rank of the adapters that refusals propose
_LORA_RANK = 16
_MAX_DOUBLINGS = 10
# most pairs of settings that a refusal offers
_MOST_PAIRS = 3
# after this many numbers of stages in a row that are slower than the ones before them, no more are tried
_MOST_SLOWER = 2
# bytes of an element in fp32, and in bf16
_WIDE, _HALF = 4, 2


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one kind of device for one model; `ByteModel` counts whatever was not measured on it."""

    model: ModelSpec
    device_bytes: int
    # bytes for states, saved tensors and workspace
    usable_bytes: int
    # bytes that a token saves for backward; they decide how many tokens fit only where they were measured
    saved_bytes_per_token: int
    # measured bytes of weights, gradients and optimizer states (0: nothing was measured)
    state_bytes_per_parameter: int = 0
    # rank of the model's adapters, for reports (0: all weights are trained)
    lora_rank: int = 0
    # host memory of each rank for saved tensors (0: none is counted), and the most that they take of it
    host_bytes: int = 0
    # plans recompute, offload and tile nothing, for example because the measured bytes per token include recomputation
    keeps_everything: bool = True
    most_offloaded: int = 2**62
    # a frozen model whose forwards run under the plans of this one, and which ranks share like it
    teacher: ModelSpec | None = None

    @classmethod
    def by_formula(cls, model: ModelSpec, device_bytes: int, is_expandable: bool = False) -> DeviceMemory:
        """Memory without measurements, by formula. is_expandable: see `usable_share_bytes`."""
        return cls(model, device_bytes, usable_share_bytes(device_bytes, is_expandable), saved_token_bytes(model))

    @property
    def is_measured(self) -> bool:
        return self.state_bytes_per_parameter > 0

    @property
    def byte_model(self) -> ByteModel:
        return ByteModel(self.model)

    def state_bytes(self, parameters: Parameters, shard_ranks: int, ranges: Ranges = ()) -> int:
        """Bytes that weights, gradients and optimizer states take on a rank, including weights gathered next to their shards.

        A teacher's weights are included. ranges: layers of every stage, of which the one with the most bytes counts (empty: there
        is one stage).
        """
        return self._own_state_bytes(parameters, shard_ranks, ranges) + self.teacher_bytes(parameters, shard_ranks, ranges)

    def teacher_bytes(self, parameters: Parameters, shard_ranks: int, ranges: Ranges = ()) -> int:
        """Bytes of the weights of a teacher on a rank; 0 without one."""
        if self.teacher is None:
            return 0
        return TeacherBytes(self.teacher, parameters, shard_ranks).held(max(1, len(ranges)))

    def taught_tokens(self, parameters: Parameters, shard_ranks: int, is_shared: bool, ranges: Ranges) -> int:
        """Most tokens of a chunk on a rank that the forwards of a teacher hold besides the states; no limit without one."""
        if self.teacher is None:
            return sys.maxsize
        left_bytes = self.left_bytes(parameters, shard_ranks, ranges)
        return TeacherBytes(self.teacher, parameters, shard_ranks).most_tokens(left_bytes, is_shared, max(1, len(ranges)))

    def _own_state_bytes(self, parameters: Parameters, shard_ranks: int, ranges: Ranges) -> int:
        if self.lora_rank or not self.is_measured:
            if len(ranges) > 1:
                return self.byte_model.most_states(ranges, parameters, shard_ranks)
            return self.byte_model.states(parameters, shard_ranks)
        whole = self.model.num_parameters * self.state_bytes_per_parameter
        if parameters == "replicated":
            return whole
        # weights that "sharded" gathers layer by layer are part of the measured bytes
        gathered = self.model.num_parameters * self.model.bytes_per_element * (not gathers_every_pass(parameters))
        of_node = node_bytes(self.model, self.model.num_layers, True, True, parameters, shard_ranks)
        return -(-whole // shard_ranks) + gathered + of_node

    def host_states(self, parameters: Parameters, shard_ranks: int, ranges: Ranges = ()) -> int:
        """Bytes that optimizer states, and shards of layers, take in the host memory of a rank."""
        if len(ranges) > 1:
            return self.byte_model.most_states(ranges, parameters, shard_ranks, on_host=True)
        return self.byte_model.host_states(parameters, shard_ranks)

    def resting_bytes(self, parameters: Parameters, shard_ranks: int, ranges: Ranges = ()) -> int:
        """Bytes of the states on a rank when nothing computes, if shards of layers lie on the host otherwise; else 0."""
        return self.byte_model.resting(parameters, shard_ranks, ranges)

    def left_bytes(self, parameters: Parameters, shard_ranks: int, ranges: Ranges = ()) -> int:
        """Bytes that the states leave on a rank; 0 if they do not fit when nothing computes."""
        if self.resting_bytes(parameters, shard_ranks, ranges) > self.usable_bytes:
            return 0
        return max(0, self.usable_bytes - self.state_bytes(parameters, shard_ranks, ranges))

    def tokens_per_rank(self, parameters: Parameters, shard_ranks: int, is_shared: bool, ranges: Ranges = ()) -> int:
        """Most tokens that a rank can hold besides the states if everything is kept; 0 if the states alone do not fit.

        is_shared: ranks may share sequences.
        """
        left_bytes = self.left_bytes(parameters, shard_ranks, ranges)
        if self.is_measured:
            return left_bytes // self.saved_bytes_per_token
        return self.byte_model.kept_tokens(left_bytes, is_shared)

    def kept_bytes(self, num_tokens: int, is_shared: bool) -> int:
        """Bytes besides the states on a rank that holds `num_tokens` tokens with everything kept."""
        if self.is_measured:
            return num_tokens * self.saved_bytes_per_token
        return self.byte_model.kept_bytes(num_tokens, is_shared)


@dataclass(frozen=True, slots=True)
class Placement:
    """A job's use of its ranks; together with the memory of a rank it decides how long a sequence may be."""

    num_ranks: int
    parameters: Parameters
    shard_ranks: int
    degrees: tuple[int, ...]
    method: GroupMethod
    # a limit set by the user, below what memory allows (0: none)
    max_tokens_per_rank: int = 0
    ranks_per_node: int = 8
    # most tokens of a sequence by settings, or by positions that nothing extends (0: no limit)
    max_length: int = 0
    # tokens of a tile (None: as the memory says)
    tile_tokens: int | None = None
    # plans that keep everything follow `max_tokens_per_rank`, even beyond memory
    trusts_limit: bool = False
    # layers of every pipeline stage (empty: one stage)
    ranges: Ranges = ()
    # share of the output head's work that each stage does (empty: the last stage does all of it)
    output_shares: tuple[float, ...] = ()

    @property
    def is_shared(self) -> bool:
        """Whether ranks may share sequences."""
        return self.degrees[-1] > 1

    @property
    def is_pipeline(self) -> bool:
        return len(self.ranges) > 1

    @property
    def ranks_per_stage(self) -> int:
        return self.num_ranks // max(1, len(self.ranges))

    @property
    def sharing(self) -> tuple[Parameters, int, Ranges]:
        """Sharding of the states, as arguments for methods of `DeviceMemory`."""
        return self.parameters, self.shard_ranks, self.ranges

    def spans_nodes(self, shard_ranks: int) -> bool:
        """Whether so many ranks with shards of one copy of the weights are several whole nodes, of two ranks or more."""
        return shard_ranks > self.ranks_per_node > 1 and not shard_ranks % self.ranks_per_node

    def largest_shape(self, model: ModelSpec) -> GroupShape:
        """The shape of the largest group, in which the longest sequence is counted."""
        cluster = ClusterSpec(self.num_ranks, self.ranks_per_node, GENERIC_GPU)
        return plainest_shape(self.degrees[-1], self.method, model, cluster)

    def reruns(self, model: ModelSpec) -> bool:
        """Whether layers may run once more to make the next layer's input."""
        return not self.is_pipeline and may_rerun(model, self.parameters)

    def budget(self, memory: DeviceMemory) -> ActivationBudget | None:
        """Bytes that policies may use besides the states; None if everything is kept."""
        if memory.keeps_everything:
            return None
        host_bytes = min(memory.host_bytes, memory.most_offloaded)
        return memory.byte_model.budget(memory.left_bytes(*self.sharing), host_bytes, self.tile_tokens, self.is_shared)

    def kept_tokens(self, memory: DeviceMemory) -> int:
        """Most tokens on a rank with everything kept."""
        return self._bounded(memory.tokens_per_rank(self.parameters, self.shard_ranks, self.is_shared, self.ranges), memory)

    def tokens_per_rank(self, memory: DeviceMemory) -> int:
        """Most tokens on a rank that a plan may use; 0 if there is no room for one."""
        if self.trusts_limit and self.max_tokens_per_rank and memory.keeps_everything:
            return self.max_tokens_per_rank
        budget, model = self.budget(memory), memory.model
        if budget is None:
            return self.kept_tokens(memory)
        shape = self.largest_shape(model)
        most = most_tokens(
            model,
            budget.device_bytes,
            budget.host_bytes,
            budget.tile_tokens,
            reruns=self.reruns(model),
            # pipelines run slices, which are not cut
            head_pieces=1 if self.is_pipeline else model.head_pieces(shape.ulysses),
            is_shared=self.is_shared,
            num_blocks=shape.num_blocks,
            block_ranks=shape.ulysses,
        )
        return self._bounded(max(budget.kept_tokens, most), memory)

    def _bounded(self, fitting: int, memory: DeviceMemory) -> int:
        parameters, shard_ranks, ranges = self.sharing
        fitting = min(fitting, memory.taught_tokens(parameters, shard_ranks, self.is_shared, ranges))
        return min(fitting, self.max_tokens_per_rank) if self.max_tokens_per_rank else fitting

    def room_tokens(self, memory: DeviceMemory) -> int:
        """Tokens of the longest sequence that memory holds, alone in a group of the largest degree.

        Beyond `max_length` nothing is tried but a single chunk.
        """
        room, budget = self.degrees[-1] * self.tokens_per_rank(memory), self.budget(memory)
        # a limit set by the user holds for sequences that are alone, too
        if budget is None or not room or self.is_pipeline or self.max_tokens_per_rank or room >= self.max_length > 0:
            return room
        most, shape = self.max_length or _MOST_MORE * room, self.largest_shape(memory.model)
        if memory.teacher is not None:
            taught = TeacherBytes(memory.teacher, self.parameters, self.shard_ranks)
            sliced = taught.most_sliced(memory.left_bytes(*self.sharing), self.tokens_per_rank(memory), shape)
            most = max(room, min(most, self.degrees[-1] * sliced))
        return longest_alone(memory.model, budget, shape, self.parameters, self.shard_ranks, room, most)

    def longest_tokens(self, memory: DeviceMemory) -> int:
        """Tokens of the longest sequence that fits and is allowed."""
        room = self.room_tokens(memory)
        return min(room, self.max_length) if self.max_length else room


@dataclass(frozen=True, slots=True)
class Measured:
    """Facts about a model and its ranks before any choice: a run measures them, a forecast assumes them."""

    # method, parameters and shards are still open
    costs: CostModel
    # memory of a rank that holds nothing yet, the least of all ranks
    memory: DeviceMemory
    # usable bytes were given or measured, and are no share of the device
    is_given: bool = False
    # process groups take device memory
    has_communicators: bool = False
    # weights of a reference model, which ranks share as they share the model
    reference_bytes: int = 0
    # torch's allocator has expandable segments
    is_expandable: bool = False

    def memory_on(self, placement: Placement, costs: CostModel, lends: bool = False) -> DeviceMemory:
        """Memory beside communicators, a reference model, and the parts of the model on the host."""
        teacher = None if costs.teacher is None else costs.teacher.model
        usable, memory = self.memory.usable_bytes, replace(self.memory, model=costs.model, teacher=teacher)
        if self.has_communicators:
            blocks, num_stages = block_sizes(placement.degrees, costs), max(1, len(placement.ranges))
            ways = placement.shard_ranks, num_stages, lends, costs.model.num_head_stages, keeps_node_copies(placement.parameters)
            number = num_communicators(placement.num_ranks, blocks, *ways)
            given = max(0, usable - number * COMMUNICATOR_BYTES)
            usable = given if self.is_given else min(usable, usable_bytes(memory.device_bytes, number, self.is_expandable))
        if self.reference_bytes:
            # it stays on the device
            whole = replace(memory, model=replace(costs.model, layers_on_host=False)).state_bytes(*placement.sharing)
            usable -= self.reference_bytes * whole // max(1, memory.byte_model.states())
        host_bytes = memory.host_bytes - memory.host_states(*placement.sharing)
        return replace(memory, usable_bytes=usable, host_bytes=max(0, host_bytes))


@dataclass(frozen=True, slots=True)
class Wishes:
    """Wishes of the user: settings of a run, or options of a forecast."""

    # settings of the planner; memory, stages and tokens are filled in here
    planner: PlannerConfig
    # all degrees that groups may have, ranges of stages only if these were loaded, and 0 shard_ranks for all ranks of a stage
    placement: Placement
    # replicated parameters are sharded if only that holds the longest sequence; in stages they are shared as is fastest
    may_shard: bool = False
    # with `may_shard`, they are shared as is fastest on one stage too, in one of these ways
    shares_fastest: bool = False
    sharings: tuple[Parameters, ...] = SHARINGS
    expert_ranks: int = 0
    # "auto": on the host if the longest sequence needs that
    optimizer_states: Place = "device"
    layer_weights: Place = "device"
    # "auto": as many as are fastest
    stages: int | Literal["auto"] = 1
    # layer ranges of a stage to try besides a single one
    interleave: int = 1
    lend_stages: bool = False
    # stages may share the work of the output head (`stage_layers`)
    spread_head: bool = False


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the sequences to train, read only if a choice needs them; reading may be collective."""

    # tokens of the longest one (0: unknown)
    longest: Callable[[], int]
    # lengths of some, spread over all of them
    sample: Callable[[], Sequence[int]] = tuple
    # lengths of one step, given a sample
    step: Callable[[Sequence[int]], Sequence[int]] = tuple
    # tokens of a sequence that a number of stages chosen here must hold (0: none)
    must_hold: int = 0


# returns the values of all ranks, in their order; collective
Gather = Callable[[Any], list[Any]]


def alone(value: Any) -> list[Any]:
    """Values of all ranks in a run of one rank."""
    return [value]


@dataclass(frozen=True, slots=True)
class Setup:
    """The numbers with which planning starts."""

    # before anything is measured in the run
    costs: CostModel
    planner: PlannerConfig
    # memory of a rank, beside whatever lies on its host
    memory: DeviceMemory
    placement: Placement
    # most tokens of a sequence that memory holds
    room_tokens: int
    # sentences about choices made here
    notes: tuple[str, ...] = ()
    # the last stage does all work of the output head although other stages may share it, since that is better
    keeps_head: bool = False
    # token ids that stand for padding, images, sound or video, which no row may have
    placeholders: tuple[int, ...] = ()
    # numbers of stages that were tried; none if the user gave one
    stage_options: StageOptions = field(default_factory=StageOptions, compare=False, repr=False)
    # the plan of a step that was made to choose how weights are shared, with its costs and settings; none if that had to beat
    # another one, for which the search looks at other candidates
    planned: StageSetup | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, costs: CostModel, memory: DeviceMemory, placement: Placement, planner: PlannerConfig, lends: bool = False
    ) -> Setup:
        """The setup by formula; without room its planner has limits for one token. lends: stages lend their ranks."""
        tokens, room = placement.tokens_per_rank(memory), placement.room_tokens(memory)
        planner = replace(
            planner,
            tokens_per_rank=max(1, tokens),
            activations=placement.budget(memory),
            degrees=placement.degrees,
            stages=placement.ranges if placement.is_pipeline else (),
            output_shares=placement.output_shares,
            lend_stages=lends,
            longest_tokens=room if room > tokens * placement.degrees[-1] else 0,
        )
        return cls(costs, planner, memory, placement, room)

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence by the settings; 0: no limit."""
        return self.placement.max_length

    @property
    def ranges(self) -> Ranges:
        """Layer ranges of every pipeline stage; without a pipeline there is one stage."""
        return self.placement.ranges

    @property
    def num_stages(self) -> int:
        return len(self.ranges)

    @property
    def teacher_ranges(self) -> Ranges:
        """Layer ranges of the teacher; raises ValueError if it has fewer layers than there are ranges."""
        assert self.costs.teacher is not None
        num_ranges = len(self.ranges[0]) if self.ranges else 1
        return layer_ranges(self.costs.teacher.model.num_layers, max(1, self.num_stages), num_ranges)

    def in_one_micro_batch(self) -> Setup:
        """The setup of a run whose steps are one micro-batch, in which nothing is cut into slices."""
        planner = replace(self.planner, one_micro_batch=True)
        return replace(self, planner=planner, room_tokens=self.room_tokens if self.num_stages > 1 else planner.room_tokens)


def build_setup(
    measured: Measured, wishes: Wishes, lengths: Lengths, check: Callable[[Setup, Measured], None], gather: Gather = alone
) -> Setup:
    """Chooses degrees, stages, places of states and layers, and room. Collective over the ranks of `gather`.

    check: raises ValueError, in the words of a run or a forecast, for an impossible setup. Also raises ValueError if neither
    place of "auto" passes the check.
    """
    choices = _Choices(measured, wishes, replace(lengths, longest=cache(lengths.longest)), check, gather)
    return choices.in_place("layer_weights", lambda each: each.in_place("optimizer_states", _Choices.in_stages))


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choices that are still open; each method makes one, and calls the next for the others."""

    measured: Measured
    wishes: Wishes
    lengths: Lengths
    check: Callable[[Setup, Measured], None]
    gather: Gather

    def in_place(self, setting: str, then: Callable[[_Choices], Setup]) -> Setup:
        """The setup with optimizer states, or shards of layers, on the device or in host memory. Collective."""
        if getattr(self.wishes, setting) != "auto":
            return then(self)
        found: list[Setup] = []
        rooms: list[int] = []
        problems: list[str] = []
        for place in ("device", "host"):
            problem = ""
            try:
                # a limit that the user sets is trusted elsewhere, so look at what memory alone holds
                free = replace(self.wishes.placement, max_tokens_per_rank=0)
                found.append(then(self._with(**{setting: place}, placement=free)))
            except ValueError as error:
                problem = str(error)
            rooms.append(min(self.gather(0 if problem else found[-1].room_tokens)))
            problems.append(problem)
        if not found:
            raise ValueError(f"{setting}='auto' finds no room. On the device: {problems[0]}. On the host: {problems[1]}")
        chosen = _HostPlace(self._wanted_tokens(found[0]), rooms[0], rooms[1], problems[1])
        setup = then(self._with(**{setting: "host" if chosen.on_host else "device"}))
        free_bytes = self.measured.memory.host_bytes
        line = chosen.layers_line() if setting == "layer_weights" else chosen.states_line(found[0], free_bytes)
        return replace(setup, notes=(*setup.notes, line))

    def _with(self, **wishes: Any) -> _Choices:
        return replace(self, wishes=replace(self.wishes, **wishes))

    def _wanted_tokens(self, setup: Setup) -> int:
        """Tokens of the longest sequence that the settings let a run train; collective."""
        wanted, limit = self.lengths.longest() or setup.costs.model.max_positions, self.wishes.placement.max_tokens_per_rank
        if setup.max_length:
            wanted = min(wanted, setup.max_length)
        return min(wanted, limit * setup.planner.degrees[-1] * setup.num_stages) if limit else wanted

    def in_stages(self) -> Setup:
        """The setup with the stages that the user asks for, or the number that is fastest for a step. Collective."""
        wishes, costs = self.wishes, self.measured.costs
        if wishes.shares_fastest:
            # now, by all ranks together, since they may plan different numbers of stages later
            self.lengths.longest()
        if (loaded := wishes.placement.ranges) or wishes.stages == 1:
            is_open = wishes.may_shard and (wishes.shares_fastest or len(loaded) > 1)
            step = self.lengths.step(self.lengths.sample()) if is_open else ()
            ranges = loaded or balanced_ranges(costs, 1, ())
            if shares := wishes.placement.output_shares:
                setup, _ = self._with_best_head(ranges, shares, ranges, step)
            else:
                setup, _ = self._on_stages(ranges, (), step)
            return _with_planned_room(self._agreed(setup))
        lengths, num_layers = self.lengths.sample(), costs.model.num_layers
        compares = wishes.may_shard or wishes.spread_head or wishes.stages == "auto" or wishes.interleave > 1
        step = self.lengths.step(lengths) if compares else ()
        if wishes.stages == "auto":
            counts = stage_counts(costs.cluster.num_ranks, num_layers, wishes.planner.degrees)
            # ranks that share one copy of the weights are of one stage
            shared = wishes.placement.shard_ranks or 1
            counts = [count for count in counts if costs.cluster.num_ranks // count % shared == 0]
        else:
            counts = [wishes.stages]
        numbers = dict.fromkeys((1, wishes.interleave))
        num_nodes = costs.cluster.num_ranks // costs.cluster.ranks_per_node
        ways: list[tuple[int, int]] = [(count, each) for count in counts for each in numbers if count * each <= num_layers]
        # ranks may have different devices and so different costs, so rank 0's ranges hold for all
        layers: dict[tuple[int, int], tuple[Ranges, tuple[float, ...]]]
        layers = self.gather({way: stage_layers(costs, *way, lengths, wishes.spread_head) for way in ways})[0]
        setups: dict[tuple[int, int], Setup] = {}

        def setup_of(count: int, num_ranges: int, most_s: float = math.inf) -> StageSetup:
            way = count, num_ranges
            # with too few layers, this says so
            ranges, output_shares = layers.get(way) or stage_layers(costs, *way, lengths, wishes.spread_head)
            if output_shares:
                alone = balanced_ranges(costs, count, lengths, num_ranges)
                setups[way], plan = self._with_best_head(ranges, output_shares, alone, step, most_s)
            else:
                setups[way], plan = self._on_stages(ranges, (), step, most_s)
            return StageSetup(setups[way].costs, setups[way].planner, plan=plan)

        def cutting_setup_of(count: int, num_ranges: int, _: float) -> StageSetup:
            found = setup_of(count, num_ranges)
            return replace(found, longest_tokens=_with_planned_room(setups[count, num_ranges]).room_tokens, plan=None)

        if wishes.stages != "auto" and wishes.interleave == 1:
            setup_of(wishes.stages, 1)
            return _with_planned_room(self._agreed(setups[wishes.stages, 1]))
        options, how = StageOptions(), (_MOST_SLOWER, wishes.interleave, num_nodes)
        # a number that does not hold the longest sequence must not drop another one
        prunes = wishes.may_shard or self.lengths.must_hold <= max(step, default=0)
        with suppress(ValueError):
            options = stage_options(step, counts, setup_of, *how, prunes)
        if not all(self.gather(bool(options.fitting))):
            # no number of stages holds the longest sequences, so these count as long as each may have them
            try:
                options = stage_options(step, counts, cutting_setup_of, *how, prunes=False)
            except ValueError:
                fewest = next(iter(setups.values()), None)
                if fewest is None or fewest.placement.tokens_per_rank(fewest.memory):
                    raise
                # the caller says how many bytes are missing
                return fewest
        planned: dict[int, Setup] = {}

        def with_planned_room(setup: Setup) -> Setup:
            # the setups live until the choice is made, and the search for their room takes longer than a plan
            if id(setup) not in planned:
                planned[id(setup)] = _with_planned_room(setup)
            return planned[id(setup)]

        options, best = self._holding(options, lambda *way: with_planned_room(setups[way]))
        # rank 0 decides for all; other ranks may have ended the search earlier, by the costs of other devices
        chosen = self.gather((best.num_stages, best.num_ranges))[0]
        if chosen not in setups:
            setup_of(*chosen)
        return replace(with_planned_room(self._agreed(setups[chosen])), stage_options=options)

    def _agreed(self, setup: Setup) -> Setup:
        """The setup with weights and head shared as on rank 0, since other devices may lead to another choice. Collective."""
        if not (self.wishes.may_shard or self.wishes.spread_head):
            return setup
        own = setup.placement.sharing[:2], (setup.ranges, setup.placement.output_shares)
        ((parameters, shard_ranks), layers), notes = self.gather((own, setup.notes))[0]
        if own == ((parameters, shard_ranks), layers):
            return setup
        placement = replace(self.wishes.placement, parameters=parameters, shard_ranks=shard_ranks)
        decided = self._with(placement=placement, may_shard=False)
        ranges, output_shares = layers
        return replace(decided._on_stages(ranges, output_shares, ())[0], notes=notes)

    def _holding(self, options: StageOptions, setup_of: Callable[[int, int], Setup]) -> tuple[StageOptions, StageOption]:
        """Drops options that are faster than the first one that holds `lengths.must_hold`; returns the others and that one.

        If none does, nothing is dropped, and the option with most room is returned. setup_of: the setup of a number of stages and
        of layer ranges, with its planned room.
        """
        needed, rooms = self.lengths.must_hold, list[int]()
        if not needed:
            return options, options.fitting[0]
        for number, option in enumerate(options.fitting):
            setup = setup_of(option.num_stages, option.num_ranges)
            if setup.room_tokens >= min(needed, setup.max_length or needed):
                why = "holds {:,} tokens of a sequence, and the longest one has {:,}"
                dropped = zip(options.fitting, rooms, strict=False)
                unfit = [(faster.num_stages, why.format(room, needed)) for faster, room in dropped]
                return replace(options, fitting=options.fitting[number:], unfit=(*options.unfit, *unfit)), option
            rooms.append(setup.room_tokens)
        return options, options.fitting[rooms.index(max(rooms))]

    def _with_best_head(
        self, ranges: Ranges, output_shares: tuple[float, ...], alone: Ranges, step: Sequence[int], most_s: float = math.inf
    ) -> tuple[Setup, StepPlan | None]:
        """The setup with these shares of the output head, or with all of it on the last stage if that is better.

        The head takes memory of other stages, too, which may leave no room, or less than the longest sequences need, or so little
        that a step takes longer. alone: layer ranges with all of the head on the last stage. Raises ValueError if neither has
        room.
        """
        try:
            spread = self._on_stages(ranges, output_shares, step, most_s)
        except ValueError:
            return _with_whole_head(self._on_stages(alone, (), step, most_s))
        except NotFaster as bound:
            try:
                return _with_whole_head(self._on_stages(alone, (), step, most_s))
            except NotFaster as other_bound:
                raise min(bound, other_bound, key=lambda each: each.least_s) from None
            except ValueError:
                raise bound from None
        needed = min(self.lengths.must_hold or sys.maxsize, spread[0].max_length or sys.maxsize)
        has_room = spread[0].room_tokens >= needed
        if has_room and not step:
            return spread
        spread_s = _counted_s(spread, step) if has_room else most_s
        try:
            other = self._on_stages(alone, (), step, spread_s)
        except (ValueError, NotFaster):
            return spread
        if has_room:
            is_better = other[0].room_tokens >= needed and _counted_s(other, step) < spread_s
        else:
            is_better = other[0].room_tokens > spread[0].room_tokens
        return _with_whole_head(other) if is_better else spread

    def _on_stages(
        self, ranges: Ranges, output_shares: tuple[float, ...], step: Sequence[int], most_s: float = math.inf
    ) -> tuple[Setup, StepPlan | None]:
        """The setup with these layer ranges on the stages, and the plan of a step of these lengths if it was made on the way.

        output_shares: see `Placement`. most_s: see `plan_step`.
        """
        wishes, measured, num_stages = self.wishes, self.measured, len(ranges)
        num_ranks, lends = wishes.placement.num_ranks // num_stages, wishes.lend_stages and num_stages > 1
        model, index, teacher = measured.costs.model, measured.costs.model.index, measured.costs.teacher
        per_node = wishes.placement.ranks_per_node
        teacher = None if teacher is None else replace(teacher, model=replace(teacher.model, node_ranks=per_node))
        model = replace(
            model,
            updates_on_host=wishes.optimizer_states == "host",
            layers_on_host=wishes.layer_weights == "host",
            node_ranks=per_node,
            keeps_all_stages=lends,
            num_head_stages=num_stages - next((stage for stage, share in enumerate(output_shares) if share), num_stages - 1),
            experts=replace(model.experts, num_ranks=wishes.expert_ranks or 1),
            index=index if index.is_empty else replace(index, most_ranks=wishes.placement.degrees[-1]),
        )
        placement = replace(
            wishes.placement,
            degrees=tuple(degree for degree in wishes.placement.degrees if degree <= num_ranks),
            ranges=ranges,
            output_shares=output_shares,
        )
        parameters, shard_ranks = shared_parameters(placement.parameters, placement.shard_ranks, num_ranks)
        method = _stage_method(measured.costs, num_ranks, placement) if num_stages > 1 else placement.method
        placement = replace(placement, parameters=parameters, shard_ranks=shard_ranks, method=method)
        if keeps_node_copies(parameters) and wishes.layer_weights == "host":
            raise ValueError(
                "layer_weights 'host' needs parameters 'sharded': nodes keep their copies of 'gathered_per_node' on the device; "
                "change one of them"
            )
        if keeps_node_copies(parameters) and not placement.spans_nodes(shard_ranks):
            raise ValueError(
                f"parameters 'gathered_per_node' keep a copy of the weights on every node, but the {shard_ranks} rank(s) that "
                f"share them are not several whole nodes of {per_node} rank(s); use 'sharded', or share them over more ranks"
            )

        def setup_on(placement: Placement) -> Setup:
            parameters, shard_ranks, _ = placement.sharing
            costs = replace(measured.costs, model=model, teacher=teacher, method=method)
            costs = replace(costs, parameters=parameters, shard_ranks=shard_ranks)
            if costs.measured_apart:
                # ranks with shards do not sum whole gradients
                costs = replace(costs, coefficients=replace(costs.coefficients, step_s=0.0))
            return Setup.of(costs, measured.memory_on(placement, costs, lends), placement, wishes.planner, lends)

        is_open = wishes.may_shard and (num_stages > 1 or wishes.shares_fastest)
        if is_open and num_ranks > 1 and step:
            return self._fastest_sharing(placement, setup_on, step, most_s)
        setup = setup_on(placement)
        if is_open and num_ranks == 1:
            where = "a stage is one rank" if num_stages > 1 else "there is one rank"
            setup = replace(setup, notes=(f"parameters are whole: {where}, which shares them with no other",))
        if wishes.may_shard and num_ranks > 1 and (why := _why_sharded(setup, num_ranks, self.lengths.longest(), setup_on)):
            setup = replace(setup_on(_sharded(placement, num_ranks)), notes=(why,))
        self.check(setup, measured)
        return setup, None

    def _fastest_sharing(
        self, placement: Placement, setup_on: Callable[[Placement], Setup], step: Sequence[int], most_s: float
    ) -> tuple[Setup, StepPlan | None]:
        """The setup with parameters shared in the way that is fastest for a step, gathers, sums and updates counted; its plan.

        In stages of several nodes, shards may also be those of one node, which gather inside it. Ways are planned in the order of
        their lower bounds, and each has to beat the fastest so far: gathers that take no time still make groups wait for one
        another, so that bounds alone do not decide. A way must also hold a sequence of `lengths.must_hold` tokens. Without any,
        the way with most room is taken, and no plan. Raises NotFaster if ways fit, and none takes less than `most_s`.
        """
        best: tuple[float, Setup, StepPlan, float] | None = None
        roomiest: Setup | None = None
        slower: NotFaster | None = None
        per_stage = placement.ranks_per_stage
        longest = min(self.lengths.must_hold, placement.max_length or sys.maxsize)
        ways: list[tuple[float, Setup]] = []
        for parameters, shared in self._sharing_ways(placement):
            setup = setup_on(replace(placement, parameters=parameters, shard_ranks=shared))
            with suppress(ValueError):
                self.check(setup, self.measured)
                if roomiest is None or setup.room_tokens > roomiest.room_tokens:
                    roomiest = setup
                if setup.memory.left_bytes(*setup.placement.sharing):
                    ways.append((step_bound_s(step, setup.costs, setup.planner), setup))
        for bound_s, setup in sorted(ways, key=lambda way: way[0]):
            limit_s = min(most_s, best[0] if best else math.inf)
            try:
                if bound_s >= limit_s:
                    raise NotFaster(bound_s)
                plan = plan_step(0, step, setup.costs, setup.planner, limit_s)
                counted_s = counted_step_s(plan, setup.costs)
                is_better = best is None or counted_s < best[0]
                if is_better and longest > max(step):
                    plan_step(0, [longest], setup.costs, setup.planner)
            except NotFaster as bound:
                slower = bound if slower is None or bound.least_s < slower.least_s else slower
                continue
            except ValueError:
                continue
            if is_better:
                best = counted_s, setup, plan, limit_s
        if best is None and slower is not None:
            raise slower
        if best is None:
            # the way with most room says best why nothing fits
            setup = roomiest or setup_on(_sharded(placement, self.wishes.placement.shard_ranks or per_stage))
            self.check(setup, self.measured)
            most = max(longest, *step)
            why = f"which leaves most room; no way to share them holds a step and its longest sequence, of {most:,} tokens"
        else:
            setup = best[1]
            if best[3] == math.inf:
                setup = replace(setup, planned=StageSetup(setup.costs, setup.planner, plan=best[2]))
            why = "which is fastest for a step among those that fit"
        name, own = setup.placement.parameters.replace("_", " "), setup.placement.shard_ranks
        name += f" over {own} ranks each" if 1 < own < per_stage else ""
        among = f"stages of {per_stage} ranks" if placement.is_pipeline else f"{per_stage} ranks"
        return replace(setup, notes=(f"parameters of {among} are {name}, {why}",)), best[2] if best else None

    def _sharing_ways(self, placement: Placement) -> Iterator[tuple[Parameters, int]]:
        """Ways to share the parameters of a stage, each with the ranks that share one copy."""
        per_stage, per_node, shard_ranks = placement.ranks_per_stage, placement.ranks_per_node, self.wishes.placement.shard_ranks
        is_open = placement.is_pipeline and not shard_ranks and self.wishes.expert_ranks <= 1
        has_node_shards = is_open and per_stage > per_node and per_stage % per_node == 0
        shards = (shard_ranks or per_stage, per_node) if has_node_shards else (shard_ranks or per_stage,)
        for parameters in self.wishes.sharings:
            # a run refuses these with several layer ranges
            if frees_every_round(parameters) and len(placement.ranges[0]) > 1:
                continue
            for own in (1,) if parameters == "replicated" else shards:
                if not keeps_node_copies(parameters) or self._can_keep_copies(own):
                    yield parameters, own

    def _can_keep_copies(self, shard_ranks: int) -> bool:
        """Whether nodes can keep copies of weights that so many ranks share: all experts are gathered, from the device."""
        is_plain = not self.wishes.expert_ranks and self.wishes.layer_weights == "device"
        return is_plain and self.wishes.placement.spans_nodes(shard_ranks)


def _with_whole_head(found: tuple[Setup, StepPlan | None]) -> tuple[Setup, StepPlan | None]:
    """Returns the setup, marked as one whose last stage does all work of the output head although it might be shared."""
    return replace(found[0], keeps_head=True), found[1]


def _counted_s(found: tuple[Setup, StepPlan | None], step: Sequence[int]) -> float:
    """Returns counted seconds of a step of these lengths; infinity if it does not fit.

    found: a setup, and the plan if it is known.
    """
    setup, plan = found
    try:
        return counted_step_s(plan or plan_step(0, step, setup.costs, setup.planner), setup.costs)
    except ValueError:
        return math.inf


def _sharded(placement: Placement, shard_ranks: int) -> Placement:
    return replace(placement, parameters="sharded", shard_ranks=shard_ranks)


def _why_sharded(whole: Setup, num_ranks: int, longest: int, setup_on: Callable[[Placement], Setup]) -> str:
    """Returns why parameters are sharded if the user leaves that open; empty if they are replicated.

    longest: tokens of the longest sequence; 0 if it is unknown, so that as many as possible should fit.
    """
    memory, placement = whole.memory, whole.placement
    needed, usable = memory.state_bytes("replicated", 1, placement.ranges) / _GIB, memory.usable_bytes / _GIB
    missing = f"they would need {needed:.1f} GiB per rank; {usable:.1f} GiB are usable"
    if longest:
        # kept activations cost no time, so shard the states before recomputing anything
        has_tokens = memory.tokens_per_rank("replicated", 1, placement.is_shared, placement.ranges) >= _LEAST_TOKENS
        has_room = has_tokens and placement.degrees[-1] * placement.kept_tokens(memory) >= longest
        return "" if has_room else f"states are sharded over {num_ranks} ranks: replicated, {missing}"
    fits = placement.longest_tokens(memory)
    other = setup_on(_sharded(placement, num_ranks))
    if fits and other.placement.longest_tokens(other.memory) <= fits:
        return ""
    instead = f"they would hold {fits:,} tokens" if fits else missing
    return f"states are sharded over {num_ranks} ranks, which holds the longest sequence; replicated, {instead}"


def _with_planned_room(setup: Setup) -> Setup:
    """The setup with its room limited to the longest sequence that can be planned, since formulas may count fewer bytes."""
    placement, costs, planner, room = setup.placement, setup.costs, setup.planner, setup.room_tokens
    if placement.is_pipeline:
        most = room * setup.num_stages
        return replace(setup, room_tokens=_longest_planned(min(setup.max_length or most, most), costs, planner))
    most = min(setup.max_length or room, room)
    if planner.activations is None or not most:
        return setup
    planned = _longest_planned(most, costs, planner)
    return replace(setup, room_tokens=planned) if planned < most else setup


def _longest_planned(most_tokens: int, costs: CostModel, planner: PlannerConfig) -> int:
    """Tokens of the longest sequence that can be planned, at most `most_tokens`; found by planning sequences, to 1 %.

    Raises ValueError if there is no room for a single token.
    """
    fits, too_long = 0, most_tokens + 1
    tried = most_tokens
    while too_long - fits > max(1, fits // _ROOM_PRECISION):
        try:
            plan_step(0, [tried], costs, planner)
            fits = tried
        except ValueError:
            if tried == 1:
                raise
            too_long = tried
        tried = (fits + too_long) // 2
    return fits


def _stage_method(costs: CostModel, num_ranks: int, placement: Placement) -> GroupMethod:
    """Chooses the method by which groups inside a stage of `num_ranks` ranks share attention.

    Around a ring every slice sends earlier ones again, so "auto" means Ulysses if that can run groups of all degrees.
    """
    if placement.method != "auto":
        return placement.method
    cluster = replace(costs.cluster, num_ranks=num_ranks)
    return "ulysses" if all(group_shapes(each, "ulysses", costs.model, cluster) for each in placement.degrees) else "auto"


def shared_parameters(parameters: Parameters, shard_ranks: int | None, num_ranks: int) -> tuple[Parameters, int]:
    """Placement of parameters on `num_ranks` ranks, and the ranks that share one copy; a single rank has the whole model.

    shard_ranks: the user's setting; None or 0 for all ranks.
    """
    return ("replicated", 1) if parameters == "replicated" or num_ranks == 1 else (parameters, shard_ranks or num_ranks)


@dataclass(frozen=True, slots=True)
class _HostPlace:
    """Tokens of the longest sequence if states or layers are on the device or in host memory."""

    # tokens of the longest sequence requested
    wanted_tokens: int
    # most tokens with these on the device and in host memory (0: that place cannot hold them)
    device_tokens: int
    host_tokens: int
    # reason why they cannot lie on the host; empty if they can
    host_problem: str

    @property
    def on_host(self) -> bool:
        """Whether they go to the host: the wanted sequence does not fit beside them, and more tokens fit without them."""
        return self.device_tokens < self.wanted_tokens and self.device_tokens < self.host_tokens

    def _head(self, what: str, on_device: str) -> str:
        place = "host" if self.on_host else "device"
        wanted = f"the longest sequence has {self.wanted_tokens:,} tokens"
        return f"{what}: on the {place}; {wanted}, and {self.device_tokens:,} fit with all {on_device} on the device"

    def layers_line(self) -> str:
        """The choice for shards of layers and the numbers behind it, in one line."""
        line = self._head("weights of layers", "weights")
        if self.device_tokens >= self.wanted_tokens:
            return line
        if self.host_problem:
            return f"{line}; layers cannot lie on the host: {self.host_problem}"
        return f"{line}; {self.host_tokens:,} fit with layers on the host"

    def states_line(self, setup: Setup, free_bytes: int) -> str:
        """The choice for optimizer states and the bytes behind it, in one line.

        setup: with the states in either place. free_bytes: host memory of a rank that is free for them.
        """
        memory, sharing = setup.memory, setup.placement.sharing
        device, host = (replace(memory, model=replace(memory.model, updates_on_host=on_host)) for on_host in (False, True))
        state_bytes, host_bytes = device.state_bytes(*sharing), host.host_states(*sharing)
        line = (
            f"{self._head('optimizer states', 'states')} ({state_bytes / _GIB:.2f} of its {memory.usable_bytes / _GIB:.2f} GiB)"
        )
        if self.device_tokens >= self.wanted_tokens:
            return line
        taken = f"{host_bytes / _GIB:.2f} of the {free_bytes / _GIB:.2f} GiB of host memory now free for each rank"
        if host_bytes > free_bytes:
            return f"{line}; on the host they would need {taken}"
        if self.host_problem:
            return f"{line}; on the host they would take {taken}, but {self.host_problem}"
        return f"{line}; {self.host_tokens:,} fit with states on the host ({taken})"


def num_communicators(
    num_ranks: int,
    degrees: Sequence[int],
    shard_ranks: int = 1,
    num_stages: int = 1,
    lends: bool = False,
    num_head_stages: int = 1,
    has_node_copies: bool = False,
) -> int:
    """Counts the groups of the rank with the most of them, including the default group; 0 for a single rank.

    degrees: those of groups that exchange heads (`cost_model.block_sizes`). shard_ranks: ranks that share one copy of the
    parameters; with 1, gradients are summed early in a separate group, unless stages lend ranks. lends: stages may lend ranks to
    each other. num_head_stages: see `ModelSpec`. has_node_copies: weights are gathered per node.
    """
    if num_ranks == 1:
        return 0
    per_stage = num_ranks // num_stages
    most = max(
        len(_sequence_groups(stage, position, num_ranks, num_stages, degrees, lends))
        + _num_links(stage, num_stages, num_head_stages)
        for stage in range(num_stages)
        for position in range(per_stage)
    )
    # shards, ranks with equal shards, and ranks of a node
    sharding = (1 + (shard_ranks < per_stage) + has_node_copies) if shard_ranks > 1 else 0
    early_sums = shard_ranks == 1 and per_stage > 1 and not lends
    return 1 + most + sharding + early_sums


def usable_bytes(device_bytes: int, num_communicators: int, is_expandable: bool = False) -> int:
    """Returns the bytes of a device that predicted bytes may fill. is_expandable: see `usable_share_bytes`.

    Communicators may take half of the rest; each further one lowers the result.
    """
    usable = usable_share_bytes(device_bytes, is_expandable)
    return min(usable, (device_bytes + usable) // 2 - num_communicators * COMMUNICATOR_BYTES)


def _sequence_groups(
    stage: int, position: int, num_ranks: int, num_stages: int, degrees: Sequence[int], lends: bool
) -> set[tuple[int, ...]]:
    """Returns ranks of one rank's groups: of all ranks, of sequences and of lent slices; equal ranks share a group."""
    per_stage = num_ranks // num_stages
    found = {tuple(range(num_ranks))}
    for degree in (*degrees, per_stage):
        start = position // degree * degree
        if degree > 1 and start + degree <= per_stage:
            found.add(tuple(range(stage * per_stage + start, stage * per_stage + start + degree)))
    if lends:
        for first, last in [(first, num_stages - 1) for first in range(num_stages)] + [(0, last) for last in range(num_stages)]:
            if first < last and first <= stage <= last:
                found.add(tuple(each * per_stage + position for each in range(first, last + 1)))
    return found


def _num_links(stage: int, num_stages: int, num_head_stages: int) -> int:
    """Counts a rank's groups for messages between stages, and for sums over all stages and over those of embedding and head."""
    if num_stages == 1:
        return 0
    is_end, has_head = stage in (0, num_stages - 1), stage >= num_stages - num_head_stages
    neighbours = (stage > 0) + (stage < num_stages - 1)
    # messages to and from heads on other stages
    others = 0 if not has_head else num_head_stages - 1 if stage == num_stages - 1 else 1
    # the head alone, if several stages have it, and with the embedding
    sums = (has_head or not stage) + (has_head and 1 < num_head_stages < num_stages)
    return _LANES_EACH_WAY * (neighbours + is_end + others) + 1 + sums


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that would lengthen the longest sequence, and the tokens that would then fit."""

    # in options of `hf-longctx plan`
    change: str
    tokens_per_rank: int
    longest_tokens: int
    # in settings of a run; empty if a run cannot make the change
    setting: str = ""

    @property
    def is_setting(self) -> bool:
        """Whether the same machine does."""
        return not re.search("--gpus|^devices of", self.change)

    @property
    def trains_all(self) -> bool:
        """Whether it brings no adapters."""
        return "--lora-rank" not in self.change


@dataclass(frozen=True, slots=True)
class _Change:
    """A change, named as in `Remedy`, and the memory and placement after it."""

    name: str
    setting: str
    memory: DeviceMemory
    placement: Placement
    # host memory of a rank that the change asks for; 0: what there is
    host_gib: int = 0

    def after(self, memory: DeviceMemory, placement: Placement) -> _Change:
        """The change with the host memory that it frees, or takes. memory, placement: those before it."""
        was, now = memory.host_states(*placement.sharing), self.memory.host_states(*self.placement.sharing)
        return replace(self, memory=replace(self.memory, host_bytes=max(0, memory.host_bytes + was - now)))

    def remedy(self) -> Remedy:
        tokens, longest = self.placement.tokens_per_rank(self.memory), self.placement.longest_tokens(self.memory)
        asked = f" --host-gib {self.host_gib}, if a rank has that many GiB" if self.host_gib else ""
        # a run knows the memory of its hosts
        return Remedy(self.name + asked, tokens, longest, "" if self.host_gib else self.setting)


@dataclass(frozen=True, slots=True)
class Room:
    """Room for tokens on a rank under one placement of weights, gradients and optimizer states; 0 tokens: it does not fit."""

    parameters: Parameters
    state_bytes: int
    tokens_per_rank: int
    longest_tokens: int


def rooms(memory: DeviceMemory, placement: Placement) -> tuple[Room, ...]:
    """Rooms for all placements of the states, with equal groups; shards span all ranks unless the placement says otherwise."""
    shard_ranks = placement.shard_ranks if placement.parameters != "replicated" else placement.ranks_per_stage
    sharded = [each for each in SHARINGS[:-1] if placement.spans_nodes(shard_ranks) or not keeps_node_copies(each)]
    ways = []
    for parameters in (SHARINGS[-1], *(sharded if placement.ranks_per_stage > 1 else ())):
        other = replace(placement, parameters=parameters, shard_ranks=1 if parameters == "replicated" else shard_ranks)
        tokens, longest = other.tokens_per_rank(memory), other.longest_tokens(memory)
        ways.append(Room(parameters, memory.state_bytes(*other.sharing), tokens, longest))
    return tuple(ways)


def remedies(memory: DeviceMemory, placement: Placement, may_recompute: bool = False) -> tuple[Remedy, ...]:
    """Single changes that let a longer sequence fit, the most effective first; each is computed with the change made.

    may_recompute: everything is kept by choice, so that recomputing is a change, too.
    """
    now = placement.longest_tokens(memory)
    options = (change.remedy() for change in _changes(memory, placement, may_recompute))
    longer = [option for option in options if option.longest_tokens > now * _LEAST_GAIN]
    return tuple(sorted(longer, key=lambda option: -option.longest_tokens))


def fitting_remedies(
    memory: DeviceMemory, placement: Placement, num_tokens: int, may_recompute: bool = False
) -> tuple[Remedy, ...]:
    """Changes with which a sequence of `num_tokens` fits: single ones, or else pairs of settings; larger machines come last.

    Where all weights are trained, a pair that trains them stands beside single changes to adapters. If no settings are enough,
    settings on more ranks are among the changes.
    """
    enough = [one for one in remedies(memory, placement, may_recompute) if one.longest_tokens >= num_tokens]
    own = [one for one in enough if one.is_setting]
    if not any(memory.lora_rank or one.trains_all for one in own):
        pairs = _fitting_pairs(memory, placement, num_tokens, may_recompute)
        enough += [one for one in pairs if one.trains_all or not own][:_MOST_PAIRS]
    if not any(one.is_setting for one in enough):
        enough = [*_on_more_ranks(memory, placement, num_tokens, may_recompute), *enough]
    return tuple(sorted(enough, key=lambda one: not one.is_setting))


def _on_more_ranks(memory: DeviceMemory, placement: Placement, num_tokens: int, may_recompute: bool) -> list[Remedy]:
    """Settings with which fewer ranks hold a sequence of `num_tokens` than without them; the fewest ranks come first."""
    plain = wider_job(memory, placement, 2 * placement.num_ranks, num_tokens)
    found: dict[str, Remedy] = {}
    num_ranks = 2 * placement.num_ranks
    while num_ranks < plain.num_ranks and len(found) < _MOST_PAIRS:
        # any number of ranks holds 0 tokens
        for change in _settings(memory, wider_job(memory, placement, num_ranks, 0), may_recompute):
            name = change.name.replace(": --", f": --gpus {num_ranks} --", 1)
            one = replace(change, name=name, setting="").remedy()
            if one.longest_tokens >= num_tokens:
                found.setdefault(_without_bytes(change.name), one)
        num_ranks *= 2
    return list(found.values())[:_MOST_PAIRS]


def _without_bytes(name: str) -> str:
    """Returns the name of a change without host memory, which differs by ranks and by changes before it."""
    return re.sub(r" \(\d+ GiB a rank\)", "", name)


def _fitting_pairs(memory: DeviceMemory, placement: Placement, num_tokens: int, may_recompute: bool) -> list[Remedy]:
    """Pairs of settings with which a sequence of `num_tokens` fits, each in one order."""
    pairs: dict[frozenset[str], Remedy] = {}
    for first in _settings(memory, placement, may_recompute):
        for second in _settings(first.memory, first.placement, may_recompute):
            # the bytes in names depend on their order
            names = frozenset(_without_bytes(each.name) for each in (first, second))
            if names in pairs or len(names) < 2:
                continue
            setting = f"{first.setting} and {second.setting}" if first.setting and second.setting else ""
            # the later one counts the host memory of both
            name, host_gib = f"{first.name}, and {second.name}", second.host_gib or first.host_gib
            tried = replace(second, name=name, setting=setting, host_gib=host_gib).remedy()
            if tried.longest_tokens >= num_tokens:
                pairs[names] = tried
    return sorted(pairs.values(), key=lambda one: -one.longest_tokens)


def _changes(memory: DeviceMemory, placement: Placement, may_recompute: bool) -> list[_Change]:
    """Settings, more ranks and larger devices."""
    changes = _settings(memory, placement, may_recompute)
    more = wider_job(memory, placement, 2 * placement.num_ranks, placement.longest_tokens(memory) + 1)
    name = f"{more.num_ranks // placement.num_ranks} times the ranks: --gpus {more.num_ranks}"
    changes.append(_Change(name, f"parameters='sharded' on {more.num_ranks} ranks", memory, more).after(memory, placement))
    device_bytes, usable = 2 * memory.device_bytes, 2 * memory.usable_bytes
    larger = replace(memory, device_bytes=device_bytes, usable_bytes=usable)
    # a run cannot buy larger devices
    changes.append(_Change(f"devices of {device_bytes / _GIB:.0f} GiB", "", larger, placement))
    return changes


def _settings(memory: DeviceMemory, placement: Placement, may_recompute: bool) -> list[_Change]:
    num_ranks, model, before = placement.ranks_per_stage, memory.model, (memory, placement)
    changes: list[_Change] = []

    def add(name: str, setting: str, memory: DeviceMemory = memory, placement: Placement = placement) -> None:
        changes.append(_Change(name, setting, memory, placement).after(*before))

    if placement.max_tokens_per_rank:
        add("leave --tokens-per-rank out", "no tokens_per_rank", placement=replace(placement, max_tokens_per_rank=0))
    if may_recompute and memory.keeps_everything:
        name = "activations recomputed and offloaded: --activations auto"
        add(name, "activations='auto'", replace(memory, keeps_everything=False))
    allowed = default_degrees(num_ranks, model.num_heads, placement.method)
    if allowed[-1] > placement.degrees[-1]:
        name = f"groups of up to {allowed[-1]} ranks: --degrees"
        add(name, "no degrees", placement=replace(placement, degrees=allowed))
    elif placement.degrees[-1] < num_ranks:
        wider = replace(placement, degrees=default_degrees(num_ranks, model.num_heads), method="auto")
        add(f"groups of up to {num_ranks} ranks: --method auto", "method='auto'", placement=wider)
    if placement.parameters != "sharded" and num_ranks > 1:
        name = f"states sharded over {num_ranks} ranks: --parameters sharded"
        add(name, "parameters='sharded'", placement=_sharded(placement, num_ranks))
    elif 1 < placement.shard_ranks < num_ranks and model.experts.num_ranks == 1:
        name = f"states sharded over all ranks: --shard-ranks {num_ranks}"
        add(name, f"shard_ranks={num_ranks}", placement=replace(placement, shard_ranks=num_ranks))
    if model.bytes_per_element > 2 and not memory.is_measured:
        half = replace(model, bytes_per_element=2)
        if memory.lora_rank:
            half = replace(half, adapters=lora_adapters(half, memory.lora_rank, model.adapters.on_experts))
        halved = replace(memory, model=half, saved_bytes_per_token=saved_token_bytes(half))
        add("weights and activations in bf16: --dtype bfloat16", "weights loaded in bfloat16", halved)
    if not (model.updates_on_host or model.moment_bytes or memory.is_measured):
        away = replace(model, updates_on_host=True)
        changes += _on_host("optimizer states", "optimizer_states", memory, away, placement)
    can_move = placement.parameters == "sharded" and can_leave(model) and not (model.layers_on_host or memory.is_measured)
    if can_move:
        away = replace(model, layers_on_host=True)
        changes += _on_host("weights of layers", "layer_weights", memory, away, placement)
    if model.has_master_weights and model.bytes_per_element == 2 and not memory.is_measured:
        name = "weights updated in bf16, which loses small updates: --bf16-updates"
        setting = "fp32_master_weights=False, which loses small updates"
        add(name, setting, replace(memory, model=replace(model, has_master_weights=False)))
    return changes + [change.after(memory, placement) for change in _adapters(memory, placement)]


def _on_host(what: str, setting: str, memory: DeviceMemory, model: ModelSpec, placement: Placement) -> list[_Change]:
    """The change to `model`, which has more in host memory, and the bytes of that.

    If a rank is not known to have so much, it asks for as much again as there is for activations, or for the least needed.
    """
    away = replace(memory, model=model)
    # host memory of the states was left out before
    before, more = memory.host_states(*placement.sharing), away.host_states(*placement.sharing)
    bytes_there = f" ({(more - before) / _GIB:.0f} GiB a rank)" if more - before >= _GIB else ""
    name = f"{what} in host memory{bytes_there}: --{setting.replace('_', '-')} host"
    left, in_run = memory.host_bytes + before - more, f"{setting}='host'"
    if left >= 0:
        return [_Change(name, in_run, replace(away, host_bytes=left), placement)]
    asked = dict.fromkeys(int(-(-each // _GIB)) for each in (more, more + memory.host_bytes))
    changes = [_Change(name, in_run, replace(away, host_bytes=gib * _GIB - more), placement, gib) for gib in asked]
    lengths = [change.remedy().longest_tokens for change in changes]
    # more is not offered if it holds no longer sequences; without any, another change may have to come first
    return changes[:1] if lengths[0] == lengths[-1] > 0 else changes


def can_leave(model: ModelSpec) -> bool:
    """Whether shards of the model's layers can lie on the host; packed weights and spread experts cannot."""
    return model.packed.is_empty and not model.experts.are_spread


def _adapters(memory: DeviceMemory, placement: Placement) -> Iterator[_Change]:
    """Changes that train only adapters: over the present weights (LoRA), and over weights in four bits (QLoRA)."""
    rank = memory.lora_rank or _LORA_RANK
    frozen = replace(memory.model, has_master_weights=False, updates_on_host=False)
    frozen = replace(frozen, adapters=lora_adapters(frozen, rank, frozen.adapters.on_experts))
    if not memory.lora_rank:
        name, setting = f"adapters over frozen weights (LoRA): --lora-rank {rank}", f"adapters of rank {rank} (LoRA)"
        yield _Change(name, setting, replace(memory, model=frozen, lora_rank=rank), placement)
    if frozen.packed.is_empty and not frozen.experts.num_experts:
        packed = replace(frozen, packed=PackedSpec.nf4(frozen), can_keep_qkv=False, cuts_heads=False)
        packed = replace(packed, adapters=lora_adapters(packed, rank, frozen.adapters.on_experts))
        whole = ", attention in one piece" if frozen.head_pieces() > 1 else ""
        name = f"adapters over weights of four bits{whole} (QLoRA): --lora-rank {rank} --quantize nf4"
        # adapters that a run has already may be of another size
        setting = "" if memory.lora_rank else f"weights loaded in four bits below adapters of rank {rank} (QLoRA)"
        yield _Change(name, setting, replace(memory, model=packed, lora_rank=rank), placement)


def wider_job(memory: DeviceMemory, placement: Placement, num_ranks: int, num_tokens: int) -> Placement:
    """The placement on `num_ranks` ranks, doubled until a sequence of `num_tokens` fits; at most doubled ten times.

    States that are sharded over all ranks, or held by a single rank, are sharded over all of the new ranks, unless experts are
    spread.
    """
    heads, per_stage = memory.model.num_heads, num_ranks // max(1, len(placement.ranges))
    is_widest = placement.degrees[-1] == default_degrees(placement.ranks_per_stage, heads, placement.method)[-1]
    is_shared = placement.shard_ranks == placement.ranks_per_stage and memory.model.experts.num_ranks == 1
    wider = replace(
        placement,
        num_ranks=num_ranks,
        degrees=default_degrees(per_stage, heads, placement.method) if is_widest else placement.degrees,
        shard_ranks=per_stage if is_shared else placement.shard_ranks,
        parameters="sharded" if placement.num_ranks == 1 else placement.parameters,
    )
    wanted = min(num_tokens, placement.max_length or num_tokens)
    if wider.longest_tokens(memory) >= wanted or num_ranks >= placement.num_ranks << _MAX_DOUBLINGS:
        return wider
    return wider_job(memory, placement, 2 * num_ranks, num_tokens)


def lora_adapters(model: ModelSpec, rank: int, on_experts: bool = False) -> AdapterSpec:
    """Makes LoRA of this rank on every matrix of the layers, with PEFT's defaults; embedding and head are frozen.

    Every matrix gets two more, those of routed experts only if `on_experts`, since these are not modules. For weights in half
    precision they are in fp32, and autocast in bf16 multiplies by rounded copies, as in `hf.models.layers.adapter_spec`. If
    layers have heads of several sizes, each number is the largest of any layer.
    """
    if model.heads:
        found = [lora_adapters(of_size, rank, on_experts) for of_size, _ in model.head_counts()]
        return AdapterSpec(*(max(getattr(each, field.name) for each in found) for field in fields(AdapterSpec)))
    d, f, e = model.hidden_size, model.intermediate_size, model.bytes_per_element
    num_wide = 0 if model.experts.num_experts else 2 if model.gated_mlp else 1
    num_mlp = num_wide + (num_wide > 0)
    made_kv = model.kv_size * model.num_made // 2
    heads, mlp = 4 * d + model.query_size + made_kv + model.output_size, num_mlp * (d + f)
    saved, width = _HALF if e < _WIDE else e, max(_WIDE, e)
    in_mlp = saved * num_mlp * rank
    # beside modules in four bits, adapters are added to their outputs; else inside their products
    made = rank if model.packed.is_empty or model.packed.fp8_parameters or model.packed.has_experts else max(d, f)
    # packed experts run apart from adapters, too
    is_split = model.experts.num_layers > 0 and (on_experts or model.packed.has_experts)
    beside = _expert_adapters(model, rank * on_experts, width) if is_split else AdapterSpec()
    return AdapterSpec(
        layer_parameters=rank * (heads + mlp) + beside.layer_parameters,
        layer_bytes=(rank * (heads + mlp) + beside.layer_parameters) * width,
        attention_saved_bytes=saved * 4 * rank,
        mlp_saved_bytes=in_mlp + beside.mlp_saved_bytes,
        cut_bytes=4 * rank * 3 * width,
        tile_bytes=in_mlp + (saved * made if num_mlp else 0),
        reads_first_norm=True,
        reads_attention=True,
        reads_second_norm=num_mlp > 0 or beside.reads_second_norm,
        reads_product=num_mlp > 0,
        idle_parameters=beside.idle_parameters,
        splits_experts=beside.splits_experts,
        copied_bytes=beside.copied_bytes,
    )


def _expert_adapters(model: ModelSpec, rank: int, width: int) -> AdapterSpec:
    """Makes LoRA on both matrices of every routed expert: gate and up are one. rank: 0 if experts only run apart."""
    experts = model.experts
    row_size, inner_size = experts.row_size, experts.inner_size
    first_outputs = (2 if model.gated_mlp else 1) * inner_size
    matrices = [(rank, row_size, first_outputs), (rank, inner_size, row_size)]
    chosen, element = experts.token_rows // experts.num_layers, model.bytes_per_element
    sizes = (chosen, experts.num_experts), (element, width)
    count = rank * experts.num_experts * sum(sum(both) for _, *both in matrices)
    return replace(split_adapters(matrices, *sizes, first_rank=rank), layer_parameters=count)
