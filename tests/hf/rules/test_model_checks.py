"""Models that plans cannot run exactly are refused at start by class, layer and value; tested ones and adapters pass."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.models.any_model import build_any
from helpers.models.chats import tokenizer_of
from helpers.models.tiny_models import FAMILIES, LLAMA_SHAPE, OTHER_FAMILIES, ModelCase, build_model, cast, tiny_llama
from helpers.models.versions import is_older
from helpers.trainers.trainer_runs import problems_at_start
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.lora import ParamWrapper
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_longctx.families.registry import TESTED_MODELS
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.cutting import stage_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.packed_experts import pack_experts
from hf_longctx.hf.rules.arguments import setup_problems
from hf_longctx.hf.rules.models import lacking_problems
from hf_longctx.hf.start.losses import stock_loss_problems


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_tested_classes_have_no_problem(family: str) -> None:
    model = build_model(ModelCase(family, dtype=torch.float32))
    problems = problems_at_start(model)
    assert type(model).__name__ in TESTED_MODELS
    # older transformers name layers with an index otherwise
    if is_older and "deepseek_sparse_attention" in "".join(problems):
        pytest.skip(f"transformers {transformers.__version__} has another {type(model).__name__}, which is refused by name")
    assert problems == []


class NamedForCausalLM(transformers.LlamaForCausalLM):
    """A class with a config of its own, and no code."""


class NewForCausalLM(NamedForCausalLM):
    """A class that no test knows."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def untested_model(name: str) -> PreTrainedModel:
    if name == "a class of a user":
        return NewForCausalLM(transformers.LlamaConfig(**LLAMA_SHAPE, pad_token_id=0))
    return transformers.LlamaForQuestionAnswering(transformers.LlamaConfig(**LLAMA_SHAPE, pad_token_id=0))


@pytest.mark.parametrize("name", ["a class of a user", "a Llama with another head"])
def test_a_class_that_was_never_tested_is_refused_with_tested_ones(name: str) -> None:
    model = untested_model(name)
    (problem,) = problems_at_start(model)
    assert problem.startswith(f"model class {type(model).__name__} is not in the tested list, ")
    assert "use a class that docs/models.md calls exact" in problem and "Qwen3ForCausalLM" in problem


def test_a_class_that_adds_no_code_to_a_tested_one_is_that() -> None:
    assert problems_at_start(NamedForCausalLM(transformers.LlamaConfig(**LLAMA_SHAPE, pad_token_id=0))) == []


def test_a_class_with_a_state_is_refused_with_the_layer_that_has_it() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "n_routed_experts": 8}
    config = transformers.InklingConfig().get_text_config().__class__(**sizes, moe_intermediate_size=32)
    with torch.device("meta"):
        model = transformers.InklingForCausalLM(config)
    problems = problems_at_start(model)
    print(problems)
    assert any(re.match(r"model class InklingForCausalLM is not supported: .* carries a state", problem) for problem in problems)


def test_a_loss_that_plans_do_not_train_is_refused() -> None:
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "attn_layer_indices": [1], "pad_token_id": 0}
    config = transformers.BambaConfig(**LLAMA_SHAPE, **sizes, z_loss_coefficient=0.1)
    (problem,) = problems_at_start(transformers.BambaForCausalLM(config))
    assert problem.startswith("z_loss_coefficient is 0.1, which is not supported; set it to 0.0, plans train cross-entropy alone")


def test_tokens_that_see_later_ones_are_refused_by_layer() -> None:
    shape = {name: value for name, value in LLAMA_SHAPE.items() if name != "num_key_value_heads"}
    model = transformers.ElectraForCausalLM(transformers.ElectraConfig(**shape, embedding_size=32, hidden_dropout_prob=0.1))
    (causal,) = problems_at_start(model)
    assert causal.startswith("electra.encoder.layer.0.attention.self lets tokens see later ones (is_causal=False)")


