"""The parity self-test: planted bugs stop a run by name, sound models pass, and nothing of it is left in the run."""

from __future__ import annotations

import gc
import io
import logging
import random
import re
import tempfile
import weakref
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from helpers.measures.class_sweep import patched, self_tested
from helpers.measures.planted import plant, replaced
from helpers.models.any_model import build_any
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import newest
from helpers.ranks.lent_steps import BUGS
from helpers.trainers.stock_runs import make_stock_trainer
from helpers.trainers.trainer_runs import make_trainer, train_on_rank, training_arguments
from transformers import Trainer

from hf_longctx import LongContextCallback, LongContextConfig, LongContextTrainer
from hf_longctx.families.family import Modules
from hf_longctx.hf.models import attention, facts
from hf_longctx.hf.self_test import check
from hf_longctx.hf.self_test import reduced_copy as copies
from hf_longctx.hf.self_test.reduced_copy import ChosenLayers, reduced_copy
from hf_longctx.plan.core.types import LayerRange

ROWS = random_rows([61, 13, 5, 8, 21, 34, 3, 9] * 3)
ON = {"self_test": True, "tokens_per_rank": 96}
LORA = (("r", 2), ("lora_dropout", 0.1), ("target_modules", ["q_proj", "v_proj"]))
ON_EXPERTS = (("r", 2), ("target_modules", ["q_proj"]), ("target_parameters", ["experts.gate_up_proj", "experts.down_proj"]))
PACKED = ModelCase("qwen3_moe", lora=ON_EXPERTS, packed="nf4")
MIXED = ModelCase("qwen3_window")


def start(case: ModelCase, config: dict[str, Any], arguments: dict[str, Any], bug: str, zero: str = "") -> str:
    """Messages of a trainer at start on this rank, or the error that keeps it from starting."""
    import torch.distributed as dist

    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    planted = replaced(*BUGS[bug]) if bug in BUGS else plant(bug, rank, num_ranks)
    with tempfile.TemporaryDirectory() as folder, planted:
        try:
            trainer = make_trainer(case, ROWS, folder, {**ON, **config}, arguments)
        except ValueError as error:
            return str(error)
        return trainer.longctx_run.report.opening


# bug -> (settings, what is said of it)
PLANTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "positions of the shard": ({}, ["- ulysses of 2: hidden states: layer 0 (full_attention) is the first that differs"]),
    "windows ignored": (
        {},
        [
            "- ulysses of 2: window: layer 1 (sliding_attention, window 6) differs by",
            "but only from token 6 of a document on",
            "- ring of 2: window: layer 1",
            "- slices, ulysses of 2, recomputed: window: layer 1",
        ],
    ),
    "neighbour's keys": (
        {},
        [
            "- ulysses of 2: hidden states: layer 0 (full_attention) is the first that differs",
            "plans that passed (ring of 2; slices, ring of 2, recomputed) may be used alone",
        ],
    ),
    "neighbour's keys in rings": (
        {},
        [
            "- ring of 2: hidden states: layer 0 (full_attention) is the first that differs",
            "- ring of 2: token 0: the last token's gradient at token 0 of its document differs",
            "plans that passed (ulysses of 2; slices, ulysses of 2, heads in parts; slices, ulysses of 2, recomputed; "
            "ulysses of 2, attention in 2 pieces of heads)",
        ],
    ),
    "gradients of keys and values dropped": (
        {},
        [
            "- slices, ulysses of 2, recomputed: gradients: layer 1 (sliding_attention, window 6) gets the right gradient of its "
            "output, but its input's gradient differs by",
            "plans that passed (ulysses of 2; ring of 2; ulysses of 2, attention in 2 pieces of heads)",
        ],
    ),
    "loss normalised per rank": ({}, ["- ulysses of 2: loss: differs by", "although all hidden states agree, so the labels or"]),
    "documents leak": (
        {"method": "ulysses", "activations": "keep"},
        [
            "- ulysses of 2: hidden states: layer 0 (full_attention) is the first that differs",
            "- ulysses of 2: documents: the loss of one document has a gradient at tokens of another, up to",
            "(limit 0e+00)",
        ],
    ),
    "gradients of one rank": ({}, ["- ulysses of 2: gradient per layer: of layer 0 (full_attention) differs by"]),
}


