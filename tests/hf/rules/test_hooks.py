"""Overrides and reads of names that nobody promises: all are in the tables, and a version without one is refused by name.

CI runs this file also with the newest release of every package (`newest` in `.ci/run`).
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.stock_runs import make_stock_trainer, quiet_config
from helpers.trainers.trainer_runs import make_trainer
from transformers import Trainer

import hf_longctx.hf
from hf_longctx import LongContextCallback, LongContextMixin, LongContextTrainer
from hf_longctx.hf.rules import hooks
from hf_longctx.hf.rules.hooks import HOOKS, READS, TRL_HOOKS, hook_problems, place_problems, read_problems

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)")
PACKAGE = Path(hf_longctx.__file__).parent
# callers of an override without which a training is right
NOT_NEEDED = {"save_model": {"_tune_save_checkpoint", "push_to_hub"}}
ROWS = random_rows([9, 14], seed=0)


def our_classes() -> list[type]:
    """Every class of the package that may stand in front of a trainer's class: the mixins, found by loading all modules."""
    found = set[type]()
    for module in pkgutil.walk_packages(hf_longctx.hf.__path__, "hf_longctx.hf."):
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and value.__name__.endswith("Mixin"):
                found |= {cls for cls in value.__mro__ if cls.__module__.startswith("hf_longctx")}
    assert {LongContextMixin} < found
    return sorted(found, key=lambda cls: cls.__name__)


def own_names(cls: type) -> set[str]:
    return {name for name in vars(cls) if not (name.startswith("__") and name.endswith("__"))}


def overridden(trainer: type) -> set[str]:
    theirs = set[str]().union(*(own_names(cls) for cls in trainer.__mro__ if cls is not object))
    return theirs & set[str]().union(*map(own_names, our_classes()))


