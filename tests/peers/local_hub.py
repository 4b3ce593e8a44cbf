"""Tiny models, tokenizers and data sets that stand under the names that TRL's tests ask the hub for, without a network.

TRL's tests load `trl-internal-testing/tiny-...` and `trl-internal-testing/zen`, ... from the hub. This module makes models of the
same classes from configs, with random weights and a small vocabulary, and data sets with the same columns and other sentences.
Chat templates are read from the installed TRL, which recognises its own by their text.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

OWNER = "trl-internal-testing"
# name of the folder of a snapshot; the hub has the hash of a commit there
_REVISION = "0" * 40
_NUM_MERGED = 700

# subject, middle and end of a sentence; a prompt is the subject and the middle
_SENTENCES = tuple(
    tuple(line.split("|"))
    for line in (
        "A short road| is better than| a long one.",
        "Two small boats| carry more than| one full ship.",
        "Warm bread| costs less than| cold cake.",
        "The old bridge| holds as long as| nobody counts the stones.",
        "Rain in the morning| means| sun in the evening.",
        "Every river| knows| where the sea lies.",
        "Silence| is| an answer too.",
        "Three keys on one ring| open no more doors than| one key alone, if it fits.",
        "Whoever asks early| waits| less.",
        "Snow on the roof| keeps| the house warm.",
        "Unless the wind turns| we sail| at noon.",
        "In front of a closed gate| look for| the bell before you climb.",
        "There are many paths| and most of them| lead to the same market square.",
        "A map of yesterday| does not show| the bridge that fell last night.",
        "Today| is sooner than| tomorrow.",
        "Although a late letter| is better than| none at all, *soon* is best.",
        "If the lamp burns low| fill it| before the guests arrive.",
        "If the soup is hot| blow on it| and wait a little.",
        "Good neighbours| are worth| a fence less!",
    )
)
_NUM_TRAIN = 17


@dataclass(frozen=True)
class Family:
    """A tokenizer: its chat template in TRL's folder, and its special tokens."""

    template: str | None
    eos: str = "<|im_end|>"
    pad: str | None = "<|endoftext|>"
    bos: str | None = None
    more: tuple[str, ...] = ("<|im_start|>",)


