"""Translates axolotl's YAML into our settings; axolotl is not needed, and never imported here.

`FIELDS` says what becomes of every field of the file; docs/guides/axolotl.md repeats it, and a test compares it with the fields
that an installed axolotl reads. A field that is in no row is refused, since a later axolotl may train something else by it.
Source: axolotl 0.19.0, `utils/schemas`, `utils/config`, `utils/trainer.py`, `core/builders` and `loaders`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

from transformers import TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.ranks.exit_message import RefusedRun
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.rules import deepspeed
from hf_longctx.hf.rules.training_arguments import opened, translate
from hf_longctx.plan.core.messages import listed, shown

State = Literal["kept", "translated", "no effect", "refused"]


@dataclass(frozen=True, slots=True)
class Row:
    """Fields of axolotl's YAML with one fate."""

    state: State
    names: tuple[str, ...]
    # words for the guide: their translation, the reason why they have no effect, or the remedy
    note: str = ""
    # value that switches off what has no effect, so that axolotl does nothing for it; None leaves the field out
    off: Any = None


def _row(state: State, names: str, note: str = "", off: Any = None) -> Row:
    return Row(state, tuple(names.split()), note, off)


_ATTENTION = "attn_implementation flash_attention sdp_attention flex_attention xformers_attention sage_attention eager_attention"
_LORA_KERNELS = "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel"
_LIGER = (
    "liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy "
    "liger_fused_linear_cross_entropy liger_use_token_scaling"
)
_TRL_VERSION = (
    "axolotl 0.19 imports trl 1.13 or older, and these trainers are tested with trl 1.16: write class Mine(LongContextMixin, "
    "KTOTrainer) in a script (docs/get-started/trl.md)"
)
# values of `rl` that run, and losses of pairs that `integrations/axolotl.py` computes from log-probabilities
_PREFERENCES = ("dpo", "ipo")
DPO_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust")
# kinds of optimizers of `TrainingArguments` run; those that axolotl makes itself do not
_OWN_OPTIMIZERS = frozenset(
    (
        *("optimi_adamw", "ao_adamw_fp8", "adopt_adamw", "adamc", "came_pytorch", "muon", "dion", "sinkgd", "polora"),
        *("flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion", "q_galore_adamw8bit"),
    )
)

