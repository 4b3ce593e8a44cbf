"""The order of the house as one table: which sub-package may import which, and what it may take from outside."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hf_longctx"

# Sub-packages (and single modules) from the bottom up. A line may import the lines above it; rooms on one line do not import
# each other.
ORDER = """
_version  families  journal  kernels  plan.core  timeline
runtime.core
plan.model  plan.solver  runtime.activations  runtime.tiles
plan.chunks  plan.cost  plan.memory  runtime.attention  runtime.parameters
page  plan.groups  plan.policies  runtime.process_groups  runtime.states  sim.models  sim.workloads
hf.config
hf.ranks  plan.predict  runtime.execution  sim.baselines
hf.models  plan.room  runtime.measure  sim.execution  sim.longest
hf.checkpoints  plan.pipeline
plan.planner
plan.stage_count
plan.setup
sim.memory_use  sim.scenario
sim.rivals  sim.run_replay  sim.stages
hf.planning  sim.ablation
hf.data  sim.forecast
hf.rules  sim.output
hf.start
hf.calibration  hf.log_probs  hf.self_test
hf.run
hf.engine  hf.trainer
cli  hf.callback  hf.evaluation  integrations
"""

# Rooms outside `runtime` that it may import: the planner decides, the runtime obeys.
BELOW_RUNTIME = ("timeline", "kernels", "plan.core", "plan.model")

# Packages from outside that a layer may import, besides the standard library; those in brackets only inside functions.
OUTSIDE = {
    "families": "",
    "timeline": "(matplotlib)",
    "journal": "",
    "page": "(jinja2) (plotly)",
    "plan": "numpy",
    "plan.solver": "numpy (pulp) (highspy)",
    "sim": "numpy (matplotlib) (pyarrow) (yaml)",
    "kernels": "torch triton",
    "runtime": "torch numpy psutil (flash_attn) (liger_kernel) (torchao)",
    "hf": (
        "torch numpy transformers accelerate datasets peft tqdm psutil xxhash safetensors huggingface_hub pyarrow jinja2 "
        "packaging (matplotlib) (bitsandbytes) (trl) (PIL) (av) (yaml)"
    ),
    # each module is imported by its framework alone
    "integrations": "torch transformers peft trl packaging omegaconf verl axolotl pydantic",
    "cli": "(torch) (transformers) (accelerate) (numpy) (yaml) (rich)",
}

# Modules that may use private names of transformers, and torch.distributed is nothing for kernels.
PRIVATE_TRANSFORMERS = ("hf.rules.models", "hf.models.cutting", "hf.trainer")
# Data that is read from a package higher up: profiles of hardware lie with the recipes, and commands start these.
DATA_ABOVE = {("plan.cost", "recipes"), ("cli", "recipes")}

# Packages that the planner, the simulator and the command line start without.
FRAMEWORKS = ("torch", "transformers", "accelerate", "triton", "peft", "trl", "datasets", "huggingface_hub", "flash_attn")


@dataclass(frozen=True, slots=True)
class Import:
    """A module, or a name of a module, that a file imports; `at_start`: when the file itself is imported."""

    name: str
    line: int
    at_start: bool
    is_text: bool = False


def levels() -> dict[str, int]:
    """Every room of the table with its line, counted from the bottom."""
    return {room: level for level, line in enumerate(ORDER.split("\n")) for room in line.split()}


def module_of(path: str) -> str:
    """The dotted name under which the file at `path` (from the repository root) is imported, without the package's name."""
    parts = list(Path(path).with_suffix("").parts)
    # kernels/longctx is installed as hf_longctx.kernels
    parts[: 2 if parts[0] == "kernels" else 1] = ["kernels"] if parts[0] == "kernels" else []
    return ".".join(part for part in parts if part != "__init__")


def longest_key(module: str, keys: Iterator[str] | dict[str, object]) -> str:
    """The longest of `keys` that is `module` or one of its parents; empty where none is."""
    return max((key for key in keys if is_under(module, key)), key=len, default="")