_THINKING = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_FAMILIES = {
    "qwen2.5": Family("qwen2_5", more=_THINKING),
    "qwen3": Family("qwen3", more=_THINKING),
    "llama3": Family(
        "llama3", "<|eot_id|>", None, "<|begin_of_text|>", ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
    ),
    "mistral": Family(None, "</s>", None, "<s>", ("[INST]", "[/INST]")),
    "cohere": Family(
        "cohere",
        "<|END_OF_TURN_TOKEN|>",
        "<PAD>",
        "<BOS_TOKEN>",
        ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    ),
    "deepseek": Family(
        "deepseekv3", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜begin▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>")
    ),
    "gemma": Family("gemma", "<eos>", "<pad>", "<bos>", ("<start_of_turn>", "<end_of_turn>")),
    "glm": Family(
        "glm4moe", "<|endoftext|>", "<|endoftext|>", None, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
    ),
    "gpt-oss": Family(
        "gptoss",
        "<|return|>",
        "<|endoftext|>",
        "<|startoftext|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    ),
    "lfm2": Family("lfm2", "<|im_end|>", "<|pad|>", "<|startoftext|>", ("<|im_start|>",)),
    "nemotron": Family("nemotron_3_nano", "<|im_end|>", "<|im_end|>", "<s>", _THINKING),
    "neox": Family(None, "<|endoftext|>", None, "<|endoftext|>", ()),
    "olmo": Family("qwen2_5", "<|endoftext|>", "<|pad|>", "<|endoftext|>", ("<|im_start|>", "<|im_end|>")),
    "phi3": Family("phi3", "<|endoftext|>", "<|endoftext|>", "<s>", ("<|user|>", "<|assistant|>", "<|end|>", "<|system|>")),
}
# names in which a version of a model changes the template
_TEMPLATES = {"LlamaForCausalLM-3.1": "llama3_1", "LlamaForCausalLM-3.2": "llama3_2", "Cohere2ForCausalLM": "cohere2"}
_TEMPLATES |= {
    "Lfm2ForCausalLM-2.5": "lfm2_2_5",
    "LlamaForSequenceClassification-3.2": "llama3_2",
    "RemoteForCausalLM": "llama3_2",
}

_SMALL = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# latent attention has as many heads for keys as for queries
_LATENT = {"num_attention_heads": 2, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, **_EXPERTS}
_REWARD = {"hidden_size": 16, "num_labels": 1}
_REMOTE = """\
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification


class RemoteConfig(Qwen2Config):
    model_type = "remote"


class RemoteForCausalLM(Qwen2ForCausalLM):
    config_class = RemoteConfig


class RemoteForSequenceClassification(Qwen2ForSequenceClassification):
    config_class = RemoteConfig
"""


@dataclass(frozen=True)
class Tiny:
    """A model: its class, its tokenizer, and fields of its config beyond the small sizes."""

    model: str
    family: str
    fields: dict[str, Any] = field(default_factory=dict)


def _tiny(name: str, family: str, **fields: Any) -> tuple[str, Tiny]:
    return name, Tiny(name.split("-")[0], family, fields)


_MODELS = dict(
    [
        _tiny("Qwen2ForCausalLM-2.5", "qwen2.5"),
        _tiny("Qwen3ForCausalLM", "qwen3", head_dim=4),
        _tiny("Qwen3MoeForCausalLM", "qwen3", num_experts=4, head_dim=4, norm_topk_prob=True, **_EXPERTS),
        _tiny("Qwen2ForSequenceClassification-2.5", "qwen2.5", **_REWARD),
        _tiny("Qwen3ForSequenceClassification", "qwen3", head_dim=4, **_REWARD),
        _tiny("Qwen3MoeForSequenceClassification", "qwen3", num_experts=4, head_dim=4, **_EXPERTS, **_REWARD),
        _tiny("LlamaForSequenceClassification-3.2", "llama3", **_REWARD),
        _tiny("GPTNeoXForSequenceClassification", "neox", **_REWARD),
        _tiny("LlamaForCausalLM-3", "llama3"),
        _tiny("LlamaForCausalLM-3.1", "llama3"),
        _tiny("LlamaForCausalLM-3.2", "llama3"),
        _tiny("MistralForCausalLM-0.1", "mistral"),
        _tiny("MistralForCausalLM-0.2", "mistral"),
        _tiny("CohereForCausalLM", "cohere", logit_scale=1.0),
        _tiny("Cohere2ForCausalLM", "cohere", logit_scale=1.0),
        _tiny("DeepseekV3ForCausalLM", "deepseek", **_LATENT),
        _tiny("DeepseekV3ForCausalLM-0528", "deepseek", **_LATENT),
        _tiny("GemmaForCausalLM", "gemma", head_dim=4),
        _tiny("Gemma2ForCausalLM", "gemma", head_dim=4),
        _tiny("Glm4MoeForCausalLM", "glm", head_dim=2, n_routed_experts=4, use_qk_norm=True, attention_bias=True, **_EXPERTS),
        _tiny("GptOssForCausalLM", "gpt-oss", num_local_experts=4, num_experts_per_tok=2, head_dim=4),
        _tiny("Lfm2ForCausalLM", "lfm2", full_attn_idxs=[1], block_multiple_of=8),
        _tiny("Lfm2ForCausalLM-2.5", "lfm2", full_attn_idxs=[1], block_multiple_of=8),
        _tiny(
            "NemotronHForCausalLM-nano",
            "nemotron",
            hidden_size=16,
            layers_block_type=["mamba", "attention", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=4,
            mamba_n_groups=1,
            ssm_state_size=16,
            n_routed_experts=4,
            moe_shared_expert_intermediate_size=32,
            use_mamba_kernels=False,
            **_EXPERTS,
        ),
        _tiny("GPTNeoXForCausalLM", "neox"),
        _tiny("Olmo3ForCausalLM", "olmo"),
        _tiny("Phi3ForCausalLM", "phi3"),
        _tiny("RemoteForCausalLM", "qwen2.5"),
    ]
)


def write_hub(folder: Path) -> None:
    """Writes models into `folder`/hub, in the layout of the hub's cache, and data sets into `folder`/data; once."""
    if (folder / "done").exists():
        return
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    for name, tiny in _MODELS.items():
        cached = folder / "hub" / f"models--{OWNER}--tiny-{name}"
        (cached / "refs").mkdir(parents=True, exist_ok=True)
        (cached / "refs" / "main").write_text(_REVISION)
        _write_model(cached / "snapshots" / _REVISION, name, tiny)
    for name, configs in _data().items():
        _write_data(folder / "data" / name, configs)
    (folder / "done").touch()


def _write_model(target: Path, name: str, tiny: Tiny) -> None:
    family = _FAMILIES[tiny.family]
    tokenizer = _tokenizer(family, _TEMPLATES.get(name, family.template))
    tokenizer.save_pretrained(target)
    is_remote = tiny.model.startswith("Remote")
    model_class = getattr(transformers, tiny.model.replace("Remote", "Qwen2"))
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("eos", "bos", "pad")}
    config = model_class.config_class(**{**_SMALL, "vocab_size": len(tokenizer), **ids, **tiny.fields})
    torch.manual_seed(0)
    model = model_class(config)
    for weight in model.parameters():
        # weights of 0.02 leave so small a model without gradients that fp32 can tell from zero
        if weight.dim() > 1:
            torch.nn.init.xavier_uniform_(weight)
    model.to(torch.bfloat16).save_pretrained(target)
    if is_remote:
        (target / "modeling_remote.py").write_text(_REMOTE)
        written = json.loads((target / "config.json").read_text())
        classes = {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteForCausalLM"}
        classes["AutoModelForSequenceClassification"] = "RemoteForSequenceClassification"
        written |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"]}
        written["auto_map"] = {auto: f"modeling_remote.{each}" for auto, each in classes.items()}
        (target / "config.json").write_text(json.dumps(written))


def _tokenizer(family: Family, template: str | None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = [each for each in (family.eos, family.pad, family.bos) if each]
    special = list(dict.fromkeys([*family.more, *names]))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_NUM_MERGED, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["".join(each) for each in _SENTENCES], trainer)
    backend.add_special_tokens([AddedToken(each, special=True) for each in special])
    roles = {"eos_token": family.eos, "pad_token": family.pad, "bos_token": family.bos}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{role: each for role, each in roles.items() if each})
    if template is not None:
        found = importlib.util.find_spec("trl")
        assert found is not None and found.submodule_search_locations
        texts = Path(found.submodule_search_locations[0]) / "chat_templates"
        tokenizer.chat_template = (texts / f"{template}.jinja").read_text(encoding="utf-8")
    elif family.more:
        # no template of TRL's for this family; a plain one
        tokenizer.chat_template = (
            "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} "
            "[/INST]{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
        )
    return tokenizer


Rows = list[dict[str, Any]]


def _data() -> dict[str, dict[str, Rows]]:
    """Data set -> config -> rows, with the columns that TRL's guide to data formats names."""
    zen: dict[str, Rows] = {}
    shapes: dict[str, Callable[[str, str, str, bool], dict[str, Any]]] = {
        "prompt_only": lambda prompt, right, wrong, is_right: {"prompt": prompt},
        "prompt_completion": lambda prompt, right, wrong, is_right: {"prompt": prompt, "completion": right},
        "preference": lambda prompt, right, wrong, is_right: {"prompt": prompt, "chosen": right, "rejected": wrong},
        "implicit_prompt_preference": lambda prompt, right, wrong, is_right: {
            "chosen": prompt + right,
            "rejected": prompt + wrong,
        },
        "unpaired_preference": lambda prompt, right, wrong, is_right: {
            "prompt": prompt,
            "completion": right if is_right else wrong,
            "label": is_right,
        },
    }
    pairs = _pairs()
    zen["standard_language_modeling"] = [{"text": prompt + right} for prompt, right, _ in pairs]
    zen["conversational_language_modeling"] = [{"messages": _asked(prompt) + _answered(right)} for prompt, right, _ in pairs]
    for name, row in shapes.items():
        zen[f"standard_{name}"] = [row(*pair, index % 3 != 1) for index, pair in enumerate(pairs)]
        chats = [(_asked(prompt), _answered(right), _answered(wrong)) for prompt, right, wrong in pairs]
        zen[f"conversational_{name}"] = [row(*chat, index % 3 != 1) for index, chat in enumerate(chats)]  # type: ignore[arg-type]
    return {"zen": zen, "harmony": _harmony(), "toolcall": _tool_calls()}


def _pairs() -> list[tuple[str, str, str]]:
    """A prompt, its end, and the end of another prompt; prompts of two sorts, as sentences end at different places."""
    ends = [end for *_, end in _SENTENCES]
    return [(start + middle, end, ends[(index + 5) % len(ends)]) for index, (start, middle, end) in enumerate(_SENTENCES)]


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"How does it go on: {text}?"}]


