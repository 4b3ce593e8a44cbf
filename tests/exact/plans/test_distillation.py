"""The distance from a teacher matches a plain process under every kind of plan, in fp64, on gloo ranks."""

from __future__ import annotations

import pytest
import torch
from exact.plans.test_weights_and_losses import PLANS, rows_of
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.teachers import build_teacher
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import DISTANCES, plain_distances
from helpers.plans.pipeline_plans import LENGTHS, SLICED, pipeline_plan
from helpers.plans.policies import replayed, same_policy
from helpers.ranks.pipeline_steps import check_pipeline
from helpers.ranks.rank_steps import check_step, run_step


@pytest.mark.daily("tiles-forward")
@pytest.mark.parametrize("loss", DISTANCES)
@pytest.mark.parametrize("name", PLANS)
def test_the_distance_from_a_teacher_matches(ranks, name: str, loss: str) -> None:
    plan = PLANS[name]()
    lengths = list(plan.lengths)
    rows = rows_of(lengths, weighted=name in ("tiles", "shards", "hybrid"))
    check_step(ranks(plan.num_ranks), ModelCase(loss=loss, teacher="qwen3"), plan, lengths, rows=rows)


@pytest.mark.daily("replicated-None-top_k")
@pytest.mark.parametrize("loss", ["forward", "jsd", "top_k"])
@pytest.mark.parametrize("tile_tokens", [None, 4])
@pytest.mark.parametrize("parameters", ["replicated", "sharded"])
def test_it_matches_in_stages(ranks, parameters: str, tile_tokens: int | None, loss: str) -> None:
    num_ranks = 2 if parameters == "replicated" else 4
    degree = num_ranks // 2
    plan = pipeline_plan(LENGTHS, [[(degree, SLICED)]], 2, num_layers=4, parameters=parameters)
    if tile_tokens is not None:
        plan = same_policy(plan, replayed(0.5), replayed(), tile_tokens=tile_tokens)
    check_pipeline(ranks(num_ranks), ModelCase(num_layers=4, loss=loss, teacher="qwen3"), plan, rows=rows_of(LENGTHS, True))


@pytest.mark.daily("cohere")
@pytest.mark.parametrize("teacher", ["gemma2", "mixtral", "cohere"])
def test_teachers_of_other_kinds_match(ranks, teacher: str) -> None:
    """Capped and scaled logits, windows, experts."""
    plan = PLANS["tiled slices"]()
    check_step(ranks(plan.num_ranks), ModelCase(loss="jsd", teacher=teacher), plan, list(plan.lengths))


def test_experts_of_the_model_are_balanced_beside_a_teacher(ranks) -> None:
    """Slices route all tokens before their first forward counts, and then the teacher has not run."""
    plan = PLANS["tiled slices"]()
    case = ModelCase("qwen3_moe", promoted=True, balance=0.1, loss="jsd", teacher="qwen3")
    check_step(ranks(plan.num_ranks), case, plan, list(plan.lengths))


def test_a_teacher_with_states_along_the_sequence_matches_up_to_the_rounding_of_its_scan(ranks) -> None:
    case, plan = ModelCase(loss="jsd", teacher="qwen3_5"), PLANS["tiled slices"]()
    rows = random_rows(list(plan.lengths))
    expected_loss, expected = reference_step(build_model(case), rows, "jsd", build_teacher(case))
    for loss, gradients in run_step(ranks(plan.num_ranks), case, plan, rows):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert max(relative_error(gradients[name], expected[name]) for name in expected) < 1e-5


def test_another_teacher_or_distance_does_not_match(ranks) -> None:
    plan = PLANS["tiles"]()
    lengths = list(plan.lengths)
    rows = random_rows(lengths)
    right = run_step(ranks(2), ModelCase(loss="forward", teacher="qwen3"), plan, rows)[0][0]
    for case in (ModelCase(loss="forward", teacher="llama"), ModelCase(loss="reverse", teacher="qwen3")):
        assert abs(run_step(ranks(2), case, plan, rows)[0][0] - right) > 1e-3


@pytest.mark.parametrize("name", DISTANCES)
def test_the_formulas_and_their_gradients_are_those_of_the_definition(name: str) -> None:
    loss, generator = DISTANCES[name], torch.Generator().manual_seed(0)
    labels_T = torch.randint(11, (7,), generator=generator)
    logits_TV, teacher_TV = (3 * torch.randn(7, 11, dtype=torch.float64, generator=generator) for _ in range(2))
    slopes = []
    for compute in (loss.losses, lambda *given: plain_distances(loss, *given)):
        own_TV = logits_TV.clone().requires_grad_()
        losses_T = compute(own_TV, teacher_TV, labels_T)
        slopes.append((losses_T.detach(), *torch.autograd.grad(losses_T.sum(), own_TV)))
    for found, expected in zip(*slopes, strict=True):
        assert relative_error(found, expected) <= 1e-12


@pytest.mark.parametrize("name", DISTANCES)
def test_ids_that_both_models_hide_give_finite_losses_and_gradients(name: str) -> None:
    logits_TV, teacher_TV = (torch.randn(3, 9, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    least = torch.finfo(torch.float32).min
    for each in (logits_TV, teacher_TV):
        each[:, [2, 5]] = least
    losses_T = DISTANCES[name].losses(logits_TV.requires_grad_(), teacher_TV, torch.tensor([0, 1, -100]))
    losses_T.sum().backward()
    assert losses_T.isfinite().all() and logits_TV.grad is not None and logits_TV.grad.isfinite().all()


def test_a_model_that_equals_its_teacher_has_no_distance_and_no_gradient() -> None:
    model = build_model(ModelCase(teacher="llama"))
    rows = random_rows([9, 14])
    loss, gradients = reference_step(model, rows, "forward", build_teacher(ModelCase(teacher="llama")))
    assert loss > 0.1 and gradients
    loss, gradients = reference_step(model, rows, "forward", model)
    assert abs(loss) < 1e-14 and max(float(each.abs().max()) for each in gradients.values()) < 1e-14
