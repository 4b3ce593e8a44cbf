"""The loss in token tiles: equals HF logits with summed cross-entropy, with gradients, and makes no logits beyond a tile."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from helpers.measures.allocations import measure
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import VOCAB_SIZE, ModelCase, build_model
from helpers.models.token_losses import focal
from helpers.plans.layouts import plan_of
from helpers.ranks.rank_steps import run_step
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx.hf.models.layers import final_norm, output_head
from hf_longctx.plan.core.types import Action, ActivationPolicy, Chunk, MicroBatch, Parameters, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.activations.output_head import OutputHead, loss_of
from hf_longctx.runtime.core import loss as losses_of
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import IGNORE_INDEX, Targets, TokenTally, summed_cross_entropy, summed_loss

NUM_TOKENS = 23
MASKS: dict[str, tuple[int, ...]] = {
    "none": (),
    "some": (0, 4, 5, 6, 22),
    "front": tuple(range(14)),
    "middle": tuple(range(6, 15)),
    "back": tuple(range(9, 23)),
    "all": tuple(range(23)),
}


def tokens(mask: str = "some", num_tokens: int = NUM_TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and next-token labels, each [1, T]."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCAB_SIZE, (1, num_tokens), generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, (1, num_tokens), generator=generator)
    labels[0, list(MASKS[mask])] = IGNORE_INDEX
    return input_ids, labels


def logits_of(model: nn.Module, input_ids: Tensor) -> Tensor:
    return model(input_ids=input_ids, use_cache=False).logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the trainable parameters, which are cleared."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def plain(model: nn.Module, mask: str = "some", scale: float = 0.37) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients of scale * loss, by HF logits and summed cross-entropy."""
    input_ids, labels = tokens(mask)
    loss = summed_cross_entropy(logits_of(model, input_ids), labels)
    (loss * scale).backward()
    return float(loss.detach()), gradients(model)


def tiled(
    model: nn.Module, tile_tokens: int, keep_gradients: bool, mask: str = "some", scale: float = 0.37
) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients of scale * loss, in tiles."""
    input_ids, labels = tokens(mask)
    norm = final_norm(model)
    assert norm is not None and torch.is_floating_point(norm.weight)
    head = OutputHead(output_head(model), norm)
    with head.summing(Targets(labels), tile_tokens, keep_gradients):
        loss = logits_of(model, input_ids)
    head.unbind()
    assert "forward" not in vars(norm)
    assert loss_of(loss) is loss
    (loss * scale).backward()
    return float(loss.detach()), gradients(model)


def check_equal(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert found[1].keys() == expected[1].keys()
    errors = {name: relative_error(found[1][name], gradient) for name, gradient in expected[1].items()}
    assert max(errors.values()) <= TOLERANCE, errors


def with_bias(model: Any) -> Any:
    """The model with a bias on its head."""
    linear = model.lm_head
    model.lm_head = nn.Linear(linear.in_features, linear.out_features, dtype=linear.weight.dtype)
    model.lm_head.weight = linear.weight
    generator = torch.Generator().manual_seed(1)
    model.lm_head.bias.data.copy_(torch.randn(linear.out_features, generator=generator, dtype=torch.float64))
    return model


def with_adapters(targets: Any, **settings: Any) -> Any:
    """A model with nonzero adapters on `targets`."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(build_model(ModelCase("qwen3")), config, autocast_adapter_dtype=False).double()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
    return model.train()


