"""Fixtures of all tests: one persistent pool of gloo ranks per world size and session."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from helpers.launchers.warm_python import warm_python
from helpers.ranks.rank_pool import RankPool
from hypothesis import Phase, settings

# no deadline, since a busy machine is no failure; derandomized, since a failing run must fail again; no explanations, which trace
# every line of a test that has failed: a slow one then outlives its time-out, whose error hypothesis takes for one more to shrink
_PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile("longctx", deadline=None, derandomize=True, phases=_PHASES)
settings.load_profile("longctx")


# the pools that are open, by number of ranks
_POOLS: dict[int, RankPool] = {}
# threads of a rank that may wait for the next file of tests: each gloo group has three, of which one wakes up a hundred times a
# second, and at the end of a session these took a quarter of all processor time
_MOST_THREADS = 25


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Function that returns the pool of a world size; a pool that failed or has grown is replaced by a new one."""

    def pool(num_ranks: int) -> RankPool:
        if num_ranks not in _POOLS or not _POOLS[num_ranks].is_alive:
            _POOLS[num_ranks] = RankPool(num_ranks)
        return _POOLS[num_ranks]

    yield pool
    for made in _POOLS.values():
        if made.is_alive and made.num_threads() > _MOST_THREADS:
            made.close()


@pytest.fixture(scope="session")
def quick_starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which torchrun and accelerate start their ranks at once."""
    with warm_python(tmp_path_factory.mktemp("python")) as program:
        yield {"PYTHON_EXEC": program}


def pytest_sessionfinish() -> None:
    """Ends all ranks."""
    for made in _POOLS.values():
        made.close()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps xdist from putting files in an order of its own, by which those with one long test would begin last."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files without a quick test alone if only quick ones are asked for, since to import all takes 20 seconds."""
    if config.getoption("markexpr") != "quick" or not collection_path.match("test_*.py"):
        return None
    return "mark.quick" not in collection_path.read_text() or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Takes `quick("name", ...)`, `wide(...)` and `daily(...)` off the cells of a test's parameters that they do not name."""
    item.own_markers = [
        mark for mark in item.own_markers if mark.name not in _NAMING or not mark.args or _cell(item) in mark.args
    ]


# markers whose arguments name cells
_NAMING = ("quick", "wide", "daily")


def _cell(item: pytest.Item) -> str:
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


# about the seconds of a test that is marked as slow, of one on several ranks, and of any other
_SLOW_S, _RANKS_S, _PLAIN_S = 15.0, 1.5, 0.2


_COLLECTED = pytest.StashKey[list[pytest.Item]]()


@pytest.fixture(scope="session")
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All tests of the files that this session looks at, also those that markers leave out."""
    return request.config.stash[_COLLECTED]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Marks most cells of grids as wide, and begins with the files that take longest, so that all cores are busy to the end."""
    _mark_wide(items)
    config.stash[_COLLECTED] = list(items)
    yield
    if hasattr(config, "workerinput"):
        seconds: Counter[Path] = Counter()
        for item in items:
            on_ranks = "ranks" in getattr(item, "fixturenames", ())
            seconds[item.path] += _SLOW_S if item.get_closest_marker("slow") else _RANKS_S if on_ranks else _PLAIN_S
        items.sort(key=lambda item: -seconds[item.path])


# folders whose grids run whole, since their cells take milliseconds
_WHOLE = ("plan", "hf/rules")


def _mark_wide(items: list[pytest.Item]) -> None:
    """Marks the cells of a test that `daily` does not name.

    Without `daily`, marks those of a test under several `parametrize` that differ from its first cell in more than one of them.
    """
    whole = [Path(__file__).parent / folder for folder in _WHOLE]
    first: dict[Any, list[list[int]]] = {}
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if any(mark.name == "daily" for mark in getattr(item.function, "pytestmark", [])):
            if not item.get_closest_marker("daily"):
                item.add_marker(pytest.mark.wide)
            continue
        lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
        if len(lists) > 1 and not any(map(item.path.is_relative_to, whole)):
            names = [each.replace(",", " ").split() if isinstance(each, str) else each for each in lists]
            values = [[id(item.callspec.params[name]) for name in each] for each in names]
            num_others = sum(own != other for own, other in zip(values, first.setdefault(item.function, values), strict=True))
            if num_others > 1:
                item.add_marker(pytest.mark.wide)


def pytest_collection_finish() -> None:
    """Keeps the collected tests out of every later garbage collection, which trainings and self-tests begin with."""
    gc.freeze()
