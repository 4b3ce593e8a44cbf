"""TRL's asynchronous GRPO over plans: losses and weights of TRL's own loss code over plain transformers."""

from __future__ import annotations

import queue
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_pool import RankFailure
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import quiet_config

from hf_longctx import LongContextEngine
from hf_longctx.recipes.trl_async import shared, train

# lengths of the rollouts of two steps; the longest has more tokens than a rank may hold
STEPS = [[9, 61, 14, 22], [12, 7, 30, 16]]
RATE = 0.3


def samples() -> list[Any]:
    """Rollouts as TRL's worker makes them: prompts of four tokens, and a tool wrote every fifth token."""
    draw = np.random.default_rng(3)
    made = []
    for step, lengths in enumerate(STEPS):
        for number, length in enumerate(lengths):
            mask = np.array([i >= 4 and i % 5 != 2 for i in range(length)], dtype=np.int64)
            ids = draw.integers(2, 60, length)
            # no two begin alike, so that TRL's rows share no tokens
            ids[0] = 2 + 4 * step + number
            log_probs = (draw.normal(-4.1, 0.3, length) * mask).astype(np.float32)
            given = {"input_ids": ids, "completion_mask": mask, "old_log_probs": log_probs, "advantage": float(draw.normal())}
            made.append(SimpleNamespace(**given, group_id=number, model_version=step + 1, metrics={}))
    return made


class Worker:
    """An in-process worker of TRL's protocol with given rollouts; a stale one comes first."""

    def __init__(self, dies: bool = False) -> None:
        self.rollout_buffer, self.metrics_queue, self.versions, self.dies = queue.Queue[Any](), queue.Queue[Any](), [], dies
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")
        for sample in [] if self.dies else [SimpleNamespace(model_version=-9), *samples()]:
            self.rollout_buffer.put(sample)

    def stop(self) -> None:
        self.calls.append("stop")

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the worker has crashed")


class Transfer:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sent: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)

    def send_weights(self, weights: Any) -> None:
        self.calls.append("send")
        self.sent = {name: weight.clone() for name, weight in weights}


def planned(folder: str, dies: bool = False) -> Any:
    settings = {"tokens_per_rank": 40, "max_length": 64, "parameters": "sharded", "degrees": (1, 2)}
    engine = LongContextEngine(
        build_model(ModelCase()), quiet_config(**settings), lambda weights: torch.optim.SGD(weights, lr=RATE), output_dir=folder
    )
    worker, transfer = (Worker(dies), Transfer()) if not dist.get_rank() else (None, None)
    try:
        log = train(engine, worker, transfer, num_steps=2, rows_per_step=4, max_norm=1e9)
        weights = {name: whole(weight.detach()).clone() for name, weight in engine.model.named_parameters()}
    finally:
        engine.close()
    if worker is None or transfer is None:
        return log, weights, {}
    once = ["pause", "send", "resume"]
    assert transfer.calls == ["init_weight_transfer", *3 * once, "destroy"]
    assert worker.calls == ["start", "stop"] and worker.versions == [1, 2, 3]
    return log, weights, transfer.sent


def losses_of_trl() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights by TRL's rows, collator and `compute_loss`, over plain transformers."""
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, DataCollatorForRollout
    from trl.experimental.async_grpo.packing import TreeRow

    model = build_model(ModelCase())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def forward(input_ids: Any, position_ids: Any, shift_labels: Any, **kwargs: Any) -> Any:
        ends = [*(position_ids[0] == 0).nonzero()[:, 0].tolist(), input_ids.shape[1]]
        found = []
        for begin, end in pairwise(ends):
            log_p = torch.log_softmax(model(input_ids=input_ids[:, begin:end]).logits[0], -1)
            labels = shift_labels[0, begin:end]
            found.append(log_p.gather(1, labels.clamp_min(0)[:, None])[:, 0] * (labels >= 0))
        return SimpleNamespace(log_probs=torch.cat(found), entropy=torch.zeros(input_ids.shape[1]))

    alone = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x.reshape(1))
    counts = dict.fromkeys(("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s"), 0.0)
    trainer = SimpleNamespace(
        aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.2, accelerator=alone, current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)), **{f"_step_{name}": 0.0 for name in counts},
    )  # fmt: skip
    rows, losses = samples(), []
    for step in range(2):
        row = TreeRow()
        for sample in rows[4 * step : 4 * step + 4]:
            row.add({**vars(sample), "metrics": {}})
        inputs = DataCollatorForRollout(pad_token_id=0)([[row]])
        loss = AsyncGRPOTrainer.compute_loss(trainer, forward, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.trl
def test_rollouts_of_trls_worker_train_by_its_own_loss(ranks, tmp_path: Path) -> None:
    pytest.importorskip("trl.experimental.async_grpo")
    losses, expected = losses_of_trl()
    results = ranks(2).run(planned, str(tmp_path))
    for log, weights, _ in results:
        # TRL divides in fp32
        assert [each["loss"] for each in log] == pytest.approx(losses, rel=1e-6)
        assert [(each["rows"], each["stale"], each["shared"]) for each in log] == [(4, 1, 0.0), (4, 0, 0.0)]
        assert max(relative_error(weights[name], expected[name]) for name in expected) < 1e-6
    sent = results[0][2]
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], results[0][1][name]) for name in sent)


def test_what_rollouts_share_is_counted_as_in_trls_tree() -> None:
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    forked = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 5], [1, 2, 7], [1, 2, 3, 4, 6], [8]]
    rows = [{"input_ids": np.array(ids), "completion_mask": np.ones(len(ids)), "group_id": 0} for ids in forked]
    row = packing.TreeRow()
    for each in rows:
        row.add(each)
    found = shared([SimpleNamespace(**each) for each in rows])
    # 1, 2, 3 and 4 are there once; TRL computes one token more for each branch, so that each has one label
    assert found == (3 + 2 + 4) / 19
    assert len(row.tokens) == 19 - 9 + 3


@pytest.mark.wide
def test_a_worker_that_ends_stops_all_ranks(ranks, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as raised:
        ranks(2).run(planned, str(tmp_path), True)
    assert str(raised.value).count("RuntimeError: the worker has crashed") == 2
