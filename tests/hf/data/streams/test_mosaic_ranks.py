"""A dataset of mosaicml-streaming that two ranks read: its rows once each, losses of a plain list, and resumed runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.models.versions import resuming
from helpers.ranks.rank_pool import RankPool
from helpers.trainers.mosaic import mosaic
from helpers.trainers.trainer_runs import LossRecorder, make_trainer

from hf_longctx import ShardedStream
from hf_longctx.hf.ranks.agreement import gather_objects

# three batches of eight in each of two epochs
ROWS = random_rows([3 + number * 7 % 29 for number in range(24)])
SAVED = {"max_steps": 6, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}


class Heard(torch.utils.data.IterableDataset):
    """A dataset of mosaicml-streaming; keeps the rows that it has given."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.rows = dataset, list[list[int]]()
        # its epoch is restored by these
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for row in self.dataset:
            self.rows.append(row["input_ids"].tolist())
            yield {"input_ids": self.rows[-1]}


def losses_of(
    rows: Any, folder: str, config: dict[str, Any], arguments: dict[str, Any], resume: int | None = None
) -> list[float]:
    trainer = make_trainer(ModelCase(promoted=True), rows, folder, {"tokens_per_rank": 64, **config}, {**SAVED, **arguments})
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=None if resume is None else str(Path(folder, f"checkpoint-{resume}")))
    return recorder.losses


def run(folder: str, data: str) -> tuple[list[list[list[int]]], dict[str, list[float]]]:
    """The rows of both readers in two epochs, and losses: of the stream, of these rows as a list, and of resumed runs."""
    streaming = mosaic()

    def heard() -> Heard:
        """A dataset as every rank makes it before its trainer."""
        return Heard(streaming.StreamingDataset(local=data, shuffle=True, batch_size=1))

    def streamed(dataset: Heard, resume: int | None = None) -> list[float]:
        config = {"stream_readers": 2, "lookahead_batches": 2}
        return losses_of(ShardedStream(lambda reader, num_readers: dataset), folder, config, {}, resume)

    first = heard()
    found = {"stream": streamed(first)}
    # readers may be ahead of the last step
    read = gather_objects(first.rows[: len(ROWS)], dist.group.WORLD)
    in_turns = [{"input_ids": row} for turn in zip(*read, strict=True) for row in turn]
    found["list"] = losses_of(in_turns, folder, {}, {"train_sampling_strategy": "sequential", "save_strategy": "no"})
    for step in (2, 3, 4):
        found[f"from step {step}"] = streamed(heard(), step)
    streaming.base.util.clean_stale_shared_memory()
    return read, found


@resuming
@pytest.mark.skipif(importlib.util.find_spec("streaming") is None, reason="needs mosaicml-streaming")
def test_two_ranks_read_a_dataset_of_mosaicml_streaming_once_and_resume_exactly(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with mosaic().MDSWriter(out=data, columns={"input_ids": "ndarray:int64"}, size_limit=500) as writer:
        for row in ROWS:
            writer.write({"input_ids": np.array(row["input_ids"])})
    # its own ranks: the datasets keep shared memory and threads until their process ends
    pool = RankPool(2)
    try:
        (read, losses), (_, theirs) = pool.run(run, str(tmp_path / "out"), data, timeout_s=300.0)
    finally:
        pool.close()
    everything, share = sorted(row["input_ids"] for row in ROWS), len(ROWS) // 2
    epochs = [[row for rows in read for row in rows[begin : begin + share]] for begin in (0, share)]
    assert [sorted(epoch) for epoch in epochs] == [everything] * 2 and epochs[0] != epochs[1]
    assert losses == theirs and len(losses["stream"]) == 6
    assert losses["list"] == pytest.approx(losses["stream"], rel=1e-12)
    for step in (2, 3, 4):
        assert losses[f"from step {step}"] == pytest.approx(losses["stream"][step:], rel=1e-12)