def decoder_of_bart(**sizes: Any) -> Any:
    shape = {"vocab_size": 64, "d_model": 32, "decoder_ffn_dim": 48, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    return transformers.BartForCausalLM(transformers.BartConfig(**shape | heads | {"dropout": 0.0} | sizes))


def test_a_decoder_whose_config_describes_another_encoder_is_refused() -> None:
    assert problems_at_start(decoder_of_bart()) == []
    (problem,) = problems_at_start(decoder_of_bart(encoder_layers=6))
    assert (
        problem.startswith("decoder_layers is 2 but encoder_layers is 6,") and "set encoder_layers of the config to 2" in problem
    )
    model = decoder_of_bart(encoder_layers=6)
    model.config.encoder_layers = 2
    assert problems_at_start(model) == []


def test_a_stock_loop_is_refused_for_a_class_that_takes_shifted_labels(tmp_path: Path) -> None:
    args, config = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), LongContextConfig()
    (problem,) = stock_loss_problems(ModelFacts.of(decoder_of_bart()), args, config)
    assert (
        problem.startswith("the forward of BartForCausalLM computes a mean over the labels of one rank") and "attach(" in problem
    )


def test_noise_and_cross_attention_are_refused_with_their_values() -> None:
    config = transformers.PhimoeConfig(**LLAMA_SHAPE, num_local_experts=2, pad_token_id=0, router_jitter_noise=0.01)
    (noise,) = problems_at_start(transformers.PhimoeForCausalLM(config))
    assert noise.startswith("router_jitter_noise is 0.01, which draws new noise in every forward")
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(**sizes))
    assert problems_at_start(model) == []
    model.config.add_cross_attention = True
    (cross,) = problems_at_start(model)
    assert cross.startswith("add_cross_attention is True, which is not supported; set it to False")


def test_noise_in_a_part_of_a_config_is_refused_with_its_whole_name() -> None:
    ffn = {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "moe_jitter_eps": 0.01}
    config = transformers.DbrxConfig(
        d_model=32, n_heads=4, n_layers=1, vocab_size=64, ffn_config=ffn, attn_config={"kv_n_heads": 2, "rope_theta": 1e4}
    )
    (problem,) = problems_at_start(transformers.DbrxForCausalLM(config))
    assert problem.startswith("ffn_config.moe_jitter_eps is 0.01; set it to 0.0")


@pytest.mark.parametrize("rope_type", ["linear", "longrope"])
def test_a_rope_that_a_class_scales_by_the_longest_position_is_refused(rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4, "short_mscale": 1.1, "long_mscale": 1.3}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 256}
    config = transformers.PhimoeConfig(
        **LLAMA_SHAPE, num_local_experts=2, pad_token_id=0, router_jitter_noise=0.0, rope_parameters=rope, attention_dropout=0.0
    )
    assert any(
        f"rope type {rope_type!r} of PhimoeForCausalLM" in problem
        for problem in problems_at_start(transformers.PhimoeForCausalLM(config))
    )


def test_another_decoder_than_the_tested_one_inside_is_refused() -> None:
    inside = {"model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.FuyuForCausalLM(transformers.FuyuConfig(text_config=inside | heads))
    (problem,) = problems_at_start(model)
    assert "MixtralModel" in problem and "PersimmonModel" in problem


def test_a_class_of_ones_own_with_a_tested_name_is_refused() -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    (problem,) = problems_at_start(LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_SHAPE)))
    assert problem.startswith(f"model class LlamaForCausalLM comes from {__name__}, but only the class of transformers")


def test_layers_whose_mask_has_a_window_that_attention_is_not_told_are_refused() -> None:
    settings = {"use_sliding_window": False, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}
    (problem,) = problems_at_start(
        transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**LLAMA_SHAPE, pad_token_id=0, **settings))
    )
    assert problem.startswith("layer 1 is 'sliding_attention' in layer_types, but its window is None")


def test_other_kinds_of_attention_are_refused_by_name() -> None:
    (problem,) = problems_at_start(tiny_llama(layer_types=["full_attention", "chunked_attention"]))
    assert problem.startswith("layer_types has 'chunked_attention', which is not supported in LlamaForCausalLM")
    llama4 = transformers.Llama4TextConfig(**LLAMA_SHAPE, num_local_experts=2, head_dim=8, attention_chunk_size=None)
    (problem,) = problems_at_start(transformers.Llama4ForCausalLM(llama4))
    assert problem.startswith("attention_chunk_size is None, for which Llama4ForCausalLM has no masks")
    settings = {"use_bidirectional_attention": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    (problem,) = problems_at_start(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**LLAMA_SHAPE, **settings)))
    assert problem.startswith("use_bidirectional_attention is set")