MODELS: dict[str, Any] = {
    "llama": lambda: build_model(ModelCase("llama")),
    "llama, tied": lambda: build_model(ModelCase("llama", tied=True)),
    "llama, bias": lambda: with_bias(build_model(ModelCase("llama"))),
    "qwen3": lambda: build_model(ModelCase("qwen3")),
    "qwen3, tied": lambda: build_model(ModelCase("qwen3", tied=True)),
    "qwen2": lambda: build_model(ModelCase("qwen2")),
    "mistral": lambda: build_model(ModelCase("mistral")),
    "frozen head": lambda: with_adapters(["q_proj", "down_proj"]),
    "adapters on the head": lambda: with_adapters(["q_proj", "lm_head"]),
    "a whole copy of the head": lambda: with_adapters(["q_proj"], modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("tile_tokens", [0, 1, 7, 100])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_logits(name: str, tile_tokens: int, keep_gradients: bool) -> None:
    model = MODELS[name]()
    check_equal(tiled(model, tile_tokens, keep_gradients), plain(model))


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_masked_tokens_add_nothing_wherever_they_are(mask: str, keep_gradients: bool) -> None:
    model = build_model(ModelCase("llama", tied=True))
    found, expected = tiled(model, 5, keep_gradients, mask), plain(model, mask)
    check_equal(found, expected)
    if mask == "all":
        assert found[0] == 0.0
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found[1].values())


@pytest.mark.parametrize(
    "mask,expected", [("none", [5, 5, 5, 5, 3]), ("front", [5, 5, 3]), ("all", [5]), ("middle", [5, 5, 5, 3])]
)
def test_tiles_without_labels_are_not_computed(mask: str, expected: list[int]) -> None:
    model, seen = build_model(ModelCase()), []
    head_forward = model.lm_head.forward

    def counting(x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return head_forward(x)

    model.lm_head.forward = counting
    tiled(model, 5, True, mask)
    # one run per tile: gradients are computed with the loss
    assert seen == expected


@pytest.mark.parametrize("keep_gradients", [True, False])
def test_two_forwards_in_flight_and_a_second_backward_are_right(keep_gradients: bool) -> None:
    model = build_model(ModelCase("llama", tied=True))
    head = OutputHead(model.lm_head)
    parts, losses = [tokens("some"), tokens("none", 9, seed=5)], []
    for input_ids, labels in parts:
        with head.summing(Targets(labels), 4, keep_gradients):
            losses.append(logits_of(model, input_ids))
    for loss in losses:
        loss.backward(retain_graph=True)
    found = gradients(model)
    for loss in reversed(losses):
        loss.backward()
    again = gradients(model)
    head.unbind()
    for input_ids, labels in parts:
        summed_cross_entropy(logits_of(model, input_ids), labels).backward()
    expected = gradients(model)
    for twice in (found, again):
        assert max(relative_error(twice[name], expected[name]) for name in expected) <= TOLERANCE


HALF = {
    "autocast": ModelCase(dtype=torch.float32, autocast=True),
    "autocast, tied": ModelCase(dtype=torch.float32, autocast=True, tied=True),
    "bf16 weights": ModelCase(dtype=torch.bfloat16),
    "fp16 weights": ModelCase(dtype=torch.float16),
}


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_close_as_plain(name: str, keep_gradients: bool) -> None:
    _, exact = plain(build_model(replace(HALF[name], dtype=torch.float64, autocast=False)))
    loss, found = tiled(build_model(HALF[name]), 5, keep_gradients)
    plain_loss, rounded = plain(build_model(HALF[name]))
    errors = {n: tuple(relative_error(gradients[n].double(), exact[n]) for gradients in (found, rounded)) for n in exact}
    # fp32 losses are summed in another order
    assert loss == pytest.approx(plain_loss, abs=1e-4)
    # the layers round the head's input gradient once more; the head's own gradients are summed in fp32
    worst, plain_worst = (max(both[which] for both in errors.values()) for which in (0, 1))
    assert worst <= 1.5 * plain_worst
    heads = [n for n in exact if "lm_head" in n]
    # by mean squares: which single element is worst, and how far off, differs between the kernels of CPUs
    squares = [tuple(float((each[n].double() - exact[n]).square().mean()) for each in (found, rounded)) for n in heads]
    assert all(error <= 1.15**2 * plain_error for error, plain_error in squares), squares


@pytest.mark.parametrize("case", [HALF["autocast"], HALF["bf16 weights"]], ids=["autocast", "bf16 weights"])
def test_loss_is_fp32_and_one_tile_is_that_of_plain(case: ModelCase) -> None:
    model, (input_ids, labels) = build_model(case), tokens()
    head = OutputHead(model.lm_head)
    with head.summing(Targets(labels), 0):
        loss = logits_of(model, input_ids)
    logits = logits_of(model, input_ids)
    assert (loss.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    # an fp32 sum is rounded twice
    assert float(loss.detach()) == pytest.approx(float(summed_cross_entropy(logits, labels).detach()), rel=2.0**-22)


def small_gradients_of_head(num_tiles: int) -> float:
    """Gradient of a bf16 weight that all tiles add to: 1 from the first, 2^-9 from each other, which bf16 would round away."""
    head = nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    head.weight.data.zero_()
    hidden = torch.full((1, num_tiles, 1), 2.0**-8, dtype=torch.bfloat16)
    # the gradient by the logit at the label is -1/2
    hidden[0, 0] = 2.0
    bound = OutputHead(head)
    with bound.summing(Targets(torch.zeros(1, num_tiles, dtype=torch.int64)), 1, True):
        head(hidden).backward()
    return float(-head.weight.grad[0])


def test_small_tiles_are_not_rounded_away() -> None:
    assert small_gradients_of_head(129) == 1.25


@pytest.mark.parametrize("keep_gradients,num_runs", [(True, 5), (False, 10)])
def test_every_run_of_the_head_is_under_autocast(keep_gradients: bool, num_runs: int) -> None:
    model, dtypes = build_model(HALF["autocast"]), []
    original = model.lm_head.forward

    def forward(x: Tensor) -> Tensor:
        logits = original(x)
        dtypes.append(logits.dtype)
        return logits

    model.lm_head.forward = forward
    tiled(model, 5, keep_gradients, "none")
    # the second run of each tile is that of backward, which does not restore autocast by itself
    assert dtypes == [torch.bfloat16] * num_runs


class Largest(TorchDispatchMode):
    """Most elements of any tensor that an operation returns, and of all such tensors alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.live_numel = 0
        self._seen: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
                self._seen.append(weakref.ref(tensor))
        # views share their storage
        live = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size()
            for ref in self._seen
            if (t := ref()) is not None
        }
        self.live_numel = max(self.live_numel, sum(live.values()))
        return found


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_larger_than_a_tile_of_logits_is_saved_or_made(frozen: bool, keep_gradients: bool) -> None:
    num_tokens, width, vocab, tile_tokens = 96, 8, 128, 16
    head = nn.Linear(width, vocab).requires_grad_(not frozen)
    hidden, labels = torch.randn(1, num_tokens, width, requires_grad=True), torch.randint(0, vocab, (1, num_tokens))
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    with Largest() as untiled:
        summed_cross_entropy(head(hidden), labels).backward()
    assert untiled.numel == num_tokens * vocab
    bound = OutputHead(head)
    with Largest() as made, saved_tensors_hooks(pack, lambda tensor: tensor):
        with bound.summing(Targets(labels), tile_tokens, keep_gradients):
            loss = head(hidden)
        held = [tensor.numel() for tensor in loss.grad_fn.saved_tensors]
        loss.backward()
    assert made.numel == tile_tokens * vocab
    # logits and softmax of one tile, a third such tensor for labels and biases, gradients of input and weight
    assert made.live_numel <= 3 * tile_tokens * vocab + 2 * num_tokens * width + 4 * vocab * width
    # no logits, not even those of a tile: its graph holds input and weight
    assert max(packed) == vocab * width
    weight = [] if frozen else [vocab * width, vocab]
    assert held == ([num_tokens * width, *weight] if keep_gradients else [num_tokens * width, num_tokens])
    with Largest() as forward, torch.no_grad(), bound.summing(Targets(labels), tile_tokens):
        head(hidden)
    assert forward.numel == tile_tokens * vocab


def test_a_frozen_head_computes_no_gradient_of_its_weight() -> None:
    width, vocab = 64, 128
    head = nn.Linear(width, vocab).requires_grad_(False)
    hidden, labels = torch.randn(1, 10, width, requires_grad=True), torch.randint(0, vocab, (1, 10))
    bound = OutputHead(head)
    with Largest() as made, bound.summing(Targets(labels), 5, True):
        head(hidden).backward()
    # transposed views of the weight are as large, so logits must be smaller
    assert made.numel == width * vocab
    assert head.weight.grad is None and hidden.grad is not None


def in_order(words: str, lengths: list[int], tile_tokens: int, num_ranks: int, parameters: Parameters) -> StepPlan:
    """One group of all ranks with one chunk per sequence, in the order of `words`; every loss in tiles, nothing recomputed."""
    plan = plan_of([[(num_ranks, tuple(range(len(lengths))))]], lengths, num_ranks, parameters=parameters)
    (group,) = plan.micro_batches[0].groups
    chunks = tuple(Chunk(i, (span,)) for i, span in enumerate(group.chunks[0].spans))
    policies = tuple(ActivationPolicy(chunk.index, tile_tokens=tile_tokens) for chunk in chunks)
    actions = tuple(Action.parse(word) for word in words.split())
    stage = replace(group.stages[0], actions=actions, activations=policies)
    return validate_plan(replace(plan, micro_batches=(MicroBatch((replace(group, chunks=chunks, stages=(stage,)),)),)))


@pytest.mark.daily("0F0 0F1 0B1 0B0-replicated-True", "0F0 0B0 0F1 0B1-replicated-False")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parameters", ["replicated", "sharded", "gathered_per_round"])
@pytest.mark.parametrize("words", ["0F0 0F1 0B1 0B0", "0F0 0B0 0F1 0B1"])
def test_two_ranks_match_whether_weights_are_whole_or_sharded(ranks, words: str, parameters: Parameters, tied: bool) -> None:
    lengths, case = [17, 12], ModelCase(promoted=True, tied=tied)
    rows = random_rows(lengths)
    expected_loss, expected = reference_step(build_model(case), rows)
    for found in run_step(ranks(2), case, in_order(words, lengths, 3, 2, parameters), rows):
        check_equal(found, (expected_loss, expected))


def test_the_model_must_call_its_head_once() -> None:
    model, (input_ids, labels) = build_model(ModelCase()), tokens()
    head = OutputHead(model.lm_head)
    with pytest.raises(RuntimeError, match="called its output head 0 times in one forward"), head.summing(Targets(labels), 4):
        model.model(input_ids=input_ids)
    with pytest.raises(RuntimeError, match="called its output head 2 times"), head.summing(Targets(labels), 4):
        logits_of(model, input_ids), logits_of(model, input_ids)
    with (
        pytest.raises(ValueError, match=r"hidden states of shape \(1, 1\), but labels have shape \(1, 23\)"),
        head.summing(Targets(labels), 4),
    ):
        model(input_ids=input_ids, logits_to_keep=1)
    # afterwards the head runs unchanged
    assert logits_of(model, input_ids).shape == (1, NUM_TOKENS, VOCAB_SIZE)


def test_unbinding_leaves_nothing_behind() -> None:
    model = build_model(ModelCase())
    for own in (model.lm_head.forward, None):
        if own is not None:
            model.lm_head.forward = own
        else:
            del model.lm_head.forward
        before = dict(vars(model.lm_head))
        head = OutputHead(model.lm_head)
        assert vars(model.lm_head) != before
        head.unbind()
        assert vars(model.lm_head) == before


def test_a_scale_of_logits_is_found_in_the_graph() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.GraniteConfig(vocab_size=VOCAB_SIZE, num_key_value_heads=2, logits_scaling=4.0, pad_token_id=0, **sizes)
    model = transformers.GraniteForCausalLM(config)
    input_ids, labels = tokens()
    with OutputHead(output_head(model)).summing(Targets(labels), 4):
        loss = logits_of(model, input_ids)
    with pytest.raises(ValueError, match=r"changes its logits after the output head \(DivBackward0\)"):
        loss_of(loss)


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("token_loss", [None, focal])
@pytest.mark.parametrize("tile_tokens", [0, 5])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_weights_and_other_losses_are_those_of_logits(is_weighted, tile_tokens, token_loss, keep_gradients) -> None:
    model, (input_ids, labels) = build_model(ModelCase()), tokens("some")
    weights = torch.rand(1, NUM_TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) if is_weighted else None
    targets = Targets(labels, weights, token_loss)
    expected = summed_loss(logits_of(model, input_ids), targets)
    (expected * 0.37).backward()
    wanted = (float(expected.detach()), gradients(model))
    head = OutputHead(output_head(model))
    with head.summing(targets, tile_tokens, keep_gradients):
        loss = logits_of(model, input_ids)
    with head.summing(targets, tile_tokens), torch.no_grad():
        without_graph = logits_of(model, input_ids)
    head.unbind()
    (loss * 0.37).backward()
    check_equal((float(loss.detach()), gradients(model)), wanted)
    assert float(without_graph) == pytest.approx(wanted[0], rel=TOLERANCE)


def test_tiles_of_weight_zero_are_not_computed() -> None:
    model, (input_ids, labels) = build_model(ModelCase()), tokens("none")
    weights = torch.zeros(1, NUM_TOKENS, dtype=torch.float64)
    weights[0, 12] = 2.0
    seen, head_forward = [], model.lm_head.forward
    model.lm_head.forward = lambda x: (seen.append(x.shape[1]), head_forward(x))[1]
    head = OutputHead(output_head(model))
    with head.summing(Targets.of(ChunkInputs(input_ids, input_ids, labels, weights)), 5, True):
        logits_of(model, input_ids).backward()
    head.unbind()
    assert seen == [5]


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("token_loss", [None, focal])
@pytest.mark.parametrize("mask", ["some", "middle", "all"])
def test_label_tokens_are_counted_once_while_their_loss_is_computed(keep_gradients: bool, token_loss: Any, mask: str) -> None:
    model, (input_ids, labels) = build_model(ModelCase("llama")), tokens(mask)
    head, tally = OutputHead(output_head(model)), TokenTally(torch.device("cpu"))
    with head.summing(Targets(labels, token_loss=token_loss, tally=tally), 5, keep_gradients):
        logits_of(model, input_ids).backward()
    head.unbind()
    logits_TV, labels_T = logits_of(model, input_ids)[0].detach(), labels[0]
    p_TV = logits_TV[labels_T != IGNORE_INDEX].softmax(-1)
    right = (p_TV.argmax(-1) == labels_T[labels_T != IGNORE_INDEX]).sum()
    expected = [len(p_TV), float(right), float(-(p_TV * p_TV.log()).sum())]
    assert tally.sums_3.tolist() == pytest.approx(expected, rel=TOLERANCE)


def test_counting_takes_no_room_beyond_a_block_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses_of, "_SCORED_LOGITS", 2**14)
    logits, labels = torch.randn(1, 512, 1024), torch.zeros(1, 512, dtype=torch.int64)
    logits[..., 5] = float("-inf")
    tally = TokenTally(torch.device("cpu"))
    peak, _, _ = measure(lambda: tally.add(logits, labels))
    # a block of 16 tokens and its sums, of 512
    assert peak <= 2 * 4 * 2**14 + 64 * 512
    assert bool(torch.isfinite(tally.sums_3).all())
