"""Trains losses of log-probabilities under plans: one pass computes them, a second one trains a weighted sum of them.

Preference losses (DPO, KTO, ...) and policy losses (GRPO, RLOO) depend on the model only through the log-probabilities of label
tokens: L = f(l_1, ..., l_n). They mix tokens of different sequences, which a plan may put into different chunks, slices, groups
and micro-batches, so L is known only after all forwards. But its gradient with respect to the weights is

    dL = sum_t c_t dl_t     with     c_t = df / dl_t,

and the numbers c_t are known before the first backward. So there are two passes. The first computes all l_t under a plan, without
gradients, and sends each to the rank whose trainer loaded the row; the trainer's own code computes f from them, and autograd c_t.
The second pass trains the token loss sum_t -c_t (-l_t) under the same plan, by weights of tokens. This is exact for any f, and
costs one more forward. f may also depend on the balance of a model's experts: the first pass counts the experts of tokens, and
the second adds the balance's gradient as in any plan (`runtime/execution/experts.py`), times df / d balance. A loss that depends
on the model in other ways (on entropies, on weights, on a module that it calls itself) is refused, since its gradient would be
lost or counted once per rank.

A policy and its reference model run in the same way; a reference has only the first pass.

A policy that generates is often scored before its loss: for old log-probabilities, which importance ratios need. Its first pass
is then left out for rows that were scored with the present weights (`Remembered`). For other rows it is left out if the loss is a
sum over tokens: then c_t depends on l_t and numbers of its token alone, so that forward and backward run together, before the
trainer's own code asks for the log-probabilities (`TwoPasses.train_ahead`). Its loss and its slopes c_t must then be those that
were trained, or the step raises an error.

Shapes: B rows, S columns of this rank's batch, n tokens of all ranks, k values of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.data.collator import PlannedStep, TokenSequence, chunk_inputs, step_batch
from hf_longctx.hf.data.resume import check_resumed
from hf_longctx.hf.data.sampler import IntArray
from hf_longctx.hf.log_probs.documents import FUSED, LocalDocuments, agreed_documents, read_documents
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.ranks.loader_workers import keep_workers
from hf_longctx.plan.core.sharding import rank_pieces
from hf_longctx.plan.core.types import Chunk, RankPlan, SequenceGroup, StepPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.core.binding import replace_forward
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.dropout import SITE
from hf_longctx.runtime.core.loss import IGNORE_INDEX, LossOfLogProbs, Scoring
from hf_longctx.runtime.execution.checks import forward_only
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.parameters.sharded import free_gathered
from hf_longctx.runtime.process_groups import sum_over_ranks

# keyword of a forward that requests the balance of the experts
ROUTED = "output_router_logits"
# tokens of which a rank keeps values, 40 bytes each on the host
_MOST_TOKENS = 2**23
# weights that are read at a time for their state, each through a product of 8 bytes
_STATE_BLOCK = 2**22
# headline of errors about losses that were trained ahead
_OTHER_LOSS = "the trainer's loss is not the one that plans have trained in one pass"
_IN_TWO = "write it as _compute_loss of a subclass, which is trained in two passes"
# relative distance of log-probabilities that rounding may not tell apart; of equal slopes, and their distance at weight 1
_NEARBY, _SLOPES, _LEAST_SLOPE = 1e-6, 1e-3, 1e-5
# bytes of a number -> integers of the same bits
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TokenValues:
    """Values that a forward with TRL's fused head returns, each [B, S - 1], 0 without a label. The names are TRL's.

    Only `log_probs` and `aux_loss` have a gradient. aux_loss: balance of the experts over the tokens of all ranks, a scalar; None
    unless requested.
    """

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor
    mean_logits: Tensor
    log_sum_sq_probs: Tensor
    label_mask: Tensor
    aux_loss: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """Mean cross-entropy of this rank's label tokens."""
        return -self.log_probs.sum() / self.label_mask.sum().clamp(min=1)


