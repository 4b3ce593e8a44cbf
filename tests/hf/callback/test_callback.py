"""The callback on stock trainers: attached it trains as LongContextTrainer, and everything else of the trainer stays stock."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.trainers.stock_runs import EventRecorder, fp64_loss, make_stock_trainer, quiet_config
from helpers.trainers.trainer_runs import LossRecorder, plain_training
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Trainer, TrainerCallback

from hf_longctx import LongContextCallback, LongContextTrainer
from hf_longctx.hf.models.attention import attention_name
from hf_longctx.hf.run import run
from hf_longctx.plan.setup import Setup

CASE = ModelCase(promoted=True)
STATES = ModelCase("lfm3", promoted=True, num_layers=4)
ADAPTED = ModelCase(
    promoted=True,
    lora=(("r", 2), ("lora_dropout", 0.1), ("target_modules", ["q_proj", "down_proj"]), ("modules_to_save", ["lm_head"])),
)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def train_attached(
    case: ModelCase, rows: list[dict[str, list[int]]], config: dict[str, Any], arguments: dict[str, Any]
) -> tuple[list[float], list[str], dict[str, torch.Tensor]]:
    """Trains a stock trainer on this rank under full plans; losses and layouts of all plans, final weights."""
    recorder = LossRecorder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_stock_trainer(case, rows, folder, arguments)
        LongContextCallback(quiet_config(**config)).attach(trainer)
        recorder.attach(trainer)
        trainer.train()
    assert type(trainer) is Trainer
    return recorder.losses, recorder.layouts, weights_of(trainer)


# name -> (ranks, settings, arguments)
ATTACHED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two ranks": (2, {"tokens_per_rank": 64}, {}),
    "adapters, accumulation": (2, {"tokens_per_rank": 40}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "heterogeneous": (4, {"tokens_per_rank": 32}, {}),
    "adapters": (2, {"tokens_per_rank": 64}, {}),
    "states along the sequence": (2, {"tokens_per_rank": 64}, {}),
}
CASES = {"adapters": ADAPTED, "adapters, accumulation": ADAPTED, "states along the sequence": STATES}


@pytest.mark.daily("two ranks")
@pytest.mark.quick("two ranks")
@pytest.mark.parametrize("name", ATTACHED)
def test_attached_training_follows_one_plain_process(ranks, rows, name: str) -> None:
    num_ranks, config, arguments = ATTACHED[name]
    case = CASES.get(name, CASE)
    expected_losses, expected = plain_training(case, rows, 12)
    per_step = arguments.get("gradient_accumulation_steps", 1)
    for losses, layouts, weights in ranks(num_ranks).run(train_attached, case, rows, config, {"max_steps": 12, **arguments}):
        steps = [sum(losses[i : i + per_step]) for i in range(0, len(losses), per_step)]
        assert steps == pytest.approx(expected_losses, rel=1e-10)
        assert max(relative_error(weights[name], expected[name]) for name in expected) <= 1e-10
        assert any("," in layout.replace("<1,1>", "") for layout in layouts), "no plan had several micro-batches"


class Snapshot(TrainerCallback):
    """At one step in the middle of a training: the weights, and what the trainer says of its sets then."""

    def __init__(self, trainer: Trainer, dataset: Any) -> None:
        self.trainer, self.dataset = trainer, dataset

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.weights = weights_of(self.trainer)
            self.found = sayings(self.trainer, self.dataset)


def sayings(trainer: Trainer, dataset: Any) -> tuple[dict[str, float], np.ndarray]:
    """Metrics of the evaluation set and predictions for `dataset`, without timings."""
    metrics = trainer.evaluate()
    return {k: v for k, v in metrics.items() if "second" not in k and "time" not in k}, trainer.predict(dataset).predictions


def accuracy(prediction: Any) -> dict[str, float]:
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words "0" to "63"; "0" pads."""
    words = {str(number): number for number in range(64)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0")


def live_through(rows: list[dict[str, list[int]]], mode: str) -> dict[str, Any]:
    """One stock trainer through a training with the callback, and what is left of it afterwards."""
    dataset = datasets.Dataset.from_list(rows[:7])
    collator = DataCollatorForSeq2Seq(tokenizer())
    extra = {"eval_dataset": dataset, "compute_metrics": accuracy, "data_collator": collator}
    arguments = {"max_steps": 5, "train_sampling_strategy": "sequential", "eval_strategy": "steps", "eval_steps": 2}

    with tempfile.TemporaryDirectory() as folder:
        untouched = make_stock_trainer(CASE, rows, folder, arguments, **extra)
        first_weights = weights_of(untouched)
        untouched.train()
        trainer = make_stock_trainer(CASE, rows, folder, arguments, **extra)
        callback = LongContextCallback(quiet_config(self_test=True, tokens_per_rank=64 if mode == "attached" else None))
        if mode == "alone":
            trainer.add_callback(callback)
        else:
            callback.attach(trainer)
        snapshot = Snapshot(trainer, dataset)
        trainer.add_callback(snapshot)
        trainer.train()
        trainer.remove_callback(snapshot)
        if mode == "alone":
            trainer.remove_callback(callback)
        after = (weights_of(trainer), sayings(trainer, dataset))
        fresh = []
        for weights in (snapshot.weights, after[0]):
            judge = make_stock_trainer(CASE, rows, folder, arguments, **extra)
            judge.model.load_state_dict(weights, strict=False)
            fresh.append(sayings(judge, dataset))
        left = {
            "class": type(trainer) is type(untouched),
            "attention": attention_name(trainer.model),
            "attributes": set(vars(trainer)) ^ set(vars(untouched)),
            "callbacks": trainer.callback_handler.callback_list == untouched.callback_handler.callback_list,
            "hooks": len(trainer.model._forward_pre_hooks) + len(trainer.model._forward_hooks),
        }
        # run this trainer again, from the first weights and without the callback
        trainer.model.load_state_dict(first_weights, strict=False)
        trainer.optimizer, trainer.lr_scheduler = None, None
        trainer.train()
    again = all(torch.equal(a, b) for a, b in zip(weights_of(trainer).values(), weights_of(untouched).values(), strict=True))
    return {"found": [snapshot.found, after[1]], "expected": fresh, "left": left, "again": again}


@pytest.mark.daily("attached")
@pytest.mark.parametrize("mode", ["attached", "alone"])
def test_evaluation_is_stock_all_along_and_the_trainer_afterwards(ranks, rows, mode: str) -> None:
    for life in ranks(2).run(live_through, rows, mode):
        for (metrics, predictions), (expected_metrics, expected) in zip(life["found"], life["expected"], strict=True):
            assert "eval_accuracy" in metrics and metrics == expected_metrics | {"epoch": metrics["epoch"]}
            assert np.array_equal(predictions, expected)
        left = {"class": True, "attention": "sdpa", "attributes": set(), "callbacks": True, "hooks": 0}
        assert life["left"] == left
        assert life["again"]


def events_of(rows: list[dict[str, list[int]]], folder: str, mode: str) -> tuple[list[str], list[set[str]], list[str]]:
    """Events that another callback gets, keys of the log's entries, and files of a checkpoint."""
    recorder = EventRecorder()
    arguments = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    arguments |= {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "epoch", "logging_steps": 3}
    callbacks: list[Any] = [recorder, *([LongContextCallback()] if mode == "alone" else [])]
    eval_dataset = datasets.Dataset.from_list(rows[:4])
    # 41 rows: neither the batch nor the number of ranks divides the epoch
    trainer = make_stock_trainer(CASE, [*rows, rows[3]], folder, arguments, eval_dataset=eval_dataset, callbacks=callbacks)
    if mode == "attached":
        LongContextCallback(quiet_config(tokens_per_rank=64)).attach(trainer)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    dist.barrier()
    files = sorted(path.name for path in Path(folder, "checkpoint-4").iterdir())
    return recorder.events, [set(entry) for entry in trainer.state.log_history], files


@pytest.mark.wide
def test_other_callbacks_logs_and_checkpoints_do_not_notice(ranks, rows, tmp_path: Path) -> None:
    runs = {mode: ranks(2).run(events_of, rows, str(tmp_path / mode), mode) for mode in ("stock", "attached", "alone")}
    for mode in ("attached", "alone"):
        for (events, keys, files), (expected_events, expected_keys, expected_files) in zip(
            runs[mode], runs["stock"], strict=True
        ):
            assert events == expected_events
            # beside the trainer's own files, plans say which weights were trained and which data came before a checkpoint, and
            # list all files
            more = ["longctx_checkpoint.json", "longctx_trained.json", *(["longctx_data.json"] if mode == "attached" else [])]
            assert sorted({*expected_files, *more}) == files
            assert len(keys) == len(expected_keys)
            assert all(expected <= found for found, expected in zip(keys, expected_keys, strict=True))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / mode / "final")
        assert (
            model.config._attn_implementation == "sdpa" and "longctx" not in (tmp_path / mode / "final/config.json").read_text()
        )


