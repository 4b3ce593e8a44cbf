"""Every snippet of README and docs runs as it is printed, with default settings; only models, data and arguments stand in.

Snippets of TRL and of four-bit weights run where these packages are installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
import transformers
from helpers.models.any_model import build_any
from helpers.models.chats import conversation, word_tokenizer
from helpers.models.mxfp4_checkpoints import save_gpt_oss
from helpers.models.reference import random_rows
from helpers.models.tiny_processors import file_of, picture, tiny_processor
from transformers import TrainingArguments

ROOT = Path(__file__).parents[2]
# pages for contributors (add-a-....md) show parts of the package; tests/hf/rules/test_rules.py tries the rule of one of them
_PAGES = [file for file in sorted((ROOT / "docs").rglob("*.md")) if not file.name.startswith("add-a")]
DOCUMENTS = "\n".join(file.read_text() for file in (ROOT / "README.md", *_PAGES))
_BLOCKS = re.findall(r"```(python|diff)\n(.*?)```", DOCUMENTS, re.DOTALL)
# doors that the documents only mention, as in the sentences around them
_MIXIN = "class Mine(LongContextMixin, YourTrainer)"
_ALONE = "callbacks=[LongContextCallback(config)]"
_MIXIN_CODE = f"""{_MIXIN}: pass
trainer = Mine(model=model, args=args, train_dataset=dataset, longctx_config=LongContextConfig(max_length=32768))
trainer.train()
"""
_ALONE_CODE = f"""config = LongContextConfig(max_length=32768)
trainer = STOCK, {_ALONE})
trainer.train()
"""
_STOCK = "Trainer(model=model, args=args, train_dataset=dataset, data_collator=DataCollatorWithFlattening()"
_SFT = "SFTTrainer(model=model, args=sft_args, train_dataset=conversations, processing_class=tokenizer"
_ATTACH = """callback = LongContextCallback(LongContextConfig(max_length=32768))
callback.attach(trainer)
trainer.train()
"""
_IMAGES_MODEL = "Qwen/Qwen3-VL-8B-Instruct"
# needs a server and tools, with which tests/hf/log_probs/test_server_generation.py trains
_SERVED, _OWN_LOOP, _ONE_PASS, _TRANSFER = "served", "own loop", "one pass", "transfer"
# text in a block -> name of the snippet, and how many ranks run it
_KNOWN = {
    "trainer = LongContextTrainer(\n    model=model": ("trainer", 2),
    "AutoModelForImageTextToText": ("images", 1),
    "teacher=teacher": ("distillation", 2),
    "callback.attach(trainer)": ("attached", 2),
    "LongContextConfig(stages=2)).attach(trainer)": ("attached_stages", 2),
    "class LongSFTTrainer": ("trl", 2),
    "NeedleTask(": ("evaluation", 1),
    "BitsAndBytesConfig(": ("four_bits", 1),
    "load_pipeline_stage(": ("stages", 8),
    "target_parameters=[": ("experts", 2),
    "pack_experts(": ("packed_experts", 2),
    "in tower_parameters(model)": ("towers", 1),
    'frozen_weights="fp8"': ("frozen_fp8", 2),
    "vllm_mode=": (_SERVED, 1),
    # needs rollouts; recipes/async_rl.py runs in tests/recipes/test_async_rl.py
    "LongContextEngine(": (_OWN_LOOP, 1),
    "forward_backward_by_token(": (_ONE_PASS, 1),
    # needs vLLM and a GPU
    "WeightTransferTrainerFactory": (_TRANSFER, 1),
    "MuonWithAdamW": ("muon", 1),
    "from_deepspeed(": ("deepspeed", 2),
    "stream_readers=8": ("stream", 2),
    "train_dataset=ShardedStream(make)": ("loaders", 2),
}


def printed(kind: str, text: str) -> str:
    """The code of a block; of a difference, what it makes of the script."""
    lines = text.splitlines()
    return "\n".join(lines if kind == "python" else [line[1:] for line in lines if not line.startswith("-")])


CODES = {_MIXIN: (_MIXIN_CODE, 2), _ALONE: (_ALONE_CODE.replace("STOCK", _STOCK), 2)}
for _kind, _text in _BLOCKS:
    _code = printed(_kind, _text)
    _names = [value for key, value in _KNOWN.items() if key in _code]
    assert len(_names) == 1, f"name this snippet of the documents in _KNOWN, so that it is tested:\n{_text}"
    ((_name, _num_ranks),) = _names
    # the README repeats one of them
    assert CODES.setdefault(_name, (_code, _num_ranks))[0] == _code, f"two documents print snippet {_name} in different words"
del CODES[_SERVED], CODES[_OWN_LOOP], CODES[_ONE_PASS], CODES[_TRANSFER]
WITH_TRL = {
    "trl": CODES.pop("trl"),
    "trl, attached": (f"trainer = {_SFT})\n{_ATTACH}", 2),
    "trl, alone": (_ALONE_CODE.replace("STOCK", _SFT), 2),
}


def model_config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        bos_token_id=1,
        eos_token_id=2,
    )


def with_experts() -> transformers.Qwen3MoeForCausalLM:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def with_towers(**settings: Any) -> Any:
    vision = {"patch_size": 4, "spatial_merge_size": 2, "num_position_embeddings": 16, "in_channels": 3}
    text = {"num_hidden_layers": 3, "vocab_size": 1000, "max_position_embeddings": 65536}
    return build_any("Qwen3VLForConditionalGeneration", "sdpa", vision_config=vision, text_config=text, **settings)


def with_adapters() -> Any:
    import peft

    config = model_config()
    config.max_position_embeddings = 131072
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))


# snippet -> the model that it takes for given; a trainer trains it if the snippet makes none
_MODELS: dict[str, Callable[[], Any]] = {
    "experts": with_experts,
    "towers": with_towers,
    "frozen_fp8": with_adapters,
}


def stand_ins(folder: str) -> dict[str, Any]:
    """Everything that the snippets take for given."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DataCollatorWithFlattening, Trainer

    import hf_longctx

    torch.manual_seed(0)
    names: dict[str, Any] = {name: getattr(hf_longctx, name) for name in hf_longctx.__all__}
    names |= {each.__name__: each for each in (AutoModelForCausalLM, BitsAndBytesConfig, DataCollatorWithFlattening, Trainer)}
    names |= {"torch": torch, "LoraConfig": peft.LoraConfig, "get_peft_model": peft.get_peft_model, "YourTrainer": Trainer}
    model = transformers.LlamaForCausalLM(model_config())
    rows = datasets.Dataset.from_list(random_rows([61, 13, 5, 8, 21, 34, 3, 9] * 4))
    arguments: dict[str, Any] = {"output_dir": str(Path(folder, "out")), "max_steps": 2, "use_cpu": True, "report_to": "none"}
    names |= {"model": model, "dataset": rows, "eval_dataset": rows.select(range(4)), "path": "checkpoints/llama-70b"}
    names |= {"args": TrainingArguments(**arguments), "tokenizer": word_tokenizer()}
    names["TrainingArguments"] = partial(TrainingArguments, max_steps=2, use_cpu=True, report_to="none")
    stream = datasets.load_dataset("json", data_files="documents/*.jsonl", split="train", streaming=True)
    names |= {"datasets": datasets, "tokenise": tokenise, "stream": stream.map(tokenise, remove_columns=["text"])}
    names["conversations"] = datasets.Dataset.from_list(
        [{"messages": conversation("what is this?", "it is an answer to a question " * n)} for n in (1, 9, 2, 1, 4, 1, 3, 2) * 2]
    )
    if importlib.util.find_spec("trl") is not None:
        import trl

        # TRL takes bf16 by default, and then asks for a GPU or for this
        names |= {"SFTTrainer": trl.SFTTrainer, "SFTConfig": partial(trl.SFTConfig, use_cpu=True)}
        names["sft_args"] = trl.SFTConfig(**arguments, assistant_only_loss=True, max_length=None)
    return names