ROWS = (
    _row(
        "kept",
        "base_model base_model_config revision_of_model model_revision model_type type_of_model model_config "
        "overrides_of_model_config model_kwargs overrides_of_model_kwargs tokenizer_config tokenizer_use_fast tokenizer_legacy "
        "tokenizer_type tokenizer_save_jinja_files special_tokens bos_token eos_token pad_token unk_token "
        "additional_special_tokens "
        "tokens added_tokens_overrides resize_token_embeddings_to_32x shrink_embeddings mean_resizing_embeddings "
        "embeddings_skip_upcast reinit_weights trust_remote_code is_falcon_derived_model is_llama_derived_model "
        "is_mistral_derived_model is_qwen_derived_model",
        "the model and its tokenizer",
    ),
    _row(
        "kept",
        "datasets test_datasets val_set_size dataset_prepared_path dataset_processes dataset_num_proc dataset_shard_num "
        "dataset_shard_idx num_dataset_shards_to_save dataset_exact_deduplication dataset_keep_in_memory shuffle_merged_datasets "
        "shuffle_before_merging_datasets skip_prepare_dataset push_dataset_to_hub hf_use_auth_token chat_template "
        "chat_template_jinja chat_template_kwargs eot_tokens default_system_message train_on_inputs excess_length_strategy "
        "eval_sequence_len min_sample_len max_prompt_len is_preprocess remove_unused_columns",
        "rows: axolotl reads, tokenises, masks and shortens them",
    ),
    _row(
        "kept",
        "adapter lora_model_dir lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_target_linear "
        "lora_modules_to_save lora_rank_pattern lora_alpha_pattern lora_fan_in_fan_out lora_on_cpu peft peft_use_rslora "
        "peft_use_dora peft_layers_to_transform peft_layers_pattern peft_init_lora_weights peft_trainable_token_indices "
        "peft_ensure_weight_tying peft_autocast_adapter_dtype loftq_config loftq_bits load_in_8bit load_in_4bit "
        "bnb_config_kwargs model_quantization_config model_quantization_config_kwargs unfrozen_parameters freeze_mm_modules",
        "adapters and frozen weights; what cannot be exact is refused when the run starts",
    ),
    _row(
        "kept",
        "output_dir num_epochs max_steps learning_rate lr_scheduler lr_scheduler_kwargs lr_quadratic_warmup cosine_min_lr_ratio "
        "cosine_constant_lr_ratio lr_div_factor warmup_steps warmup_ratio weight_decay optimizer optim_args optim_target_modules "
        "adam_beta1 adam_beta2 adam_epsilon max_grad_norm embedding_lr embedding_lr_scale lr_groups loraplus_lr_ratio "
        "loraplus_lr_embedding neftune_noise_alpha noisy_embedding_alpha seed bf16 bfloat16 fp16 float16 float32 tf32 "
        "torch_compile torch_compile_backend torch_compile_mode auto_find_batch_size group_by_length",
        "the training; values that plans do not support are refused by the name of the argument",
    ),
    _row(
        "kept",
        "eval_batch_size eval_steps evals_per_epoch eval_strategy evaluation_strategy save_steps saves_per_epoch save_strategy "
        "save_total_limit save_only_model save_first_step save_safetensors load_best_model_at_end early_stopping_patience "
        "metric_for_best_model greater_is_better logging_steps resume_from_checkpoint auto_resume_from_checkpoints hub_model_id "
        "hub_strategy hub_revision loss_watchdog_threshold loss_watchdog_patience gc_steps gc_collect_steps "
        "torch_empty_cache_steps include_tokens_per_second use_tensorboard profiler_steps profiler_steps_start use_wandb "
        "wandb_name wandb_run_id wandb_mode wandb_project wandb_entity wandb_watch wandb_log_model use_mlflow "
        "mlflow_tracking_uri "
        "mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace "
        "comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config use_trackio "
        "trackio_project_name trackio_run_name trackio_space_id use_otel_metrics otel_metrics_host otel_metrics_port "
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last accelerator_config "
        "ddp_timeout",
        "evaluation, checkpoints and logs",
    ),
    _row(
        "kept",
        "strict plugins debug debug_text_only debug_num_examples prompter shard download iterable inference merge_lora "
        "merge_method axolotl_config_path device world_size local_rank low_cpu_mem_usage gradio_title gradio_share "
        "gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature vllm trl spectrum_top_fraction "
        "spectrum_model_name lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model eval_max_new_tokens "
        "eval_causal_lm_metrics liger_kernel_impl capabilities env_capabilities total_num_tokens "
        "total_supervised_tokens",
        "read before or after the training",
    ),
    _row(
        "kept",
        "rl rl_beta dpo_loss_type dpo_loss_weights dpo_label_smoothing dpo_use_weighting",
        "DPO and IPO, with the reference model that axolotl takes",
    ),
    _row("translated", "long_context", "fields of `LongContextConfig`"),
    _row("translated", "sequence_len", "`max_length`"),
    _row(
        "translated",
        "sample_packing",
        "`tokens_per_step`: as many tokens as axolotl's packs of a step hold; plans pack, and keep rows apart",
    ),
    _row(
        "translated",
        "micro_batch_size gradient_accumulation_steps batch_size context_parallel_size sequence_parallel_degree",
        "as many rows per step as before; group sizes are chosen per step",
    ),
    _row("translated", "fsdp fsdp_config fsdp_version dp_shard_size dp_replicate_size", "`parameters` and `shard_ranks`"),
    _row("translated", "deepspeed", "[settings of both kinds](../reference/training-arguments.md#deepspeeds-configuration)"),
    _row("translated", "gradient_checkpointing gradient_checkpointing_kwargs activation_offloading", '`activations="auto"`'),
    _row("translated", "curriculum_sampling", '`train_sampling_strategy="sequential"`'),
    _row(
        "no effect",
        f"{_ATTENTION} flex_attn_compile_kwargs sdpa_varlen large_head_attention flash_attn_d512",
        "plans have attention of their own, exact for every pattern",
    ),
    _row("no effect", _LORA_KERNELS, "plans compute adapters themselves", False),
    _row(
        "no effect",
        f"{_LIGER} use_kernels fused_attn_kernel flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum",
        "`compile_layers` makes kernels",
        False,
    ),
    _row(
        "no effect",
        "cut_cross_entropy chunked_cross_entropy chunked_cross_entropy_num_chunks flash_attn_cross_entropy tiled_mlp "
        "tiled_mlp_num_shards tiled_mlp_use_original_mlp",
        "losses and MLPs run in tiles (`tile_tokens`)",
        False,
    ),
    _row(
        "no effect",
        "selective_checkpointing layer_offloading",
        'plans choose what stays; `layer_weights="host"` moves weights',
        False,
    ),
    _row(
        "no effect",
        "eval_sample_packing sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
        "sample_packing_eff_est "
        "sample_packing_mp_start_method multipack_real_batches batch_flattening pad_to_sequence_len pad_to_multiple_of",
        "plans pack, and nothing is padded",
    ),
    _row(
        "no effect",
        "ddp ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters heads_k_stride ring_attn_func "
        "fsdp_final_state_dict_type qlora_sharded_model_loading device_map experimental_skip_move_to_device max_memory "
        "gpu_memory_limit",
        "plans sum gradients, and models are placed as `parameters` says",
    ),
    _row("no effect", "include_tkps", "the log has `tokens_per_s`", False),
    _row("no effect", "dpo_padding_free", "nothing is padded"),
    _row("refused", "dpo_beta", "axolotl ignores it: set rl_beta"),
    _row(
        "refused",
        "dpo_use_liger_kernel dpo_use_logits_to_keep dpo_generate_during_eval precompute_ref_log_probs",
        "leave it out; losses run in tiles, and the reference under the plans of the model",
    ),
    _row(
        "refused",
        "dpo_norm_loss rpo_alpha",
        "it changes the loss, and plans compute none with it; without it another one is trained",
    ),
    _row(
        "refused",
        "orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight reward_model center_rewards_coefficient "
        "ebft",
        _TRL_VERSION,
    ),
    _row(
        "refused",
        "process_reward_model num_labels cls_model_config",
        "write a script with LongContextTrainer and a classifier (docs/guides/classifiers.md)",
    ),
    _row(
        "refused", "tensor_parallel_size", "leave it out; set parameters: sharded in long_context, whose groups divide sequences"
    ),
    _row("refused", "expert_parallel_size expert_parallel_backend", "leave it out, and set expert_ranks in long_context"),
    _row(
        "refused",
        "trainer_cls",
        "leave it out: the plugin brings the trainer; a trainer of your own is class Mine(LongContextMixin, ...) in a script",
    ),
    _row(
        "refused",
        (
            "pretraining_dataset streaming pretrain_multipack_buffer_size pretrain_multipack_attn "
            "pretraining_sample_concatenation streaming_multipack_buffer_size preprocess_iterable"
        ),
        "name the texts in `datasets` with `type: completion`, or write a script with an iterable dataset (docs/guides/data.md)",
    ),
    _row(
        "refused",
        "processor_type processor_kwargs processor_config image_size image_resize_algorithm role_boundaries is_multimodal",
        "for images, write a script (docs/guides/images.md); for text alone, leave it out",
    ),
    _row(
        "refused",
        "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks",
        "positions of plans count from 0; extend the context instead (docs/guides/extend-context.md)",
    ),
    _row("refused", "rope_scaling", "set it in `overrides_of_model_config`"),
    _row(
        "refused",
        (
            "relora relora_prune_ratio relora_prune_method relora_cpu_offload jagged_restart_steps "
            "jagged_restart_warmup_steps jagged_restart_anneal_steps lisa_n_layers lisa_step_interval "
            "lisa_layers_attribute qat quantization fp8 fp8_config fp8_enable_fsdp_float8_all_gather deepcompile "
            "dynamic_checkpoint"
        ),
        "leave it out; it changes weights, trained layers or precision while plans run",
    ),
    _row(
        "refused",
        (
            "use_eaft eaft_alpha eaft_k scaling_softmax scaling_softmax_factor scaling_softmax_bias s2_attention "
            "max_packed_sequence_len"
        ),
        "leave it out; plans train the cross-entropy of the model's own attention",
    ),
    _row("refused", "fix_untrained_tokens", "leave it out, and set the rows of untrained tokens before the run"),
    _row(
        "refused",
        (
            "do_causal_lm_eval do_bench_eval bench_dataset bench_split eval_table_size generate_samples "
            "num_generation_samples generation_max_new_tokens generation_temperature generation_top_p "
            "generation_top_k generation_prompt_ratio generation_do_sample"
        ),
        "leave it out, and evaluate or generate with the saved model after the training",
    ),
    _row(
        "refused",
        (
            "quantize_moe_experts experts_implementation llama4_linearized_experts gemma4_hybrid_attn_impl "
            "ple_cpu_offload gptq use_onebitllms peft_layer_replication fp32_norms fp32_norm_classes "
            "torch_compile_options torchdistx_path tokenizer_use_mistral_common"
        ),
        "leave it out; it changes modules of the model",
    ),
    _row(
        "refused",
        "use_ray ray_run_name ray_num_workers resources_per_worker",
        "leave it out, and start ranks with torchrun or accelerate",
    ),
    _row(
        "refused",
        (
            "adam_beta3 adam_epsilon2 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank "
            "qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits "
            "qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size"
        ),
        "leave it out; name an optimizer of TrainingArguments",
    ),
)
# name of a field -> its row
FIELDS: dict[str, Row] = {name: row for row in ROWS for name in row.names}