def train_part(
    rows: list[dict[str, list[int]]], folder: str, mode: str, arguments: dict[str, Any], resume: bool
) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """A training of 12 steps from its start or from its checkpoint 7, in the middle of an epoch of 5 steps."""
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 7, **arguments}
    callback = LongContextCallback(quiet_config(tokens_per_rank=64 if mode == "attached" else 300))
    case = ADAPTED if mode == "alone" else CASE
    trainer = make_stock_trainer(case, rows, folder, settings, callbacks=[callback] if mode == "alone" else [])
    if mode == "attached":
        callback.attach(trainer)
    message = ""
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-7" if resume else None)
    except ValueError as error:
        message = str(error)
        callback.detach()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights_of(trainer), message


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("mode", ["attached", "alone"])
def test_resuming_inside_an_epoch_goes_on_with_the_same_samples_at_any_world_size(ranks, rows, tmp_path: Path, mode: str) -> None:
    ((losses, expected, _), _) = ranks(2).run(train_part, rows, str(tmp_path), mode, {}, False)
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for num_ranks, arguments in ((2, {}), (1, {}), (2, halves)):
        for found, weights, _ in ranks(num_ranks).run(
            train_part, rows, str(tmp_path), mode, arguments | {"save_steps": 99}, True
        ):
            # the log is restored with the checkpoint; the sum in it is fp32
            assert found == pytest.approx(losses, rel=1e-6)
            assert max(relative_error(weights[name], expected[name]) for name in expected) <= 1e-9
    for _, _, message in ranks(2).run(train_part, rows, str(tmp_path), mode, {"per_device_train_batch_size": 2}, True):
        if mode == "attached":
            assert "sequences_per_step was 8 in checkpoint-7 and is 4 now" in message
        else:
            assert "the checkpoint is at step 7 and epoch 1.4000" in message and "per_device_train_batch_size (2)" in message


