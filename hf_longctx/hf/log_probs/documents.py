"""Reads the documents of a batch from a stock loader or a trainer of TRL, as the model would get it.

Shapes: B rows, S columns of a batch, T tokens of all rows without padding, 2 for token id and label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.hf.data.labels import LABELS_THAT_COUNT
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.rules.arguments import WAY_OUT
from hf_longctx.runtime.core.loss import IGNORE_INDEX

# TRL's keyword for a forward that returns values per token
FUSED = "fused_lm_head"
# keywords of a batch to keep, and keywords that the plan replaces
_KEPT = ("num_items_in_batch", "return_dict", "use_cache")
_REPLACED = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "seq_idx")
_REPLACED_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True)
class LocalDocuments:
    """The documents of one rank's batch, one after the other.

    rows_T2: token id and label of the next token, int64. kept_BS: mask of these tokens in the batch; the rest is padding.
    """

    rows_T2: Tensor
    lengths: list[int]
    kept_BS: Tensor


def read_documents(inputs: Mapping[str, Any]) -> LocalDocuments:
    """Reads the documents of a batch; labels are shifted inside each document, before any cut.

    A padded batch is [B, S], with an attention_mask that is zero on padding. A flattened batch has position_ids that restart at
    0 in every document. Raises ValueError for a batch from which the model without plans would learn something else.
    """
    _refuse_unknown(inputs)
    input_ids_BS, mask_BS, positions_BS = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    assert input_ids_BS is not None
    if mask_BS is not None and mask_BS.dim() != 2:
        raise ValueError(f"attention_mask has {mask_BS.dim()} dimensions; give one value per token, 0 for padding")
    kept_BS = torch.ones_like(input_ids_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
    starts_BS = kept_BS & ~torch.nn.functional.pad(kept_BS, (1, 0))[:, :-1]
    if int(starts_BS.sum(dim=1).max()) > 1:
        raise ValueError("attention_mask has holes between tokens of a row; mask only padding before or after the tokens")
    if positions_BS is not None:
        starts_BS = _document_starts(positions_BS.expand_as(kept_BS), starts_BS, kept_BS, mask_BS is not None)
    labels_BS = _next_labels(inputs, kept_BS, starts_BS)
    (bounds,) = torch.nonzero(starts_BS[kept_BS], as_tuple=True)
    ends = [*bounds.tolist(), int(kept_BS.sum())]
    lengths = [end - start for start, end in pairwise(ends)]
    return LocalDocuments(torch.stack([input_ids_BS[kept_BS], labels_BS[kept_BS]], dim=1), lengths, kept_BS)


def agreed_documents(
    read: Callable[[], LocalDocuments], more: Any, group: dist.ProcessGroup | None, headline: str
) -> tuple[LocalDocuments, list[list[int]], list[Any]]:
    """Returns this rank's documents, and lengths and `more` of every rank. Collective over `group`.

    Raises ValueError on every rank if `read` raises any error on any rank, since the others would wait for it.
    """
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    documents, problem = LocalDocuments(nothing, [], nothing.bool()), ""
    try:
        documents = read()
    except Exception as error:
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    everyone = gather_objects((problem, documents.lengths, more), group)
    if problems := [f"rank {rank}: {found}" for rank, (found, *_) in enumerate(everyone) if found]:
        raise ValueError(f"{headline}:\n" + "\n".join(problems))
    return documents, [lengths for _, lengths, _ in everyone], [each for *_, each in everyone]


def _refuse_unknown(inputs: Mapping[str, Any]) -> None:
    known = (*_KEPT, *_REPLACED, *_REPLACED_FLASH, FUSED)
    if unknown := [name for name, value in inputs.items() if value is not None and name not in known]:
        raise ValueError(
            f"the batch holds {', '.join(unknown)}, which a plan does not send to other ranks; remove it from the dataset or "
            f"the collator"
        )
    # a fused head reads shift_labels; other models make no loss without labels, even if they get shift_labels
    has_labels = inputs.get("labels") is not None or (inputs.get(FUSED) and inputs.get("shift_labels") is not None)
    if inputs.get("input_ids") is None or not has_labels:
        raise ValueError(
            f"the batch holds {', '.join(inputs)}; input_ids and labels are needed: add a column 'labels', use "
            f"DataCollatorWithFlattening, or, if the trainer took the labels out for compute_loss_func or a compute_loss of its "
            f"own, {WAY_OUT}"
        )
    # for a fused head the trainer computes the mean over tokens itself
    if inputs.get("num_items_in_batch") is None and not inputs.get(FUSED):
        raise ValueError(
            "the trainer did not count the label tokens of all ranks (num_items_in_batch), so its mean would give equal weight "
            "to ranks instead of tokens; keep average_tokens_across_devices=True and the trainer's own get_batch_samples, with "
            "'labels' in the batch, or call callback.attach(trainer) for a multimodal class, some of which take no such number"
        )
    if (count := inputs.get("num_items_in_batch")) is not None and not int(count):
        raise ValueError(
            f"num_items_in_batch is 0: the step has no label that counts ({LABELS_THAT_COUNT}), so its loss would be 0 / 0; give "
            f"a step more sequences, or leave rows without labels out"
        )
    if inputs.get("cu_seq_lens_q") is not None and inputs.get("position_ids") is None:
        raise ValueError("the batch marks documents by cu_seq_lens_q alone; let the collator return position_ids too")


def _document_starts(positions_BS: Tensor, rows_BS: Tensor, kept_BS: Tensor, has_mask: bool) -> Tensor:
    """Marks where documents start: at the first token of each row, and where positions restart.

    Raises ValueError unless positions count up in between.
    """
    starts_BS = rows_BS | (kept_BS & (positions_BS == 0))
    if has_mask and bool((starts_BS != rows_BS).any()):
        raise ValueError(
            "the batch has an attention_mask and position_ids that restart inside a row: with a mask, documents of one row "
            "attend to each other; leave the mask out to keep them apart"
        )
    counted_BS = torch.nn.functional.pad(positions_BS[:, 1:] - positions_BS[:, :-1] == 1, (1, 0), value=True)
    if not bool((counted_BS | starts_BS | ~kept_BS).all()):
        raise ValueError("position_ids do not count up from 0 in every document; use those of DataCollatorWithFlattening")
    return starts_BS


def _next_labels(inputs: Mapping[str, Any], kept_BS: Tensor, starts_BS: Tensor) -> Tensor:
    """Returns the label of the next token of the same document, for every token [B, S]."""
    if (given_BS := inputs.get("shift_labels")) is not None:
        shifted_BS: Tensor = given_BS
        if bool((shifted_BS[~kept_BS] != IGNORE_INDEX).any()):
            raise ValueError(f"shift_labels has labels on padding, which would be learnt; set them to {IGNORE_INDEX}")
        return shifted_BS
    labels_BS: Tensor = inputs["labels"]
    if bool((labels_BS[~kept_BS] != IGNORE_INDEX).any()):
        raise ValueError(f"the batch has labels on padding, which would be learnt; set them to {IGNORE_INDEX} in the collator")
    if bool((labels_BS[:, 1:][starts_BS[:, 1:]] != IGNORE_INDEX).any()):
        raise ValueError(
            f"the first token of a document has a label, and would be learnt from what stands before it in its row (padding on "
            f"the left, or another document); pad on the right, or set that label to {IGNORE_INDEX}"
        )
    # after a document's last token comes padding, or the next document's first token, whose label is masked
    return torch.nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE_INDEX)
