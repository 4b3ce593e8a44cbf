"""The trainer with sharded parameters: the same trajectory, one ordinary checkpoint, resuming at any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
from helpers.models.reference import reference_step
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.trainers.trainer_runs import (
    ARGUMENTS,
    NUM_STEPS,
    LossRecorder,
    make_trainer,
    plain_training,
    start,
    train_on_rank,
    train_with_norms,
)
from safetensors import safe_open
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.run import run as run_module
from hf_longctx.runtime.parameters.host_layers import LayerShards


@pytest.fixture(scope="module")
def expected(rows) -> tuple[list[float], dict[str, Any]]:
    return plain_training(ModelCase(promoted=True, tied=True), rows, NUM_STEPS)


@pytest.fixture(scope="module")
def norms(ranks, rows, tmp_path_factory) -> list[float]:
    """Gradient norms before clipping, as one rank with whole parameters logs them."""
    case, config = ModelCase(promoted=True, tied=True), {"tokens_per_rank": 96}
    return ranks(1).run(train_with_norms, case, rows, str(tmp_path_factory.mktemp("norms")), config, {})[0][1]


# name -> (ranks, settings, arguments)
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two ranks": (2, {"parameters": "sharded", "tokens_per_rank": 64}, {}),
    "fused AdamW": (2, {"parameters": "gathered_per_round", "tokens_per_rank": 64}, {"optim": "adamw_torch_fused"}),
    "heterogeneous": (4, {"parameters": "gathered_per_round", "tokens_per_rank": 32}, {}),
    "copies of shards": (4, {"parameters": "sharded", "shard_ranks": 2, "tokens_per_rank": 32}, {}),
    "layers on the host": (
        2,
        {"parameters": "sharded", "layer_weights": "host", "optimizer_states": "host", "tokens_per_rank": 64, "self_test": True},
        {},
    ),
    "the fastest way": (2, {"parameters": "auto", "tokens_per_rank": 64}, {}),
    # nothing to share: a line in the log, and the same run
    "one rank": (1, {"parameters": "sharded", "tokens_per_rank": 96}, {}),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", RUNS)
def test_clipped_steps_follow_one_plain_process(ranks, rows, expected, norms, tmp_path: Path, name: str) -> None:
    num_ranks, config, arguments = RUNS[name]
    results = ranks(num_ranks).run(train_with_norms, ModelCase(promoted=True, tied=True), rows, str(tmp_path), config, arguments)
    for losses, found_norms, weights in results:
        assert losses == pytest.approx(expected[0], rel=1e-10)
        assert max(float((weights[n] - w).abs().max() / w.abs().max()) for n, w in expected[1].items()) <= 1e-10
        assert found_norms == results[0][1]
        assert all(type(norm) is float for norm in found_norms)
        assert found_norms == pytest.approx(norms, rel=1e-10)
        assert max(norms) > 0.5, "nothing was clipped"


@pytest.fixture(scope="module")
def fp32(ranks, rows) -> list[float]:
    """Losses of a sharded training in fp32."""
    return ranks(2).run(train_on_rank, ModelCase(dtype=torch.float32), rows, SHARDED, ARGUMENTS)[0][0]


HALVES = {"autocast": torch.float32, "bf16 weights": torch.bfloat16, "fp16 weights": torch.float16}


@pytest.mark.wide
@pytest.mark.parametrize("dtype", HALVES.values(), ids=list(HALVES))
def test_training_in_half_precision_follows_fp32(ranks, rows, fp32, dtype: torch.dtype) -> None:
    arguments = {**ARGUMENTS, "bf16": dtype == torch.float32}
    half, _, weights = ranks(2).run(train_on_rank, ModelCase(dtype=dtype), rows, SHARDED, arguments)[0]
    assert half != fp32
    assert half == pytest.approx(fp32, rel=0.004 if dtype == torch.float16 else 0.03)
    assert {weight.dtype for weight in weights.values()} == {dtype}


def rounded_training(rows: list[dict[str, list[int]]], folder: str, is_on: bool) -> dict[str, Any]:
    """Losses of a training under autocast with its self-test, what its plans count, and the checkpoint's dtypes.

    is_on: weights that autocast rounds are gathered in bf16.
    """
    found: list[Any] = []
    finder = run_module.find_rounded if is_on else lambda *_: frozenset()
    settings, arguments = {**SHARDED, "self_test": True}, {"bf16": True, "max_steps": 3}
    watched: list[Any] = []
    # a hook that comes after the self-test would be refused; this one runs while weights are gathered
    hook = register_module_forward_hook(
        lambda module, *_: found.append(module.mlp.up_proj.weight.dtype) if module in watched else None
    )
    with patch.object(run_module, "find_rounded", finder):
        trainer = make_trainer(ModelCase(dtype=torch.float32), rows, folder, settings, arguments)
        recorder = LossRecorder()
        recorder.attach(trainer)
        watched.append(trainer.model.model.layers[0])
        trainer.train()
        hook.remove()
        trainer.save_model()
    spec, name = trainer.longctx_run.setup.costs.model, Path(folder) / "model.safetensors"
    with safe_open(name, framework="pt") as reader:
        saved = {key: reader.get_tensor(key).dtype for key in reader.keys()}  # noqa: SIM118
    states = {value.dtype for state in trainer.optimizer.state.values() for key, value in state.items() if key != "step"}
    return {
        "losses": recorder.losses,
        "gathered": set(found),
        "counted": (spec.rounded_parameters, spec.rounds_head),
        "saved": set(saved.values()),
        "states": states,
    }


@pytest.mark.wide
def test_autocast_trains_on_weights_gathered_in_bf16_as_on_those_in_fp32(ranks, rows, tmp_path: Path) -> None:
    on, off = (ranks(2).run(rounded_training, rows, str(tmp_path / str(is_on)), is_on)[0] for is_on in (True, False))
    assert on["gathered"] == {torch.bfloat16} and off["gathered"] == {torch.float32}
    spec = model_spec(build_model(ModelCase(dtype=torch.float32)))
    assert on["counted"] == (spec.layer_weights, True) and off["counted"] == (0, False)
    assert on["saved"] == off["saved"] == on["states"] == off["states"] == {torch.float32}
    # the first forward is the same, bit for bit
    assert on["losses"][0] == off["losses"][0]
    assert on["losses"] == pytest.approx(off["losses"], rel=1e-3)


def save_evaluate_generate(
    rows: list[dict[str, list[int]]], folder: str, case: ModelCase
) -> tuple[float, float, float, list[int]]:
    """Held-out losses before training, after it and after loading the saved weights again, and generated tokens."""
    trainer = make_trainer(
        case,
        rows,
        folder,
        {"tokens_per_rank": 64, "parameters": "sharded"},
        {"max_steps": 3},
        eval_dataset=datasets.Dataset.from_list(rows[:9]),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    tokens = trainer.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    # generating leaves weights gathered; saving must not mind
    trainer.save_model()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    trainer._load_from_checkpoint(folder)
    return before, after, trainer.evaluate()["eval_loss"], tokens[0].tolist()


@pytest.mark.wide
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_is_an_ordinary_one(ranks, rows, tmp_path: Path, tied: bool) -> None:
    case = ModelCase(dtype=torch.float32, tied=tied)
    results = ranks(2).run(save_evaluate_generate, rows, str(tmp_path), case)
    assert results[0] == results[1]
    before, after, again, tokens = results[0]
    assert before == pytest.approx(reference_step(build_model(case), rows[:9])[0], abs=1e-5)
    assert again == after != before
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as reader:
        names = set(reader.keys())
    plain = build_model(case)
    assert names == set(plain.state_dict()) - ({"lm_head.weight"} if tied else set())
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert after == pytest.approx(reference_step(model, rows[:9])[0], abs=1e-5)
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    assert tokens == generated[0].tolist()


SHARDED = {"parameters": "sharded", "tokens_per_rank": 64}
GATHERED = {"parameters": "gathered_per_round", "tokens_per_rank": 64}
REPLICATED = {"tokens_per_rank": 64}


SAVE = {"save_strategy": "steps", "save_steps": 7}


@pytest.fixture(scope="module")
def saved(ranks, rows, tmp_path_factory) -> dict[str, Path]:
    """The checkpoints of step 7 of runs with sharded and with replicated parameters on two ranks."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("sharded", "replicated")}
    for (name, folder), config in zip(folders.items(), (SHARDED, REPLICATED), strict=True):
        ranks(2).run(train_with_norms, ModelCase(promoted=True, tied=True), rows, str(folder), config, SAVE)
        folders[name] = folder / "checkpoint-7"
    return folders