class Failing(TrainerCallback):
    """Ends a training by an error."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("planted failure")


def fail_and_recover(rows: list[dict[str, list[int]]], mode: str) -> tuple[Any, Any, bool]:
    """A training that raises, what is left of it, and whether the same callback then trains another trainer right."""
    with tempfile.TemporaryDirectory() as folder:
        callback = LongContextCallback(quiet_config(tokens_per_rank=64 if mode == "attached" else 300))
        arguments = {"max_steps": 4, "train_sampling_strategy": "sequential"}
        attaches = mode == "attached"
        trainer = make_stock_trainer(CASE, rows, folder, arguments, callbacks=[Failing(), *([] if attaches else [callback])])
        if attaches:
            callback.attach(trainer)
        with pytest.raises(RuntimeError, match="planted failure"):
            trainer.train()
        if not attaches:
            callback.detach()
        callback.detach()
        left = (type(trainer), attention_name(trainer.model), len(trainer.model._forward_pre_hooks))
        finals = []
        for again in (callback, LongContextCallback(callback.config)):
            other = make_stock_trainer(CASE, rows, folder, arguments, callbacks=[] if attaches else [again])
            if attaches:
                again.attach(other)
            other.train()
            finals.append(weights_of(other))
    same = all(relative_error(finals[0][name], finals[1][name]) < 1e-12 for name in finals[0])
    return left[0], left[1:], same


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["attached", "alone"])
def test_a_training_that_raises_leaves_a_stock_trainer(ranks, rows, mode: str) -> None:
    assert ranks(2).run(fail_and_recover, rows, mode) == [(Trainer, ("sdpa", 0), True)] * 2


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class Noisy(Trainer):
    """Has noise on embeddings that its arguments do not name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.neftune_noise_alpha = 5.0