def tokenise(row: dict[str, str]) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) % 64 for letter in row["text"]]}


def write_texts(folder: Path) -> None:
    """Writes texts to the files from which the snippets read a stream."""
    folder.mkdir()
    for file in range(8):
        lines = [json.dumps({"text": "ab" * (1 + 5 * file + row)}) for row in range(9)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))


def write_images(folder: Path) -> None:
    """Writes a model for images and conversations with one image each."""
    processor = tiny_processor("qwen3_vl")
    named = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>"}
    tokens = {field: processor.tokenizer.convert_tokens_to_ids(token) for field, token in named.items()}
    with_towers(**tokens).save_pretrained(folder / _IMAGES_MODEL)
    lines = []
    for number in range(8):
        (folder / f"{number}.png").write_bytes(file_of(picture(40 + 8 * number, 28)))
        parts = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "what is this?"}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": "it is an answer"}]}
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}, answer]}))
    (folder / "chats.jsonl").write_text("\n".join(lines))


def _imported(names: dict[str, Any]) -> dict[str, Any]:
    """Names that a snippet imports itself, and what stands in for them: a saved processor would need torchvision, for videos."""
    return {
        "AutoProcessor": SimpleNamespace(from_pretrained=lambda _: tiny_processor("qwen3_vl")),
        "TrainingArguments": names["TrainingArguments"],
    }


