"""Any loss of log-probabilities has the gradients of one plain process under any plan, in fp64, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.reference import TOLERANCE, random_rows, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_pool import RankFailure
from helpers.ranks.rank_steps import group_pool
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from hf_longctx.hf.log_probs import two_passes
from hf_longctx.hf.log_probs.documents import LocalDocuments, read_documents
from hf_longctx.hf.log_probs.two_passes import Remembered, ScoredModel, TwoPasses
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.logits import logit_change
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.core.loss import TemperedCrossEntropy
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model

Rows = list[dict[str, list[int]]]


def mixed_loss(log_probs_BS: Tensor, has_label_BS: Tensor) -> Tensor:
    """A loss in which every token's slope depends on tokens of all other rows: by sums of rows, sorted, and by clipped ratios."""
    sums_B = log_probs_BS.sum(dim=1)
    pairs = F.softplus(0.1 * (sums_B.sort().values - sums_B.flip(0)))
    ratios_BS = torch.exp(log_probs_BS + 3).clamp(max=1.2) * torch.tanh(sums_B).unsqueeze(1)
    return pairs.mean() + (ratios_BS * has_label_BS).sum() / has_label_BS.sum().clamp(min=1)


def padded(rows: Rows, side: str) -> dict[str, Tensor]:
    """The rows as a padded batch; prompts are padded on the left where completions are generated."""
    longest = max(len(row["input_ids"]) for row in rows)

    def column(values: list[list[int]], filler: int) -> Tensor:
        gaps = [[filler] * (longest - len(each)) for each in values]
        return torch.tensor([gap + each if side == "left" else each + gap for each, gap in zip(values, gaps, strict=True)])

    # the first token of a row is predicted from nothing
    labels = column([[-100, *row["labels"][1:]] for row in rows], -100)
    mask = column([[1] * len(row["input_ids"]) for row in rows], 0)
    return {"input_ids": column([row["input_ids"] for row in rows], 0), "attention_mask": mask, "labels": labels}


def plain_step(case: ModelCase, rows_of_ranks: list[Rows], temperature: float) -> tuple[float, dict[str, Tensor]]:
    """Mean loss over ranks and its gradients: plain Hugging Face on each row alone, and autograd through all of them at once."""
    model = build_model(case)
    losses = []
    for rows in rows_of_ranks:
        longest = max(len(row["input_ids"]) for row in rows)
        found = []
        for row in rows:
            logits_TV = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
            labels_T = torch.tensor(row["labels"][1:], dtype=torch.int64)
            log_p_T = -F.cross_entropy(logits_TV / temperature, labels_T, ignore_index=-100, reduction="none")
            found.append([F.pad(each, (0, longest - 1 - len(each))) for each in (log_p_T, (labels_T != -100).double())])
        log_probs_BS, has_label_BS = map(torch.stack, zip(*found, strict=True))
        losses.append(mixed_loss(log_probs_BS, has_label_BS))
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class GivenPlan:
    """A plan source that has one plan."""

    def __init__(self, plan: StepPlan, pool: Any) -> None:
        self.plan, self.pool = plan, pool

    def plans(self, steps: Any, explore: bool) -> Iterator[StepPlan]:
        assert [lengths for _, lengths in steps] == [list(self.plan.lengths)]
        yield self.plan


