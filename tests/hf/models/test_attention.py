"""With no plan active the patched model is bit for bit the old one; with a plan nothing is ignored in silence."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import FAMILIES, ModelCase, build_model
from helpers.trainers.trainer_runs import LossRecorder, make_trainer, plain_training, problems_at_start
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_longctx.hf.models.attention import attention_problems, longctx_attention
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import Chunk, SequenceGroup, Span
from hf_longctx.runtime.process_groups import GroupPool

LONE_CONTEXT = GroupPool((1,), timeout_s=1.0).context(SequenceGroup((0,), "local", (), ()), Chunk(0, (Span(0, 0, 5),)))


def padded_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(1, 64, (3, 11), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    # left padding, as generation wants it
    for row, padding in enumerate((0, 4, 7)):
        attention_mask[row, :padding] = 0
        input_ids[row, :padding] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral_window", "gemma3"])
def test_generate_and_padded_evaluation_are_bit_equal_without_a_plan(family: str, attention: str) -> None:
    case = ModelCase(family, dtype=torch.float32, attention=attention)
    plain, patched = build_model(case).eval(), build_model(case).eval()
    patch_model(patched)
    batch = padded_batch()
    with torch.no_grad():
        assert torch.equal(plain(**batch).logits, patched(**batch).logits)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_scores": True}
        expected = plain.generate(**batch, **options, return_dict_in_generate=True)
        found = patched.generate(**batch, **options, return_dict_in_generate=True)
    assert torch.equal(expected.sequences, found.sequences)
    assert all(torch.equal(a, b) for a, b in zip(expected.scores, found.scores, strict=True))


@pytest.mark.quick
def test_training_loss_and_gradients_are_bit_equal_without_a_plan() -> None:
    case = ModelCase(dtype=torch.float32)
    plain, patched = build_model(case), build_model(case)
    patch_model(patched)
    batch = padded_batch()
    for model in (plain, patched):
        model(**batch, labels=batch["input_ids"]).loss.backward()
    for expected, found in zip(plain.parameters(), patched.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_patching_twice_changes_nothing() -> None:
    model = build_model(ModelCase())
    patch_model(model)
    name = model.config._attn_implementation
    patch_model(model)
    assert model.config._attn_implementation == name == "longctx"


def test_the_name_does_not_reach_the_checkpoint(tmp_path) -> None:
    model = build_model(ModelCase())
    patch_model(model)
    model.save_pretrained(tmp_path)
    assert "longctx" not in (tmp_path / "config.json").read_text()


CHOSEN = ("flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community/flash-attn2", "paged|sdpa")


@pytest.mark.daily("llama-flash_attention_3-sdpa", "llama-kernels-community/flash-attn2-sdpa")
@pytest.mark.parametrize(
    ("family", "name", "outside"), [*(("llama", name, "sdpa") for name in CHOSEN), ("gemma2", CHOSEN[0], "eager")]
)
def test_a_chosen_implementation_is_replaced_while_plans_run_and_then_restored(
    tmp_path, caplog, family: str, name: str, outside: str
) -> None:
    case = ModelCase(family, promoted=True, attention=outside)
    rows = random_rows([61, 13, 5, 8, 21, 34, 3, 9] * 2)
    expected, _ = plain_training(case, rows, 2)
    model = build_model(case)
    # set here, since transformers loads such a model only where its kernel can run
    model.config._attn_implementation = name
    with caplog.at_level("WARNING"):
        trainer = make_trainer(case, rows, str(tmp_path), {"self_test": True}, {"max_steps": 2}, model=model)
    line = f"attn_implementation={name!r}: plans run their own attention in its place, which is exact"
    assert sum(line in record.message and repr(outside) in record.message for record in caplog.records) == 1
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train()
    assert recorder.losses == pytest.approx(expected, rel=1e-10)
    ids = padded_batch()
    with torch.no_grad():
        plain = build_model(case).eval()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model.eval()(**ids).logits, plain(**ids).logits)
    trainer.longctx_run.close()
    assert {each.config._attn_implementation for each in (model, model.model)} == {name}


def doubled(module: Any, *args: Any, **keywords: Any) -> Any:
    """Attention of a user's own, whose results are not those of attention."""
    output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **keywords)
    return 2 * output, weights


