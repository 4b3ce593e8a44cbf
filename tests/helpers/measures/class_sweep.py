"""Compares any model class of transformers under plans with plain eager Hugging Face: on one rank, in stages, on two ranks.

A "road" is one way of running the model under a plan, for example packed, in slices or in a ring.
"""

from __future__ import annotations

import copy
import functools
import gc
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import transformers
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import random_rows, reference_step
from helpers.models.staged_models import even_ranges
from helpers.models.tiny_models import adapted
from helpers.models.versions import completed
from helpers.plans.layouts import plan_of
from helpers.plans.policies import replayed
from helpers.plans.sliced_plans import sliced_plan
from helpers.ranks.rank_pool import RankPool
from helpers.ranks.rank_steps import group_pool, mesh, rank_inputs, whole
from torch import Tensor
from transformers import TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.cutting import cut_model, stage_model, stage_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.logits import head_problem, logit_change
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.models.states import mixers_of
from hf_longctx.hf.models.towers import num_text_layers, text_part, tower_parameters
from hf_longctx.hf.rules.arguments import setup_problems
from hf_longctx.hf.self_test.check import SelfTest
from hf_longctx.hf.self_test.specimen import RunPlace
from hf_longctx.hf.start.setup import choose_setup
from hf_longctx.plan.core.types import ActivationPolicy, LayerRange, MicroBatch, StepPlan
from hf_longctx.runtime.activations.engine import ActivationEngine, LayerModules
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.core.loss import step_loss, summed_cross_entropy
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.sharded import shard_model
from hf_longctx.runtime.process_groups import GroupPool

ROUNDING = 1e-13
CPU = torch.device("cpu")
# one document is far longer than windows and chunks, one has a single token
LENGTHS = [30, 7, 17, 1]
WHOLE = [[(number, 0, length) for number, length in enumerate(LENGTHS)]]
SLICES = [[(0, 0, 9)], [(0, 9, 13)], [(0, 13, 30), (1, 0, 7), (3, 0, 1)], [(2, 0, 17)]]
TILE_TOKENS = 16
Step = tuple[float, dict[str, Tensor]]
# settings of a `LoraConfig`; without any, all weights are trained
Lora = tuple[tuple[str, Any], ...]


ROADS = ("packed", "slices", "ulysses", "ring", "recomputed", "sharded", "stages")
# ways of running a model for which a tested class may be refused by name
OPTIONAL = ("ring", "recomputed", "sharded", "stages")


class Refused(ValueError):
    """A model that the package refuses before any work starts; the message is its reason."""


@dataclass
class Outcome:
    """Result of a class: for each road the worst relative error of loss and gradients, or the reason of a refusal.

    self_test: verdict of the parity self-test on one rank.
    """

    errors: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    self_test: str = ""

    def run(self, road: str, step: Callable[[], Step], expected: Step) -> None:
        """Runs one road. A ValueError that the package raises on an optional road is a refusal; every other error is raised."""
        try:
            self.errors[road] = worst(step(), expected)
        except ValueError as error:
            is_ours = isinstance(error, Refused) or "/hf_longctx/" in traceback.extract_tb(error.__traceback__)[-1].filename
            if road not in OPTIONAL or not is_ours:
                raise
            self.refusals[road] = str(error)


def worst(found: Step, expected: Step) -> float:
    """The largest relative error of loss and gradients; infinite if other parameters have gradients than expected.

    The error of a gradient that is only rounding (such as that of the keys' bias without rotary embedding) is taken relative to
    the largest gradient of all.
    """
    if found[1].keys() != expected[1].keys():
        return float("inf")
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    errors = [abs(found[0] - expected[0]) / max(abs(expected[0]), 1.0)]
    for name, gradient in expected[1].items():
        scale = float(gradient.abs().max())
        error = float((found[1][name] - gradient).abs().max())
        errors.append(error / (scale if scale > ROUNDING * largest else largest))
    return max(errors)


def build(name: str, lora: Lora = ()) -> Any:
    """The tiny model of a class, with adapters if there are settings for them."""
    model = build_any(name)
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in lora}
    return adapted(model, **settings).train() if lora else model


@functools.lru_cache(maxsize=1)
def _original(name: str, lora: Lora) -> Any:
    getattr(transformers, name)
    # imported modules stay for good; the collection that ends a self-test would go through all of them
    gc.freeze()
    return build(name, lora)


def model_in_wide_floats(name: str, lora: Lora) -> Any:
    """A new model of a class, built within `wide_floats`, which the caller must have entered."""
    # a copy takes a tenth of the time
    return copy.deepcopy(_original(name, lora))


