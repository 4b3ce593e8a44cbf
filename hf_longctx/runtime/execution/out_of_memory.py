"""Explains an out-of-memory error: the action that ran, predicted bytes, bytes that the device holds, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_longctx.plan.core.types import Action, SequenceGroup

_GIB = 2**30


@contextmanager
def explained(where: str, action: Action, group: SequenceGroup, device: torch.device, predicted_bytes: int = 0) -> Iterator[None]:
    """Context that raises torch.OutOfMemoryError again, naming in the message `where` (step and round) and the action."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(_message(where, action, group, device, predicted_bytes, error)) from error


def _message(
    where: str, action: Action, group: SequenceGroup, device: torch.device, predicted_bytes: int, error: torch.OutOfMemoryError
) -> str:
    chunk = group.chunks[action.chunk]
    predicted = f"; the plan was predicted to take {predicted_bytes / _GIB:.2f} GiB" if predicted_bytes else ""
    return (
        f"{where}, action {action}: out of device memory with chunk {chunk.index} of {chunk.num_tokens} tokens in "
        f"{len(chunk.spans)} documents on {group.degree} rank(s){predicted}{_held(device)}; lower tokens_per_rank, set "
        f"activations='auto', or allow more host memory. The device said: {error}"
    )


def active_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes of a CUDA device that no new tensor can have: now, and the most since the peaks were reset.

    Unlike bytes of tensors, they count memory whose tensor is gone but which a stream may still read.
    """
    found = torch.cuda.memory_stats(device)
    return found["active_bytes.all.current"], found["active_bytes.all.peak"]


def _held(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    total = torch.cuda.get_device_properties(device).total_memory
    tensors = torch.cuda.memory_allocated(device)
    have, now, peak, held = (num_bytes / _GIB for num_bytes in (total, *active_bytes(device), tensors))
    return f"; {device} has {have:.2f} GiB, {now:.2f} GiB are in use (tensors: {held:.2f} GiB) and {peak:.2f} GiB were at most"
