"""Measurements on a GPU end in time with all their processes; trainings of other systems say their settings, or why not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hf_longctx.cli.main import build_parser
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.recipes.bench.gpu import adapted_experts, measurements, ranks, trainings
from hf_longctx.recipes.bench.gpu.rows import read_rows

SLEEPS = (
    "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"
)


def test_a_late_step_ends_and_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "late.py"
    script.write_text(SLEEPS)
    short = tmp_path / "short.py"
    short.write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setattr(measurements, "_HERE", tmp_path)
    steps = {"a": measurements.Step("sleeps", 8, ("late.py",)), "b": measurements.Step("prints", 60, ("short.py", "--x"))}
    monkeypatch.setattr(measurements, "STEPS", steps)
    assert measurements.main(["a", "b", "--folder", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "(a) ended, since it was late," in said and "(b) done" in said
    assert (tmp_path / "out" / "a.txt").read_text() == "begun\n"
    assert f"['--x', '--json', '{tmp_path / 'out' / 'b.json'}']" in said


def test_every_step_is_a_command_that_its_script_understands(capsys: pytest.CaptureFixture[str]) -> None:
    assert measurements.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[::2]] == list("abcdefgh")
    for step in measurements.STEPS.values():
        script, *words = step.words
        toy = [*words, *step.toy]
        if script == "ranks.py":
            ranks.parse(words)
            assert ranks.parse(toy).toy
        if script == "adapted_experts.py":
            assert words == []
        if script == "-m":
            build_parser().parse_args([*words[1:], "--output", "hardware.json"])
            assert not build_parser().parse_args([*toy[1:], "--output", "hardware.json"]).model
            named_model(words[words.index("--model") + 1])
        if script == "trainings.py":
            methods = words[words.index("--methods") + 1 :]
            assert set(methods) <= trainings.METHODS.keys()
            if not torch.cuda.is_available():
                assert trainings.main(words) == 0


@pytest.mark.wide
def test_adapters_on_experts_apart_and_merged_have_the_same_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    assert adapted_experts.main(["--tiny", "--layers", "2", "--tokens", "48", "--json", str(rows)]) == 0
    assert [row["way"] for row in read_rows(rows)] == list(adapted_experts.WAYS)
    assert "gradients of adapters differ by at most" in capsys.readouterr().out


def test_methods_are_chosen_by_name_or_word() -> None:
    def chosen(*words: str) -> list[str]:
        return [method for method in trainings.METHODS if trainings.is_chosen(method, words)]

    assert chosen() == list(trainings.METHODS)
    assert chosen("hf_longctx") == ["hf_longctx"]
    assert chosen("longctx") == ["hf_longctx", "hf_longctx, not compiled", "hf_longctx, Liger", "hf_longctx, fp8"]
    assert chosen("unsloth", "TRL") == ["TRL selective, Liger", "unsloth"]


@pytest.mark.wide
@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU leaves out is named here")
def test_other_systems_are_named_with_their_settings_or_why_they_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    words = [
        "unsloth, packed",
        "DeepSpeed ALST, Liger",
        "HF checkpointing, fla",
        "HF checkpointing",
        "hf_longctx",
        "hf_longctx, fp8",
    ]
    assert trainings.main(["--toy", "--steps", "0", "--methods", *words, "--json", str(file)]) == 0
    rows = {row["method"]: row for row in read_rows(file)}
    assert rows.keys() == set(words) and all(row["settings"] and "torch " in row["packages"] for row in rows.values())
    states = {method: row["state"] for method, row in rows.items()}
    assert {states.pop(method) for method in ("HF checkpointing", "hf_longctx", "hf_longctx, fp8")} == {"ok"}
    # rounded, but the same computation
    assert rows["hf_longctx, fp8"]["loss"] != pytest.approx(rows["hf_longctx"]["loss"], rel=1e-7)
    assert all(state.startswith("skipped: ") for state in states.values())
    said = capsys.readouterr().out
    assert "SFTConfig(packing=True, max_length=limit)" in said and "packages: torch" in said


@pytest.mark.parametrize("packs", [True, False])
def test_a_rival_that_leaves_packing_out_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], packs: bool
) -> None:
    """unsloth warns and trains unpacked rows if it cannot pack them; stand-ins take the places of both packages."""
    job = trainings.Job(is_toy=True, layers=1, limit=64, tokens=128, steps=0)

    class SFTTrainer:
        def __init__(self, args: Any, train_dataset: Any, **others: Any) -> None:
            self.args, self.state = args, SimpleNamespace(log_history=[{"loss": 1.0}])
            self.args.packing = self.args.packing and packs
            self.train_dataset = train_dataset.select(range(2)) if self.args.packing else train_dataset

        def train(self) -> None:
            times.seconds.append(2.0)

    unsloth, trl = ModuleType("unsloth"), ModuleType("trl")
    unsloth.FastLanguageModel = SimpleNamespace(  # type: ignore[attr-defined]
        from_pretrained=lambda folder, **settings: (None, None), get_peft_model=lambda model, **settings: model
    )
    trl.pack_dataset = lambda data, length: data.select(range(2))  # type: ignore[attr-defined]
    trl.SFTTrainer = SFTTrainer  # type: ignore[attr-defined]
    trl.SFTConfig = lambda **settings: SimpleNamespace(padding_free=False, **settings)  # type: ignore[attr-defined]
    for each in (unsloth, trl):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    times = trainings.DeviceTimes()
    row = trainings._train_unsloth(job, "unsloth, packed", times)
    count = len(job.lengths())
    assert f"unsloth: packing={packs}, padding_free=False, {2 if packs else count} rows of {count}" in capsys.readouterr().out
    assert row.state == "ok" if packs else row.state.startswith(f"failed: packing=False with {count} rows")
    assert trainings._train_unsloth(job, "unsloth", times).state == "ok"


def test_a_model_with_states_is_built_as_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    job = trainings.Job("qwen3.5-9b", layers=4)
    assert job.has_states and not trainings.Job().has_states
    config = trainings.config_of(job)
    assert config.model_type == "qwen3_5_text" and config.num_hidden_layers == len(config.layer_types) == 4
    assert trainings.config_of(trainings.Job(layers=3)).num_hidden_layers == 3


def test_mlps_run_in_as_many_tiles_as_alst_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    class TiledMLP:
        """The call of DeepSpeed's function: forward, module, input, number of tiles, parameters for ZeRO."""

        @staticmethod
        def apply(run: Any, module: Any, x: torch.Tensor, num_tiles: int, parameters: list[Any]) -> torch.Tensor:
            counts.append(num_tiles)
            return torch.cat([run(module, each) for each in x.chunk(num_tiles, 1)], 1)

    stand_in: Any = ModuleType("deepspeed.runtime.sequence_parallel.ulysses_sp")
    stand_in.TiledMLP = TiledMLP
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    model = trainings.build(trainings.Job(is_toy=True, layers=2)).get_base_model()
    ids = torch.arange(130)[None] % 64
    expected = model(input_ids=ids).logits
    trainings.TiledMLPs(model)
    torch.testing.assert_close(model(input_ids=ids).logits, expected)
    assert counts == [-(-130 // model.config.hidden_size)] * model.config.num_hidden_layers
