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
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.memory.byte_model import ByteModel

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


@pytest.mark.daily("one rank", "sharded")
@pytest.mark.quick("sharded")
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
        if kind == "raises" and dist.get_rank():
            raise KeyError("no advantage")
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
        if kind == "temperatures":
            engine.log_probs(rows, 1.0 + dist.get_rank())
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
    "raises": "KeyError: 'no advantage'",
    "temperatures": "temperature 1.0 (rank 0); temperature 2.0 (rank 1)",
    "nan": "the gradients of this step are not finite",
}


@pytest.mark.parametrize("kind", MISUSES)
def test_what_would_be_wrong_is_an_error_on_every_rank(ranks, tmp_path: Path, kind: str) -> None:
    with pytest.raises(RankFailure) as raised:
        ranks(2).run(misuse, kind, str(tmp_path))
    assert str(raised.value).count(MISUSES[kind]) >= 2, raised.value


def after_moves(folder: str) -> dict[str, tuple[float, float]]:
    """For every method, a number that it gives without and with weights, gradients and states on the host before it."""

    def number(call: str, moves: bool) -> float:
        engine = LongContextEngine(build_model(ModelCase()), quiet_config(**REPLICATED), adam, output_dir=folder)
        move = engine.to_host if moves else engine.to_device
        engine.forward_backward(rows_of([9, 6], 0), lambda values: (mixed_loss(values.log_probs), None))
        if call == "load":
            engine.optimizer_step()
            engine.save(f"{folder}/before")
        move()
        if call == "step":
            engine.optimizer_step()
        if call == "save":
            engine.save(f"{folder}/after")
        if call == "load":
            engine.load(f"{folder}/before")
        # sum over weights, as the number of each call
        found = float(sum(tensor.double().abs().sum() for _, tensor in engine.weights()))
        engine.close()
        return found

    return {call: (number(call, False), number(call, True)) for call in ("weights", "step", "save", "load")}


@pytest.mark.wide
def test_calls_bring_back_what_lies_on_the_host(ranks, tmp_path: Path) -> None:
    """In a process of its own, since reading freed memory would end this one."""
    (found,) = ranks(1).run(after_moves, str(tmp_path))
    for call, (still, moved) in found.items():
        assert still == moved, call


def test_a_call_inside_the_loss_has_its_own_temperature(tmp_path: Path) -> None:
    engine = LongContextEngine(build_model(ModelCase()), quiet_config(**REPLICATED), adam, output_dir=str(tmp_path))
    rows, gradients = rows_of([9, 6], 0), []
    for calls_inside in (False, True):

        def loss(values: RowValues, calls_inside: bool = calls_inside) -> tuple[Tensor, None]:
            if calls_inside:
                engine.log_probs(rows, temperature=0.5)
            return mixed_loss(values.log_probs), None

        engine.forward_backward(rows, loss)
        gradients.append([weight.grad.clone() for weight in engine.model.parameters() if weight.grad is not None])
        engine.zero_grad()
    assert gradients[0] and all(map(torch.equal, *gradients))
    for value in (0.0, math.nan):
        with pytest.raises(ValueError, match=f"temperature is {value}; give a number above 0"):
            engine.log_probs(rows, temperature=value)
    engine.close()


def test_masks_of_dropout_differ_from_step_to_step_and_are_those_of_the_gradient(tmp_path: Path) -> None:
    case = ModelCase(lora=(*LORA, ("lora_dropout", 0.5)))
    rows = rows_of([20, 9], 0)

    def stepped(num_before: int) -> tuple[Tensor, Tensor]:
        """Values of the rows after some steps that change no weight, and those of the loss of the next step."""
        engine = LongContextEngine(build_model(case).train(), quiet_config(**REPLICATED), adam, output_dir=str(tmp_path))
        engine.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
        for _ in range(num_before):
            engine.forward_backward(rows, lambda values: (mixed_loss(values.log_probs), None))
            engine.optimizer_step()
        seen = engine.log_probs(rows).log_probs[0]
        found: list[Tensor] = []

        def loss(values: RowValues) -> tuple[Tensor, None]:
            found.append(values.log_probs[0].detach())
            return mixed_loss(values.log_probs), None

        engine.forward_backward(rows, loss)
        engine.close()
        return seen, found[0]

    first, second = stepped(0), stepped(1)
    assert torch.equal(*first) and torch.equal(*second)
    assert not torch.allclose(first[0], second[0])


