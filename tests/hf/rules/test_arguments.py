"""Settings that cannot run are refused before any work, and every message has the name, the value and the remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models.chats import tokenizer_of
from helpers.models.tiny_models import cast, tiny_llama
from helpers.trainers.trainer_runs import problems_at_start
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from hf_longctx import LongContextCallback, LongContextTrainer
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.rules.arguments import STOPPING, argument_problems, placement_problems
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.rules.training_arguments import idle_settings
from hf_longctx.runtime.core.torch_versions import trains_several_dtypes


@pytest.fixture(autouse=True)
def kept_environment() -> Iterator[None]:
    """TrainingArguments writes an FSDP setting into the environment, where later tests would find it."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def arguments(folder: Any, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**{"output_dir": str(folder), "use_cpu": True, "report_to": "none", **changes})


def test_plain_arguments_have_no_problem(tmp_path) -> None:
    assert (
        argument_problems(
            Facts(args=arguments(tmp_path), given={"data_collator": None, "callbacks": [], "optimizers": (None, None)})
        )
        == []
    )


def test_all_problems_are_listed_at_once(tmp_path) -> None:
    problems = argument_problems(Facts(args=arguments(tmp_path, fp16=True, auto_find_batch_size=True, torch_compile=True)))
    assert len(problems) == 3


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
def test_order_strategies_that_mean_something_are_accepted(tmp_path, strategy: str) -> None:
    args = arguments(tmp_path, train_sampling_strategy=strategy)
    assert argument_problems(Facts(args=args)) == []
    assert bool(idle_settings(args, True, True, False)) == (strategy == "group_by_length")


def test_an_old_transformers_is_refused_with_both_versions(tmp_path) -> None:
    (problem,) = argument_problems(Facts(args=arguments(tmp_path), versions={"transformers": "5.16.2"}))
    assert "transformers 5.16.2 is installed, 5.17 or newer is needed; pip install -U transformers" in problem


def test_trained_ends_in_two_dtypes_are_sharded_if_torch_can(tmp_path) -> None:
    model = get_peft_model(
        cast(tiny_llama(), torch.bfloat16), LoraConfig(target_modules=["lm_head"], modules_to_save=["embed_tokens"])
    )
    config = LongContextConfig(parameters="sharded")
    found = placement_problems(Facts(model=model, config=config, args=arguments(tmp_path)))
    if trains_several_dtypes():
        assert found == []
    else:
        (problem,) = found
        assert "embedding and head, are trained in torch.bfloat16 and torch.float32, but in torch" in problem


# name -> (ranks, degrees, what the message says)
BAD_DEGREES: dict[str, tuple[int, tuple[int, ...], str]] = {
    "more than the world": (2, (1, 4), "degree 4 needs 4 ranks, but the run has 2; lower `degrees` or start more"),
    "more than the heads": (8, (8,), "degree 8 exceeds the model's 4 attention heads"),
    "no power of two": (4, (3,), "degree 3 is neither a power of two nor all 4 ranks"),
}


@pytest.mark.parametrize("name", BAD_DEGREES)
def test_a_degree_that_cannot_be_is_refused(name: str) -> None:
    num_ranks, degrees, message = BAD_DEGREES[name]
    (problem,) = problems_at_start(tiny_llama(), num_ranks=num_ranks, degrees=degrees, method="ulysses")
    assert problem.startswith(message)
    if "the run has" not in message:
        assert problems_at_start(tiny_llama(), num_ranks=num_ranks, degrees=degrees) == []


def test_all_ranks_are_a_degree_even_if_no_power_of_two() -> None:
    assert problems_at_start(tiny_llama(), num_ranks=3, degrees=(1, 2, 3)) == []


def test_a_static_degree_outside_the_degrees_is_refused() -> None:
    problems = problems_at_start(tiny_llama(), num_ranks=4, degrees=(1, 4), solver="static", static_degree=2)
    assert problems == ["static_degree 2 is not among the degrees [1, 4]; choose one of these, or set degrees"]