def is_under(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


@cache
def imports_of(source: str, path: str) -> tuple[Import, ...]:
    """Every import of a file: statements at any depth, relative ones, and texts that name a module of the package."""
    return tuple(_imports_in(source, path))


def _imports_in(source: str, path: str) -> Iterator[Import]:
    package = [PACKAGE, *module_of(path).split(".")][:-1]
    if path.endswith("__init__.py"):
        package = [PACKAGE, *module_of(path).split(".")]
    tree = ast.parse(source)
    delayed = {id(inner) for node in ast.walk(tree) if _delays(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        at_start = id(node) not in delayed
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_start)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parent = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{parent}.{alias.name}", node.lineno, at_start)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(rf"{PACKAGE}(\.\w+)+", node.value):
                yield Import(node.value, node.lineno, at_start, is_text=True)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.args[0].value, node.lineno, at_start)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("torch", "transformers"):
            # torch.distributed.x after `import torch`, transformers._x after `import transformers`
            yield Import(f"{node.value.id}.{node.attr}", node.lineno, False)


def _delays(node: ast.AST) -> bool:
    """Whether the body of `node` does not run at import: functions, and blocks for the type checker."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def violations(source: str, path: str) -> list[str]:
    """Imports of the file at `path` that the tables do not allow, as readable lines."""
    module = module_of(path)
    found = set()
    for item in imports_of(source, path):
        own = item.name.removeprefix(f"{PACKAGE}.") if is_under(item.name, PACKAGE) else ""
        complaint = _complaint_inside(module, item, own) if own else _complaint_outside(module, item)
        if complaint:
            found.add(f"{path}:{item.line}: {complaint}")
    return sorted(found)


def _complaint_inside(module: str, item: Import, imported: str) -> str:
    if module == "" or (module == "recipes" and imported == ""):
        # public names of the package are loaded on first use
        return "" if not item.at_start or item.is_text or is_under(imported, "_version") else f"{item.name} at module level"
    room, other = longest_key(module, levels()), longest_key(imported, levels())
    if any(is_under(room, low) and is_under(imported, high) for low, high in DATA_ABOVE) and item.is_text:
        return ""
    if not room:
        return f"{module} is in no room of the table"
    if not other:
        return f"{room} must not import {item.name}, which is in no room of the table"
    if room == other:
        return ""
    if levels()[other] >= levels()[room]:
        return f"{room} must not import {other}, which stands beside or above it"
    if is_under(room, "runtime") and not is_under(other, "runtime") and other not in BELOW_RUNTIME:
        return f"runtime may import {', '.join(BELOW_RUNTIME)} only, not {other}"
    if room == "kernels" or (room == "timeline"):
        return f"{room} stands alone and must not import {other}"
    if is_under(room, "cli") and item.at_start and not is_under(other, "_version"):
        return f"{item.name} is imported at module level; import it inside the command"
    return ""


def _complaint_outside(module: str, item: Import) -> str:
    top = item.name.split(".")[0]
    if top in sys.stdlib_module_names or top == PACKAGE:
        return "" if top != PACKAGE or module not in ("timeline", "kernels") else f"{module} must not import {PACKAGE}"
    layer = longest_key(module, OUTSIDE)
    allowed = OUTSIDE.get(layer, "").split()
    if top not in allowed and not (f"({top})" in allowed and not item.at_start):
        return f"{layer or PACKAGE} must not import {item.name}" + (" at module level" if f"({top})" in allowed else "")
    if layer == "kernels" and is_under(item.name, "torch.distributed"):
        return f"kernels must not import {item.name}"
    is_private = any(part.startswith("_") and not part.startswith("__") for part in item.name.split("."))
    if top == "transformers" and is_private and not any(is_under(module, each) for each in PRIVATE_TRANSFORMERS):
        return f"{item.name} is private to transformers"
    return ""


def source_files() -> list[str]:
    files = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    return sorted(str(file.relative_to(ROOT)) for file in files)


@cache
def _import_graph() -> dict[str, set[str]]:
    """Files of the package and the files that each of them imports."""
    modules = {module_of(path) for path in source_files()}
    graph: dict[str, set[str]] = {}
    for path in source_files():
        names = [
            item.name.removeprefix(f"{PACKAGE}.") for item in imports_of((ROOT / path).read_text(), path) if not item.is_text
        ]
        targets = (name if name in modules else name.rpartition(".")[0] for name in names)
        graph[module_of(path)] = {target for target in targets if target in modules and target}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Some modules that import each other in a circle, in order; empty where there are none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        found = next(filter(None, (walk(other, [*path, module]) for other in sorted(graph.get(module, ())))), [])
        done.add(module)
        return found

    return next(filter(None, (walk(module, []) for module in sorted(graph))), [])


def test_every_file_has_a_room() -> None:
    files = source_files()
    assert {f"{PACKAGE}/plan/planner.py", f"{PACKAGE}/timeline.py", "kernels/longctx/__init__.py"} <= set(files)
    lost = [path for path in files if not path.endswith("__init__.py") and not longest_key(module_of(path), levels())]
    assert lost == []


@pytest.mark.parametrize("path", source_files())
def test_a_file_imports_only_what_its_room_may(path: str) -> None:
    assert violations((ROOT / path).read_text(), path) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(_import_graph()) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_the_wheel_has_every_folder_but_benchmarks() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    folders = {str(file.parent.relative_to(ROOT)) for top in (PACKAGE, "recipes") for file in (ROOT / top).rglob("*.py")}
    names = {folder.replace("/", ".") for folder in folders}
    expected = {name if is_under(name, PACKAGE) else f"{PACKAGE}.{name}" for name in names} | {f"{PACKAGE}.kernels"}
    assert listed == {name for name in expected if not is_under(name, f"{PACKAGE}.recipes.bench")}
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("hf_longctx/timeline.py", "import torch"),
        ("hf_longctx/timeline.py", "from hf_longctx.plan.core import types"),
        ("hf_longctx/plan/cost/traffic.py", "import torch.nn as nn"),
        ("hf_longctx/plan/cost/traffic.py", "def f():\n    if True:\n        from transformers import Trainer"),
        ("hf_longctx/plan/cost/traffic.py", "try:\n    import accelerate\nexcept ImportError:\n    pass"),
        ("hf_longctx/plan/cost/traffic.py", "import pulp"),
        ("hf_longctx/plan/cost/traffic.py", "import scipy.optimize"),
        ("hf_longctx/plan/cost/traffic.py", "from hf_longctx.plan.groups import greedy"),
        ("hf_longctx/plan/cost/traffic.py", "from hf_longctx.plan.memory.stage import part_state_bytes"),
        ("hf_longctx/plan/cost/traffic.py", "from hf_longctx.runtime.process_groups import pool"),
        ("hf_longctx/plan/cost/traffic.py", "from hf_longctx import hf"),
        ("hf_longctx/plan/cost/traffic.py", "from ...sim import workloads"),
        ("hf_longctx/plan/cost/traffic.py", "from ... import cli"),
        ("hf_longctx/plan/cost/traffic.py", "import importlib\nx = importlib.import_module('torch')"),
        ("hf_longctx/plan/cost/traffic.py", "import importlib\nx = importlib.import_module('hf_longctx.hf.config')"),
        ("hf_longctx/plan/cost/traffic.py", "x = importlib.resources.files('hf_longctx.hf.models')"),
        ("hf_longctx/plan/core/types.py", "from hf_longctx.plan.planner import plan_step"),
        ("hf_longctx/plan/core/orders.py", "def f():\n    from hf_longctx.plan.planner import plan_step"),
        ("hf_longctx/plan/solver.py", "import highspy"),
        ("hf_longctx/plan/solver.py", "def f():\n    import torch"),
        ("hf_longctx/sim/workloads.py", "import triton"),
        ("hf_longctx/sim/workloads.py", "from hf_longctx.runtime.process_groups import GroupPool"),
        ("kernels/longctx/rms.py", "import torch.distributed as dist"),
        ("kernels/longctx/rms.py", "from torch import distributed"),
        ("kernels/longctx/rms.py", "import torch\nx = torch.distributed.get_rank()"),
        ("kernels/longctx/rms.py", "from hf_longctx.plan.core import types"),
        ("kernels/longctx/rms.py", "from ..plan import core"),
        ("kernels/longctx/rms.py", "import hf_longctx"),
        ("kernels/longctx/rms.py", "import transformers"),
        ("hf_longctx/runtime/measure.py", "import transformers"),
        ("hf_longctx/runtime/measure.py", "from peft import LoraConfig"),
        ("hf_longctx/runtime/measure.py", "from hf_longctx.hf.config import LongContextConfig"),
        ("hf_longctx/runtime/measure.py", "from hf_longctx.sim import workloads"),
        ("hf_longctx/runtime/measure.py", "from hf_longctx.plan.cost.cost_model import CostModel"),
        ("hf_longctx/runtime/measure.py", "from hf_longctx.plan import planner"),
        ("hf_longctx/runtime/attention/ring.py", "from hf_longctx.runtime.execution.executor import StepExecutor"),
        ("hf_longctx/hf/data/sampler.py", "from hf_longctx.cli import main"),
        ("hf_longctx/hf/data/sampler.py", "from hf_longctx.recipes import sft"),
        ("hf_longctx/hf/data/sampler.py", "from transformers.trainer import _is_peft_model"),
        ("hf_longctx/hf/data/sampler.py", "from transformers._private import thing"),
        ("hf_longctx/hf/data/sampler.py", "import transformers\nx = transformers._LazyModule"),
        ("hf_longctx/hf/data/sampler.py", "import pulp"),
        ("hf_longctx/cli/main.py", "import numpy"),
        ("hf_longctx/cli/main.py", "from hf_longctx.plan.planner import plan_step"),
        ("hf_longctx/cli/main.py", "if True:\n    import torch"),
        ("hf_longctx/cli/main.py", "class A:\n    import yaml"),
        ("hf_longctx/__init__.py", "from hf_longctx.hf.config import LongContextConfig"),
        ("hf_longctx/__init__.py", "import torch"),
        ("hf_longctx/drawer/any.py", "from hf_longctx.plan.core.types import Chunk"),
    ],
)
def test_the_checker_catches_a_planted_violation(path: str, source: str) -> None:
    assert len(violations(source, path)) >= 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("hf_longctx/plan/cost/traffic.py", "import numpy as np\nfrom . import profiles\nfrom ..core import types"),
        ("hf_longctx/plan/cost/profiles.py", "x = importlib.resources.files('hf_longctx.recipes')"),
        ("hf_longctx/plan/solver.py", "def f():\n    import highspy"),
        (
            "hf_longctx/sim/forecast.py",
            "import numpy\nfrom hf_longctx.plan.planner import plan_step\ndef f():\n    import matplotlib",
        ),
        ("kernels/longctx/rms.py", "import torch, triton\nfrom . import reference\nfrom hf_longctx.kernels import reference"),
        ("hf_longctx/runtime/measure.py", "import torch.distributed\nfrom hf_longctx.plan.core.types import Chunk"),
        (
            "hf_longctx/runtime/measure.py",
            "from hf_longctx.plan.core import types\nfrom hf_longctx.timeline import TimelineEvent",
        ),
        ("hf_longctx/hf/data/sampler.py", "from transformers import __version__, Trainer"),
        ("hf_longctx/hf/rules/models.py", "from transformers.trainer import _is_peft_model"),
        ("hf_longctx/hf/trainer/trainer.py", "import transformers._private"),
        ("hf_longctx/cli/main.py", "import argparse\nfrom hf_longctx._version import __version__"),
        ("hf_longctx/cli/main.py", "def run():\n    import torch\n    from hf_longctx.hf.config import LongContextConfig"),
        ("hf_longctx/__init__.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hf_longctx.hf import config"),
    ],
)
def test_the_checker_lets_the_allowed_pass(path: str, source: str) -> None:
    assert violations(source, path) == []


_PLAN_AND_SHOW = """
from hf_longctx.plan.core.settings import GENERIC_CPU, ClusterSpec
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.serialize import plan_to_json
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.planner import plan_step
model, cluster = ModelSpec(2, 8, 16, 4, 2, 2, 10, 100), ClusterSpec(4, 4, GENERIC_CPU)
costs = CostModel(model, cluster, default_coefficients(model, cluster))
plan = plan_step(0, [70, 30, 20], costs, PlannerConfig(50, (1, 2, 4)))
import pathlib, tempfile
from hf_longctx.cli.main import main
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "plan.json")
    file.write_text(plan_to_json(plan))
    assert main(["show", str(file)]) == 0
"""


@pytest.mark.parametrize(
    "code",
    [
        "import hf_longctx",
        "import hf_longctx.timeline",
        "import hf_longctx.plan.planner",
        "import hf_longctx.plan.cost.fitting",
        "import hf_longctx.cli.main; hf_longctx.cli.main.build_parser()",
        _PLAN_AND_SHOW,
    ],
    ids=["package", "timeline", "planner", "fitting", "cli", "plan and show"],
)
def test_the_light_half_runs_without_loading_a_framework(code: str) -> None:
    check = f"\nimport sys\nloaded = [name for name in {FRAMEWORKS!r} if name in sys.modules]\nassert not loaded, loaded"
    run = subprocess.run([sys.executable, "-c", code + check], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_there_is_no_package_that_shadows_another_distribution() -> None:
    # kernels/ and recipes/accelerate/ would hide the distributions of these names whenever the root is on sys.path
    for folder in ("kernels", "recipes/accelerate", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_test_files_have_different_names() -> None:
    """pytest imports test files by their bare name (prepend mode), so two of one name would collide."""
    names = [file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
