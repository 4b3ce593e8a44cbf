"""Models that change their logits after the head: the loss in tiles makes the same change, or the model keeps whole logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from helpers.models.any_model import VOCAB_SIZE, build_any, wide_floats
from helpers.models.reference import TOLERANCE, relative_error
from helpers.models.tiny_models import ModelCase, adapted
from helpers.models.token_losses import TOKEN_LOSSES
from torch import Tensor, nn

from hf_longctx.hf.models import logits as logits_module
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.cutting import cut_model
from hf_longctx.hf.models.layers import final_norm, output_head
from hf_longctx.hf.models.logits import head_problem, logit_change
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.types import LayerRange
from hf_longctx.runtime.activations.output_head import LogitChange, OutputHead, loss_of
from hf_longctx.runtime.core.loss import IGNORE_INDEX, Scoring, Targets, TokenTally, label_logits, summed_loss, token_scores

CAP, WIDE_CAP = "div 2.0, tanh, mul 2.0", "cast float32, div 2.0, tanh, mul 2.0"
# model class -> what it does to its logits
CHANGES = {
    "BeamForCausalLM": WIDE_CAP,
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM"), "mul 0.4"),
    "CohereCompassForCausalLM": "mul 0.0625",
    "FalconH1ForCausalLM": "mul 0.7",
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM"), CAP),
    **dict.fromkeys(("GraniteForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeForCausalLM"), "div 3.0"),
    **dict.fromkeys(("GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM"), "div 3.0"),
    "HyperCLOVAXForCausalLM": "mul 3.0",
    **dict.fromkeys(("NanoChatForCausalLM", "RecurrentGemmaForCausalLM", "VaultGemmaForCausalLM"), CAP),
    "xLSTMForCausalLM": WIDE_CAP,
    # have such a setting in the config of their text model, and do not obey it
    **dict.fromkeys(("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration"), "no change"),
    "Gemma3ForConditionalGeneration": "no change",
    # obeys the setting of its text model
    "Gemma4ForConditionalGeneration": CAP,
    "LlamaForCausalLM": "no change",
}
# one class for each kind of change
KINDS = ("CohereForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM", "HyperCLOVAXForCausalLM", "xLSTMForCausalLM")
NUM_TOKENS = 19


@functools.cache
def tokens() -> tuple[Tensor, Tensor]:
    """Token ids and next-token labels, each [1, T]; some tokens have no label."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(1, VOCAB_SIZE, (2, 1, NUM_TOKENS), generator=generator)
    return ids, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, IGNORE_INDEX)


def logits_of(model: nn.Module) -> Tensor:
    return model(input_ids=tokens()[0], use_cache=False).logits