def test_problems_of_model_tokenizer_and_degrees_are_listed_together() -> None:
    problems = problems_at_start(tiny_llama(own_dropout=0.1), tokenizer_of(65), num_ranks=2, degrees=(4,), max_length=600)
    assert len(problems) == 4


# optimizers of transformers that step inside backward, and those that run on no shards, or on shards of any kind
IN_BACKWARD = {
    *("lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
    "apollo_adamw_layerwise",
}
NEVER_ON_SHARDS = {
    *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw", "adamw_torch_xla", "adamw_torch_npu_fused"),
    "grokadamw",
    *IN_BACKWARD,
}
ELEMENTWISE = {"adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_torch_4bit", "sgd", "adagrad", "rmsprop"}


@pytest.mark.parametrize("name", [each.value for each in OptimizerNames])
def test_every_optimizer_of_transformers_is_served_or_refused_by_name(tmp_path, name: str) -> None:
    args, model = arguments(tmp_path, optim=name, optim_target_modules="all-linear"), tiny_llama()
    problems = argument_problems(Facts(args=args)) + placement_problems(Facts(model=model, args=args))
    assert problems == [problem for problem in problems if f"optim={name!r} steps inside backward" in problem]
    assert bool(problems) == (name in IN_BACKWARD)
    if not problems:
        # on whole weights any class runs, and transformers names the package that is missing
        try:
            kind, _ = Trainer.get_optimizer_cls_and_kwargs(args, model)
        except (ImportError, ValueError, RuntimeError) as error:
            assert str(error)
        else:
            assert isinstance(kind, type)
    config = LongContextConfig(parameters="sharded")
    found = argument_problems(Facts(args=args)) + placement_problems(Facts(model=model, config=config, args=args))
    assert any(problem.startswith(f"optim={name!r} ") for problem in found) == (name in NEVER_ON_SHARDS)
    # whole weights, which others need, are not there in stages and on the host
    config = LongContextConfig(parameters="gathered_per_round", stages=2)
    found = argument_problems(Facts(args=args)) + placement_problems(Facts(model=model, config=config, args=args))
    assert any(problem.startswith(f"optim={name!r} ") for problem in found) == (name not in ELEMENTWISE)


# field -> (value that dataclasses take, what the message says)
MISTYPED: dict[str, tuple[Any, str]] = {
    "max_grad_norm": (None, "max_grad_norm is None (NoneType); give a number"),
    "gradient_accumulation_steps": (1.5, "gradient_accumulation_steps is 1.5 (float); give a whole number"),
    "weight_decay": (float("nan"), "weight_decay is nan (float); give a number"),
    "ignore_data_skip": ("no", "ignore_data_skip is 'no' (str); give True or False"),
    "data_seed": ("3", "data_seed is '3' (str); give a whole number"),
    "seed": (2**32, "seed is 4294967296; give a whole number from 0 to 4294967295"),
    "dataloader_persistent_workers": (True, "dataloader_persistent_workers=True needs workers; set dataloader_num_workers"),
    "max_steps": (1e300, "max_steps is 1e+300 (float); give a whole number"),
    "use_cache": (None, "use_cache is None, which no config of a model takes; give True or False"),
    "label_names": (float("nan"), "label_names is nan (float); give a list of names of columns"),
}


@pytest.mark.parametrize("name", MISTYPED)
def test_numbers_and_flags_that_are_none_are_refused(tmp_path, name: str) -> None:
    value, message = MISTYPED[name]
    args = arguments(tmp_path)
    setattr(args, name, value)
    assert any(message in problem for problem in argument_problems(Facts(args=args)))


def test_numbers_that_stock_takes_are_taken(tmp_path) -> None:
    taken = {"max_steps": 10.0, "seed": np.int64(3), "max_grad_norm": float("inf"), "remove_unused_columns": None, "tf32": None}
    assert argument_problems(Facts(args=arguments(tmp_path, **taken, dataloader_drop_last=1))) == []


# argument -> (value of a wrong kind, what the message says)
WRONG_KINDS: dict[str, tuple[Any, str]] = {
    "args": ({"output_dir": "x"}, "args is {'output_dir': 'x'} (dict); pass TrainingArguments"),
    "longctx_config": (LongContextConfig, "(a class); pass a LongContextConfig"),
    "data_collator": (3, "data_collator is 3 (int); pass a function, or leave it out"),
    "compute_metrics": ("f1", "compute_metrics is 'f1' (str); pass a function, or leave it out"),
    "callbacks": ((TrainerCallback(),), "(tuple); pass a list of TrainerCallbacks"),
    "optimizers": ((None,), "optimizers is (None,) (tuple); pass an optimizer and a scheduler, (optimizer, None)"),
    "optimizer_cls_and_kwargs": (torch.optim.SGD, "(a class); pass a class and a dictionary of its settings"),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_arguments_of_a_wrong_kind_are_refused_before_anything_reads_them(tmp_path, name: str) -> None:
    value, message = WRONG_KINDS[name]
    given = {"model": tiny_llama(), "args": arguments(tmp_path), "train_dataset": [{"input_ids": [1, 2, 3]}], name: value}
    with pytest.raises(ValueError, match=re.escape(message)):
        LongContextTrainer(**given)


def test_callbacks_of_a_wrong_kind_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=re.escape("callbacks has 3 (int); pass TrainerCallbacks alone, or their classes")):
        LongContextTrainer(model=tiny_llama(), args=arguments(tmp_path), callbacks=[EarlyStoppingCallback, 3])
    with pytest.raises(ValueError, match=re.escape("(EarlyStoppingCallback); pass a list of TrainerCallbacks")):
        LongContextTrainer(model=tiny_llama(), args=arguments(tmp_path), callbacks=EarlyStoppingCallback())
    with pytest.raises(ValueError, match=re.escape("longctx_config is {'degrees': [1]} (dict); pass a LongContextConfig")):
        LongContextCallback({"degrees": [1]})  # type: ignore[arg-type]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("changes", "missing"), [({}, "no metric to compare"), ({"metric_for_best_model": "loss"}, "never sees an evaluation")]
)
def test_early_stopping_that_compares_nothing_is_refused_before_the_first_step(tmp_path, changes: dict, missing: str) -> None:
    rows = [{"input_ids": [1, 2, 3]}]
    # a callback may also come later than the trainer
    trainer = LongContextTrainer(model=tiny_llama(), args=arguments(tmp_path, **changes), train_dataset=rows)
    trainer.add_callback(EarlyStoppingCallback(1))
    with pytest.raises(ValueError, match=missing):
        trainer.train()


