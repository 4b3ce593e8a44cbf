"""axolotl's example files on tiny models: its own trainer in one process, and under plans on several ranks.

Run as a program, since axolotl replaces functions of transformers for the whole process:

    python -m helpers.trainers.axolotl_runs FOLDER stock|plans [CASE ...]
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

PLUGIN = "hf_longctx.integrations.axolotl.LongContextPlugin"
CUT_CROSS_ENTROPY = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
_LINEAR = {"lora_target_modules": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"]}
_LORA = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, **_LINEAR}
_QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "lora_alpha": 16, **_LINEAR}
_FLASH = {"attn_implementation": "flash_attention_2"}
_PACKED = {"sample_packing": True, "gradient_checkpointing": True, **_FLASH}
_ALPACA, _CHAT = {"type": "alpaca"}, {"type": "chat_template"}
_PAIRS = {"type": "chat_template.default", "field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected"}

# example of axolotl -> family of the tiny model, kind of rows, and the settings of the example that decide how a step runs
EXAMPLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-3/lora-1b": (
        "llama",
        _ALPACA,
        {**_PACKED, **_LORA, "eval_sample_packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
        | {"loss_watchdog_threshold": 9.0, "loss_watchdog_patience": 3},
    ),
    "llama-3/fft-8b": (
        "llama",
        _ALPACA,
        {**_PACKED, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "micro_batch_size": 1}
        | {"gradient_accumulation_steps": 8},
    ),
    "llama-3/lora-1b-sample-packing-sequentially": (
        "llama",
        _ALPACA,
        {**_PACKED, "adapter": "lora", "lora_r": 32, "lora_alpha": 16, "lora_target_linear": True, "micro_batch_size": 2}
        | {"sample_packing_sequentially": True, "curriculum_sampling": True, "lora_modules_to_save": ["embed_tokens", "lm_head"]}
        | {"gradient_accumulation_steps": 4},
    ),
    "alst/llama3-8b-deepspeed-alst": (
        "llama",
        {"type": "completion", "field": "output"},
        {**_PACKED, "tiled_mlp": True, "context_parallel_size": 2, "activation_offloading": "legacy", "micro_batch_size": 1}
        | {"gradient_accumulation_steps": 1, "deepspeed": {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}},
    ),
    "mistral/config": ("mistral", _ALPACA, {**_PACKED, "micro_batch_size": 2, "gradient_accumulation_steps": 4}),
    "qwen3/32b-qlora": (
        "qwen3",
        _CHAT,
        {**_PACKED, **_QLORA, "plugins": [CUT_CROSS_ENTROPY], "gradient_checkpointing": "offload", "micro_batch_size": 1}
        | dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), True)
        | {"gradient_accumulation_steps": 2, "strict": False},
    ),
    "distributed-parallel/qwen3-8b-fsdp-tp-cp": (
        "qwen3",
        _ALPACA,
        {**_PACKED, "plugins": [CUT_CROSS_ENTROPY], "context_parallel_size": 2, "dp_shard_size": 1, "fsdp_version": 2}
        | {"fsdp_config": {"offload_params": False, "state_dict_type": "FULL_STATE_DICT", "reshard_after_forward": True}}
        | {"micro_batch_size": 1, "lr_scheduler": "constant_with_warmup"},
    ),
    "gemma2/qlora": (
        "gemma2",
        _CHAT,
        {**_PACKED, **_QLORA, "attn_implementation": "eager", "micro_batch_size": 1, "gradient_accumulation_steps": 4}
        | {"eval_sample_packing": False},
    ),
    "olmo3/olmo3-7b-qlora": ("olmo3", _CHAT, {**_PACKED, **_QLORA, "micro_batch_size": 2, "gradient_accumulation_steps": 2}),
    "mistral/mixtral/mixtral": (
        "mixtral",
        _ALPACA,
        {**_PACKED, **_LORA, "lora_target_modules": ["q_proj", "v_proj", "k_proj", "o_proj"], "micro_batch_size": 1}
        | {"deepspeed": {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": "auto"}}}
        | {"model_config": {"output_router_logits": True}, "gradient_accumulation_steps": 2},
    ),
    "archived/qwen/qwen2-moe-lora": (
        "qwen2_moe",
        _ALPACA,
        {**_LORA, **_FLASH, "lora_target_modules": ["q_proj", "v_proj", "k_proj", "o_proj"], "sample_packing": False}
        | {"pad_to_sequence_len": False, "micro_batch_size": 1, "gradient_accumulation_steps": 4, "gradient_checkpointing": True},
    ),
    "gpt-oss/gpt-oss-20b-fft-fsdp2": (
        "gpt_oss",
        _CHAT,
        {**_PACKED, "plugins": [CUT_CROSS_ENTROPY], "activation_offloading": True, "use_kernels": False, "fsdp_version": 2}
        | {"experimental_skip_move_to_device": True, "attn_implementation": "eager"}
        | {"fsdp_config": {"offload_params": False, "state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": True}}
        | {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "lr_scheduler": "constant_with_warmup"},
    ),
    "falcon-h1/falcon-h1-1b-qlora": (
        "falcon_h1",
        _CHAT,
        {**_LORA, **_FLASH, "lora_target_modules": ["q_proj", "v_proj", "in_proj", "gate_proj"], "sample_packing": False}
        | {"micro_batch_size": 1, "gradient_accumulation_steps": 4, "gradient_checkpointing": True},
    ),
    "granite4/granite-4.0-tiny-fft": (
        "granite_hybrid",
        _CHAT,
        {**_PACKED, "plugins": [CUT_CROSS_ENTROPY], "micro_batch_size": 2, "gradient_accumulation_steps": 4},
    ),
    "qwen3.5/27b-qlora": (
        "qwen3_5",
        _CHAT,
        {**_PACKED, **_QLORA, "plugins": [CUT_CROSS_ENTROPY], "micro_batch_size": 1, "gradient_accumulation_steps": 2},
    ),
    # without load_in_8bit, which is refused with rl
    "llama-3/instruct-dpo-lora-8b": (
        "llama",
        _PAIRS,
        {**_FLASH, **_LORA, "rl": "dpo", "sample_packing": False, "pad_to_sequence_len": True, "gradient_checkpointing": True}
        | {"micro_batch_size": 2, "gradient_accumulation_steps": 4},
    ),
    "qwen2/dpo": (
        "qwen2",
        _PAIRS,
        {**_FLASH, "rl": "dpo", "sample_packing": False, "gradient_checkpointing": True, "micro_batch_size": 2}
        | {"gradient_accumulation_steps": 4, "dpo_loss_type": ["sigmoid", "ipo"], "dpo_loss_weights": [1.0, 0.01]},
    ),
}
_FOUR_LAYERS = ("qwen3_5", "granite_hybrid")
# fields that axolotl's own run leaves out; it has one batch per step, since axolotl averages batches whatever their labels are
_STOCK = (
    *("sample_packing", "eval_sample_packing", "sample_packing_sequentially", "curriculum_sampling", "plugins", "tiled_mlp"),
    *("context_parallel_size", "dp_shard_size", "fsdp_version", "fsdp_config", "deepspeed", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "activation_offloading", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
)
NUM_ROWS, NUM_RANKS = 16, 2
_WORDS = ["the", "cat", "sat", "on", "mat", "and", "said", "hello", "to", "you", "what", "is", "it", "an", "answer", "question"]


def main() -> None:
    """Trains the cases one after another; writes their losses, norms of gradients and last weights into the folder."""
    folder, how, *names = sys.argv[1:]
    os.environ.update(AXOLOTL_DO_NOT_TRACK="1", DO_NOT_TRACK="1", WANDB_MODE="disabled", AXOLOTL_LOG_LEVEL="WARNING")
    import transformers
    from axolotl import train as training
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets, load_preference_datasets
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    # the next case goes on in the same process group
    training.cleanup_distributed = lambda: None
    for name in names or EXAMPLES:
        out = Path(folder) / f"{name.replace('/', '_')}.{how}.json"
        try:
            PluginManager.get_instance().plugins.clear()
            cfg = load_cfg(DictDefault(settings_of(name, Path(folder), how)))
            PluginManager.get_instance().load_datasets(cfg)
            meta = (load_preference_datasets if cfg.rl else load_datasets)(cfg=cfg, cli_args=TrainerCliArgs())
            # adapters are drawn when the model is loaded; the plugin seeds them so
            transformers.set_seed(42)
            _, _, trainer = training.train(cfg=cfg, dataset_meta=meta)
            log = [entry for entry in trainer.state.log_history if "loss" in entry]
            found: dict[str, Any] = {key: [float(entry[key]) for entry in log] for key in ("loss", "grad_norm", "learning_rate")}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        if int(os.environ.get("RANK", "0")) == 0:
            out.write_text(json.dumps(found))
            print("case", name, how, json.dumps(found)[:400], flush=True)
        if "error" in found and how == "plans" and "RefusedRun" not in found["error"]:
            # ranks may have left a collective at different places
            raise SystemExit(1)


def settings_of(name: str, folder: Path, how: str) -> dict[str, Any]:
    """The YAML of an example with a tiny model, local rows, fp32 and three or more steps."""
    family, kind, own = EXAMPLES[name]
    changes: dict[str, Any] = {
        **{"base_model": str(folder / family), "datasets": [{"path": str(folder / f"{kind['type']}.jsonl"), **kind}]},
        **{"val_set_size": 0.0, "output_dir": str(folder / f"out_{how}_{name.replace('/', '_')}"), "sequence_len": 1024},
        **{"dataset_prepared_path": str(folder / "prepared" / f"{how}_{name.replace('/', '_')}"), "dataset_num_proc": 1},
        **{"num_epochs": 3 if own["sample_packing"] or "rl" in own else 2, "warmup_steps": 0 if "rl" in own else 2},
        **{"bf16": False, "fp16": False, "tf32": False},
        **{"optimizer": "adamw_torch", "learning_rate": 0.01, "lora_dropout": 0.0, "logging_steps": 1, "save_strategy": "no"},
        # without one, axolotl shuffles rows anew in every process
        "seed": 42,
    }
    found = {"lr_scheduler": "cosine", "weight_decay": 0.0, **own, **changes}
    if not own.get("adapter"):
        del found["lora_dropout"]
    if how == "plans":
        return {**found, "plugins": [*own.get("plugins", ()), PLUGIN]}
    ranks = NUM_RANKS // own.get("context_parallel_size", 1)
    num_rows = own["micro_batch_size"] * own.get("gradient_accumulation_steps", 1) * ranks
    stock = {key: value for key, value in found.items() if key not in _STOCK}
    stock |= {"attn_implementation": "eager" if family in ("gemma2", "gpt_oss") else "sdpa", "gradient_accumulation_steps": 1}
    # these need a GPU, and axolotl switches them on by itself
    stock |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
    return stock | {"micro_batch_size": NUM_ROWS if own.get("sample_packing") else num_rows, "eval_batch_size": 1}


def write_inputs(folder: Path) -> None:
    """Writes the tiny models with their tokenizer, and rows of four kinds with skewed lengths."""
    import torch
    from helpers.models.chats import TEMPLATE, conversation, word_tokenizer
    from helpers.models.tiny_models import ModelCase, build_model

    case = ModelCase(dtype=torch.float32)
    for family in {family for family, _, _ in EXAMPLES.values()}:
        num_layers = 4 if family in _FOUR_LAYERS else 2
        attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
        model = build_model(replace(case, family=family, num_layers=num_layers, attention=attention))
        model.float().save_pretrained(folder / family)
        word_tokenizer(TEMPLATE).save_pretrained(folder / family)
    lengths = [(3, 40), (5, 6), (2, 9), (8, 3), (4, 14), (1, 5), (6, 21), (7, 2)] * 2
    pairs = [(_text(i, n), _text(i + 5, m)) for i, (n, m) in enumerate(lengths)]
    rows = {
        "alpaca": [{"instruction": a, "input": "", "output": b} for a, b in pairs],
        "completion": [{"output": f"{a} {b}"} for a, b in pairs],
        "chat_template": [{"messages": conversation(a, b, a, "hello")} for a, b in pairs],
        "chat_template.default": [
            {"messages": conversation(a), "chosen": conversation(a, b)[1], "rejected": conversation(a, f"{a} {b}")[1]}
            for a, b in pairs
        ],
    }
    for kind, each in rows.items():
        (folder / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, each)))


def _text(start: int, num_words: int) -> str:
    return " ".join(_WORDS[(start * 7 + i * (1 + start % 3)) % len(_WORDS)] for i in range(num_words))


if __name__ == "__main__":
    main()