@pytest.mark.wide
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_stops_the_run_before_step_1(ranks, bug: str) -> None:
    config, said = PLANTED[bug]
    messages = ranks(2).run(start, MIXED, config, {}, bug)
    assert messages[0] == messages[1]
    assert messages[0].startswith("the parity self-test failed before step 1: under plans Qwen3ForCausalLM does not compute")
    for text in said:
        assert text in messages[0], messages[0]


@pytest.mark.wide
def test_codes_of_packed_experts_are_read_by_plans_alone(ranks) -> None:
    sound, wrong = (ranks(2).run(start, PACKED, {}, {}, bug)[0] for bug in ("", "codes of another expert"))
    assert "self-test passed in " in sound and EVERY_PLAN in sound
    assert "the parity self-test failed before step 1" in wrong and "- ulysses of 2: hidden states: layer 0" in wrong


@pytest.mark.wide
def test_dropout_that_depends_on_the_plan_stops_the_run_before_step_1(ranks) -> None:
    case = replace(MIXED, lora=LORA)
    message = ranks(2).run(start, case, {}, {}, "dropout by place in the row")[0]
    assert "- ulysses of 2: hidden states: layer 0 (full_attention) is the first that differs" in message


def start_with_dropped_weights(bugs: list[str]) -> list[str]:
    """Messages of a trainer at start on this rank for a model that drops attention weights, for each of these bugs."""
    return [start(ModelCase(dropout=0.2), {}, {}, bug) for bug in bugs]


@pytest.mark.wide
def test_masks_of_attention_weights_that_depend_on_the_plan_stop_the_run_before_step_1(ranks) -> None:
    bugs = ["", "weights dropped by the rank's own head", "weights dropped by place in the slice"]
    sound, by_head, by_place = ranks(2).run(start_with_dropped_weights, bugs)[0]
    assert "failed" not in sound and "self-test" in sound
    assert "- ulysses of 2: hidden states: layer 0 (full_attention) is the first that differs" in by_head
    assert "the parity self-test failed before step 1" in by_place


# bug in layers with a state along the sequence -> what is said of it
OF_STATES = {
    "states leak in the scan": ["- ulysses of 2: documents: the loss of one document has a gradient at tokens of another, up to"],
    "states of slices dropped": [
        "- slices, ulysses of 2, recomputed: hidden states: layer 0 (linear_attention) is the first that differs, by",
    ],
    "states of slices damped": [
        "- slices, ulysses of 2, recomputed: states: layer 0 (linear_attention) is the first whose state at the end of a slice "
        "differs, by 1.0e-02 (limit 5e-05)",
    ],
    "gradients of states dropped": [
        "- slices, ulysses of 2, recomputed: gradients: layer 0 (linear_attention) gets the right gradient of its output, but",
    ],
    "states of other ranks dropped": ["- ring of 2: hidden states: layer 0 (linear_attention) is the first that differs, by"],
}


def start_with_each(case: ModelCase, bugs: list[str]) -> list[str]:
    """Messages of a trainer at start on this rank, for each of these bugs."""
    return [start(case, {}, {}, bug) for bug in bugs]


@pytest.mark.wide
@newest
def test_planted_bugs_in_states_stop_the_run_before_step_1(ranks) -> None:
    case = ModelCase("qwen3_5", num_layers=4)
    sound, *messages = ranks(2).run(start_with_each, case, ["", *OF_STATES])[0]
    assert "self-test passed" in sound and "layers 0 (linear_attention), 3 (full_attention) of 4" in sound
    for message, said in zip(messages, OF_STATES.values(), strict=True):
        assert all(text in message for text in said), message


@newest
def test_planted_bugs_in_a_model_without_attention_are_noticed() -> None:
    for bug, said in (
        ("states leak in the scan", "- one rank: documents: the loss of one document has a gradient at tokens of another, up to"),
        ("states of slices dropped", "- slices, one rank, recomputed: hidden states: layer 0 (linear_attention) is the first"),
        ("gradients of states dropped", "- slices, one rank, recomputed: gradients: layer "),
    ):
        with plant(bug, 0, 1), pytest.raises(ValueError, match=re.escape(said)):
            self_tested(patched(build_any("MambaForCausalLM")))


LENDING = {"stages": 2, "lend_stages": True}


@pytest.mark.daily("lenders' gradients of keys and values are left out")
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_lending_stops_the_run_before_step_1(ranks, bug: str) -> None:
    messages = ranks(2).run(start, replace(MIXED, lora=LORA), LENDING, {}, bug)
    assert messages[0] == messages[1]
    assert messages[0].startswith("the parity self-test failed before step 1: under plans Qwen3ForCausalLM does not compute")
    assert "- slices, one rank, lent stages: " in messages[0]


