"""Every wait of the package for a device or another rank has a test on the fake device that fails without it."""

from __future__ import annotations

import pytest
import torch
from fake_cuda.machine.removals import Removal, removed, waits, waits_in
from fake_cuda.test_waits import ONE_PROCESS, TWO_RANKS

from hf_longctx.runtime.core.host_copies import dense_strides

REMOVALS = [removal for removal, _ in (*ONE_PROCESS.values(), *TWO_RANKS.values())]
# found once, since all files are read
WAITS = list(waits())


@pytest.mark.parametrize("module,text", sorted(set(WAITS)))
def test_a_test_needs_the_wait(module: str, text: str) -> None:
    rows = [removal for removal in REMOVALS if removal.module == module and text in removal.line]
    assert len(rows) == WAITS.count((module, text)), (
        f"tests/fake_cuda/test_waits.py takes {text} out of {module} {len(rows)} times; add what goes wrong without it"
    )


def test_new_waits_are_found() -> None:
    source = "stream.wait_event(ticket)\nx.record_stream(side)\nfor work in works:\n    work.wait()\n', '.join(name)"
    assert list(waits_in(source, "hf_longctx/runtime/new.py")) == [
        "stream.wait_event(ticket)", "x.record_stream(side)", "work.wait()"
    ]  # fmt: skip
    # threads of checkpoints wait for each other
    assert "work.wait()" not in list(waits_in(source, "hf_longctx/hf/new.py"))


def test_lines_are_taken_out_for_a_while() -> None:
    x = torch.empty(2, 3, 4)
    with removed(Removal("runtime.core.host_copies", 'device="meta").stride()', 'device="meta").stride()[:1]')):
        assert dense_strides(x) == (12,)
    assert dense_strides(x) == (12, 4, 1)
