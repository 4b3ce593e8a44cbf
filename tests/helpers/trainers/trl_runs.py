"""Trainers of TRL on tiny models: stock in one process, and under plans in every supported way."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import datasets
import peft
import torch
import torch.distributed as dist
import transformers
from helpers.models.chats import conversation, word_tokenizer
from helpers.models.tiny_models import MOE_FAMILIES, ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import LossRecorder
from safetensors.torch import save_file

from hf_longctx import LongContextCallback, LongContextMixin

_WORDS = ["the", "cat", "sat", "on", "mat", "and", "said", "hello", "to", "you", "what", "is", "it", "an", "answer", "question"]
NUM_STEPS = 4


def text(start: int, num_words: int) -> str:
    return " ".join(_WORDS[(start * 7 + i * (1 + start % 3)) % len(_WORDS)] for i in range(num_words))


# skewed lengths; no two rows of a step are equal
LENGTHS = [(3, 40), (5, 6), (2, 9), (8, 3), (4, 14), (1, 5), (6, 21), (7, 2)] * 2


def rows_of(kind: str) -> datasets.Dataset:
    """16 rows of text, of prompts and completions, of conversations, of prompts with a chosen and a rejected answer, of prompts
    with an answer and its label, or of prompts."""
    pairs = [(text(i, n), text(i + 5, m)) for i, (n, m) in enumerate(LENGTHS)]
    make: dict[str, Any] = {
        "text": lambda a, b: {"text": f"{a} {b}"},
        "completion": lambda a, b: {"prompt": a, "completion": f" {b}"},
        "chat": lambda a, b: {"messages": conversation(a, b, a, "hello")},
        "preference": lambda a, b: {"prompt": a, "chosen": f" {b}", "rejected": f" {b[: len(b) // 2]} hello"},
        "unpaired": lambda a, b: {"prompt": a, "completion": f" {b}", "label": len(b) % 3 > 0},
        "reward": lambda a, b: {"chosen": f"{a} {b}", "rejected": f"{a} {b[: len(b) // 2]} hello", "margin": len(b) % 3 / 10},
        "prompt": lambda a, b: {"prompt": a},
        "prompt, rloo": lambda a, b: {"prompt": a},
        "prompt, rollout": lambda a, b: {"prompt": a},
    }
    return datasets.Dataset.from_list([make[kind](a, b) for a, b in pairs])


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that differ between the completions of a prompt."""
    return [(3 * sum(ids) + len(ids)) % 7 / 7 for ids in completion_ids]


