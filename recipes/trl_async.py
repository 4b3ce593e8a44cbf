"""TRL's asynchronous GRPO (`trl.experimental.async_grpo`, 1.16) over plans: its worker generates, `LongContextEngine` trains.

`AsyncGRPOTrainer` packs rollouts into rows, one for each GPU, and drops a rollout that is longer than a row. Here rank 0 takes
the rollouts of a whole step from the queue of TRL's worker, and one plan gives each as many GPUs as it needs. The loss is TRL's:
clipped per token against the sampler's log-probabilities, averaged over the trained tokens of the step, in one pass. Tokens that
rollouts share are computed in each of them, which TRL's rows do once; the log has their share. Call `train` on every rank:

    worker = AsyncRolloutWorker(model_name=..., dataset=..., reward_funcs=[...], ...) if rank == 0 else None
    train(engine, worker, transfer_of(engine, "http://10.0.0.7:8000") if rank == 0 else None, num_steps=100, rows_per_step=256)
"""

from __future__ import annotations

import queue
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from hf_longctx import LongContextEngine, TokenRow


def transfer_of(engine: LongContextEngine, url: str, timeout_s: float = 240.0) -> Any:
    """TRL's transfer of weights by NCCL to the vLLM server at `url`; for rank 0."""
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    names, dtypes, shapes = zip(*engine.weights().metadata(), strict=True)
    types = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    info = {"names": list(names), "dtype_names": types, "shapes": [list(shape) for shape in shapes]}
    return WeightTransferClient(VLLMClient(url, timeout_s), weight_update_info=info, weight_sync_timeout=timeout_s)


def send(engine: LongContextEngine, worker: Any, transfer: Any, version: int) -> None:
    """Sends whole weights, which every rank gathers, and tells the worker their version."""
    weights = iter(engine.weights())
    if transfer is None:
        for _ in weights:
            # gathered together
            pass
        return
    transfer.pause()
    transfer.send_weights(weights)
    transfer.resume()
    worker.update_model_version(version)


def taken(worker: Any, num_rows: int, oldest: int, stale_after_s: float) -> tuple[list[Any], int]:
    """Takes rollouts from the worker's queue; returns them and how many were too stale. Raises the worker's error if it ends."""
    found, num_stale = [], 0
    while len(found) < num_rows:
        try:
            sample = worker.rollout_buffer.get(timeout=1.0)
        except queue.Empty:
            worker.check_health(stale_after_s)
            continue
        if sample.model_version < oldest:
            num_stale += 1
        else:
            found.append(sample)
    return found, num_stale


def shared(samples: list[Any]) -> float:
    """Share of tokens whose own and all earlier tokens another rollout of the step has too: TRL's rows compute them once."""
    rows = sorted(torch.as_tensor(each.input_ids).tolist() for each in samples)
    again = 0
    for pair in pairwise(rows):
        again += next((place for place, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
    return again / max(sum(map(len, rows)), 1)


def from_rank_0(value: Any) -> Any:
    """Returns rank 0's value on all ranks, and raises an error that it is."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    if isinstance(values[0], Exception):
        raise values[0]
    return values[0]


def train(
    engine: LongContextEngine, worker: Any, transfer: Any, num_steps: int, rows_per_step: int,
    epsilon: tuple[float, float] = (0.2, 0.2), max_staleness: int = 4, max_norm: float = 1.0, stale_after_s: float = 600.0,
) -> list[dict[str, float]]:  # fmt: skip
    """Trains for `num_steps`; returns loss, norm, rows of all ranks, dropped stale rows and `shared` of each step.

    worker, transfer: TRL's `RolloutWorkerProtocol` and `WeightTransferProtocol` on rank 0, None elsewhere.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    low, high = epsilon
    log: list[dict[str, float]] = []

    def clipped(log_probs: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        ratios = torch.exp(log_probs - columns["old"])
        gains = torch.minimum(ratios * columns["advantage"], ratios.clamp(1 - low, 1 + high) * columns["advantage"])
        return -gains * columns["weight"]

    if transfer is not None:
        transfer.init_weight_transfer()
    send(engine, worker, transfer, 1)
    try:
        if worker is not None:
            worker.start()
        for version in range(1, num_steps + 1):
            given: Any = None
            try:
                given = taken(worker, rows_per_step, version - max_staleness, stale_after_s) if rank == 0 else None
            except Exception as error:
                given = error
            samples, num_stale = from_rank_0(given)
            # no token is predicted before the first
            num_tokens = sum(int(each.completion_mask[1:].sum()) for each in samples)
            own = samples[rank::num_ranks]
            rows = [TokenRow(torch.as_tensor(each.input_ids), torch.as_tensor(each.completion_mask) > 0) for each in own]
            columns = {
                "old": [torch.as_tensor(each.old_log_probs) for each in own],
                "advantage": [torch.full((len(each.input_ids),), float(each.advantage)) for each in own],
                # the engine takes the mean over ranks
                "weight": [
                    torch.full((len(each.input_ids),), num_ranks / max(num_tokens, 1), dtype=torch.float64) for each in own
                ],
            }
            loss = engine.forward_backward_by_token(rows, clipped, columns)
            norm = engine.optimizer_step(max_norm)
            send(engine, worker, transfer, version + 1)
            counts = {"rows": len(samples), "stale": num_stale, "shared": shared(samples)}
            log.append({"loss": float(loss), "norm": norm, **counts})
    finally:
        for each in (worker, transfer):
            if each is not None:
                (each.stop if each is worker else each.destroy)()
    return log