def test_dropout_that_is_no_module_on_hidden_states_is_refused_by_its_name() -> None:
    settings = {**LLAMA_SHAPE, "attention_dropout": 0.0, "residual_dropout": 0.1, "embedding_dropout": 0.0}
    (problem,) = problems_at_start(transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**settings)))
    assert problem == "residual_dropout is 0.1; set it to 0.0, dropout is not supported yet"


def test_dropout_of_embeddings_is_refused_in_stages() -> None:
    model = transformers.PhiForCausalLM(transformers.PhiConfig(**LLAMA_SHAPE, resid_pdrop=0.1, embd_pdrop=0.1, pad_token_id=0))
    assert problems_at_start(model) == []
    (problem,) = stage_problems(model)
    assert problem == "dropout model.embed_dropout stands before or after the layers, so every stage would run it; use stages=1"


def with_dropout(kind: str) -> Any:
    model = tiny_llama()
    layers = model.model.layers
    if kind == "shared":
        layers[0].mlp.drop = layers[1].mlp.drop = torch.nn.Dropout(0.1)
    elif kind == "channels":
        layers[0].mlp.drop = torch.nn.Dropout1d(0.1)
    elif kind == "own forward":
        layers[0].mlp.drop = torch.nn.Dropout(0.1)
        layers[0].mlp.drop.forward = lambda x: x
    else:
        model = tiny_mixtral()
        model.model.layers[1].mlp.experts.drop = torch.nn.Dropout(0.1)
    return model


@pytest.mark.parametrize(
    "kind,text",
    [
        ("shared", "model.layers.1.mlp.drop and model.layers.0.mlp.drop are one dropout module"),
        ("channels", "model.layers.0.mlp.drop is a Dropout1d of rate 0.1; only nn.Dropout is supported"),
        ("own forward", "model.layers.0.mlp.drop is a dropout with a forward that is not its class's"),
        ("experts", "model.layers.1.mlp.experts.drop drops inside experts, where tokens are sorted by expert"),
    ],
)
def test_dropout_modules_whose_masks_cannot_follow_tokens_are_refused_by_name(kind: str, text: str) -> None:
    assert [text in problem for problem in problems_at_start(with_dropout(kind))] == [True]


def test_each_kind_of_layer_has_a_tested_rope() -> None:
    ropes: dict[str, dict[str, Any]] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic"},
    }
    ropes["full_attention"] |= {"rope_theta": 1e4, "factor": 8.0}
    model = build_model(ModelCase("gemma3", dtype=torch.float32))
    model.config.rope_parameters = ropes
    assert problems_at_start(model)[0].startswith("rope type 'dynamic' depends on the length of a document")


@pytest.mark.parametrize(
    "settings",
    [
        {"use_sliding_window": False, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ],
    ids=["switched off", "above all layers"],
)
def test_a_window_that_no_layer_uses_is_accepted(settings: dict[str, Any]) -> None:
    assert problems_at_start(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA_SHAPE, **settings))) == []


def test_dropout_of_attention_weights_is_accepted_and_that_of_another_field_refused_with_its_value() -> None:
    assert problems_at_start(tiny_llama(attention_dropout=0.25)) == []
    assert problems_at_start(tiny_llama(own_dropout=0.25)) == ["own_dropout is 0.25; set it to 0.0, dropout is not supported yet"]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_of_a_document_is_accepted_where_it_can_be_told(rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 256}
    model = tiny_llama(rope_parameters=rope)
    assert problems_at_start(model) == []
    # a forward leaves the frequencies of a long document, which are no property of the model
    model(torch.zeros(1, model.config.max_position_embeddings + 1, dtype=torch.int64))
    assert problems_at_start(model) == []
    del model.model.rotary_emb.rope_type
    (problem,) = problems_at_start(model)
    assert problem.startswith(f"rope type '{rope_type}' depends on the length of a document, but no rotary embedding of Llama")


