"""The layer table of the design as a test over the syntax trees: imports only go down, at any depth of a file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hf_longctx"
MAX_LINES = {PACKAGE: 600, "kernels": 800}

_FRAMEWORKS = ("torch", "transformers", "accelerate", "triton", "peft", "trl", "datasets", "huggingface_hub", "flash_attn")
_SOLVERS = ("pulp", "highspy")
# layer -> what it must never import; a name also forbids everything below it
_FORBIDDEN: dict[str, tuple[str, ...]] = {
    "timeline": (*_FRAMEWORKS, *_SOLVERS, PACKAGE),
    "plan": (*_FRAMEWORKS, *(f"{PACKAGE}.{layer}" for layer in ("sim", "runtime", "hf", "cli", "kernels", "recipes"))),
    "sim": (*_FRAMEWORKS, *(f"{PACKAGE}.{layer}" for layer in ("runtime", "hf", "cli", "kernels", "recipes"))),
    "kernels": (*(name for name in _FRAMEWORKS if name not in ("torch", "triton")), "torch.distributed"),
    "runtime": (
        *("transformers", "accelerate", "peft", "trl", "datasets", *_SOLVERS),
        *(f"{PACKAGE}.{layer}" for layer in ("hf", "sim", "cli", "recipes")),
    ),
    "hf": (f"{PACKAGE}.cli", f"{PACKAGE}.recipes", *_SOLVERS),
    "cli": (f"{PACKAGE}.recipes",),
}
_RUNTIME_MAY_USE_OF_PLAN = tuple(f"{PACKAGE}.plan.{name}" for name in ("types", "specs", "serialize", "sharding"))
_MAY_USE_PRIVATE_TRANSFORMERS = ("compat.py", "stages.py", "trainer.py")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module or name of a module, as far as the syntax can tell; `at_start`: it runs when the file is imported."""

    names: tuple[str, ...]
    line: int
    at_start: bool


def module_of(path: str) -> str:
    """The dotted name under which the file at `path` (from the repository root) is imported."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] == "kernels":
        # kernels/longctx is installed as hf_longctx.kernels
        parts[:2] = [PACKAGE, "kernels"]
    return ".".join(parts)


def layer_of(path: str) -> str:
    parts = module_of(path).split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(source: str, path: str) -> Iterator[Import]:
    """Every import of a file: statements at any depth, relative ones resolved, and importlib calls with a literal name."""
    package = module_of(path).split(".")[:-1]
    tree = ast.parse(source)
    delayed = {id(inner) for node in ast.walk(tree) if _delays(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        at_start = id(node) not in delayed
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import((alias.name,), node.lineno, at_start)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parent = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import((parent, f"{parent}.{alias.name}"), node.lineno, at_start)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import((node.args[0].value,), node.lineno, at_start)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("torch", "transformers"):
            # torch.distributed.x after `import torch`, transformers._x after `import transformers`
            yield Import((f"{node.value.id}.{node.attr}",), node.lineno, False)


def _delays(node: ast.AST) -> bool:
    """Whether what stands inside does not run at import: function bodies and blocks for the type checker."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def is_under(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def violations(source: str, path: str) -> list[str]:
    """What the file at `path` imports against the layer table, as readable lines."""
    found = []
    for item in imports_of(source, path):
        for complaint in _complaints(item, path):
            found.append(f"{path}:{item.line}: {complaint}")
    return sorted(set(found))


