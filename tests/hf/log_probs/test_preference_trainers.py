"""TRL's trainers of preferences under plans: evaluation on two ranks, resumed trainings, and weights in bf16."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.chats import word_tokenizer
from helpers.models.reference import relative_error
from helpers.models.tiny_models import ModelCase
from helpers.models.versions import resuming
from helpers.ranks.rank_pool import RankFailure
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import LossRecorder
from helpers.trainers.trl_runs import models_of, rows_of, trainer_name, trl_arguments

from hf_longctx import LongContextMixin
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)"),
]
KINDS = ["preference", "unpaired", "reward"]
LORA = (("r", 2), ("lora_alpha", 8), ("target_modules", ["q_proj", "v_proj", "down_proj"]))
REPLICATED: dict[str, Any] = {"tokens_per_rank": 120}
SHARDED = {**REPLICATED, "parameters": "sharded"}
STAGED = {**REPLICATED, "stages": 2}
# moments of AdamW pass through checkpoints; 4 steps of 4 rows in an epoch, so the save is in the middle of a shuffled one
ARGUMENTS = {"optim": "adamw_torch", "learning_rate": 2e-3, "rows_per_step": 4, "train_sampling_strategy": "random"}
# the estimate of KTO's usual loss depends on the order of rows
SHUFFLED = {"loss_type": "apo_zero_unpaired"}
SAVE = {**ARGUMENTS, "save_strategy": "steps", "save_steps": 2}
# times, and a number that counts tokens of training
NOT_COMPARED = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_num_tokens"}


def make(
    kind: str, case: ModelCase, folder: str, config: dict[str, Any] | None, arguments: dict[str, Any], **settings: Any
) -> Any:
    """A trainer of TRL on this rank, under plans unless `config` is None."""
    import trl

    base: Any = getattr(trl, f"{trainer_name(kind)}Trainer")
    if config is not None:
        settings["longctx_config"] = quiet_config(**config)
    trainer_class = base if config is None else type("Planned", (LongContextMixin, base), {})
    args = trl_arguments(getattr(trl, f"{trainer_name(kind)}Config"), folder, **arguments)
    models = models_of(kind, case, arguments)
    saved = Path(folder).parent / "rows"
    rows = datasets.load_from_disk(str(saved)) if saved.exists() else rows_of(kind)
    return trainer_class(args=args, train_dataset=rows, processing_class=word_tokenizer(), **models, **settings)


def evaluate(
    kind: str, case: ModelCase, folder: str, config: dict[str, Any] | None, arguments: dict[str, Any], num_rows: int
) -> dict[str, float]:
    """Metrics of the first rows after a step of training, so that model and reference differ."""
    rows = rows_of(kind).select(range(num_rows))
    trainer = make(kind, case, folder, config, {**arguments, "max_steps": 1}, eval_dataset=rows)
    trainer.train()
    return {name: value for name, value in trainer.evaluate().items() if name not in NOT_COMPARED}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora,config", [((), SHARDED), (LORA, REPLICATED)], ids=["sharded", "adapters"])
def test_evaluation_on_two_ranks_is_that_of_trl_on_one_process(
    ranks, tmp_path: Path, kind: str, lora: Any, config: dict[str, Any]
) -> None:
    # a rank may have a batch without rejected answers, for which KTO gathers sums in fp32
    case = ModelCase(lora=lora, dtype=torch.float32 if kind == "unpaired" else torch.float64)
    # KTO makes mismatched answers in batches of training, so these have 4 rows on any number of ranks
    plain = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 6}
    planned = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 3}
    expected = evaluate(kind, case, str(tmp_path), None, plain, 12)
    found = ranks(2).run(evaluate, kind, case, str(tmp_path), config, planned, 12)
    for metrics in found:
        # log-probabilities of answers are about 50, so those in fp32 round by some 5e-6
        assert metrics == pytest.approx(expected, rel=2e-5, abs=2e-5 if kind == "unpaired" else 2e-6)


def train(
    kind: str, case: ModelCase, folder: str, config: dict[str, Any], arguments: dict[str, Any], start: str = ""
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """This rank's losses, weights after step 4, and number of master weights."""
    trainer = make(kind, case, folder, config, arguments)
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=start or None)
    num_masters = sum(MASTER_WEIGHT in state for state in trainer._plain_optimizer.state.values())
    return recorder.losses, {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}, num_masters


# name -> (kind, model, settings of plans of the first run, of the second run, arguments)
RESUMED: dict[str, tuple[str, ModelCase, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "pairs": ("preference", ModelCase(), SHARDED, REPLICATED, {}),
    "pairs, adapters": ("preference", ModelCase(lora=LORA), REPLICATED, REPLICATED, {}),
    "pairs, known reference": ("preference", ModelCase(), REPLICATED, SHARDED, {"precompute_ref_log_probs": True}),
    "unpaired": ("unpaired", ModelCase(dtype=torch.float32), STAGED, SHARDED, SHUFFLED),
    "rewards": ("reward", ModelCase(), SHARDED, STAGED, {}),
    "rewards, adapters": ("reward", ModelCase(lora=LORA), STAGED, STAGED, {}),
    "pairs, bf16": ("preference", ModelCase(dtype=torch.bfloat16), SHARDED, SHARDED, {}),
}


@resuming
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_training_ends_where_the_uninterrupted_one_does(ranks, tmp_path: Path, name: str) -> None:
    kind, case, first, then, arguments = RESUMED[name]
    arguments = {**SAVE, **arguments}
    if "precompute_ref_log_probs" in arguments:
        rows_of(kind).save_to_disk(str(tmp_path / "rows"))
    straight = ranks(2).run(train, kind, case, str(tmp_path / "first"), first, arguments)
    start = str(tmp_path / "first" / "checkpoint-2")
    resumed = ranks(2).run(train, kind, case, str(tmp_path / "second"), then, arguments, start)
    # norms of transformers compute in fp32; bf16 runs have the same layout
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.0}[case.dtype]
    expected = {key: weight for _, weights, _ in straight for key, weight in weights.items()}
    found = {key: weight for _, weights, _ in resumed for key, weight in weights.items()}
    assert found.keys() == expected.keys()
    for losses, _, _ in resumed:
        assert losses == pytest.approx(straight[0][0][2:], rel=tolerance)
    assert max(relative_error(found[key], expected[key]) for key in found) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_weights_with_fp32_copies_follow_fp32(ranks, tmp_path: Path, kind: str) -> None:
    arguments = {**ARGUMENTS, **(SHUFFLED if kind == "unpaired" else {})}
    runs = {
        dtype: ranks(2).run(train, kind, ModelCase(dtype=dtype), str(tmp_path), SHARDED, arguments)
        for dtype in (torch.float32, torch.bfloat16)
    }
    for (expected, _, _), (losses, weights, num_masters) in zip(*runs.values(), strict=True):
        assert num_masters == len(weights)
        assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
        assert losses == pytest.approx(expected, rel=0.03, abs=0.01)


def test_values_that_other_ranks_would_not_find_are_refused(ranks, tmp_path: Path) -> None:
    case, arguments = ModelCase(), {**ARGUMENTS, "precompute_ref_log_probs": True}
    with pytest.raises(RankFailure, match=r"values of train_dataset to other ranks in a file.*load it from a file"):
        ranks(2).run(train, "preference", case, str(tmp_path / "run"), REPLICATED, arguments)
