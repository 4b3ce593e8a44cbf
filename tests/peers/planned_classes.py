"""Plugin of pytest for TRL's own tests: data sets lie in a local folder, trainers are ours, and outcomes go to a file.

Environment: LONGCTX_PEERS_HUB, the folder of `local_hub`; LONGCTX_PEERS_OUTCOMES, a file that gets a JSON line for each test;
LONGCTX_PEERS_STOCK=1, to leave TRL's classes as they are.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
from pathlib import Path
from typing import Any

import datasets
import local_hub
import pytest

# now, while the checkout, which has a package of this name too, is not on the path yet
import trl

_HUB = Path(os.environ["LONGCTX_PEERS_HUB"])
_OUTCOMES = Path(os.environ["LONGCTX_PEERS_OUTCOMES"])
_TRAINERS = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
_PACKAGE = f"{os.sep}hf_longctx{os.sep}"


def _read_locally() -> None:
    of_datasets = datasets.load_dataset

    def load_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        return of_datasets(local_hub.local_name(path, _HUB), *args, **kwargs)

    datasets.load_dataset = load_dataset


def _put_ours_in_place() -> None:
    from hf_longctx import LongContextMixin

    for name in _TRAINERS:
        theirs = getattr(trl, name)
        # tests patch methods of the module's class, which ours inherits
        setattr(trl, name, type(name, (LongContextMixin, theirs), {"__module__": __name__}))


def _fill_in_names() -> None:
    """Puts stand-ins where the tests import names that the installed TRL, of another version, does not have."""
    for file in (Path("tests/testing_utils.py"), *Path("tests").glob("test_*_trainer.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl" and not node.level:
                module = importlib.import_module(str(node.module))
                for name in (each.name for each in node.names if not hasattr(module, each.name)):
                    setattr(module, name, _stand_in(name))


def _stand_in(name: str) -> Any:
    def missing(*args: Any, **kwargs: Any) -> Any:
        # availability is asked for while tests are collected
        return False if name.startswith("is_") else pytest.skip(f"the installed TRL has no {name}")

    return missing


def pytest_configure(config: pytest.Config) -> None:
    for name in ("slow", "low_priority"):
        config.addinivalue_line("markers", f"{name}: of TRL")
    # done before test modules import names from them
    _fill_in_names()
    _read_locally()
    if os.environ.get("LONGCTX_PEERS_STOCK") != "1":
        _put_ours_in_place()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    # TRL's own hook clears frames, so what they hold is read before
    found = _refusal(call.excinfo.value) if call.excinfo is not None else ""
    report = (yield).get_result()
    if call.when == "call" or report.skipped or report.failed:
        _write(item.nodeid, report, found, call)


def _refusal(error: BaseException) -> str:
    """The message of a ValueError or RuntimeError that this package raised on purpose; empty for all else.

    A test that expects other words of an error has it as the context of its own.
    """
    if isinstance(error, AssertionError) and error.__context__ is not None:
        error = error.__context__
    trace, file = error.__traceback__, ""
    while trace is not None:
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    is_ours = _PACKAGE in file and f"{os.sep}tests{os.sep}" not in file
    return str(error) if is_ours and isinstance(error, ValueError | RuntimeError) else ""


def _write(name: str, report: pytest.TestReport, refusal: str, call: pytest.CallInfo[None]) -> None:
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "skipped"
    said = "" if call.excinfo is None else f"{type(call.excinfo.value).__name__}: {call.excinfo.value}"
    if outcome == "failed" and refusal:
        outcome, said = "refused", refusal
    line = {"test": name.split("::", 1)[1], "outcome": outcome, "said": said[:4000], "seconds": round(report.duration, 1)}
    with _OUTCOMES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