class Remembered:
    """Values of documents of this rank that were scored since the weights of any rank last changed.

    Documents are found by their tokens and labels, apart for each mode of the model: whether it trains, and which adapters are
    active, with which scale. The state of weights is read from their bits, since a change through `.data` leaves no other trace.
    While dropout is active nothing is found, since values depend on masks. The latest values stay, up to a limit.
    """

    def __init__(self) -> None:
        self._states: list[int] = []
        self._values: dict[bytes, Tensor] = {}
        # names of the documents of the last `find`
        self._keys: list[bytes] = []

    def find(
        self, model: nn.Module, documents: LocalDocuments, temperature: float, control: dist.ProcessGroup | None
    ) -> Tensor | None:
        """Returns values [T, k] of these documents; None if any rank has one that is not known. Collective over `control`."""
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        adapters = [
            (layer.disable_adapters, layer.active_adapters, layer.merged, getattr(layer, "scaling", None)) for layer in layers
        ]
        mode = repr((model.training, adapters, temperature)).encode()
        rows = documents.rows_T2.cpu().split(documents.lengths)
        self._keys = [xxhash.xxh3_128_digest(mode + row_T2.numpy().tobytes()) for row_T2 in rows]
        drops = any(SITE in vars(module) and module.training for module in model.modules())
        own = weights_state(model), not drops and all(key in self._values for key in self._keys)
        states, are_known = zip(*gather_objects(own, control), strict=True)
        if list(states) != self._states:
            self._states, self._values = list(states), {}
            return None
        if not all(are_known):
            return None
        # a rank may have no rows
        nothing = torch.zeros(0, 5, dtype=torch.float64)
        return torch.cat([nothing, *(self._values[key] for key in self._keys)]).to(documents.rows_T2.device)

    def keep(self, documents: LocalDocuments, values_Tk: Tensor) -> None:
        """Keeps values of the documents of the last `find`, which had none."""
        for key, part in zip(self._keys, values_Tk.split(documents.lengths), strict=True):
            # the latest are the last
            self._values.pop(key, None)
            self._values[key] = part.to("cpu", copy=True)
        num_tokens = sum(map(len, self._values.values()))
        while num_tokens > _MOST_TOKENS:
            num_tokens -= len(self._values.pop(next(iter(self._values))))


@torch.no_grad()
def weights_state(model: nn.Module) -> int:
    """Identifies the bits of all weights and buffers on this rank, and their order."""
    tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (*model.parameters(), *model.buffers())]
    factors: dict[torch.device, Tensor] = {}
    sums = []
    for tensor in tensors:
        for block in tensor.detach().view(_BITS[tensor.element_size()]).reshape(-1).split(_STATE_BLOCK):
            known = factors.get(block.device)
            if known is None or len(known) < len(block):
                known = factors[block.device] = _factors(len(block), block.device)
            sums.append((block * known[: len(block)]).sum())
    # on one device, so that the host waits once
    bits = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    return hash(tuple(bits))


def _factors(count: int, device: torch.device) -> Tensor:
    """Odd integers [count] without a pattern, by which changes at several places do not cancel; products wrap around."""
    # multiplications and shifts of MurmurHash3's finalizer
    x = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    x = (x ^ (x >> 33)) * -0xAE502812AA7333
    return (x ^ (x >> 29)) | 1


@dataclass(frozen=True)
class ScoredModel:
    """A model whose forwards run under plans, with its current executor and the engine of its activation policies.

    remembered: values of rows that need not be scored again; None if every forward runs.
    """

    executor: Callable[[], StepExecutor]
    engine: Callable[[nn.Module, RankPlan], ActivationEngine | None]
    remembered: Remembered | None = None


@dataclass(frozen=True)
class Batch:
    """The rows of all ranks under one plan."""

    plan: StepPlan
    documents: LocalDocuments
    # token id and label of the next token, of all ranks' documents in order, on the host
    rows_n2: Tensor
    # number of the first token of each document
    firsts: list[int]
    # this rank's tokens among them
    own: slice

    def chunks(self, rank: int, weights_n: Tensor | None = None, values_nK: Tensor | None = None) -> list[list[ChunkInputs]]:
        """Makes the inputs of this rank's chunks, by micro-batch.

        weights_n: weight of every label in the loss. values_nK: labels, IGNORE_INDEX for none, and other values of tokens, which
        a loss reads in place of the label. Both on the host.
        """
        _, position = self.plan.place(rank)
        sequences = {}
        for number, (first, length) in enumerate(zip(self.firsts, self.plan.lengths, strict=True)):
            tokens = slice(first, first + length)
            weights, values = (None if each is None else each[tokens] for each in (weights_n, values_nK))
            labels = self.rows_n2[tokens, 1]
            if values is not None:
                labels = torch.arange(length).where(values[:, 0] != IGNORE_INDEX, IGNORE_INDEX)
            sequences[number] = TokenSequence(self.rows_n2[tokens, 0], labels, 0, weights, values)
        rounds = self.plan.for_rank(rank).rounds
        return [[chunk_inputs(chunk, group, position, sequences) for chunk in group.chunks] for group, _ in rounds]

    def step(self, rank: int) -> PlannedStep:
        """Makes the planned step on this rank, whose sequences are the documents."""
        return PlannedStep(self.plan, tuple(range(len(self.plan.lengths))), rank)


