"""One sequence group on its pipeline stages under a cost model: when every action runs, and what every stage holds."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hf_longctx.plan.activation import SavedClass
from hf_longctx.plan.activation_memory import layer_slots
from hf_longctx.plan.cost import CostModel
from hf_longctx.plan.event_loop import CopiedOut, CopyStep, Times, run_actions, run_copying
from hf_longctx.plan.memory import KnownBytes, RoundBytes, round_bytes
from hf_longctx.plan.sharding import shard_tokens
from hf_longctx.plan.stage_memory import message_bytes, most_tokens_in_flight, stage_state_bytes
from hf_longctx.plan.types import Action, ActivationPolicy, LayerPolicy, SequenceGroup, StagePlan, StepPlan

_MESSAGES = ("SF", "RF", "SB", "RB")


@dataclass(frozen=True, slots=True)
class StageRun:
    """What one stage does for a group. actions: F and B, with (start, stop) of each and the communication inside of it.

    peak_bytes: of the device, states included; host_bytes: of saved tensors. peak_tokens: most that wait for a backward on the
    first rank.
    """

    actions: tuple[Action, ...]
    times: Times
    exchange_s: tuple[float, ...]
    peak_bytes: int
    host_bytes: int
    peak_tokens: int


def check_action(action: Action, stage: StagePlan) -> None:
    """Raises ValueError by name for what cannot be evaluated: helpers, parts that do not exist, explicit copies and frees."""
    is_known = action.kind in ("F", "B") or action.kind in _MESSAGES
    if action.helpers or action.part >= len(stage.parts) or not is_known:
        raise ValueError(
            f"action {action} cannot be evaluated yet; only F and B of the stage's parts, without helpers, and messages can"
        )


def near_ranks(ranks: Sequence[int], ranks_per_node: int) -> int:
    """The fewest of these ranks that share a node: they wait for most of what the others send over the network."""
    if ranks[0] // ranks_per_node == ranks[-1] // ranks_per_node:
        return len(ranks)
    return min(Counter(rank // ranks_per_node for rank in ranks).values())


class KnownRuns(KnownBytes):
    """What one step's plans under one cost model share: bytes of chunks, and runs of groups that came before."""

    def __init__(self) -> None:
        super().__init__()
        # by identity, with the group kept alive
        self.runs: dict[tuple[int, int, tuple[int, ...], tuple[float, ...]], tuple[SequenceGroup, tuple[StageRun, ...]]] = {}


def run_pipeline(
    plan: StepPlan, group: SequenceGroup, costs: CostModel, start_s: Sequence[float], known: KnownRuns | None = None
) -> tuple[StageRun, ...]:
    """The run of a group whose stages are free at `start_s`."""
    known = KnownRuns() if known is None else known
    key = id(group.chunks), id(group.stages), group.positions, tuple(start_s)
    if key not in known.runs:
        known.runs[key] = group, _run_pipeline(plan, group, costs, start_s, known)
    return known.runs[key][1]


def _run_pipeline(
    plan: StepPlan, group: SequenceGroup, costs: CostModel, start_s: Sequence[float], known: KnownBytes
) -> tuple[StageRun, ...]:
    for stage in group.stages:
        for action in stage.actions:
            check_action(action, stage)
    seconds = StageSeconds(plan, group, costs)
    actions = [stage.actions for stage in group.stages]
    num_parts = len(group.stages[0].parts)
    if seconds.has_copies:
        times, copied = run_copying(actions, seconds.of, seconds.hop_s, seconds.copies, num_parts, start_s)
    else:
        times, copied = run_actions(actions, seconds.of, seconds.hop_s, num_parts, start_s), ()
    return tuple(
        _stage_run(plan, seconds, stage, when, [one for one in copied if one.stage == stage.stage], known)
        for stage, when in zip(group.stages, times, strict=True)
    )


def _stage_run(
    plan: StepPlan, seconds: StageSeconds, stage: StagePlan, times: Times, copied: Sequence[CopiedOut], known: KnownBytes
) -> StageRun:
    computing = [place for place, action in enumerate(stage.actions) if action.kind in ("F", "B")]
    actions, when = [stage.actions[place] for place in computing], tuple(times[place] for place in computing)
    model, group = seconds.costs.model, seconds.group
    copying = _copying_bytes(seconds, actions, when, copied) if copied else ()
    found: RoundBytes = round_bytes(model, group, stage, copying=copying, known=known)
    messages = message_bytes(model, stage, len(group.stages), max(seconds.tokens))
    return StageRun(
        tuple(actions),
        when,
        tuple(seconds.exchange_s(action) for action in actions),
        stage_state_bytes(model, stage, plan) + found.peak + messages,
        found.host,
        most_tokens_in_flight(actions, seconds.tokens),
    )


