"""Starts recipes on the ranks of one machine through `accelerate launch`, for `hf-longctx train` and `hf-longctx demo`.

`python -m hf_longctx.cli.launching` is `accelerate launch` that ends with the message of the failed rank in place of the
launcher's own traceback, and after a signal with the ranks' last lines.
"""

from __future__ import annotations

import importlib.resources
import logging
import sys
from pathlib import Path


def recipes_folder() -> Path:
    """Returns the folder of the recipes installed with the package."""
    return Path(str(importlib.resources.files("hf_longctx.recipes")))


def shipped(path: str) -> str:
    """Returns the path of a recipe's file: unchanged, or inside the package if it exists only there."""
    inside = recipes_folder() / path.removeprefix("recipes/")
    return str(inside) if path.startswith("recipes/") and inside.exists() and not Path(path).exists() else path


def launch_command(num_ranks: int, settings: list[str]) -> list[str]:
    """Returns the command that trains by the recipe `sft.py` with these settings on `num_ranks` ranks."""
    # both files start one process per rank; `use_cpu: true` among the settings chooses the CPU
    config = recipes_folder() / "accelerate" / "cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*launch, "--num_processes", str(num_ranks), str(recipes_folder() / "sft.py"), *settings]


def brief(command: list[str]) -> list[str]:
    """Makes a launch end with the failed rank's message."""
    return ["hf_longctx.cli.launching" if word == "accelerate.commands.launch" else word for word in command]


def num_devices() -> int:
    """Counts visible GPUs; without a driver it returns 0 without importing torch, which takes seconds."""
    if not any(Path("/dev").glob("nvidia*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main() -> int:
    """Run `accelerate launch` with the arguments of the command line; returns the exit status."""
    import subprocess

    import torch.distributed.run  # noqa: F401
    from accelerate.commands.launch import main as launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # these loggers would report which process gets which signal; each has its own level
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
        # the ranks have got it too, and have printed what they saved
        return 128 + int(error.sigval)
    except subprocess.CalledProcessError as error:
        # a single process has printed the reason itself
        return max(1, error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