# plugins of axolotl that may stand beside ours, with the field that switches off what plans do themselves
_PLUGINS: dict[str, str] = {
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin": "cut_cross_entropy",
    "axolotl.integrations.liger.LigerPlugin": "",
    "axolotl.integrations.lm_eval.LMEvalPlugin": "",
    "axolotl.integrations.spectrum.SpectrumPlugin": "",
    "axolotl.integrations.swanlab.SwanLabPlugin": "",
}
# argument of `TrainingArguments` -> field of axolotl's YAML
_YAML_NAMES = {"per_device_train_batch_size": "micro_batch_size", "optim": "optimizer", "lr_scheduler_type": "lr_scheduler"}


@dataclass(frozen=True)
class AxolotlSettings:
    """axolotl's YAML in our words."""

    config: LongContextConfig
    # fields of the YAML with the values that axolotl shall read instead; None removes one
    changes: dict[str, Any] = field(default_factory=dict)
    # fields of `TrainingArguments` in place of those that axolotl makes
    arguments: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def from_axolotl(given: Mapping[str, Any], launch: LaunchEnvironment) -> AxolotlSettings:
    """Translates the fields of axolotl's YAML, before axolotl itself has read them.

    Raises ValueError naming every field that has no counterpart, with its value and a remedy.
    """
    asked = {name: value for name, value in given.items() if value not in (None, False, "", [], {})}
    problems = [*_refused(asked), *_preference_problems(asked), *_plugin_problems(asked)]
    own = asked.get("long_context", {})
    if not isinstance(own, Mapping):
        raise RefusedRun.of([f"long_context is {shown(own)}; give fields of LongContextConfig, one a line"], _HEADLINE)
    try:
        config = LongContextConfig(**own)
    except TypeError as error:
        names = ", ".join(sorted(set(own) - set(LongContextConfig.__dataclass_fields__))) or str(error)
        raise RefusedRun.of([f"LongContextConfig has no {names}, which long_context names; leave it out"], _HEADLINE) from None
    except ValueError as error:
        raise RefusedRun.of([*problems, f"long_context: {error}"], _HEADLINE) from None
    changes: dict[str, Any] = {name: FIELDS[name].off for name in asked if name in FIELDS and FIELDS[name].state == "no effect"}
    if asked.get("adapter"):
        # axolotl would hand None to PEFT
        changes["lora_fan_in_fan_out"] = bool(asked.get("lora_fan_in_fan_out"))
    if given.get("seed") is None:
        # without one, axolotl would shuffle rows anew in every run
        changes["seed"] = 42
    if asked.get("load_in_4bit"):
        # axolotl would store them as weights of two bytes, as FSDP and DeepSpeed need it
        stored = {"bnb_4bit_quant_storage": "uint8"}
        changes["bnb_config_kwargs"] = {**stored, **asked.get("bnb_config_kwargs", {})}
    # axolotl switches these on by itself
    changes |= dict.fromkeys(_LORA_KERNELS.split(), False) | {
        "include_tkps": False,
        "attn_implementation": _loaded_attention(asked),
    }
    changes |= {field: False for plugin, field in _PLUGINS.items() if field and plugin in asked.get("plugins", ())}
    changes |= dict.fromkeys(_names("translated", asked) - {"long_context", "sequence_len"})
    if config.max_length is None and asked.get("sequence_len"):
        config = replace(config, max_length=int(asked["sequence_len"]))
    arguments: dict[str, Any] = {"average_tokens_across_devices": True}
    if asked.get("curriculum_sampling"):
        arguments["train_sampling_strategy"] = "sequential"
    config, lines, found = _placement(given, asked, config, launch, arguments)
    problems += found
    counts = ("per_device_train_batch_size", "gradient_accumulation_steps")
    of_deepspeed = {_YAML_NAMES.get(name, name): arguments.pop(name) for name in counts if name in arguments}
    config, rows, line, found = _rows({**asked, **of_deepspeed}, config, launch.num_ranks)
    problems += found
    if problems:
        raise RefusedRun.of(problems, _HEADLINE)
    idle = sorted(name for name in _names("no effect", asked) if name not in _ATTENTION.split())
    lines += [line] if line else []
    lines += [f"settings of axolotl without effect under plans: {listed(idle)}"] if idle else []
    return AxolotlSettings(config, changes | rows, arguments, tuple(lines))


