"""Damaged files that commands read: each command ends as usual or with a refusal in words, never with an unexpected error.

python tests/soak/mutated_files.py --count 1000

Forecasts with their cost models, hardware profiles, journals of runs, and configs of models.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak.mutated_plans import mutated

from hf_longctx.cli.main import main as command
from hf_longctx.journal import JOURNAL

HARDWARE = Path(__file__).resolve().parents[2] / "recipes" / "hardware"
PLAN = ["--gpus", "2", "--lengths", "lognormal:7,1", "--global-batch", "4", "--steps", "1", "--solver", "greedy"]
CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100},
    **{"max_position_embeddings": 4096, "tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e4}},
}
BYTES = {"saved": 0, "host": 0, "kv_book": 0, "device_peak": 4096}
STEP = {
    **{"kind": "step", "training": "a", "place": 0, "count": 1, "loss": 2.5, "measured_s": 1.5, "predicted_s": 1.0},
    **{"bound_s": 0.5, "tokens": 900, "operations": 1e9, "padding_share": 0.1, "micro_batches": 1, "layout": "<2>"},
    **{"group_tokens": {"2": 900}, "lengths": {"17": 2}, "sequences": [400, 500], "solver": "greedy", "solve_s": 0.01},
    **{"seconds": {"compute": 1.0, "reduce": 0.1, "messages": 0.1}, "bytes": BYTES, "predicted_bytes": BYTES},
    **{"idle_share": 0.1, "predicted_idle": 0.1, "labels": 800, "wall_s": 1.6, "plan_wait_s": 0.0, "elapsed_s": 2.0},
    "rank_seconds": {"compute": 1.0, "exchange": 0.2, "idle": 0.1, "copies": 0.0},
}
MACHINE = {
    "host": "a",
    "system": "Linux",
    "device": "CPU",
    "device_type": "cpu",
    "ranks": 2,
    "ranks_per_node": 2,
    "device_bytes": 2**30,
}
START = {
    **{"kind": "start", "training": "a", "step": 0, "time": 1.7e9, "versions": {"torch": "2.13"}, "opening": "plans"},
    **{"machine": {**MACHINE, "cores": 2, "threads_per_rank": 1, "command": ["sft.py"]}, "changed": ["stages"]},
    **{"model": {"class": "Llama", "parameters": 10**6, "layers": 2, "hidden_size": 64, "precision": "float32"}},
    **{"settings": {"stages": 2, "degrees": None}, "arguments": {"learning_rate": 1e-3}},
}
EVENTS = [[0, "F", "0F0", 0.0, 1.0, "<2>"], [1, "B", "0B0", 1.0, 2.0, ""]]
LINES: list[Any] = [
    START,
    *({**STEP, "step": number} for number in (1, 2, 3)),
    {"kind": "log", "training": "a", "step": 3, "logs": {"loss": 2.0, "eval_loss": 2.5}},
    {"kind": "end", "training": "a", "step": 3, "elapsed_s": 9.0, "timeline": {"steps": [2, 3], "panels": {"measured": EVENTS}}},
]


def run(words: list[str]) -> tuple[int, str]:
    """The exit status of a command, and what it wrote about errors."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return command(words), said.getvalue()
        except SystemExit as error:
            return int(error.code or 0), said.getvalue()


def write_run(folder: Path, generator: random.Random, what: str) -> None:
    """A run's folder with one to two damaged lines in its journal, or a damaged config of its model."""
    lines = [json.dumps(line) for line in LINES]
    for _ in range(generator.choice((1, 2)) if what == "journal" else 0):
        place = generator.randrange(len(lines))
        lines[place] = mutated(LINES[place], generator)
    (folder / JOURNAL).write_text("\n".join(lines) + "\n", errors="surrogatepass")
    (folder / "config.json").write_text(mutated(CONFIG, generator) if what == "config" else json.dumps(CONFIG))


def forecasts(folder: Path, generator: random.Random) -> Callable[[], list[str]]:
    """Makes a forecast once; each call damages it anew and gives the words of a command that reads it."""
    name = folder / "plan.json"
    assert run(["plan", "--model", "qwen3-0.6b", "--hardware", "h100", *PLAN, "--output", str(folder)])[0] == 0
    forecast = json.loads(name.read_text())

    def made() -> list[str]:
        name.write_text(mutated(forecast, generator), errors="surrogatepass")
        return [generator.choice(["simulate", "show"]), str(name)]

    return made


def profiles(folder: Path, generator: random.Random) -> Callable[[], list[str]]:
    """Words of a forecast on damaged hardware."""
    known = [json.loads(file.read_text()) for file in sorted(HARDWARE.glob("*.json"))]
    name = folder / "hardware.json"

    def made() -> list[str]:
        name.write_text(mutated(generator.choice(known), generator), errors="surrogatepass")
        return ["plan", "--model", "qwen3-0.6b", "--hardware", str(name), *PLAN]

    return made


def reports(folder: Path, generator: random.Random) -> Callable[[], list[str]]:
    """Words of a report on a damaged journal."""

    def made() -> list[str]:
        write_run(folder, generator, "journal")
        return ["report", str(folder)]

    return made


def replays(folder: Path, generator: random.Random) -> Callable[[], list[str]]:
    """Words of a replay of a damaged run."""

    def made() -> list[str]:
        write_run(folder, generator, generator.choice(["journal", "config"]))
        return ["replay", str(folder), "--plans", "2", *generator.choice([[], ["--gpus", "2", "--hardware", "h100"]])]

    return made


KINDS = {"forecasts": forecasts, "profiles": profiles, "reports": reports, "replays": replays}


def soak(kind: str, count: int, seed: int = 0) -> Counter[int]:
    """How often each exit status came; raises at the first that is not 0 (done) or 1 (refused)."""
    generator, found = random.Random(seed), Counter[int]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = KINDS[kind](folder, generator)
        for number in range(count):
            words = make()
            status, said = run(words)
            found[status] += 1
            if status not in (0, 1):
                texts = {file.name: file.read_text(errors="replace")[:3000] for file in folder.glob("*.json*")}
                raise AssertionError(f"{kind}, seed {seed}, draw {number}: status {status} of {words}\n{texts}\n{said}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for each in KINDS:
        print(each, dict(soak(each, options.count, options.seed)))
