"""Lowers the memory that plans may fill, if a step shows that less of a device is free than was assumed at the start.

Plans leave a share of each device to errors of prediction, to gaps between tensors, and to whatever is not torch's
(`usable_share_bytes`). After every plan a rank compares what it used with what was predicted. With the agreement that begins a
step, ranks take the least that any of them has found to fit; steps that were planned before are planned again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.planning.step_record import predicted_memory
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.plan.core.settings import USABLE_SHARE
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.setup import Setup
from hf_longctx.runtime.execution.round import active_bytes

_GIB = 2**30
# share of a device in parts of pages that hold a tensor, which no other can have: pages of 2 MiB, fewer than 1,400 tensors on
# 139 GiB
_GAPS_SHARE = 0.02
# the error of a plan is one of prediction only if it fills at least this share of the limit; small ones have other errors
_LEAST_FILLED = 0.5
# shares of a plan that later plans may fill: of one whose memory the allocator had to collect from its cache, of one that failed
_AFTER_COLLECTING, _AFTER_FAILURE = 0.97, 0.9


class FreeMemory:
    """The bytes that plans may fill on every rank, states included, as ranks have found so far.

    limit_bytes: equal on all ranks. It never rises. is_watched: false without a CUDA device, without plans that can be changed,
    and where equal runs must have equal plans.
    """

    def __init__(self, setup: Setup, source: PlanSource, device: torch.device, control: dist.ProcessGroup | None) -> None:
        self.setup, self.source, self.device, self.control = setup, source, device, control
        self.is_watched = device.type == "cuda" and setup.planner.activations is not None and source.is_timed
        self.limit_bytes = self._fitting_bytes = setup.memory.usable_bytes
        self._num_collections = self._collections()
        self._num_checks = 0

    @property
    def is_short(self) -> bool:
        """Whether this rank has found less memory than all ranks have agreed on."""
        return self._fitting_bytes < self.limit_bytes

    def saw(self, plan: StepPlan) -> None:
        """Takes this rank's use of memory during a plan that has just run."""
        if not self.is_watched:
            return
        # documents that were compared meanwhile took memory that no plan needs
        before, self._num_checks = self._num_checks, len(self.source.pool.stacks.verdicts)
        if self._num_checks > before:
            self._num_collections = self._collections()
            return
        predicted = predicted_memory(plan, self.source.pool.rank, self.source.costs.model).device_peak
        collections, self._num_collections = self._num_collections, self._collections()
        if predicted >= _LEAST_FILLED * self.limit_bytes:
            has_collected = self._num_collections > collections
            found = fitting_bytes(*self._shares(), active_bytes(self.device)[1], predicted, has_collected)
            self._fitting_bytes = min(self._fitting_bytes, found)

    def failed(self, plan: StepPlan) -> None:
        """Takes a plan that ran out of memory."""
        self._fitting_bytes = min(self._fitting_bytes, failed_bytes(plan, self.limit_bytes))

    def agree(self, num_short: float) -> str:
        """Lowers the limit of later plans to the least of all ranks; returns a line that says so. Collective if any is short.

        num_short: ranks that are short, equal on all ranks.
        """
        if not num_short:
            return ""
        before, self.limit_bytes = self.limit_bytes, min(gather_objects(self._fitting_bytes, self.control))
        setup = self.setup
        memory = replace(setup.memory, usable_bytes=self.limit_bytes)
        lower = Setup.of(setup.costs, memory, setup.placement, setup.planner, setup.planner.lend_stages).planner
        self.source.tighter = replace(lower, one_micro_batch=setup.planner.one_micro_batch)
        total = setup.memory.device_bytes / _GIB
        return (
            f"memory: less is free than was assumed, so plans fill at most {self.limit_bytes / _GIB:.2f} of {total:.2f} GiB from "
            f"now on ({before / _GIB:.2f} before)"
        )

    def _collections(self) -> int:
        """Counts how often the allocator had to give back what it had cached, to get memory for a tensor."""
        return torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0) if self.device.type == "cuda" else 0

    def _shares(self) -> tuple[int, int]:
        """Returns the bytes of the device, and those of them that are not torch's."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total, max(0, total - free - torch.cuda.memory_reserved(self.device))


def failed_bytes(plan: StepPlan, limit_bytes: int) -> int:
    """Returns the most predicted bytes of later plans after one that ran out of memory."""
    return int(_AFTER_FAILURE * min(limit_bytes, plan.estimate.peak_bytes))


def fitting_bytes(device_bytes: int, others_bytes: int, peak_bytes: int, predicted_bytes: int, has_collected: bool) -> int:
    """Returns the most predicted bytes of a plan that fits on a device, by the plan that has just run there.

    others_bytes: of the device, not torch's. peak_bytes: most that the plan's tensors took, for which `predicted_bytes` were
    predicted. has_collected: the allocator had filled the device, and gave back what it had cached. That costs time and shows
    gaps, so later plans leave more free, up to the share without expandable segments.
    """
    left = device_bytes * (1 - _GAPS_SHARE) - others_bytes
    found = left / max(1.0, peak_bytes / predicted_bytes)
    if has_collected:
        found = min(found, max(USABLE_SHARE * device_bytes, _AFTER_COLLECTING * predicted_bytes))
    return int(found)