# name -> (ranks, model, settings, arguments, what is said of it)
# plans of two ranks that may have slices and pieces of heads
EVERY_PLAN = (
    "plans (ulysses of 2; ring of 2; slices, ulysses of 2, heads in parts; slices, ulysses of 2, recomputed; slices, ring of 2, "
    "recomputed; ulysses of 2, attention in 2 pieces of heads)"
)
PASSING: dict[str, tuple[int, ModelCase, dict[str, Any], dict[str, Any], list[str]]] = {
    "one rank, windows in some layers": (
        1,
        ModelCase("gemma3"),
        {},
        {},
        ["plans (one rank; slices, one rank, recomputed)", "layers 0 (sliding_attention, window 6), 1 (full_attention) of 2"],
    ),
    "a kind of layers once more than needed, tied, sharded": (
        2,
        ModelCase("llama", num_layers=4, tied=True),
        {"parameters": "sharded"},
        {},
        [
            EVERY_PLAN,
            "layers 0 (full_attention), 3 (full_attention) of 4",
        ],
    ),
    "adapters, gathered": (2, replace(MIXED, lora=LORA), {"parameters": "gathered_per_round"}, {}, ["layers 0 (full"]),
    "experts spread over ranks": (
        2,
        ModelCase("qwen3_moe", balance=0.5),
        {"parameters": "sharded", "expert_ranks": 2},
        {},
        [EVERY_PLAN],
    ),
    "autocast": (
        2,
        replace(MIXED, dtype=torch.float32),
        {"activations": "keep"},
        {"bf16": True},
        ["plans (ulysses of 2; ring of 2; ulysses of 2, heads in parts)", "104 tokens in float64 and the run's precision"],
    ),
    "bf16 weights": (1, replace(MIXED, dtype=torch.bfloat16), {}, {}, ["in float64 and the run's precision"]),
    "stages": (
        2,
        replace(MIXED, tied=True),
        {"stages": 2},
        {},
        ["plans (one rank; slices, one rank, recomputed)", "layers 0 (full_attention), 1 (sliding_attention, window 6) of 2"],
    ),
    "lent stages": (
        2,
        replace(MIXED, lora=LORA, tied=True),
        LENDING,
        {},
        ["plans (one rank; slices, one rank, recomputed; slices, one rank, lent stages)"],
    ),
    "lent stages of two ranks": (
        4,
        replace(MIXED, lora=LORA, num_layers=4),
        {**LENDING, "activations": "keep"},
        {},
        ["plans (ulysses of 2; slices, ulysses of 2; slices, ulysses of 2, lent stages)"],
    ),
    "dynamic frequencies": (
        2,
        ModelCase("llama", rope_type="dynamic", dtype=torch.float32),
        {"max_length": 61},
        {},
        [
            EVERY_PLAN,
            "rotary frequencies already scaled beyond 12 tokens, 46 tokens in float64 and the run's precision",
        ],
    ),
    "longrope in stages": (
        2,
        ModelCase("phi3", rope_type="longrope_far"),
        {"stages": 2},
        {},
        ["plans (one rank; slices, one rank, recomputed)", "rotary frequencies already scaled beyond 32 tokens"],
    ),
}


@pytest.mark.daily("dynamic frequencies")
@pytest.mark.parametrize("name", PASSING)
def test_sound_models_pass_and_say_what_was_covered(ranks, name: str) -> None:
    num_ranks, case, config, arguments, said = PASSING[name]
    for opening in ranks(num_ranks).run(start, case, config, arguments, ""):
        assert "self-test passed in " in opening, opening
        line = opening[opening.index("self-test passed in ") :]
        for text in said:
            assert text in line, line
        assert float(line.split("largest error ")[1].split()[0]) <= 1e-6


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope_far"])
def test_frequencies_by_the_length_of_a_slice_stop_the_run(rope_type: str) -> None:
    case = ModelCase("llama" if rope_type == "dynamic" else "phi3", rope_type=rope_type)
    opening = start(case, {"max_length": 61}, {}, "frequencies of the slice")
    assert "- slices, one rank, recomputed: hidden states: layer 0 (" in opening
    assert "plans that passed (one rank" in opening


