"""Every field of the installed `TrainingArguments` is in the table, and a test or `Trainer`'s code shows what the table says."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers.trainer
from transformers import TrainingArguments

from hf_longctx.hf.rules.training_arguments import SETTINGS, idle_settings
from hf_longctx.hf.trainer.trainer import LongContextMixin

TESTS = Path(__file__).parents[2]
FIELDS = [field.name for field in dataclasses.fields(TrainingArguments)]

_REFUSED = "test_a_rule_applies_to_its_example_and_to_no_plain_run"
_STEPS = "test_twenty_steps_follow_one_plain_process"
_BEST = "test_the_best_model_is_loaded_at_the_end"
_IDLE = "test_settings_without_effect_change_nothing_and_are_one_warning"
_RECOMPUTED = "test_checkpointing_becomes_a_line_and_trains_as_without"
_LOADER = "test_a_loader_has_the_settings_of_the_arguments"

# field -> the test that shows what the table says of it
SHOWN_BY = {
    "output_dir": "test_curves_and_every_evaluation_go_into_one_folder_of_the_run",
    "full_determinism": "test_equal_runs_have_equal_bits_at_any_speed",
    "per_device_train_batch_size": "test_accumulated_plans_follow_one_plain_process",
    "num_train_epochs": "test_token_budget_makes_the_steps",
    "max_steps": _STEPS,
    "learning_rate": _STEPS,
    "lr_scheduler_type": _STEPS,
    "warmup_steps": _STEPS,
    "optim": "test_every_optimizer_of_transformers_is_served_or_refused_by_name",
    "optim_args": "test_what_does_not_go_with_few_bits_is_refused_by_name",
    "weight_decay": _STEPS,
    "gradient_accumulation_steps": "test_accumulated_plans_follow_one_plain_process",
    "average_tokens_across_devices": _REFUSED,
    "max_grad_norm": _STEPS,
    "label_smoothing_factor": "test_smoothed_labels_train_as_in_stock_transformers",
    "bf16": "test_training_in_half_precision_follows_fp32",
    "fp16": _REFUSED,
    "bf16_full_eval": _REFUSED,
    "fp16_full_eval": _REFUSED,
    "activation_checkpointing": _RECOMPUTED,
    "activation_checkpointing_kwargs": _RECOMPUTED,
    "gradient_checkpointing": _RECOMPUTED,
    "gradient_checkpointing_kwargs": _RECOMPUTED,
    "torch_compile": _REFUSED,
    "torch_compile_backend": _REFUSED,
    "torch_compile_mode": _REFUSED,
    "use_liger_kernel": "test_liger_is_refused_where_it_cannot_be_exact",
    "liger_kernel_config": "test_liger_is_refused_where_it_cannot_be_exact",
    "neftune_noise_alpha": "test_a_resumed_training_draws_the_noise_of_the_steps_that_are_left",
    "torch_empty_cache_steps": "test_caches_are_emptied_as_often_as_asked_for",
    "auto_find_batch_size": _REFUSED,
    "include_num_input_tokens_seen": "test_a_run_of_stages_is_clipped_saved_and_resumed_as_the_whole_model",
    "eval_strategy": _BEST,
    "eval_steps": _BEST,
    "per_device_eval_batch_size": "test_evaluation_on_two_ranks_is_that_of_trl_on_one_process",
    "prediction_loss_only": "test_another_loss_leaves_the_metrics_and_no_predictions_leave_the_loss_alone",
    "include_for_metrics": "test_what_needs_logits_or_batches_is_refused",
    "save_only_model": "test_weights_alone_are_resumed_on_request",
    "save_strategy": _BEST,
    "save_steps": "test_a_killed_save_costs_no_complete_checkpoint",
    "save_on_each_node": "test_a_rule_applies_to_its_example_and_to_no_plain_run",
    "save_total_limit": "test_a_killed_save_costs_no_complete_checkpoint",
    "enable_jit_checkpoint": "test_sigterm_to_one_rank_stops_all_ranks_with_exit_code_0",
    "push_to_hub": "test_uploads_read_whole_checkpoints_in_view",
    "hub_model_id": "test_uploads_read_whole_checkpoints_in_view",
    "hub_strategy": "test_what_would_see_a_later_step_is_refused",
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": "test_the_best_checkpoint_is_chosen_by_a_users_metric",
    "greater_is_better": "test_the_best_checkpoint_is_chosen_by_a_users_metric",
    "ignore_data_skip": "test_other_steps_per_epoch_are_refused_unless_data_is_not_skipped",
    "seed": "test_resuming_inside_an_epoch_continues_with_the_same_samples",
    "data_seed": "test_a_map_style_run_with_other_samples_is_not_resumed",
    "accelerator_config": _REFUSED,
    "parallelism_config": "test_a_rule_applies_to_its_example_and_to_no_plain_run",
    "dataloader_drop_last": "test_how_a_step_is_divided_matters_only_where_plans_end_an_epoch",
    "dataloader_num_workers": "test_resuming_inside_an_epoch_continues_with_the_same_samples",
    "dataloader_pin_memory": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _REFUSED,
    "train_sampling_strategy": "test_order_strategies_that_mean_something_are_accepted",
    "fsdp": "test_an_fsdp_configuration_becomes_our_setting",
    "fsdp_config": "test_an_fsdp_configuration_becomes_our_setting",
    "deepspeed": "test_a_deepspeed_configuration_becomes_our_settings",
    "debug": _REFUSED,
}

# methods of `Trainer` that plans never call, although no method of ours stands in their place
NEVER_CALLED = {
    "_get_dataloader",
    "_get_train_sampler",
    "_get_eval_sampler",
    "_get_collator_with_removed_columns",
    "_remove_unused_columns",
    "_get_num_items_in_batch",
    "compute_loss",
    "prediction_step",
}


def test_every_field_is_in_the_table() -> None:
    unknown = [name for name in FIELDS if name not in SETTINGS]
    assert unknown == [], "say in hf/rules/training_arguments.py what becomes of these fields under plans, and show it by a test"


def test_a_test_shows_what_the_table_says_of_a_field() -> None:
    shown = {name for name, setting in SETTINGS.items() if setting.state not in ("Trainer's own", "no effect")}
    assert shown == set(SHOWN_BY)
    written = {name for file in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    assert {name: test for name, test in SHOWN_BY.items() if test not in written} == {}


@cache
def methods_of_trainer() -> dict[str, str]:
    """Source of every method of the installed `Trainer`."""
    tree = ast.parse(inspect.getsource(transformers.trainer))
    (trainer,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    return {node.name: ast.unparse(node) for node in trainer.body if isinstance(node, ast.FunctionDef)}


def replaced(method: str) -> bool:
    """Whether plans never call a method of `Trainer`: ours stands in its place and does not call it, or nobody does."""
    for cls in LongContextMixin.__mro__:
        if cls.__module__.startswith("hf_longctx.") and method in vars(cls):
            return f".{method}(" not in inspect.getsource(vars(cls)[method]).split(":\n", 1)[1]
    return method in NEVER_CALLED


def readers(name: str) -> list[str]:
    return [method for method, source in methods_of_trainer().items() if re.search(rf"\bargs\.{name}\b", source)]


@pytest.mark.parametrize("name", [name for name in FIELDS if SETTINGS[name].state == "Trainer's own"])
def test_what_reads_a_setting_of_trainers_own_still_runs(name: str) -> None:
    assert [method for method in readers(name) if replaced(method)] == []


def test_a_replaced_reader_would_be_noticed() -> None:
    assert [method for method in readers("remove_unused_columns") if replaced(method)]
    assert replaced("training_step") and not replaced("save_model")


def test_changed_settings_are_idle_only_where_plans_stand_in_their_place(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"ddp_bucket_cap_mb": 25, "eval_accumulation_steps": 2, "include_for_metrics": ["inputs"]}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **changes)
    assert idle_settings(args, False, False, False) == []
    names = [
        [each.split("=")[0] for each in idle_settings(args, *where)] for where in ((True, False, False), (False, True, True))
    ]
    assert names == [["ddp_bucket_cap_mb"], ["eval_accumulation_steps"]]
    assert len(idle_settings(args, True, True, False)) == 3
