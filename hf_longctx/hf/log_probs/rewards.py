"""Losses of rewards (`RewardTrainer` of TRL): two passes, as in `two_passes.py`, over one number per document.

The loss compares the rewards of a chosen and a rejected answer, which a plan may put into different chunks, groups and
micro-batches. So the first pass computes the reward of every document under a plan, and sends it to the rank whose trainer loaded
the row. The trainer's own code computes the loss, and autograd its slope for every reward. The second pass trains the sum of
slope times reward, which has the gradient of the loss, for any loss. Values of a value model, one per token, are trained alike.

Shapes: B rows of this rank's batch, n tokens of all ranks, T tokens of a shard, l of them with a label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from hf_longctx.hf.data.labels import HeadTask
from hf_longctx.hf.log_probs.documents import LocalDocuments
from hf_longctx.hf.log_probs.two_passes import Batch, ScoredModel, TwoPasses, Untrained, outside_autocast
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.runtime.core.binding import replace_forward
from hf_longctx.runtime.core.loss import IGNORE_INDEX
from hf_longctx.runtime.execution.checks import forward_only

# keywords of a batch of TRL; margins are for the loss, and ignored by the model
_KNOWN = ("input_ids", "attention_mask", "margin", "use_cache", "return_dict")


class RewardPasses(TwoPasses):
    """Runs forwards of a reward or value model under plans, and makes the batches of the second pass. See `TwoPasses`.

    task: determines the token of a document at which the reward is read.
    """

    def __init__(self, source: PlanSource, max_length: int, task: HeadTask) -> None:
        super().__init__(source, max_length, ())
        self.task = task

    def bind(self, model: Any, scored: ScoredModel, is_trained: bool) -> Callable[[], None]:
        """Makes calls of `model` outside of plans run under them; returns a function that undoes this."""
        before = model.forward

        def forward(*args: Any, **keywords: Any) -> Any:
            if "longctx" in keywords:
                return before(*args, **keywords)
            is_leaf = torch.is_grad_enabled() and is_trained
            rewards_B = self.numbers(scored, lambda: self._read(args, keywords), is_leaf)
            # not the leaf itself, since losses may change their input in place
            return SequenceClassifierOutputWithPast(logits=rewards_B.unsqueeze(1) * 1.0)

        return replace_forward(model, forward)

    def numbers(self, scored: ScoredModel, read: Callable[[], LocalDocuments], is_trained: bool) -> Tensor:
        """Runs the first pass: the head's output [l] at each labelled token of this rank, under one plan for those of all ranks.

        read: returns this rank's documents, perhaps none. is_trained: they are a leaf with a gradient, and the batch waits for
        `second_pass`. Raises ValueError on every rank if any rank has a batch that plans cannot run.
        """
        batch, rank = self._planned(read, explore=is_trained), self.pool.rank
        executor = scored.executor()
        plan = forward_only(batch.plan.for_rank(rank))
        chunks = batch.chunks(rank)
        with outside_autocast(executor.model):
            found = executor.read(plan, chunks, scored.engine(executor.model, plan))
        tables = [
            {index: _by_token(inputs[index].shift_labels, values_l1) for index, values_l1 in of_chunks.items()}
            for inputs, of_chunks in zip(chunks, found, strict=True)
        ]
        own_T = self._from_all_ranks(batch, plan, tables, 1)[batch.own, 0]
        dtype = torch.promote_types(next(executor.model.parameters()).dtype, torch.float32)
        values_l = own_T[batch.documents.rows_T2[:, 1] != IGNORE_INDEX].to(dtype).requires_grad_(is_trained)
        if is_trained:
            self._waiting.append(Untrained(batch, values_l))
        return values_l

    def _weights(self, batch: Batch, slopes: Tensor) -> Tensor:
        slopes_T1 = _by_token(batch.documents.rows_T2[:, 1], slopes.unsqueeze(1))
        return self._joined(slopes_T1, batch.own, len(batch.rows_n2)).squeeze(1).cpu()

    def _read(self, args: Sequence[Any], inputs: dict[str, Any]) -> LocalDocuments:
        if args:
            raise ValueError("the model was called with positional arguments; call it with keywords, as TRL does")
        if unknown := [name for name, value in inputs.items() if value is not None and name not in _KNOWN]:
            raise ValueError(f"the batch holds {', '.join(unknown)}, which a plan does not send to other ranks; remove it")
        ids_BS, mask_BS = inputs["input_ids"], inputs.get("attention_mask")
        kept_BS = torch.ones_like(ids_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
        starts_BS = kept_BS & ~torch.nn.functional.pad(kept_BS, (1, 0))[:, :-1]
        if bool((starts_BS.sum(dim=1) != 1).any()):
            raise ValueError("a row of the batch has no token, or holes between its tokens; mask only padding around the tokens")
        lengths: list[int] = kept_BS.sum(dim=1).tolist()
        labels_BS = torch.full_like(ids_BS, IGNORE_INDEX)
        for row, (ids_S, kept_S) in enumerate(zip(ids_BS.cpu(), kept_BS.cpu(), strict=True)):
            first = int(kept_S.int().argmax())
            labels_BS[row, self.task.label_place(ids_S.numpy(), first, first + lengths[row])] = 0
        return self.checked(LocalDocuments(torch.stack([ids_BS[kept_BS], labels_BS[kept_BS]], dim=1), lengths, kept_BS))


def _by_token(labels_T: Tensor, values_l1: Tensor) -> Tensor:
    """Returns values [T, 1] of all tokens in fp64, 0 without a label."""
    is_label_T1 = (labels_T.reshape(-1, 1) != IGNORE_INDEX).to(values_l1.device)
    return torch.zeros_like(is_label_T1, dtype=torch.float64).masked_scatter(is_label_T1, values_l1.double())


def passes_of(source: PlanSource, max_length: int, placeholders: Sequence[int], temperature: float, task: HeadTask) -> TwoPasses:
    """Makes the two passes of a model: of its numbers if its head classifies documents or tokens, else of log-probabilities."""
    if task.kind != "next_token":
        return RewardPasses(source, max_length, task)
    return TwoPasses(source, max_length, placeholders, temperature)
