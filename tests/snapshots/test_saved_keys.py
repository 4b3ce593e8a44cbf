"""Pins the files and keys that trainings save: `saved_keys.json` has them all.

Short trainings of tiny models on two ranks save a checkpoint and then, by `save_model`, the model. The file has the name of each
file; the name, dtype and shape of each weight; and the keys of the optimizer's states, of the trainer's state, of the manifest
and of other JSON files, with the kinds of values instead of the values. Names that differ in numbers, such as those of layers,
are counted as one with `*` in it. The contents of the journal, whose lines depend on time, and of files that are transformers'
own are left out.

A failing test prints the differences; `PYTHONPATH=tests python tests/snapshots/test_saved_keys.py` pins the keys of today. They
belong to the versions of torch and transformers that the file names, and are compared with these alone.
"""

from __future__ import annotations

import difflib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.ranks.rank_pool import RankPool
from helpers.trainers.trainer_runs import SKEWED, make_trainer
from safetensors import safe_open

from hf_longctx.hf.checkpoints.optimizer_states import OPTIMIZER_FOLDER, STATES_INDEX

PINNED = Path(__file__).parent / "saved_keys.json"
NUM_STEPS, NUM_RANKS = 2, 2
LORA = (("r", 2), ("target_modules", ["q_proj", "down_proj"]))
SHARDED = {"parameters": "gathered_per_round"}
# name -> model and configuration
RUNS: dict[str, tuple[ModelCase, dict[str, Any]]] = {
    "llama": (ModelCase(), {}),
    "adapters": (ModelCase(lora=LORA), {}),
    "experts": (ModelCase("qwen3_moe"), {}),
    "sharded": (ModelCase(tied=True), SHARDED),
    "sharded adapters": (ModelCase(lora=LORA), SHARDED),
    "spread experts": (ModelCase("qwen3_moe"), {"parameters": "sharded", "expert_ranks": 2}),
    "two stages": (ModelCase(num_layers=4), {"stages": 2}),
}
# files that transformers writes without our help
_OTHERS = ("config.json", "generation_config.json", "training_args.bin", "README.md", "adapter_config.json")
# a busy machine is no failure
_TIMEOUT_S = 250.0
_AS = "as in "


def run(case: ModelCase, config: dict[str, Any], folder: str) -> None:
    """A training that saves a checkpoint, and the model behind it."""
    arguments = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": NUM_STEPS, "logging_steps": 1}
    trainer = make_trainer(case, random_rows(SKEWED), folder, config, arguments)
    trainer.train()
    trainer.save_model(f"{folder}/model")


def keys_of(name: str, pool: RankPool) -> dict[str, Any]:
    """Contents of the files of a run, by their paths."""
    with tempfile.TemporaryDirectory() as folder:
        pool.run(run, *RUNS[name], folder, timeout_s=_TIMEOUT_S)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): contents(path) for path in files}


def contents(path: Path) -> Any:
    """Keys of a file, with the kinds of their values; empty for a file that is not ours."""
    if path.name in _OTHERS:
        return ""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as weights:
            return counted([f"{key} {kind_of(weights.get_tensor(key))}" for key in weights.keys()])  # noqa: SIM118
    if path.match(f"{OPTIMIZER_FOLDER}/{STATES_INDEX}"):
        index = json.loads(path.read_text())
        states = [f"state.{weight}.{state}" for weight, found in index["weights"].items() for state in found]
        settings = [
            f"param_groups.{each}.{key}" for group in index["groups"] for each in group["weights"] for key in group["settings"]
        ]
        return {**fields_of(states + settings), "keys": sorted(index)}
    if path.suffix == ".json":
        return kind_of(json.loads(path.read_text()))
    if path.suffix in (".pt", ".pth"):
        return kind_of(torch.load(path, weights_only=False))
    return ""


def fields_of(names: list[str]) -> dict[str, dict[str, int]]:
    """For each list of fields the weights that have them, from names such as `state.model.norm.weight.exp_avg`."""
    fields: dict[tuple[str, str], list[str]] = {}
    for kind, _, rest in (name.partition(".") for name in sorted(names)):
        weight, _, field = rest.rpartition(".")
        fields.setdefault((kind, weight), []).append(field)
    lists = {f"{kind}: {' '.join(each)}" for (kind, _), each in fields.items()}
    return {
        own: counted([weight for (kind, weight), each in fields.items() if f"{kind}: {' '.join(each)}" == own])
        for own in sorted(lists)
    }


def counted(names: list[str]) -> dict[str, int]:
    """How many names there are of each form."""
    return dict(sorted(Counter(re.sub(r"\.\d+(?=[. ]|$)", ".*", name) for name in names).items()))


def kind_of(value: Any) -> Any:
    """The kind of a value; that of a mapping is a mapping of its keys, and that of a list has each kind of its entries once."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        if value and all(isinstance(key, int) for key in value):
            return {"numbered": kind_of(list(value.values()))}
        return {str(key): kind_of(each) for key, each in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        kinds: list[Any] = []
        for each in map(kind_of, value):
            if each not in kinds:
                kinds.append(each)
        return sorted(kinds, key=str)
    if isinstance(value, bool) or value is None:
        return str(type(value).__name__)
    return "number" if isinstance(value, int | float) else type(value).__name__


def versions() -> dict[str, str]:
    """The first two numbers of the versions of packages that save files of their own."""
    return {name: ".".join(version(name).split(".")[:2]) for name in ("torch", "transformers", "peft")}


def lines_of(keys: Any) -> list[str]:
    return json.dumps(keys, indent=1).splitlines()


def shortened(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The keys of all runs; contents that came before are replaced by the run and the path with which they came."""
    first: dict[str, str] = {}
    short: dict[str, dict[str, Any]] = {}
    for name, files in runs.items():
        short[name] = {}
        for path, own in files.items():
            here = f"{name}: {path}"
            place = first.setdefault(str(own), here)
            short[name][path] = own if not own or place == here else f"{_AS}{place}"
    return short


def in_full(runs: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """The keys of one run, from those that `shortened` returned."""
    found = {}
    for path, own in runs[name].items():
        run_of, _, place = own.removeprefix(_AS).partition(": ") if isinstance(own, str) else ("", "", "")
        found[path] = runs[run_of][place] if run_of else own
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_training_saves_the_keys_that_it_saved(ranks, name: str) -> None:
    known = json.loads(PINNED.read_text())
    if versions() != known["versions"]:
        pytest.skip(f"keys are pinned for {known['versions']}, not {versions()}")
    before, now = in_full(known["runs"], name), keys_of(name, ranks(NUM_RANKS))
    changed = list(difflib.unified_diff(lines_of(before), lines_of(now), "before", "now", lineterm=""))
    assert not changed, "\n".join(changed)


if __name__ == "__main__":
    ranks_of_all = RankPool(NUM_RANKS)
    runs = {name: keys_of(name, ranks_of_all) for name in RUNS}
    ranks_of_all.close()
    PINNED.write_text(json.dumps({"versions": versions(), "runs": shortened(runs)}, indent=1) + "\n")
