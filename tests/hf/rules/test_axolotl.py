"""axolotl's YAML in our words: every field kept, translated, named as being without effect, or refused by name."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

from hf_longctx import LongContextConfig
from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.rules.axolotl import _OWN_OPTIMIZERS, FIELDS, ROWS, from_axolotl

needs_axolotl = pytest.mark.skipif(importlib.util.find_spec("axolotl") is None, reason="needs axolotl (docs/guides/axolotl.md)")
EIGHT = replace(LaunchEnvironment.read(), num_ranks=8, ranks_per_node=4)
PLAIN = {"base_model": "tiny", "sequence_len": 2048, "micro_batch_size": 2, "gradient_accumulation_steps": 4}

# fields of the YAML beside those of PLAIN, on eight ranks -> fields of LongContextConfig, and of the YAML that axolotl then reads
TRANSLATED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "seed": ({"seed": 0}, {}, {}),
    "no seed": ({}, {}, {"seed": 42}),
    "rows": ({}, {"max_length": 2048, "tokens_per_step": None}, {"micro_batch_size": 2, "gradient_accumulation_steps": 4}),
    "packs": (
        {"sample_packing": True},
        {"tokens_per_step": 2 * 4 * 8 * 2048},
        {"sample_packing": None, "micro_batch_size": 2, "gradient_accumulation_steps": 1},
    ),
    "packs of an own budget": (
        {"sample_packing": True, "long_context": {"tokens_per_step": 500, "max_length": 64}},
        {"tokens_per_step": 500, "max_length": 64},
        {"sample_packing": None},
    ),
    "packs over groups": (
        {"sample_packing": True, "context_parallel_size": 4},
        {"tokens_per_step": 2 * 4 * 2 * 2048},
        {"context_parallel_size": None},
    ),
    "rows over groups": (
        {"context_parallel_size": 4},
        {"tokens_per_step": None},
        # 2 x 4 x 2 rows
        {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "context_parallel_size": None},
    ),
    "FSDP": (
        {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}},
        {"parameters": "sharded", "shard_ranks": None},
        {"fsdp": None, "fsdp_config": None},
    ),
    "FSDP 2 in blocks": (
        {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}, "dp_shard_size": 4, "dp_replicate_size": 2},
        {"parameters": "sharded", "shard_ranks": 4},
        {"fsdp_version": None, "dp_shard_size": None},
    ),
    "FSDP 2 that keeps weights": (
        {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}},
        {"parameters": "gathered_per_round"},
        {},
    ),
    "DeepSpeed": (
        {"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": "auto"}},
        {"parameters": "sharded", "optimizer_states": "host"},
        {"deepspeed": None},
    ),
    "our own sharding": (
        {"deepspeed": {"zero_optimization": {"stage": 3}}, "long_context": {"parameters": "gathered_per_round"}},
        {"parameters": "gathered_per_round"},
        {},
    ),
    "four bits": (
        {"load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}, "eager_attention": True},
        {},
        {"bnb_config_kwargs": {"bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "fp4"}, "attn_implementation": "eager"},
    ),
    "pairs": (
        {"rl": "dpo", "dpo_loss_type": ["ipo"], "dpo_padding_free": True, "rl_beta": 0.2},
        {"max_length": 2048, "tokens_per_step": None},
        {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "dpo_padding_free": None},
    ),
    "kernels": (
        {
            "liger_rope": True,
            "flash_attention": True,
            "pad_to_sequence_len": True,
            "adapter": "lora",
            "activation_offloading": True,
        },
        {"activations": "auto"},
        {"liger_rope": False, "flash_attention": None, "attn_implementation": "sdpa", "lora_mlp_kernel": False}
        | {"lora_fan_in_fan_out": False},
    ),
}


@pytest.mark.parametrize("case", TRANSLATED)
def test_settings_become_ours(case: str) -> None:
    given, config, changes = TRANSLATED[case]
    found = from_axolotl({**PLAIN, **given}, EIGHT)
    assert {name: getattr(found.config, name) for name in config} == config
    assert changes.items() <= found.changes.items()
    assert "seed" not in given or "seed" not in found.changes
    assert found.arguments["average_tokens_across_devices"] is True


def test_one_process_may_prepare_data_for_groups() -> None:
    found = from_axolotl({**PLAIN, "context_parallel_size": 4}, replace(EIGHT, num_ranks=1, ranks_per_node=1))
    assert found.changes["micro_batch_size"] == 2


def test_lines_say_what_became_of_settings() -> None:
    plain = from_axolotl(PLAIN, EIGHT)
    assert plain.lines == () and plain.config == LongContextConfig(max_length=2048)
    given = {"sample_packing": True, "fsdp_config": {"reshard_after_forward": True}, "pad_to_sequence_len": True}
    lines = "\n".join(from_axolotl({**PLAIN, **given, "gradient_checkpointing": True}, EIGHT).lines)
    for said in ("tokens_per_step=131072), the tokens of 64 packs", "parameters='sharded'", "activations='auto'"):
        assert said in lines
    assert "without effect under plans: pad_to_sequence_len" in lines


def test_arguments_of_deepspeed_are_those_of_the_training() -> None:
    given = {"deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}}
    assert from_axolotl({**PLAIN, **given}, EIGHT).arguments["learning_rate"] == 1e-4
    assert "learning_rate" not in from_axolotl({**PLAIN, **given, "learning_rate": 1e-4}, EIGHT).arguments
    with pytest.raises(ValueError, match=r"asks for learning_rate=0\.0001, but learning_rate is 0\.002"):
        from_axolotl({**PLAIN, **given, "learning_rate": 2e-3}, EIGHT)


@pytest.mark.parametrize("name,wanted", [("weight_decay", 0.1), ("max_grad_norm", 1.0), ("bf16", True)])
def test_nothing_is_a_value_that_deepspeed_does_not_replace(name: str, wanted: Any) -> None:
    decay = {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}
    source = {"weight_decay": decay, "max_grad_norm": {"gradient_clipping": 1.0}, "bf16": {"bf16": {"enabled": True}}}[name]
    assert from_axolotl({**PLAIN, "deepspeed": source}, EIGHT).arguments[name] == wanted
    with pytest.raises(ValueError, match=f"asks for {name}={wanted}, but {name} is (0|False)"):
        from_axolotl({**PLAIN, "deepspeed": source, name: type(wanted)(0)}, EIGHT)


def test_rows_that_deepspeed_accumulates_are_counted() -> None:
    given = {**PLAIN, "gradient_accumulation_steps": None, "deepspeed": {"gradient_accumulation_steps": 4}}
    found = from_axolotl(given, EIGHT)
    assert found.changes["gradient_accumulation_steps"] == 4 and "gradient_accumulation_steps" not in found.arguments
    assert from_axolotl({**given, "sample_packing": True}, EIGHT).config.tokens_per_step == 2 * 4 * 8 * 2048


def on(name: str) -> Any:
    return 2 if name.endswith(("_size", "_ratio")) else True


@pytest.mark.parametrize("name", [name for name, row in FIELDS.items() if row.state == "refused"])
def test_what_has_no_counterpart_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is ") as error:
        from_axolotl({**PLAIN, name: on(name)}, EIGHT)
    assert FIELDS[name].note in str(error.value)
    from_axolotl({**PLAIN, name: 1 if name.endswith("_size") else False}, EIGHT)
    from_axolotl({**PLAIN, name: None}, EIGHT)


# fields of the YAML -> the refusal on eight ranks
REFUSED = [
    ({"later_loss": "other"}, "later_loss is 'other', and is no field that the plugin knows; leave it out"),
    ({"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins has axolotl.integrations.kd.KDPlugin, which may change"),
    ({"long_context": {"max_lenght": 5}}, "LongContextConfig has no max_lenght, which long_context names"),
    ({"long_context": {"max_length": 0}}, "long_context: max_length is 0"),
    ({"long_context": "sharded"}, "long_context is 'sharded'; give fields of LongContextConfig"),
    ({"optimizer": "muon"}, "optimizer is 'muon', which axolotl makes itself"),
    ({"context_parallel_size": 3}, "context_parallel_size is 3 on 8 ranks"),
    ({"context_parallel_size": 8, "micro_batch_size": 1, "gradient_accumulation_steps": 3}, "with 3 rows per step on 8 ranks"),
    ({"fsdp_config": {"offload_params": True}}, "fsdp offloads parameters to the CPU"),
    ({"deepspeed": {"zero_optimization": {"stage": 7}}}, "zero_optimization.stage is 7"),
    ({"sample_packing": True, "sequence_len": None}, "sample_packing needs sequence_len"),
    ({"rl": "kto"}, "rl is 'kto'; axolotl 0.19 imports trl 1.13 or older"),
    ({"rl": "dpo", "sample_packing": True}, "sample_packing is True with rl: dpo; leave it out"),
    ({"rl": "dpo", "load_in_4bit": True}, "load_in_4bit is True with rl: dpo; leave it out"),
    ({"rl": "dpo", "dpo_loss_type": ["sigmoid", "aot"]}, "dpo_loss_type has aot, and plans compute sigmoid, "),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_values_that_cannot_be_translated_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        from_axolotl({**PLAIN, **given}, EIGHT)
    assert message in str(error.value)


def test_a_field_stands_in_one_row() -> None:
    names = [name for row in ROWS for name in dict.fromkeys(row.names)]
    assert len(names) == len(set(names)) == len(FIELDS)


@needs_axolotl
def test_the_table_has_every_field_of_the_installed_axolotl() -> None:
    from axolotl.utils.schemas.config import AxolotlInputConfig
    from axolotl.utils.schemas.enums import CustomSupportedOptimizers

    fields = AxolotlInputConfig.model_fields
    assert {name for name in fields if name not in FIELDS} == set()
    assert {field.alias for field in fields.values() if field.alias} <= FIELDS.keys()
    assert {each.value for each in CustomSupportedOptimizers} <= {*_OWN_OPTIMIZERS, "ao_adamw_4bit", "ao_adamw_8bit"}