@functools.cache
def looked_up_on_self(cls: type) -> dict[str, set[str]]:
    """Names that every method of a class looks up on `self`, by its source."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        method.name: {
            node.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        for method in tree.body
        if isinstance(method, ast.FunctionDef)
    }


def callers_of(name: str, cls: type) -> set[str]:
    return {method for method, names in looked_up_on_self(cls).items() if name in names}


def trl_trainers() -> list[type]:
    trl = importlib.import_module("trl")
    return [getattr(trl, f"{kind}Trainer") for kind in ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward")]


def test_every_method_of_trainer_that_a_mixin_overrides_is_in_the_table() -> None:
    assert overridden(Trainer) == HOOKS.keys()


@pytest.mark.parametrize("name", HOOKS)
def test_the_table_names_all_callers_in_the_installed_transformers(name: str) -> None:
    assert callers_of(name, Trainer) - NOT_NEEDED.get(name, set()) == set(HOOKS[name])


@needs_trl
@pytest.mark.trl
def test_every_method_of_a_trainer_of_trl_that_a_mixin_overrides_is_in_the_table() -> None:
    for trainer in trl_trainers():
        table = TRL_HOOKS.get(trainer.__name__, {})
        assert overridden(trainer) == HOOKS.keys() | table.keys(), trainer
        for name, callers in table.items():
            assert callers_of(name, trainer) == set(callers), (trainer, name)
        assert hook_problems(type("Mine", (LongContextMixin, trainer), {})) == []


def test_installed_versions_have_what_is_overridden_and_read() -> None:
    assert hook_problems(Trainer) == hook_problems(LongContextTrainer) == []
    assert read_problems() == []


@pytest.mark.parametrize("place", READS)
def test_installed_versions_have_every_name_that_is_read(place: str) -> None:
    module = place.partition(":")[0]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"needs {module}")
    importlib.import_module(module)
    assert place_problems(place) == []


def test_a_callback_finds_the_checkpoint_in_the_method_that_begins_a_training() -> None:
    # `LongContextCallback` looks for the variable `resume_from_checkpoint` in the first method of a trainer on the stack
    assert "self.callback_handler.on_train_begin" in inspect.getsource(Trainer._inner_training_loop)


def newer(name: str = "", new: Any = None, without: str = "") -> type:
    """`Trainer` as a newer version might have it: a method replaced, added, or gone."""
    names = {key: value for key, value in vars(Trainer).items() if key not in (without, "__dict__", "__weakref__")}
    return type("Trainer", Trainer.__bases__, names | ({name: new} if name else {}))


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def _unnamed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _forgetful(self: Any, *args: Any, **kwargs: Any) -> None:
    # the name alone, in a text, an argument, on `super()` or on another object, is no call
    """Calls _clip_grad_norm."""
    self.model._clip_grad_norm("_clip_grad_norm", _clip_grad_norm=kwargs)
    super(Trainer, self)._clip_grad_norm()


@pytest.mark.parametrize("name", HOOKS)
def test_a_method_that_is_gone_is_refused_by_name(name: str) -> None:
    (problem, *_) = [each for each in hook_problems(newer(without=name)) if f"no method {name}," in each]
    assert problem == (
        f"transformers's Trainer has no method {name}, which plans override; take another version: "
        f"pip install 'transformers>=5.17,<5.25' ({transformers.__version__} is installed)"
    )


@pytest.mark.parametrize(("name", "caller"), [(name, caller) for name in HOOKS for caller in HOOKS[name]])
def test_a_caller_that_calls_no_more_is_refused_by_name(name: str, caller: str) -> None:
    there: dict[str, Any] = {"__name__": "transformers.trainer"}
    exec("def changed(self, *args, **kwargs): pass", there)
    found = hook_problems(newer(caller, there["changed"]))
    expected = (
        f"transformers's Trainer.{caller} does not call {name}, which plans override and which would be left out in silence"
    )
    assert f"{expected}; take another version: {hooks.known_version('transformers')}" in found


def test_another_package_that_replaced_a_method_is_named() -> None:
    found = hook_problems(newer("save_model", lambda self, *args, **kwargs: None))
    assert [problem.partition(" which")[0] for problem in found] == [
        f"transformers's Trainer.save_model was replaced by {__name__} and does not call _save,"
    ]


def test_only_a_call_on_the_trainer_itself_counts() -> None:
    found = hook_problems(newer("_run_epoch", _forgetful))
    assert any(f"Trainer._run_epoch was replaced by {__name__} and does not call _clip_grad_norm" in problem for problem in found)


@pytest.mark.parametrize("wrap", [_same, _unnamed, functools.partialmethod])
def test_wrapped_callers_are_read_through(wrap: Callable[..., Any]) -> None:
    assert hook_problems(newer("_run_epoch", wrap(Trainer._run_epoch))) == []


def test_callers_are_followed_to_the_class_behind() -> None:
    class Trained(Trainer):
        def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
            super()._run_epoch(*args, **kwargs)

    class Lost(Trainer):
        def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
            """Does not call the method behind."""

    for cls in (Trained, Lost):
        # users' own classes may leave out what they like
        assert hook_problems(cls) == hook_problems(type("Mine", (LongContextMixin, cls), {})) == []
        cls.__module__ = "transformers.trainer_of_next_year"
    assert hook_problems(Trained) == []
    assert len(hook_problems(Lost)) == len([name for name in HOOKS if "_run_epoch" in HOOKS[name]])


@pytest.mark.parametrize("name", ["_stop", "_placed_model", "_report", "stopped_by"])
def test_a_newer_method_that_our_own_names_would_hide_is_refused(name: str) -> None:
    mine = type("Mine", (LongContextMixin, newer(name, lambda self: None)), {})
    if name in {own for cls in our_classes() for own in own_names(cls)}:
        (problem,) = hook_problems(mine)
        assert f"transformers's Trainer has a {name} of its own, which plans would hide" in problem
    else:
        # an attribute of instances
        assert name == "_stop"


# --- every door


def _refused(door: str, folder: str) -> None:
    if door == "trainer":
        make_trainer(ModelCase(), ROWS, folder, arguments={"max_steps": 1})
    elif door == "attached":
        LongContextCallback(quiet_config()).attach(make_stock_trainer(ModelCase(), ROWS, folder, {"max_steps": 1}))
    else:
        callback = LongContextCallback(quiet_config())
        make_stock_trainer(ModelCase(), ROWS, folder, {"max_steps": 1}, callbacks=[callback]).train()


@pytest.mark.parametrize("door", ["trainer", "attached", "alone"])
def test_every_door_refuses_a_trainer_that_calls_an_override_no_more(
    door: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Trainer, "_save_checkpoint", lambda self, model, trial: None)
    with pytest.raises(ValueError, match=r"Trainer\._save_checkpoint was replaced by .* and does not call _save_rng"):
        _refused(door, str(tmp_path))


@pytest.mark.parametrize("door", ["trainer", "attached", "alone"])
def test_every_door_refuses_a_version_without_a_name_that_is_read(
    door: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(READS, "transformers.trainer:Trainer", {"_of_last_year": ()})
    with pytest.raises(
        ValueError, match=r"transformers\.trainer\.Trainer has no _of_last_year, which plans read; take another version"
    ):
        _refused(door, str(tmp_path))


@needs_trl
@pytest.mark.trl
def test_a_trainer_of_trl_that_calls_an_override_no_more_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trl = importlib.import_module("trl")
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", lambda self, model, inputs: None)
    mine = type("Mine", (LongContextMixin, trl.GRPOTrainer), {})
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(
        ValueError,
        match=r"trl's GRPOTrainer\._compute_loss was replaced by .* and does not call _get_per_token_logps_and_entropies",
    ):
        mine(model="none", reward_funcs=[], args=args, longctx_config=quiet_config())


# --- names that are read


def test_modules_that_are_not_loaded_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READS, "antigravity", {"_x": ()})
    assert read_problems() == [] and "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("reads", "problem"),
    [
        ({"planted": {"_read": ()}}, ""),
        ({"planted": {"_gone": ()}}, "planted has no _gone, which plans read"),
        ({"planted": {"_read": ("first", "second")}}, ""),
        ({"planted": {"_read": ("third",)}}, "planted._read has no parameter third"),
        ({"planted:Gone": {"_x": ()}}, "planted has no class Gone, of which plans read attributes"),
        ({"planted:Kept": {"_set_in_a_method": (), "_annotated": (), "_by_name": (), "_of_a_property": ()}}, ""),
        ({"planted:Kept": {"_of_nobody": ()}}, "planted.Kept has no _of_nobody, which plans read"),
    ],
)
def test_what_a_module_lacks_is_named(reads: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = ModuleType("planted")
    source = """
