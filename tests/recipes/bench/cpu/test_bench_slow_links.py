"""The benchmark over slowed links trains the same with every method, fails if a plan is too slow, and really slows the links."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks.forked import FORKED

from hf_longctx.recipes.bench.cpu.slow_links import compare, head_parts, methods, network

SENT_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.mp, "get_context", lambda _: FORKED)


@pytest.mark.wide
def test_all_methods_train_the_same_and_a_missed_ratio_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    changes = {"CONFIG": compare.CONFIG | sizes, "NUM_RANKS": 2, "RANKS_PER_NODE": 1, "MEDIAN_TOKENS": 60, "MOST_TOKENS": 128}
    for name, value in changes.items():
        monkeypatch.setattr(compare, name, value)
    written = tmp_path / "rows.json"
    words = ["--links", "0/0", "--core-share", "0", "--rounds", "1", "--steps", "1", "--documents", "4"]
    with pytest.raises(SystemExit) as failure:
        compare.main(
            [*words, "--tokens-per-rank", "128", "--calibrate-seconds", "1", "--require", "1000", "--json", str(written)]
        )
    # one message: losses that differ would be another
    assert re.fullmatch(
        r"0/0 MB/s, 128 tokens on a rank: [0-9.]+ times as fast as fixed <[12]>, required 1000.0", str(failure.value)
    )
    rows = json.loads(written.read_text())
    found = [row["method"] for row in rows if not row["method"].startswith(methods.DEEPSPEED)]
    ours = [methods.PLANNED, methods.SHARDED, *methods.STAGED, methods.AUTO]
    assert found == [*ours, "fixed <1>", "fixed <2>", methods.FLATTENING]
    table = capsys.readouterr().out
    for row in rows:
        assert row["step_s"] > 0 and len(row["losses"]) == 1 and f"\n{row['method']} " in table
        assert (row["predicted_s"] > 0) == (row["method"] != methods.FLATTENING)
    layouts = {row["method"]: row["layouts"] for row in rows}
    assert set(layouts["fixed <1>"][0]) <= set("<1x2> ") and "2" in layouts["fixed <2>"][0]
    for name in methods.STAGED:
        assert f"{name}: " in table and layouts[name] == ["<1>"]


def row(method: str, **changes: Any) -> compare.Row:
    given: dict[str, Any] = {"links": "8/2", "tokens_per_rank": 512, "step_s": 1.0, "predicted_s": 1.0, "ratios": [1.0, 1.0, 1.0]}
    return compare.Row(method, **{**given, "predicted_ratio": 1.0, "losses": [5.0, 4.9], "layouts": [], **changes})


@pytest.mark.parametrize(
    ("fixed", "required", "message"),
    [
        ({"ratios": [0.9, 1.2, 1.3]}, 1.2, ""),
        ({"ratios": [0.9, 1.2, 1.3]}, 1.21, "8/2 MB/s, 512 tokens on a rank: 1.200 times as fast as fixed <4>, required 1.21"),
        ({"ratios": [0.9, 1.2, 1.3]}, None, ""),
        (
            {"losses": [5.0, 4.8], "ratios": [2.0] * 3},
            1.0,
            "8/2 MB/s, 512 tokens on a rank: fixed <4> has losses [5.0, 4.8], but planned has [5.0, 4.9]",
        ),
    ],
)
def test_the_best_fixed_degree_and_losses_are_judged(fixed: dict[str, Any], required: float | None, message: str) -> None:
    rows = [row(methods.PLANNED), row("fixed <2>", ratios=[9.0] * 3), row("fixed <4>", **fixed)]
    assert compare.missed(rows, required) == ([message] if message else [])


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        # the last links decide about stages, and the faster kind of them counts
        ({"8/2 2 stages, sharded": 0.9}, []),
        ({"8/2 2 stages, gathered_per_step": 0.9}, ["8/2 MB/s, 512 tokens on a rank: 2 stages 1.111 times"]),
        ({"8/8 2 stages, gathered_per_step": 2.0}, []),
        ({"8/8 auto stages": 1.1}, ["8/8 MB/s, 512 tokens on a rank: auto stages 0.909 times"]),
        ({"8/2 auto stages": 1.1}, []),
    ],
)
def test_stages_are_judged_on_the_last_links_and_their_choice_on_the_first(changes: dict[str, float], missed: list[str]) -> None:
    ratios = {methods.SHARDED: 1.0, methods.STAGED[0]: 1.0, methods.STAGED[1]: 0.75, methods.AUTO: 1.0}
    rows = [
        row(name, links=links, ratios=[changes.get(f"{links} {name}", ratio)] * 3, layouts=[name])
        for links in ("8/8", "8/2")
        for name, ratio in ratios.items()
    ]
    found = compare.missed_stages(rows, 1.3)
    assert [text.split(" as fast")[0] for text in found] == missed
    assert compare.missed_stages(rows, None) == []
    # a choice of the same plan as on one stage is not judged
    assert not any(methods.AUTO in text for text in compare.missed_stages([replace(each, layouts=["<4>"]) for each in rows], 1.3))


@pytest.mark.wide
def test_heads_in_parts_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    head_parts.main(["--links", "0", "--core-share", "0", "--tokens", "64", "--rounds", "1"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [int(row[1]) for row in rows] == list(head_parts.KV_HEADS)
    # attention and exchanges alone, both ways, and a prediction of what parts hide, which may be nothing
    assert all(float(row[place]) > 0 for row in rows for place in (2, 3, 4, 5)) and all(float(row[7]) >= 1 for row in rows)


def send_to_all(folder: Path) -> None:
    """Rank 0 sends a megabyte to rank 1, then to rank 2, and writes the seconds of both."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    tensor, seconds = torch.zeros(SENT_BYTES // 4), []
    for other in (1, 2):
        dist.barrier()
        start_s = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(tensor, other)
        elif dist.get_rank() == other:
            dist.recv(tensor, 0)
        if dist.get_rank() in (0, other):
            # the sender hears that everything has arrived
            answer = torch.zeros(1)
            dist.send(answer, 0) if dist.get_rank() else dist.recv(answer, other)
        seconds.append(time.perf_counter() - start_s)
    if dist.get_rank() == 0:
        (folder / "seconds").write_text(json.dumps(seconds))
    dist.barrier()


@pytest.mark.wide
def test_links_are_as_slow_as_asked(tmp_path: Path) -> None:
    machine = network.Machine(num_ranks=4, ranks_per_node=2, node_mb_s=8.0, network_mb_s=2.0, core_share=0.0)
    if problems := network.problems_of(machine):
        pytest.skip("; ".join(problems))
    network.run_ranks(machine, partial(send_to_all, tmp_path), tmp_path, timeout_s=60)
    near_s, far_s = json.loads((tmp_path / "seconds").read_text())
    # a busy machine only makes it slower; a bucket's burst comes at once
    assert near_s > 0.9 * SENT_BYTES / 8e6 and far_s > 0.9 * SENT_BYTES / 2e6
    assert far_s > 2 * near_s
