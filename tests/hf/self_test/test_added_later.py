"""Hooks and forwards that a model gets after the self-test: no plan runs through them, on any rank."""

from __future__ import annotations

import gc
import tempfile
import timeit
import weakref
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import LossRecorder, make_trainer, plain_training, plain_training_with, training_arguments
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from hf_longctx import LongContextCallback, LongContextConfig
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.self_test.added_later import CodeAtStart
from hf_longctx.hf.self_test.reduced_copy import user_functions
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.runtime.core.binding import PUT, is_written_by

CASE = ModelCase(promoted=True)
ROWS = random_rows([61, 13, 5, 8, 21, 34, 3, 9] * 3)
# steps before which the code is added
LATE = 2


def mixed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Adds to every token the mean of the tokens beside it, which under plans are those of other documents."""
    return output + output.mean(dim=1, keepdim=True)


def add(model: Any, what: str) -> None:
    """Puts code of a user on the second layer's MLP."""
    mlp = model.model.layers[1].mlp
    if what == "hook":
        mlp.register_forward_hook(mixed)
    elif what == "forward":
        run = mlp.forward
        mlp.forward = MethodType(lambda self, x: mixed(self, (), run(x)), mlp)
    elif what == "loss":
        model.loss_function = mixed
    elif what == "class":
        mlp.__class__ = type(
            "Mixing", (type(mlp),), {"forward": lambda self, x: mixed(self, (), super(type(self), self).forward(x))}
        )


def own(function: Any) -> Any:
    """A forward of a user's own around another one."""
    return lambda module, *args, **keywords: 1.3 * function(module, *args, **keywords)


