"""Seven trainings are killed and restarted, or fifteen; `kills.py` does that as often as you like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.models.versions import resuming
from soak.kills import ANY_MOMENT, NONE, RESUMED, Kill, Soak, Trial

# few pairs of kind and ranks, since each needs a run that nobody kills
RANKS = {"replicated": 2, "sharded": 3, "stages": 4, "sharded stages": 4, "kept stages": 4, "stream": 2}
# kind, victim, and where among the moments of a phase it is killed; what must follow, where that is certain
EITHER = ""
CASES = [
    ("replicated", "rank", "indexing", 0.5, NONE),
    ("replicated", "all", "evaluation", 0.3, RESUMED),
    ("replicated", "launcher", "save", 0.7, RESUMED),
    ("sharded", "rank", "save", 0.6, RESUMED),
    ("sharded", "group", "planning", 0.7, RESUMED),
    ("sharded", "all", ANY_MOMENT, 0.8, EITHER),
    ("stages", "all", "save", 0.4, RESUMED),
    ("stages", "launcher", "evaluation", 0.6, RESUMED),
    ("stages", "rank", ANY_MOMENT, 0.7, EITHER),
    ("stream", "rank", "save", 0.5, RESUMED),
    ("stream", "all", "planning", 0.2, EITHER),
    ("stream", "group", ANY_MOMENT, 0.6, EITHER),
    ("sharded stages", "rank", "save", 0.5, RESUMED),
    ("sharded stages", "all", ANY_MOMENT, 0.6, EITHER),
    ("kept stages", "group", "save", 0.3, RESUMED),
]


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    yield Soak(tmp_path_factory.mktemp("kills"))


def trial_of(number: int) -> Trial:
    kind, victim, phase, share, _ = CASES[number]
    kills = [Kill(victim, number % RANKS[kind], phase, share)]
    if number == 2:
        # the restarted run, which moves a checkpoint into its place or clears up, is killed as well
        kills.append(Kill("rank", 0, "resuming", 0.5))
    return Trial(number, kind, RANKS[kind], 1 + number % 2, tuple(kills))


# each victim and phase is among the others; test_killed_saves.py kills every kind in a save
FURTHER = (1, 3, 5, 8, 9, 10, 11, 12, 13, 14)


@pytest.mark.daily("replicated-launcher-save")
@pytest.mark.slow
@resuming
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id="-".join(map(str, case[:3])), marks=[pytest.mark.wide] * (number in FURTHER))
        for number, case in enumerate(CASES)
    ],
)
def test_a_killed_training_loses_no_complete_checkpoint(soak: Soak, number: int) -> None:
    trial = trial_of(number)
    for attempt in range(3):
        # a run may end before it is killed, if the uninterrupted one was slow
        if outcomes := soak.run(replace(trial, number=100 * attempt + number)):
            break
    assert outcomes and outcomes[0] == (CASES[number][-1] or outcomes[0])