class StopsByLoss(EarlyStoppingCallback):
    """Early stopping of a user's own, which needs no evaluation."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.best = float("inf")


def test_early_stopping_with_a_beginning_of_its_own_compares_what_it_likes(tmp_path) -> None:
    assert refusals(STOPPING, Facts(args=arguments(tmp_path), given={"callbacks": [StopsByLoss()]})) == []
    facts = Facts(args=arguments(tmp_path), given={"callbacks": [StopsByLoss(), EarlyStoppingCallback()]})
    assert len(refusals(STOPPING, facts)) == 2


def test_an_optimizer_that_refuses_its_settings_is_named(tmp_path) -> None:
    settings = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": -1.0})}
    trainer = LongContextTrainer(
        model=tiny_llama(), args=arguments(tmp_path, max_steps=1), train_dataset=[{"input_ids": [1, 2, 3]}], **settings
    )
    with pytest.raises(ValueError, match=r"the optimizer cannot be made: Invalid learning rate: -1.0; change optim"):
        trainer.train()


class _Breaks(TrainerCallback):
    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        raise KeyError("mine")


def test_errors_of_stock_constructors_name_the_trainer_and_those_of_users_stay(tmp_path) -> None:
    given = {"model": tiny_llama(), "train_dataset": [{"input_ids": [1, 2, 3]}]}
    odd = arguments(tmp_path)
    odd.log_level = "loud"
    with pytest.raises(ValueError, match=r"^LongContextTrainer cannot be made of .*: KeyError in training_args.py,"):
        LongContextTrainer(args=odd, **given)
    with pytest.raises(KeyError, match="mine"):
        LongContextTrainer(args=arguments(tmp_path), callbacks=[_Breaks()], **given)