@dataclass(frozen=True)
class Ahead:
    """A batch whose values are known before the trainer's own code asks for them."""

    batch: Batch
    # scores of this rank's tokens
    values_Tk: Tensor
    # loss that was trained in the same pass; None if a second pass is to come
    loss: LossOfLogProbs | None = None
    # labels of the tokens, and columns of their loss, whose last one is a weight
    rows_TK: Tensor | None = None

    def problem(self, values_BS: Tensor) -> str:
        """Says how the gradient of `values_BS` differs from the slopes that were trained; empty if it does not.

        A ratio at the limit of a clipped loss may be rounded to either side, so slopes beside it are compared, too.
        """
        if self.loss is None or self.rows_TK is None:
            return ""
        found_BS = torch.zeros_like(values_BS) if values_BS.grad is None else values_BS.grad
        found_T = nn.functional.pad(found_BS, (0, 1))[self.batch.documents.kept_BS]
        own_T = (-self.values_Tk[:, 0]).to(found_T)
        given = {name: self.rows_TK[:, place].to(found_T) for place, name in enumerate(self.loss.columns, 1)}
        least_T = _LEAST_SLOPE * given[self.loss.columns[-1]].abs()
        is_same_T = torch.zeros_like(found_T, dtype=torch.bool)
        for factor in (1.0, 1 + _NEARBY, 1 - _NEARBY):
            with torch.enable_grad():
                near_T = (own_T * factor).requires_grad_()
                (slopes_T,) = torch.autograd.grad(self.loss.loss(near_T, given).sum(), near_T)
            is_near_T = (found_T - slopes_T).abs() <= _SLOPES * slopes_T.abs() + least_T
            is_same_T |= is_near_T | torch.isclose(found_T, slopes_T, rtol=0.0, atol=0.0, equal_nan=True)
        num_other = int((~is_same_T).sum())
        return f"{num_other} of {len(own_T)} tokens have other slopes; {_IN_TWO}" if num_other else ""


@dataclass(frozen=True)
class Untrained:
    """A batch that waits for its second pass, unless it was trained `ahead`."""

    batch: Batch
    # log-probabilities [B, S - 1], a leaf that collects their gradient
    values: Tensor
    # values, by name, that a loss may read but not train
    others: dict[str, Tensor] = field(default_factory=dict)
    # balance of the experts, a leaf too, and the sums behind it (`RouterBalance.summed`); None without balanced experts
    aux_loss: Tensor | None = None
    loads_2E: Tensor | None = None
    ahead: Ahead | None = None

    @property
    def is_trained(self) -> bool:
        """Whether forward and backward have run together."""
        return self.ahead is not None and self.ahead.loss is not None


