"""Computes sizes of LoRA for a model of which only shapes are known, as made by PEFT and counted by a run."""

from __future__ import annotations

from dataclasses import fields

from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec

# elements of one value in fp32, and in bf16
_WIDE, _HALF = 4, 2


def lora_adapters(model: ModelSpec, rank: int) -> AdapterSpec:
    """Makes LoRA of this rank on every matrix of the layers, with PEFT's defaults; embedding and head are frozen.

    Every matrix gets two more, except those of routed experts, which are not modules. For weights in half precision they are in
    fp32, and autocast in bf16 multiplies by rounded copies, as in `hf.models.layers.adapter_spec`. If layers have heads of
    several sizes, each number is the largest of any layer.
    """
    if model.heads:
        found = [lora_adapters(of_size, rank) for of_size, _ in model.head_counts()]
        return AdapterSpec(*(max(getattr(each, field.name) for each in found) for field in fields(AdapterSpec)))
    d, f, e = model.hidden_size, model.intermediate_size, model.bytes_per_element
    num_wide = 0 if model.experts.num_experts else 2 if model.gated_mlp else 1
    num_mlp = num_wide + (num_wide > 0)
    made_kv = model.kv_size * model.num_made // 2
    heads, mlp = 4 * d + model.query_size + made_kv + model.output_size, num_mlp * (d + f)
    saved, width = _HALF if e < _WIDE else e, max(_WIDE, e)
    in_mlp = saved * num_mlp * rank
    return AdapterSpec(
        layer_parameters=rank * (heads + mlp),
        layer_bytes=rank * (heads + mlp) * width,
        attention_saved_bytes=saved * 4 * rank,
        mlp_saved_bytes=in_mlp,
        cut_bytes=4 * rank * 3 * width,
        tile_bytes=in_mlp + (2 * width * max(d, f) if num_mlp else 0),
        reads_first_norm=True,
        reads_attention=True,
        reads_second_norm=num_mlp > 0,
        reads_product=num_mlp > 0,
    )
