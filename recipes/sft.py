"""Fine-tune a causal language model on texts, on prompts with completions, or on conversations.

    accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/sft.py recipes/configs/demo.yaml [--key value ...]

Its settings are the fields of `RecipeArguments` below, of `LongContextConfig` and of `transformers.TrainingArguments`. Unless
`long_sequences` is set, texts above `max_length` are split, and conversations and completions lose their tails.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    ByT5Tokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from hf_longctx import (
    DataError,
    LongContextConfig,
    LongContextEvaluation,
    LongContextTrainer,
    NeedleTask,
    extend_positions,
    load_pipeline_stage,
    load_sharded,
    passkeys,
    refusals_last,
)
from hf_longctx.hf.models.expert_adapters import expert_weights
from hf_longctx.hf.models.packed_experts import pack_experts
from hf_longctx.hf.models.towers import tower_names
from hf_longctx.hf.rules.arguments import fit_problems
from hf_longctx.plan.core.messages import counted, on_screen
from hf_longctx.recipes.key_values import key_value_needle
from hf_longctx.recipes.settings import given_settings, read_settings
from hf_longctx.recipes.sources import KEY_VALUES, Documents, Source, check_sources, load_tokens

# setting that goes with `dataset` -> the key of an entry of `datasets` that means the same
_SHORT_FORMS = {
    "dataset_config": "config",
    "dataset_split": "split",
    "text_column": "text_column",
    "column_separator": "column_separator",
    "messages_column": "messages_column",
    "prompt_column": "prompt_column",
    "completion_column": "completion_column",
    "max_documents": "max_documents",
}

_NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass
class RecipeArguments:
    """Settings of the recipe: the model, the data, and what to evaluate."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Checkpoint on the hub or a local folder."})
    model_config: str | None = field(
        default=None,
        metadata={"help": "Model config as JSON, with model_type: starts from random weights instead of a checkpoint."},
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Changes to the checkpoint's config as JSON, for example {sliding_window: null} for Mistral."},
    )
    rope_scaling: Literal["yarn", "linear", "dynamic", "longrope", "none"] | None = field(
        default=None,
        metadata={
            "help": "How to scale positions if max_length is above the checkpoint's limit: yarn, linear, dynamic, longrope (with "
            "the checkpoint's own factors), or none (use more positions unscaled, with a warning). Default: refuse such a "
            "max_length, unless the checkpoint's positions are dynamic."
        },
    )
    dtype: Literal["float32", "bfloat16"] = field(
        default="float32",
        metadata={
            "help": "Type of weights, optimizer states and activations; bfloat16 takes half the memory and rounds updates."
        },
    )
    lora_rank: int = field(
        default=0,
        metadata={"help": "Train LoRA adapters of this rank (in float32) over frozen weights. 0: train all weights."},
    )
    lora_alpha: float | None = field(
        default=None, metadata={"help": "The adapters' output is scaled by lora_alpha / lora_rank. Default: twice the rank."}
    )
    lora_targets: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the Linear modules to adapt. Default: all except the output head and towers for images or sound."
        },
    )
    lora_experts: bool = field(
        default=False,
        metadata={"help": "Adapt the weights of routed experts too. (On some classes, all Linear modules contain them already.)"},
    )
    pack_experts: Literal["", "mxfp4", "nf4", "fp8"] = field(
        default="",
        metadata={"help": "Keep the frozen weights of experts packed: as mxfp4, which is exact for GPT-OSS, as nf4, or as fp8."},
    )
    load_in_4bit: bool = field(
        default=False,
        metadata={"help": "Keep the frozen linear weights under the adapters in four bits (QLoRA: NF4, scales in eight bits)."},
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Tokenizer on the hub or a local folder; 'bytes' for UTF-8 bytes. Default: the model's."}
    )
    chat_template: str | None = field(
        default=None,
        metadata={"help": "Jinja file with generation markers; replaces the tokenizer's chat template, also in the checkpoint."},
    )
    dataset: str | None = field(
        default=None,
        metadata={"help": "Dataset on the hub, a local file or folder, 'python-stdlib', or 'key-values' (made-up documents)."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of a hub dataset."})
    dataset_split: str | None = field(default=None, metadata={"help": "Split to train on. Default: train."})
    text_column: list[str] | None = field(
        default=None, metadata={"help": "Column with the text of a document; several columns are joined. Default: text."}
    )
    column_separator: str | None = field(default=None, metadata={"help": "Text between joined columns. Default: an empty line."})
    messages_column: str | None = field(
        default=None,
        metadata={
            "help": "Column with conversations, whose messages have role and content, or from and value. Loss on what the "
            "assistant says only."
        },
    )
    prompt_column: str | None = field(default=None, metadata={"help": "Column with prompts; needs completion_column."})
    completion_column: str | None = field(
        default=None, metadata={"help": "Column with completions of the prompts; loss on these."}
    )
    datasets: list[str] | None = field(
        default=None,
        metadata={
            "help": "Several datasets, instead of dataset. Each entry has a path and, if needed, config, split, max_documents, "
            "the column settings above, and weight, its share of the documents in the mix."
        },
    )
    mix_until: Literal["first_exhausted", "all_exhausted"] = field(
        default="first_exhausted",
        metadata={
            "help": "How large a weighted mix is: first_exhausted takes no document twice; all_exhausted takes every document, "
            "and repeats those of the other datasets."
        },
    )
    max_document_chars: int | None = field(default=None, metadata={"help": "Leave out texts with more characters."})
    max_documents: int | None = field(default=None, metadata={"help": "Use at most this many documents, drawn by seed."})
    eval_documents: int = field(
        default=0, metadata={"help": "Number of documents to hold out for the loss before and after training."}
    )
    eval_dataset: str | None = field(
        default=None,
        metadata={"help": "Hold out this dataset instead: a path with the columns of dataset, or an entry as in datasets."},
    )
    needle_lengths: list[int] | None = field(
        default=None,
        metadata={
            "help": "Lengths in tokens of needle documents, which hide something and ask for it at the end. Evaluates a grid of "
            "them before and after training, with pictures, and the held-out loss by position."
        },
    )
    needle_depths: list[float] | None = field(
        default=None, metadata={"help": "Where the needle is hidden, from 0 to 1. Default: 0, 0.25, 0.5, 0.75 and 1."}
    )
    needle_documents: int = field(default=4, metadata={"help": "Number of documents for every length and depth."})
    needle_task: Literal["passkeys", "key-values"] = field(
        default="passkeys", metadata={"help": "What to hide: a pass key in text, or a key's value as in the dataset key-values."}
    )
    needle_base: bool = field(
        default=False,
        metadata={"help": "Also measure the checkpoint without rope_scaling; every rank loads it whole, a second time."},
    )
    resume: Literal["never", "auto"] = field(
        default="never",
        metadata={
            "help": "'auto': go on from the newest checkpoint in output_dir, or start anew if there is none, so that a job which "
            "is stopped and started again needs no other command. 'never': start anew, unless resume_from_checkpoint names one."
        },
    )
    expected_world_size: int | None = field(default=None, metadata={"help": "Stop at the start unless this many ranks run."})

    def __post_init__(self) -> None:
        if (self.model_name_or_path is None) == (self.model_config is None):
            raise ValueError("give exactly one of model_name_or_path (a checkpoint) and model_config (random weights)")
        self._check_adapters()
        if self.rope_scaling is not None and self.model_config is not None:
            raise ValueError("rope_scaling extends a checkpoint; with model_config, set max_position_embeddings in it instead")
        for name in ("model_config", "config_overrides"):
            _from_json(getattr(self, name) or "{}", name)
        if (self.dataset is None) == (self.datasets is None):
            raise ValueError(
                "give exactly one of dataset (a hub name, a local file or folder, or 'python-stdlib') and datasets (a list of "
                "entries with a path)"
            )
        if given := [name for name in _SHORT_FORMS if self.datasets is not None and getattr(self, name) is not None]:
            raise ValueError(f"{given[0]} belongs to dataset; with datasets, give {_SHORT_FORMS[given[0]]} in its entries")
        if self.eval_documents < 0:
            raise ValueError(f"eval_documents is {self.eval_documents}; give 0 or more")
        if self.eval_dataset is not None and self.eval_documents:
            raise ValueError("give either eval_documents (held out of the training data) or eval_dataset, not both")
        check_sources(self.sources, self.eval_source)
        self._check_needles()
        if self.mix_until != "first_exhausted" and self.sources[0].weight is None:
            raise ValueError(f"mix_until {self.mix_until} has no effect without weights; give every dataset a weight")

    def _check_needles(self) -> None:
        is_changed = self.needle_documents != 4 or self.needle_task != "passkeys" or self.needle_base
        if self.needle_lengths is None and (is_changed or self.needle_depths is not None):
            raise ValueError(
                "needle_depths, needle_documents, needle_task and needle_base have no effect without needle_lengths; give "
                "lengths, or leave them out"
            )
        if self.needle_base and self.rope_scaling is None:
            raise ValueError("needle_base compares with the checkpoint without rope_scaling; set rope_scaling, or leave it out")
        sources = [*self.sources, *([self.eval_source] if self.eval_source is not None else [])]
        is_made_up = self.needle_task == KEY_VALUES or any(source.path == KEY_VALUES for source in sources)
        if is_made_up and self.tokenizer != "bytes":
            raise ValueError(f"{KEY_VALUES} are made of bytes, but tokenizer is {self.tokenizer}; set tokenizer: bytes")

    def _check_adapters(self) -> None:
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank is {self.lora_rank}; give a positive rank, or 0 to train all weights")
        for name in ("lora_alpha", "lora_targets"):
            if getattr(self, name) is not None and not self.lora_rank:
                raise ValueError(f"{name} has no effect without adapters; set lora_rank, or leave it out")
        if self.pack_experts and not self.lora_rank:
            raise ValueError("pack_experts freezes experts, and needs adapters; set lora_rank, or leave it out")
        if self.lora_experts and not self.lora_rank:
            raise ValueError("lora_experts has no effect without adapters; set lora_rank, or leave it out")
        if self.load_in_4bit and not self.lora_rank:
            raise ValueError("load_in_4bit freezes all weights, so nothing is left to train; set lora_rank, or leave it out")
        if self.load_in_4bit and find_spec("bitsandbytes") is None:
            raise ValueError("load_in_4bit needs bitsandbytes, which is not installed; pip install 'hf_longctx[qlora]'")
        if self.lora_rank and self.model_config is not None:
            raise ValueError(
                "lora_rank saves adapters only, and random weights from model_config would be lost; give model_name_or_path"
            )
        if self.lora_alpha is not None and self.lora_alpha <= 0:
            raise ValueError(f"lora_alpha is {self.lora_alpha}; give more than 0 or leave it out")

    @property
    def sources(self) -> list[Source]:
        """The datasets to train on."""
        if self.datasets is not None:
            return [Source.from_mapping(_from_json(entry, "datasets"), "datasets") for entry in self.datasets]
        return [Source.from_mapping({"path": self.dataset, **self._short_forms()}, "dataset")]

    @property
    def eval_source(self) -> Source | None:
        """The dataset to hold out, if `eval_dataset` names one."""
        if self.eval_dataset is None:
            return None
        if self.eval_dataset.lstrip().startswith("{"):
            return Source.from_mapping(_from_json(self.eval_dataset, "eval_dataset"), "eval_dataset")
        columns = {key: value for key, value in self._short_forms().items() if key.endswith(("_column", "_separator"))}
        return Source.from_mapping({"path": self.eval_dataset, **columns}, "eval_dataset")

    def _short_forms(self) -> dict[str, Any]:
        return {key: getattr(self, name) for name, key in _SHORT_FORMS.items() if getattr(self, name) is not None}


def main(settings: list[str] | None = None, callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Reads settings, trains, evaluates before and after, and saves a checkpoint that plain transformers can load.

    settings: the words of the command line, unless this process has its own. callbacks: more callbacks of the trainer.
    """
    recipe, config, args = read_settings((RecipeArguments, LongContextConfig, TrainingArguments), settings)
    check_world(args, recipe.expected_world_size)
    set_seed(args.seed)
    keep_quiet(args)
    if "long_sequences" not in given_settings(settings):
        config = with_cuts(config, recipe)
    tokenizer = load_tokenizer(recipe)
    # settings before data and data before the model, because errors in them are found faster
    check_fit(recipe, config, tokenizer)
    documents = load_documents(recipe, config, tokenizer, args)
    say(args, "\n".join(documents.lines))
    try:
        model = with_adapters(load_model(recipe, config), recipe)
    except OSError as error:
        raise SystemExit(f"model_name_or_path {recipe.model_name_or_path}: {str(error).splitlines()[0]}") from error
    trainer = LongContextTrainer(
        model=model,
        args=args,
        train_dataset=documents.train,
        eval_dataset=documents.held_out,
        processing_class=tokenizer,
        callbacks=list(callbacks),
        longctx_config=config,
    )
    say(args, describe(trainer, model))
    # before an evaluation that takes minutes
    trainer.longctx_run.report.open(args, trainer.get_train_dataloader())
    add_needles(trainer, recipe, documents.held_out)
    before = trainer.evaluate() if documents.held_out is not None else {}
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(args, recipe.resume))
    if trainer.stopped_by:
        say(args, f"stopped by {trainer.stopped_by} after step {trainer.state.global_step}; --resume auto goes on from there")
        leave()
        return
    after = trainer.evaluate() if documents.held_out is not None else {}
    trainer.save_model()
    if documents.held_out is not None:
        say(args, f"held-out perplexity: {before['eval_perplexity']:.2f} before, {after['eval_perplexity']:.2f} after")
        if args.should_save:
            write_held_out(trainer, Path(args.output_dir), after["eval_loss"])
    loader = (
        "PeftModel.from_pretrained loads it onto the base model"
        if recipe.lora_rank
        else "AutoModelForCausalLM.from_pretrained loads it"
    )
    say(args, f"checkpoint: {args.output_dir}  ({loader})")
    leave()


def keep_quiet(args: TrainingArguments) -> None:
    """Leaves warnings to rank 0, since all ranks have the same, and progress bars to rank 0 on a terminal, where lines wrap."""
    # handles the warnings of loggers that have no handler
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(ScreenFormatter())
    if args.process_index:
        logging.getLogger("hf_longctx").setLevel(logging.ERROR)
        args.log_level_replica = "error"
        warnings.simplefilter("ignore")
    if args.process_index or not sys.stderr.isatty():
        # in a file every bar is printed many times
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()


class ScreenFormatter(logging.Formatter):
    """Breaks messages between words where standard error is a terminal, which would break them inside words."""

    def format(self, record: logging.LogRecord) -> str:
        return on_screen(super().format(record), sys.stderr)


def with_cuts(config: LongContextConfig, recipe: RecipeArguments) -> LongContextConfig:
    """The config for settings that do not say what becomes of rows above max_length: texts are split, others lose their tail.

    A split conversation would train answers without their questions. Documents that are made up here fit, or are an error.
    """
    if any(source.path == KEY_VALUES for source in recipe.sources):
        return config
    is_text = all(source.text_column for source in recipe.sources)
    return replace(config, long_sequences="split" if is_text else "truncate")


def check_fit(recipe: RecipeArguments, config: LongContextConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Exits for a max_length or tokenizer that does not fit the model, before data is tokenised."""
    try:
        problems = fit_problems(model_config(recipe, config), tokenizer, config)
    except (OSError, KeyError):
        # loading the model says what is wrong with its config
        return
    except (ValueError, StrictDataclassError) as error:
        problems = [" ".join(str(error).split())]
    if problems:
        raise SystemExit("\n".join(f"settings: {problem}" for problem in problems))


def checkpoint_to_resume(args: TrainingArguments, resume: str) -> str | bool | None:
    """The argument of `Trainer.train`: a folder, True for the newest checkpoint, or None to start anew; equal on all ranks."""
    if resume == "never":
        return args.resume_from_checkpoint
    if args.resume_from_checkpoint is not None:
        raise SystemExit(f"resume is 'auto' and resume_from_checkpoint is {args.resume_from_checkpoint!r}; leave one of them out")
    # a checkpoint that a kill left hidden is brought into view when the training starts, which starts anew if there is none
    return True


def leave() -> None:
    """Waits for all ranks and closes their connections."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def add_needles(trainer: LongContextTrainer, recipe: RecipeArguments, held_out: datasets.Dataset | None) -> None:
    """Adds a needle grid at the beginning and end of training, if the settings ask for it."""
    if recipe.needle_lengths is None:
        return
    make = key_value_needle if recipe.needle_task == "key-values" else passkeys(trainer.processing_class)
    depths = _NEEDLE_DEPTHS if recipe.needle_depths is None else tuple(recipe.needle_depths)
    needles = NeedleTask(tuple(recipe.needle_lengths), depths, make, recipe.needle_documents)
    evaluation = LongContextEvaluation(trainer, held_out, needles)
    trainer.add_callback(evaluation)
    if recipe.needle_base:
        config = checkpoint_config(recipe)
        settings = {"config": config, "dtype": recipe.dtype, **four_bits(recipe)}
        base = AutoModelForCausalLM.from_pretrained(recipe.model_name_or_path, **settings)
        evaluation.measure(base, "base, not extended")


def check_world(args: TrainingArguments, expected: int | None) -> None:
    """Prints the number of ranks, and exits if it is not the expected one: a launcher may start fewer without saying so."""
    backend = dist.get_backend() if dist.is_initialized() else "no process group"
    say(args, f"{counted(args.world_size, 'rank')} on {args.device.type}, {backend}")
    if expected is not None and args.world_size != expected:
        raise SystemExit(
            f"{args.world_size} rank(s) started, but expected_world_size is {expected}; launch with `accelerate launch "
            f"--config_file recipes/accelerate/cpu.yaml` (or gpu.yaml) and set num_processes there, or change expected_world_size"
        )


def load_tokenizer(recipe: RecipeArguments) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that the settings name, or else the model's, and gives it the settings' chat template."""
    if recipe.tokenizer == "bytes":
        tokenizer: PreTrainedTokenizerBase = ByT5Tokenizer(extra_ids=0)
    else:
        tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer or recipe.model_name_or_path)
    if recipe.chat_template is not None:
        path = Path(recipe.chat_template)
        if not path.is_file() or not path.read_text().strip():
            raise SystemExit(f"chat_template {path} {'is empty' if path.is_file() else 'does not exist'}; give a Jinja file")
        tokenizer.chat_template = path.read_text()
    return tokenizer


def load_model(recipe: RecipeArguments, longctx_config: LongContextConfig) -> PreTrainedModel:
    """Loads the checkpoint, or makes random weights from the given config.

    A rank holds only its stage of a checkpoint, if possible, and of sharded parameters only its shards. Experts in four bits are
    packed while they are read, as the trainer starts.
    """
    path, settings = recipe.model_name_or_path, {"dtype": recipe.dtype, **four_bits(recipe)}
    config = model_config(recipe, longctx_config)
    if path is None:
        return AutoModelForCausalLM.from_config(config, **settings)
    packs = bool(recipe.pack_experts)
    if longctx_config.asked_stages not in (1, "auto") and not recipe.config_overrides:
        return load_pipeline_stage(path, longctx_config, packs_experts=packs, config=config, **settings)
    if not longctx_config.may_have_stages and not recipe.load_in_4bit:
        return load_sharded(path, longctx_config, packs_experts=packs, config=config, **settings)
    return AutoModelForCausalLM.from_pretrained(path, config=config, **settings)


def model_config(recipe: RecipeArguments, longctx_config: LongContextConfig) -> PretrainedConfig:
    """The config of the model that the settings name, with as many positions as they ask for."""
    if recipe.model_name_or_path is None:
        assert recipe.model_config is not None
        return AutoConfig.for_model(**json.loads(recipe.model_config))
    config = checkpoint_config(recipe)
    if recipe.rope_scaling is not None and longctx_config.max_length is not None:
        config = extend_positions(config, longctx_config.max_length, recipe.rope_scaling)
    return config


def four_bits(recipe: RecipeArguments) -> dict[str, Any]:
    """Arguments that load the weights quantised as in QLoRA, with products in the model's dtype; empty without load_in_4bit."""
    if not recipe.load_in_4bit:
        return {}
    compute = getattr(torch, recipe.dtype)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    return {"quantization_config": quantised}


def checkpoint_config(recipe: RecipeArguments) -> PretrainedConfig:
    """The checkpoint's config with `config_overrides`, without rope scaling."""
    return AutoConfig.from_pretrained(recipe.model_name_or_path, **json.loads(recipe.config_overrides or "{}"))


def with_adapters(model: PreTrainedModel, recipe: RecipeArguments) -> PreTrainedModel | PeftModel:
    """Adds LoRA adapters to the model if the settings ask for them; exits for targets that the model does not have."""
    if not recipe.lora_rank:
        return model
    settings: dict[str, Any] = {"r": recipe.lora_rank, "lora_alpha": recipe.lora_alpha or 2 * recipe.lora_rank}
    targets = recipe.lora_targets or "all-linear"
    if recipe.lora_experts:
        settings["target_parameters"] = expert_weights(model)
        if not settings["target_parameters"]:
            raise SystemExit(f"lora_experts: {type(model).__name__} has no experts whose weights may have adapters; leave it out")
    if towers := tower_names(model):
        # rows of text never reach them
        settings["exclude_modules"] = rf"({'|'.join(map(re.escape, towers))})(\..*)?"
    try:
        adapted = get_peft_model(model, LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **settings))
    except ValueError as error:
        raise SystemExit(f"lora_targets: {error}") from error
    if recipe.pack_experts:
        try:
            pack_experts(adapted, recipe.pack_experts)
        except ValueError as error:
            raise SystemExit(f"pack_experts: {error}") from error
    return adapted


def load_documents(
    recipe: RecipeArguments, config: LongContextConfig, tokenizer: PreTrainedTokenizerBase, args: TrainingArguments
) -> Documents:
    """Loads training and held-out tokens; the first process of a machine tokenises, the others read its cache."""
    most_tokens = config.max_length if config.long_sequences == "error" else None
    with args.main_process_first(desc="tokenise"):
        try:
            return load_tokens(
                recipe.sources,
                tokenizer,
                args.seed,
                held_out=recipe.eval_source or recipe.eval_documents,
                max_document_chars=recipe.max_document_chars,
                mix_until=recipe.mix_until,
                most_tokens=most_tokens,
            )
        except DataError as error:
            raise SystemExit(f"data: {error}") from error


def describe(trainer: LongContextTrainer, model: PreTrainedModel | PeftModel) -> str:
    """Describes model and data in one paragraph, for before the run starts."""
    dataloader = trainer.get_train_dataloader()
    lengths = sorted(dataloader.dataset.index.lengths.tolist())
    trained = ""
    if isinstance(model, PeftModel):
        model = model.get_base_model()
        trained = f", {model.num_parameters(only_trainable=True) / 1e6:.1f} million of them trained"
    return (
        f"{type(model).__name__} with {model.num_parameters() / 1e6:.1f} million parameters{trained}; {len(lengths)} sequences "
        f"of {lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}); {len(dataloader)} steps per epoch"
    )


def write_held_out(trainer: LongContextTrainer, folder: Path, loss: float) -> None:
    """Writes the held-out sequences, their labels and loss to held_out.json, for `recipes/evaluate.py` to check."""
    dataset = trainer.get_eval_dataloader().dataset
    index, rows = dataset.index, dataset.dataset.with_format(None)
    held_out: dict[str, Any] = {"loss": loss}
    for column in rows.column_names:
        held_out[column] = [
            rows[int(row)][column][start:stop] for row, start, stop in zip(index.rows, index.starts, index.stops, strict=True)
        ]
    (folder / "held_out.json").write_text(json.dumps(held_out))


def say(args: TrainingArguments, text: str) -> None:
    """Prints on rank 0."""
    if args.process_index == 0:
        print(on_screen(text, sys.stdout), flush=True)


def _from_json(text: str, setting: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{setting} is nested too deeply; give fewer lists and objects inside each other") from None
    except ValueError as error:
        raise ValueError(f"{setting} is not valid JSON: {error}") from None


if __name__ == "__main__":
    with refusals_last():
        main()