class TwoPasses:
    """Runs forwards of a trainer's models under plans, and makes the batches of the second pass.

    All methods are collective over the ranks of `source`. max_length: most tokens of a sequence. placeholders: token ids of
    images, sound or video. temperature: of the distribution whose log-probabilities are trained.
    """

    def __init__(self, source: PlanSource, max_length: int, placeholders: Collection[int], temperature: float = 1.0) -> None:
        self.source, self.pool = source, source.pool
        self.max_length, self.placeholders = max_length, frozenset(placeholders)
        self.scoring = Scoring(temperature, with_extras=True)
        self._num_plans = 0
        self._waiting: list[Untrained] = []
        self._ahead: Ahead | None = None
        self._policy: ScoredModel | None = None
        # gradients before the trainer's own backward
        self._marks: dict[str, tuple[int, int] | None] = {}

    def bind(self, model: Any, scored: ScoredModel, is_trained: bool) -> Callable[[], None]:
        """Makes calls of `model` with a fused head run under plans; returns a function that undoes this.

        is_trained: whether calls with gradients are followed by a second pass; such a model refuses other calls with gradients
        while it trains, since they would bypass the plans.
        """
        before = model.forward
        if is_trained:
            self._policy = scored

        def forward(*args: Any, **keywords: Any) -> Any:
            if keywords.get(FUSED):
                is_leaf = torch.is_grad_enabled() and is_trained
                return self.values(scored, lambda: self._read(args, keywords), is_leaf, bool(keywords.get(ROUTED)))
            if is_trained and torch.is_grad_enabled() and model.training and "longctx" not in keywords:
                raise ValueError(
                    f"the loss called {type(model).__name__} without {FUSED}=True, so its gradient would bypass the plans; "
                    f"compute it from values of a forward with {FUSED}=True, as TRL does, or call the model in torch.no_grad()"
                )
            return before(*args, **keywords)

        return replace_forward(model, forward)

    def values(
        self, scored: ScoredModel, read: Callable[[], LocalDocuments], is_trained: bool, is_routed: bool = False
    ) -> TokenValues:
        """Runs the first pass: values of this rank's tokens, computed under one plan for the documents of all ranks.

        read: returns those of this rank, perhaps none. is_trained: log-probabilities are a leaf with a gradient, and the batch
        waits for `second_pass`. is_routed: the balance of the experts is asked for, too. Raises ValueError on every rank if any
        rank has documents that plans cannot run.
        """
        ahead = self._taken_ahead(read) if is_trained else None
        batch = ahead.batch if ahead else self._planned(read, explore=is_trained, alike=self._alike())
        executor = scored.executor()
        rank_plan = forward_only(batch.plan.for_rank(self.pool.rank))
        engine = scored.engine(executor.model, rank_plan)
        routers = executor.routers if is_trained or is_routed else None
        if routers is not None:
            routers.forget()
        documents, memory = batch.documents, scored.remembered
        own_Tk = ahead.values_Tk if ahead else None
        if own_Tk is None and memory is not None:
            own_Tk = memory.find(executor.model, documents, self.scoring.temperature, self.pool.control)
        # the balance of the experts is counted in a forward
        if own_Tk is None or routers is not None:
            chunks = batch.chunks(self.pool.rank)
            with outside_autocast(executor.model):
                found = executor.score(rank_plan, chunks, engine, self.scoring, is_counted=routers is not None)
            tables = [{index: each.table_T5 for index, each in scores.items()} for scores in found]
            own_Tk = self._from_all_ranks(batch, rank_plan, tables, 5)[batch.own]
            if memory is not None:
                memory.keep(documents, own_Tk)
        # TRL computes them in fp32
        dtype = torch.promote_types(next(executor.model.parameters()).dtype, torch.float32)
        labels_BS = torch.full_like(documents.kept_BS, IGNORE_INDEX, dtype=torch.int64)
        labels_BS[documents.kept_BS] = documents.rows_T2[:, 1]
        mask_BS = labels_BS != IGNORE_INDEX

        def column(place: int) -> Tensor:
            own_T = own_Tk[:, place].to(documents.rows_T2.device, dtype)
            own_BS = own_T.new_zeros(mask_BS.shape).masked_scatter(documents.kept_BS, own_T)
            return own_BS.where(mask_BS, 0)[:, :-1].contiguous()

        losses_BS, is_right_BS, entropies_BS, mean_BS, squares_BS = map(column, range(5))
        log_probs_BS = losses_BS.neg().requires_grad_(is_trained)
        loads_2E = aux_loss = None
        if routers is not None:
            loads_2E = routers.summed(self.pool.everyone)
            aux_loss = routers.take(loads_2E, 0.0).to(dtype).requires_grad_(is_trained)
            routers.forget()
        if is_trained:
            # leaves too, so that an unused gradient is detected
            others = {"entropy": entropies_BS, "mean_logits": mean_BS, "log_sum_sq_probs": squares_BS}
            others = {name: values_BS.requires_grad_() for name, values_BS in others.items()}
            self._waiting.append(Untrained(batch, log_probs_BS, others, aux_loss, loads_2E, ahead))
        return TokenValues(log_probs_BS, entropies_BS, is_right_BS.bool(), mean_BS, squares_BS, mask_BS[:, :-1], aux_loss)

    @contextmanager
    def backward_of_loss(self, model: nn.Module) -> Iterator[None]:
        """Context for the trainer's own forward and backward. Collective at its end.

        Raises ValueError on every rank if the backward has reached a weight, or values that the second pass does not train.
        """
        self._marks = _gradient_marks(model)
        yield
        reached = [name for name, mark in _gradient_marks(model).items() if mark != self._marks[name]]
        found = [f"the weight {name} (a penalty on weights, or a module that the loss called)" for name in reached[:1]]
        others = [item for each in self._waiting for item in each.others.items()]
        found += [f"the values {name!r} of tokens" for name, x in others if x.grad is not None and bool(x.grad.any())]
        problems = [f"its backward has reached {each}; leave that out of the loss" for each in found]
        headline = "the loss depends on the model by more than what plans train (log-probabilities, or rewards)"
        raise_together(problems, self.pool.control, headline)

    def second_pass(self) -> Iterator[dict[str, Any]]:
        """Yields the waiting batches, each with weights of its tokens, whose plans train the loss whose backward has run.

        The loss is the mean over ranks, as with DDP: each rank computed its own from its rows. "balance" of a batch has the
        arguments of `StepExecutor.balance`, for a model whose experts are balanced.
        """
        waiting, self._waiting = self._waiting, []
        if any(each.is_trained for each in waiting):
            problems = [each.ahead.problem(each.values) for each in waiting if each.ahead is not None]
            raise_together([each for each in problems if each], self.pool.control, _OTHER_LOSS)
        for each in waiting:
            if each.is_trained:
                continue
            batch, rank, num_ranks = each.batch, self.pool.rank, self.pool.num_ranks
            slopes = torch.zeros_like(each.values) if each.values.grad is None else each.values.grad
            made = step_batch(batch.step(rank), batch.chunks(rank, self._weights(batch, slopes) / num_ranks))
            if each.aux_loss is not None and each.loads_2E is not None:
                slope_1 = each.loads_2E.new_zeros(1) if each.aux_loss.grad is None else each.aux_loss.grad.double().reshape(1)
                made["balance"] = each.loads_2E, sum_over_ranks(slope_1, self.pool.everyone)[0] / num_ranks
            yield made

    def _weights(self, batch: Batch, slopes: Tensor) -> Tensor:
        """Returns the weight [n] of every token in the second pass, on the host. slopes: of this rank's loss for its values."""
        # the last column has no label
        slopes_T = nn.functional.pad(slopes, (0, 1))[batch.documents.kept_BS].double()
        slopes_n1 = self._joined(slopes_T.unsqueeze(1), batch.own, len(batch.rows_n2))
        # weights multiply cross-entropies, the negatives of log-probabilities
        return -slopes_n1.squeeze(1).cpu()

    def single_pass(
        self, read: Callable[[], tuple[LocalDocuments, Tensor]], columns: Sequence[str], temperature: float
    ) -> dict[str, Any]:
        """Makes the batch of a loss that is a sum over tokens, so that its slopes need no pass before; see `LossOfLogProbs`.

        read: returns this rank's documents, perhaps none, and values [T, K] of their tokens' labels, named `columns`. Raises
        ValueError on every rank if it does on any.
        """
        batch, values_TK = self._planned_by_token(read, columns, temperature)
        return self._by_token(batch, torch.cat([batch.documents.rows_T2[:, 1:], values_TK], dim=1))

    def train_ahead(
        self,
        read: Callable[[], tuple[LocalDocuments, Tensor]],
        loss: LossOfLogProbs,
        train: Callable[[dict[str, Any], LossOfLogProbs], None],
    ) -> None:
        """Trains a loss that is a sum over tokens before the trainer's own code asks for values, unless these are remembered.

        read: as in `single_pass`; the last column is a weight, and a token of weight 0 is not computed. train: runs one batch
        forward and backward with this loss. The next forward that is trained must be of the same rows, and returns what this
        pass has computed. Collective.
        """
        assert self._policy is not None, "bind has not run"
        batch, values_TK = self._planned_by_token(read, loss.columns, loss.temperature)
        model, memory = self._policy.executor().model, self._policy.remembered
        known_Tk = None if memory is None else memory.find(model, batch.documents, loss.temperature, self.pool.control)
        if known_Tk is not None:
            self._ahead = Ahead(batch, known_Tk)
            return
        labels_T = batch.documents.rows_T2[:, 1].where(values_TK[:, -1] != 0, IGNORE_INDEX)
        num_tokens, device = len(batch.rows_n2), labels_T.device
        # row 0 is of tokens without a label
        scores_n5 = torch.zeros(1 + num_tokens, 5, dtype=torch.float64, device=device)
        numbers_T = torch.arange(1 + batch.own.start, 1 + batch.own.stop, dtype=torch.float64, device=device)
        rows_TK = torch.cat([labels_T[:, None], values_TK, numbers_T[:, None]], dim=1)
        kept = replace(loss, scores_n5=scores_n5)
        with outside_autocast(model):
            train(self._by_token(batch, rows_TK), kept)
        own_T5 = self._joined(scores_n5[1:], slice(0, num_tokens), num_tokens)[batch.own]
        self._ahead = Ahead(batch, own_T5, loss, rows_TK)
        self._marks = _gradient_marks(model)

    def _taken_ahead(self, read: Callable[[], LocalDocuments]) -> Ahead | None:
        """Returns the batch that was computed ahead of this forward. Raises ValueError on every rank if it has other rows."""
        ahead, self._ahead = self._ahead, None
        if any(each.is_trained for each in self._waiting):
            raise ValueError(f"{_OTHER_LOSS}: it asks for log-probabilities twice; {_IN_TWO}")
        if ahead is None:
            return None
        found, known = read(), ahead.batch.documents
        is_same = found.lengths == known.lengths and torch.equal(found.rows_T2, known.rows_T2)
        raise_together([] if is_same else [f"its rows are others; {_IN_TWO}"], self.pool.control, _OTHER_LOSS)
        return ahead

    def _planned_by_token(
        self, read: Callable[[], tuple[LocalDocuments, Tensor]], columns: Sequence[str], temperature: float
    ) -> tuple[Batch, Tensor]:
        """Plans documents of all ranks whose tokens have columns, and returns this rank's [T, K]."""
        own: list[Tensor] = []

        def documents() -> LocalDocuments:
            found, values_TK = read()
            own.append(values_TK)
            return self.checked(found)

        batch = self._planned(documents, explore=True, alike=f"columns {', '.join(columns)} and temperature {temperature}")
        return batch, own[0]

    def _by_token(self, batch: Batch, rows_TK: Tensor) -> dict[str, Any]:
        """Makes the inputs of a pass with labels and columns of tokens, of which this rank has `rows_TK`."""
        rows_nK = self._joined(rows_TK, batch.own, len(batch.rows_n2)).cpu()
        return step_batch(batch.step(self.pool.rank), batch.chunks(self.pool.rank, values_nK=rows_nK))

    @property
    def is_read(self) -> bool:
        """Whether a loss has asked for values that it may train."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Drops the batches of an aborted step."""
        self._waiting, self._ahead = [], None

    def _alike(self) -> str:
        return f"temperature {self.scoring.temperature}"

    def _planned(self, read: Callable[[], LocalDocuments], explore: bool, alike: str = "") -> Batch:
        """Reads this rank's documents, gathers those of all others, and plans them. alike: what is equal on all ranks."""
        self._num_plans += 1
        documents, everyone, found = agreed_documents(read, alike, self.pool.control, "a batch cannot run under a plan")
        if len(set(found)) > 1:
            given = "; ".join(f"{each} (rank {rank})" for rank, each in enumerate(found))
            raise ValueError(f"ranks called with {given}; give all the same, since they compute each other's tokens")
        if not any(everyone):
            raise ValueError("no rank has a row, so there is nothing to plan; leave the call out on all ranks")
        lengths = [length for of_rank in everyone for length in of_rank]
        before = sum(sum(of_rank) for of_rank in everyone[: self.pool.rank])
        own = slice(before, before + sum(documents.lengths))
        (plan,) = self.source.plans([(self._num_plans, lengths)], explore=explore)
        rows_n2 = self._joined(documents.rows_T2, own, sum(lengths)).cpu()
        return Batch(plan, documents, rows_n2, [0, *accumulate(lengths)][:-1], own)

    def _read(self, args: Sequence[Any], inputs: dict[str, Any]) -> LocalDocuments:
        if args:
            raise ValueError("the model was called with positional arguments; call it with keywords, as TRL does")
        return self.checked(read_documents({name: value for name, value in inputs.items() if name != ROUTED}))

    def checked(self, documents: LocalDocuments) -> LocalDocuments:
        """Returns these documents; raises ValueError for placeholders of images, and for one that is too long."""
        if found := sorted(self.placeholders & set(documents.rows_T2[:, 0].tolist())):
            raise ValueError(
                f"the batch has token {found[0]}, which stands for an image, sound or video, but plans run rows of text alone; "
                f"remove such rows, for example with dataset.filter"
            )
        if documents.lengths and (longest := max(documents.lengths)) > self.max_length:
            raise ValueError(
                f"the batch has a sequence of {longest} tokens, and {self.max_length} are the most that plans may have here; cut "
                f"it (max_length or max_completion_length of TRL's arguments), or raise max_length of LongContextConfig"
            )
        return documents

    def _from_all_ranks(self, batch: Batch, plan: RankPlan, found: Sequence[dict[int, Tensor]], num_values: int) -> Tensor:
        """Returns values [n, k] of all tokens, in the order of `rows_n2`; each comes from one rank, the others add zero.

        found: by micro-batch, values [T, k] of the tokens of each chunk, by its number.
        """
        num_tokens = len(batch.rows_n2)
        values_nk = torch.zeros(num_tokens, num_values, dtype=torch.float64, device=batch.documents.rows_T2.device)
        _, position = batch.plan.place(self.pool.rank)
        for (group, _), of_chunks in zip(plan.rounds, found, strict=True):
            for index, values_Tk in of_chunks.items():
                places_T = torch.from_numpy(token_places(group.chunks[index], group, position, batch.firsts))
                is_real_T = places_T >= 0
                values_nk[places_T[is_real_T].to(values_nk.device)] = values_Tk.to(values_nk)[is_real_T.to(values_nk.device)]
        return self._joined(values_nk, slice(0, num_tokens), num_tokens)

    def _joined(self, own_Tk: Tensor, own: slice, num_tokens: int) -> Tensor:
        """Sums values of tokens over ranks to [n, k]; this rank has those of `own`, and zeros for the others."""
        values_nk = own_Tk.new_zeros(num_tokens, own_Tk.shape[1])
        values_nk[own] = own_Tk
        if self.pool.everyone is not None:
            dist.all_reduce(values_nk, group=self.pool.everyone)
        return values_nk


