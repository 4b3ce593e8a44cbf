"""Run `recipes/sft.py` on Ray Train: one worker per rank, started again from the newest checkpoint if one fails.

    python recipes/launch/ray_train.py --workers 16 --gpu --restarts 3 recipes/configs/text.yaml --dataset my.jsonl

After the options of this script come the settings of the recipe. Every node must see `output_dir` under the same path: ranks save
there themselves, and Ray learns the path of each checkpoint as a metric, but copies none. Needs `pip install "ray[train]"`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class ReportToRay(TrainerCallback):
    """Reports the metrics of the newest log, and the checkpoint that is in view since then. Every rank calls Ray alike."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        metrics = {**(state.log_history[-1] if state.log_history else {}), "step": state.global_step}
        folder = Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}"
        # no Checkpoint object: Ray takes one only from a folder below its own storage, or copies it there
        ray.train.report({**metrics, "checkpoint": str(folder)})


def train_worker(config: dict[str, Any]) -> None:
    """Runs the recipe on one rank, whose process group Ray has made."""
    from hf_longctx.recipes import sft

    # Ray starts workers elsewhere, and paths among the settings may be relative
    os.chdir(config["folder"])
    sft.main([*config["settings"], "--resume", "auto"], [ReportToRay()])


def main() -> None:
    """Trains on the cluster that RAY_ADDRESS names, or on this machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workers", type=int, required=True, help="number of ranks")
    parser.add_argument("--gpu", action="store_true", help="give each rank a GPU")
    parser.add_argument("--restarts", type=int, default=3, help="how often to start again after a failure")
    parser.add_argument("--storage", default="outputs/ray", help="folder for Ray's own records, in view of all nodes")
    options, settings = parser.parse_known_args()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"settings": settings, "folder": str(Path.cwd())},
        torch_config=TorchConfig(backend="nccl" if options.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            storage_path=str(Path(options.storage).absolute()), failure_config=FailureConfig(max_failures=options.restarts)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