def run(code: str, name: str, folder: str) -> tuple[str, int]:
    """Runs a snippet; returns what it printed and the number of steps that it trained."""
    before = Path.cwd()
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        os.chdir(folder)
        try:
            names = stand_ins(folder)
            if name == "evaluation":
                names["trainer"] = names["LongContextTrainer"](
                    model=names["model"], args=names["args"], train_dataset=names["dataset"]
                )
            if name in _MODELS:
                names["model"] = _MODELS[name]()
            stand_in = patch.multiple(transformers, **_imported(names)) if name == "images" else contextlib.nullcontext()
            with stand_in:
                exec(compile(code, f"snippet {name}", "exec"), names)
            if name in _MODELS and "trainer" not in names:
                names["trainer"] = names["LongContextTrainer"](
                    model=names["model"], args=names["args"], train_dataset=names["dataset"]
                )
            trainer = names["trainer"]
            if "trainer.train()" not in code and name != "evaluation":
                trainer.train()
        finally:
            os.chdir(before)
    return shown.getvalue(), trainer.state.global_step


def check(ranks: Any, codes: dict[str, tuple[str, int]], name: str, folder: Path) -> None:
    transformers.LlamaForCausalLM(model_config()).save_pretrained(folder / "checkpoints" / "llama-70b")
    save_gpt_oss(folder / "checkpoints" / "gpt-oss-20b")
    write_texts(folder / "documents")
    (folder / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}))
    if name == "images":
        write_images(folder)
    code, num_ranks = codes[name]
    (shown, steps), *others = ranks(num_ranks).run(run, code, name, str(folder))
    assert steps == 0 if name == "evaluation" else steps >= 2
    assert all(found == steps for _, found in others)
    # a model of which every rank loaded a stage cannot be tested, and nothing is printed before training
    if name != "stages" and steps:
        assert "self-test passed" in shown, shown


@pytest.mark.daily("four_bits", "muon")
@pytest.mark.slow
@pytest.mark.parametrize("name", CODES)
def test_a_snippet_runs_as_it_is_printed(ranks, name: str, tmp_path: Path) -> None:
    if name == "four_bits" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes (pip install bitsandbytes==0.50.2)")
    if name == "loaders":
        pytest.importorskip("torchdata")
    check(ranks, CODES, name, tmp_path)


@pytest.mark.trl
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)")
@pytest.mark.parametrize("name", WITH_TRL)
def test_a_snippet_of_trl_runs_as_it_is_printed(ranks, name: str, tmp_path: Path) -> None:
    check(ranks, WITH_TRL, name, tmp_path)


def test_the_documents_name_the_doors_of_which_they_print_no_snippet() -> None:
    assert f"`{_MIXIN}`" in DOCUMENTS and f"`{_ALONE}`" in DOCUMENTS