def _loaded_attention(asked: Mapping[str, Any]) -> str:
    """The attention with which models are loaded, until plans replace it; some classes have no other than eager."""
    is_eager = asked.get("attn_implementation") == "eager" or asked.get("eager_attention")
    return "eager" if is_eager else "sdpa"


_HEADLINE = "this axolotl configuration cannot run under plans"


def _names(state: State, asked: Mapping[str, Any]) -> set[str]:
    return {name for name in asked if name in FIELDS and FIELDS[name].state == state}


def _refused(asked: Mapping[str, Any]) -> list[str]:
    """Problems with fields that are refused or unknown, and with optimizers that axolotl makes itself."""
    problems = [f"{name} is {shown(asked[name])}; {FIELDS[name].note}" for name in asked if _is_refused(name, asked[name])]
    problems += [
        f"{name} is {shown(asked[name])}, and is no field that the plugin knows; leave it out"
        for name in asked
        if name not in FIELDS
    ]
    if str(asked.get("optimizer")) in _OWN_OPTIMIZERS:
        problems.append(
            f"optimizer is {shown(asked['optimizer'])}, which axolotl makes itself; name one of TrainingArguments.optim"
        )
    return problems


def _is_refused(name: str, value: Any) -> bool:
    # sizes of 1 divide nothing
    return name in FIELDS and FIELDS[name].state == "refused" and not (name.endswith("_size") and value == 1)