def test_a_rotary_embedding_that_does_more_with_the_longest_position_is_refused() -> None:
    class OwnRotaryEmbedding(LlamaRotaryEmbedding):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            cosines, sines = super().forward(x, position_ids)
            return cosines * (1 + int(position_ids.max()) // 1000), sines

    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    assert problems_at_start(model) == []
    model.model.rotary_emb.__class__ = OwnRotaryEmbedding
    (problem,) = problems_at_start(model)
    assert problem.startswith(
        "rope type 'dynamic' depends on the length of a document, and model.rotary_emb (OwnRotaryEmbedding) does not compute its"
    )


def test_rotary_embeddings_in_a_list_are_refused_where_lengths_matter() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = transformers.GraniteSWAForCausalLM(transformers.GraniteSWAConfig(**LLAMA_SHAPE, rope_parameters=rope, pad_token_id=0))
    message = "which does not reach model.rotary_embs.0 (GraniteSWARotaryEmbedding), since its parent has no forward"
    assert any(message in problem for problem in problems_at_start(model))


def test_documents_beyond_the_positions_of_a_config_are_for_dynamic_rope() -> None:
    rope: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    for model, count in ((tiny_llama(), 1), (tiny_llama(rope_parameters=rope), 0)):
        config = LongContextConfig(max_length=model.config.max_position_embeddings + 1)
        assert len(setup_problems(ModelFacts.of(model), None, config, 1, (1,))) == count


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_rope_of_fixed_frequencies_is_accepted(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256}
    assert problems_at_start(tiny_llama(rope_parameters=rope)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_accepted(dtype: torch.dtype) -> None:
    assert problems_at_start(cast(tiny_llama(), dtype)) == []


def test_checkpointing_on_the_model_is_refused_and_the_remedy_works() -> None:
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    (problem,) = problems_at_start(model)
    assert "checkpointing is enabled on the model" in problem
    # a deprecated alias in newer versions, but the only name in the oldest one that is supported
    assert "model.gradient_checkpointing_disable()" in problem
    model.gradient_checkpointing_disable()
    assert problems_at_start(model) == []


def test_a_quantized_model_is_refused() -> None:
    model = tiny_llama()
    # attributes that transformers sets after loading with a quantization config; packages that quantise so are not installed here
    model.is_quantized, model.quantization_method = True, "gptq"
    assert problems_at_start(model) == [
        "weights quantised by gptq are not in the tested list; load the model with BitsAndBytesConfig(load_in_4bit=True), or "
        "without quantisation"
    ]


def lora(model: Any = None, autocast: bool = True, **settings: Any) -> Any:
    settings = {"target_modules": ["q_proj", "v_proj"], "r": 2, **settings}
    return get_peft_model(tiny_llama() if model is None else model, LoraConfig(**settings), autocast_adapter_dtype=autocast)


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [True, False])
def test_adapters_have_no_problem(task_type: str | None, dtype: torch.dtype, autocast: bool) -> None:
    settings = {"use_rslora": True, "use_dora": True, "modules_to_save": ["lm_head", "embed_tokens"]}
    assert problems_at_start(lora(cast(tiny_llama(), dtype), autocast, task_type=task_type, **settings)) == []


@pytest.mark.parametrize("is_tied", [False, True])
def test_adapters_on_the_embedding_or_on_tokens_have_no_problem(is_tied: bool) -> None:
    for settings in ({"target_modules": ["q_proj", "embed_tokens"]}, {"trainable_token_indices": [3, 5]}):
        for config in ({}, {"parameters": "sharded"}):
            model = lora(tiny_llama(tie_word_embeddings=is_tied), **settings)
            assert problems_at_start(model, num_ranks=2, degrees=(1, 2), **config) == []


def test_tokens_of_a_tied_embedding_are_refused_in_stages_alone() -> None:
    model = lora(tiny_llama(tie_word_embeddings=True), trainable_token_indices=[3, 5])
    (problem,) = problems_at_start(model, num_ranks=2, stages=2)
    assert problem.startswith("trainable_token_indices train an embedding that is tied to the head") and "stages=1" in problem
    assert problems_at_start(lora(trainable_token_indices=[3, 5]), num_ranks=2, stages=2) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_parameters": ["experts.down_proj"]},
        {"target_modules": ["q_proj", "w1", "w2", "w3"]},
    ],
)
def test_adapters_on_experts_pass(settings: Any) -> None:
    model = lora(tiny_mixtral(), **settings)
    assert any(isinstance(module, ParamWrapper) for module in model.modules())
    assert problems_at_start(model) == []