@pytest.mark.wide
@resuming
@pytest.mark.parametrize(
    "first,num_ranks,config",
    [
        ("sharded", 2, GATHERED),
        ("sharded", 4, {**SHARDED, "shard_ranks": 2}),
        ("sharded", 1, REPLICATED),
        ("sharded", 2, REPLICATED),
        ("replicated", 4, SHARDED),
    ],
    ids=["same", "more ranks", "one rank", "to replicated", "from replicated"],
)
def test_resuming_at_any_number_of_ranks_continues(
    ranks, rows, expected, saved, tmp_path: Path, first: str, num_ranks: int, config: dict[str, Any]
) -> None:
    resume = {**SAVE, "resume": str(saved[first])}
    results = ranks(num_ranks).run(train_with_norms, ModelCase(promoted=True, tied=True), rows, str(tmp_path), config, resume)
    final = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{NUM_STEPS}", dtype=torch.float64)
    for losses, _, weights in [*results, (results[0][0], [], {n: p.detach() for n, p in final.named_parameters()})]:
        assert losses == pytest.approx(expected[0][7:], rel=1e-10)
        assert max(float((weights[n] - w).abs().max() / w.abs().max()) for n, w in expected[1].items()) <= 1e-10


def train_for_the_best(rows: list[dict[str, list[int]]], folder: str) -> tuple[float, float, float]:
    """The best, the last and the final held-out loss with the final weights; steps are so large that the loss jumps."""
    arguments = {
        "max_steps": 4,
        "learning_rate": 0.3,
        "warmup_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
    }
    trainer = make_trainer(
        ModelCase(tied=True), rows, folder, SHARDED, arguments, eval_dataset=datasets.Dataset.from_list(rows[:9])
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return min(losses), losses[-1], trainer.evaluate()["eval_loss"]


@pytest.mark.wide
def test_the_best_model_is_loaded_at_the_end(ranks, rows, tmp_path: Path) -> None:
    for best, last, final in ranks(2).run(train_for_the_best, rows, str(tmp_path)):
        assert final == pytest.approx(best, rel=1e-12)
        assert best < last


BAD_STARTS = {
    "blocks": ({**SHARDED, "shard_ranks": 3}, {}, "shard_ranks 3 does not divide the 2 ranks; choose a divisor"),
    "optimizer": (SHARDED, {"optim": "apollo_adamw"}, "optim='apollo_adamw' is not supported with parameters='sharded'"),
}


@pytest.mark.daily("optimizer")
@pytest.mark.parametrize("name", BAD_STARTS)
def test_what_does_not_go_with_shards_is_refused_on_every_rank(ranks, rows, name: str) -> None:
    config, arguments, message = BAD_STARTS[name]
    for found in ranks(2).run(start, rows, config, arguments, None):
        assert message in found


def start_with_own_optimizer(rows: list[dict[str, list[int]]], folder: str) -> list[str]:
    """Messages for an optimizer of the unsharded parameters, and for a model that another trainer has sharded."""
    found = []
    case = ModelCase(dtype=torch.float32)
    optimizers = (torch.optim.SGD(build_model(case).parameters(), lr=0.1), None)
    try:
        make_trainer(case, rows, folder, SHARDED, optimizers=optimizers)
    except ValueError as error:
        found.append(str(error))
    trainer = make_trainer(case, rows, folder, SHARDED)
    trainer.create_optimizer()
    trainer.train_dataset = None
    try:
        type(trainer)(model=trainer.model, args=trainer.args, train_dataset=datasets.Dataset.from_list(rows))
    except ValueError as error:
        found.append(str(error))
    return found


@pytest.mark.wide
def test_what_was_made_before_sharding_is_refused(ranks, rows, tmp_path: Path) -> None:
    for optimizers, model in ranks(2).run(start_with_own_optimizer, rows, str(tmp_path)):
        assert "pass optimizer_cls_and_kwargs=(class, settings) instead, or set optim" in optimizers
        assert "the model is sharded already (fully_shard); pass a plain one" in model


def memory_of_a_rank(rows: list[dict[str, list[int]]], folder: str, config: dict[str, Any]) -> tuple[int, int]:
    """Elements of weights and of Adam moments that this rank holds after a step."""
    trainer = make_trainer(ModelCase(dtype=torch.float32), rows, folder, config, {"max_steps": 1})
    trainer.train()
    weights = sum(_local(p).numel() for p in trainer.model.parameters())
    moments = sum(_local(s["exp_avg"]).numel() for s in trainer._plain_optimizer.state.values())
    return weights, moments


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.wide
def test_a_rank_holds_its_share_of_weights_and_moments(ranks, rows, tmp_path: Path) -> None:
    num_elements = sum(p.numel() for p in build_model(ModelCase()).parameters())
    held = ranks(4).run(memory_of_a_rank, rows, str(tmp_path), {**SHARDED, "tokens_per_rank": 32})
    assert sum(weights for weights, _ in held) == sum(moments for _, moments in held) == num_elements
    assert max(weights for weights, _ in held) <= num_elements / 4 * 1.05
    for weights, _ in ranks(4).run(memory_of_a_rank, rows, str(tmp_path), {**SHARDED, "shard_ranks": 2, "tokens_per_rank": 32}):
        assert num_elements / 2 * 0.95 <= weights <= num_elements / 2 * 1.05


class Reading(TrainerCallback):
    """Reads weights between the forwards of an evaluation."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.sum = sum(float(p.to_local().double().sum()) for p in model.parameters())


def evaluate_from_host(rows: list[dict[str, list[int]]], folder: str, where: str) -> tuple[list[Any], list[int]]:
    """Losses of evaluations and of a step after them, and how often layers left the device in each evaluation."""
    config = {"parameters": "sharded", "layer_weights": where, "tokens_per_rank": 48}
    arguments = {"max_steps": 1, "per_device_eval_batch_size": 2}
    held_out = datasets.Dataset.from_list(rows[:12])
    trainer = make_trainer(ModelCase(), rows, folder, config, arguments, eval_dataset=held_out)
    recorder, reading, moves = LossRecorder(), Reading(), [0]
    recorder.attach(trainer)
    with pytest.MonkeyPatch.context() as patches:

        def leave(own: LayerShards, leave: Any = LayerShards._leave) -> None:
            moves[-1] += 1
            leave(own)

        patches.setattr(LayerShards, "_leave", leave)
        found: list[Any] = [trainer.evaluate()["eval_loss"]]
        moves.append(0)
        trainer.add_callback(reading)
        found += [trainer.evaluate()["eval_loss"], reading.sum]
        trainer.remove_callback(reading)
        moves.append(0)
        # user code after the forwards gets weights, too
        trainer.compute_metrics = lambda _: {"sum": sum(float(p.to_local().double().sum()) for p in trainer.model.parameters())}
        found.append(trainer.evaluate()["eval_sum"])
        moves.append(0)
        # an error of the user's, after which training goes on
        trainer.compute_metrics = lambda _: 1 / 0
        with pytest.raises(ZeroDivisionError):
            trainer.evaluate()
    trainer.train()
    return [*found, *recorder.losses], moves


@pytest.mark.wide
def test_layers_on_the_host_leave_once_for_an_evaluation(ranks, rows, tmp_path: Path) -> None:
    for (found, moves), (expected, none) in zip(
        ranks(2).run(evaluate_from_host, rows, str(tmp_path), "host"),
        ranks(2).run(evaluate_from_host, rows, str(tmp_path), "device"),
        strict=True,
    ):
        assert found == expected
        # three plans, between which a callback reads weights in the second evaluation
        assert moves == [1, 3, 1, 1] and none == [0] * 4
