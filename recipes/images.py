"""Fine-tune a multimodal model on conversations with images: a dozen pictures made here, or rows of your own.

    accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/images.py
    accelerate launch --config_file recipes/accelerate/gpu.yaml recipes/images.py \\
        Qwen/Qwen3-VL-2B-Instruct my_chats.jsonl

Without arguments, it trains a tiny LLaVA with random weights, which needs no download.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import torch
import transformers
from accelerate import PartialState
from datasets import Dataset, load_dataset
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaConfig, LlavaForConditionalGeneration, TrainingArguments

from hf_longctx import LongContextConfig, LongContextTrainer, tokenise_chat

COLOURS, SHAPES = ("red", "green", "blue", "orange"), ("circle", "square", "triangle")
# contents of messages are text, or parts of text and images
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% set parts = [{'type': 'text', 'text': message.content}] if message.content is string else message.content %}"
    "{% for part in parts %}{% if part.type == 'image' %}<image>{% elif message.role == 'assistant' %}"
    "{% generation %}{{ part.text }}<|end|>{% endgeneration %}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def picture(colour: str, shape: str) -> bytes:
    """A PNG file with one shape."""
    image = Image.new("RGB", (64, 64), "white")
    draw = ImageDraw.Draw(image)
    if shape == "triangle":
        draw.polygon([(32, 10), (54, 54), (10, 54)], fill=colour)
    else:
        {"circle": draw.ellipse, "square": draw.rectangle}[shape]((12, 12, 52, 52), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def dozen_rows() -> Dataset:
    """Twelve conversations, each about a picture."""
    rows = []
    for colour in COLOURS:
        for shape in SHAPES:
            said = {"user": "What is this?", "assistant": f"A {colour} {shape}."}
            messages = [{"role": role, "content": content} for role, content in said.items()]
            # without a place of its own, an image stands before the question
            rows.append({"messages": messages, "images": [picture(colour, shape)]})
    return Dataset.from_list(rows)


def tiny_model() -> tuple[Any, Any]:
    """A LLaVA of two layers with random weights, and its processor with a tokenizer of bytes."""
    alphabet = {byte: place for place, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_alone = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytes_alone.pre_tokenizer, bytes_alone.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<image>"]})
    tokenizer.chat_template = TEMPLATE
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    patches = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = transformers.LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, **patches)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 64, "patch_size": 16, **sizes},
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 512, **sizes},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config), processor


def main() -> None:
    """Trains; the checkpoint in `outputs/images` has the processor, too."""
    if len(sys.argv) > 1:
        name, rows = sys.argv[1], sys.argv[2]
        processor = AutoProcessor.from_pretrained(name)
        model = AutoModelForImageTextToText.from_pretrained(name, dtype="bfloat16")
        given, settings = load_dataset("json", data_files=rows, split="train"), {"bf16": True, "learning_rate": 1e-5}
    else:
        (model, processor), given = tiny_model(), dozen_rows()
        settings = {"use_cpu": True, "learning_rate": 3e-3, "max_steps": 30, "logging_steps": 10}
    # one rank tokenises, and the others read its result
    with PartialState().main_process_first():
        tokens = tokenise_chat(given, processor)
    trainer = LongContextTrainer(
        model=model,
        args=TrainingArguments("outputs/images", per_device_train_batch_size=6, report_to="none", **settings),
        train_dataset=tokens,
        processing_class=processor,
        longctx_config=LongContextConfig(),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
