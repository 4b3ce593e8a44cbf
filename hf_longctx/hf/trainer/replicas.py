"""Checks that ranks which hold copies of the same weights still hold the same bits, before they are saved."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.run.run import Run
from hf_longctx.plan.core.messages import listed
from hf_longctx.runtime.parameters.gradients import local_shard, nonfinite_names

# integer types with the sizes of weights, in bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck(TrainerCallback):
    """Compares a checksum of every weight between ranks with copies of it, every few steps; `before_save` at every checkpoint.

    Copies get equal gradients and so stay equal bit for bit, unless a machine errs or a user's code changes one of them.
    """

    def __init__(self, config: LongContextConfig, run: Run) -> None:
        self.every, self.run = config.replica_check_steps, run

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Raises RuntimeError on every rank, naming ranks and weights, if copies differ. Collective over all ranks."""
        if self.every and state.global_step % self.every == 0:
            self.check(model, state.global_step)

    def before_save(self, model: nn.Module, step: int) -> None:
        """Refuses weights that must not replace those of an earlier checkpoint: copies that differ, and NaN or infinite ones.

        Raises RuntimeError, or FloatingPointError, on every rank. Collective over all ranks.
        """
        names = dict.fromkeys(name for found in gather_objects(nonfinite_names(model), self.run.control) for name in found)
        if names:
            raise FloatingPointError(
                f"after step {step}, weights are not finite: {listed(list(names))}. Nothing was saved from them, and earlier "
                f"checkpoints are unchanged; resume from the last one with a lower learning rate"
            )
        if self.every != 0:
            self.check(model, step)

    def check(self, model: nn.Module, step: int) -> None:
        """Compares now; raises as `on_step_end`."""
        if self.run.args.world_size == 1:
            return
        own = _owner(self.run, model)
        found = gather_objects((own, checksums(model)), self.run.control)
        problems = []
        for owner in dict.fromkeys(key for key, _ in found):
            copies = {rank: sums for rank, (key, sums) in enumerate(found) if key == owner}
            counted = Counter(tuple(sums) for sums in copies.values())
            if len(counted) > 1:
                problems.append(_difference(copies, counted.most_common(1)[0][0], list(model.named_parameters()), own == owner))
        if problems:
            raise RuntimeError(
                f"after step {step}, copies of the same weights differ: {'; '.join(problems)}. Nothing was saved from them; "
                f"resume from the last checkpoint, and look for code that changes weights on single ranks or for a faulty device"
            )


@torch.no_grad()
def checksums(model: nn.Module) -> list[int]:
    """A sum over the bits of each parameter, or of this rank's shard of it; equal for equal weights. Waits for the device."""
    sums = []
    for parameter in model.parameters():
        weight = local_shard(parameter).detach().contiguous()
        bits = weight.reshape(-1).view(_BITS[weight.element_size()])
        # odd factors, so that no bit is lost
        places = torch.arange(1, 1 + 2 * min(len(bits), _PERIOD), 2, device=bits.device)
        sums.append(_weighted_sum(bits, places))
    return torch.stack(sums).tolist() if sums else []


# weights at places that differ by a multiple of it count alike
_PERIOD = 4093


def _weighted_sum(bits: Tensor, places: Tensor) -> Tensor:
    """Sum of the integers, each times the factor of its place, modulo 2**64; sees weights that changed places too."""
    whole = len(bits) // _PERIOD * _PERIOD
    total = (bits[:whole].view(-1, _PERIOD).sum(dim=0, dtype=torch.int64) * places).sum() if whole else places.new_zeros(())
    rest = bits[whole:].to(torch.int64)
    return total + (rest * places[: len(rest)]).sum()


def _owner(run: Run, model: nn.Module) -> tuple[int, int]:
    """(stage, shard): equal on ranks with copies of the same weights."""
    pool = run.pool
    stage = 0 if run.all_stages else pool.stage
    sharded = next((parameter for parameter in model.parameters() if isinstance(parameter, DTensor)), None)
    if sharded is None:
        return stage, 0
    # the mesh on which FSDP2 shards has one dimension: the ranks of a block
    return stage, sharded.device_mesh.get_local_rank()


def _difference(copies: dict[int, list[int]], common: tuple[int, ...], weights: list[tuple[str, Any]], is_own: bool) -> str:
    """Words for the ranks whose checksums are not the most common ones, and for the first weight that differs."""
    if len(copies) == 2:
        first, second = copies
        ranks = f"ranks {first} and {second} differ"
    else:
        odd = [rank for rank, sums in copies.items() if tuple(sums) != common]
        ranks = f"rank {', '.join(map(str, odd))} differs from rank {', '.join(map(str, sorted(set(copies) - set(odd))))}"
    differing = [place for place in range(len(common)) if len({sums[place] for sums in copies.values()}) > 1]
    first_name = f", first in {weights[differing[0]][0]}" if is_own else ""
    return f"{ranks} in {len(differing)} weights{first_name}"
