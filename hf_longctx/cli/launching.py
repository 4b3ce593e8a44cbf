"""Starts recipes on the ranks of one machine through `accelerate launch`, for `hf-longctx train` and `hf-longctx demo`."""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path


def recipes_folder() -> Path:
    """Folder of the recipes that are installed with the package."""
    return Path(str(importlib.resources.files("hf_longctx.recipes")))


def shipped(path: str) -> str:
    """The path of a recipe's file: as it is, or inside the package if only that has it."""
    inside = recipes_folder() / path.removeprefix("recipes/")
    return str(inside) if path.startswith("recipes/") and inside.exists() and not Path(path).exists() else path


def launch_command(num_ranks: int, settings: list[str]) -> list[str]:
    """The command that trains by the recipe `sft.py` with these settings on `num_ranks` ranks."""
    # both files start one process per rank; `use_cpu: true` among the settings chooses the CPU
    config = recipes_folder() / "accelerate" / "cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*launch, "--num_processes", str(num_ranks), str(recipes_folder() / "sft.py"), *settings]


def num_devices() -> int:
    """Number of visible GPUs; without a driver it is 0, and torch, which takes seconds to load, is not imported."""
    if not any(Path("/dev").glob("nvidia*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
