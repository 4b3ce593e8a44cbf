"""Checkpoints of GPT-OSS with experts in MXFP4, in the layout of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

# field of the published configs
QUANTIZATION = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4",
}


def save_gpt_oss(folder: Path, num_layers: int = 3, num_experts: int = 5, size: int = 64, num_files: int = 2) -> str:
    """Saves a small GPT-OSS: `gate_up_proj_blocks` [experts, 2 size, size / 32, 16] and `_scales` without the last dimension.

    Experts are random codes, of sizes with which losses are finite.
    """
    config = transformers.GptOssConfig(
        vocab_size=96,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=num_experts,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    folder.mkdir(parents=True, exist_ok=True)
    # random experts would take memory
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    names = sorted(model.state_dict().items(), key=lambda item: item[0])
    weight_map = {}
    # layers in order, as in the published files
    for number in range(num_files):
        tensors: dict[str, Any] = {}
        for name, weight in names[number * len(names) // num_files : (number + 1) * len(names) // num_files]:
            if name.endswith(("gate_up_proj", "down_proj")):
                _, inputs, outputs = weight.shape
                shape = num_experts, outputs, inputs // 32
                tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
                tensors[f"{name}_scales"] = torch.randint(119, 124, shape, dtype=torch.uint8, generator=generator)
            else:
                is_norm = "norm" in name
                drawn = torch.randn(weight.shape, generator=generator) * (0.1 if is_norm else 0.15) + is_norm
                tensors[name] = drawn.to(torch.bfloat16)
        file = f"model-{number:05d}-of-{num_files - 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, "quantization_config": QUANTIZATION}))
    return str(folder)


def unpacked(folder: str, **settings: Any) -> Any:
    """The model as transformers unpacks it."""
    plain = transformers.Mxfp4Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=plain, **settings)
