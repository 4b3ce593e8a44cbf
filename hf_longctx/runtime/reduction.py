"""One sum of gradients over all ranks at the end of a step, in flat buckets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 64 * 2**20


def reduce_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Replaces every gradient by its sum over the ranks of `group`; None is a single rank.

    Every rank of the group must call it with the same parameters in the same order, and have gradients for the same
    ones: true since every rank runs at least one chunk through the whole model. Works in place, on the current stream.
    """
    if group is None:
        return
    bucket: list[Tensor] = []
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        if bucket and (_num_bytes(bucket) + _num_bytes([gradient]) > _BUCKET_BYTES or bucket[0].dtype != gradient.dtype):
            _sum_bucket(bucket, group)
            bucket = []
        bucket.append(gradient)
    if bucket:
        _sum_bucket(bucket, group)


def _sum_bucket(bucket: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in bucket])
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _num_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