def two_passes_on_rank(
    case: ModelCase, plan_json: str, rows_of_ranks: list[Rows], temperature: float, side: str, bypass: str = ""
) -> tuple[float, dict[str, Tensor]]:
    """The loss of this rank's rows, and the reduced gradients."""
    pool, plan, cpu = group_pool(), plan_from_json(plan_json), torch.device("cpu")
    model = build_model(case).train()
    patch_model(model)
    token_loss = TemperedCrossEntropy(temperature) if temperature != 1 else None
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, cpu, token_loss=token_loss)
    engine = ActivationEngine(layer_modules(model), head=OutputHead(output_head(model), change=logit_change(model)))
    passes = TwoPasses(GivenPlan(plan, pool), 100, (), temperature)  # type: ignore[arg-type]
    passes.bind(model, ScoredModel(lambda: executor, lambda model, plan: engine), is_trained=True)
    batch = padded(rows_of_ranks[pool.rank], side)
    if bypass == "batch" and pool.rank:
        # no rows
        batch = {column: values[:0] for column, values in batch.items()}
    output = model(**batch, **({} if bypass == "forward" else {"fused_lm_head": True}))
    # the reference pads its rows on the right
    gaps_B1 = (batch["attention_mask"] == 0).sum(dim=1, keepdim=True) * (side == "left")
    columns_S = torch.arange(output.log_probs.shape[1])
    moved_BS = (columns_S + gaps_B1) % len(columns_S)
    log_probs_BS, mask_BS = (each.gather(1, moved_BS) for each in (output.log_probs, output.label_mask))
    loss = mixed_loss(log_probs_BS, mask_BS.double())
    if bypass == "entropy":
        loss = loss - output.entropy.mean()
    if bypass == "weights" and pool.rank:
        loss = loss + model.lm_head.weight.square().sum()
    with passes.backward_of_loss(model):
        loss.backward()
    for number, inputs in enumerate(passes.second_pass()):
        assert not number
        executor.run(plan.for_rank(pool.rank), inputs["chunks"], 1.0, engine=engine)
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sliced() -> StepPlan:
    """One rank: a sequence in slices, the last one together with two others, replayed and with the loss in tiles."""
    lengths = [31, 13, 2]
    chunks = [*([span] for span in cut(0, (9, 12))), [(0, 21, 31), (1, 0, 13)], [(2, 0, 2)]]
    return same_policy(sliced_plan(lengths, chunks), replayed(0.5), replayed(), tile_tokens=5)


def of_layout(name: str, **settings: Any) -> StepPlan:
    num_ranks, layout, lengths = LAYOUTS[name]
    return plan_of(layout, lengths, num_ranks, **settings)


CAPPED = ModelCase("gemma2", promoted=True)
# name -> (plan, temperature, side of the padding)
PLANS = {
    "slices, tiles": (sliced, 1.0, "right"),
    "groups of several sizes": (lambda: of_layout("<2>,<1,1>,<2>"), 0.7, "left"),
    "rings": (lambda: of_layout("<2>", ulysses=1), 1.0, "right"),
}