def _preference_problems(asked: Mapping[str, Any]) -> list[str]:
    """Problems with a training of preferences, and with fields that do not go with one."""
    rl, kinds = asked.get("rl"), asked.get("dpo_loss_type", [])
    if rl is None:
        return []
    if rl not in _PREFERENCES:
        return [f"rl is {shown(rl)}; {_TRL_VERSION}"]
    problems = [
        f"{name} is {shown(asked[name])} with rl: {rl}; leave it out"
        for name in ("sample_packing", "load_in_4bit", "load_in_8bit")
        if asked.get(name)
    ]
    if other := [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind not in DPO_LOSSES]:
        problems.append(
            f"dpo_loss_type has {listed(other)}, and plans compute {', '.join(DPO_LOSSES)}; for others write class "
            f"Mine(LongContextMixin, DPOTrainer) in a script (docs/get-started/trl.md)"
        )
    return problems


def _plugin_problems(asked: Mapping[str, Any]) -> list[str]:
    return [
        f"plugins has {name}, which may change the loss, the model or the trainer; leave it out"
        for name in asked.get("plugins", ())
        if name not in _PLUGINS and not name.startswith("hf_longctx.")
    ]


def _placement(
    given: Mapping[str, Any],
    asked: Mapping[str, Any],
    config: LongContextConfig,
    launch: LaunchEnvironment,
    arguments: dict[str, Any],
) -> tuple[LongContextConfig, list[str], list[str]]:
    """The config with the settings that FSDP, DeepSpeed and checkpointing become; fills `arguments`; lines and problems.

    given: the fields of the YAML; asked: those that are not empty.
    """
    lines, problems = list[str](), list[str]()
    has_fsdp = bool(asked.get("fsdp") or asked.get("fsdp_config"))
    if has_fsdp or asked.get("gradient_checkpointing") or asked.get("activation_offloading"):
        args = SimpleNamespace(world_size=launch.num_ranks, deepspeed=None, fsdp=None, fsdp_config=None)
        args.gradient_checkpointing = bool(asked.get("gradient_checkpointing") or asked.get("activation_offloading"))
        if has_fsdp:
            args.fsdp, args.fsdp_config = _fsdp(asked)
        plain = replace(launch, uses_fsdp=False, uses_deepspeed=False, loads_on_first=False)
        found = translate(config, cast(TrainingArguments, args), plain)
        config, lines, problems = found.config, [*found.lines], [*found.problems]
        block = int(asked.get("dp_shard_size") or 0) * _context_ranks(asked)
        if config.parameters != "replicated" and config.shard_ranks is None and 0 < block < launch.num_ranks:
            config = replace(config, shard_ranks=block)
    if source := asked.get("deepspeed"):
        read = deepspeed.translated(source, launch.num_ranks, config.may_have_stages)
        changes, line = opened(config, read)
        wanted = {_YAML_NAMES.get(name, name): value for name, value in read.arguments.items()}
        # 0 and False are values, too
        named = {name: value for name, value in wanted.items() if given.get(name) not in (None, "auto")}
        problems += [*read.problems, *deepspeed.differing(named, given)]
        if not problems:
            config = replace(config, **changes)
            arguments |= {name: value for name, value in read.arguments.items() if _YAML_NAMES.get(name, name) not in named}
        lines.append(line)
    return config, lines, problems