PACKED = datasets.Dataset.from_list([{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4], "seq_lengths": [2, 2]}])
# name -> (mode, settings, arguments, what the trainer gets besides, part of the message)
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "collator": ("attached", {}, {}, {"data_collator": lambda rows: {}}, "on train_dataset: it returns no 'input_ids'"),
    "loss": (
        "attached",
        {},
        {},
        {"compute_loss_func": fp64_loss},
        "compute_loss_func was set on the trainer",
    ),
    "own loss": ("attached", {}, {}, {"trainer_class": OwnLoss}, "OwnLoss.compute_loss would never be called"),
    "own step": ("attached", {}, {}, {"trainer_class": OwnStep}, "OwnStep.training_step would never be called"),
    "too long": ("attached", {"max_length": 40}, {}, {}, "row 0 has 61 tokens, above max_length 40"),
    "smoothing alone": ("alone", {}, {"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1"),
    "tokens of a rank": ("alone", {}, {"average_tokens_across_devices": False}, {}, "average_tokens_across_devices=False"),
    "noise alone": ("alone", {}, {}, {"trainer_class": Noisy}, "neftune_noise_alpha=5.0 would draw other noise on every rank"),
    "budget": ("alone", {"tokens_per_step": 100}, {}, {}, "tokens_per_step=100 needs the trainer's loader"),
    "cutting": ("alone", {"long_sequences": "split"}, {}, {}, "long_sequences='split' needs the trainer's loader"),
    "too long alone": ("alone", {"max_length": 40}, {}, {}, "has a sequence of 61 tokens, above max_length 40"),
    "metrics in stages": ("attached", {"stages": 2}, {}, {"compute_metrics": accuracy}, "never makes; leave them out"),
    "packed rows in stages": ("attached", {"stages": 2}, {}, {"eval_dataset": PACKED}, "eval_dataset has a column 'seq_lengths'"),
    "stages of shards": (
        "attached",
        {"stages": 2, "parameters": "gathered_per_round"},
        {},
        {},
        "would leave a sharded model in a stock trainer",
    ),
    "stages alone": ("alone", {"stages": "auto"}, {}, {}, "stages='auto' needs plans of whole steps"),
    "too many": ("alone", {"tokens_per_rank": 31}, {}, {}, "do not fit one micro-batch on 2 ranks of 31 tokens each"),
}


def refuse(rows: list[dict[str, list[int]]], name: str, only_rank: int | None) -> tuple[str, Any, Any]:
    """The message with which this rank refuses, and the trainer's class and attention after it."""
    mode, config, arguments, extra, _ = REFUSED[name]
    if only_rank is not None and dist.get_rank() != only_rank:
        config, arguments, extra = {}, {}, {}
    callback, message = LongContextCallback(quiet_config(**config)), ""
    arguments = {"train_sampling_strategy": "sequential", **arguments}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_stock_trainer(CASE, rows, folder, arguments, callbacks=[callback] if mode == "alone" else [], **extra)
        before = (extra.get("trainer_class", Trainer), attention_name(trainer.model), set(vars(trainer)))
        try:
            if mode == "attached":
                callback.attach(trainer)
            else:
                trainer.train()
        except ValueError as error:
            message = str(error)
        if mode == "alone":
            callback.detach()
    after = (type(trainer), attention_name(trainer.model), set(vars(trainer)) if mode == "attached" else before[2])
    return message, after == before, len(trainer.model._forward_pre_hooks)


@pytest.mark.daily("too long", "too long alone", "too many")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_lose_its_meaning_is_refused_on_every_rank_and_changes_nothing(ranks, rows, name: str) -> None:
    for message, is_unchanged, num_hooks in ranks(2).run(refuse, rows, name, None):
        assert REFUSED[name][-1] in message
        assert is_unchanged and num_hooks == 0


@pytest.mark.daily("smoothing alone")
@pytest.mark.parametrize("name", ["collator", "smoothing alone"])
def test_a_problem_of_one_rank_is_refused_on_all(ranks, rows, name: str) -> None:
    for message, is_unchanged, _ in ranks(2).run(refuse, rows, name, 1):
        assert REFUSED[name][-1] in message or "differs between ranks" in message
        assert is_unchanged


def train_after_evaluating(rows: list[dict[str, list[int]]], mode: str) -> tuple[str, list[torch.Tensor]]:
    """Weights after evaluations before and behind an attached training and one more of the trainer, or why it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_stock_trainer(
            CASE, rows, folder, {"max_steps": 2}, eval_dataset=datasets.Dataset.from_list(rows[:4]), exact_loss=False
        )
        callback = LongContextCallback(quiet_config())
        if mode == "attached":
            callback.attach(trainer)
        else:
            trainer.add_callback(callback)
        trainer.evaluate()
        try:
            trainer.train()
            trainer.evaluate()
            trainer.train()
        except ValueError as error:
            return str(error), []
        finally:
            callback.detach()
    return "", [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.daily("alone")
@pytest.mark.parametrize("mode", ["attached", "alone"])
def test_ranks_do_not_drift_apart_after_an_evaluation(ranks, rows, mode: str) -> None:
    (message, first), (_, second) = ranks(2).run(train_after_evaluating, rows, mode)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert ("evaluate() or predict() ran before train()" in message) == (mode == "alone")


class SlowStart(TrainerCallback):
    """The second rank takes longer to get ready than a step's collectives may wait."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1:
            time.sleep(2.5)


