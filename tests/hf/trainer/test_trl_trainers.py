"""TRL's trainers under plans follow stock TRL on one process; what cannot is refused by name. CI installs TRL for this file."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.chats import word_tokenizer
from helpers.models.reference import relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trl_runs import rows_of, train_trl, trainer_name, trl_arguments

from hf_longctx import LongContextCallback, LongContextMixin
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.rules import trl as versions
from hf_longctx.hf.rules.trl import OF_TRL, alone_problems
from hf_longctx.plan.memory.byte_model import ByteModel

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)"),
]
# stock norms, and a head of TRL, compute in fp32
TOLERANCE = 1e-6
# 7 rows: ranks would take one of them twice at the end of the epoch
PACKED = {"packing": True, "max_length": 48, "rows_per_step": 2, "max_steps": 3}
# losses of pairs beyond the sigmoid: of sorted pairs, of tokens, weighted by all probabilities
LOSSES = {"loss_type": ["aot", "sft", "robust"], "loss_weights": [1.0, 0.3, 0.5], "label_smoothing": 0.1}
LOSSES |= {"precompute_ref_log_probs": True}
# the default of TRL, which plans leave out and stock TRL obeys
RECOMPUTED = {"gradient_checkpointing": True}
CENTRED = {"gradient_accumulation_steps": 2, "center_rewards_coefficient": 0.1}
ACCUMULATED = {"gradient_accumulation_steps": 2, "use_weighting": True}
LORA = (("r", 2), ("lora_alpha", 8), ("target_modules", ["q_proj", "v_proj", "down_proj"]))


FOLLOWING = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6}
# TRL keeps a copy of the model's adapters as the reference
OWN_ADAPTERS = {"own_adapters": True, "precompute_ref_log_probs": False}
BALANCED = {"router_aux_loss_coef": 0.3}

SHARDED_STAGES = {"tokens_per_rank": 30, "stages": 2, "parameters": "sharded"}
KEPT_STAGES = {**SHARDED_STAGES, "parameters": "gathered_per_step"}
# numbers of the log that are times, or sums over what one process has
NOT_COMPARED = {"step_time", "loss"}


def _tight(num_tokens: int) -> float:
    """GiB of a device that keeps everything of so many tokens, fewer than its share of a step."""
    spec = model_spec(build_model(ModelCase()))
    return (ByteModel(spec).states() + ByteModel(spec).kept_bytes(num_tokens)) / 2**30


# name -> (ranks, rows, how, adapters, settings of plans, arguments)
RUNS: dict[str, tuple[int, str, str, Any, dict[str, Any], dict[str, Any]]] = {
    "mixin": (1, "chat", "mixin", (), {"tokens_per_rank": 96}, {"assistant_only_loss": True, **RECOMPUTED}),
    "mixin, two ranks together": (2, "completion", "mixin", LORA, {"tokens_per_rank": 48, "static_degree": 2}, RECOMPUTED),
    "attached": (2, "completion", "attached", (), {"tokens_per_rank": 48}, {"completion_only_loss": False, **RECOMPUTED}),
    "attached, stages": (2, "completion", "attached", LORA, {"tokens_per_rank": 96, "stages": 2}, RECOMPUTED),
    "alone": (2, "chat", "alone", (), {"tokens_per_rank": 400}, {"assistant_only_loss": True}),
    "alone, recomputing": (2, "chat", "alone", (), {"device_gib": _tight(90), "tile_tokens": 8}, {}),
    "alone, packed": (2, "text", "alone", LORA, {"tokens_per_rank": 400}, {**PACKED, **RECOMPUTED}),
    "alone, dft": (2, "text", "alone", (), {"tokens_per_rank": 400}, {"loss_type": "dft"}),
    "sharded": (2, "text", "mixin", (), {"tokens_per_rank": 64, "parameters": "sharded"}, {"max_length": 30}),
    "stages": (2, "text", "mixin", (), {"tokens_per_rank": 96, "stages": 2}, {}),
    "pairs": (2, "preference", "alone", (), {"tokens_per_rank": 800}, {}),
    "pairs, adapters": (2, "preference", "alone", LORA, {"tokens_per_rank": 800}, {"loss_type": ["ipo"]}),
    "pairs under plans": (2, "preference", "mixin", (), {"tokens_per_rank": 40}, {"rows_per_step": 4, **ACCUMULATED}),
    "pairs in slices": (1, "preference", "mixin", (), {"device_gib": _tight(22), "tile_tokens": 8}, LOSSES),
    "pairs, adapters off": (2, "preference", "mixin", LORA, {"tokens_per_rank": 60, "stages": 2}, {"loss_type": ["ipo"]}),
    "pairs, sharded stages": (4, "preference", "mixin", (), SHARDED_STAGES, {}),
    "pairs, adapters in sharded stages": (4, "preference", "mixin", LORA, SHARDED_STAGES, {"loss_type": ["ipo"]}),
    "pairs, stages gathered per step": (4, "preference", "mixin", (), KEPT_STAGES, {}),
    "experts in sharded stages": (4, "preference", "mixin", (), SHARDED_STAGES, BALANCED),
    "pairs, sharded": (2, "preference", "mixin", (), {"tokens_per_rank": 60, "parameters": "sharded"}, {"ld_alpha": 0.5}),
    "pairs, reference follows": (2, "preference", "mixin", (), {"tokens_per_rank": 60}, FOLLOWING),
    "unpaired": (1, "unpaired", "mixin", (), {"tokens_per_rank": 60}, {}),
    "unpaired, two ranks": (2, "unpaired", "mixin", LORA, {"tokens_per_rank": 60}, {"loss_type": "apo_zero_unpaired"}),
    "pairs, own adapters": (2, "preference", "mixin", LORA, {"tokens_per_rank": 60, "parameters": "sharded"}, OWN_ADAPTERS),
    "pairs, own adapters in stages": (2, "preference", "mixin", LORA, {"tokens_per_rank": 60, "stages": 2}, OWN_ADAPTERS),
    "unpaired, own adapters": (1, "unpaired", "mixin", LORA, {"device_gib": _tight(22), "tile_tokens": 8}, OWN_ADAPTERS),
    "rewards": (2, "reward", "mixin", (), {"tokens_per_rank": 60}, {"rows_per_step": 4, **CENTRED}),
    "rewards in slices": (1, "reward", "mixin", (), {"device_gib": _tight(22), "tile_tokens": 8}, {}),
    "rewards, adapters": (2, "reward", "mixin", LORA, {"tokens_per_rank": 60, "stages": 2}, {}),
    "policy": (2, "prompt", "mixin", (), {"tokens_per_rank": 40}, {"beta": 0.1, "temperature": 0.7, "num_iterations": 2}),
    "policy, sampled": (1, "prompt", "mixin", (), {"tokens_per_rank": 40}, {"seed": 5, "loss_type": "grpo"}),
    "policy, rolled out": (2, "prompt, rollout", "mixin", (), {"tokens_per_rank": 40}, {"beta": 0.1}),
    "policy, rloo": (2, "prompt, rloo", "mixin", LORA, {"tokens_per_rank": 40}, {"beta": 0.1, "num_iterations": 2}),
    "experts": (2, "completion", "mixin", (), {"tokens_per_rank": 48}, BALANCED),
    "experts of pairs": (2, "preference", "mixin", (), {"tokens_per_rank": 40}, {"rows_per_step": 4, **ACCUMULATED, **BALANCED}),
    "experts in stages": (2, "preference", "mixin", (), {"tokens_per_rank": 60, "stages": 2}, BALANCED),
    "experts, unpaired": (1, "unpaired", "mixin", (), {"tokens_per_rank": 60}, {"gradient_accumulation_steps": 2, **BALANCED}),
    "experts of a policy": (2, "prompt", "mixin", (), {"tokens_per_rank": 40}, {"num_iterations": 2, **BALANCED}),
    "experts, rloo": (2, "prompt, rloo", "mixin", (), {"tokens_per_rank": 40}, {"beta": 0.0, **BALANCED}),
}


@pytest.mark.quick("mixin, two ranks together")
@pytest.mark.parametrize("name", RUNS)
def test_a_trainer_of_trl_follows_stock_trl_on_one_process(ranks, name: str) -> None:
    num_ranks, kind, how, lora, config, arguments = RUNS[name]
    if "static_degree" in config:
        config = {**config, "solver": "static"}
    case = ModelCase("qwen3_moe" if name.startswith("experts") else "llama", lora=lora)
    losses, log, weights = train_trl(kind, "stock", case, {}, arguments)
    results = ranks(num_ranks).run(train_trl, kind, how, case, config, arguments)
    # alone, each rank returns what its own rows add to the mean
    found = [statistics.fmean(parts) for parts in zip(*(each[0] for each in results), strict=True)]
    # centred advantages of unclipped ratios add up to zero
    assert found == pytest.approx(losses, rel=TOLERANCE, abs=1e-7 if kind.startswith("prompt") else 0.0)
    # a pipeline's ranks have a part of the weights each
    assert weights.keys() == set().union(*(each[2].keys() for each in results))
    for _, found_log, found_weights in results:
        assert max(relative_error(weight, weights[key]) for key, weight in found_weights.items()) <= TOLERANCE
        for key in log[0].keys() - NOT_COMPARED:
            # in the first step, policy and reference differ by rounding
            steps = slice(key == "rewards/accuracies", -1)
            # completions are described in the steps that generate them
            expected = pytest.approx([each[key] for each in log[steps] if key in each], rel=1e-5, abs=1e-6)
            assert [each[key] for each in found_log[steps] if key in each] == expected, key


def make(
    base: Any, folder: Path, config: dict[str, Any], arguments: dict[str, Any], kind: str = "completion", **kwargs: Any
) -> Any:
    """A trainer of TRL on this process, with the mixin in front of it unless `config` is None."""
    import trl

    settings = {} if config is None else {"longctx_config": quiet_config(**config)}
    trainer_class = base if config is None else type("Planned", (LongContextMixin, base), {})
    return trainer_class(
        model=kwargs.pop("model", None) or build_model(ModelCase()),
        args=trl_arguments(getattr(trl, base.__name__.replace("Trainer", "Config"), trl.SFTConfig), str(folder), **arguments),
        train_dataset=kwargs.pop("train_dataset", None) or rows_of(kind),
        processing_class=word_tokenizer(),
        **settings,
        **kwargs,
    )


@pytest.mark.parametrize("completion_only", [None, False])
def test_evaluation_takes_the_sets_that_trl_takes(tmp_path: Path, completion_only: bool | None) -> None:
    import trl

    arguments, held_out = {"completion_only_loss": completion_only}, rows_of("completion").select(range(5))
    # rows of different lengths in one batch, since TRL weighs batches equally
    arguments["per_device_eval_batch_size"] = 5
    expected = make(trl.SFTTrainer, tmp_path, None, arguments, eval_dataset=held_out).evaluate()
    trainer = make(trl.SFTTrainer, tmp_path, {}, arguments, eval_dataset=held_out)
    several = make(trl.SFTTrainer, tmp_path, {}, arguments, eval_dataset={"a": held_out, "b": held_out.select(range(3))})
    by_name = several.evaluate()
    first = {name.replace("eval_a_", "eval_"): value for name, value in by_name.items()}
    for found in (trainer.evaluate(), trainer.evaluate(held_out), first, several.evaluate("a")):
        for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
            assert found[name] == pytest.approx(expected[name], rel=TOLERANCE)
    assert by_name["eval_b_loss"] != by_name["eval_a_loss"]


def test_the_last_entry_of_the_log_has_what_no_earlier_one_had(tmp_path: Path) -> None:
    import trl

    logs = []
    for config in (None, {"tokens_per_rank": 400}):
        model = build_model(ModelCase("qwen3_moe"))
        trainer = make(trl.SFTTrainer, tmp_path, config, {"logging_steps": 100, **BALANCED}, model=model)
        trainer.train()
        logs.append({name: trainer.state.log_history[-1].get(name) for name in OF_TRL})
    assert logs[1] == pytest.approx(logs[0], rel=1e-5)


def test_evaluation_of_pairs_is_that_of_trl(tmp_path: Path) -> None:
    import trl

    arguments, held_out = {"per_device_eval_batch_size": 3}, rows_of("preference").select(range(5))
    expected, found = (
        make(
            trl.DPOTrainer,
            tmp_path,
            config,
            arguments,
            "preference",
            eval_dataset=held_out,
            ref_model=build_model(ModelCase(seed=4)),
        ).evaluate()
        for config in (None, {"tokens_per_rank": 60})
    )
    names = expected.keys() - {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-5, abs=1e-7)


HEAD = (("num_labels", 1),)


@pytest.mark.parametrize("kind", ["preference", "unpaired", "reward"])
def test_metrics_of_a_user_get_what_trl_gives_them(tmp_path: Path, kind: str) -> None:
    import trl

    base: Any = getattr(trl, f"{trainer_name(kind)}Trainer")
    arguments, held_out, seen = {"per_device_eval_batch_size": 3}, rows_of(kind).select(range(5)), []

    def metrics(made: Any) -> dict[str, float]:
        seen.append(made.predictions)
        return {"mean": float(made.predictions.mean())}

    def evaluated(config: dict[str, Any] | None) -> Any:
        model = build_model(ModelCase(head=HEAD if kind == "reward" else ()))
        reference = {} if kind == "reward" else {"ref_model": build_model(ModelCase(seed=4))}
        more = {"eval_dataset": held_out, "compute_metrics": metrics, "model": model, **reference}
        trainer = make(base, tmp_path, config, arguments, kind, **more)
        found = trainer.evaluate()
        return (
            found
            if kind != "reward"
            else {**found, "predicted": trainer.predict(trainer.eval_dataset).predictions.ravel().tolist()}
        )

    expected, found = evaluated(None), evaluated({"tokens_per_rank": 60})
    assert seen[-1] == pytest.approx(seen[0], rel=TOLERANCE, abs=1e-9) and seen[-1].shape == seen[0].shape
    times = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time"}
    for name in expected.keys() - times - {"predicted"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    assert found.get("predicted") == pytest.approx(expected.get("predicted"))


def own_loss(base: Any) -> Any:
    return type("OwnLoss", (base,), {"compute_loss": lambda *args, **kwargs: 0})


# name -> (trainer, settings of plans, arguments, part of the message)
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "cut pairs": ("DPOTrainer", {"long_sequences": "split"}, {}, "since DPOTrainer draws its batches itself"),
    "vllm": (
        "GRPOTrainer",
        {},
        {"use_vllm": True, "vllm_mode": "colocate"},
        "vllm_mode='colocate' keeps vLLM's weights and cache on the device",
    ),
    "noise": (
        "DPOTrainer",
        {},
        {"neftune_noise_alpha": 5.0},
        "neftune_noise_alpha=5.0 is not supported with DPOTrainer: the two",
    ),
    "following": ("DPOTrainer", {"stages": 2}, FOLLOWING, "sync_ref_model=True is not supported with stages=2"),
    "generation": ("RLOOTrainer", {"parameters": "sharded"}, {}, "RLOOTrainer generates on every rank for as long as"),
    "packing": ("SFTTrainer", {}, {"packing": True, "max_length": 64}, "set packing=False, since plans pack whole documents"),
    "dft": ("SFTTrainer", {}, {"loss_type": "dft"}, "loss_type='dft' is not the token mean"),
    "offloading": ("SFTTrainer", {}, {"activation_offloading": True}, "activation_offloading=True would move"),
    "cut before": ("SFTTrainer", {"max_length": 128}, {"max_length": 64}, "max_length=64 of the SFTConfig cuts every row"),
    "metrics": ("GRPOTrainer", {}, {}, "the trainer argument compute_metrics is not supported"),
    "own loss": ("OwnLoss", {}, {}, "OwnLoss.compute_loss would never be called"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_plans_cannot_mean_is_refused_before_trl_prepares_anything(tmp_path: Path, name: str) -> None:
    import trl

    trainer, config, arguments, message = REFUSED[name]
    base: Any = own_loss(trl.SFTTrainer) if trainer == "OwnLoss" else getattr(trl, trainer)
    more = {"compute_metrics": len} if name == "metrics" else {}
    with pytest.raises(ValueError, match="this run cannot start") as raised:
        make(base, tmp_path, config, arguments, **more)
    assert message in str(raised.value) and "call attach(trainer)" not in str(raised.value)


def test_rows_that_trl_has_emptied_name_its_limit(tmp_path: Path) -> None:
    import trl

    with pytest.raises(ValueError, match="train_dataset has no rows once its trainer has cut them to max_length=1") as raised:
        make(trl.SFTTrainer, tmp_path, {}, {"max_length": 1})
    assert "raise max_length in the trainer's arguments" in str(raised.value)


def test_dropout_of_adapters_is_refused_for_what_trl_does_with_them(tmp_path: Path) -> None:
    import trl

    model = build_model(ModelCase(lora=(*LORA, ("lora_dropout", 0.1)), dropout=0.2))
    with pytest.raises(ValueError, match="this run cannot start") as raised:
        make(trl.DPOTrainer, tmp_path, {}, {"disable_dropout": False}, "preference", model=model)
    assert "drops, so the two passes of a step would draw different masks" in str(raised.value)
    assert "attention_dropout is 0.2, so the two passes of a step would drop different weights" in str(raised.value)


def test_whole_logits_are_refused_where_a_rank_has_a_part_of_the_model(tmp_path: Path) -> None:
    import trl

    config, metrics = {"parameters": "sharded"}, {"compute_metrics": len, "ref_model": build_model(ModelCase(seed=4))}
    with pytest.raises(ValueError, match=r"compute_metrics of DPOTrainer gets whole logits.*set parameters='replicated'"):
        make(trl.DPOTrainer, tmp_path, config, {}, "preference", **metrics)


def test_routers_without_a_balance_are_refused_with_the_setting_that_trains_them(tmp_path: Path) -> None:
    import trl

    model, reference = (build_model(ModelCase("granite_hybrid", num_layers=4)) for _ in range(2))
    with pytest.raises(ValueError, match=r"DPOTrainer adds the balance loss of the experts, but.*router_aux_loss_coef=0.0"):
        make(trl.DPOTrainer, tmp_path, {}, BALANCED, "preference", model=model, ref_model=reference)
    make(trl.DPOTrainer, tmp_path, {}, {"router_aux_loss_coef": 0.0}, "preference", model=model, ref_model=reference)


def test_attached_plans_are_refused_what_the_mixin_is_and_leave_the_trainer(tmp_path: Path) -> None:
    import trl

    with pytest.raises(ValueError, match="attach does not serve DPOTrainer"):
        pairs = make(trl.DPOTrainer, tmp_path, None, {}, "preference", ref_model=build_model(ModelCase()))
        LongContextCallback(quiet_config()).attach(pairs)
    trainer = make(trl.SFTTrainer, tmp_path, None, {"loss_type": "dft"})
    with pytest.raises(ValueError, match=r"loss_type='dft'.*use the callback in callbacks=\[...\] alone"):
        LongContextCallback(quiet_config()).attach(trainer)
    assert type(trainer) is trl.SFTTrainer


def test_other_trainers_and_versions_of_trl_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    (problem,) = alone_problems(trl.RewardConfig(str(tmp_path), use_cpu=True, bf16=False))
    assert "RewardConfig is for a trainer of TRL whose forwards are not tested" in problem
    args = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert alone_problems(args) == []
    monkeypatch.setattr(versions, "_TRL", "1.17")
    (problem,) = alone_problems(args)
    assert "its trainers are tested with 1.17" in problem


@pytest.mark.parametrize("kind", ["preference", "reward"])
def test_half_precision_under_autocast_computes_the_second_pass_first(tmp_path: Path, kind: str) -> None:
    import trl

    base: Any = getattr(trl, f"{trainer_name(kind)}Trainer")
    losses = []
    for config in (None, {"tokens_per_rank": 400}):
        model = build_model(ModelCase(dtype=torch.float16, head=HEAD if kind == "reward" else ()))
        reference = {} if kind == "reward" else {"ref_model": build_model(ModelCase(dtype=torch.float16))}
        trainer = make(base, tmp_path, config, {"bf16": True}, kind, model=model, **reference)
        losses.append(trainer.train().training_loss)
    # bf16 has 8 bits
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_columns_that_trl_makes_into_text_are_read(tmp_path: Path) -> None:
    import trl

    texts = rows_of("text")["text"]
    chats = [{"conversations": [{"from": "user", "value": "hello"}, {"from": "assistant", "value": text}]} for text in texts]
    makers: dict[str, Any] = {
        "conversations": (datasets.Dataset.from_list(chats), {}),
        "a function": (datasets.Dataset.from_dict({"said": texts}), {"formatting_func": lambda row: row["said"]}),
    }
    for rows, more in makers.values():
        found = make(trl.SFTTrainer, tmp_path, {}, {}, train_dataset=rows, **more)
        expected = make(trl.SFTTrainer, tmp_path, None, {}, train_dataset=rows, **more)
        assert found.train_dataset["input_ids"] == expected.train_dataset["input_ids"]


@pytest.mark.parametrize("door", ["mixin", "attached"])
@pytest.mark.parametrize("column", ["input_ids", "said"])
def test_a_users_collator_reads_all_columns_where_trl_leaves_them(tmp_path: Path, column: str, door: str) -> None:
    import trl

    def mask_prompts(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.tensor([row[column] for row in rows])
        num_prompt = torch.tensor([[row.get("num_prompt", 0)] for row in rows])
        labels = ids.where(torch.arange(ids.shape[1]) >= num_prompt, -100)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    rows = datasets.Dataset.from_dict({column: [[i, 7, 8, i + 1, 9] for i in range(16)], "num_prompt": [1, 3] * 8})
    arguments = {"remove_unused_columns": False, "max_steps": 2, "dataset_kwargs": {"skip_prepare_dataset": column == "said"}}
    given: dict[str, Any] = {"train_dataset": rows, "data_collator": mask_prompts}
    expected = make(trl.SFTTrainer, tmp_path, None, arguments, **given).train().training_loss
    trainer = make(trl.SFTTrainer, tmp_path, {} if door == "mixin" else None, arguments, **given)
    if door == "attached":
        LongContextCallback(quiet_config()).attach(trainer)
    assert trainer.train().training_loss == pytest.approx(expected, rel=TOLERANCE)
