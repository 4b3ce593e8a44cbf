"""Mixtures of experts in the trainer: the trajectory of one plain process with one balance per optimizer step, and resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import balance_of, random_rows, reference_step
from helpers.models.tiny_models import MOE_FAMILIES, ModelCase, build_model
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import LossRecorder, StepRecorder, make_trainer, training_arguments
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer

from hf_longctx import LongContextCallback, LongContextConfig
from hf_longctx.hf.data.sampler import LengthAwareSampler
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.rules.arguments import placement_problems
from hf_longctx.hf.rules.models import model_problems
from hf_longctx.hf.rules.rule import Facts
from hf_longctx.plan.memory.byte_model import ByteModel

CASE = ModelCase("qwen3_moe", promoted=True, balance=0.5)
LENGTHS = [31, 7, 5, 19, 3, 12, 9, 26]
NUM_STEPS = 2
# how weights live: experts are gathered like other weights, or spread over the ranks
SPREAD = {"parameters": "sharded", "expert_ranks": 2}
PARAMETERS = {"replicated": {}, "sharded": {"parameters": "sharded"}, "spread": SPREAD}
# an optimizer with states, and clipping, which takes the norm over all ranks
CLIPPED = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch_fused", "max_grad_norm": 0.05}
ARGUMENTS = {
    **{"max_steps": NUM_STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "optim": "sgd"},
    **{"warmup_steps": 0, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0, "learning_rate": 0.1},
}


def train(rows: Any, folder: str, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[list[float], dict[str, Any], Any]:
    """Losses of optimizer steps, final weights and the log of a run on this rank; `resume` names a checkpoint."""
    resume = arguments.pop("resume", None)
    trainer = make_trainer(CASE, rows, folder, config, {**ARGUMENTS, **arguments})
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    return (
        [sum(recorder.losses[place : place + 2]) for place in range(0, len(recorder.losses), 2)],
        weights,
        trainer.state.log_history,
    )


def plain_run(rows: Any) -> tuple[list[float], dict[str, Any]]:
    model, losses = build_model(CASE), []
    sampler = LengthAwareSampler(torch.tensor(LENGTHS).numpy(), sequences_per_step=4, seed=3)
    for epoch in range(NUM_STEPS):
        sampler.set_epoch(epoch)
        losses.append(reference_step(model, [rows[i] for batch in sampler for i in batch])[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def first_balance(rows: Any) -> float:
    """Values of the first step, which has all rows."""
    model = build_model(CASE)
    with torch.no_grad():
        routed = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).router_logits for row in rows]
    return float(balance_of(routed, model.config))


def worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(float((found[name] - w).abs().max() / w.abs().max()) for name, w in expected.items())


@pytest.mark.wide("replicated", "sharded")
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_accumulated_plans_follow_one_plain_process(ranks, tmp_path: Path, parameters: str) -> None:
    rows = random_rows(LENGTHS)
    expected = plain_run(rows)
    config = {"tokens_per_rank": 32, **PARAMETERS[parameters]}
    for losses, weights, log in ranks(2).run(train, rows, str(tmp_path), config, {"logging_steps": 1}):
        logged = [(entry["aux_loss"], entry["router_load"]) for entry in log if "aux_loss" in entry]
        assert logged[0][0] == pytest.approx(first_balance(rows), rel=1e-10)
        assert len(logged) == NUM_STEPS and all(1 <= load <= 4 / 2 for _, load in logged)
        assert losses == pytest.approx(expected[0], rel=1e-10)
        assert worst(weights, expected[1]) <= 1e-10


def train_in_short_memory(rows: Any, folder: str) -> tuple[int, dict[str, Any]]:
    """Policies of all steps, and final weights, if a device keeps everything of 20 tokens and no group has two ranks."""
    spec = model_spec(build_model(CASE))
    spec = replace(spec, experts=replace(spec.experts, num_ranks=2))
    device_bytes = ByteModel(spec).states("sharded", 2) + ByteModel(spec).kept_bytes(20)
    config = {**SPREAD, "degrees": [1], "device_gib": device_bytes / 2**30, "tile_tokens": 8}
    trainer = make_trainer(CASE, rows, folder, config, ARGUMENTS)
    recorder = StepRecorder()
    recorder.attach(trainer)
    trainer.train()
    weights = {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    return sum(step.num_policies for step in recorder.steps), weights


@pytest.mark.wide
def test_plans_replay_layers_with_spread_experts(ranks, tmp_path: Path) -> None:
    rows = random_rows(LENGTHS)
    expected = plain_run(rows)[1]
    for num_policies, weights in ranks(2).run(train_in_short_memory, rows, str(tmp_path)):
        assert num_policies and worst(weights, expected) <= 1e-10


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_fused_experts_are_resumed(ranks, tmp_path: Path, parameters: str) -> None:
    rows, config = random_rows(LENGTHS), {"tokens_per_rank": 32, **PARAMETERS[parameters]}
    straight = ranks(2).run(train, rows, str(tmp_path), config, CLIPPED)[0]
    resuming = {**CLIPPED, "resume": str(tmp_path / "checkpoint-1")}
    resumed = ranks(2).run(train, rows, str(tmp_path / "more"), config, resuming)[0]
    assert resumed[0] == straight[0][1:]
    assert all(torch.equal(resumed[1][name], weight) for name, weight in straight[1].items())
    # an ordinary checkpoint
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float64)
    assert all(torch.equal(weight, straight[1][name]) for name, weight in loaded.named_parameters())


@pytest.mark.daily("spread-2-replicated")
@resuming
@pytest.mark.parametrize(
    "first,num_ranks,second",
    # two blocks of two ranks with a copy of every expert each; then from and to experts that are gathered
    [("spread", 4, "spread"), ("spread", 2, "replicated"), ("sharded", 2, "spread")],
)
def test_spread_experts_are_resumed_elsewhere(ranks, tmp_path: Path, first: str, num_ranks: int, second: str) -> None:
    rows, arguments = random_rows(LENGTHS), {**CLIPPED, "per_device_train_batch_size": 4 // num_ranks}
    straight = ranks(2).run(train, rows, str(tmp_path), {"tokens_per_rank": 32, **PARAMETERS[first]}, CLIPPED)[0]
    resume = arguments | {"resume": str(tmp_path / "checkpoint-1")}
    config = {"tokens_per_rank": 64 // num_ranks, **PARAMETERS[second]}
    for losses, weights, _ in ranks(num_ranks).run(train, rows, str(tmp_path / "more"), config, resume):
        assert losses == pytest.approx(straight[0][1:], rel=1e-10)
        assert worst(weights, straight[1]) <= 1e-10


def test_evaluation_takes_the_cross_entropy_alone(ranks, tmp_path: Path) -> None:
    rows = random_rows(LENGTHS)
    expected = reference_step(build_model(replace(CASE, balance=None)), rows)[0]
    assert ranks(2).run(evaluate, rows, str(tmp_path)) == [pytest.approx(expected, rel=1e-10)] * 2


def evaluate(rows: Any, folder: str) -> float:
    evaluated = {"eval_dataset": datasets.Dataset.from_list(rows)}
    return make_trainer(CASE, rows, folder, {"tokens_per_rank": 32}, ARGUMENTS, **evaluated).evaluate()["eval_loss"]


@pytest.mark.wide
def test_a_callback_alone_refuses_a_balance_of_experts(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(random_rows(LENGTHS))
    arguments = training_arguments(str(tmp_path), max_steps=1)
    callback = LongContextCallback(LongContextConfig(report_steps=False))
    collator = DataCollatorWithFlattening()
    trainer = Trainer(build_model(CASE), arguments, collator, rows, callbacks=[callback])
    with pytest.raises(ValueError, match="output_router_logits=True"):
        trainer.train()
    stock = build_model(replace(CASE, balance=None))
    Trainer(stock, arguments, collator, rows, callbacks=[LongContextCallback(callback.config)]).train()


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_class_is_admitted(family: str) -> None:
    attention = "eager" if family == "gpt_oss" else "sdpa"
    assert model_problems(ModelFacts.of(build_model(ModelCase(family, attention=attention, balance=0.5)))) == []


def test_experts_that_cannot_be_spread_are_refused(tmp_path: Path) -> None:
    args = training_arguments(str(tmp_path))
    config = LongContextConfig(parameters="sharded", expert_ranks=3)
    of_none, of_four = (
        placement_problems(Facts(model=build_model(ModelCase(family)), config=config, args=args, num_ranks=args.world_size))
        for family in ("llama", "mixtral")
    )
    assert of_none[0] == of_four[0] == "expert_ranks 3 does not divide the 1 ranks; choose a divisor"
    assert "expert_ranks is 3, but LlamaForCausalLM has no experts of a class that can be spread" in of_none[1]
    assert of_four[1:] == ["expert_ranks 3 does not divide the 4 experts of MixtralExperts; choose a divisor"]
    wrapped = build_model(ModelCase("mixtral"))
    wrapped.model.layers[0].mlp.experts.extra = torch.nn.Linear(2, 2)
    assert any(
        "weights of MixtralExperts are packed or wrapped" in problem
        for problem in placement_problems(Facts(model=wrapped, config=config, args=args))
    )


@pytest.mark.parametrize(
    "family,field,value,message",
    [("mixtral", "router_jitter_noise", 0.1, "router_jitter_noise is 0.1"), ("olmoe", "clip_qkv", 8.0, "clip_qkv is 8.0")],
)
def test_what_would_differ_is_refused(family: str, field: str, value: float, message: str) -> None:
    model = build_model(ModelCase(family))
    setattr(model.config, field, value)
    assert any(message in problem for problem in model_problems(ModelFacts.of(model)))