class Around(nn.Module):
    """A module of a user's own around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 1.3 * self.inner(x)


def put(model: Any, path: str, how: str) -> Callable[[], None]:
    """Puts code of a user's own, which treats every token alone, in place of a module's; returns what undoes it."""
    module, kind = model.get_submodule(path), type(model.get_submodule(path))
    of_class = kind.forward
    if how == "forward":
        run = module.forward
        module.forward = MethodType(own(lambda this, *args, **keywords: run(*args, **keywords)), module)
    elif how == "partial":
        module.forward = partial(own(of_class), module)
    elif how == "class":
        kind.forward = own(of_class)
    elif how == "wrapped class":
        kind.forward = wraps(of_class)(own(of_class))
    elif how == "subclass":
        module.__class__ = type("Mine", (kind,), {"forward": own(of_class)})
    else:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Around(module))
    return lambda: setattr(kind, "forward", of_class)


class Putting(TrainerCallback):
    """Puts a user's code into the model at an event, before the step of this number."""

    def __init__(self, path: str, how: str, event: str) -> None:
        self.path, self.how, self.event = path, how, event
        self.undo: Callable[[], None] = lambda: None

    def at(self, event: str, state: Any, model: Any) -> None:
        if event == self.event and state.global_step == (LATE - 1 if event == "step" else 0):
            self.undo = put(model, self.path, self.how)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.at("begin", state, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.at("step", state, model)


LONG_ROWS = random_rows([61, 47] * 8)
LORA = (("r", 2), ("target_modules", ["q_proj", "down_proj"]))
ADAPTED = ModelCase(promoted=True, lora=LORA)
LAYER = "base_model.model.model.layers.1."
# modules whose forward plans always replace, or while they recompute
PLACES = {
    "adapter": f"{LAYER}self_attn.q_proj",
    "MLP": f"{LAYER}mlp",
    "head": "base_model.model.lm_head",
    "norm": f"{LAYER}input_layernorm",
}


def with_put(place: str, how: str, when: str, self_test: bool, recomputes: bool) -> tuple[list[float], str, bool]:
    """Losses of a training into whose model a user puts code, the refusal, and whether the user's code is there at the end."""
    config: dict[str, Any] = {"self_test": self_test}
    rows = LONG_ROWS if recomputes else ROWS
    if recomputes:
        # a device that keeps everything of 36 tokens, fewer than any of the rows has
        bytes_of = ByteModel(model_spec(build_model(ADAPTED)))
        config |= {"device_gib": (bytes_of.states() + bytes_of.kept_bytes(36)) / 2**30, "tile_tokens": 8}
    model, putting = build_model(ADAPTED), Putting(PLACES[place], how, when)
    undo = put(model, PLACES[place], how) if when == "before" else lambda: None
    recorder = LossRecorder()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = make_trainer(ADAPTED, rows, folder, config, {"max_steps": LATE}, model=model, callbacks=[putting])
            if when == "between":
                undo = put(model, PLACES[place], how)
            recorder.attach(trainer)
            trainer.train()
            trainer.longctx_run.close()
            module = model.get_submodule(PLACES[place])
            is_there = isinstance(module, Around) or not is_written_by(module.forward, "torch", "transformers", "peft")
            return recorder.losses, "", is_there and not any(PUT in vars(each) for each in model.modules())
        except ValueError as error:
            return recorder.losses, str(error), True
        finally:
            undo()
            putting.undo()


def plain_with(place: str, how: str, when: str, recomputes: bool = False) -> list[float]:
    """Losses of the plain training with that code."""
    undone: list[Callable[[], None]] = []

    def before_step(model: nn.Module, step: int) -> None:
        if step == (LATE - 1 if when == "step" else 0):
            undone.append(put(model, PLACES[place], how))

    try:
        return plain_training_with(before_step, ADAPTED, LONG_ROWS if recomputes else ROWS, LATE)[0]
    finally:
        for undo in undone:
            undo()


# (module, way, when, whether a self-test runs, whether layers are recomputed) -> whether it is refused
PUT_THERE = {
    ("adapter", "forward", "before", False, False): False,
    ("adapter", "forward", "before", True, False): False,
    ("adapter", "partial", "between", False, False): False,
    ("adapter", "wrapped class", "before", False, False): False,
    ("adapter", "forward", "begin", False, False): False,
    ("adapter", "forward", "begin", True, False): True,
    ("adapter", "forward", "step", False, False): True,
    ("adapter", "class", "step", False, False): True,
    ("adapter", "subclass", "step", False, False): True,
    ("MLP", "wrapped class", "before", False, True): False,
    ("MLP", "forward", "begin", False, True): False,
    ("MLP", "forward", "step", False, True): True,
    ("MLP", "module", "step", False, True): True,
    ("head", "forward", "step", False, True): True,
}


@pytest.mark.daily(
    "('adapter', 'forward', 'step', False, False)",
    "('adapter', 'subclass', 'step', False, False)",
    "('MLP', 'module', 'step', False, True)",
)
@pytest.mark.parametrize("case", PUT_THERE, ids=str)
def test_code_in_place_of_a_modules_is_trained_or_refused_but_never_dropped(case: tuple[str, str, str, bool, bool]) -> None:
    losses, message, is_there = with_put(*case)
    if PUT_THERE[case]:
        assert "after the start" in message and len(losses) < LATE
        return
    assert not message
    assert losses == pytest.approx(plain_with(*case[:3], recomputes=case[4]), rel=1e-10)
    # stock leaves it there, too
    assert is_there


@pytest.mark.wide
def test_what_plans_leave_alone_may_be_replaced_without_a_self_test(ranks) -> None:
    expected = plain_with("norm", "module", "step")
    losses, message, is_there = with_put("norm", "module", "step", self_test=False, recomputes=False)
    assert losses == pytest.approx(expected, rel=1e-10) and not message and is_there


def test_a_look_at_the_model_in_every_step_takes_no_time() -> None:
    """32 layers with adapters everywhere: far below a millisecond on an idle core; the bound is for a busy one."""
    model = build_model(ModelCase(num_layers=32, lora=(("r", 2), ("target_modules", "all-linear"))))
    code = CodeAtStart(ModelFacts.of(model), True, None)
    assert code.problem(model) == ""
    fast_s = min(timeit.repeat(lambda: code.problem(model), number=5, repeat=5)) / 5
    slow_s = min(timeit.repeat(lambda: list(user_functions(model)), number=1, repeat=3))
    assert fast_s < slow_s / 2, (fast_s, slow_s)


class Adding(TrainerCallback):
    """Adds the code before a step, on one rank alone."""

    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank = what, rank

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == LATE and args.process_index == self.rank:
            add(model, self.what)


def train(what: str, self_test: bool = True) -> tuple[list[float], str]:
    """Losses of the steps that ran, and the message with which the training stopped."""
    rank = torch.distributed.get_world_size() - 1
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, ROWS, folder, {"self_test": self_test}, {"max_steps": LATE + 1})
        recorder = LossRecorder()
        recorder.attach(trainer)
        trainer.add_callback(Adding(what, rank))
        try:
            trainer.train()
        except ValueError as error:
            return recorder.losses, str(error)
    return recorder.losses, ""


def read(module: nn.Module, args: Any, output: Tensor) -> None:
    """Reads what a statistic of activations reads."""
    read.sums.append(float(output.detach().square().sum()))  # type: ignore[attr-defined]


def read_gradient(module: nn.Module, inputs: Any, outputs: Any) -> None:
    """Reads what a statistic of gradients reads."""
    read.sums.append(float(outputs[0].square().sum()))  # type: ignore[attr-defined]