def _complaints(item: Import, path: str) -> Iterator[str]:
    layer, file, name = layer_of(path), Path(path).name, item.names[-1]
    for parent in _FORBIDDEN.get(layer, ()):
        if is_under(name, parent):
            yield f"{layer} must never import {name}"
    top = name.split(".")[0]
    if layer == "plan" and file != "solver.py" and top in _SOLVERS:
        yield f"only solver.py may import {name}"
    if layer == "plan" and top not in {*sys.stdlib_module_names, "numpy", *_SOLVERS, PACKAGE, *_FRAMEWORKS}:
        yield f"plan is stdlib and numpy, not {name}"
    if layer == "kernels" and top == PACKAGE and not is_under(name, f"{PACKAGE}.kernels"):
        yield f"kernels must never import {name}"
    is_of_plan = is_under(name, f"{PACKAGE}.plan")
    if layer == "runtime" and is_of_plan and not any(is_under(name, allowed) for allowed in _RUNTIME_MAY_USE_OF_PLAN):
        yield f"runtime must not import {name}; of plan only {', '.join(_RUNTIME_MAY_USE_OF_PLAN)}"
    is_private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    if layer == "hf" and file not in _MAY_USE_PRIVATE_TRANSFORMERS and top == "transformers" and is_private:
        yield f"{name} is private to transformers"
    if layer in ("cli", "", "__init__") and item.at_start:
        light = top in sys.stdlib_module_names or is_under(name, f"{PACKAGE}._version") or is_under(name, f"{PACKAGE}.cli")
        if not light:
            yield f"{name} is imported at module level; import it inside the command or on first use"


def source_files() -> list[str]:
    files = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    return sorted(str(file.relative_to(ROOT)) for file in files)


def test_the_walk_finds_the_package_and_the_kernels() -> None:
    files = source_files()
    assert {f"{PACKAGE}/plan/planner.py", f"{PACKAGE}/timeline.py", "kernels/longctx/__init__.py"} <= set(files)
    assert {layer_of(file) for file in files} >= {"timeline", "plan", "runtime", "hf", "cli", "kernels"}


@pytest.mark.parametrize("path", source_files())
def test_a_file_imports_only_what_its_layer_may(path: str) -> None:
    assert violations((ROOT / path).read_text(), path) == []