def traces(parameters: str, is_on: bool) -> tuple[list[torch.Tensor], bool]:
    """Random states and model after a start, and whether weights have no gradient."""
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(MIXED, ROWS, folder, {**ON, "self_test": is_on, "parameters": parameters}, {})
    left = [torch.rand(3), torch.from_numpy(np.random.rand(3)), torch.tensor(random.random())]
    left += [tensor.clone() for tensor in trainer.model.state_dict().values()]
    left += [tensor.clone() for tensor in trainer.model.buffers()]
    left.append(torch.tensor([module.training for module in trainer.model.modules()]))
    num_hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in trainer.model.modules())
    left.append(torch.tensor([num_hooks, trainer.model.config.sliding_window]))
    return left, all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.wide
@pytest.mark.parametrize("parameters", ["replicated", "sharded"])
def test_nothing_of_it_is_left_in_the_run(ranks, parameters: str) -> None:
    with_test, without = (ranks(2).run(traces, parameters, is_on) for is_on in (True, False))
    for (left, has_none), (expected, _) in zip(with_test, without, strict=True):
        assert has_none
        assert all(torch.equal(a, b) for a, b in zip(left, expected, strict=True))


@pytest.mark.wide
def test_the_copies_are_gone_before_step_1(monkeypatch) -> None:
    copied = []

    def watched(*args: Any) -> copies.ReducedCopy:
        reduced = reduced_copy(*args)
        copied.extend(weakref.ref(module) for module in reduced.model.modules())
        return reduced

    monkeypatch.setattr(check, "reduced_copy", watched)
    gc.disable()
    try:
        assert "self-test passed" in start(replace(MIXED, dtype=torch.float32), {}, {}, "")
        assert copied and not [each for each in copied if each() is not None]
    finally:
        gc.enable()


def test_experts_are_found_by_their_modules() -> None:
    with torch.device("meta"):
        found = [check._has_routers(build_any(f"{name}ForCausalLM", is_random=False)) for name in ("AriaText", "Dbrx", "Llama")]
    assert found == [True, True, False]


