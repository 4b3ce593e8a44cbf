"""Starts recipes on the ranks of one machine through `accelerate launch`, for `hf-longctx train` and `hf-longctx demo`.

As a module, `python -m hf_longctx.cli.launching`, it is `accelerate launch` that ends with the message of the rank which failed,
in place of the launcher's own traceback, and after a signal with the ranks' last words.
"""

from __future__ import annotations

import importlib.resources
import logging
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


def brief(command: list[str]) -> list[str]:
    """Makes a launch end with the failed rank's message."""
    return ["hf_longctx.cli.launching" if word == "accelerate.commands.launch" else word for word in command]


def num_devices() -> int:
    """Number of visible GPUs; without a driver it is 0, and torch, which takes seconds to load, is not imported."""
    if not any(Path("/dev").glob("nvidia*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main() -> int:
    """Become `accelerate launch` with the words of the command line; returns the exit status."""
    import subprocess

    import torch.distributed.run  # noqa: F401
    from accelerate.commands.launch import main as launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # beside the ranks' own words they tell which process gets which signal; each of these loggers has a level of its own
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        launch()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said = failure.message.get("message") if isinstance(failure.message, dict) else None
        print(said or f"rank {rank} ended with status {failure.exitcode}; its own messages are above", file=sys.stderr)
        return max(1, failure.exitcode)
    except SignalException as error:
        # the ranks have got it, too, and have said what they saved
        return 128 + int(error.sigval)
    except subprocess.CalledProcessError as error:
        # a single process has said why itself
        return max(1, error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
