"""Slices: any cut, packing and order of them gives the loss and gradients of one plain process, and the K/V book ends empty."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers.measures.leaf_slices import leaf_step
from helpers.measures.planted import plant
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error, worst_error
from helpers.models.tiny_models import HEAD_DIM, NUM_KV, NUM_LAYERS, ModelCase, build_model, with_lora
from helpers.plans.sliced_plans import CUTS, PACKINGS, Chunks, cut, random_slicings, sliced_plan
from helpers.ranks.lone_steps import check_lone_step, lone_step, patched_model
from helpers.ranks.rank_steps import check_step, rank_inputs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.plan.core.sharding import HeadShare
from hf_longctx.runtime.attention import chunk
from hf_longctx.runtime.attention.chunk import ChunkAttention, Document
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.attention.rows import AttentionRule
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.plain import Scores

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", CUTS)
def test_slices_of_one_sequence_match_one_plain_process(name: str, family: str) -> None:
    spans = cut(0, CUTS[name])
    check_lone_step(ModelCase(family), sliced_plan([96], [[span] for span in spans]), random_rows([96]))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", PACKINGS)
def test_slices_among_other_sequences_match(name: str, family: str) -> None:
    lengths, chunks, words, validated = PACKINGS[name]
    check_lone_step(ModelCase(family), sliced_plan(lengths, chunks, words, validated=validated), random_rows(lengths))


@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 1), (4, 4), (6, 2), (6, 3)])
def test_grouped_query_heads_match(num_heads: int, num_kv_heads: int) -> None:
    plan = sliced_plan([40, 7], [[(0, 0, 15)], [(0, 15, 16)], [(0, 16, 40), (1, 0, 7)]])
    check_lone_step(ModelCase(num_heads=num_heads, num_kv_heads=num_kv_heads), plan, random_rows([40, 7]))


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_scaled_rope_goes_on_where_the_last_slice_ended(rope_type: str) -> None:
    plan = sliced_plan([60], [[span] for span in cut(0, [23, 30, 7])])
    check_lone_step(ModelCase(rope_type=rope_type), plan, random_rows([60]))


@pytest.mark.parametrize("masked", [(0,), (0, 1, 2)])
def test_slices_without_labels_pass_on_no_gradient(masked: tuple[int, ...]) -> None:
    lengths, chunks, words, _ = PACKINGS["a hybrid: the tail and whole sequences"]
    check_lone_step(ModelCase(), sliced_plan(lengths, chunks, words), random_rows(lengths, masked=masked))


@pytest.mark.daily("a hybrid: the tail and whole sequences-True", "a whole sequence in front-False")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", PACKINGS)
def test_checkpointed_layers_match_and_run_attention_twice(name: str, use_reentrant: bool) -> None:
    lengths, chunks, words, validated = PACKINGS[name]
    plan, rows = sliced_plan(lengths, chunks, words, validated=validated), random_rows(lengths)
    with patch.object(chunk, "rows_forward", side_effect=chunk.rows_forward) as counted:
        plain = check_lone_step(ModelCase(), plan, rows)
        num_calls = counted.call_count
        checkpointed = check_lone_step(ModelCase(), plan, rows, patched_model(ModelCase(), use_reentrant))
    assert counted.call_count == 3 * num_calls > 0
    assert checkpointed.memory.kv_book == plain.memory.kv_book


def test_some_checkpointed_layers_match() -> None:
    model = patched_model(ModelCase(), use_reentrant=False)
    model.model.layers[0].gradient_checkpointing = False
    lengths, chunks, words, _ = PACKINGS["slices, hybrids and packs"]
    check_lone_step(ModelCase(), sliced_plan(lengths, chunks, words), random_rows(lengths), model)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", PACKINGS)
def test_the_book_equals_keys_and_values_as_leaves(name: str, checkpointed: bool) -> None:
    lengths, chunks, words, validated = PACKINGS[name]
    plan, rows = sliced_plan(lengths, chunks, words, validated=validated), random_rows(lengths)
    expected = leaf_step(ModelCase(), plan, rows, checkpointed)
    result, gradients = lone_step(ModelCase(), plan, rows, patched_model(ModelCase(), False if checkpointed else None))
    assert worst_error((float(result.loss), gradients), expected) <= TOLERANCE


# norms computed in fp64: in fp32 a random search would sometimes hit a value at the edge between two numbers
@pytest.mark.wide
@settings(max_examples=80, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
@given(random_slicings(), st.sampled_from([None, False, True]))
def test_random_cuts_chunks_and_orders_match(
    slicing: tuple[list[int], list[list[tuple[int, int, int]]], str], use_reentrant: bool | None
) -> None:
    lengths, chunks, words = slicing
    case = ModelCase(promoted=True)
    check_lone_step(case, sliced_plan(lengths, chunks, words), random_rows(lengths), patched_model(case, use_reentrant))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_lora_matches(use_reentrant: bool | None) -> None:
    lengths, chunks, words, _ = PACKINGS["a hybrid: the tail and whole sequences"]
    plan, rows = sliced_plan(lengths, chunks, words), random_rows(lengths)
    result, gradients = lone_step(ModelCase(), plan, rows, with_lora(patched_model(ModelCase(), use_reentrant)))
    expected = reference_step(with_lora(build_model(ModelCase())), rows)
    assert worst_error((float(result.loss), gradients), expected) <= TOLERANCE


@pytest.mark.daily("True")
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_as_near_to_fp64_in_slices_as_without(autocast: bool) -> None:
    case = ModelCase(dtype=torch.float32, autocast=True) if autocast else ModelCase(dtype=torch.bfloat16)
    rows = random_rows([30, 5])
    expected = reference_step(build_model(ModelCase()), rows)

    def error(chunks: Chunks) -> float:
        result, gradients = lone_step(case, sliced_plan([30, 5], chunks), rows)
        return worst_error((float(result.loss), {name: x.double() for name, x in gradients.items()}), expected)

    # measured errors: 0.024 to 0.025 for 30 slices of one token, 0.026 to 0.028 for one chunk
    assert error([*([span] for span in cut(0, [1] * 30)), [(1, 0, 5)]]) <= 1.5 * error([[(0, 0, 30), (1, 0, 5)]])


# 3 ranks share 4 query heads and 2 KV heads unevenly; a slice of one token leaves ranks with dummy tokens
@pytest.mark.daily("2-4-2")
@pytest.mark.parametrize("num_ranks,num_heads,num_kv", [(2, 4, 2), (2, 6, 3), (3, 4, 2)])
def test_ulysses_groups_run_slices_of_their_heads(ranks, num_ranks: int, num_heads: int, num_kv: int) -> None:
    lengths, case = [30, 7, 5], ModelCase(num_heads=num_heads, num_kv_heads=num_kv)
    chunks = [[(0, 0, 12)], [(0, 12, 13)], [(0, 13, 30), (1, 0, 7), (2, 0, 5)]]
    check_step(ranks(num_ranks), case, sliced_plan(lengths, chunks, num_ranks=num_ranks), lengths)


@pytest.mark.daily("gathered_per_round")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_sharded_parameters_run_slices(ranks, parameters: Any) -> None:
    lengths = [30, 7]
    plan = sliced_plan(lengths, [[(0, 0, 12)], [(0, 12, 30), (1, 0, 7)]], num_ranks=2, parameters=parameters)
    check_step(ranks(2), ModelCase(), plan, lengths)


@pytest.mark.parametrize("bug", ["", "gradients of keys and values dropped", "stale book entry", "positions of the shard"])
def test_planted_bug_is_noticed(bug: str) -> None:
    plan = sliced_plan([30], [[span] for span in cut(0, [11, 12, 7])])
    steps = [random_rows([30], seed=seed) for seed in (0, 1)]

    def run_both() -> None:
        for rows in steps:
            check_lone_step(ModelCase(), plan, rows)

    if not bug:
        run_both()
        return
    with plant(bug, 0, 1), pytest.raises(AssertionError):
        run_both()


THREE = [[span] for span in cut(0, [11, 12, 7])]


@pytest.mark.parametrize(
    "words,message",
    [
        ("0F0 0F1 0F2 0B0 0B1 0B2", r"tokens \[0, 11\) of sequence 0 ran backward while tokens up to 30 had not"),
        ("0F0 0F1 0F2 0B2 0B0 0B1", r"tokens \[0, 11\) of sequence 0 ran backward while tokens up to 23 had not"),
        ("0F1 0F0 0F2 0B2 0B1 0B0", r"tokens \[11, 23\) of sequence 0 ran forward after 0 tokens of its sequence"),
        ("0F0 0F2 0F1 0B2 0B1 0B0", r"tokens \[23, 30\) of sequence 0 ran forward after 11 tokens of its sequence"),
    ],
)
def test_a_wrong_order_is_refused_by_name(words: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        lone_step(ModelCase(), sliced_plan([30], THREE, words, validated=False), random_rows([30]))


def lone_slices(sizes: list[int]) -> list[Slice]:
    return [Slice(0, 0, start, stop, sum(sizes)) for _, start, stop in cut(0, sizes)]


def lone_readers(num_heads: int, num_kv: int) -> KVReaders:
    return KVReaders.of(HeadShare(0, num_heads, 0, num_kv), num_heads // num_kv, CPU)


def slice_attention(q: Tensor, k: Tensor, v: Tensor, readers: KVReaders, scale: float, kv_book: KVBook, slice_: Slice) -> Tensor:
    """Attention of a slice alone in its chunk."""
    rule, document = AttentionRule(readers, Scores(scale)), Document(0, slice_.stop - slice_.start, slice_)
    return ChunkAttention(rule, (document,), None, kv_book, "layer")(q, k, v)


def test_a_backward_cannot_be_repeated() -> None:
    heads = torch.randn(2, 5, 8, requires_grad=True)
    book = KVBook()
    out = slice_attention(heads, heads, heads, lone_readers(2, 2), 0.3, book, Slice(0, 0, 0, 5, 5))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="K/V book has already freed its sequence; run each slice backward only once"):
        out.sum().backward()


def test_a_forward_behind_the_backward_is_refused() -> None:
    first, last = lone_slices([5, 3])
    book, readers = KVBook(), lone_readers(2, 2)
    parts = {part: torch.randn(2, part.stop - part.start, 8, requires_grad=True) for part in (first, last)}
    outputs = {part: slice_attention(x, x, x, readers, 0.3, book, part) for part, x in parts.items()}
    outputs[last].sum().backward()
    # the first slice has not run backward yet, so it may be recomputed
    slice_attention(*[parts[first]] * 3, readers, 0.3, book, first)
    with pytest.raises(RuntimeError, match=r"tokens \[5, 8\) of sequence 0 ran forward after its own backward"):
        slice_attention(*[parts[last]] * 3, readers, 0.3, book, last)


def test_the_book_takes_the_bytes_that_its_docstring_says() -> None:
    lengths, chunks, words, _ = PACKINGS["a hybrid: the tail and whole sequences"]
    plan, rows = sliced_plan(lengths, chunks, words), random_rows(lengths)
    for dtype, element_bytes, gradient_bytes in ((torch.float64, 8, 8), (torch.float32, 4, 4), (torch.bfloat16, 2, 4)):
        result, _ = lone_step(ModelCase(dtype=dtype), plan, rows)
        # 30 tokens in slices, gradients of the 23 tokens before the last slice; whole sequences are not in the K/V book
        assert result.memory.kv_book == NUM_LAYERS * 2 * NUM_KV * HEAD_DIM * (30 * element_bytes + 23 * gradient_bytes)


def test_a_sequence_that_was_closed_between_passes_counts_no_more() -> None:
    book, kv = KVBook(), torch.zeros(2, 6, 4)
    book.write("layer", Slice(0, 0, 0, 6, 12), kv, kv)
    assert book.take_peak() == book.num_bytes > 0
    # layers below the first trainable weight never run backward, so the round closes the sequence
    book.close(0)
    assert book.take_peak() == book.num_bytes == 0


def test_a_plan_without_slices_leaves_the_book_alone() -> None:
    assert check_lone_step(ModelCase(), sliced_plan([9, 5], [[(0, 0, 9)], [(1, 0, 5)]]), random_rows([9, 5])).memory.kv_book == 0


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_the_book_is_empty_when_the_first_slice_is_through(use_reentrant: bool | None) -> None:
    held: list[int] = []
    original = KVBook.close

    def close(book: KVBook, sequence: int) -> None:
        held.append(book.num_bytes)
        original(book, sequence)

    with patch.object(KVBook, "close", close):
        lone_step(ModelCase(), sliced_plan([30], THREE), random_rows([30]), patched_model(ModelCase(), use_reentrant))
    # attention's own backward has freed all layers before the executor closes the sequence
    assert held == [0]


def test_frozen_layers_free_their_part_of_the_book() -> None:
    rows, plan = random_rows([30]), sliced_plan([30], THREE)
    models = [patched_model(ModelCase()), build_model(ModelCase())]
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1.mlp" in name or "lm_head" in name)
    result, gradients = lone_step(ModelCase(), plan, rows, models[0])
    assert worst_error((float(result.loss), gradients), reference_step(models[1], rows)) <= TOLERANCE
    # no layer's attention ran backward
    assert result.memory.kv_book == NUM_LAYERS * 2 * NUM_KV * HEAD_DIM * 30 * 8


def test_evaluation_matches_and_holds_no_gradients() -> None:
    rows, plan = random_rows([30]), sliced_plan([30], THREE)
    peaks: list[int] = []
    original = KVBook.take_peak

    def take_peak(book: KVBook) -> int:
        peaks.append(original(book))
        return peaks[-1]

    executor = StepExecutor(whole_model(patched_model(ModelCase()), NUM_LAYERS), GroupPool((1,), 1.0), CPU)
    with patch.object(KVBook, "take_peak", take_peak):
        total = executor.evaluate(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"])
    mean, _ = reference_step(build_model(ModelCase()), rows)
    num_labels = sum(label != -100 for label in rows[0]["labels"][1:])
    assert float(total) == pytest.approx(mean * num_labels, rel=TOLERANCE)
    assert max(peaks) == NUM_LAYERS * 2 * NUM_KV * HEAD_DIM * 30 * 8


def test_slices_keep_no_more_for_backward_than_one_chunk() -> None:
    def kept_bytes(num_slices: int) -> int:
        """Bytes that autograd keeps, and bytes in the K/V book, after all forwards."""
        model = patched_model(ModelCase())
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        plan = sliced_plan([96], [[span] for span in cut(0, [96 // num_slices] * num_slices)])
        executor = StepExecutor(whole_model(model, NUM_LAYERS), GroupPool((1,), 1.0), CPU)
        inputs = rank_inputs(plan, random_rows([96]), 0)["chunks"]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            executor.run(plan.for_rank(0), inputs, 90)
        in_book = NUM_LAYERS * 2 * NUM_KV * HEAD_DIM * 96 * 8 if num_slices > 1 else 0
        return sum(kept.values()) + in_book

    # the front is not copied, keys and values are stored once; each cut costs a few scalars
    whole = kept_bytes(1)
    assert all(kept_bytes(num_slices) <= 1.01 * whole for num_slices in (2, 4, 16))


@pytest.mark.wide
@pytest.mark.parametrize("num_kv", [1, 2, 4])
def test_gradients_of_half_precision_add_up_in_fp32(num_kv: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [1] * 512
    q, gradient = (torch.randn(4, 512, 8, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(num_kv, 512, 8, generator=generator).bfloat16() for _ in range(2))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expanded = (x.repeat_interleave(4 // num_kv, 0) for x in wide[1:])
    F.scaled_dot_product_attention(wide[0], *expanded, is_causal=True, scale=0.3).backward(gradient.double())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    book, readers = KVBook(), lone_readers(4, num_kv)
    outputs = [
        slice_attention(*(x[:, part.start : part.stop] for x in leaves), readers, 0.3, book, part) for part in lone_slices(sizes)
    ]
    for part, output in reversed(list(zip(lone_slices(sizes), outputs, strict=True))):
        output.backward(gradient[:, part.start : part.stop].transpose(0, 1), inputs=leaves)
    # errors are those of one slice of 512 tokens; summing in bf16 would leave 1.2 to 1.8 % in the gradient of k
    errors = [relative_error(leaf.grad.double(), exact.grad) for leaf, exact in zip(leaves, wide, strict=True)]
    assert max(errors) <= 2**-7, errors