def step(model: nn.Module, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients of 0.37 * loss, which are cleared."""
    (loss * 0.37).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


@contextmanager
def bound_head(model: nn.Module, change: LogitChange | None = None) -> Iterator[OutputHead]:
    head = OutputHead(output_head(model), final_norm(model), logit_change(model) if change is None else change)
    yield head
    head.unbind()


def tiled(model: nn.Module, targets: Targets, tile_tokens: int = 5, keeps: bool = True) -> tuple[float, dict[str, Tensor]]:
    with bound_head(model) as head:
        with head.summing(targets, tile_tokens, keeps):
            returned = logits_of(model)
        return step(model, loss_of(returned))


def check_equal(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert found[1].keys() == expected[1].keys()
    assert max(relative_error(found[1][name], gradient) for name, gradient in expected[1].items()) <= TOLERANCE


@pytest.mark.parametrize("name", CHANGES)
def test_the_code_of_a_class_says_what_it_does(name: str) -> None:
    with torch.device("meta"):
        model = build_any(name, is_random=False)
    before = {key: id(value) for key, value in vars(model).items()}
    assert str(logit_change(model)) == CHANGES[name] and head_problem(model) == ""
    assert {key: id(value) for key, value in vars(model).items()} == before
    assert not any("forward" in vars(module) for module in model.modules())
    wide = 4 if "float32" in CHANGES[name] else 2
    assert model_spec(model.bfloat16()).capped_bytes == (wide if "tanh" in CHANGES[name] else 0)


@pytest.mark.wide(
    "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration",
    "BeamForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma4ForCausalLM",
    "RecurrentGemmaForCausalLM",
    "xLSTMForCausalLM",
)
@pytest.mark.parametrize("name", [name for name, change in CHANGES.items() if change != "no change"])
def test_losses_gradients_and_scores_are_those_of_the_logits(name: str) -> None:
    labels = tokens()[1]
    with wide_floats():
        model = build_any(name)
        model.requires_grad_(True)
        expected = step(model, summed_loss(logits_of(model), Targets(labels)))
        for tile_tokens, keeps in ((0, True), (1, False), (7, True), (100, False)):
            check_equal(tiled(model, Targets(labels), tile_tokens, keeps), expected)
        check_scores(model)
    # the model makes its own change again
    assert logits_of(model).shape == (1, NUM_TOKENS, VOCAB_SIZE)


def check_scores(model: nn.Module) -> None:
    labels, scoring = tokens()[1], Scoring(0.8, with_extras=True)
    with torch.no_grad():
        logits = logits_of(model)
        with bound_head(model) as head:
            with head.scoring(labels, 5, scoring) as scores:
                logits_of(model)
            with head.reading(labels, 5) as read:
                logits_of(model)
    wanted, is_label = token_scores(logits, labels, scoring), labels[0] != IGNORE_INDEX
    for key in ("losses_T", "likeliest_T", "is_right_T", "entropies_T", "extras_2T"):
        found = [getattr(each, key).double()[..., is_label] for each in (scores[0], wanted)]
        assert relative_error(*found) <= TOLERANCE, key
    assert relative_error(read[0], label_logits(logits, labels)) <= TOLERANCE


@pytest.mark.parametrize("loss", ["", "focal", "smoothed"])
@pytest.mark.parametrize("name", KINDS)
def test_weights_other_losses_and_counts_are_those_of_the_logits(name: str, loss: str) -> None:
    labels = tokens()[1]
    weights = torch.rand(1, NUM_TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tallies = [TokenTally(torch.device("cpu")) for _ in range(2)]
    with wide_floats():
        model = build_any(name)
        expected = step(model, summed_loss(logits_of(model), Targets(labels, weights, TOKEN_LOSSES[loss], tallies[0])))
        check_equal(tiled(model, Targets(labels, weights, TOKEN_LOSSES[loss], tallies[1])), expected)
    torch.testing.assert_close(tallies[1].sums_3, tallies[0].sums_3, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["frozen head", "adapters on the head"])
@pytest.mark.parametrize("name", ["CohereForCausalLM", "Gemma2ForCausalLM"])
def test_adapters_train_the_changed_logits(name: str, targets: list[str]) -> None:
    model = adapted(build_any(name), r=2, target_modules=targets).train()
    expected = step(model, summed_loss(logits_of(model), Targets(tokens()[1])))
    check_equal(tiled(model, Targets(tokens()[1])), expected)


HALF: dict[str, tuple[torch.dtype, Callable[[], Any]]] = {
    "bf16": (torch.bfloat16, nullcontext),
    "autocast": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
}


# xLSTM's own code does not run with weights in bf16 on the CPU
@pytest.mark.parametrize(
    "name,half", [(name, half) for name in (*KINDS, "BeamForCausalLM") for half in HALF if (name[:5], half) != ("xLSTM", "bf16")]
)
def test_half_precision_rounds_as_the_class_does(name: str, half: str) -> None:
    (dtype, context), labels = HALF[half], tokens()[1]
    model = build_any(name).to(dtype)
    with context():
        logits = logits_of(model)
        # one tile and whole logits are the same numbers
        losses = [float(summed_loss(logits.detach(), Targets(labels)))]
        expected = step(model, summed_loss(logits, Targets(labels)))
        with bound_head(model) as head, head.reading(labels, 0) as read, torch.no_grad():
            logits_of(model)
        found = [tiled(model, Targets(labels), tile_tokens) for tile_tokens in (0, 5)]
    assert torch.equal(read[0], label_logits(logits.detach(), labels))
    for loss, gradients in found:
        # fp32 sums of 19 tokens in another order
        assert loss == pytest.approx(losses[0], rel=1e-6)
        weight = next(key for key in gradients if "lm_head" in key or "embed" in key)
        # the head's gradients are summed in fp32 here, and in bf16 there
        assert relative_error(gradients[weight].double(), expected[1][weight].double()) <= 2e-2


def test_a_cap_in_another_dtype_would_show() -> None:
    model, labels = build_any("Gemma2ForCausalLM").bfloat16(), tokens()[1]
    wrong = LogitChange((("cast", torch.float32), *logit_change(model).steps))
    with torch.no_grad(), bound_head(model, wrong) as head:
        whole = label_logits(model(input_ids=tokens()[0]).logits, labels)
        message = r"by \(div 2.0, tanh, mul 2.0\), but the loss in tiles was computed from logits changed by \(cast float32, div"
        with pytest.raises(ValueError, match=message), head.reading(labels, 5) as read:
            logits_of(model)
    assert not torch.equal(read[0], whole)


WRONG: dict[str, LogitChange] = {
    "none": LogitChange(),
    "another number": LogitChange((("div", 2.0), ("tanh", None), ("mul", 2.5))),
    "another order": LogitChange((("tanh", None), ("div", 2.0), ("mul", 2.0))),
    "no cap": LogitChange((("div", 2.0), ("mul", 2.0))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_tiles_that_make_another_change_than_the_model_are_noticed(wrong: str) -> None:
    model, labels = build_any("Gemma2ForCausalLM"), tokens()[1]
    whole = float(summed_loss(logits_of(model), Targets(labels)).detach())
    with bound_head(model, WRONG[wrong]) as head:
        message = r"changed its logits after the output head by|changes its logits after the output head \(MulBackward0\)"
        with pytest.raises(ValueError, match=message):
            with head.summing(Targets(labels), 5, True):
                returned = logits_of(model)
            loss_of(returned)
        with head.scoring(labels, 5, Scoring()) if wrong == "none" else nullcontext([]) as scores, torch.no_grad():
            logits_of(model)
    if scores:
        assert float(scores[0].losses_T.sum()) != pytest.approx(whole, rel=1e-3)


def doubled(model: Any) -> None:
    model.config.logits_scaling *= 2


def wrapped(model: Any) -> None:
    before = model.forward

    def forward(*args: Any, **keywords: Any) -> Any:
        output = before(*args, **keywords)
        output.logits = output.logits * 1.5
        return output

    model.forward = forward


@pytest.mark.parametrize("change", [doubled, wrapped])
@pytest.mark.parametrize("way", ["summing", "scoring", "reading"])
def test_a_model_that_changes_during_the_run_is_noticed(way: str, change: Callable[[Any], None]) -> None:
    model, labels = build_any("GraniteForCausalLM"), tokens()[1]
    with bound_head(model) as head:
        change(model)
        contexts = {
            "summing": lambda: head.summing(Targets(labels), 5),
            "scoring": lambda: head.scoring(labels, 5, Scoring()),
            "reading": lambda: head.reading(labels, 5),
        }
        message = r"but the loss in tiles was computed from logits changed by \(div 3.0\)"
        with pytest.raises(ValueError, match=message), contexts[way](), torch.no_grad():
            logits_of(model)


def with_bias(logits: Tensor, model: Any) -> Tensor:
    return logits / 3.0 + model.bias_V


def learned(logits: Tensor, model: Any) -> Tensor:
    return logits * model.bias_V[0]


def in_place(logits: Tensor, model: Any) -> Tensor:
    logits /= 3.0
    return logits.mul_(0.5)


UNKNOWN: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a bias": with_bias,
    "a learned scale": learned,
    "fewer columns": lambda logits, model: logits[..., :40],
    "fewer columns of many": lambda logits, model: logits[..., :40] if logits.shape[-1] > 40 else logits,
    "a sorted copy": lambda logits, model: logits.sort(dim=-1).values,
    "the scale of the largest": lambda logits, model: logits / logits.abs().amax(),
    "a scale by size": lambda logits, model: logits * 2 if logits.shape[1] > 1 else logits,
    "a scale in training": lambda logits, model: logits * 2 if model.training else logits,
    "a sign": lambda logits, model: -logits,
    "a reciprocal": lambda logits, model: 3.0 / logits,
    "half precision": lambda logits, model: logits.bfloat16(),
    "no logits": lambda logits, model: None,
    "other logits": lambda logits, model: torch.zeros(1, 1, 1),
    "an error": lambda logits, model: logits.nothing,
}
KNOWN: dict[str, tuple[Callable[[Tensor, Any], Tensor], str]] = {
    "in place": (in_place, "div 3.0, mul 0.5"),
    "functions": (lambda logits, model: torch.mul(2, nn.functional.tanh(torch.div(logits, 3))), "div 3, tanh, mul 2"),
    "casts": (lambda logits, model: logits.to(dtype=torch.float32).double() * 2, "cast float32, cast float64, mul 2"),
}


def granite_with(change: Callable[[Tensor, Any], Tensor]) -> Any:
    class OtherGranite(transformers.GraniteForCausalLM):
        bias_V = torch.linspace(1, 2, VOCAB_SIZE, dtype=torch.float64)

        def forward(self, *args: Any, **keywords: Any) -> Any:
            hidden = self.model(*args, **keywords).last_hidden_state
            logits = change(self.lm_head(hidden), self)
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    return OtherGranite(build_any("GraniteForCausalLM", is_random=False).config).double()


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_change_keeps_whole_logits(name: str) -> None:
    model = granite_with(UNKNOWN[name])
    problem = "OtherGranite changes its logits after the head (logits_scaling=3.0) by more than a known scale or cap"
    assert head_problem(model) == activation_problem(model) == problem
    with pytest.raises(ValueError, match="by more than a known scale or cap"):
        logit_change(model)


@pytest.mark.parametrize("name", KNOWN)
def test_a_change_written_in_another_way_is_the_same(name: str) -> None:
    change, words = KNOWN[name]
    model, labels = granite_with(change), tokens()[1]
    assert str(logit_change(model)) == words
    with wide_floats():
        check_equal(tiled(model, Targets(labels)), step(model, summed_loss(logits_of(model), Targets(labels))))


def test_operations_that_no_probe_has_seen_are_refused_when_they_happen() -> None:
    model, labels = granite_with(lambda logits, model: logits / 3.0), tokens()[1]
    with bound_head(model) as head:
        type(model).forward = granite_with(with_bias).__class__.forward
        message = "changes its logits after the output head by 'add', which a loss in tiles cannot follow"
        with pytest.raises(ValueError, match=message), head.summing(Targets(labels), 5):
            logits_of(model)
    assert head._order is None


def test_a_hook_may_look_at_what_the_head_returns() -> None:
    model, seen = build_any("Gemma2ForCausalLM"), list[float]()
    expected = tiled(model, Targets(tokens()[1]))
    output_head(model).register_forward_hook(lambda module, args, output: seen.append(float(output.detach().abs().max())))
    check_equal(tiled(model, Targets(tokens()[1])), expected)
    # the loss, as in models that leave their logits as they are
    assert seen == [pytest.approx(expected[0])]


class Counting(transformers.Gemma2ForCausalLM):
    """Counts its forwards, and draws random numbers in them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.counts = {"forwards": 0}
        self.register_buffer("drawn", torch.zeros(1))

    def forward(self, *args: Any, **keywords: Any) -> Any:
        self.counts["forwards"] += 1
        self.drawn += torch.rand(1)
        return super().forward(*args, **keywords)


def test_the_probe_leaves_the_model_and_random_numbers_alone() -> None:
    model = Counting(build_any("Gemma2ForCausalLM", is_random=False).config)
    before = torch.get_rng_state()
    logit_change(model)
    assert torch.equal(torch.get_rng_state(), before) and model.counts == {"forwards": 0} and not model.drawn.any()


def test_a_wrong_probe_is_caught_by_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_any("Gemma2ForCausalLM", is_random=False)
    monkeypatch.setattr(
        logits_module, "_followed", lambda inner, mode: LogitChange((("mul", 1 / 2), ("tanh", None), ("mul", 2.0)))
    )
    assert head_problem(model) == ""
    # a power of two is exact either way, a third is not
    model.config.final_logit_softcapping = 3.0
    monkeypatch.setattr(
        logits_module, "_followed", lambda inner, mode: LogitChange((("mul", 1 / 3), ("tanh", None), ("mul", 3.0)))
    )
    assert "by more than a known scale or cap" in head_problem(model)


def test_every_stage_of_a_cut_model_knows_the_change() -> None:
    ranges = tuple((LayerRange(stage, 1),) for stage in range(2))
    for name in ("Gemma2ForCausalLM", "xLSTMForCausalLM", "FalconH1ForCausalLM"):
        for stage in range(2):
            model = build_any(name)
            cut_model(model, ranges, stage)
            assert str(logit_change(model)) == CHANGES[name]


def test_tiles_of_capped_logits_are_all_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, labels = build_any("Gemma2ForCausalLM"), tokens()[1]
    sizes: list[int] = []
    original = LogitChange.__call__

    def seen(change: LogitChange, logits: Tensor) -> Tensor:
        sizes.append(logits.shape[1])
        return original(change, logits)

    monkeypatch.setattr(LogitChange, "__call__", seen)
    with bound_head(model) as head:
        sizes.clear()
        with head.summing(Targets(labels), 5, True):
            loss_of(logits_of(model)).backward()
    assert max(sizes) == 5 and sum(sizes) <= NUM_TOKENS


def test_families_of_other_tests_change_their_logits() -> None:
    # so that tests of groups, shards and stages with these families cover the change
    from helpers.models.tiny_models import build_model

    found = {family: str(logit_change(build_model(ModelCase(family)))) for family in ("granite", "gemma2", "cohere2")}
    assert found == {"granite": "div 2.0", "gemma2": "div 3.0, tanh, mul 3.0", "cohere2": "mul 0.5"}


def test_hidden_ids_are_copied_to_the_device_once_and_may_be_copied_by_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    change = LogitChange((("hide", (1, 3)),))
    copies: list[object] = []
    copy = torch.tensor

    def noting(*args: Any, **keywords: Any) -> Tensor:
        copies.append(args)
        return copy(*args, **keywords)

    monkeypatch.setattr(torch, "tensor", noting)
    with torch.inference_mode():
        change(torch.zeros(1, 2, 5))
    logits = torch.zeros(1, 2, 5, requires_grad=True)
    for _ in range(3):
        change(logits).sum().backward()
    assert len(copies) == 1
    assert logits.grad is not None
    assert logits.grad[0, 0].tolist() == [3, 0, 3, 0, 3]
    assert change == LogitChange((("hide", (1, 3)),))
    assert hash(change) == hash(LogitChange((("hide", (1, 3)),)))