@pytest.mark.parametrize("path", source_files())
def test_no_file_is_too_long(path: str) -> None:
    num_lines = len((ROOT / path).read_text().splitlines())
    limit = MAX_LINES[path.split("/")[0]]
    assert num_lines <= limit, f"{path} has {num_lines} lines; cut it in two along its ideas, {limit} is the cap"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("hf_longctx/timeline.py", "import torch"),
        ("hf_longctx/timeline.py", "from hf_longctx.plan import types"),
        ("hf_longctx/plan/cost/cost_model.py", "import torch.nn as nn"),
        ("hf_longctx/plan/cost/cost_model.py", "def f():\n    if True:\n        from transformers import Trainer"),
        ("hf_longctx/plan/cost/cost_model.py", "try:\n    import accelerate\nexcept ImportError:\n    pass"),
        ("hf_longctx/plan/cost/cost_model.py", "import pulp"),
        ("hf_longctx/plan/cost/cost_model.py", "from highspy import Highs"),
        ("hf_longctx/plan/cost/cost_model.py", "import scipy.optimize"),
        ("hf_longctx/plan/cost/cost_model.py", "from hf_longctx.runtime import mesh"),
        ("hf_longctx/plan/cost/cost_model.py", "from hf_longctx import hf"),
        ("hf_longctx/plan/cost/cost_model.py", "from ..sim import workloads"),
        ("hf_longctx/plan/cost/cost_model.py", "from .. import cli"),
        ("hf_longctx/plan/cost/cost_model.py", "import importlib\nx = importlib.import_module('torch')"),
        ("hf_longctx/plan/solver/solve.py", "import pulp, torch"),
        ("hf_longctx/sim/workloads.py", "import triton"),
        ("hf_longctx/sim/workloads.py", "from hf_longctx.runtime.mesh import GroupPool"),
        ("kernels/longctx/rms.py", "import torch.distributed as dist"),
        ("kernels/longctx/rms.py", "from torch import distributed"),
        ("kernels/longctx/rms.py", "import torch\nx = torch.distributed.get_rank()"),
        ("kernels/longctx/rms.py", "from hf_longctx.plan import types"),
        ("kernels/longctx/rms.py", "from ..plan import types"),
        ("kernels/longctx/rms.py", "import hf_longctx"),
        ("kernels/longctx/rms.py", "import transformers"),
        ("hf_longctx/runtime/process_groups/pool.py", "import transformers"),
        ("hf_longctx/runtime/process_groups/pool.py", "from peft import LoraConfig"),
        ("hf_longctx/runtime/process_groups/pool.py", "from hf_longctx.hf.config import LongContextConfig"),
        ("hf_longctx/runtime/process_groups/pool.py", "from hf_longctx.sim import workloads"),
        ("hf_longctx/runtime/process_groups/pool.py", "from hf_longctx.plan.cost import CostModel"),
        ("hf_longctx/runtime/process_groups/pool.py", "from hf_longctx.plan import planner"),
        ("hf_longctx/runtime/process_groups/pool.py", "from ..plan.validate import validate_plan"),
        ("hf_longctx/runtime/process_groups/pool.py", "import hf_longctx.plan.prediction.evaluate"),
        ("hf_longctx/hf/data/sampler.py", "from hf_longctx.cli import main"),
        ("hf_longctx/hf/data/sampler.py", "from transformers.trainer import _is_peft_model"),
        ("hf_longctx/hf/data/sampler.py", "from transformers._private import thing"),
        ("hf_longctx/hf/data/sampler.py", "import transformers\nx = transformers._LazyModule"),
        ("hf_longctx/cli/main.py", "import numpy"),
        ("hf_longctx/cli/main.py", "from hf_longctx.plan.planner import plan_step"),
        ("hf_longctx/cli/main.py", "if True:\n    import torch"),
        ("hf_longctx/cli/main.py", "class A:\n    import yaml"),
        ("hf_longctx/__init__.py", "from hf_longctx.hf.config import LongContextConfig"),
        ("hf_longctx/__init__.py", "import torch"),
    ],
)
def test_the_checker_catches_a_planted_violation(path: str, source: str) -> None:
    assert len(violations(source, path)) >= 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "hf_longctx/plan/cost/cost_model.py",
            "import numpy as np\nfrom hf_longctx.timeline import TimelineEvent\nfrom . import types",
        ),
        ("hf_longctx/plan/solver/solve.py", "import pulp\nimport highspy"),
        ("hf_longctx/sim/workloads.py", "import numpy, matplotlib\nfrom hf_longctx.plan.planner import plan_step"),
        ("kernels/longctx/rms.py", "import torch, triton\nfrom . import reference\nfrom hf_longctx.kernels import reference"),
        ("hf_longctx/runtime/process_groups/pool.py", "import torch.distributed\nfrom hf_longctx.plan.types import Chunk"),
        (
            "hf_longctx/runtime/process_groups/pool.py",
            "from hf_longctx.plan import types, sharding\nfrom hf_longctx.timeline import TimelineEvent",
        ),
        (
            "hf_longctx/hf/data/sampler.py",
            "from transformers import __version__, Trainer\nfrom hf_longctx.plan.cost import CostModel",
        ),
        ("hf_longctx/hf/start/model_checks.py", "from transformers.trainer import _is_peft_model"),
        ("hf_longctx/hf/trainer/trainer.py", "import transformers._private"),
        ("hf_longctx/cli/main.py", "import argparse\nfrom hf_longctx._version import __version__"),
        ("hf_longctx/cli/main.py", "def run():\n    import torch\n    from hf_longctx.hf.config import LongContextConfig"),
        ("hf_longctx/__init__.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hf_longctx.hf import config"),
    ],
)
def test_the_checker_lets_the_allowed_pass(path: str, source: str) -> None:
    assert violations(source, path) == []


_PLAN_AND_SHOW = """
from hf_longctx.plan.cost import CostModel, default_coefficients
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.serialize import plan_to_json
from hf_longctx.plan.specs import GENERIC_CPU, ClusterSpec, ModelSpec, PlannerConfig
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
    ids=["package", "timeline", "planner", "calibration", "cli", "plan and show"],
)
def test_the_light_half_runs_without_loading_a_framework(code: str) -> None:
    check = f"\nimport sys\nloaded = [name for name in {_FRAMEWORKS!r} if name in sys.modules]\nassert not loaded, loaded"
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
