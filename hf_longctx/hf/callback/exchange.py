"""Runs one forward of a stock trainer under a plan: every rank exchanges the batch that it loaded for its shard of the plan.

A forward pre-hook reads the documents from the batch that the rank's loader made. All ranks gather all lengths, and rank 0 plans
one micro-batch. One all-to-all then moves token ids and labels to the ranks that the plan assigns them to. The trainer's own
normalisation stays right, since it divides by the label tokens of all ranks, whichever rank holds them.

TRL's trainers ask for values per token (`fused_lm_head=True`) and compute their losses from these, over whole sequences and over
pairs of sequences. So each value is sent back to the rank that loaded its token; in backward its gradient goes the other way.

Tensor names end in their shape: T tokens, B rows, S columns of a batch, 2 for token id and label.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_longctx.hf.data.fields import tower_columns
from hf_longctx.hf.log_probs.documents import FUSED, LocalDocuments, agreed_documents, read_documents
from hf_longctx.hf.models.activations import ActivationRuntime
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.positions import absent_token_ids
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import joint_call
from hf_longctx.hf.ranks.stopping import OrderlyStop
from hf_longctx.plan.core.sharding import Piece, rank_pieces
from hf_longctx.plan.core.types import Chunk, SequenceGroup, StepPlan
from hf_longctx.runtime.activations.output_head import loss_of
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.sequence_parallel import all_to_all
from hf_longctx.runtime.core.dropout import DropoutKeys
from hf_longctx.runtime.core.loss import IGNORE_INDEX, Targets
from hf_longctx.runtime.execution.executor import no_mask

logger = logging.getLogger(__name__)

# names of TRL's values per token
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class TokenExchange:
    """Moves tokens so that every rank gets its shard of `plan` from the ranks that loaded these tokens.

    `owned[r]`: lengths of the documents that rank r loaded. The plan numbers the documents of rank 0 first, then those of rank 1
    and so on.
    """

    def __init__(self, plan: StepPlan, owned: Sequence[Sequence[int]], rank: int) -> None:
        self.rank = rank
        self.owners = [owner for owner, lengths in enumerate(owned) for _ in lengths]
        self.offsets = [offset for lengths in owned for offset in list(accumulate(lengths, initial=0))[:-1]]
        self.shards = [_shard_of(plan, position) for position in range(plan.num_ranks)]

    def run(self, documents: LocalDocuments, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """The rows_T2 of this rank's shard, in the shard's order, and their positions [T]. Every rank of `group` calls it."""
        device = documents.rows_T2.device
        index_T, sent_sizes = self._sent()
        outgoing_T2 = documents.rows_T2[index_T.to(device)]
        sources = self._sources()
        counts = self._counts(sources)
        incoming_T2 = outgoing_T2.new_empty(sum(counts), 2)
        if group is None:
            incoming_T2 = outgoing_T2
        else:
            dist.all_to_all_single(incoming_T2, outgoing_T2, counts, sent_sizes, group=group)
        return self._in_order(incoming_T2, sources), self._positions().to(device)

    def back(self, values_T: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Sends each value of this rank's shard to the rank that loaded the token; returns the values of this rank's own tokens.

        They come in the order in which this rank loaded the tokens. Differentiable; every rank of `group` calls this function,
        and its backward.
        """
        index_T, sent_sizes = self._sent()
        sources = self._sources()
        mine = self.shards[self.rank]
        begins = list(accumulate((stop - start for _, start, stop in mine), initial=0))
        places_T = torch.cat([torch.zeros(0, dtype=torch.int64), *_ranges(begins, [p for places in sources for p in places])])
        outgoing_T = values_T[places_T.to(values_T.device)]
        incoming_T = outgoing_T if group is None else all_to_all(outgoing_T, self._counts(sources), sent_sizes, group)
        # each token that this rank loaded is in exactly one shard, so this inverts the order in which the tokens were sent
        return incoming_T[torch.argsort(index_T).to(values_T.device)]

    def _sent(self) -> tuple[Tensor, list[int]]:
        """Indices of this rank's tokens, by receiving rank and in the order of that rank's shard; how many go to each rank."""
        sent = [[span for span in shard if self._owner(span) == self.rank] for shard in self.shards]
        index = [torch.arange(start, stop) + self.offsets[number] for spans in sent for number, start, stop in spans]
        sizes = [sum(stop - start for _, start, stop in spans) for spans in sent]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *index]), sizes

    def _sources(self) -> list[list[int]]:
        """For every sending rank, the places in this rank's shard that its tokens fill."""
        mine = self.shards[self.rank]
        return [[place for place, span in enumerate(mine) if self._owner(span) == owner] for owner in range(len(self.shards))]

    def _counts(self, sources: list[list[int]]) -> list[int]:
        """Number of tokens that come from each rank."""
        mine = self.shards[self.rank]
        return [sum(mine[place][2] - mine[place][1] for place in places) for places in sources]

    def _in_order(self, incoming_T2: Tensor, sources: list[list[int]]) -> Tensor:
        """Sorts received rows, which come rank by rank, into the order of the shard; dummy tokens have id 0 and no label."""
        mine = self.shards[self.rank]
        arrived = [place for places in sources for place in places]
        parts = incoming_T2.split([mine[place][2] - mine[place][1] for place in arrived])
        by_place = dict(zip(arrived, parts, strict=True))
        dummy_12 = incoming_T2.new_tensor([[0, IGNORE_INDEX]])
        return torch.cat([by_place.get(place, dummy_12) for place in range(len(mine))])

    def _positions(self) -> Tensor:
        return torch.cat([torch.arange(start, stop) for _, start, stop in self.shards[self.rank]])

    def _owner(self, span: tuple[int, int, int]) -> int:
        """The rank that loaded a span; -1 for a dummy token."""
        return self.owners[span[0]] if span[0] >= 0 else -1