def _answered(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text.strip()}]


def _harmony() -> dict[str, Rows]:
    def thought(text: str) -> list[dict[str, str]]:
        return [{**_answered(text)[0], "thinking": f"It could be{text}"}]

    efforts = ("low", "medium", "high")
    rows: dict[str, Rows] = {"language_modeling": [], "prompt_completion": [], "preference": []}
    for index, (prompt, right, wrong) in enumerate(_pairs()):
        kwargs = {"chat_template_kwargs": {"reasoning_effort": efforts[index % 3], "model_identity": "You are a small test."}}
        rows["language_modeling"].append({"messages": _asked(prompt) + thought(right), **kwargs})
        rows["prompt_completion"].append({"prompt": _asked(prompt), "completion": thought(right), **kwargs})
        rows["preference"].append({"prompt": _asked(prompt), "chosen": thought(right), "rejected": thought(wrong), **kwargs})
    return rows


def _tool_calls() -> dict[str, Rows]:
    tool = {
        "type": "function",
        "function": {
            "name": "open_gate",
            "description": "Opens a gate of the town.",
            "parameters": {
                "type": "object",
                "properties": {
                    "gate": {"type": "string", "description": "The name of the gate."},
                    "minutes": {"type": "integer", "description": "For how long."},
                },
                "required": ["gate"],
            },
        },
        "return": {"type": "string", "description": "What the guard says."},
    }

    def call(gate: str, minutes: int) -> dict[str, Any]:
        arguments = {"gate": gate, "minutes": minutes} if minutes else {"gate": gate}
        return {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "open_gate", "arguments": arguments}}],
        }

    rows: dict[str, Rows] = {"language_modeling": [], "preference": []}
    for index in range(len(_SENTENCES)):
        gate, minutes = f"gate {index}", index % 4
        asked = [{"role": "user", "content": f"Please open {gate}."}]
        said = [{"role": "tool", "name": "open_gate", "content": "It is open."}]
        answer = _answered(f"{gate} is open now.")
        tools = {"tools": json.dumps([tool])}
        rows["language_modeling"].append({"messages": [*asked, call(gate, minutes), *said, *answer], **tools})
        rejected = {"chosen": [call(gate, minutes), *said, *answer], "rejected": _answered("I cannot do that.")}
        rows["preference"].append({"prompt": asked, **rejected, **tools})
    return rows


def _write_data(folder: Path, configs: dict[str, Rows]) -> None:
    described = []
    for name, rows in configs.items():
        # columns of dicts with differing keys become JSON
        found = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
        parts = {"train": found.select(range(_NUM_TRAIN)), "test": found.select(range(_NUM_TRAIN, len(found)))}
        described.append(f"- config_name: {name}\n  data_files:")
        for split, part in parts.items():
            path = folder / name / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            part.to_parquet(str(path))
            described[-1] += f"\n  - split: {split}\n    path: {name}/{split}.parquet"
    (folder / "README.md").write_text("---\nconfigs:\n" + "\n".join(described) + "\n---\n")


def local_name(name: str, folder: Path) -> str:
    """The local folder of a data set of TRL's tests; the same name for all others."""
    found = re.fullmatch(rf"{OWNER}/(.+)", name)
    return str(folder / "data" / found[1]) if found and (folder / "data" / found[1]).exists() else name
