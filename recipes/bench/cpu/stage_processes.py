"""Runs plans on a pipeline of processes on this machine, one gloo rank and one thread per stage, and returns measurements.

Used by `pipeline.py`. The processes use the package's own way of cutting a model, its collator, group pool and executor.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.planning.step_record import StepRecord
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import PASSES, Ranges, StepPlan
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.process_groups import GroupPool

_TIMEOUT_S = 120.0
_CPU = torch.device("cpu")

Rows = list[dict[str, list[int]]]


@dataclass(frozen=True)
class StageStep:
    """Measurements of a plan on one stage, and the CPU seconds that the stage got during it."""

    record: StepRecord
    core_s: float

    @property
    def busy_s(self) -> float:
        """Seconds in passes."""
        return sum(interval.stop_s - interval.start_s for interval in self.record.intervals if interval.kind in PASSES)

    @property
    def core_share(self) -> float:
        """Share of its core that the stage got; less than 1 if other programs ran on the core."""
        return self.core_s / self.busy_s


class StageProcesses:
    """`num_stages` processes that run plans over the sequences `rows` on a Llama with `config`.

    Its random weights are the same however the model is cut.
    """

    def __init__(self, config: Mapping[str, Any], rows: Rows, num_stages: int) -> None:
        # every process reads this when it starts
        os.environ["OMP_NUM_THREADS"] = "1"
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_stages):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_stages, store, dict(config), rows, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, ranges: Ranges, plans: Sequence[StepPlan], num_rounds: int) -> list[list[list[StageStep]]]:
        """Runs every plan once per round; returns what the stages measured, as [round][plan][stage].

        One round more runs first and does not count. The model is cut into `ranges`, which must be those of the plans. The
        order of plans alternates between rounds.
        """
        for pipe in self._pipes:
            pipe.send((ranges, [plan_to_json(plan) for plan in plans], num_rounds))
        stages = [self._answer(rank) for rank in range(len(self._pipes))]
        return [[[stage[index][place] for stage in stages] for place in range(len(plans))] for index in range(num_rounds)]

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(timeout=_TIMEOUT_S)
        self._folder.cleanup()

    def _answer(self, rank: int) -> list[list[StageStep]]:
        try:
            steps: list[list[StageStep]] = self._pipes[rank].recv()
        except EOFError:
            raise RuntimeError(f"the process of stage {rank} failed; its error is printed above") from None
        return steps


def _serve(rank: int, num_stages: int, store: str, config: dict[str, Any], rows: Rows, pipe: Connection) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_stages, timeout=timeout)
    pool = GroupPool((1,), _TIMEOUT_S, num_stages=num_stages)
    while True:
        try:
            ranges, texts, num_rounds = pipe.recv()
        except EOFError:
            break
        pipe.send(_measure(pool, config, rows, ranges, [plan_from_json(text) for text in texts], num_rounds))
    pool.close()
    dist.destroy_process_group()


def _measure(
    pool: GroupPool, config: Mapping[str, Any], rows: Rows, ranges: Ranges, plans: Sequence[StepPlan], num_rounds: int
) -> list[list[StageStep]]:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="sdpa")).train()
    patch_model(model)
    cut_model(model, ranges, pool.stage)
    executor = StepExecutor(stage_model(model, ranges, pool.stage), pool, _CPU, fp32_gradients=False)
    inputs = [_inputs(plan, rows, pool.rank) for plan in plans]
    num_label_tokens = sum(len(row["labels"]) - 1 for row in rows)
    rounds = []
    for index in range(num_rounds + 1):
        steps: dict[int, StageStep] = {}
        for place in range(len(plans)) if index % 2 else reversed(range(len(plans))):
            dist.barrier(pool.everyone)
            start_s = time.process_time()
            result = executor.run(plans[place].for_rank(pool.rank), inputs[place], num_label_tokens)
            core_s = time.process_time() - start_s
            found = (float(result.loss), tuple(result.intervals()))
            steps[place] = StageStep(StepRecord(plans[place], pool.rank, *found, memory=result.memory), core_s)
            model.zero_grad(set_to_none=False)
        rounds.append([steps[place] for place in range(len(plans))])
    return rounds[1:]


def _inputs(plan: StepPlan, rows: Rows, rank: int) -> list[list[ChunkInputs]]:
    """Makes the rank's inputs with the collator; sequence i of the plan is row i."""
    lengths = np.array([len(row["input_ids"]) for row in rows])
    dataset = PlannedDataset(rows, SequenceIndex.build(lengths, int(lengths.max()), "error"))
    chunks: list[list[ChunkInputs]] = LongContextCollator()([dataset[PlannedStep(plan, tuple(range(len(rows))), rank)]])["chunks"]
    return chunks