@pytest.mark.wide
def test_weights_after_three_steps_are_the_same_bits(ranks) -> None:
    runs = [
        ranks(2).run(
            train_on_rank, MIXED, ROWS, {**ON, "self_test": is_on, "solver": "static", "static_degree": 2}, {"max_steps": 3}
        )
        for is_on in (True, False)
    ]
    for (losses, _, weights), (expected_losses, _, expected) in zip(*runs, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.daily("1e-09-self-test left out: a copy of a layer of every kind takes")
@pytest.mark.parametrize("gib,said", [(1e-9, "self-test left out: a copy of a layer of every kind takes"), (1.0, "in float64")])
def test_short_memory_means_less_precision_then_none(monkeypatch, caplog, gib: float, said: str) -> None:
    monkeypatch.setattr(check, "_free_bytes", lambda *args: int(gib * 2**30))
    with caplog.at_level(logging.WARNING):
        opening = start(MIXED, {}, {}, "")
    assert said in opening + caplog.text
    assert ("self-test passed" in opening) == (gib == 1.0)


@pytest.mark.wide
def test_without_room_for_fp64_it_is_fp32_and_still_notices(monkeypatch) -> None:
    elements = check.num_elements(ChosenLayers.of(build_model(MIXED), [0]))
    monkeypatch.setattr(check, "_free_bytes", lambda *args: 24 * elements)
    opening = start(MIXED, {}, {}, "")
    assert "tokens in float32" in opening and "float64" not in opening
    assert "window: layer 1 (sliding_attention, window 6)" in start(MIXED, {}, {}, "windows ignored")


@pytest.mark.wide
def test_windows_too_long_to_be_filled_are_shortened_in_the_copy_alone() -> None:
    model = build_model(ModelCase("mistral_window"))
    model.config.sliding_window = 300
    with tempfile.TemporaryDirectory() as folder:
        trainer = LongContextTrainer(
            model=model,
            args=training_arguments(folder),
            train_dataset=datasets.Dataset.from_list(ROWS),
            longctx_config=LongContextConfig(),
        )
    assert "layers 0 (sliding_attention, window 170), 1 (sliding_attention, window 170) of 2, windows shortened" in (
        trainer.longctx_run.report.opening
    )
    assert model.config.sliding_window == 300


@pytest.mark.wide
@pytest.mark.parametrize(
    "bug,said",
    [
        ("", "self-test passed"),
        ("windows ignored", "one rank: window: layer 0 (chunked_attention, chunks of 170) differs by"),
        (
            "queries scaled by their place in the row",
            "one rank: hidden states: layer 2 (full_attention) is the first that differs",
        ),
    ],
)
def test_chunks_and_queries_scaled_by_position_are_noticed_at_the_sizes_of_real_configs(bug: str, said: str) -> None:
    model = patched(build_any("Llama4ForCausalLM"))
    model.config.attention_chunk_size = 8192
    model.config.max_position_embeddings = 10**5
    for owner in (model.config, *(layer.self_attn for layer in model.model.layers)):
        owner.floor_scale = 8192
    with plant(bug, 0, 1):
        try:
            found = self_tested(model)
        except ValueError as error:
            found = str(error)
    assert said in found, found
    assert (model.config.attention_chunk_size, model.model.layers[0].self_attn.floor_scale) == (8192, 8192)


# its masks have no window either, whatever its config says
@pytest.mark.daily("True-layer 0 (full_attention) is the first")
@newest
@pytest.mark.parametrize("is_applied,said", [(False, "self-test passed"), (True, "layer 0 (full_attention) is the first")])
def test_a_window_that_transformers_does_not_use_is_none(monkeypatch, is_applied: bool, said: str) -> None:
    if is_applied:
        monkeypatch.setattr(attention, "MODULES", Modules(window_of_config=("MoshiAttention",)))
    try:
        found = self_tested(patched(build_any("MoshiForCausalLM")))
    except ValueError as error:
        found = str(error)
    assert said in found, found


def test_layers_that_differ_in_any_setting_are_all_run() -> None:
    model = build_model(ModelCase("llama", num_layers=5))
    model.model.layers[2].self_attn.scaling = 0.5
    model.model.layers[3].mlp.up_proj.weight.requires_grad_(False)
    reduced = reduced_copy(ChosenLayers.of(model, [0]), 64, torch.float64)
    assert list(reduced.layers) == [0, 2, 3]
    assert reduced.layers[2].self_attn.scaling == 0.5
    # a layer of every stage
    assert list(reduced_copy(ChosenLayers.of(model, [0, 1, 4]), 64, torch.float64).layers) == [0, 2, 3, 4]
    assert list(reduced_copy(ChosenLayers.of(build_model(ModelCase()), [0]), 64, None).layers) == [0, 1]


def mean_of_the_row(module: Any, args: Any, output: Any) -> Any:
    """A user's hook that mixes the tokens of a row, and so of all documents that a plan packs into it."""
    return output + output.mean(dim=1, keepdim=True)


def of_one_token(module: Any, args: Any, output: Any) -> Any:
    return output * 1.5


def opening_of(model: Any, **config: Any) -> str:
    """First line of a run of `model` with the default self-test, or the reason why it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = LongContextTrainer(
                model=model,
                args=training_arguments(folder),
                train_dataset=datasets.Dataset.from_list(ROWS),
                longctx_config=LongContextConfig(**config),
            )
        except ValueError as error:
            return str(error)
    return trainer.longctx_run.report.opening


@pytest.mark.wide
@pytest.mark.parametrize("where", ["layers.3", "layers.3.mlp", "layers.2.self_attn.o_proj", ""])
def test_hooks_are_run_wherever_they_are(where: str) -> None:
    for hook, said in ((mean_of_the_row, "the parity self-test failed"), (of_one_token, "self-test passed")):
        model = build_model(ModelCase("llama", num_layers=5))
        module = model.model.get_submodule(where) if where else model.model.norm
        handle = module.register_forward_hook(hook)
        assert said in opening_of(model), (where, hook)
        handle.remove()
        assert "layers 0 (full_attention), 4" in opening_of(model)


def test_a_method_replaced_in_one_layer_is_run() -> None:
    model = build_model(ModelCase("llama", num_layers=5))
    mlp, own = model.model.layers[2].mlp, model.model.layers[2].mlp.forward
    mlp.forward = lambda x: own(x) + own(x).mean(dim=1, keepdim=True)
    assert list(reduced_copy(ChosenLayers.of(model, [0]), 64, torch.float64).layers) == [0, 2]


def test_one_hook_on_all_layers_adds_none() -> None:
    model = build_model(ModelCase("llama", num_layers=5))
    for layer in model.model.layers:
        layer.register_forward_hook(of_one_token)
    assert list(reduced_copy(ChosenLayers.of(model, [0]), 64, torch.float64).layers) == [0, 4]


@pytest.mark.wide
def test_hooks_that_cannot_be_tested_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(check, "_free_bytes", lambda *args: 1)
    model = build_model(ModelCase("llama", num_layers=3))
    # transformers' own hook, as PEFT registers it for four-bit weights
    model.enable_input_require_grads()
    assert "everything is kept" in opening_of(model)
    model.model.layers[1].register_forward_hook(of_one_token)
    refused = "the model has forward or backward hooks, or a module whose forward was replaced, which only the self-test checks"
    assert refused in opening_of(model)
    assert "everything is kept" in opening_of(model, self_test=False)
    wrapped = build_model(ModelCase("llama", num_layers=3))
    mlp, own = wrapped.model.layers[1].mlp, wrapped.model.layers[1].mlp.forward
    mlp.forward = lambda x: own(x)
    assert refused in opening_of(wrapped)


@pytest.mark.parametrize("tied", [False, True])
def test_the_copy_knows_few_token_ids_and_shares_nothing(monkeypatch, tied: bool) -> None:
    monkeypatch.setattr(copies, "NUM_TOKEN_IDS", 16)
    model = build_model(ModelCase("llama", num_layers=4, tied=tied, dtype=torch.float32))
    model.model.layers[0].self_attn.q_proj.weight.data.zero_()
    reduced = reduced_copy(ChosenLayers.of(model, [0]), 64, torch.float64)
    assert reduced.num_token_ids == 16
    assert reduced.embedding.weight.shape == reduced.model.lm_head.weight.shape == (16, 32)
    assert (reduced.embedding.weight is reduced.model.lm_head.weight) == tied
    assert {p.dtype for p in reduced.model.parameters()} == {torch.float64}
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in reduced.model.parameters()}
    # weights that are all zero would hide errors in their inputs
    assert reduced.layers[0].self_attn.q_proj.weight.any()
    assert not model.model.layers[0].self_attn.q_proj.weight.any()
    elements = copies.num_elements(ChosenLayers.of(model, [0]))
    assert elements == sum(p.numel() for p in reduced.model.parameters())


def run_stock(is_attached: bool, bug: str) -> tuple[str, str, bool]:
    """Output or error of a stock trainer at start under the callback, and whether it is stock again afterwards."""
    import torch.distributed as dist

    callback = LongContextCallback(LongContextConfig(timeline_steps=0, tokens_per_rank=96))
    error, printed = "", io.StringIO()
    with tempfile.TemporaryDirectory() as folder, plant(bug, dist.get_rank(), dist.get_world_size()), redirect_stdout(printed):
        callbacks = [] if is_attached else [callback]
        trainer = make_stock_trainer(MIXED, ROWS, folder, {"max_steps": 1}, callbacks=callbacks)
        callbacks = list(trainer.callback_handler.callbacks)
        try:
            if is_attached:
                callback.attach(trainer)
            trainer.train()
        except ValueError as problem:
            error = str(problem)
            callback.detach()
    is_stock = trainer.callback_handler.callbacks == callbacks
    is_stock = is_stock and type(trainer) is Trainer and trainer.model.config._attn_implementation == "sdpa"
    return error, printed.getvalue(), is_stock


@pytest.mark.wide
@pytest.mark.quick("True")
@pytest.mark.parametrize("is_attached", [True, False])
def test_callbacks_run_it_too(ranks, is_attached: bool) -> None:
    passed = ranks(2).run(run_stock, is_attached, "")
    assert "self-test passed" in passed[0][1]
    for error, _, is_stock in passed:
        assert not error and is_stock
    for error, _, is_stock in ranks(2).run(run_stock, is_attached, "windows ignored"):
        assert "ulysses of 2: window: layer 1 (sliding_attention, window 6) differs" in error
        assert is_stock


def test_ranks_that_loaded_their_own_stage_are_told_that_it_is_left_out(monkeypatch, caplog) -> None:
    monkeypatch.setattr(facts, "loaded_ranges", lambda model: model and ((LayerRange(0, model.config.num_hidden_layers),),))
    with caplog.at_level(logging.WARNING):
        opening = start(MIXED, {}, {}, "")
    assert "self-test left out: every rank loaded its own pipeline stage" in caplog.text
    assert "self-test" not in opening