def train_after_a_slow_start(rows: list[dict[str, list[int]]]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_stock_trainer(CASE, rows, folder, {"max_steps": 1}, callbacks=[SlowStart()])
        LongContextCallback(quiet_config(collective_timeout_s=1.0)).attach(trainer)
        trainer.train()
    return trainer.state.global_step


def test_a_rank_that_is_slow_to_start_is_waited_for(ranks, rows) -> None:
    assert ranks(2).run(train_after_a_slow_start, rows) == [1, 1]


def train_with_ddp_arguments(rows: list[dict[str, list[int]]]) -> bool:
    config = quiet_config(lookahead_batches=2, micro_batch_trials=1, optimizer_states="auto")
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"max_steps": 1, "ddp_find_unused_parameters": False}
        trainer = make_stock_trainer(CASE, rows, folder, arguments, callbacks=[LongContextCallback(config)])
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr("hf_longctx.hf.callback.callback.logger.warning", lambda text, *values: lines.append(text % values))
            setups: list[Setup] = []
            patch.setattr(
                run, "choose_setup", lambda *given, choose=run.choose_setup: setups.append(choose(*given)) or setups[-1]
            )
            trainer.train()
    is_said = any(all(name in line for name in ("lookahead_batches", "micro_batch_trials", "optimizer_states")) for line in lines)
    # the stock trainer's optimizer has its states on the device, and plans count them there
    (setup,) = setups
    is_planned = not setup.notes and not setup.costs.model.updates_on_host
    return trainer.state.global_step == 1 and is_planned and is_said == (dist.get_rank() == 0)


def test_alone_it_leaves_ddp_its_arguments_and_says_what_it_does_not_use(ranks, rows) -> None:
    assert ranks(2).run(train_with_ddp_arguments, rows) == [True, True]


def test_a_trainer_that_runs_plans_takes_no_second_author(rows, tmp_path: Path) -> None:
    trainer = make_stock_trainer(CASE, rows, str(tmp_path))
    callback = LongContextCallback(quiet_config())
    callback.attach(trainer)
    for second in (callback, LongContextCallback()):
        with pytest.raises(ValueError, match="runs plans already"):
            second.attach(trainer)
    callback.detach()
    assert type(trainer) is Trainer
    ours = LongContextTrainer(
        model=build_model(CASE),
        args=trainer.args,
        train_dataset=trainer.train_dataset,
        longctx_config=quiet_config(),
        callbacks=[LongContextCallback()],
    )
    with pytest.raises(ValueError, match="the model runs plans already"):
        ours.train()


class Logged(Trainer):
    """A subclass with methods of its own around those of the trainer."""

    losses: tuple[float, ...] = ()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.losses += (logs["loss"],) if "loss" in logs else ()
        super().log(logs, *args, **kwargs)


def test_a_subclass_keeps_its_methods_and_can_be_attached_again(rows, tmp_path: Path) -> None:
    trainer = make_stock_trainer(CASE, rows, str(tmp_path), {"max_steps": 3}, trainer_class=Logged)
    callback = LongContextCallback(quiet_config())
    # in the list as well, where it stays out of the attached training
    trainer.add_callback(callback)
    for num_losses in (3, 6):
        callback.attach(trainer)
        trainer.train()
        assert type(trainer) is Logged and len(trainer.losses) == num_losses
    expected, _ = plain_training(CASE, rows, 3)
    assert list(trainer.losses[:3]) == pytest.approx(expected, rel=1e-6)
    callback.attach(trainer)
    other = make_stock_trainer(CASE, rows, str(tmp_path), callbacks=[callback])
    with pytest.raises(ValueError, match="attached to another trainer"):
        other.train()


def test_nothing_is_compiled_for_a_loop_that_runs_the_models_own_code(rows, tmp_path, monkeypatch) -> None:
    asked: list[bool | None] = []
    made = run.fused_layers
    monkeypatch.setattr(
        run, "fused_layers", lambda model, args, compiles, control: (asked.append(compiles), made(model, args, False, control))[1]
    )
    for number in range(2):
        trainer = make_stock_trainer(CASE, rows[:4], str(tmp_path / str(number)), {"max_steps": 1})
        callback = LongContextCallback(quiet_config(tokens_per_rank=128))
        callback.attach(trainer) if number else trainer.add_callback(callback)
        trainer.train()
    # attached, plans run the model
    assert asked == [False, None]
