"""Windows of any size give the loss and gradients of plain Hugging Face; K/V book and rings drop keys that no token sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.measures.masked_attention import SCALE, error_of, masked_softmax, readers_of
from helpers.measures.stage_memory import check_held_memory
from helpers.models.reference import TOLERANCE, random_rows, reference_step, worst_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import num_policies, policies_for, replayed, same_policy, with_policies
from helpers.plans.sliced_plans import cut, few, random_slicings, sliced_plan
from helpers.ranks.lone_steps import policy_step
from helpers.ranks.pipeline_steps import check_pipeline
from helpers.ranks.rank_steps import check_layout_step, group_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.types import ActivationPolicy, Chunk, LayerPolicy, SequenceGroup, Span, StepPlan
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.runtime.attention.ring import RingAttention
from hf_longctx.runtime.attention.rows import AttentionRule
from hf_longctx.runtime.tiles.patterns import AttentionPattern
from hf_longctx.runtime.tiles.plain import Scores

# windows of one token, of less than a slice of ten, of exactly a slice, of more, and of more than the document
WINDOWS = [1, 6, 10, 11, 17, 64]
SLICES = [[span] for span in cut(0, [10, 10, 10, 7])]


def case_of(window: int, num_layers: int = 2) -> ModelCase:
    """A model whose first layer has no window and whose other layers all have one."""
    return ModelCase("qwen3_window", promoted=True, window=window, num_layers=num_layers)


def check(case: ModelCase, plan: StepPlan) -> int:
    """Asserts the loss and gradients of one plain process, and the predicted bytes of the K/V book; returns these bytes."""
    rows = random_rows(list(plan.lengths))
    model = build_model(case)
    patch_model(model)
    spec = model_spec(model)
    assert spec.windows == (None, *[case.window] * (case.num_layers - 1))
    result, gradients, _ = policy_step(model, plan, rows)
    loss, expected = reference_step(build_model(case), rows)
    # with a window of one token, gradients of queries and keys are noise
    loud = {name: gradient for name, gradient in expected.items() if gradient.abs().max() > 1e-12}
    assert all(gradients[name].abs().max() <= 1e-12 for name in expected if name not in loud)
    assert worst_error((float(result.loss), {name: gradients[name] for name in loud}), (loss, loud)) <= TOLERANCE
    ((group, stage),) = plan.for_rank(0).rounds
    assert ByteModel(spec).moments(group, stage).most.book == result.memory.kv_book
    return result.memory.kv_book


@pytest.mark.parametrize("window", WINDOWS)
def test_the_book_holds_a_window_of_replayed_layers(window: int) -> None:
    plan = sliced_plan([37], SLICES)
    held = check(case_of(window), same_policy(plan, replayed(0.4), replayed(1.0)))
    # computed by hand for keys and values of 2 KV heads of 8 in fp64. The book is fullest when the second layer has replayed the
    # third slice. The first layer then holds the whole document, and gradients for the tokens before the last slice. The second
    # layer holds the tokens of two slices that are still seen, the whole third slice, and the gradients that the last slice left
    in_second = 37 + 30 if window >= 37 else 2 * min(window - 1, 10) + 10 + min(window - 1, 30)
    assert held == 2 * 2 * 8 * 8 * (37 + 30 + in_second)


@pytest.mark.wide
@few(20)
@given(random_slicings(), st.sampled_from([1, 2, 5, 9, 30]), st.data())
def test_random_cuts_windows_and_policies_match(slicing: Any, window: int, data: st.DataObject) -> None:
    lengths, chunks, words = slicing
    check(case_of(window), data.draw(policies_for(sliced_plan(lengths, chunks, words))))


@pytest.mark.daily("64-1")
@pytest.mark.parametrize("window,num_ranges", [(2, 1), (6, 2), (64, 1)])
def test_stages_hold_what_is_predicted(ranks, window: int, num_ranges: int) -> None:
    case, chunks = case_of(window, 4), [*SLICES, [(1, 0, 9)]]
    plan = pipeline_plan([37, 9], [[(1, chunks)]], 2, "interleaved" if num_ranges > 1 else "elastic", 4, num_ranges)
    check_pipeline(ranks(2), case, plan)
    policies = [(replayed(0.3), replayed(1.0)), (LayerPolicy(), replayed(0.0)), (replayed(0.0), LayerPolicy())]
    mixed = [ActivationPolicy(0, 0, policies[place % 3]) for place in range(num_policies(plan))]
    check_held_memory(ranks(2), case, with_policies(plan, mixed))


@pytest.mark.daily("5")
@pytest.mark.parametrize("window", [2, 5, 12, 64])
def test_rings_match(ranks, window: int) -> None:
    num_ranks, layout, lengths = LAYOUTS["<4>"]
    check_layout_step(ranks(num_ranks), case_of(window, 3), layout, lengths, ulysses=1)


def test_hybrids_and_rings_beside_each_other_match(ranks) -> None:
    num_ranks, layout, lengths = LAYOUTS["<4>,<2,2>,<1,1,1,1>"]
    check_layout_step(ranks(num_ranks), case_of(7), layout, lengths, ulysses=2, rings="second")


patterns = st.one_of(
    st.integers(1, 40).map(lambda size: AttentionPattern(window=size)),
    st.integers(1, 40).map(lambda size: AttentionPattern(chunk=size)),
)


def ring_errors(lengths: list[int], pattern: AttentionPattern) -> float:
    """Largest error in outputs and gradients of a ring of all ranks, for documents that are equal on every rank."""
    pool, degree = group_pool(), dist.get_world_size()
    spans = tuple(Span(number, 0, length) for number, length in enumerate(lengths))
    group = SequenceGroup(tuple(range(degree)), "ring", (Chunk(0, spans),), ())
    context = pool.context(group, group.chunks[0])
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(4, 4), (2, 4), (2, 3)]
    # queries, keys, values and the gradient of the output, for every document
    documents = [
        [torch.randn(num, length, size, dtype=torch.float64, generator=generator) for num, size in [*shapes, (4, 3)]]
        for length in lengths
    ]
    leaves = [[x.requires_grad_() for x in document[:3]] for document in documents]
    expected = [masked_softmax(*one, pattern, None) for one in leaves]
    of_outputs = [document[3].transpose(0, 1) for document in documents]
    gradients = [torch.autograd.grad(*one) for one in zip(expected, leaves, of_outputs, strict=True)]

    def mine(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
        """This rank's tokens, given one tensor per document; dummy tokens are zeros."""
        like = tensors[0].narrow(dim, 0, 1)
        parts = [
            tensors[piece.document].narrow(dim, piece.start, piece.num_tokens)
            if piece.document < len(tensors)
            else torch.zeros_like(like)
            for piece in context.ring.pieces
        ]
        return torch.cat([part.detach() for part in parts], dim=dim)

    own = [mine([one[place] for one in leaves], 1).unsqueeze(0).requires_grad_() for place in range(3)]
    rule = AttentionRule(readers_of(4, 2, 0), Scores(SCALE), pattern)
    output = RingAttention(rule, context.ring, None, context.kv_book, "layer")(*own)
    found = torch.autograd.grad(output, own, mine(of_outputs, 0).unsqueeze(0))
    errors = [error_of([output[0]], [mine(expected, 0)])]
    errors += [error_of([part[0]], [mine([one[place] for one in gradients], 1)]) for place, part in enumerate(found)]
    return max(errors)


def random_rings(num_examples: int) -> list[tuple[list[int], AttentionPattern, float]]:
    """Random documents and patterns, equal on every rank, and the errors of their rings."""
    found = []

    @settings(max_examples=num_examples, derandomize=True, database=None, deadline=None)
    @given(st.lists(st.integers(2, 60), min_size=1, max_size=4), patterns)
    def draw(lengths: list[int], pattern: AttentionPattern) -> None:
        found.append((lengths, pattern, ring_errors(lengths, pattern)))

    draw()
    return found


@pytest.mark.daily("2")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_documents_and_patterns_match_in_rings(ranks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(random_rings, 25):
        assert all(error <= TOLERANCE for _, _, error in found), found