def _read(first, second=None): ...
class Kept:
    _annotated: int
    def begin(self): self._set_in_a_method = 1; setattr(self, "_by_name", 2)
    @property
    def value(self): return self._of_a_property
"""
    exec(source, vars(planted))
    monkeypatch.setitem(sys.modules, "planted", planted)
    monkeypatch.setattr(hooks, "known_version", "another {}".format)
    for place, names in reads.items():
        monkeypatch.setitem(READS, place, names)
    found = read_problems()
    assert found == ([f"{problem}; take another version: another planted"] if problem else [])


# private names of Python itself
PYTHONS = {
    "_SubParsersAction", "_actions", "_current_frames", "_exit", "_fields", "_forkserver", "_getframe", "_preload_modules",
    "_replace", "_asdict",
}  # fmt: skip
# private names that are read under a fallback, so that plans go on without them
FALLBACKS = {
    "_fsdp_param_groups", "_is_expert_parallel", "_end_backward_iteration", "_post_backward_pending",
    "_set_unsharded_grad_dtypes", "_torchdynamo_orig_callable", "_timeout", "_weight_conversions",
}  # fmt: skip
# operators of torch, which it keeps for programs that were exported
OPERATORS = re.compile(r"torch\.ops\.aten$")
# ends of names, and names of folders
NO_NAMES = {
    "_bias", "_entropy", "_fused", "_global", "_grid_thw", "_hooks", "_hybrid_shard_zero2", "_inv_freq", "_long_inv_freq",
    "_mean_token_accuracy",
    "_original_inv_freq", "_perplexity", "_runtime", "_s", "_scale_inv", "_samples_per_second", "_size",
    "_steps_per_second", "_text",
}  # fmt: skip
# names of operations of autograd's graph, which are compared
NODES = {"_AddLowRankBackward"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def _is_private(name: object) -> bool:
    return isinstance(name, str) and bool(re.fullmatch(r"_[A-Za-z]\w*", name)) and not name.startswith("_longctx")


def _own_attributes() -> set[str]:
    """Private names that our classes have: methods, fields, and what methods set on their own object."""
    found = set[str]()
    for _, tree in trees():
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in owner.body:
                found |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
                targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            for node in ast.walk(owner):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                    found |= {node.attr} if node.value.id in ("self", "cls", "made", "this") else set()
    return found


def foreign_names(path: str, tree: ast.Module, own: set[str]) -> Iterator[tuple[str, str]]:
    """Private names of other packages that a module reads, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("hf_longctx"):
            yield from ((each.name, f"{path}:{node.lineno}") for each in node.names if _is_private(each.name))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            if not OPERATORS.match(ast.unparse(node.value)):
                yield node.attr, f"{path}:{node.lineno}"
        elif isinstance(node, ast.Constant) and _is_private(node.value) and node.value not in own:
            yield str(node.value), f"{path}:{node.lineno}"


@pytest.mark.wide
def test_every_private_name_of_another_package_that_is_read_is_in_the_table() -> None:
    known = {name for names in READS.values() for name in names} | HOOKS.keys()
    known |= {name for names in TRL_HOOKS.values() for name in names}
    exempt, own = PYTHONS | FALLBACKS | NO_NAMES | NODES, _own_attributes()
    found = {}
    for path, tree in trees():
        if path != "hf/rules/hooks.py":
            found |= {name: line for name, line in foreign_names(path, tree, own) if name not in known | exempt}
    assert found == {}


def test_a_read_that_is_not_in_the_table_is_found() -> None:
    source = "from torch.x import _a\nb = model._b\nc = getattr(model, '_c')\nd = self._own\ne = torch.ops.aten._e"
    assert [name for name, _ in foreign_names("x.py", ast.parse(source), {"_own"})] == ["_a", "_b", "_c"]


@pytest.mark.wide
def test_no_row_of_the_table_is_left_over() -> None:
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "hooks.py")
    assert [name for names in READS.values() for name in names if not re.search(rf"\b{name}\b|_global", text)] == []