def clipped(log_probs: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """GRPO's loss of a token against the sampler's log-probabilities."""
    ratios = torch.exp(log_probs - columns["old"])
    gains = torch.minimum(ratios * columns["advantages"], ratios.clamp(0.8, 1.2) * columns["advantages"])
    return -gains * columns["weights"]


def columns_of(rows: list[TokenRow], seed: int) -> dict[str, list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    scales = {"old": (0.2, -4.0), "advantages": (1.0, 0.1), "weights": (0.1, 0.3)}
    drawn = {name: [torch.randn(len(row.ids), generator=draw, dtype=torch.float64) for row in rows] for name in scales}
    return {name: [a * part + b for part in drawn[name]] for name, (a, b) in scales.items()}


def two_ways(
    case: ModelCase, config: dict[str, Any], temperature: float, folder: str
) -> list[tuple[float, dict[str, Tensor], int]]:
    """Loss, gradients and number of scoring forwards, by one pass and by two, each over two calls of a step."""
    if "tile_tokens" in config:
        # so little memory that plans do not keep everything
        room = ByteModel(model_spec(build_model(case)))
        config = {**config, "device_gib": (room.states("replicated", 1) + room.kept_bytes(20)) / 2**30}
    engine = LongContextEngine(build_model(case), quiet_config(**config), adam, output_dir=folder)
    rank, executor, found = (dist.get_rank() if dist.is_initialized() else 0), engine._executor(), []
    scores, num_scored = executor.score, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        num_scored[0] += 1
        return scores(*args, **kwargs)

    def noted(batch: Any, *args: Any) -> Tensor:
        groups = [group for micro_batch in batch["step"].plan.micro_batches for group in micro_batch.groups]
        policies = [policy for group in groups for policy in group.stages[0].activations]
        assert "tile_tokens" not in config or any(policy.loss_tile_tokens for policy in policies)
        return trains(batch, *args)

    executor.score, trains = counted, engine._train  # type: ignore[method-assign]
    engine._train = noted  # type: ignore[method-assign]
    for is_one_pass in (True, False):
        losses, num_scored[0] = [], 0
        for step, of_ranks in enumerate(STEPS):
            rows = rows_of(of_ranks[rank], 10 * step + rank)
            columns, is_last = columns_of(rows, 7 * step + rank), step == 1

            def summed(values: RowValues, rows: Any = rows, columns: Any = columns) -> tuple[Tensor, None]:
                marks = [row.is_scored & (torch.arange(len(row.ids)) > 0) for row in rows]
                parts = [
                    clipped(values.log_probs[i][mark], {name: column[i][mark] for name, column in columns.items()}).sum()
                    for i, mark in enumerate(marks)
                ]
                return torch.stack([*parts, torch.zeros((), dtype=torch.float64)]).sum(), None

            if is_one_pass:
                loss = engine.forward_backward_by_token(rows, clipped, columns, temperature, is_last)
            else:
                loss = engine.forward_backward(rows, summed, temperature, is_last)[0].clone()
                if dist.is_initialized():
                    dist.all_reduce(loss)
                    loss /= dist.get_world_size()
            losses.append(float(loss))
        gradients = {
            name: whole(weight.grad).clone() for name, weight in engine.model.named_parameters() if weight.grad is not None
        }
        found.append((losses, gradients, num_scored[0]))
        engine.zero_grad()
    engine.close()
    return found


@pytest.mark.daily("one rank", "experts")
@pytest.mark.parametrize(
    "num_ranks,case,config,temperature",
    [
        (1, ModelCase(), REPLICATED, 0.7),
        (2, ModelCase(), {**REPLICATED, "parameters": "replicated", "tile_tokens": 8, "degrees": (1, 2)}, 1.0),
        (2, ModelCase(lora=LORA), {**SHARDED, "degrees": (2,)}, 1.3),
        (2, ModelCase("mixtral", balance=0.1), {**REPLICATED, "parameters": "replicated"}, 1.0),
    ],
    ids=["one rank", "tiles", "adapters", "experts"],
)
def test_one_pass_has_the_gradients_of_two(
    ranks, tmp_path: Path, num_ranks: int, case: ModelCase, config: dict[str, Any], temperature: float
) -> None:
    for one, two in ranks(num_ranks).run(two_ways, case, config, temperature, str(tmp_path)):
        assert one[0] == pytest.approx(two[0], rel=1e-12)
        assert one[1] and one[1].keys() == two[1].keys()
        assert max(relative_error(one[1][name], two[1][name]) for name in two[1]) < 1e-12
        assert (one[2], two[2]) == (0, 2)


def test_a_loss_of_a_token_that_depends_on_others_is_refused(tmp_path: Path) -> None:
    engine = LongContextEngine(build_model(ModelCase()), quiet_config(**REPLICATED), adam, output_dir=str(tmp_path))
    rows = rows_of([9, 6], 0)
    columns = columns_of(rows, 0)
    for wrong in (lambda log_probs, _: log_probs - log_probs.mean(), lambda log_probs, _: log_probs.sum()):
        with pytest.raises(ValueError, match="differs if it is computed alone"):
            engine.forward_backward_by_token(rows, wrong, columns)
    with pytest.raises(ValueError, match=r"the rows have \[9, 6\] tokens, and a column has \[\(9,\)\] numbers"):
        engine.forward_backward_by_token(rows, clipped, {"old": columns["old"][:1]})
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=r"inside torch\.autocast"):
        engine.log_probs(rows)
    engine.close()


def value_steps(config: dict[str, Any], folder: str) -> tuple[list[Tensor], float, dict[str, Tensor]]:
    """Values of this rank's rows, the norm of a step of their loss, and the weights after it."""
    case = ModelCase(head=(("num_labels", 1), ("classifier_dropout", 0.0)))
    engine = LongContextEngine(build_model(case), quiet_config(**config), adam, output_dir=folder)
    rank = dist.get_rank()
    rows = rows_of(STEPS[0][rank], rank)
    seen = engine.log_probs(rows).values
    loss, _ = engine.forward_backward(rows, lambda found: (mixed_loss(found.values), None))
    torch.testing.assert_close(loss, mixed_loss(seen))
    norm = engine.optimizer_step()
    weights = {name: whole(weight.detach()).clone() for name, weight in engine.model.named_parameters()}
    engine.close()
    return seen, norm, weights


def test_a_value_model_trains_as_plain_transformers(ranks, tmp_path: Path) -> None:
    model = build_model(ModelCase(head=(("num_labels", 1), ("classifier_dropout", 0.0))))
    optimizer, losses, expected = adam(list(model.parameters())), [], []
    for rank, lengths in enumerate(STEPS[0]):
        own = [model(input_ids=row.ids[None]).logits[0, :, 0] * row.is_scored for row in rows_of(lengths, rank)]
        losses.append(mixed_loss(own))
        expected += [each.detach() for each in own]
    torch.stack(losses).mean().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    optimizer.step()
    results = ranks(2).run(value_steps, SHARDED, str(tmp_path))
    for found, wanted in zip([row for seen, *_ in results for row in seen], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    for _, found, weights in results:
        assert found == pytest.approx(norm, rel=1e-6)
        assert max(relative_error(weights[name], weight.detach()) for name, weight in model.named_parameters()) < 1e-6


def weights_after_moves(folder: str) -> list[dict[str, Tensor]]:
    """Weights read before the model moves to the host, while it does, and after it."""
    engine = LongContextEngine(build_model(ModelCase()), quiet_config(**REPLICATED), adam, output_dir=folder)
    before, source = dict(engine.weights()), engine.weights()
    engine.to_host()
    after, between = dict(source), {}
    for name, tensor in source:
        engine.to_host()
        between[name] = tensor
    found = [{name: each.clone() for name, each in weights.items()} for weights in (before, between, after)]
    engine.close()
    return found


def test_weights_can_be_read_while_the_model_is_on_the_host(ranks, tmp_path: Path) -> None:
    (found,) = ranks(1).run(weights_after_moves, str(tmp_path))
    expected = build_model(ModelCase()).state_dict()
    for weights in found:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_dropout_of_attention_weights_is_refused(tmp_path: Path) -> None:
    model = build_model(ModelCase())
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1, so the two passes of a step"):
        LongContextEngine(model, quiet_config(**REPLICATED), adam, output_dir=str(tmp_path))
