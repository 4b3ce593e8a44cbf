"""Compressed and pooled keys in documents, over ranks and slices, equal those of transformers on one document at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.measures.class_sweep import LENGTHS, SLICES, WHOLE, lone_step, patched, recomputed_step, rows, self_tested, worst
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import TOLERANCE, reference_step
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_steps import group_pool, rank_inputs
from predicted.test_saved_bytes import saved_bytes
from torch import Tensor

from hf_longctx import LongContextConfig
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.cutting import stage_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.hf.rules.arguments import setup_problems
from hf_longctx.hf.self_test.reduced_copy import ChosenLayers, reduced_copy
from hf_longctx.plan.core.types import Chunk, SequenceGroup, Span
from hf_longctx.runtime.attention.kv_book import KVBook
from hf_longctx.runtime.core.loss import IGNORE_INDEX
from hf_longctx.runtime.execution.executor import StepExecutor, no_mask
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.states import chosen_keys, compressed_keys

NAME = "DeepseekV4ForCausalLM"
CASES: dict[str, dict[str, Any]] = {
    "as in the sweep": {},
    "ties": {},
    "one token each": {"compress_rates": {"compressed_sparse_attention": 1, "heavily_compressed_attention": 1}},
    "blocks longer than most documents": {
        "compress_rates": {"compressed_sparse_attention": 11, "heavily_compressed_attention": 18}
    },
    "all entries chosen": {"index_topk": 64},
    # hashes of the last tokens, a convolution that skips tokens, an index of pooled keys
    "pooled": {"name": "Qwen4ExpForCausalLM"},
    "long n-grams": {
        "name": "Qwen4ExpForCausalLM",
        "ngram_size": 4,
        "ple_embed_dim": 48,
        "indexer_compress_ratio": 3,
        "indexer_budget": 6,
    },
}
# slices of one token, slices that end inside of blocks, and a rest without any whole block
MANY = [*([span] for span in cut(0, (4, 1, 6, 2, 8))), [(0, 21, 30), (1, 0, 7), (3, 0, 1)], [(2, 0, 3)], [(2, 3, 17)]]


def build(case: str) -> Any:
    model = build_any(**{"name": NAME, **CASES[case]})
    if case == "ties":
        # all scores are zero, so that the order of the entries alone decides
        model.model.layers[1].self_attn.compressor.indexer.scorer.weights_proj.weight.data.zero_()
    return model


def expected_step(case: str) -> tuple[float, dict[str, Tensor]]:
    with wide_floats():
        return reference_step(build(case), rows())


@pytest.mark.daily("long n-grams")
@pytest.mark.parametrize("case", CASES)
def test_documents_attend_to_the_entries_of_plain_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # several blocks of rows for each document
    monkeypatch.setattr(compressed_keys, "BLOCK_SCORES", 700)
    monkeypatch.setattr(chosen_keys, "BLOCK_SCORES", 200)
    expected = expected_step(case)
    with wide_floats():
        for chunks in (WHOLE, SLICES, MANY):
            assert worst(lone_step(patched(build(case)), sliced_plan(LENGTHS, chunks)), expected) <= TOLERANCE


def test_a_replay_attends_to_the_same_entries() -> None:
    expected = expected_step("ties")
    with wide_floats():
        assert worst(recomputed_step(patched(build("ties"))), expected) <= TOLERANCE


def error_on_ranks(case: str, chunks: Any, ulysses: int, loss: float, gradients: dict[str, Any]) -> float:
    pool = group_pool()
    plan = sliced_plan(LENGTHS, chunks, num_ranks=torch.distributed.get_world_size(), ulysses=ulysses)
    with wide_floats():
        model = patched(build(case))
        executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, torch.device("cpu"))
        num_labels = sum(label != IGNORE_INDEX for row in rows() for label in row["labels"][1:])
        result = executor.run(plan.for_rank(pool.rank), rank_inputs(plan, rows(), pool.rank)["chunks"], num_labels)
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return worst((float(result.loss), found), (loss, {key: torch.from_numpy(each) for key, each in gradients.items()}))


@pytest.mark.wide
@pytest.mark.parametrize("num_ranks,ulysses", [(2, 0), (3, 1), (4, 2)])
def test_ranks_of_a_group_attend_to_entries_of_all_slices(ranks, num_ranks: int, ulysses: int) -> None:
    for case in ("as in the sweep", "blocks longer than most documents", "pooled"):
        loss, gradients = expected_step(case)
        arrays = {key: gradient.numpy() for key, gradient in gradients.items()}
        for chunks in (SLICES, MANY):
            assert max(ranks(num_ranks).run(error_on_ranks, case, chunks, ulysses, loss, arrays)) <= TOLERANCE


def test_a_model_without_a_plan_is_bit_equal() -> None:
    plain, ours = (build_any(NAME).float() for _ in range(2))
    patch_model(ours)
    input_ids = torch.arange(24).view(2, 12) % 16 + 1
    for model in (plain, ours):
        model(input_ids=input_ids, labels=input_ids).loss.backward()
    assert all(
        (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True)
    )
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(plain.eval().generate(input_ids, **options), ours.eval().generate(input_ids, **options))
    restore_attention(ours, "eager")
    assert not [module for module in ours.modules() if "forward" in vars(module)]


@pytest.mark.wide
@pytest.mark.parametrize("name", [NAME, "Qwen4ExpForCausalLM"])
def test_nothing_quadratic_in_a_document_is_kept_until_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_keys, "BLOCK_SCORES", 2**14)
    monkeypatch.setattr(chosen_keys, "BLOCK_SCORES", 2**14)
    model = build_any(name)
    patch_model(model)
    kept = []
    for num_tokens in (512, 1024, 2048):
        chunk = Chunk(0, (Span(0, 0, num_tokens),))
        context = GroupPool((1,), timeout_s=1.0).context(SequenceGroup((0,), "local", (chunk,), ()), chunk, KVBook())
        ids = torch.arange(num_tokens).view(1, -1) % 16 + 1
        keywords = {"position_ids": torch.arange(num_tokens).view(1, -1), "use_cache": False, "longctx": context}
        forward = partial(model.model, ids, no_mask(torch.device("cpu")), **keywords)
        kept.append(saved_bytes(model, forward)[0])
    # twice the tokens add twice the bytes
    assert kept[2] - kept[1] == pytest.approx(2 * (kept[1] - kept[0]), rel=0.002)


def test_what_plans_would_leave_out_is_refused_by_name() -> None:
    def problems(model: Any, **settings: Any) -> list[str]:
        return setup_problems(ModelFacts.of(model), None, LongContextConfig(**settings), 2, (1, 2))

    model = build_any(NAME)
    assert problems(model) == []
    compressor = model.model.layers[1].self_attn.compressor
    handle = compressor.kv_proj.register_forward_hook(lambda *_: None)
    assert "model.layers.1.self_attn.compressor (DeepseekV4CSACompressor) or a module inside it has a hook" in "".join(
        problems(model)
    )
    handle.remove()
    compressor.forward = compressor.forward
    with pytest.raises(ValueError, match="was replaced"):
        patch_model(model)
    assert "attention_dropout is 0.1; set it to 0.0" in "".join(problems(build_any(NAME, attention_dropout=0.1)))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    main = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    scaled = build_any(NAME, rope_parameters={"main": main, "compress": rope})
    assert "rope type 'dynamic' depends on the length of a document" in "".join(problems(scaled))
    assert stage_problems(build_any(NAME))[0].startswith("DeepseekV4ForCausalLM cannot be cut into pipeline stages")


@pytest.mark.wide
def test_the_copy_of_the_self_test_chooses_fewer_entries_than_its_documents_have() -> None:
    model = build_any(NAME, index_topk=512)
    copied = reduced_copy(ChosenLayers.of(model, (0,)), 40, torch.float64)
    assert copied.layers[1].self_attn.compressor.indexer.index_topk == 10 and copied.was_shortened
    assert self_tested(patched(model)).startswith("self-test passed")