@pytest.mark.parametrize("kind", ["own name", "known name", "eager", "kernel", "unknown"])
def test_attention_functions_of_others_are_refused_by_name(kind: str, monkeypatch) -> None:
    name = {"own name": "doubled", "known name": "flex_attention", "eager": "eager", "kernel": "some/kernel"}.get(kind, "unknown")
    model = build_model(ModelCase())
    if kind in ("own name", "known name"):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, doubled)
    elif kind == "eager":
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    model.config._attn_implementation = name
    why = {"kernel": "is a kernel of others", "unknown": "is not registered with transformers"}
    for words in (
        f"attention implementation {name!r} {why.get(kind, 'is a function of your own (doubled)')}",
        "load the model with attn_implementation='sdpa'",
    ):
        assert words in problems_at_start(model)[0]
        with pytest.raises(ValueError, match=re.escape(words)):
            patch_model(model)


def test_a_class_of_a_module_that_is_gone_has_the_attention_of_its_base() -> None:
    model = build_model(ModelCase())
    model.config._attn_implementation = "eager"
    model.__class__ = type("Mine", (type(model),), {"__module__": "gone"})
    assert attention_problems(model) == []


@pytest.mark.quick
@pytest.mark.parametrize("keyword", ["position_bias", "indices"])
def test_unknown_semantics_are_refused_by_name(keyword: str) -> None:
    heads = torch.zeros(1, 2, 5, 4)
    known = r"windows \(sliding_window\), chunks \(.*\), sinks \(s_aux\) and caps of scores \(softcap\) are supported"
    with pytest.raises(ValueError, match=f"Linear passes {keyword}=4 .* use a model without it\\. .*{known}"):
        longctx_attention(torch.nn.Linear(1, 1), heads, heads, heads, None, longctx=LONE_CONTEXT, **{keyword: 4})


@pytest.mark.parametrize("keywords", [{"softcap": -4.0}, {"softcap": 4.0, "s_aux": torch.zeros(2)}], ids=["negative", "sinks"])
def test_a_softcap_that_no_tested_model_has_is_refused(keywords: dict[str, Any]) -> None:
    heads = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match="a cap must be positive, and is not supported together with sinks"):
        longctx_attention(torch.nn.Linear(1, 1), heads, heads, heads, None, longctx=LONE_CONTEXT, **keywords)


def test_a_window_reaches_the_attention() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind()
    output, _ = longctx_attention(torch.nn.Linear(1, 1), query, key, value, None, longctx=LONE_CONTEXT, sliding_window=1)
    # a token that sees itself only has its own value
    assert torch.equal(output, value.transpose(1, 2))


def test_attention_that_is_not_causal_is_refused() -> None:
    heads = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match="is_causal=False"):
        longctx_attention(torch.nn.Linear(1, 1), heads, heads, heads, None, longctx=LONE_CONTEXT, is_causal=False)


def test_dropout_that_the_config_did_not_announce_is_refused() -> None:
    heads = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"Linear drops attention weights at a rate of 0\.1, but its config did not say so"):
        longctx_attention(torch.nn.Linear(1, 1), heads, heads, heads, None, dropout=0.1, longctx=LONE_CONTEXT)


def test_keywords_without_meaning_pass() -> None:
    heads = torch.randn(1, 2, 5, 4)
    output, weights = longctx_attention(
        torch.nn.Linear(1, 1), heads, heads, heads, None, longctx=LONE_CONTEXT, sliding_window=None, use_cache=False
    )
    assert output.shape == (1, 5, 2, 4) and weights is None