def test_empty_settings_that_peft_adds_are_none() -> None:
    model = lora(tiny_mixtral(), target_modules=["q_proj", "o_proj"])
    # PEFT's own doing, which is not the user's choice
    assert model.peft_config["default"].target_parameters == set()
    assert problems_at_start(model) == []


def added_by_transformers() -> Any:
    model = tiny_llama()
    try:
        model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    except ValueError as error:
        pytest.skip(f"transformers {transformers.__version__} adds no adapters with the installed PEFT: {error}")
    return model


def with_other_kind() -> Any:
    model = lora()
    model.peft_config["other"] = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    return model


def on_experts(change: Callable[[Any], Any]) -> Any:
    """A model with adapters on its experts, after a change."""
    model = lora(tiny_mixtral(), target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    change(model)
    return model


def with_packed_experts() -> Any:
    model = tiny_mixtral()
    pack_experts(model, "nf4")
    return model


def experts_inside(model: Any) -> Any:
    return model.get_base_model().model.layers[0].mlp.experts.get_base_layer()


def quantise_experts(model: Any, dtype: torch.dtype) -> None:
    experts = experts_inside(model)
    experts.down_proj = torch.nn.Parameter(experts.down_proj.data.to(dtype), requires_grad=False)


def merged() -> Any:
    model = lora()
    model.merge_adapter()
    return model


def unfrozen() -> Any:
    model = lora()
    model.get_base_model().model.norm.requires_grad_(True)
    return model


def disabled() -> Any:
    model = lora()
    model.base_model.disable_adapter_layers()
    return model.requires_grad_(True)


def of_half_and_single() -> Any:
    model = lora(cast(tiny_llama(), torch.bfloat16), autocast=False)
    next(p for name, p in model.named_parameters() if "lora_A" in name).data = torch.zeros(2, 32)
    return model


def with_convolution() -> Any:
    model = tiny_llama()
    model.model.layers[0].mlp.gate_proj = torch.nn.Conv1d(32, 48, 1)
    return model


def tiny_mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA_SHAPE, num_local_experts=4, num_experts_per_tok=2))