def dealt(plan: StepPlan) -> list[Rows]:
    """Random rows of the plan's lengths, of which every rank loads its part."""
    rows = random_rows(list(plan.lengths))
    share = -(-len(rows) // plan.num_ranks)
    return [rows[first : first + share] for first in range(0, len(rows), share)]


# the second one caps its logits
@pytest.mark.daily("rings-case2", "slices, tiles-case3")
@pytest.mark.quick("rings-case2")
@pytest.mark.parametrize("name,case", [*((name, ModelCase()) for name in PLANS), ("slices, tiles", CAPPED)])
def test_a_loss_that_mixes_rows_has_the_gradients_of_one_plain_process(ranks, name: str, case: ModelCase) -> None:
    make, temperature, side = PLANS[name]
    plan = make()
    rows_of_ranks = dealt(plan)
    expected_loss, expected = plain_step(case, rows_of_ranks, temperature)
    results = ranks(plan.num_ranks).run(two_passes_on_rank, case, plan_to_json(plan), rows_of_ranks, temperature, side)
    assert sum(loss for loss, _ in results) / len(results) == pytest.approx(expected_loss, rel=TOLERANCE)
    for _, gradients in results:
        assert gradients.keys() == expected.keys()
        assert max(relative_error(gradients[key], expected[key]) for key in expected) <= TOLERANCE


BYPASSES = {
    "forward": "its gradient would bypass the plans",
    "entropy": "its backward has reached the values 'entropy' of tokens",
    # on one rank of two
    "weights": r"its backward has reached the weight .*(embed_tokens|lm_head).* \(on rank 1\)",
    "batch": "a batch cannot run under a plan:\n *.*rank 1: (Index|Runtime)Error",
}


@pytest.mark.daily("forward")
@pytest.mark.parametrize("name", BYPASSES)
def test_what_would_bypass_the_plans_is_refused_on_every_rank(ranks, name: str) -> None:
    plan = of_layout("<2>", ulysses=1) if name in ("weights", "batch") else sliced()
    case, rows = ModelCase(), dealt(plan)
    with pytest.raises(RankFailure, match=f"(?s){BYPASSES[name]}"):
        ranks(plan.num_ranks).run(two_passes_on_rank, case, plan_to_json(plan), rows, 1.0, "right", name)


def _swap(weights: Tensor) -> None:
    weights[0, 0], weights[1, 0] = weights[1, 0].clone(), weights[0, 0].clone()


def forwards_of_changes(case: ModelCase, plan_json: str, rows_of_ranks: list[Rows]) -> dict[str, tuple[int, bool]]:
    """Forwards that it takes to score the same rows after each change, and whether the values are those of a new forward."""
    pool, plan, cpu = group_pool(), plan_from_json(plan_json), torch.device("cpu")
    model: Any = build_model(case).train()
    patch_model(model)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, cpu)
    count, score = [0], executor.score

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return score(*args, **kwargs)

    executor.score = counted  # type: ignore[method-assign]
    passes = TwoPasses(GivenPlan(plan, pool), 100, ())  # type: ignore[arg-type]
    policy = ScoredModel(lambda: executor, lambda model, plan: None, Remembered())
    batch = padded(rows_of_ranks[pool.rank], "right")

    def scored(remembered: bool = True) -> Tensor:
        used = policy if remembered else ScoredModel(policy.executor, policy.engine)
        return passes.values(used, lambda: read_documents({**batch, "fused_lm_head": True}), is_trained=False).log_probs

    weight = next(each for name, each in model.named_parameters() if name.endswith("q_proj.lora_B.default.weight"))
    layer: Any = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
    other = {**batch, "labels": batch["labels"].clone()}
    other["labels"][0, -1] = 7
    changes: dict[str, Any] = {
        "nothing": lambda: None,
        "one weight, through its data": lambda: weight.data[0, 0].add_(0.5),
        "two weights, whose bits have the same sum": lambda: _swap(weight.data),
        "one weight, on one rank": lambda: weight.data[0, 0].add_(0.5 * pool.rank),
        "no adapters": model.base_model.disable_adapter_layers,
        "adapters": model.base_model.enable_adapter_layers,
        "scale of adapters": lambda: layer.set_scale("default", 3.0),
        "evaluation": model.eval,
        "label of one rank": lambda: pool.rank and batch.update(other),
    }
    scored()
    found = {}
    for name, change in changes.items():
        change()
        count[0] = 0
        values = scored()
        num_forwards = count[0]
        found[name] = num_forwards, torch.equal(values, scored(remembered=False))
    return found


@pytest.mark.wide
def test_rows_are_scored_once_with_the_same_weights(ranks) -> None:
    plan = of_layout("<2>,<1,1>,<2>")
    case = ModelCase(lora=(("r", 2), ("target_modules", ["q_proj"])))
    for found in ranks(2).run(forwards_of_changes, case, plan_to_json(plan), dealt(plan)):
        assert found.pop("nothing") == found.pop("adapters") == (0, True)
        assert all(each == (1, True) for each in found.values()), found


def test_values_are_kept_on_the_host_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a model that is only scored, whose weights never change, would keep all rows that it ever saw."""
    monkeypatch.setattr(two_passes, "_MOST_TOKENS", 10)
    model, memory = torch.nn.Linear(2, 2), Remembered()
    for first in range(0, 40, 4):
        ids_T = torch.arange(first, first + 4)
        row = LocalDocuments(torch.stack([ids_T, ids_T], 1), [4], torch.ones(1, 4, dtype=torch.bool))
        assert memory.find(model, row, 1.0, None) is None
        memory.keep(row, torch.full((4, 5), float(first), dtype=torch.float64))
        found = memory.find(model, row, 1.0, None)
        assert found is not None and bool((found == first).all())
    assert sum(len(values) for values in memory._values.values()) == 8
