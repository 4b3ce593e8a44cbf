"""Fine-tune a causal language model on a dataset with a text column.

    accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/sft.py recipes/configs/demo.yaml [--key value ...]

Settings are those of `RecipeArguments` below, of `LongContextConfig` and of `transformers.TrainingArguments`.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.recipes.settings import read_settings

_FILE_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


@dataclass
class RecipeArguments:
    """What is trained on what."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Checkpoint on the hub or a local folder."})
    model_config: str | None = field(
        default=None,
        metadata={"help": "A config as JSON with model_type: start from random weights instead of a checkpoint."},
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Changes to the checkpoint's config as JSON, for example {sliding_window: null} for Mistral."},
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Tokenizer on the hub or a local folder; 'bytes' for UTF-8 bytes. Default: the model's."}
    )
    dataset: str = field(
        default="",
        metadata={"help": "Dataset on the hub, a local file or folder, or 'python-stdlib' for the sources of this Python."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of a hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    text_column: str = field(default="text", metadata={"help": "Column with the text of a document."})
    max_document_chars: int | None = field(default=None, metadata={"help": "Leave out documents of more characters."})
    max_documents: int | None = field(default=None, metadata={"help": "Use only so many documents, drawn by seed."})
    eval_documents: int = field(default=0, metadata={"help": "Documents held out for the loss before and after training."})
    expected_world_size: int | None = field(default=None, metadata={"help": "Stop at once unless this many ranks were started."})

    def __post_init__(self) -> None:
        if (self.model_name_or_path is None) == (self.model_config is None):
            raise ValueError("give either model_name_or_path (a checkpoint) or model_config (random weights), not both or none")
        for name in ("model_config", "config_overrides"):
            try:
                json.loads(getattr(self, name) or "{}")
            except json.JSONDecodeError as error:
                raise ValueError(f"{name} is not JSON: {error}") from None
        if not self.dataset:
            raise ValueError("dataset is missing; give a hub name, a local file or folder, or 'python-stdlib'")


def main() -> None:
    """Reads settings, trains, evaluates before and after, and saves a checkpoint that plain transformers can load."""
    recipe, config, args = read_settings((RecipeArguments, LongContextConfig, TrainingArguments))
    check_world(args, recipe.expected_world_size)
    set_seed(args.seed)
    if args.process_index:
        datasets.disable_progress_bars()
    tokenizer = load_tokenizer(recipe)
    model = load_model(recipe)
    with args.main_process_first(desc="tokenise"):
        documents = load_documents(recipe, args.seed)
        tokens = tokenise(documents, recipe.text_column, tokenizer)
    held_out = tokens.select(range(recipe.eval_documents)) if recipe.eval_documents else None
    trainer = LongContextTrainer(
        model=model,
        args=args,
        train_dataset=tokens.select(range(recipe.eval_documents, len(tokens))),
        eval_dataset=held_out,
        processing_class=tokenizer,
        longctx_config=config,
    )
    say(args, describe(trainer, model))
    before = trainer.evaluate() if held_out is not None else {}
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate() if held_out is not None else {}
    trainer.save_model()
    if held_out is not None:
        say(args, f"held-out perplexity: {before['eval_perplexity']:.2f} before, {after['eval_perplexity']:.2f} after")
        if args.should_save:
            write_held_out(trainer, Path(args.output_dir), after["eval_loss"])
    say(args, f"checkpoint: {args.output_dir}  (AutoModelForCausalLM.from_pretrained loads it)")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def check_world(args: TrainingArguments, expected: int | None) -> None:
    """Prints the world and stops where it is not the expected one, since a launcher may start fewer processes in silence."""
    backend = dist.get_backend() if dist.is_initialized() else "no process group"
    say(args, f"{args.world_size} rank(s) on {args.device.type}, {backend}")
    if expected is not None and args.world_size != expected:
        raise SystemExit(
            f"{args.world_size} rank(s) started, {expected} expected; launch with `accelerate launch --config_file "
            f"recipes/accelerate/cpu.yaml` (or gpu.yaml) and set num_processes there, or change expected_world_size"
        )


def load_tokenizer(recipe: RecipeArguments) -> PreTrainedTokenizerBase:
    """The tokenizer named in the settings, else the model's."""
    if recipe.tokenizer == "bytes":
        return ByT5Tokenizer(extra_ids=0)
    return AutoTokenizer.from_pretrained(recipe.tokenizer or recipe.model_name_or_path)


def load_model(recipe: RecipeArguments) -> PreTrainedModel:
    """The checkpoint, or random weights of the given config, in float32 with sdpa attention."""
    if recipe.model_name_or_path is not None:
        config = AutoConfig.from_pretrained(recipe.model_name_or_path, **json.loads(recipe.config_overrides or "{}"))
        return AutoModelForCausalLM.from_pretrained(
            recipe.model_name_or_path, config=config, dtype="float32", attn_implementation="sdpa"
        )
    assert recipe.model_config is not None
    config = AutoConfig.for_model(**json.loads(recipe.model_config))
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def load_documents(recipe: RecipeArguments, seed: int) -> datasets.Dataset:
    """Documents with text, in an order drawn by seed, at most `max_documents` of them."""
    path = Path(recipe.dataset)
    if recipe.dataset == "python-stdlib":
        documents = datasets.Dataset.from_dict({recipe.text_column: standard_library_sources()})
    elif path.is_dir() and (path / "dataset_info.json").exists():
        documents = datasets.load_from_disk(recipe.dataset)
    elif path.suffix in _FILE_KINDS:
        if not path.is_file() or not path.stat().st_size:
            raise SystemExit(f"dataset {recipe.dataset} is {'empty' if path.is_file() else 'no file here'}; check the path")
        documents = datasets.load_dataset(_FILE_KINDS[path.suffix], data_files=str(path), split="train")
    else:
        documents = datasets.load_dataset(recipe.dataset, recipe.dataset_config, split=recipe.dataset_split)
    if recipe.text_column not in documents.column_names:
        raise SystemExit(
            f"dataset {recipe.dataset} has no column {recipe.text_column!r}; it has {', '.join(documents.column_names)} "
            f"(set text_column)"
        )
    kind = documents.features[recipe.text_column]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise SystemExit(f"column {recipe.text_column!r} of {recipe.dataset} holds {kind}, expected text (set text_column)")
    longest = recipe.max_document_chars or sys.maxsize
    documents = documents.filter(lambda text: 0 < len(text or "") <= longest, input_columns=[recipe.text_column])
    order = list(range(len(documents)))
    if len(order) <= recipe.eval_documents:
        raise SystemExit(
            f"{len(order)} documents with text are left, {recipe.eval_documents} are to be held out and the rest trained on; "
            f"lower eval_documents or give more documents"
        )
    random.Random(seed).shuffle(order)
    return documents.select(order[: recipe.max_documents])


def standard_library_sources() -> list[str]:
    """The text of every module of this Python's standard library, its tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = [file for file in sorted(root.rglob("*.py")) if not skipped & set(file.relative_to(root).parts)]
    return [text for file in files if (text := file.read_text(encoding="utf-8", errors="replace")).strip()]


def tokenise(documents: datasets.Dataset, text_column: str, tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
    """Token ids of every document, ended by the tokenizer's end-of-sequence token."""
    end = tokenizer.eos_token_id

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # long documents are what this package is for: no warning about the tokenizer's own limit
        ids = tokenizer(rows[text_column], verbose=False)["input_ids"]
        return {"input_ids": [row if end is None or row[-1:] == [end] else [*row, end] for row in ids]}

    return documents.map(encode, batched=True, batch_size=64, remove_columns=documents.column_names, desc="tokenise")


def describe(trainer: LongContextTrainer, model: PreTrainedModel) -> str:
    """One paragraph about the run, before it starts."""
    dataloader = trainer.get_train_dataloader()
    lengths = sorted(dataloader.dataset.index.lengths.tolist())
    return (
        f"{type(model).__name__} with {model.num_parameters() / 1e6:.1f} million parameters; {len(lengths)} sequences of "
        f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}); {len(dataloader)} steps per epoch"
    )


def write_held_out(trainer: LongContextTrainer, folder: Path, loss: float) -> None:
    """held_out.json: the held-out sequences and their loss, so that `recipes/evaluate.py` can check the checkpoint."""
    dataset = trainer.get_eval_dataloader().dataset
    index = dataset.index
    sequences = [
        dataset.dataset[int(row)]["input_ids"][start:stop].tolist()
        for row, start, stop in zip(index.rows, index.starts, index.stops, strict=True)
    ]
    (folder / "held_out.json").write_text(json.dumps({"loss": loss, "input_ids": sequences}))


def say(args: TrainingArguments, text: str) -> None:
    """Prints on the first rank."""
    if args.process_index == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