def outside_autocast(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which the first pass runs without the autocast around TRL's loss, like the second pass.

    The model's own forward has its own autocast.
    """
    return torch.autocast(next(model.parameters()).device.type, enabled=False)


def _gradient_marks(model: nn.Module) -> dict[str, tuple[int, int] | None]:
    """Returns for each weight a value that changes whenever a backward adds to its gradient."""
    # shards have the gradients; those that are gathered for a next pass stand in their place
    free_gathered(model)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: None if each is None else (id(each), each._version) for name, each in gradients.items()}


def token_places(chunk: Chunk, group: SequenceGroup, position: int, firsts: Sequence[int]) -> IntArray:
    """Returns the number among all tokens of every token [T] of `chunk` on the rank at `position`; -1 for dummies."""
    parts: list[IntArray] = [np.zeros(0, np.int64)]
    for piece in rank_pieces(chunk, group.shape)[group.positions.index(position)]:
        if piece.document < len(chunk.spans):
            span = chunk.spans[piece.document]
            first = firsts[span.sequence] + span.start + piece.start
            parts.append(np.arange(first, first + piece.num_tokens))
        else:
            parts.append(np.full(piece.num_tokens, -1))
    return np.concatenate(parts)


class LoaderCheck(TrainerCallback):
    """Checks at the start of a training that a stock loader continues where it stopped, and keeps its workers alive."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        check_resumed(args, state, train_dataloader)
        keep_workers(train_dataloader)