def generating(base: Any) -> Any:
    """A trainer of TRL whose completions follow from prompts and places alone: sampled ones depend on the number of ranks."""

    class Tabled(base):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            first, eos = self.accelerator.process_index * len(prompt_ids), self.processing_class.eos_token_id
            numbers = [sum(ids) + 3 * (first + place) for place, ids in enumerate(prompt_ids)]
            made = [[*(6 + (number * (i + 2)) % 20 for i in range(3 + number % 9)), eos] for number in numbers]
            return (made, None) if any("GRPO" in each.__name__ for each in base.__mro__) else made

    return Tabled


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions as of `generating`, in which an environment has written the second token."""
    ids: list[list[int]] = trainer.processing_class(prompts)["input_ids"]
    made, _ = generating(type(trainer))._generate_single_turn(trainer, ids)
    masks = [[int(place != 1) for place, _ in enumerate(each)] for each in made]
    return {"prompt_ids": ids, "completion_ids": made, "logprobs": [[0.0] * len(each) for each in made], "env_mask": masks}


def trl_arguments(config_class: Any, folder: str, **changes: Any) -> Any:
    """Arguments for a short and quiet run on CPU: 8 rows per step over all ranks (`rows_per_step`), in the dataset's order."""
    rows_per_step = changes.pop("rows_per_step", 8)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    settings: dict[str, Any] = {
        **{"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True},
        **{
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": rows_per_step // num_ranks,
            "train_sampling_strategy": "sequential",
        },
        **{"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.5, "lr_scheduler_type": "linear"},
        **{"gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no"},
    }
    if config_class.__name__ in ("GRPOConfig", "RLOOConfig"):
        settings |= {"num_generations": 2, "max_completion_length": 12, "shuffle_dataset": False, "disable_dropout": True}
    else:
        settings["max_length"] = None
    return config_class(**{**settings, **changes})


def trainer_name(kind: str) -> str:
    """The trainer of TRL that takes rows of this kind, without the ending."""
    names = {"preference": "DPO", "unpaired": "KTO", "reward": "Reward", "prompt": "GRPO", "prompt, rloo": "RLOO"}
    return {**names, "prompt, rollout": "GRPO"}.get(kind, "SFT")


def models_of(kind: str, case: ModelCase, arguments: dict[str, Any], has_own: bool = False) -> dict[str, Any]:
    """Arguments of a trainer of TRL that name its models; the trainer itself adds the adapters of the case, unless `has_own`."""
    head = (("num_labels", 1),) if kind == "reward" else ()
    if has_own:
        return {"model": build_model(replace(case, head=head))}
    models: dict[str, Any] = {"model": build_model(replace(case, lora=(), head=head))}
    if case.lora:
        models["peft_config"] = peft.LoraConfig(task_type="SEQ_CLS" if head else "CAUSAL_LM", **dict(case.lora))
    elif kind in ("preference", "unpaired") and not arguments.get("precompute_ref_log_probs"):
        models["ref_model"] = build_model(case).eval()
    return models


def train_trl(
    kind: str, how: str, case: ModelCase, config: dict[str, Any], arguments: dict[str, Any]
) -> tuple[list[float], list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Trains on this rank; returns the losses of all steps, the log, and the weights.

    kind: kind of rows, see `rows_of`. how: "stock", "mixin", "attached" or "alone". case: the model; the trainer itself adds the
    adapters, unless arguments have "own_adapters". config: settings of the plans.
    """
    import trl

    arguments = dict(arguments)
    has_own = arguments.pop("own_adapters", False)
    losses: list[float] = []
    name = trainer_name(kind)
    base: Any = getattr(trl, f"{name}Trainer")
    samples = arguments.get("seed") is not None
    if name in ("GRPO", "RLOO") and not samples:
        base = generating(base)

    class Kept(base):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    class Planned(LongContextMixin, base):
        pass

    settings: dict[str, Any] = {"longctx_config": quiet_config(**{"self_test": True, **config})} if how == "mixin" else {}
    callback = LongContextCallback(quiet_config(**{"self_test": True, **config})) if how in ("attached", "alone") else None
    trainer_class = {"mixin": Planned, "attached": base}.get(how, Kept)
    settings |= models_of(kind, case, arguments, has_own)
    if name in ("GRPO", "RLOO"):
        settings["reward_funcs"] = reward
    if kind == "prompt, rollout":
        settings["rollout_func"] = rollout
    with tempfile.TemporaryDirectory() as folder:
        if name in ("GRPO", "RLOO"):
            # TRL loads the reference model from the model's folder
            model = settings["model"]
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(f"{folder}/base")
            save_file(model.state_dict(), f"{folder}/base/model.safetensors", metadata={"format": "pt"})
            # grouped products of experts do not support fp64
            ways = {"experts_implementation": "eager"} if case.family in MOE_FAMILIES else {}
            settings["model"] = type(model).from_pretrained(f"{folder}/base", dtype=model.dtype, **ways)
        trainer = trainer_class(
            args=trl_arguments(getattr(trl, f"{name}Config"), folder, **arguments),
            train_dataset=rows_of(kind),
            processing_class=word_tokenizer(),
            callbacks=[callback] if how == "alone" else None,
            **settings,
        )
        if how == "attached":
            callback.attach(trainer)
        recorder = LossRecorder()
        if how in ("mixin", "attached"):
            recorder.attach(trainer)
        if samples:
            transformers.set_seed(arguments["seed"])
        trainer.train()
    weights = {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    return recorder.losses or losses, trainer.state.log_history, weights