def _fsdp(asked: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """FSDP's strategy and fields, as `TrainingArguments` name them; axolotl takes them with and without the prefix `fsdp_`."""
    found = asked.get("fsdp_config") or {}
    given = {str(name).removeprefix("fsdp_"): value for name, value in found.items()}
    words = asked.get("fsdp") if isinstance(asked.get("fsdp"), list | tuple) else [asked.get("fsdp") or ""]
    strategy = given.get("reshard_after_forward", given.get("sharding_strategy"))
    settings: dict[str, Any] = {"cpu_offload": given.get("offload_params", False) or "offload" in (words or ())}
    settings["activation_checkpointing"] = given.get("activation_checkpointing", False)
    if strategy is not None:
        settings["reshard_after_forward"] = strategy
    return " ".join(str(word) for word in words or ()) or "full_shard", settings


def _context_ranks(asked: Mapping[str, Any]) -> int:
    return int(asked.get("context_parallel_size") or asked.get("sequence_parallel_degree") or 1)


def _rows(
    asked: Mapping[str, Any], config: LongContextConfig, num_ranks: int
) -> tuple[LongContextConfig, dict[str, Any], str, list[str]]:
    """The config and the fields of the YAML that give a step as many rows or tokens as axolotl's, a line, and problems."""
    micro, per_step, context = (
        int(asked.get("micro_batch_size") or 1),
        asked.get("gradient_accumulation_steps"),
        _context_ranks(asked),
    )
    per_step = int(per_step or int(asked.get("batch_size") or micro) // micro)
    # a process that prepares data divides nothing
    context = 1 if num_ranks == 1 else context
    num_rows = micro * per_step * (num_ranks // context)
    if num_ranks % context:
        return (
            config,
            {},
            "",
            [f"context_parallel_size is {context} on {num_ranks} ranks; leave it out: groups are chosen per step"],
        )
    fields = {"micro_batch_size": micro, "gradient_accumulation_steps": per_step}
    if asked.get("sample_packing"):
        if not asked.get("sequence_len"):
            return config, {}, "", ["sample_packing needs sequence_len, the tokens of a pack; set it"]
        if config.tokens_per_step is None:
            config = replace(config, tokens_per_step=num_rows * int(asked["sequence_len"]))
        line = (
            f"sample_packing becomes LongContextConfig(tokens_per_step={config.tokens_per_step}), the tokens of {num_rows} "
            f"packs; a step has as many rows as that holds on average"
        )
        return config, fields | {"gradient_accumulation_steps": 1}, line, []
    if context == 1:
        return config, fields, "", []
    if num_rows % num_ranks:
        remedy = f"make micro_batch_size x gradient_accumulation_steps a multiple of {context}, or leave it out"
        return (
            config,
            {},
            "",
            [f"context_parallel_size is {context}, with {num_rows} rows per step on {num_ranks} ranks; {remedy}"],
        )
    per_rank = num_rows // num_ranks
    per_step = per_step if per_rank % per_step == 0 else 1
    line = (
        f"context_parallel_size={context} is left out, with {num_rows} rows per step as before; group sizes are chosen per step"
    )
    return config, {"micro_batch_size": per_rank // per_step, "gradient_accumulation_steps": per_step}, line, []