def _copying_bytes(
    seconds: StageSeconds, actions: Sequence[Action], times: Times, copied: Sequence[CopiedOut]
) -> tuple[int, ...]:
    """For every action the most bytes on their way to the host, when it begins or when it ends."""
    rate = seconds.costs.cluster.hardware.copy_bytes_per_s
    steps = [(step.copy_s, stop_s) for one in copied for step, stop_s in zip(one.steps, one.stops_s, strict=True)]
    stops_s = [stop_s for _, stop_s in steps]
    # a copy's bytes are on the device until it is done
    sizes = [0.0, *accumulate(copy_s * rate for copy_s, _ in steps)]
    queued, result = 0, []
    left = [len(one.steps) for one in reversed(copied)]
    for action, (start_s, stop_s) in zip(actions, times, strict=True):
        before = sizes[queued] - sizes[min(queued, bisect_right(stops_s, start_s))]
        if action.kind == "F" and seconds.copies(action):
            queued += left.pop()
        after = sizes[queued] - sizes[min(queued, bisect_right(stops_s, stop_s))]
        result.append(round(max(before, after)))
    return tuple(result)


class StageSeconds:
    """Seconds of a group's actions, each worked out once."""

    def __init__(self, plan: StepPlan, group: SequenceGroup, costs: CostModel) -> None:
        self.group, self.costs = group, costs
        per_node, per_stage = costs.cluster.ranks_per_node, plan.ranks_per_stage
        ranks = [[stage.stage * per_stage + position for position in group.positions] for stage in group.stages]
        self.near = [near_ranks(of_stage, per_node) for of_stage in ranks]
        # a message of one rank that crosses nodes keeps the whole group waiting
        self.leaves = [
            any(one // per_node != other // per_node for one, other in zip(of_stage, [*ranks[1:], ranks[0]][place], strict=True))
            for place, of_stage in enumerate(ranks)
        ]
        self.tokens = [max(shard_tokens(chunk, group.shape)) for chunk in group.chunks]
        self.policies = [
            {(policy.chunk, policy.part): policy for policy in stage.activations if policy.layers} for stage in group.stages
        ]
        self.has_copies = any(
            share.host > 0
            for policies in self.policies
            for policy in policies.values()
            for layer in policy.layers
            for share in layer.shares
        )
        self._known_saved: dict[int, list[SavedClass]] = {}
        self._bodies: dict[tuple[int, bool, int], tuple[float, float, float]] = {}
        # see `CostModel.exchange_line`
        self._exchanges: dict[tuple[bool, int], tuple[float, float]] = {}
        self._policy_seconds: dict[tuple[int, int, int, bool], tuple[float, tuple[CopyStep, ...]]] = {}
        # by identity: the group keeps policies alive
        self._under_seconds: dict[tuple[int, bool, int, int, int], tuple[float, tuple[CopyStep, ...]]] = {}
        self._layer_seconds: dict[tuple[int, int], tuple[float, float] | None] = {}

    def of(self, action: Action) -> float:
        """Seconds of an F or B, with what runs again in it and without waiting for copies."""
        body_s, head_s, _ = self._body(action)
        stage = self.group.stages[action.stage]
        is_last = action.stage == len(self.group.stages) - 1 and action.part == len(stage.parts) - 1
        seconds = body_s * stage.parts[action.part].num_layers + (head_s if is_last else 0.0)
        return seconds + self._policy(action)[0] if self.policies[action.stage] else seconds

    def exchange_s(self, action: Action) -> float:
        """How much of an F or B is communication between the ranks of the group."""
        return self._body(action)[2] * self.group.stages[action.stage].parts[action.part].num_layers

    def hop_s(self, action: Action) -> float:
        """Seconds of the message that carries an action's result to another stage."""
        is_forward = action.kind == "F" or action.kind == "SF"
        leaves = self.leaves[action.stage] if is_forward else self.leaves[action.stage - 1]
        return self.costs.hop_s(self.tokens[action.chunk], leaves)

    def copies(self, action: Action) -> tuple[CopyStep, ...]:
        return self._policy(action)[1] if self.policies[action.stage] else ()

    def _body(self, action: Action) -> tuple[float, float, float]:
        """Seconds of one layer, of the head, and of the communication in a layer."""
        is_backward, near = action.kind == "B", self.near[action.stage]
        key = (action.chunk, is_backward, near)
        if key not in self._bodies:
            chunk, shape, costs = self.group.chunks[action.chunk], self.group.shape, self.costs
            if (is_backward, near) not in self._exchanges:
                self._exchanges[is_backward, near] = costs.exchange_line(shape, is_backward, near)
            fixed_s, token_s = self._exchanges[is_backward, near]
            exchange_s = fixed_s + token_s * max(chunk.num_tokens, shape.degree)
            layer_s, head_s = costs.layer_and_head_s(chunk, shape, is_backward, exchange_s)
            self._bodies[key] = layer_s, head_s, exchange_s / costs.model.num_layers
        return self._bodies[key]

    def _policy(self, action: Action) -> tuple[float, tuple[CopyStep, ...]]:
        """What runs again in an action, in seconds, and its copies."""
        key = (action.stage, action.part, action.chunk, action.kind == "B")
        if key not in self._policy_seconds:
            policy = self.policies[action.stage].get((action.chunk, action.part))
            self._policy_seconds[key] = (0.0, ()) if policy is None else self._under_policy(action, policy)
        return self._policy_seconds[key]

    def _under_policy(self, action: Action, policy: ActivationPolicy) -> tuple[float, tuple[CopyStep, ...]]:
        """As `_under`, once for stages alike."""
        num_layers = self.group.stages[action.stage].parts[action.part].num_layers
        key = (action.chunk, action.kind == "B", self.near[action.stage], num_layers, id(policy.layers))
        if key not in self._under_seconds:
            self._under_seconds[key] = self._under(action, policy)
        return self._under_seconds[key]

    def _under(self, action: Action, policy: ActivationPolicy) -> tuple[float, tuple[CopyStep, ...]]:
        is_backward = action.kind == "B"
        num_layers = self.group.stages[action.stage].parts[action.part].num_layers
        pass_s = self._body(action)[0]
        of_layers = [self._layer(action.chunk, layer) for layer in policy.layers] + [None] * (num_layers - len(policy.layers))
        again_s = plain_s = 0.0
        # seconds of layers that run one after the other, and of copies
        steps: list[list[float]] = []
        for of_layer in reversed(of_layers) if is_backward else of_layers:
            if of_layer is None:
                plain_s += pass_s
                continue
            layer_s = of_layer[0] if is_backward else 0.0
            again_s += layer_s
            if is_backward and steps:
                # layers without a policy run between the steps, behind the one whose backward came before them
                steps[-1][0] += plain_s
            steps.append([pass_s + layer_s + (0.0 if is_backward else plain_s), of_layer[1]])
            plain_s = 0.0
        if is_backward and steps:
            steps[-1][0] += plain_s
        has_host = any(copy_s for _, copy_s in steps)
        return again_s, tuple(CopyStep(*step) for step in steps) if has_host else ()

    def _layer(self, chunk: int, layer: LayerPolicy) -> tuple[float, float] | None:
        """Seconds of what runs again in a layer, and of copying what waits on the host; None if it keeps everything."""
        key = chunk, id(layer)
        if key not in self._layer_seconds:
            found = None
            if not layer.keeps_everything:
                shares = [(item, layer.share(item.tensor_class)) for item in self._saved(chunk)]
                again_s = sum(item.recompute_part_s(share.recompute) for item, share in shares)
                copied = sum(item.num_bytes * share.host for item, share in shares)
                found = again_s, copied / self.costs.cluster.hardware.copy_bytes_per_s
            self._layer_seconds[key] = found
        return self._layer_seconds[key]

    def _saved(self, chunk: int) -> list[SavedClass]:
        """What a layer saves of a chunk. A layer's products run again without the head's share of a token's seconds."""
        if chunk not in self._known_saved:
            self._known_saved[chunk] = self._saved_of(chunk)
        return self._known_saved[chunk]

    def _saved_of(self, chunk: int) -> list[SavedClass]:
        costs = self.costs
        slot = layer_slots(costs, self.group.chunks[chunk], self.group.shape)[0]
        inside = 1 - costs.head_share(is_backward=False)
        return [
            replace(item, recompute_s=item.recompute_s * inside) if item.tensor_class in ("qkv", "mlp") else item
            for item in slot.saved
        ]
