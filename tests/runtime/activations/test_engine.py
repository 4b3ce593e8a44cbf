"""The activation engine: whatever a policy recomputes, loss and gradients equal plain HF, and no work is done twice.

Counted is what really runs: query-key pairs of attention tiles, and tokens that pass a layer's gate projection.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_pool import RankFailure
from helpers.ranks.rank_steps import check_step, rank_inputs, run_step
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import Action, ActivationPolicy, LayerPolicy, MicroBatch, StepPlan, TensorShare
from hf_longctx.runtime.activations import engine as engine_module
from hf_longctx.runtime.activations import records as attention_record
from hf_longctx.runtime.activations import token_tiles
from hf_longctx.runtime.activations.engine import ActivationEngine, LayerModules
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.attention import rows as rows_module
from hf_longctx.runtime.core.dropout import on_tiles
from hf_longctx.runtime.execution.executor import StepExecutor, no_mask
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.plain import TileInputs

CPU = torch.device("cpu")
# packed documents of odd lengths, one of a single token
LENGTHS = [13, 1, 31, 7]
PAIRS = sum(n * n for n in LENGTHS)


def on_host(recompute: float) -> LayerPolicy:
    """A replayed layer with half of its input, and half of the kept attention output, on the host."""
    return replayed(recompute, host=(1 - recompute) / 2, input_host=0.5)


@dataclass
class Work:
    """Squared rows of attention tiles, tokens that passed the MLP of each layer, and the documents in packed order."""

    pairs: int = 0
    documents: list[int] = field(default_factory=list)
    mlp_tokens: list[int] = field(default_factory=list)


@contextmanager
def counted(model: Any) -> Iterator[Work]:
    """Counts the work of everything that runs inside."""
    layers = layer_modules(model)
    work = Work(mlp_tokens=[0] * len(layers))
    original = rows_module.tile_forward

    def tile_forward(tile: TileInputs) -> Any:
        # counted once for all heads
        work.pairs += tile.q.shape[1] ** 2
        return original(tile)

    def count(index: int) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            work.mlp_tokens[index] += output.shape[1]

        return hook

    gates = [
        next(m for name, m in modules.mlps[0].named_modules() if name.endswith(("gate_proj", "fc_in", "dense_h_to_4h")))
        for modules in layers
    ]
    handles = [gate.register_forward_hook(count(index)) for index, gate in enumerate(gates)]
    with patch.object(rows_module, "tile_forward", tile_forward):
        yield work
    for handle in handles:
        handle.remove()


def step(
    model: Any,
    layers: tuple[LayerModules, ...] | None,
    rows: list[dict[str, list[int]]],
    policies: tuple[LayerPolicy, ...],
    tile_tokens: int,
    plan: StepPlan | None = None,
) -> tuple[float, Work]:
    """Runs one step of one rank under the policies; leaves gradients on the model and returns the loss and the work."""
    patch_model(model)
    engine = ActivationEngine(layers or layer_modules(model))
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), timeout_s=1.0), CPU)
    lengths = [len(row["input_ids"]) for row in rows]
    plan = same_policy(plan or plan_of([[(1, tuple(range(len(lengths))))]], lengths, 1), *policies, tile_tokens=tile_tokens)
    with counted(model) as work:
        work.documents = [span.num_tokens for chunk in plan.micro_batches[0].groups[0].chunks for span in chunk.spans]
        num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
        result = executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], num_labels, engine=engine)
    engine.unbind()
    return float(result.loss), work


def worst_error(model: Any, expected: dict[str, Tensor]) -> float:
    return max(relative_error(parameter.grad, expected[name]) for name, parameter in model.named_parameters())


def run(case: ModelCase, policies: tuple[LayerPolicy, ...], tile_tokens: int, lengths: list[int]) -> Work:
    """Asserts that the policies give the loss and gradients of plain HF; returns the work that was done."""
    rows = random_rows(lengths)
    expected_loss, expected = reference_step(build_model(case), rows)
    model = build_model(case)
    loss, work = step(model, None, rows, policies, tile_tokens)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert worst_error(model, expected) <= TOLERANCE
    return work


@pytest.mark.quick
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "mistral"])
@pytest.mark.parametrize("tile_tokens", [0, 1, 16, 64])
def test_attention_runs_once_and_the_mlp_twice(family: str, tile_tokens: int) -> None:
    work = run(ModelCase(family, promoted=True), (replayed(),) * 2, tile_tokens, LENGTHS)
    assert work.pairs == 2 * PAIRS
    assert work.mlp_tokens == [2 * sum(LENGTHS)] * 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_recomputed_share_of_attention_is_its_front(family: str) -> None:
    work = run(ModelCase(family, promoted=True), (replayed(0.5), replayed(1.0)), 8, LENGTHS)
    # the longest document is packed first: half of 52 tokens are 26 tokens of the document of 31
    assert work.documents == [31, 13, 7, 1]
    assert work.pairs == 2 * PAIRS + 26**2 + PAIRS
    assert work.mlp_tokens == [2 * 52] * 2


@pytest.mark.parametrize("tile_tokens", [0, 8])
def test_the_kept_share_of_the_mlp_runs_once(tile_tokens: int) -> None:
    work = run(ModelCase(promoted=True), (replayed(mlp=0.25), replayed(mlp=0.0)), tile_tokens, LENGTHS)
    assert work.mlp_tokens == [52 + 13, 52]


def test_layers_that_keep_everything_are_not_replayed() -> None:
    work = run(ModelCase(promoted=True), (LayerPolicy(), replayed()), 8, LENGTHS)
    # attention of the first layer is torch's own, which is not counted
    assert work.pairs == PAIRS
    assert work.mlp_tokens == [52, 2 * 52]


def test_layers_beyond_the_list_keep_everything() -> None:
    work = run(ModelCase(promoted=True), (replayed(),), 8, LENGTHS)
    assert work.mlp_tokens == [2 * 52, 52]


@pytest.mark.wide
@settings(max_examples=25, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_random_policies_match(data: st.DataObject) -> None:
    shares = st.floats(0, 1).map(lambda share: round(share, 3))
    layers = tuple(replayed(data.draw(shares), mlp=data.draw(shares)) for _ in range(2))
    family = data.draw(st.sampled_from(["llama", "qwen3"]))
    # at least a few tokens: with one or two the gradients of queries are rounding noise
    lengths = [17, *data.draw(st.lists(st.sampled_from([1, 2, 3, 7, 12, 31]), max_size=3))]
    tile_tokens = data.draw(st.sampled_from([0, 1, 5, 16, 100]))
    num_tokens = sum(lengths)
    work = run(ModelCase(family, promoted=True), layers, tile_tokens, lengths)
    for index, layer in enumerate(layers):
        assert work.mlp_tokens[index] == num_tokens + round(layer.share("mlp").recompute * num_tokens)
    fronts = [round(layer.share("attention_output").recompute * num_tokens) for layer in layers]
    assert work.pairs == sum(n * n for n in lengths) * 2 + sum(front_pairs(work.documents, front) for front in fronts)


def front_pairs(lengths: list[int], front: int) -> int:
    """Sum of squares of the tokens that each document has among the first `front` tokens."""
    total = start = 0
    for length in lengths:
        total += max(0, min(length, front - start)) ** 2
        start += length
    return total


class NormedBehind(torch.nn.Module):
    """An MLP followed by a norm: the layer saves tensors after the MLP, as in families with post-norms."""

    def __init__(self, mlp: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.weight = mlp, torch.nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))


def post_norm_model() -> Any:
    model = build_model(ModelCase(promoted=True))
    for layer in model.model.layers:
        layer.mlp = NormedBehind(layer.mlp, 32)
    return model


def test_a_norm_behind_the_mlp_costs_a_third_forward() -> None:
    rows, plain, model = random_rows(LENGTHS), post_norm_model(), post_norm_model()
    expected_loss, expected = reference_step(plain, rows)
    layers = tuple(replace(modules, mlps=(modules.mlps[0].inner,)) for modules in layer_modules(model))
    loss, work = step(model, layers, rows, (replayed(),) * 2, 8)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert worst_error(model, expected) <= TOLERANCE
    assert (work.pairs, work.mlp_tokens) == (2 * PAIRS, [3 * 52] * 2)


@pytest.mark.quick
def test_several_chunks_may_be_in_flight_in_any_order() -> None:
    # forward, forward, backward, backward over two chunks of one group, both orders
    rows = random_rows(LENGTHS)
    expected_loss, expected = reference_step(build_model(ModelCase(promoted=True)), rows)
    base = plan_of([[(1, (0, 1, 2, 3))]], LENGTHS, 1)
    (group,) = base.micro_batches[0].groups
    spans = group.chunks[0].spans
    chunks = (replace(group.chunks[0], spans=spans[:1]), replace(group.chunks[0], index=1, spans=spans[1:]))
    for words in ("0F0 0F1 0B1 0B0", "0F0 0F1 0B0 0B1"):
        actions = tuple(Action.parse(word) for word in words.split())
        stage = replace(group.stages[0], actions=actions)
        plan = replace(base, micro_batches=(MicroBatch((replace(group, chunks=chunks, stages=(stage,)),)),))
        model = build_model(ModelCase(promoted=True))
        loss, _ = step(model, None, rows, (replayed(0.5, mlp=0.5), replayed()), 8, plan)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert worst_error(model, expected) <= TOLERANCE


def test_a_second_backward_recomputes_and_stays_right() -> None:
    model = build_model(ModelCase(promoted=True))
    patch_model(model)
    engine = ActivationEngine(layer_modules(model))
    rows = random_rows([23])
    plan = plan_of([[(1, (0,))]], [23], 1)
    (chunk,) = rank_inputs(plan, rows, 0)["chunks"][0]
    (group,) = plan.micro_batches[0].groups
    policy = ActivationPolicy(0, 0, (replayed(0.5, mlp=0.5),) * 2, 8)
    pool, activations = GroupPool((1,), timeout_s=1.0), engine.begin(policy)
    context = replace(pool.context(group, group.chunks[0]), activations=activations)
    with activations.running():
        loss = whole_model(model, 2).forward(0, chunk, None, no_mask(CPU), context).square().sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert all(relative_error(p.grad, once) <= TOLERANCE for p, once in zip(model.parameters(), first, strict=True))


@pytest.mark.daily("2-ring")
@pytest.mark.parametrize("num_ranks,method", [(2, "ulysses"), (2, "ring")])
def test_sequence_groups_match(ranks, num_ranks: int, method: str) -> None:
    share = 0.5 if method == "ulysses" else 1.0
    layers = (on_host(0.25 if method == "ulysses" else 0.0), replayed(share, mlp=0.5))
    lengths = [41, 3, 19, 7]
    plan = plan_of([[(num_ranks, (0, 1, 2, 3))]], lengths, num_ranks, ulysses=1 if method == "ring" else 0)
    check_step(ranks(num_ranks), ModelCase(), same_policy(plan, *layers, tile_tokens=8), lengths)


@pytest.mark.daily("sharded")
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_sharded_parameters_match(ranks, parameters: Any) -> None:
    lengths = [41, 3, 19, 7]
    plan = plan_of([[(2, (0, 1))], [(1, (2,)), (1, (3,))]], lengths, 2, parameters=parameters)
    layers = (replayed(0.5, mlp=0.5), on_host(0.25))
    check_step(ranks(2), ModelCase(), same_policy(plan, *layers, tile_tokens=8), lengths)


def test_half_precision_under_autocast_is_as_close_as_plain() -> None:
    case = ModelCase(dtype=torch.float32, autocast=True)
    rows = random_rows(LENGTHS)
    _, exact = reference_step(build_model(ModelCase()), rows)
    plain = build_model(case)
    _, rounded = reference_step(plain, rows)
    model = build_model(case)
    dtypes = set()
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    step(model, None, rows, (replayed(0.5, mlp=0.5),) * 2, 8)
    # backward runs the tiles again, and does not restore autocast by itself
    assert dtypes == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        assert (
            relative_error(parameter.grad.double(), exact[name]) <= 2 * relative_error(rounded[name].double(), exact[name]) + 0.01
        )


def test_adapters_match() -> None:
    peft = pytest.importorskip("peft")
    rows = random_rows(LENGTHS)

    def adapted() -> Any:
        model = peft.get_peft_model(
            build_model(ModelCase(promoted=True)),
            peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"),
            autocast_adapter_dtype=False,
        ).double()
        generator = torch.Generator().manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
        return model.train()

    expected_loss, expected = reference_step(adapted(), rows)
    model = adapted()
    patch_model(model.base_model.model)
    engine = ActivationEngine(layer_modules(model))
    executor = StepExecutor(whole_model(model, 2), GroupPool((1,), timeout_s=1.0), CPU)
    plan = same_policy(plan_of([[(1, (0, 1, 2, 3))]], LENGTHS, 1), replayed(0.5, mlp=0.5), replayed(), tile_tokens=8)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    result = executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], num_labels, engine=engine)
    assert float(result.loss) == pytest.approx(expected_loss, rel=TOLERANCE)
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == expected.keys()
    assert max(relative_error(gradient, expected[name]) for name, gradient in trained.items()) <= TOLERANCE


INPUTS_HALVED = (
    LayerPolicy((TensorShare("layer_input", device=1.0), *replayed(1.0).shares[1:])),
    LayerPolicy((TensorShare("layer_input", recompute=1.0), *replayed(1.0).shares[1:])),
)


@pytest.mark.wide("0-gemma2")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("tile_tokens", [0, 8])
def test_a_layer_input_that_the_layer_before_makes_again_gives_the_same_gradients(family: str, tile_tokens: int) -> None:
    work = run(ModelCase(family, promoted=True), INPUTS_HALVED, tile_tokens, LENGTHS)
    if family == "llama":
        # the first layer runs three times, and its attention too; the second one twice
        assert work.pairs == 5 * PAIRS
        assert work.mlp_tokens == [3 * 52, 2 * 52]


@pytest.mark.parametrize("name", ["GPTJForCausalLM", "FalconForCausalLM"])
def test_layers_that_return_tuples_make_inputs_again(name: str) -> None:
    rows = random_rows(LENGTHS)
    with wide_floats():
        expected_loss, expected = reference_step(build_any(name), rows)
        model = build_any(name)
        loss, work = step(model, None, rows, INPUTS_HALVED, 8)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert worst_error(model, expected) <= TOLERANCE
    assert work.mlp_tokens == [3 * 52, 2 * 52]


@pytest.mark.daily("ulysses")
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_groups_make_layer_inputs_again(ranks, method: str) -> None:
    lengths = [41, 3, 19, 7]
    plan = plan_of([[(2, (0, 1, 2, 3))]], lengths, 2, ulysses=1 if method == "ring" else 0)
    layers = (replayed(0.0, mlp=0.5, input_host=0.5), INPUTS_HALVED[1])
    check_step(ranks(2), ModelCase(), same_policy(plan, *layers, tile_tokens=8), lengths)


def test_sharded_layers_do_not_make_inputs_again(ranks) -> None:
    plan = plan_of([[(2, (0,))]], [23], 2, parameters="sharded")
    with pytest.raises(RankFailure, match="that layer meets other ranks for its weights or experts"):
        run_step(ranks(2), ModelCase(), same_policy(plan, *INPUTS_HALVED), random_rows([23]))


def test_slices_do_not_make_inputs_again() -> None:
    model = build_model(ModelCase(promoted=True))
    plan = sliced_plan([24], [cut(0, [12, 12])[:1], cut(0, [12, 12])[1:]], "0F0 0F1 0B1 0B0")
    with pytest.raises(ValueError, match="chunk has slices, whose keys and values"):
        step(model, None, random_rows([24]), INPUTS_HALVED, 8, plan)


def test_an_input_that_the_model_has_changed_is_kept() -> None:
    # a model that scales hidden states between its layers
    def scaled() -> Any:
        model = build_model(ModelCase(promoted=True))
        model.model.layers[1].register_forward_pre_hook(lambda module, inputs: (2 * inputs[0], *inputs[1:]))
        return model

    rows, model = random_rows(LENGTHS), scaled()
    expected_loss, expected = reference_step(scaled(), rows)
    loss, _ = step(model, None, rows, INPUTS_HALVED, 8)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert worst_error(model, expected) <= TOLERANCE


REFUSED = {
    "input": (TensorShare("layer_input", recompute=0.25, device=0.75), "0.25 of layer_input is recomputed"),
    "first input": (TensorShare("layer_input", recompute=1.0), "the layer before is on another part"),
    "host": (TensorShare("attention_output", host=0.5, device=0.5), "the engine was given no host memory"),
    "qkv host": (TensorShare("qkv", host=0.5, recompute=0.5), "the engine was given no host memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_executed_is_refused_by_name(name: str) -> None:
    share, message = REFUSED[name]
    engine = ActivationEngine(layer_modules(build_model(ModelCase())))
    shares = (share,) if name.startswith("qkv") else (share, TensorShare("qkv", recompute=1.0))
    with pytest.raises(ValueError, match=message):
        engine.check(ActivationPolicy(0, 0, (LayerPolicy(shares),)))


def test_a_policy_of_another_model_is_refused() -> None:
    engine = ActivationEngine(layer_modules(build_model(ModelCase())))
    with pytest.raises(ValueError, match="3 layers, but the model has 2"):
        engine.check(ActivationPolicy(0, 0, (LayerPolicy(),) * 3))


def test_a_ring_recomputes_attention_wholly_or_not_at_all(ranks) -> None:
    plan = plan_of([[(2, (0,))]], [23], 2, ulysses=1)
    with pytest.raises(RankFailure, match="a ring of 2 blocks can only recompute all or nothing"):
        run_step(ranks(2), ModelCase(), same_policy(plan, replayed(0.5), tile_tokens=0), random_rows([23]))


def test_unbinding_leaves_nothing_behind() -> None:
    model = build_model(ModelCase(promoted=True))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    engine = ActivationEngine(layer_modules(model))
    engine.unbind()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_a_bound_model_in_training_mode_generates_as_before() -> None:
    prompt = {"inputs": torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model = build_model(ModelCase(promoted=True))
    expected = model.generate(**prompt)
    engine = ActivationEngine(layer_modules(model))
    assert torch.equal(model.generate(**prompt), expected)
    engine.unbind()


def test_a_kept_output_that_is_slightly_off_is_noticed() -> None:
    original = attention_record.AttentionRecord.take

    def take(record: Any) -> Any:
        kept = original(record)
        return kept and replace(kept, out_ShE=kept.out_ShE * (1 + 1e-6))

    with patch.object(attention_record.AttentionRecord, "take", take), pytest.raises(AssertionError):
        run(ModelCase(promoted=True), (replayed(),) * 2, 8, LENGTHS)


def test_an_unfilled_output_that_is_read_is_noticed() -> None:
    model = post_norm_model()
    layers = tuple(replace(modules, mlps=(modules.mlps[0].inner,)) for modules in layer_modules(model))
    _, expected = reference_step(post_norm_model(), rows := random_rows(LENGTHS))

    def leave_unfilled(module: Any, run: Any, x: Tensor, tile_tokens: int, record: Any = None) -> Tensor:
        parameters = [p for p in module.parameters() if p.requires_grad]
        unfilled = record is not None and record.is_replay
        return token_tiles._Tokenwise.apply(x, module, on_tiles(module, run), tile_tokens, record, unfilled, *parameters)

    with patch.object(engine_module, "tokenwise", leave_unfilled):
        step(model, layers, rows, (replayed(),) * 2, 8)
    assert not worst_error(model, expected) <= TOLERANCE


def test_a_copy_of_a_bound_model_runs_on_its_own_weights() -> None:
    model = build_model(ModelCase())
    patch_model(model)
    engine = ActivationEngine(layer_modules(model), head=OutputHead(output_head(model)))
    copied = copy.deepcopy(model)
    plain = build_model(ModelCase())
    with torch.no_grad():
        for parameter, other in zip(copied.parameters(), plain.parameters(), strict=True):
            parameter.mul_(1.5)
            other.mul_(1.5)
    ids = torch.arange(20)[None]
    assert torch.equal(copied(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)
    engine.unbind()


def test_a_model_whose_layers_do_not_pass_the_door_is_refused() -> None:
    """In evaluation mode layers run unchanged: nothing would be recomputed, and nobody would notice."""
    model = build_model(ModelCase(promoted=True))
    patch_model(model)
    engine = ActivationEngine(layer_modules(model))
    executor = StepExecutor(whole_model(model.eval(), num_attention_layers(model)), GroupPool((1,), timeout_s=1.0), CPU)
    plan = plan_of([[(1, (0,))]], [13], 1)
    ((group, stage),) = plan.for_rank(0).rounds
    stage = replace(stage, activations=(ActivationPolicy(0, 0, (replayed(),) * 2),))
    plan = replace(plan, micro_batches=(MicroBatch((replace(group, stages=(stage,)),)),))
    batch = rank_inputs(plan, random_rows([13]), 0)
    with pytest.raises(RuntimeError, match="0 of 2 layers ran under the activation policy"):
        executor.run(plan.for_rank(0), batch["chunks"], 12, engine=engine)
