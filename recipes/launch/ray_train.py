"""Run `recipes/sft.py` on Ray Train: one worker per rank, started again from the newest checkpoint if one fails.

    python recipes/launch/ray_train.py --workers 16 --gpu --restarts 3 recipes/configs/text.yaml --dataset my.jsonl

After the options of this script come the settings of the recipe. Every node must see `output_dir` under the same path: it is also
Ray's storage of the run, so the checkpoints that ranks save there are reported to Ray where they lie, and nothing is copied.
Needs `pip install "ray[train]"`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import ray
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_longctx.recipes.settings import given_settings


class ReportToRay(TrainerCallback):
    """Reports the metrics of the newest log, and the checkpoint that is in view since then. Every rank calls Ray alike."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        metrics = {**(state.log_history[-1] if state.log_history else {}), "step": state.global_step}
        folder = Path(str(args.output_dir)).absolute() / f"checkpoint-{state.global_step}"
        # one rank names the folder, in which all have saved
        saved = Checkpoint.from_directory(folder) if state.is_world_process_zero else None
        ray.train.report(metrics, checkpoint=saved, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


# Ray's list of reported checkpoints in a run's folder
_SNAPSHOT = "checkpoint_manager_snapshot.json"


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
    options, settings = parser.parse_known_args()
    # the default of TrainingArguments, which is not read here: the driver may lack the workers' devices
    output_dir = Path(given_settings(settings).get("output_dir", "trainer_output")).absolute()
    # a list that names a checkpoint which save_total_limit has deleted since would stop Ray; the recipe finds the newest itself
    (output_dir / _SNAPSHOT).unlink(missing_ok=True)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"settings": settings, "folder": str(Path.cwd())},
        torch_config=TorchConfig(backend="nccl" if options.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            # reported folders must lie below storage_path/name
            storage_path=str(output_dir.parent),
            name=output_dir.name,
            failure_config=FailureConfig(max_failures=options.restarts),
        ),
    )
    result = trainer.fit()
    print(f"newest checkpoint that Ray knows: {result.checkpoint.path if result.checkpoint else 'none'}")


if __name__ == "__main__":
    main()
