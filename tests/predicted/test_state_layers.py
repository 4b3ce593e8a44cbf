"""Layers with a state: bytes that torch allocates, books hold and ranks send, against what plans predict for a tiny Qwen3.5."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import newest
from helpers.plans.layouts import plan_of
from helpers.plans.policies import offloading, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_steps import rank_inputs
from predicted.test_memory_model import PACKED, PLAIN, WHOLE, Shape, measured, predicted
from predicted.test_saved_bytes import saved_bytes
from predicted.test_traffic import sent_on_rank
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_longctx.hf.models.attention import num_attention_layers, patch_model
from hf_longctx.hf.models.spec import model_spec, states_of
from hf_longctx.hf.models.states.patching import mixers_of
from hf_longctx.hf.planning.step_record import predicted_memory
from hf_longctx.plan.core import layer_kinds
from hf_longctx.plan.core.cluster_spec import GENERIC_CPU, ClusterSpec
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.types import ActivationPolicy, GroupShape
from hf_longctx.plan.cost.traffic import mean_traffic
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups.pool import GroupPool
from hf_longctx.runtime.states.maps import DeltaRule

pytestmark = newest
QWEN = ModelCase("qwen3_5", num_layers=4)


@dataclass(frozen=True)
class HybridShape(Shape):
    """A Qwen3.5: two layers with a state, of two key heads and four value heads, and one with attention."""

    layers: int = 3
    key_size: int = 16
    value_size: int = 16

    def config(self) -> Any:
        return transformers.Qwen3_5TextConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=self.key_size,
            linear_value_head_dim=self.value_size,
            layer_types=[*["linear_attention"] * (self.layers - 1), "full_attention"],
            max_position_embeddings=4096,
            attn_implementation="sdpa",
        )

    def spec(self, dtype: torch.dtype) -> ModelSpec:
        return ModelSpec.from_config(self.config().to_dict(), dtype.itemsize)

    def build(self, dtype: torch.dtype) -> Any:
        model = transformers.Qwen3_5ForCausalLM(self.config())
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.grad = torch.zeros_like(parameter)
        patch_model(model.train())
        return model


# held bytes are exact where everything is kept; a recomputed layer's rotary embeddings are counted as if they were not partial,
# and peaks are upper bounds
CASES = {
    "kept": (HybridShape(), PLAIN, 0, WHOLE, torch.bfloat16),
    "kept in fp32": (HybridShape(value_size=24), PLAIN, 0, PACKED, torch.float32),
    "recomputed": (HybridShape(), offloading(), 0, WHOLE, torch.float32),
    "recomputed in tiles": (HybridShape(key_size=32, value_size=32), offloading(), 256, PACKED, torch.float32),
}
# bytes that a block of a scan may save, so small that every document of two thousand tokens has several blocks
SMALL_BLOCKS = 2**21


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block_bytes", [layer_kinds.BLOCK_BYTES, SMALL_BLOCKS], ids=["whole", "blocks"])
def test_bytes_are_those_of_torch(name: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, one, tile_tokens, documents, dtype = CASES[name]
    monkeypatch.setattr(layer_kinds, "BLOCK_BYTES", block_bytes)
    assert (shape.spec(dtype).states.block_tokens < min(documents)) == (block_bytes == SMALL_BLOCKS)
    policy = None if one is PLAIN else ActivationPolicy(0, 0, (one,) * shape.layers, tile_tokens)
    held, host, forward_peak, backward_peak = measured(shape, dtype, documents, policy)
    found, before = predicted(shape, dtype, documents, policy)
    device = found.device - before
    assert found.host == host
    assert device == pytest.approx(held, rel=0.01 if policy is None else 0.06)
    assert 0.97 * forward_peak <= device + found.forward_workspace <= 1.35 * forward_peak
    assert 0.97 * backward_peak <= device + found.backward_workspace <= 1.35 * backward_peak


_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16}
_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
_SCAN = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 64}
# name of a model class -> config class, and settings
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3_5": ("Qwen3_5TextConfig", {**_KINDS, **_DELTA}),
    "KimiLinear": ("KimiLinearConfig", {**_KINDS, **_EXPERTS, "linear_head_dim": 32, "linear_num_heads": 4}),
    "BailingHybrid": ("BailingHybridConfig", {**_KINDS, **_EXPERTS, "head_dim": 32, "n_group": 1, "topk_group": 1}),
    "Lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "Lfm3": ("Lfm3Config", {"layer_types": ["conv", "full_attention"], "bos_token_id": 1, "eos_token_id": 2}),
    "Bamba": ("BambaConfig", {**_SCAN, "attn_layer_indices": [1]}),
    "GraniteMoeHybrid": ("GraniteMoeHybridConfig", {**_SCAN, **_KINDS, "mamba_n_groups": 1}),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_have_the_parameters_and_save_the_bytes_that_are_counted(name: str) -> None:
    config_class, settings = MIXERS[name]
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, config_class)(**{**sizes, "num_key_value_heads": 2, "pad_token_id": 0, **settings})
    num_tokens = 256
    for dtype in (torch.bfloat16, torch.float32):
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).train()
        ((_, mixer),) = mixers_of(model).items()
        hidden_1TC = torch.randn(1, num_tokens, 64, dtype=dtype, requires_grad=True)
        found, _ = saved_bytes(mixer, lambda mixer=mixer, hidden_1TC=hidden_1TC: mixer(hidden_1TC))
        states = states_of(config)
        assert states.layers == (True, False)
        assert states.parameters == sum(weight.numel() for weight in mixer.parameters() if weight.dim() == 2)
        expected = states.saved_bytes(dtype.itemsize, num_tokens) * num_tokens
        assert found - hidden_1TC.nbytes == pytest.approx(expected, rel=0.02)


def test_books_of_slices_and_forecasts_of_the_run_hold() -> None:
    shape = HybridShape(layers=2)
    plan = sliced_plan([512], [[span] for span in cut(0, [128] * 4)], "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0")
    rows = [{name: [token % shape.vocabulary for token in row[name]] for name in row} for row in random_rows([512])]
    model = shape.build(torch.float32)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), timeout_s=1.0), torch.device("cpu"))
    rank_plan = plan.for_rank(0)
    result = executor.run(rank_plan, rank_inputs(plan, rows, 0)["chunks"], 1)
    ((group, stage),) = rank_plan.rounds
    found = ByteModel(shape.spec(torch.float32)).moments(group, stage, tiles_loss=False).most
    states = shape.spec(torch.float32).states
    # three boundaries and a gradient in one layer
    boundary = states.boundary_bytes(4, 4)
    assert boundary == 4 * 4 * 16 * 16 + 4 * 3 * 128
    keys_and_values = 2 * 2 * 16 * (512 + 384) * 4
    assert result.memory.kv_book == keys_and_values + 4 * boundary == found.book
    # the report of the step counts layers of both kinds under a policy, and none that keeps everything
    for policies in ((), (offloading(), offloading())):
        step = same_policy(plan, *policies)
        assert predicted_memory(step, 0, shape.spec(torch.float32)).saved == len(policies) * 512 * 64 * 4


def check_sent(ranks: Any, case: ModelCase, shape: GroupShape, lengths: list[int]) -> None:
    """Asserts that ranks together send what the planner counts."""
    plan = plan_of([[(shape.degree, tuple(range(len(lengths))))]], lengths, shape.degree, shape.ulysses)
    model = model_spec(build_model(case))
    cluster = ClusterSpec(shape.degree, shape.degree, GENERIC_CPU)
    each = [
        mean_traffic(model, cluster, shape, sum(lengths), is_backward, num_documents=len(lengths)).num_bytes
        for is_backward in (False, True)
    ]
    found = ranks(shape.degree).run(sent_on_rank, case, plan, random_rows(lengths))
    expected = [shape.degree * each[0], shape.degree * sum(each)]
    assert [sum(one) for one in zip(*found, strict=True)] == pytest.approx(expected, rel=1e-12)


KIMI, BAMBA, LFM = ModelCase("kimi_linear"), ModelCase("bamba", num_layers=4), ModelCase("lfm3", num_layers=4)
SENDING = [(QWEN, torch.float64), *((case, torch.bfloat16) for case in (QWEN, KIMI, BAMBA, LFM))]


@pytest.mark.parametrize("case,dtype", SENDING, ids=lambda value: getattr(value, "family", str(value)))
def test_ranks_send_what_the_planner_counts(ranks, case: ModelCase, dtype: torch.dtype) -> None:
    # ranks have equal heads and tokens; only the first sends the tokens before the second's
    check_sent(ranks, replace(case, dtype=dtype), GroupShape(2, 2), [32, 16])


def test_a_scan_that_finds_what_an_earlier_state_adds_saves_what_is_counted() -> None:
    states = HybridShape().spec(torch.float32).states
    num_tokens, rule = 1024, inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    inputs = [torch.randn(1, num_tokens, heads, 16) for heads in (2, 2, 4)]
    inputs += [-torch.rand(1, num_tokens, 4), torch.rand(1, num_tokens, 4)]
    leaves = [x.requires_grad_() for x in inputs]

    def scan(mine: Any, state: Any) -> Any:
        q, k, v, decay, strength = mine
        return rule(q, k, v, g=decay, beta=strength, initial_state=state, output_final_state=True)

    def passed() -> Any:
        wide, first = DeltaRule().widened(leaves)
        effect = DeltaRule().effect(leaves, (), *scan(wide, first))
        return effect.output(torch.randn(1, 4, 16, 16, requires_grad=True)), effect.carry

    def saved(run: Any) -> int:
        storages = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            # kept alive, so that no storage takes the place of another
            result = run()
        assert result is not None
        return sum(storage.nbytes() for storage in storages.values())

    added = saved(passed) - saved(lambda: scan(leaves, None))
    assert 0.8 * added <= 4 * states.carry_wide * num_tokens <= 1.3 * added
    ring, lone = (Load(num_tokens, (num_tokens,), 3, num_blocks=blocks, is_shared=blocks > 1) for blocks in (2, 1))
    model = ByteModel(HybridShape().spec(torch.float32))
    # in two layers of three
    assert model.chunk(ring).device - model.chunk(lone).device == 2 * 4 * states.carry_wide * num_tokens


@pytest.mark.parametrize("shape", [GroupShape(4), GroupShape(4, 2)], ids=["ring", "hybrid"])
def test_ranks_that_pass_states_on_send_what_the_planner_counts(ranks, shape: GroupShape) -> None:
    # states travel in fp32, for every document
    check_sent(ranks, replace(QWEN, dtype=torch.bfloat16), shape, [64, 32])


def test_states_of_mamba_2_are_passed_on_as_the_planner_counts(ranks) -> None:
    check_sent(ranks, replace(BAMBA, dtype=torch.bfloat16), GroupShape(2), [64])


def test_more_ranks_than_heads_send_what_the_planner_counts(ranks) -> None:
    check_sent(ranks, ModelCase("qwen3_5_few", dtype=torch.bfloat16), GroupShape(4, 4), [64])