# problem -> (how the model is made, text in the message)
REFUSED_ADAPTERS: dict[str, tuple[Any, str]] = {
    "prompt tuning": (
        lambda: get_peft_model(tiny_llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
        "adapters of kind PROMPT_TUNING (PromptTuningConfig) are not in the tested list (LORA)",
    ),
    "IA3": (
        lambda: get_peft_model(tiny_llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
        "adapters of kind IA3 (IA3Config) are not in the tested list (LORA)",
    ),
    "added by transformers": (
        added_by_transformers,
        "adapters of LlamaForCausalLM are not in the tested list; use get_peft_model",
    ),
    "other kind": (with_other_kind, "adapters of kind IA3 (IA3Config, named 'other') are not in the tested list (LORA)"),
    "merged": (merged, "the adapters are merged into the weights; call model.unmerge_adapter()"),
    "disabled": (disabled, "the adapters are disabled; call model.base_model.enable_adapter_layers()"),
    "biases": (lambda: lora(bias="all"), "LoraConfig bias='all' is not in the tested list; use 'none'"),
    "init": (
        lambda: lora(init_lora_weights="pissa"),
        "init_lora_weights='pissa' is not in the tested list; use True or False or",
    ),
    "convolution": (
        lambda: lora(with_convolution(), target_modules=["gate_proj"]),
        "an adapter is on module Conv1d, which is not tested; target Linear modules and the embedding only",
    ),
    "experts of a class without the decorator": (
        lambda: lora(build_any("Llama4ForCausalLM"), target_parameters=["experts.gate_up_proj"]),
        "the adapters on base_model.model.model.layers.0.feed_forward.experts (Llama4TextExperts) are on experts of a class that",
    ),
    "single weights": (
        lambda: lora(target_modules=[], target_parameters=["q_proj.weight"]),
        "the adapter on base_model.model.model.layers.0.self_attn.q_proj (Linear) is on the weight weight (target_parameters)",
    ),
    "several adapters on experts": (
        lambda: on_experts(lambda model: model.add_adapter("other", model.peft_config["default"])),
        "the adapters on base_model.model.model.layers.0.mlp.experts (MixtralExperts) are several (default, other); keep one",
    ),
    "a hook on experts": (
        lambda: on_experts(lambda model: model.get_base_model().model.layers[0].mlp.experts.register_forward_hook(print)),
        "the adapters on base_model.model.model.layers.0.mlp.experts (MixtralExperts) have a hook, which would see other values",
    ),
    "a hook on experts inside": (
        lambda: on_experts(lambda model: experts_inside(model).register_forward_hook(print)),
        "the adapters on base_model.model.model.layers.0.mlp.experts (MixtralExperts) have a hook, which would see other values",
    ),
    "experts with a forward of the user's": (
        lambda: on_experts(lambda model: setattr(experts_inside(model), "forward", lambda *args: args[0])),
        "the adapters on base_model.model.model.layers.0.mlp.experts (MixtralExperts) have a forward that other code has",
    ),
    "experts with a norm of their own": (
        lambda: on_experts(lambda model: setattr(experts_inside(model), "has_post_expert_norm", True)),
        "the adapters on base_model.model.model.layers.0.mlp.experts (MixtralExperts) are on experts with a norm of their own",
    ),
    "experts in int8": (
        lambda: on_experts(lambda model: quantise_experts(model, torch.int8)),
        "the adapters on base_model.model.model.layers.0.mlp.experts (MixtralExperts) are on experts whose weights are quantised "
        "(torch.int8); load them in bfloat16, and call pack_experts",
    ),
    "experts in fp8": (
        lambda: on_experts(lambda model: quantise_experts(model, torch.float8_e4m3fn)),
        "the adapters on base_model.model.model.layers.0.mlp.experts (MixtralExperts) are on experts whose weights are quantised "
        "(torch.float8_e4m3fn); load them in bfloat16, and call pack_experts",
    ),
    "adapters on experts that were packed before": (
        lambda: lora(with_packed_experts(), target_parameters=["experts.down_proj"]),
        "target_parameters found no weights in experts that were packed before; call pack_experts after get_peft_model",
    ),
    "packed experts without adapters": (
        lambda: with_packed_experts(),
        "four-bit weights cannot be trained; put adapters beside them",
    ),
    "saved norm": (
        lambda: lora(modules_to_save=["input_layernorm"]),
        "modules_to_save has base_model.model.model.layers.0.input_",
    ),
    "saved tie": (
        lambda: lora(tiny_llama(tie_word_embeddings=True), modules_to_save=["lm_head"]),
        "modules_to_save has the embedding or the head, which are one tied weight (tie_word_embeddings) and would become two",
    ),
    "tied adapters": (
        lambda: lora(tiny_llama(tie_word_embeddings=True), target_modules=["lm_head"], ensure_weight_tying=True),
        "ensure_weight_tying=True gives lm_head an adapter that shares memory with that of the other end",
    ),
    "trained norm": (
        unfrozen,
        "1 trained weights outside the adapters would not be saved with them (the first is base_model.model.model",
    ),
    "dtypes": (of_half_and_single, "the adapters have weights of torch.bfloat16, torch.float32 on a model of torch.bfloat16"),
}


@pytest.mark.parametrize("name", REFUSED_ADAPTERS)
def test_adapters_that_are_not_tested_are_refused_by_name(name: str) -> None:
    make, message = REFUSED_ADAPTERS[name]
    problems = problems_at_start(make())
    assert any(message in problem for problem in problems), problems


def test_an_untested_model_under_adapters_is_refused_by_its_own_class() -> None:
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**LLAMA_SHAPE))
    (problem,) = problems_at_start(lora(model))
    assert problem.startswith("model class DogeForCausalLM is not supported: ")


def test_a_merged_adapter_is_accepted_as_the_remedy_says() -> None:
    # peft leaves the merged model frozen
    merged = lora().merge_and_unload()
    (problem,) = problems_at_start(merged)
    assert problem.startswith("all weights of LlamaForCausalLM are frozen (requires_grad=False), as merge_and_unload() and")
    assert problems_at_start(merged.requires_grad_(True)) == []