def attention_adapters(name: str) -> Lora:
    """Settings of adapters on all linear modules in the attention of a class, or in its mixers if it has no attention.

    Leaves out names that PEFT takes to mean experts or layers, and matrices whose weights a mixer reads by itself.
    """
    # names of the text model, which layers of towers may have too
    text = text_part(build_any(name, is_random=False))
    blocks = [module for module in text.modules() if any(word in type(module).__name__ for word in ("Attention", "MLA"))]
    left_out = {"gate_proj"} if blocks else {"dt_proj", "out_proj"}
    blocks = blocks or list(mixers_of(text).values())
    # PEFT takes grouped ones for plain ones
    linears = {
        key
        for block in blocks
        for key, each in block.named_modules()
        if isinstance(each, torch.nn.Linear) and "Grouped" not in type(each).__name__
    }
    # numbers of lists are names of layers, too
    found = {name for name in (key.split(".")[-1] for key in linears) if not name.isdigit()} - left_out
    return (("r", 2), ("lora_alpha", 8), ("target_modules", tuple(sorted(found))))


def rows() -> list[dict[str, list[int]]]:
    return random_rows(LENGTHS)


def num_labels() -> int:
    return sum(label != -100 for row in rows() for label in row["labels"][1:])


def reference(name: str, lora: Lora = ()) -> Step:
    """Loss and gradients of plain Hugging Face, eager, one document at a time."""
    with wide_floats():
        model = model_in_wide_floats(name, lora)
        completed(base_of(model))
        loss, gradients = reference_step(model, rows())
    # Gemma 3n runs parts of its towers on rows of text, and then takes nothing of what they give
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    idle = {names[id(parameter)] for parameter in tower_parameters(model)}
    return loss, {key: gradient for key, gradient in gradients.items() if key not in idle or gradient.any()}


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def recomputing_plan(modules: Sequence[LayerModules]) -> StepPlan:
    """Plan of slices in which every layer is recomputed, except half or all of its attention and half or none of its MLP.

    Of an MLP that policies cannot run alone, all is recomputed.
    """
    plan = sliced_plan(LENGTHS, SLICES)
    (group,) = plan.micro_batches[0].groups
    layers = tuple(
        replayed(half := 0.5 * (place % 2 == 0), mlp=1.0 if each.whole_mlp else 1 - half) for place, each in enumerate(modules)
    )
    num_layers = len(layers)
    policies = tuple(ActivationPolicy(chunk.index, 0, layers, TILE_TOKENS) for chunk in group.chunks)
    stage = replace(group.stages[0], layer_ranges=(LayerRange(0, num_layers),), activations=policies)
    return replace(plan, micro_batches=(MicroBatch((replace(group, stages=(stage,)),)),))


def lone_step(model: Any, plan: StepPlan, engine: ActivationEngine | None = None) -> Step:
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU)
    result = executor.run(plan.for_rank(0), rank_inputs(plan, rows(), 0)["chunks"], num_labels(), engine=engine)
    return float(result.loss), gradients_of(model)


def patched(model: Any) -> Any:
    """Lets a model run under plans, and returns it."""
    patch_model(base_of(model))
    return model


def recomputed_step(model: Any) -> Step:
    """Runs slices whose layers are recomputed, in tiles; logits are whole only if the class changes them after the head."""
    if (problem := activation_problem(base_of(model))) != head_problem(model):
        raise Refused(problem)
    layers = layer_modules(model)
    plan = recomputing_plan(layers)
    head = None if problem else OutputHead(output_head(model), change=logit_change(model))
    return lone_step(model, plan, ActivationEngine(layers, head=head))


def staged_step(whole_model: Any) -> Step:
    """Runs one packed row through two stages, one after the other in this process."""
    if problems := stage_problems(whole_model):
        raise Refused(problems[0])
    num_layers = whole_model.config.get_text_config().num_hidden_layers
    ranges = even_ranges(2, 1, num_layers)
    plan = sliced_plan(LENGTHS, WHOLE)
    (group,) = plan.micro_batches[0].groups
    (inputs,) = rank_inputs(plan, rows(), 0)["chunks"][0]
    pool, hidden, gradients = GroupPool((1,), 1.0), None, {}
    models = []
    for stage in range(2):
        own = copy.deepcopy(whole_model)
        cut_model(own, ranges, stage)
        models.append(own)
        context = pool.context(group, group.chunks[0])
        hidden = stage_model(own, ranges, stage).forward(0, inputs, hidden, torch.ones(1, 1, 1, 1, dtype=torch.bool), context)
    loss = step_loss(summed_cross_entropy(hidden, inputs.shift_labels), num_labels())
    loss.backward()
    for own in models:
        for key, gradient in gradients_of(own).items():
            gradients[key] = gradients[key] + gradient if key in gradients else gradient
    # the last stage keeps the weight of a tied head as its own
    tied = whole_model.get_input_embeddings().weight is output_head(whole_model).weight
    if tied:
        names = {id(p): n for n, p in whole_model.named_parameters()}
        embedding = names[id(whole_model.get_input_embeddings().weight)]
        # under adapters it is frozen and has no gradient
        for head in [key for key in gradients if key not in names.values()]:
            gradients[embedding] = gradients[embedding] + gradients.pop(head)
    return float(loss), gradients