def before_training(what: str, config: dict[str, Any]) -> tuple[list[float], int, str]:
    """Losses of a training before which hooks were put on the modules of a built trainer, calls of these, and the refusal."""
    read.sums = []  # type: ignore[attr-defined]
    everywhere: Any = {
        "global mixing": torch.nn.modules.module.register_module_forward_hook,
        "global reading": torch.nn.modules.module.register_module_full_backward_hook,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, ROWS, folder, {"self_test": True, **config}, {"max_steps": LATE})
        recorder, handles = LossRecorder(), []
        recorder.attach(trainer)
        mlp: Any = trainer.model.model.layers[-1].mlp  # type: ignore[union-attr, index]
        if what == "mixing":
            mlp.register_forward_hook(mixed)
        elif what == "reading":
            mlp.register_forward_hook(read)
            mlp.register_full_backward_hook(read_gradient)
        elif what == "global mixing":
            handles = [everywhere[what](lambda module, args, y: mixed(module, args, y) if type(module) is type(mlp) else None)]
        else:
            handles = [everywhere[what](read_gradient)]
        try:
            trainer.train()
        except ValueError as error:
            return recorder.losses, len(read.sums), str(error)  # type: ignore[attr-defined]
        finally:
            for handle in handles:
                handle.remove()
    return recorder.losses, len(read.sums), ""  # type: ignore[attr-defined]


def outside_of_training(kind: str) -> str:
    """The message of a forward under plans after a hook: of an evaluation, or of the callback alone."""
    sets: Any = {name: datasets.Dataset.from_list(ROWS) for name in ("train_dataset", "eval_dataset")}
    with tempfile.TemporaryDirectory() as folder:
        if kind == "evaluate":
            trainer: Any = make_trainer(CASE, ROWS, folder, {"self_test": True}, eval_dataset=sets["eval_dataset"])
            add(trainer.model, "hook")
        else:
            config = LongContextConfig(report_steps=False, timeline_steps=0)
            trainer = Trainer(
                model=build_model(CASE),
                args=training_arguments(folder, max_steps=LATE + 1),
                data_collator=DataCollatorWithFlattening(),
                callbacks=[LongContextCallback(config), Adding("hook", 0)],
                **sets,
            )
        try:
            trainer.evaluate() if kind == "evaluate" else trainer.train()
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.daily("loss")
@pytest.mark.parametrize("what", ["hook", "forward", "class", "loss"])
def test_code_that_was_added_in_training_is_refused_on_every_rank(ranks, what: str) -> None:
    expected, _ = plain_training(CASE, ROWS, LATE + 1)
    (found, other), (_, message) = ranks(2).run(train, what)
    assert found[:1] == pytest.approx(expected[:1], rel=1e-10) and len(found) == LATE
    if what == "loss":
        assert "loss_function computes" in message and "plans train" in message
    else:
        assert message.startswith("model.layers.1.mlp (") and "after the start" in message
    assert "another rank" in other


@pytest.mark.daily("global reading")
@pytest.mark.parametrize("what", ["mixing", "reading", "global mixing", "global reading"])
def test_hooks_from_before_a_training_are_compared_when_it_begins(ranks, what: str) -> None:
    expected, _ = plain_training(CASE, ROWS, LATE)
    ((losses, num_calls, message),) = ranks(1).run(before_training, what, {})
    if "mixing" in what:
        assert "the parity self-test failed before step 1" in message and not losses
    else:
        assert not message and num_calls
        assert losses[:1] == pytest.approx(expected[:1], rel=1e-10)


@pytest.mark.wide
def test_hooks_from_before_a_training_on_shards_are_refused_since_nothing_compares_them(ranks) -> None:
    for what, words in (
        ("reading", "got a hook (forward_hook) (read)"),
        ("global reading", "got a hook of all modules (backward_hook)"),
    ):
        for losses, _, message in ranks(2).run(before_training, what, {"parameters": "sharded"}):
            assert words in message and "after the start" in message and not losses


def test_without_a_self_test_users_answer_for_their_code(ranks) -> None:
    ((losses, message),) = ranks(1).run(train, "hook", False)
    assert len(losses) == LATE + 1 and not message


@pytest.mark.daily("callback alone")
@pytest.mark.parametrize("kind", ["evaluate", "callback alone"])
def test_code_that_was_added_is_refused_outside_of_planned_steps_too(ranks, kind: str) -> None:
    (message,) = ranks(1).run(outside_of_training, kind)
    assert "model.layers.1.mlp (LlamaMLP) got a hook (forward_hook) (mixed) after the start" in message, message


def test_layers_that_went_to_another_stage_are_let_go_and_their_classes_stay_known() -> None:
    model: Any = build_model(ModelCase(num_layers=2))

    class Doubled(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    for layer in model.model.layers:
        layer.mlp.__class__ = Doubled
        layer.self_attn.register_forward_hook(lambda *_: None)
    del layer
    code, other = CodeAtStart(ModelFacts.of(model), True, None), weakref.ref(model.model.layers[1].self_attn)
    model.model.layers = model.model.layers[:1]
    code.forget_others(model)
    gc.collect()
    assert other() is None and code.problem(model) == ""
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert "model.layers.0 (LlamaDecoderLayer) got a hook" in code.problem(model)
