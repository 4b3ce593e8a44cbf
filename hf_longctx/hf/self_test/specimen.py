"""Runs the reduced copy of the self-test with plain transformers and under plans, and measures the differences.

`self_test.check` makes one `Specimen` per copy and compares its runs. A `HiddenTrace` records, for the tokens of this rank,
hidden states after the embedding and the layers, their gradients, and the states of layers at the ends of slices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.fields import MEDIA
from hf_longctx.hf.data.labels import NEXT_TOKEN, HeadTask
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.models.activations import ActivationRuntime
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.cutting import cut_model, stage_model, stages_of_heads, stages_that_lend
from hf_longctx.hf.models.document_rope import forget_documents
from hf_longctx.hf.models.experts import spread_experts_of
from hf_longctx.hf.models.forwards import cache_parameter
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.media import tower_graphs
from hf_longctx.hf.models.quantised import move_scales
from hf_longctx.hf.models.spec import decoder_layers
from hf_longctx.hf.models.states import mixers_of, num_scans
from hf_longctx.hf.models.towers import tower_parameters, unit_classes
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.self_test.independent import independent_copy
from hf_longctx.hf.self_test.parity import EMBEDDING, ENDS, MERGED, TOWERS, Errors, merged
from hf_longctx.hf.self_test.probe_images import ProbeImages
from hf_longctx.hf.self_test.probe_plans import ProbePlan, probe_plans
from hf_longctx.hf.self_test.reduced_copy import ReducedCopy
from hf_longctx.plan.core.lending import is_lent, lent_order, lent_pieces, running_stages
from hf_longctx.plan.core.sharding import Piece, head_shares, rank_pieces
from hf_longctx.plan.core.types import Action, LayerRange, SequenceGroup, StepPlan
from hf_longctx.plan.setup import Setup
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.dropout import keys_of
from hf_longctx.runtime.core.loss import IGNORE_INDEX, TokenLoss, ValueLoss, custom_losses, wide_logits
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.experts import spread_experts
from hf_longctx.runtime.execution.lending import block_of
from hf_longctx.runtime.execution.stage_model import StageModel, whole_model
from hf_longctx.runtime.parameters.rounded import note_rounded
from hf_longctx.runtime.parameters.sharded import block_mesh, shard_model
from hf_longctx.runtime.process_groups import GroupPool, with_head
from hf_longctx.runtime.states.book import CONVOLUTION, scan_name

# room for graphs of towers that takes all of them
_ROOM_BYTES = 2**60
# the two recorded quantities
Kind = Literal["values", "gradients"]
# (sequence, start, stop, first): tokens [start, stop) of a sequence, which begin at index `first` of the row in a forward
Part = tuple[int, int, int, int]
# (site, function, sequence, position) of a state
Left = tuple[int, str, int, int]


@dataclass(frozen=True, slots=True)
class LeftState:
    """A state of all channels or heads, or of the heads of rank `index` of `num_ranks` that share the heads."""

    state: Tensor
    index: int = 0
    num_ranks: int = 1


class HiddenTrace:
    """Records outputs of `modules`, by site, and their gradients, for tokens given by `recording`.

    first: the first layer if what it gets is recorded, too, as site `MERGED`.

    Forwards outside of `recording`, such as replays, are not recorded, nor are outputs without one vector for every token of one
    row, [1, T, ...].
    """

    def __init__(self, modules: Mapping[int, nn.Module], first: nn.Module | None = None) -> None:
        self.records: dict[tuple[Kind, int], dict[tuple[int, int, int], Tensor]] = {}
        self.states: dict[Left, LeftState] = {}
        self._parts: Sequence[Part] | None = None
        self._modules, self._first = modules, first

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which the modules have hooks."""
        with ExitStack() as undo:
            for site, module in self._modules.items():
                undo.callback(module.register_forward_hook(self._hook(site)).remove)
            if self._first is not None:
                keep = self._hook(MERGED)

                def before(module: nn.Module, args: Any, keywords: Any) -> None:
                    keep(module, args, args[0] if args else keywords["hidden_states"])

                undo.callback(self._first.register_forward_pre_hook(before, with_kwargs=True).remove)
            yield

    @contextmanager
    def recording(self, parts: Sequence[Part]) -> Iterator[None]:
        """Context for forwards of the tokens of `parts`."""
        self._parts = parts
        try:
            yield
        finally:
            self._parts = None

    def keep_states(self, context: GroupContext) -> None:
        """Records the states in the context's book."""
        sites = {id(inner): site for site, module in self._modules.items() for inner in module.modules()}
        for place, state in context.state_book.held().items():
            block = context.block
            shared = (0, 1) if place.function == CONVOLUTION else (block.index, block.num_ranks)
            left = (sites[id(place.layer)], place.function, place.sequence, place.position)
            self.states[left] = LeftState(state.detach().to(torch.float64, copy=True), *shared)

    def whole(self, kind: Kind, site: int, sequence: int) -> Tensor | None:
        """Returns the record of a sequence that ran in one piece, [tokens, hidden size]; None if it has no record."""
        pieces = [tensor for key, tensor in self.records.get((kind, site), {}).items() if key[0] == sequence]
        return pieces[0] if pieces else None

    def _hook(self, site: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if (parts := self._parts) is None:
                return
            hidden_1TC: Tensor = output if isinstance(output, Tensor) else output[0]
            num_tokens = max((first + stop - start for _, start, stop, first in parts), default=0)
            if hidden_1TC.ndim < 3 or hidden_1TC.shape[0] != 1 or hidden_1TC.shape[1] < num_tokens:
                return
            self._keep("values", site, parts, hidden_1TC)
            if not torch.is_grad_enabled():
                return
            if not hidden_1TC.requires_grad:
                # the output of a frozen embedding needs no gradient by itself
                hidden_1TC.requires_grad_()
            hidden_1TC.register_hook(lambda gradient: self._keep("gradients", site, parts, gradient))

        return hook

    def _keep(self, kind: Kind, site: int, parts: Sequence[Part], tensor_1TC: Tensor) -> None:
        record = self.records.setdefault((kind, site), {})
        for sequence, start, stop, first in parts:
            record[sequence, start, stop] = tensor_1TC.detach()[0, first : first + stop - start].to(torch.float64, copy=True)


def difference(found: HiddenTrace, plain: HiddenTrace, kind: Kind, site: int, stop: int | None = None) -> float:
    """Returns the largest distance of a token's vector in `found` from `plain`, relative to the longest vector in `plain`.

    Compares only tokens before `stop` that `found` has; a token without a record in `plain` counts as zero.
    """
    reference = plain.records.get((kind, site), {})
    scale = max((float(tensor.norm(dim=-1).max()) for tensor in reference.values()), default=0.0)
    worst = 0.0
    for (sequence, start, end), tensor in found.records.get((kind, site), {}).items():
        num_tokens = (end if stop is None else min(stop, end)) - start
        if num_tokens <= 0:
            continue
        expected = plain.whole(kind, site, sequence)
        gap = tensor if expected is None else tensor - expected[start:end]
        distance = float(gap[:num_tokens].norm(dim=-1).max())
        # NaN counts as the largest distance
        worst = max(worst, distance if distance == distance else float("inf"))
    return worst / scale if scale else worst


def state_differences(found: HiddenTrace, plain: HiddenTrace) -> dict[int, float]:
    """Returns for each site the largest distance of a state in `found` from `plain`, relative to its norm in `plain`.

    Skips states that `plain` lacks.
    """
    worst: dict[int, float] = {}
    for left, own in found.states.items():
        if left not in plain.states:
            # the class stores its states itself
            continue
        # a cache of transformers may have one token more than the convolution reads
        expected = plain.states[left].state[..., -own.state.shape[-1] :]
        num_heads = expected.shape[1]
        # ranks that pass states on have all heads
        if own.state.shape[1] < num_heads:
            share = head_shares(num_heads, num_heads, own.num_ranks)[own.index]
            expected = expected[:, share.q_start : share.q_stop]
        scale, gap = float(expected.norm()), float((own.state - expected).norm())
        # NaN counts as the largest distance
        distance = gap / scale if scale else gap
        worst[left[0]] = max(worst.get(left[0], 0.0), distance if distance == distance else float("inf"))
    return worst


def largest(trace: HiddenTrace, kind: Kind, site: int, sequences: Sequence[int], stop: int | None = None) -> float:
    """Returns the largest absolute element recorded for tokens of `sequences` before `stop`."""
    tensors = [
        tensor[: None if stop is None else max(0, stop - start)]
        for (sequence, start, _), tensor in trace.records.get((kind, site), {}).items()
        if sequence in sequences
    ]
    values = [float(tensor.abs().max()) for tensor in tensors if tensor.numel()]
    return max((value if value == value else float("inf") for value in values), default=0.0)


# with images, rows have two more columns
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class CopyRun:
    """Results of one step: loss, gradients by name (whole, or this rank's shards), hidden states, and each weight's layer."""

    loss: float
    gradients: dict[str, Tensor]
    trace: HiddenTrace
    places: dict[str, int]


@dataclass(frozen=True)
class MeasuredErrors:
    """Errors of this rank and, for each layer, squared distance and norm of its gradient, to be summed over shards."""

    errors: Errors
    squares: dict[int, tuple[float, float]]
    is_sharded: bool


@dataclass(frozen=True)
class RunPlace:
    """Placement of a run's model, and the same for a copy of it."""

    pool: GroupPool
    # the ranks over which parameters are sharded; None if they are not
    mesh: DeviceMesh | None
    device: torch.device
    # gradients of weights in half precision add up in fp32
    fp32_gradients: bool
    # sums a number over all ranks
    count: Callable[[int], int]
    # the run's loss of a token; None for cross-entropy
    token_loss: TokenLoss | None = None
    # the labels of the copy's rows, which are classes
    task: HeadTask = NEXT_TOKEN
    # the run's loss if its own labels are numbers, else None
    value_loss: ValueLoss | None = None
    # layer kernels for runs under plans; plain runs do not use them
    fused: FusedLayers | None = None

    def labels_of(self, row: Mapping[str, Any]) -> list[int]:
        """Returns the labels for the logits of `logits_of` for a row."""
        labels: list[int] = row["labels"]
        return labels[1:] if self.task.kind == "next_token" else labels

    def logits_of(self, output: Any) -> Tensor:
        """Returns the logits [n, V] with labels in the model's output for one row: of all tokens, or of the whole document."""
        if self.task.kind == "document":
            return output.logits  # type: ignore[no-any-return]
        logits_TV: Tensor = output.logits[0]
        return logits_TV[:-1] if self.task.kind == "next_token" else logits_TV


class Specimen:
    """A reduced copy, placed like the model (replicated, sharded, in stages), that runs plainly and under plans.

    images: those of its rows; None for rows of text.
    """

    def __init__(
        self, reduced: ReducedCopy, is_autocast: bool, setup: Setup, place: RunPlace, images: ProbeImages | None = None
    ) -> None:
        self.reduced, self.setup, self.place, self.images = reduced, setup, place, images
        self.pool, self.device, mesh, device = place.pool, place.device, place.mesh, place.device
        self.model, self.layers = reduced.model, reduced.layers
        self._dropout = keys_of(reduced.model)
        self._sites: dict[int, Any] = {EMBEDDING: reduced.embedding, **reduced.layers}
        self._own_sites, self.stage = self._sites, whole_model(self.model, reduced.attention_calls)
        # number of equal gradients that a reduce-scatter sums in the plain run, one per rank of a shard group
        self._copies_summed = 1
        # all stages, if the run lends stages, since every rank then has all layers
        self._all_stages: tuple[StageModel, ...] = ()
        own_layers = None
        if setup.planner.lend_stages:
            self._all_stages, self._own_sites = self._lend()
            self.stage = self._all_stages[self.pool.stage]
            counts = [each.attention_layers[0] for each in self._all_stages]
            own_layers = LayerRange(sum(counts[: self.pool.stage]), counts[self.pool.stage])
        elif setup.num_stages > 1:
            self.stage, self._own_sites = self._cut()
        owned = self.stage.model
        if not is_autocast:
            # a copy without autocast multiplies in its own precision
            note_rounded(owned, ())
        if mesh is not None:
            # moves the copy to the device in shards, like the model itself
            move_scales(owned, device)
            if setup.costs.model.experts.num_ranks > 1:
                spread_experts(spread_experts_of(owned), block_mesh(mesh), device)
            on_host, node_ranks = setup.costs.model.layers_on_host, setup.costs.cluster.ranks_per_node
            units = unit_classes(self.model, images is not None)
            shard_model(owned, units, mesh, place.fp32_gradients, on_host, node_ranks)
        for model in {id(each): each for each in (self.model, owned)}.values():
            if mesh is None or model is not owned:
                model.to(device)
        if mesh is not None and owned is self.model:
            self._copies_summed = mesh.size(mesh.ndim - 1)
        if is_autocast:
            for model in {id(each): each for each in (self.model, owned)}.values():
                model.forward = torch.autocast(device.type, dtype=torch.bfloat16)(model.forward)
        has_head = self.stage.stage in with_head(setup.num_stages, self.stage.head_stages)
        self._activations = ActivationRuntime(device, 0, lambda rate: None, has_head, own_layers)

    def probes(self, lengths: Sequence[int]) -> tuple[ProbePlan, ...]:
        """Returns the plans that the copy runs."""
        counts = [self._kept_layers(stage) for stage in range(self.setup.num_stages)]
        blocks = () if self.images is None else self.images.blocks(self.model, lengths)
        has_policies = self.setup.planner.activations is not None
        return probe_plans(lengths, self.setup.costs, self.setup.planner, counts, has_policies, blocks)

    def plain(self, rows: Rows, members: Sequence[int] | None = None, cuts: Collection[tuple[int, int]] = ()) -> CopyRun:
        """Runs `members` (None: all) of `rows`, one by one, with the model's own code; returns loss, gradients, hidden states.

        cuts: rows and positions at which states of layers are also recorded.
        """
        trace = self._trace(self._sites)
        num_labels = sum(label != IGNORE_INDEX for row in rows for label in self.place.labels_of(row))
        total = 0.0
        with trace.hooked():
            for number in range(len(rows)) if members is None else members:
                ids = torch.tensor([rows[number]["input_ids"]], device=self.device)
                labels = torch.tensor(self.place.labels_of(rows[number]), device=self.device)
                # reset, so that a document does not get the rotary frequencies of a longer one before it
                forget_documents(self.model)
                with self._alone(number, ids), trace.recording([(number, 0, ids.shape[1], 0)]):
                    logits_TV = self.place.logits_of(self._forward(rows[number], ids, use_cache=False))
                loss = self._summed_loss(logits_TV, labels, self.place.token_loss) / num_labels
                loss.backward()
                total += float(loss.detach())
        for number, position in sorted(cuts):
            trace.states |= self._plain_states(rows, number, position)
        return CopyRun(total, self._take_gradients(self.model, self._copies_summed), trace, self._places(self.model, self.layers))

    def _forward(self, row: Mapping[str, Any], ids_1T: Tensor, **keywords: Any) -> Any:
        """Runs the model's own forward for a row, or for its first tokens, with its images."""
        given = {} if self.images is None else self.images.plain_inputs(row, self.model, ids_1T)
        return self.model(input_ids=ids_1T, **given, **keywords)

    def _alone(self, number: int, ids_1T: Tensor) -> AbstractContextManager[None]:
        """Context of a plain forward of row `number`, in which the copy's dropout gets the row's tokens."""
        if self._dropout is None:
            return nullcontext()
        positions = torch.arange(ids_1T.shape[1], device=self.device)
        return self._dropout.of_pieces([(ids_1T.shape[1], number)], positions).running()

    @torch.no_grad()
    def _plain_states(self, rows: Rows, number: int, position: int) -> dict[Left, LeftState]:
        """Returns states after the first tokens of a row, from a cache of transformers."""
        config = base_of(self.model).config.get_text_config()
        cache = DynamicCache(config=config)
        ids = torch.tensor([rows[number]["input_ids"][:position]], device=self.device)
        forget_documents(self.model)
        with self._alone(number, ids):
            keyword = cache_parameter(type(base_of(self.model)).forward)
            self._forward(rows[number], ids, use_cache=True, **{keyword: cache})
        states: dict[Left, LeftState] = {}
        for site, layer in self.layers.items():
            for mixer in mixers_of(layer).values():
                for function, state in _cached(cache, mixer).items():
                    states[site, function, number, position] = LeftState(state.double())
        return states

    @torch.no_grad()
    def own_loss(self, row: Mapping[str, Any]) -> tuple[float, float] | None:
        """Returns the loss of the model's forward for a document, and the mean cross-entropy, or `value_loss`, of its logits.

        None if the forward returns no loss, or cannot be called with labels. Collective, like `plain`.
        """
        ids = torch.tensor([row["input_ids"]], device=self.device)
        labels = torch.tensor([row["labels"]], device=self.device)
        own_labels = torch.tensor(self.place.labels_of(row), device=self.device)
        num_labels = int((own_labels != IGNORE_INDEX).sum())
        value_loss = self.place.value_loss
        if value_loss is not None:
            # numbers that both losses accept, in fp32 like those of stock collators
            labels = torch.linspace(0.1, 0.9, self.place.task.num_labels, device=self.device).unsqueeze(0)
        try:
            forget_documents(self.model)
            with self._alone(0, ids):
                loss = self._forward(row, ids, labels=labels, use_cache=False, num_items_in_batch=num_labels).loss
            forget_documents(self.model)
            with self._alone(0, ids):
                logits_TV = self.place.logits_of(self._forward(row, ids, use_cache=False))
        except Exception:
            # plans do not call this
            return None
        if loss is None:
            return None
        if value_loss is not None:
            return float(loss), float(value_loss.losses(wide_logits(logits_TV), labels).sum())
        return float(loss), float(self._summed_loss(logits_TV, own_labels, None)) / num_labels

    @staticmethod
    def _summed_loss(logits_TV: Tensor, labels_T: Tensor, token_loss: TokenLoss | None) -> Tensor:
        wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        if token_loss is not None:
            return custom_losses(token_loss, wide_TV, labels_T).sum()
        return F.cross_entropy(wide_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="sum")

    def planned(self, plan: StepPlan, rows: Rows) -> CopyRun:
        """Runs a plan; returns the loss, the hidden states of this rank's tokens, and gradients of the whole step. Collective."""
        trace = self._trace(self._own_sites)
        rank_plan = plan.for_rank(self.pool.rank)
        lengths = np.array([len(row["input_ids"]) for row in rows])
        reader = None if self.images is None else self.images.reader(self.model)
        index = SequenceIndex.build(lengths, int(lengths.max()), "error")
        dataset = PlannedDataset(rows, index, task=self.place.task, reader=reader)
        have_media = None if reader is None or self.place.mesh is None else np.array([bool(row[MEDIA]) for row in rows])
        batch = LongContextCollator(have_media)([dataset[PlannedStep(plan, tuple(range(len(rows))), self.pool.rank)]])
        forwards = self._forwards(plan)
        stage, *stages = (_TracedStage.of(each, trace, forwards) for each in (self.stage, *self._all_stages))
        executor = StepExecutor(
            stage, self.pool, self.device, self.place.fp32_gradients, stages, token_loss=self.place.token_loss
        )
        fused = self.place.fused or FusedLayers("")
        fused.bind(self.stage.model)
        engine = self._activations.engine(self.stage.model, rank_plan)
        if self.images is not None and (graphs := tower_graphs(self.stage.model)) is not None:
            # towers run again in plans with policies
            graphs.begin(0 if engine is not None else _ROOM_BYTES)
        try:
            with trace.hooked():
                result = executor.run(rank_plan, batch["chunks"], self.place.count(batch["num_label_tokens"]), engine=engine)
        finally:
            self._activations.close()
            fused.close()
        own = {site: module for site, module in self._own_sites.items() if site != EMBEDDING}
        return CopyRun(float(result.loss), self._take_gradients(self.stage.model, 1), trace, self._places(self.stage.model, own))

    def _trace(self, sites: Mapping[int, Any]) -> HiddenTrace:
        """Makes a trace of these sites; with images in rows, also of what the first layer gets."""
        return HiddenTrace(sites, sites.get(min(self.layers)) if self.images is not None and EMBEDDING in sites else None)

    def _kept_layers(self, stage: int) -> tuple[int, ...]:
        """Returns the number of the copy's layers in every layer range of a stage."""
        return tuple(
            sum(place - each.first_layer in range(each.num_layers) for place in self.layers) for each in self.setup.ranges[stage]
        )

    def _cut(self) -> tuple[StageModel, dict[int, Any]]:
        """Cuts this rank's stage from another copy of the model; returns it with its embedding and layers."""
        model, ranges, stage = independent_copy(self.model), self.setup.ranges, self.pool.stage
        sites = {EMBEDDING: base_of(model).get_input_embeddings()} if not stage else {}
        heads = stages_of_heads(self.setup.planner.output_shares)
        cut_model(model, ranges, stage, head_stages=heads)
        _, layers = decoder_layers(model)
        own = [place for place in self.layers for each in ranges[stage] if place - each.first_layer in range(each.num_layers)]
        sites |= {place: layers[place] for place in own}
        return replace(stage_model(model, ranges, stage, heads), attention_layers=self._kept_layers(stage)), sites

    def _lend(self) -> tuple[tuple[StageModel, ...], dict[int, Any]]:
        """Makes all stages of another copy of the model, which stays whole; returns them with its embedding and layers."""
        model = independent_copy(self.model)
        stages = [
            replace(each, attention_layers=self._kept_layers(each.stage)) for each in stages_that_lend(model, self.setup.ranges)
        ]
        _, layers = decoder_layers(model)
        sites = {EMBEDDING: base_of(model).get_input_embeddings(), **{place: layers[place] for place in self.layers}}
        return tuple(stages), sites

    def _forwards(self, plan: StepPlan) -> list[list[Part]]:
        """Returns this rank's tokens in every forward, in the order of its plan."""
        rank_plan = plan.for_rank(self.pool.rank)
        forwards = []
        for group, stage in rank_plan.rounds:
            place = group.positions.index(self.pool.position)
            actions = lent_order(group)[stage.stage] if is_lent(group) else stage.actions
            for action in (each for each in actions if each.kind == "F"):
                chunk = group.chunks[action.chunk]
                parts: list[Part] = []
                for piece in self._pieces(group, action, place):
                    if piece.document < len(chunk.spans):
                        span = chunk.spans[piece.document]
                        parts.append((span.sequence, span.start + piece.start, span.start + piece.stop, piece.first))
                forwards.append(parts)
        return forwards

    def _pieces(self, group: SequenceGroup, action: Action, place: int) -> Sequence[Piece]:
        """Returns pieces of the action's chunk on this rank, at index `place` of the group, perhaps lent to the action."""
        chunk, stages = group.chunks[action.chunk], running_stages(action)
        if len(stages) == 1:
            return rank_pieces(chunk, group.shape)[place]
        held = lent_pieces(chunk.num_tokens, group.degree, len(stages))[stages.index(self.pool.stage)][place]
        return block_of([held])

    def _take_gradients(self, model: Any, divisor: int) -> dict[str, Tensor]:
        """Returns gradients of all trained weights, divided by `divisor`, and clears the weights' `.grad`."""
        taken = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                taken[name] = gradient.double() / divisor
        model.zero_grad(set_to_none=True)
        return taken

    def _places(self, model: Any, layers: dict[int, Any]) -> dict[str, int]:
        """Returns the layer of every weight."""
        owners = {id(parameter): place for place, layer in layers.items() for parameter in layer.parameters()}
        if self.images is not None and (model is self.model or not self.stage.stage):
            owners = {id(parameter): TOWERS for parameter in tower_parameters(model)} | owners
        return {name: owners.get(id(p), ENDS) for name, p in model.named_parameters(remove_duplicate=False)}


def _cached(cache: DynamicCache, mixer: Any) -> dict[str, Tensor]:
    """Returns states of a mixer in a cache of transformers, by their names in the state book."""
    # `get_conv_state` came with transformers 5.18 or later
    layer: Any = cache.layers[mixer.layer_idx]
    convolved, scanned = layer.conv_states[0], layer.recurrent_states[0]
    states = {} if convolved is None else {CONVOLUTION: convolved}
    # a mixer may have only a convolution; several scans are stacked
    if scanned is not None:
        count = num_scans(mixer)
        states |= {scan_name(1): scanned} if count == 1 else {scan_name(n + 1): scanned[:, n] for n in range(count)}
    return states


@dataclass(frozen=True, kw_only=True)
class _TracedStage(StageModel):
    """A stage whose forwards record under the trace. waiting: tokens of each forward still to come."""

    trace: HiddenTrace
    waiting: list[list[Part]]

    @classmethod
    def of(cls, stage: StageModel, trace: HiddenTrace, waiting: list[list[Part]]) -> _TracedStage:
        """Makes a traced `stage`."""
        return cls(**{field.name: getattr(stage, field.name) for field in fields(stage)}, trace=trace, waiting=waiting)

    def forward(
        self,
        layer_range: int,
        inputs: ChunkInputs,
        hidden_1TC: Tensor | None,
        mask: Tensor | None,
        context: GroupContext | None,
        has_head: bool = True,
    ) -> Tensor:
        if layer_range == self.num_ranges:
            return super().forward(layer_range, inputs, hidden_1TC, mask, context, has_head)
        with self.trace.recording(self.waiting.pop(0)):
            output = super().forward(layer_range, inputs, hidden_1TC, mask, context, has_head)
        if context is not None:
            self.trace.keep_states(context)
        return output


def differences(run: CopyRun, plain: CopyRun, windows: dict[int, int]) -> MeasuredErrors:
    """Returns errors of a run against the plain run, by measure. Collective if only one of both has sharded gradients."""
    errors: Errors = {("loss", 0): abs(run.loss - plain.loss) / max(abs(plain.loss), 1e-30)}
    for kind, site in run.trace.records:
        if (kind, site) == ("values", EMBEDDING) and ("values", MERGED) in run.trace.records:
            # where features stand, a class may embed any token
            continue
        errors[kind, site] = difference(run.trace, plain.trace, kind, site)
        if kind == "values" and windows.get(site):
            errors["early", site] = difference(run.trace, plain.trace, kind, site, stop=windows[site])
    errors |= {("states", site): error for site, error in state_differences(run.trace, plain.trace).items()}
    squares: dict[int, tuple[float, float]] = {}
    is_sharded = False
    for name, gradient in run.gradients.items():
        expected = plain.gradients[name]
        if isinstance(gradient, DTensor) and isinstance(expected, DTensor):
            is_sharded = True
            gradient, expected = gradient.to_local(), expected.to_local()
        elif isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        gap, norm = squares.get(run.places[name], (0.0, 0.0))
        gap += float((gradient - expected).square().sum())
        squares[run.places[name]] = gap, norm + float(expected.square().sum())
    return MeasuredErrors(errors, squares, is_sharded)


def agreed_errors(own: MeasuredErrors, control: dist.ProcessGroup | None) -> Errors:
    """Returns the largest errors over all ranks, equal on every rank."""
    everyone: list[MeasuredErrors] = gather_objects(own, control)
    for measured in everyone:
        # each rank has either its shards of all gradients, or whole gradients of its own layers
        parts = everyone if measured.is_sharded else [measured]
        for place in measured.squares:
            gap, norm = (sum(part.squares[place][column] for part in parts) for column in (0, 1))
            error = (gap / norm if norm else gap) ** 0.5
            measured.errors["weights", place] = error if error == error else float("inf")
    return merged([measured.errors for measured in everyone])