def test_dropout_before_adapters_on_experts_is_refused_by_peft(tmp_path) -> None:
    message = "lora.ParamWrapper does not work with lora_dropout != 0"
    with pytest.raises(ValueError, match=message):
        lora(tiny_mixtral(), target_parameters=["experts.down_proj"], lora_dropout=0.1)
    # nor when files with it are read
    lora(tiny_mixtral(), target_parameters=["experts.down_proj"]).save_pretrained(tmp_path)
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "lora_dropout": 0.1}))
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_mixtral(), tmp_path, is_trainable=True)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_adapters_that_are_not_trained_say_how_they_would_be(tmp_path, name: str) -> None:
    get_peft_model(tiny_llama(), LoraConfig(), adapter_name=name).save_pretrained(tmp_path)
    folder = tmp_path if name == "default" else tmp_path / name
    for model in (
        PeftModel.from_pretrained(tiny_llama(), folder, adapter_name=name),
        get_peft_model(tiny_llama(), LoraConfig(inference_mode=True), adapter_name=name),
    ):
        (problem,) = problems_at_start(model)
        assert problem.startswith(f"the adapter {name} is there for inference (inference_mode=True)")
        assert "PeftModel.from_pretrained(..., is_trainable=True)" in problem
    model = PeftModel.from_pretrained(tiny_llama(), folder, adapter_name=name, is_trainable=True)
    assert problems_at_start(model) == []
    (problem,) = problems_at_start(model.requires_grad_(False))
    assert problem.startswith(f"the adapter {name} is frozen") and f"call model.set_adapter({name!r})" in problem
    model.set_adapter(name)
    assert problems_at_start(model) == []


@pytest.mark.parametrize("model", [None, "meta-llama/Llama-3.1-8B", torch.nn.Linear(2, 2)], ids=["nothing", "name", "module"])
def test_what_is_no_loaded_model_is_refused_with_its_type(model: Any) -> None:
    remedy = "pass a loaded transformers model (PreTrainedModel), or its folder or name as text"
    nothing = "the trainer has no model and no model_init; pass one of them, as model=... a loaded model or its name"
    assert problems_at_start(model) == [nothing if model is None else f"model is {type(model).__name__}; {remedy}"]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_and_the_remedy_works() -> None:
    model, tokenizer = tiny_llama(), tokenizer_of(70)
    (problem,) = problems_at_start(model, tokenizer)
    assert problem.startswith("the tokenizer has 70 tokens, the model's vocabulary 64;")
    assert "model.resize_token_embeddings(70)" in problem
    model.resize_token_embeddings(70)
    assert problems_at_start(model, tokenizer) == []


@pytest.mark.parametrize("num_tokens", [10, 64])
def test_a_tokenizer_up_to_the_vocabulary_is_accepted(num_tokens: int) -> None:
    assert problems_at_start(tiny_llama(), tokenizer_of(num_tokens)) == []


def test_max_length_above_the_positions_is_refused_with_both() -> None:
    (problem,) = problems_at_start(tiny_llama(), max_length=513)
    assert problem.startswith("max_length 513 is above the model's max_position_embeddings 512; lower max_length, or ")
    assert problems_at_start(tiny_llama(), max_length=512) == []


def test_models_with_nothing_to_train_are_refused_by_name() -> None:
    assert lacking_problems(ModelFacts.of(tiny_llama(num_hidden_layers=0))) == [
        "LlamaForCausalLM has no decoder layers (num_hidden_layers=0); give its config at least one layer"
    ]
    (problem,) = lacking_problems(ModelFacts.of(tiny_llama().to("meta")))
    assert "have no values, since they are on torch's meta device (first model.embed_tokens.weight)" in problem


@pytest.mark.parametrize("value,kind", [(torch.tensor(1.0), "a single number"), (torch.empty(0), "empty")])
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_a_weight_that_cannot_be_divided_is_refused_by_name(value: torch.Tensor, kind: str, parameters: str) -> None:
    model = tiny_llama()
    model.model.norm.register_parameter("gain", torch.nn.Parameter(value))
    config = LongContextConfig(parameters=parameters)
    problems = setup_problems(ModelFacts.of(model), None, config, 2, (1, 2))
    assert any(f"the weight model.norm.gain is {kind}" in problem for problem in problems)
    # one rank has whole weights, and so have ranks of replicated ones
    for other, num_ranks in ((config, 1), (LongContextConfig(), 2)):
        assert not any(
            "cannot be divided" in problem for problem in setup_problems(ModelFacts.of(model), None, other, num_ranks, (1,))
        )
