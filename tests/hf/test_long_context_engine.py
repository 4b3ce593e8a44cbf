"""An engine below `Trainer`: values, gradients and updates are those of plain transformers, for any rows on any rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_pool import RankFailure
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import quiet_config
from torch import Tensor

from hf_longctx import LongContextEngine, RowValues, TokenRow

LORA = (("r", 2), ("lora_alpha", 8), ("target_modules", ["q_proj", "v_proj", "down_proj"]))
# lengths of the rows of each rank, for two steps; the second rank has none in the second step
STEPS = [[[31, 5, 2], [14, 22]], [[9, 40], []]]
REPLICATED: dict[str, Any] = {"tokens_per_rank": 40, "max_length": 64}
SHARDED = {**REPLICATED, "parameters": "sharded"}


def rows_of(lengths: list[int], seed: int) -> list[TokenRow]:
    """Rows whose first third is a prompt, and in which a tool wrote every fifth token."""
    draw = torch.Generator().manual_seed(seed)
    return [
        TokenRow(torch.randint(2, 60, (n,), generator=draw), torch.tensor([i >= n // 3 and i % 5 != 4 for i in range(n)]))
        for n in lengths
    ]


def mixed_loss(log_probs: list[Tensor]) -> Tensor:
    """A loss in which a token's slope depends on all rows of its rank."""
    if not log_probs:
        return torch.zeros((), dtype=torch.float64)
    sums = torch.stack([each.sum() for each in log_probs])
    return torch.nn.functional.softplus(0.1 * (sums - sums.flip(0))).mean() + (sums.tanh() * sums).mean() / 10


def adam(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-2)


def plain_steps(case: ModelCase, temperature: float) -> tuple[list[list[Tensor]], list[float], dict[str, Tensor]]:
    """Log-probabilities of all rows before each step, norms, and weights at the end, of plain transformers."""
    model = build_model(case)
    optimizer = adam([weight for weight in model.parameters() if weight.requires_grad])
    values, norms = [], []
    for step, of_ranks in enumerate(STEPS):
        losses, scored = [], []
        for rank, lengths in enumerate(of_ranks):
            own = []
            for row in rows_of(lengths, 10 * step + rank):
                log_p = torch.log_softmax(model(input_ids=row.ids[None]).logits[0] / temperature, -1)
                taken = torch.nn.functional.pad(log_p[:-1].gather(1, row.ids[1:, None])[:, 0], (1, 0))
                own.append(taken * row.is_scored * (torch.arange(len(taken)) > 0))
            losses.append(mixed_loss(own))
            scored += [each.detach() for each in own]
        torch.stack(losses).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        values.append(scored)
    return values, norms, {name: weight.detach() for name, weight in model.named_parameters()}


def engine_steps(
    case: ModelCase, config: dict[str, Any], temperature: float, folder: str
) -> tuple[list[list[Tensor]], list[float], dict[str, Tensor]]:
    """Values, norms and weights of an engine on this rank, which is moved to the host, saved and loaded between the steps."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def made() -> LongContextEngine:
        return LongContextEngine(build_model(case), quiet_config(**config), adam, output_dir=folder)

    engine = made()
    values, norms = [], []
    for step, of_ranks in enumerate(STEPS):
        mine = range(2) if num_ranks == 1 else [rank]
        rows = [rows_of(of_ranks[each], 10 * step + each) for each in mine]
        found = engine.log_probs([row for each in rows for row in each], temperature)
        values.append(found.log_probs)
        engine.to_host()

        def loss_fn(found: RowValues) -> tuple[Tensor, int]:
            parts = iter(found.log_probs)
            losses = [mixed_loss([next(parts) for _ in each]) for each in rows]  # noqa: B023
            return torch.stack(losses).mean(), step  # noqa: B023

        loss, other = engine.forward_backward([row for each in rows for row in each], loss_fn, temperature)
        assert other == step and torch.isfinite(loss)
        norms.append(engine.optimizer_step(max_norm=0.5))
        if not step:
            engine.to_host()
            engine.to_device()
            engine.save(f"{folder}/saved")
            engine.close()
            engine = made()
            engine.load(f"{folder}/saved")
    weights = {name: whole(weight.detach()).clone() for name, weight in engine.model.named_parameters()}
    assert dict(engine.weights()).keys() == {each.name for each in engine.weights().metadata()}
    engine.close()
    return values, norms, weights


@pytest.mark.parametrize(
    "num_ranks,case,config,temperature",
    [
        (1, ModelCase(), REPLICATED, 1.0),
        (2, ModelCase(), SHARDED, 0.7),
        (2, ModelCase(lora=LORA), SHARDED, 1.0),
        (2, ModelCase(tied=True), {**REPLICATED, "parameters": "replicated"}, 1.0),
    ],
    ids=["one rank", "sharded", "adapters", "replicated"],
)
def test_an_engine_trains_as_plain_transformers(
    ranks, tmp_path: Path, num_ranks: int, case: ModelCase, config: dict[str, Any], temperature: float
) -> None:
    expected_values, expected_norms, expected = plain_steps(case, temperature)
    results = ranks(num_ranks).run(engine_steps, case, config, temperature, str(tmp_path))
    for step, rows in enumerate(expected_values):
        found = [row for values, _, _ in results for row in values[step]]
        for row, each in zip(rows, found, strict=True):
            torch.testing.assert_close(each, row, rtol=1e-9, atol=1e-9)
    for _, norms, weights in results:
        assert norms == pytest.approx(expected_norms, rel=1e-6)
        assert max(relative_error(weights[name], expected[name]) for name in expected) < 1e-6


def misuse(kind: str, folder: str) -> None:
    engine = LongContextEngine(build_model(ModelCase()), quiet_config(**SHARDED), adam, output_dir=folder)
    rows = rows_of([9, 6], dist.get_rank())

    def total(values: RowValues) -> tuple[Tensor, None]:
        return torch.cat(values.log_probs).sum() * (math.nan if kind == "nan" and dist.get_rank() else 1), None

    try:
        if kind == "no rows":
            engine.log_probs([])
        if kind == "long":
            engine.log_probs(rows_of([65], 0) if dist.get_rank() else rows)
        if kind == "empty row":
            engine.log_probs([TokenRow([])] if dist.get_rank() else rows)
        if kind == "no gradients":
            engine.optimizer_step()
        engine.forward_backward(rows, total)
        engine.forward_backward(rows, total)
    finally:
        engine.close()


MISUSES = {
    "no rows": "no rank has a row",
    "long": "rank 1: the batch has a sequence of 65 tokens",
    "empty row": "rank 1: row 0 has token ids of shape",
    "no gradients": "the engine has no gradients of a whole step",
    "twice": "were summed over ranks already",
    "nan": "the gradients of this step are not finite",
}


@pytest.mark.parametrize("kind", MISUSES)
def test_what_would_be_wrong_is_an_error_on_every_rank(ranks, tmp_path: Path, kind: str) -> None:
    with pytest.raises(RankFailure) as raised:
        ranks(2).run(misuse, kind, str(tmp_path))
    assert str(raised.value).count(MISUSES[kind]) >= 2, raised.value