def self_tested(model: Any) -> str:
    """Verdict of the parity self-test that a run on one rank starts with, on a patched model; "left out" if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, use_cpu=True, report_to=[])
    setup = choose_setup(LongContextConfig(tokens_per_rank=96), ModelFacts.of(model), args, (1,), None)
    test = SelfTest.of(ModelFacts.of(model), setup, CPU, False, None)
    return "left out" if test is None else test.run(RunPlace(GroupPool((1,), 1.0), None, CPU, False, lambda count: count))


def local_outcome(name: str, lora: Lora, expected: Step, is_brief: bool = False) -> Outcome:
    """Outcome of the roads that need one process. expected: result of `reference`.

    is_brief: leaves the self-test out, and a packed row and slices without stages and recomputation, unless these are refused.
    """
    outcome = Outcome()
    model = build(name, lora)
    if problems := setup_problems(ModelFacts.of(model), None, LongContextConfig(), 2, (1, 2)):
        raise AssertionError(f"{name} is refused: {problems}")
    assert model_spec(model).num_layers == num_text_layers(model)

    def new() -> Any:
        return patched(model_in_wide_floats(name, lora))

    with wide_floats():
        outcome.run("recomputed", lambda: recomputed_step(new()), expected)
        outcome.run("stages", lambda: staged_step(new()), expected)
        for road, richer, chunks in (("packed", "stages", WHOLE), ("slices", "recomputed", SLICES)):
            if not is_brief or richer in outcome.refusals:
                outcome.run(road, partial(lone_step, new(), sliced_plan(LENGTHS, chunks)), expected)
    if not is_brief:
        outcome.self_test = self_tested(patched(model))
    return outcome


def group_step(model: Any, ulysses: int, is_sharded: bool, num_ranks: int = 2) -> Step:
    pool = group_pool()
    groups = [[(num_ranks, tuple(range(len(LENGTHS))))]]
    plan = plan_of(groups, LENGTHS, num_ranks, ulysses=ulysses, parameters="sharded" if is_sharded else "replicated")
    if is_sharded:
        shard_model(model, tuple(base_of(model)._no_split_modules or ()), mesh(num_ranks))
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, CPU)
    result = executor.run(plan.for_rank(pool.rank), rank_inputs(plan, rows(), pool.rank)["chunks"], num_labels())
    return float(result.loss), gradients_of(model)


def group_outcome(name: str, lora: Lora, loss: float, gradients: dict[str, Any]) -> Outcome:
    """Outcome of the roads that need two ranks; called on each of them. loss, gradients: result of `reference`, as arrays."""
    outcome, expected = Outcome(), (loss, {key: torch.from_numpy(gradient) for key, gradient in gradients.items()})

    def run(road: str, ulysses: int, is_sharded: bool) -> None:
        outcome.run(road, lambda: group_step(patched(model_in_wide_floats(name, lora)), ulysses, is_sharded), expected)

    with wide_floats():
        run("ulysses", 0, False)
        run("ring", 1, False)
        run("sharded", 0, True)
    return outcome


def sweep(name: str, pool: RankPool, lora: Lora = ()) -> Outcome:
    """Outcome of all roads of a class; the two ranks of `pool` run theirs while this process runs its own."""
    expected = reference(name, lora)
    # tensors would be sent as files in shared memory
    arrays = {key: gradient.numpy() for key, gradient in expected[1].items()}
    with ThreadPoolExecutor(1) as waiting:
        ranks = waiting.submit(pool.run, group_outcome, name, lora, expected[0], arrays)
        total = local_outcome(name, lora, expected)
        for outcome in ranks.result():
            total.refusals |= outcome.refusals
            total.errors |= {road: max(error, total.errors.get(road, 0.0)) for road, error in outcome.errors.items()}
    return total