def _ranges(begins: Sequence[int], places: Sequence[int]) -> list[Tensor]:
    """Indices of the tokens at every place, where place p holds [begins[p], begins[p + 1])."""
    return [torch.arange(begins[place], begins[place + 1]) for place in places]


def _shard_of(plan: StepPlan, position: int) -> list[tuple[int, int, int]]:
    """(sequence, first token, end) of each piece that a rank holds in the plan's micro-batch; a dummy token has sequence -1."""
    group, chunk = _only_chunk(plan, position)
    pieces = rank_pieces(chunk, group.shape)[group.positions.index(position)]

    def place(piece: Piece) -> tuple[int, int, int]:
        if piece.document >= len(chunk.spans):
            return (-1, 0, 1)
        span = chunk.spans[piece.document]
        return (span.sequence, span.start + piece.start, span.start + piece.stop)

    return [place(piece) for piece in pieces]


def _only_chunk(plan: StepPlan, position: int) -> tuple[SequenceGroup, Chunk]:
    ((group, _),) = plan.for_rank(position).rounds
    (chunk,) = group.chunks
    return group, chunk


class SequenceExchange:
    """Two hooks of a model in training: one exchanges the batch before a forward, the other checks attention calls after it.

    A forward is collective over all ranks while the model trains; in eval mode the hooks do nothing. `source` must plan one
    micro-batch; `activations` executes its policies; `stop` gets the signals that asked ranks to stop; `enter_dropout` gives the
    model's dropout the next plan. Raises ValueError on every rank if some rank has a batch that cannot run.
    """

    def __init__(
        self,
        source: PlanSource,
        activations: ActivationRuntime,
        max_length: int,
        num_attention_layers: int,
        timeout_s: float,
        stop: OrderlyStop,
        enter_dropout: Callable[[StepPlan], DropoutKeys | None],
    ) -> None:
        self.source, self.pool, self.activations, self.stop = source, source.pool, activations, stop
        self.max_length, self.num_attention_layers, self.timeout_s = max_length, num_attention_layers, timeout_s
        self.enter_dropout = enter_dropout
        self.num_forwards = 0
        self.last_plan: StepPlan | None = None
        # names code that the model got after the start and that no test has compared
        self.added_code: Callable[[], str] = str
        # plans since the last log; bounded, for trainings that never log
        self.plans: deque[StepPlan] = deque(maxlen=1000)
        self._context: GroupContext | None = None
        # divisor of a tiled loss; None if the model computes its own loss
        self._num_items: Any = None
        # contexts that last for one forward
        self._during = ExitStack()
        # the way back of values per token to their ranks, if the forward returns such values
        self._returning: tuple[TokenExchange, LocalDocuments] | None = None

    def before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replaces this rank's batch among the model's arguments by its shard of the plan."""
        if not model.training:
            return None
        self.num_forwards += 1
        with joint_call("", self.timeout_s, self.stop.present_step):
            documents, owned = self._agree(args, kwargs, absent_token_ids(base_of(model)))
            plan = self._plan([length for lengths in owned for length in lengths])
            exchange = TokenExchange(plan, owned, self.pool.rank)
            rows_T2, positions_T = exchange.run(documents, self.pool.everyone)
        labels_1T, positions_1T = rows_T2[:, 1].unsqueeze(0), positions_T.unsqueeze(0)
        is_fused = bool(kwargs.get(FUSED))
        self._returning = (exchange, documents) if is_fused else None
        dropout = self.enter_dropout(plan)
        context, is_summed = self._begin(model, plan, labels_1T, is_fused)
        self._context = context.placed(positions_1T, dropout)
        self._during.enter_context(self._context.running())
        # models compute a loss only from labels, and do not shift labels if they get shifted ones too
        names = ("return_dict",) if is_summed else ("num_items_in_batch", "return_dict", FUSED)
        kept: dict[str, Any] = {name: kwargs[name] for name in names if name in kwargs}
        self._num_items = kwargs["num_items_in_batch"] if is_summed else None
        return (), {
            **kept,
            "input_ids": rows_T2[:, 0].unsqueeze(0),
            "position_ids": positions_1T,
            "attention_mask": no_mask(rows_T2.device),
            **({} if is_summed else {"labels": labels_1T, "shift_labels": labels_1T}),
            "use_cache": False,
            "longctx": self._context,
        }

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Replaces the loss of the output if the head summed it. Raises RuntimeError if some attention call did not get the plan.

        After a forward that raised, torch calls this hook with no output.
        """
        context, self._context = self._context, None
        if output is None:
            # the forward raised, so nothing is checked
            self._during.__exit__(RuntimeError, RuntimeError("the forward raised"), None)
            return None
        self._during.close()
        if context is None:
            return None
        context.check_calls(self.num_attention_layers)
        if self._returning is not None:
            return self._returned(output, *self._returning)
        if self._num_items is None:
            # these logits are not those of the batch, so a trainer's own loss must not read them
            return type(output)(loss=output.loss)
        return type(output)(loss=loss_of(output.logits) / self._num_items)

    def _returned(self, output: Any, exchange: TokenExchange, documents: LocalDocuments) -> Any:
        """The output of a fused head as a forward of the rank's own batch would give it: [B, S - 1], zero without a label."""
        kept_BS = documents.kept_BS
        found: dict[str, Any] = {}
        with joint_call("", self.timeout_s, self.stop.present_step):
            for name in _PER_TOKEN:
                if (values_1T := getattr(output, name, None)) is not None:
                    # backends do not send booleans
                    sent_T = values_1T.reshape(-1).to(torch.uint8 if values_1T.dtype == torch.bool else values_1T.dtype)
                    values_T = exchange.back(sent_T, self.pool.everyone).to(values_1T.dtype)
                    values_BS = values_T.new_zeros(kept_BS.shape).masked_scatter(kept_BS, values_T)
                    found[name] = values_BS[:, :-1]
        labels_BS = torch.full_like(kept_BS, IGNORE_INDEX, dtype=torch.int64)
        labels_BS[kept_BS] = documents.rows_T2[:, 1]
        mask_BS = (labels_BS != IGNORE_INDEX)[:, :-1]
        return type(output)(loss=-found["log_probs"].sum() / mask_BS.sum().clamp(min=1), label_mask=mask_BS, **found)

    def _begin(self, model: nn.Module, plan: StepPlan, labels_1T: Tensor, is_fused: bool) -> tuple[GroupContext, bool]:
        """The context of this rank's chunk under its activation policy, and whether the head sums the loss.

        A fused head makes its own tiles, so it does not sum. Without a backward nothing is saved, so no policy is used.
        """
        rank_plan = plan.for_rank(self.pool.rank)
        group, chunk = _only_chunk(plan, self.pool.rank)
        if torch.is_grad_enabled() and (line := self.activations.reserve(plan.estimate.host_bytes)) and self.pool.rank == 0:
            logger.warning(line)
        context, engine = self.pool.context(group, chunk), self.activations.engine(model, rank_plan)
        ((_, stage),) = rank_plan.rounds
        if engine is None or not stage.activations or not torch.is_grad_enabled():
            return context, False
        (policy,) = stage.activations
        is_summed = policy.tile_tokens > 0 and not is_fused
        if is_summed:
            assert engine.head is not None
            # backward follows at once: a stock trainer makes one forward at a time
            self._during.enter_context(engine.head.summing(Targets(labels_1T), policy.loss_tile_tokens, keep_gradients=True))
        activations = engine.begin(policy)
        self._during.enter_context(activations.running())
        return replace(context, activations=activations), is_summed

    def _agree(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], placeholders: Collection[int]
    ) -> tuple[LocalDocuments, list[list[int]]]:
        """This rank's documents, and the lengths of every rank's documents; raises on every rank if any rank has a problem."""

        def read() -> LocalDocuments:
            if args:
                raise ValueError("the model was called with positional arguments; call it with keywords, as Trainer does")
            if problem := self.added_code():
                raise ValueError(problem)
            if pixels := tower_columns(name for name, value in kwargs.items() if value is not None):
                raise ValueError(
                    f"the batch holds {', '.join(pixels)}, and the callback alone plans rows of text; attach it to the trainer "
                    f"(LongContextCallback.attach), and give rows with images to tokenise_chat and the model's processor"
                )
            documents = read_documents(kwargs)
            if found := sorted(set(placeholders) & set(documents.rows_T2[:, 0].tolist())):
                raise ValueError(
                    f"the batch has token {found[0]}, which stands for an image, sound or video, or for padding, but the "
                    f"callback alone plans rows of text; attach it to the trainer (LongContextCallback.attach), or remove such "
                    f"rows (dataset.filter)"
                )
            if documents.lengths and (longest := max(documents.lengths)) > self.max_length:
                raise ValueError(
                    f"the batch has a sequence of {longest} tokens, above max_length {self.max_length}; cut it in the dataset, "
                    f"raise max_length, or attach the callback to the trainer, where long_sequences can cut it"
                )
            return documents

        headline = f"forward {self.num_forwards} cannot run under a plan"
        said = [*self.stop.asked(), self.activations.beside_bytes]
        documents, lengths, everyone = agreed_documents(read, said, self.pool.control, headline)
        *asked, beside_bytes = zip(*everyone, strict=True)
        self.stop.agree([sum(counts) for counts in asked])
        self.activations.agree(max(beside_bytes))
        return documents, lengths

    def _plan(self, lengths: list[int]) -> StepPlan:
        try:
            (plan,) = self.source.plans([(self.num_forwards, lengths)], explore=False)
        except ValueError as error:
            raise ValueError(
                f"{error}; lower per_device_train_batch_size and raise gradient_accumulation_steps, raise tokens_per_rank, or "
                f"attach the callback to the trainer (LongContextCallback.attach), which runs several micro-batches"
            ) from error
        self.last_plan = plan
        self.plans.append(plan)
        return plan
