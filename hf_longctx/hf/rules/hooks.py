"""Lists names of other packages that plans need although they are private, and checks that installed versions have them.

`HOOKS` are the methods of `Trainer` that our mixins override. If a newer `Trainer` renames such a method or no longer calls it,
our override never runs, and training would continue without it in silence. `READS` are private attributes that we read, and
functions that we call.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from types import CodeType, ModuleType
from typing import Any

from hf_longctx.hf.rules.trl import known_version

# method of `Trainer` that a mixin overrides -> methods of `Trainer` that call it; none for methods that users call
HOOKS: dict[str, tuple[str, ...]] = {
    "_clip_grad_norm": ("_run_epoch",),
    "_evaluate": ("_inner_training_loop", "_maybe_log_save_evaluate"),
    "_finalize_training": ("_inner_training_loop",),
    "_get_grad_norm": ("_run_epoch",),
    "_get_output_dir": ("_finalize_training", "_save_checkpoint"),
    "_init_training_state": ("_inner_training_loop",),
    "_load_best_model": ("_finalize_training",),
    "_load_from_checkpoint": ("_prepare_for_training", "train"),
    "_load_optimizer_and_scheduler": ("_prepare_for_training",),
    "_load_rng_state": ("_run_epoch",),
    "_maybe_log_save_evaluate": ("_run_epoch",),
    "_move_model_to_device": ("__init__", "train"),
    "_push_from_checkpoint": ("_save_checkpoint",),
    "_report_to_hp_search": ("_evaluate",),
    "_run_epoch": ("_inner_training_loop",),
    "_save": ("save_model",),
    "_save_checkpoint": ("_maybe_log_save_evaluate",),
    "_save_optimizer_and_scheduler": ("_save_checkpoint",),
    "_save_rng_state": ("_save_checkpoint",),
    "_track_num_input_tokens": ("_run_epoch",),
    "_wrap_model": ("_prepare_for_training", "evaluation_loop"),
    "create_optimizer": ("_prepare_for_training", "create_optimizer_and_scheduler"),
    "evaluate": ("_evaluate", "evaluate"),
    "evaluation_loop": ("evaluate", "predict"),
    "get_batch_samples": ("_run_epoch",),
    "get_eval_dataloader": ("evaluate",),
    "get_test_dataloader": ("predict",),
    "get_total_train_batch_size": ("set_initial_training_values",),
    "get_train_dataloader": ("_inner_training_loop",),
    "hyperparameter_search": (),
    "log": ("_finalize_training", "_maybe_log_save_evaluate", "evaluate"),
    "predict": (),
    "save_model": ("_save_checkpoint",),
    "train": (),
    "training_step": ("_run_epoch",),
}

_LOG_PROBS: dict[str, tuple[str, ...]] = {
    "_compute_loss": ("compute_loss",),
    "_get_per_token_logps_and_entropies": ("_compute_loss", "_generate_and_score_completions"),
}
_REFERENCES: dict[str, tuple[str, ...]] = {
    "_compute_loss": ("compute_loss",),
    "_precompute_ref_logps": ("__init__", "evaluate"),
}
# trainer of TRL -> the same for its methods
TRL_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "DPOTrainer": _REFERENCES,
    "GRPOTrainer": _LOG_PROBS,
    "KTOTrainer": _REFERENCES,
    "RLOOTrainer": _LOG_PROBS,
}

# "module" or "module:class" -> names that we read there or on its instances, with the parameters that we pass
READS: dict[str, dict[str, tuple[str, ...]]] = {
    "accelerate.accelerator:Accelerator": {
        "_is_accelerate_prepared": (),
        "_original_forward": (),
        "prepare_model": ("device_placement", "evaluation_mode"),
    },
    "datasets.arrow_dataset:Dataset": {"_fingerprint": ()},
    "datasets.iterable_dataset:IterableDataset": {"_distributed": (), "_ex_iterable": ()},
    "flash_attn.cute.interface": {"_flash_attn_bwd": (), "_flash_attn_fwd": ()},
    "flash_attn.flash_attn_interface": {"_flash_attn_backward": (), "_flash_attn_forward": ()},
    "peft.tuners.lora.layer:ParamWrapper": {"_activate_lora": ("active_adapters",), "_param_ndim": ()},
    "torch": {"_C": (), "_dynamo": (), "_scaled_mm": ()},
    "torch._C": {"_dispatch_dump_table": ()},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": ()},
    "torch.distributed.checkpoint.metadata": {"_MEM_FORMAT_ENCODING": ()},
    "torch.distributed.distributed_c10d": {"_get_default_store": ()},
    "torch.autograd.grad_mode": {"_unsafe_preserve_version_counter": ()},
    "torch.distributed.fsdp:FSDPModule": {"_get_fsdp_state": ()},
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": {
        "_module_info": (),
        "_sharded_param_data": (),
        "_unsharded_param": (),
        "all_gather_inputs": (),
        "all_gather_outputs": (),
        "alloc_all_gather_outputs": (),
        "free_unsharded_param": (),
        "init_all_gather_outputs": (
            "all_gather_input_numels",
            "all_gather_input_dtypes",
            "world_size",
            "device",
        ),
        "init_dtype_attrs": (),
        "init_unsharded_param": (),
        "padded_sharded_param_size": (),
        "sharded_size": (),
        "to_sharded_dtensor": (),
        "unsharded_accumulated_grad": (),
        "unsharded_grad_data": (),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": {
        "_all_gather_process_group": (),
        "_to_unsharded": (),
        "_training_state": (),
        "_with_fqn": (),
        "comm_ctx": (),
        "device_handle": (),
        "finalize_backward": (),
        "fsdp_params": (),
        "is_unsharded": (),
        "post_backward": (),
        "reduce_grads": (),
        "reshard_after_backward": (),
        "unshard": ("async_op",),
        "wait_for_unshard": (),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPStateContext": {
        "iter_forward_root": (),
        "post_backward_final_callback_queued": (),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": {
        "_comm_ctx": (),
        "_fsdp_param_group": (),
        "_is_root": (),
        "_lazy_init": (),
        "_state_ctx": (),
        "_training_state": (),
    },
    "torch.distributed.tensor:DTensor": {"_spec": ()},
    "torch.nn.attention": {"_registry": ()},
    "torch.nn.attention._registry": {"_FLASH_ATTENTION_ACTIVE": ()},
    "torch.nn.modules.conv": {"_ConvNd": ()},
    "torch.nn.modules.dropout": {"_DropoutNd": ()},
    "torch.nn.modules.module": {
        "_global_backward_hooks": (),
        "_global_backward_pre_hooks": (),
        "_global_forward_hooks": (),
        "_global_forward_pre_hooks": (),
        "_has_any_global_hook": (),
    },
    "torch.nn.modules.module:Module": {
        "_apply": ("fn",),
        "_backward_hooks": (),
        "_backward_pre_hooks": (),
        "_buffers": (),
        "_compiled_call_impl": (),
        "_forward_hooks": (),
        "_forward_pre_hooks": (),
        "_modules": (),
        "_parameters": (),
    },
    "torch.optim.optimizer": {"_global_optimizer_post_hooks": (), "_global_optimizer_pre_hooks": ()},
    "torch.optim.optimizer:Optimizer": {"_optimizer_step_post_hooks": (), "_optimizer_step_pre_hooks": ()},
    "torch.serialization": {"_get_layout": ()},
    "torch:Tensor": {
        "_backward_hooks": (),
        "_base": (),
        "_is_view": (),
        "_post_accumulate_grad_hooks": (),
        "_version": (),
    },
    "torchao.optim.adam:_AdamBase": {"_new_buffer": ()},
    "transformers.configuration_utils:PreTrainedConfig": {"_attn_implementation": (), "_experts_implementation": ()},
    "transformers.models.mixtral.modeling_mixtral:MixtralExperts": {"_apply_gate": ()},
    "transformers.modeling_utils:PreTrainedModel": {
        "_get_dtype_plan": ("dtype",),
        "_gradient_checkpointing_func": (),
        "_hf_peft_config_loaded": (),
        "_init_weights": ("module",),
        "_keys_to_ignore_on_load_unexpected": (),
        "_keys_to_ignore_on_save": (),
        "_loss_function": (),
        "_no_split_modules": (),
        "_supports_sdpa": (),
        "_tied_weights_keys": (),
    },
    "transformers.trainer:Trainer": {
        "_get_eval_sampler": (),
        "_get_dataloader": (),
        "_get_num_items_in_batch": (),
        "_get_train_sampler": (),
        "_prepare_input": (),
        "_prepare_inputs": (),
        "_remove_unused_columns": (),
        "_set_signature_columns_if_needed": (),
        "_globalstep_last_logged": (),
        "_hp_search_setup": ("trial",),
        # the callback alone looks this argument up on the stack
        "_inner_training_loop": ("resume_from_checkpoint",),
        "_train_batch_size": (),
    },
    "transformers.integrations.integration_utils:DVCLiveCallback": {"_log_model": ()},
    "transformers.models.gemma.modeling_gemma:GemmaRMSNorm": {"_norm": ("x",)},
    "transformers.models.gpt_neo.modeling_gpt_neo:GPTNeoSelfAttention": {"_attn": ("query", "key", "value", "attention_mask")},
    "transformers.models.kosmos2.modeling_kosmos2:Kosmos2TextTransformer": {"_prepare_decoder_attention_mask": ()},
    "transformers.models.qwen4_exp.modeling_qwen4_exp:Qwen4ExpTextPLELayer": {"_short_conv": ("hidden_states",)},
    "transformers.models.rwkv.modeling_rwkv:RwkvModel": {"_rescale_layers": ()},
    "trl.generation.vllm_client:VLLMClient": {"_post": ("url",)},
    "trl.generation.vllm_generation:VLLMGeneration": {"_llm_weights_sleeping": ()},
    "trl.trainer.dpo_trainer:DPOTrainer": {"_is_vision_dataset": (), "_metrics": (), "_total_train_tokens": ()},
    "trl.trainer.sft_trainer:SFTTrainer": {"_is_vision_dataset": ()},
}

# packages whose classes are read; users' classes may call what they like
_READ_PACKAGES = ("transformers", "trl")
_OURS = "hf_longctx"


def hook_problems(trainer: type) -> list[str]:
    """Overrides of methods that the class of `trainer` no longer has, or that their callers no longer call.

    Also names of ours that hide a method of a newer class. A trainer without our mixins is checked as if it had all of them.
    """
    ours = [cls for cls in trainer.__mro__ if _package(cls) == _OURS]
    theirs = tuple(cls for cls in trainer.__mro__ if _package(cls) in _READ_PACKAGES)
    if not theirs:
        return []
    expected = dict(HOOKS)
    for cls in theirs:
        expected |= TRL_HOOKS.get(cls.__name__, {}) if _package(cls) == "trl" else {}
    overridden = {name for cls in ours for name in vars(cls)} if ours else set(expected)
    read, problems = _Callers(theirs), list[str]()
    for name, callers in expected.items():
        if name not in overridden:
            continue
        if not any(name in vars(cls) for cls in theirs):
            first = theirs[0]
            problems.append(
                f"{_named(first)} has no method {name}, which plans override; take another version: "
                f"{known_version(_package(first))}"
            )
            continue
        for caller in callers:
            if name not in read.called_by(caller):
                owner = next((cls for cls in theirs if caller in vars(cls)), theirs[0])
                left_out = f"does not call {name}, which plans override and which would be left out in silence"
                if other := _replaced_by(vars(owner).get(caller)):
                    problems.append(f"{_named(owner)}.{caller} was replaced by {other} and {left_out}; take the replacement back")
                    continue
                problems.append(f"{_named(owner)}.{caller} {left_out}; take another version: {known_version(_package(owner))}")
    for name in sorted(overridden - expected.keys()):
        owners = [cls for cls in theirs if name in vars(cls)]
        if owners and not (name.startswith("__") and name.endswith("__")):
            problems.append(
                f"{_named(owners[0])} has a {name} of its own, which plans would hide, since they use this name for something "
                f"else; take another version: {known_version(_package(owners[0]))}"
            )
    return problems


def read_problems() -> list[str]:
    """Names in `READS` that loaded modules of installed packages do not have."""
    return [problem for place in READS if place.partition(":")[0] in sys.modules for problem in place_problems(place)]


def place_problems(place: str) -> list[str]:
    """Names of `READS[place]` that are missing, and parameters that they do not take; imports no module."""
    module_name, _, class_name = place.partition(":")
    module = sys.modules[module_name]
    package = module_name.partition(".")[0]
    owner: Any = getattr(module, class_name, None) if class_name else module
    take = partial(known_version, package)
    if owner is None:
        return [f"{module_name} has no class {class_name}, of which plans read attributes; take another version: {take()}"]
    mentioned, problems = _Mentioned(owner), []
    for name, parameters in READS[place].items():
        if not hasattr(owner, name) and name not in mentioned.names:
            problems.append(f"{place.replace(':', '.')} has no {name}, which plans read; take another version: {take()}")
        elif missing := [each for each in parameters if not _takes(getattr(owner, name, None), each)]:
            problems.append(f"{place.replace(':', '.')}.{name} has no parameter {missing[0]}; take another version: {take()}")
    return problems


class _Callers:
    """Names that the methods of some classes look up on their own object."""

    def __init__(self, classes: tuple[type, ...]) -> None:
        self.classes = classes
        self._found: dict[str, set[str]] = {}

    def called_by(self, method: str) -> set[str]:
        """Names that `method` looks up on its object, also in methods of later classes that it calls by `super()`."""
        if method not in self._found:
            found = self._found[method] = set()
            for function in (vars(cls)[method] for cls in self.classes if method in vars(cls)):
                own, behind = _looked_up(function)
                found |= own
                if method not in behind:
                    break
        return self._found[method]


def _looked_up(function: Any) -> tuple[set[str], set[str]]:
    """Names that a method looks up on its own object, and those that it looks up elsewhere, such as on `super()`."""
    own, other = set[str](), set[str]()
    for code in _codes(function):
        first = code.co_varnames[0] if code.co_argcount else "self"
        before: Any = ""
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                # newer versions of Python load two variables at once
                is_own = before in (first, "self") or (isinstance(before, tuple) and before[-1] in (first, "self"))
                (own if is_own else other).add(str(instruction.argval))
            elif instruction.opname == "LOAD_SUPER_ATTR":
                other.add(str(instruction.argval))
            before = instruction.argval
    return own, other


def _codes(function: Any) -> Iterator[CodeType]:
    """The code of a function, of those inside it, and of those that it wraps."""
    waiting, seen = [function], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, CodeType):
            yield each
            waiting += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
            continue
        parts = (getattr(each, name, None) for name in ("__wrapped__", "__func__", "fget", "fset", "func"))
        waiting += [part for part in parts if callable(part)]
        if isinstance(code := getattr(each, "__code__", None), CodeType):
            waiting.append(code)
            cells = (cell.cell_contents for cell in getattr(each, "__closure__", None) or () if _is_full(cell))
            waiting += [content for content in cells if inspect.isfunction(content)]


def _replaced_by(function: Any) -> str:
    """The module of another package whose function stands in place of a method; empty if it is the package's own."""
    module = str(getattr(function, "__globals__", {}).get("__name__", ""))
    return "" if module.partition(".")[0] in ("", *_READ_PACKAGES) else module


def _is_full(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


class _Mentioned:
    """Names that the methods of a class use or annotate, since instances get attributes in methods."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @cached_property
    def names(self) -> set[str]:
        if isinstance(self._owner, ModuleType):
            return set()
        found = set[str]()
        for cls in self._owner.__mro__[:-1]:
            found |= set(vars(cls).get("__annotations__", {}))
            for value in vars(cls).values():
                for code in _codes(value):
                    found |= {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
        return found


def _takes(function: Callable[..., Any] | None, parameter: str) -> bool:
    """Whether a function has a parameter of this name."""
    return function is not None and parameter in inspect.signature(function).parameters


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _named(cls: type) -> str:
    return f"{_package(cls)}'s {cls.__name__}"
