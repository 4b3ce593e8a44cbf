"""The benchmark against Hugging Face's checkpointing compares equal results, and fails if a requirement is missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_longctx.recipes.bench.cpu import memory

SMALL = ["--lengths", "96", "--rounds", "1", "--tile-tokens", "32"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restores the number of threads, which the benchmark sets."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.wide
def test_what_is_compared_is_equal_and_a_missed_requirement_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "results.json"
    with pytest.raises(SystemExit, match="96 tokens: median ratio"):
        memory.main([*SMALL, "--json", str(written), "--require", "96:1000"])
    plain, checkpointing, *rest = json.loads(written.read_text())
    selective = [result for result in rest if result["method"] in memory.SELECTIVE]
    ours = [result for result in rest if result not in selective]
    table = capsys.readouterr().out
    assert [plain["method"], checkpointing["method"]] == ["plain HF", "HF checkpointing"]
    assert selective and selective[0]["method"] == "torch selective"
    for result in (plain, checkpointing, *selective, *ours):
        if result not in selective:
            assert result["saved_bytes"] == pytest.approx(result["predicted_bytes"], rel=0.01)
        assert result["gradient_error"] <= 1e-5
        assert len(result["step_s"]) == len(result["ratios"]) == 1 and result["step_s"][0] > 0
        assert f"\n{result['method']} " in table
    # selective checkpointing keeps what ours keeps
    assert {result["predicted_bytes"] for result in selective} == {ours[1]["predicted_bytes"]}
    assert plain["saved_bytes"] > 5 * ours[0]["saved_bytes"] > 5 * checkpointing["saved_bytes"]
    assert ours[-1]["method"] == memory.ROOMY and ours[-1]["saved_bytes"] >= ours[0]["saved_bytes"]


def test_room_is_used_up_and_not_exceeded() -> None:
    lean = next(method for method in memory.methods(96, 32) if method.name == memory.JUDGED)
    spare_bytes = 96 * 20_000
    roomy = memory.with_more_room(lean, spare_bytes, 96, 32)
    # shares are whole tokens of a layer, of at most 14 KB
    assert 0 <= lean.predicted_bytes + spare_bytes - roomy.predicted_bytes <= 4 * 14_000
    assert roomy.saved_bytes() == pytest.approx(roomy.predicted_bytes, rel=0.01)
    assert memory.with_more_room(lean, -1, 96, 32).predicted_bytes == lean.predicted_bytes


@pytest.mark.parametrize(
    "ratios,round_ratio,peak_share,message",
    [
        ({96: 1.21}, 0.0, None, "96 tokens: median ratio 1.200, required 1.21"),
        ({96: 1.2}, 1.11, None, "96 tokens: ratio of the worst round 1.100, required 1.11"),
        ({96: 1.2}, 1.1, 0.7, "96 tokens: 0.75 of checkpointing's peak memory, required at most 0.7"),
        ({97: 0.0}, 1.1, 0.8, "no run of 97 tokens, for which a ratio is required"),
        ({96: 1.2}, 1.1, 0.75, ""),
    ],
)
def test_every_requirement_is_judged(
    ratios: dict[int, float], round_ratio: float, peak_share: float | None, message: str
) -> None:
    rest = (0, 0, 0.0)
    results = [
        memory.Result("HF checkpointing", 96, [1.2, 1.1], [1.0, 1.0], 100, *rest),
        memory.Result(memory.JUDGED, 96, [1.0, 1.0, 1.0], [1.2, 1.1, 1.3], 75, *rest),
        memory.Result("ours, no tiles", 96, [9.0], [0.1], 900, *rest),
    ]
    assert memory.missed(results, ratios, round_ratio, peak_share) == ([message] if message else [])


def test_selective_checkpointing_is_judged_by_time_and_memory() -> None:
    def result(method: str, step_s: float, peak_mib: int) -> memory.Result:
        return memory.Result(method, 96, [step_s] * 3, [1.0] * 3, peak_mib << 20, 0, 0, 0.0)

    results = [result(memory.BASELINE, 1.2, 90), result(memory.SELECTIVE[0], 1.1, 95), result(memory.ROOMY, 1.0, 95)]
    assert memory.slower_than_selective(results, 0.0) == memory.slower_than_selective(results, 1.09) == []
    assert memory.slower_than_selective(results, 1.11) == ["96 tokens: 1.100 times as fast as torch selective, required 1.11"]
    results[1] = result(memory.SELECTIVE[0], 1.1, 94)
    assert memory.slower_than_selective(results, 1.0) == ["96 tokens: 95 MiB at the peak, torch selective 94"]
