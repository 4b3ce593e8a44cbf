"""axolotl's plugin: its YAML, data and models, under plans. axolotl imports this module, and nothing of ours does.

    plugins:
      - hf_longctx.integrations.axolotl.LongContextPlugin
    long_context:
      parameters: sharded

`register` translates the file before axolotl checks it (`hf/rules/axolotl.py`), and trainers under plans replace axolotl's for
supervised training and for DPO. Source: axolotl 0.19.0, `integrations/base.py`, `train.py`, `core/builders` and `core/trainers`.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer
from axolotl.core.trainers.mixins import OptimizerMixin, SchedulerMixin
from axolotl.integrations.base import BasePlugin, PluginManager
from peft import PeftModel
from pydantic import BaseModel
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import DataCollatorForSeq2Seq, Trainer, set_seed
from trl.trainer.utils import use_adapter

from hf_longctx.hf.log_probs.documents import FUSED
from hf_longctx.hf.log_probs.two_passes import ROUTED
from hf_longctx.hf.ranks.launch import LaunchEnvironment, on_first_rank
from hf_longctx.hf.rules.axolotl import DPO_LOSSES, AxolotlSettings, from_axolotl
from hf_longctx.hf.trainer.trainer import LongContextMixin
from hf_longctx.runtime.core.loss import IGNORE_INDEX

logger = logging.getLogger(__name__)
logger.addFilter(on_first_rank)

# the name in the YAML
PLUGIN = f"{__name__}.LongContextPlugin"


class LongContextArgs(BaseModel):
    """Fields of the YAML that this plugin reads."""

    long_context: dict[str, Any] | None = None


class AxolotlLongContextTrainer(LongContextMixin, SchedulerMixin, OptimizerMixin, Trainer):  # type: ignore[misc]
    """Trainer of axolotl's supervised trainings, with axolotl's optimizer groups and schedules, under plans."""

    def __init__(
        self,
        *args: Any,
        eval_data_collator: Any = None,
        bench_data_collator: Any = None,
        dataset_tags: Any = None,
        **kwargs: Any,
    ) -> None:
        """Takes the arguments of axolotl's trainers; their collators pad, and are not used."""
        super().__init__(*args, longctx_config=_settings().config, **kwargs)


def pair_losses(kind: str, ratios_2P: Tensor, tokens_2P: Tensor, beta: float, smoothing: float) -> Tensor:
    """Returns the loss of each of P pairs, whose first row is the chosen answers and whose second the rejected ones.

    kind: one of `DPO_LOSSES`. ratios_2P: log-probabilities of answers, minus those of the reference. tokens_2P: their tokens.
    Sources: DPO (arXiv 2305.18290, eq. 7), hinge (2305.10425), IPO (2310.12036, eq. 17, of means over tokens, as in TRL), robust
    (2403.00409, eq. 12).
    """
    margins_P = beta * (ratios_2P[0] - ratios_2P[1])
    means_2P = ratios_2P / tokens_2P.clamp(min=1)
    match kind:
        case "sigmoid":
            return -logsigmoid(margins_P)
        case "sigmoid_norm":
            return -logsigmoid(beta * (means_2P[0] - means_2P[1]))
        case "hinge":
            return torch.relu(1 - margins_P)
        case "ipo":
            return (means_2P[0] - means_2P[1] - 1 / (2 * beta)) ** 2
        case "robust":
            return (smoothing * logsigmoid(-margins_P) - (1 - smoothing) * logsigmoid(margins_P)) / (1 - 2 * smoothing)
    raise ValueError(f"dpo_loss_type has {kind!r}; name one of {', '.join(DPO_LOSSES)}")


class DPOOfLogProbs(AxolotlDPOTrainer):  # type: ignore[misc]
    """axolotl's DPO trainer with a loss of log-probabilities alone: that of the TRL it imports is made from whole logits."""

    # version of TRL whose other methods are tested
    longctx_trl = "1.9"

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Tensor:
        """Returns the mean loss of this rank's pairs, and adds TRL's metrics. Collective over all ranks.

        inputs: input_ids, attention_mask and completion_mask [2P, S], chosen answers first.
        """
        if return_outputs:
            raise ValueError("compute_metrics would get whole logits, which plans never make; leave it out")
        mask = inputs["completion_mask"]
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        batch |= {"labels": batch["input_ids"].masked_fill(mask == 0, IGNORE_INDEX), "use_cache": False, FUSED: True}
        values = model(**batch, **({ROUTED: True} if self.aux_loss_enabled else {}))
        with torch.no_grad(), self._as_reference():
            reference = (self.model if self.ref_model is None else self.ref_model)(**batch)
        own_2P, given_2P = (each.log_probs.sum(dim=1).view(2, -1) for each in (values, reference))
        ratios_2P, weights_P = own_2P - given_2P, torch.ones_like(own_2P[0])
        mask_BS = mask[:, 1:]
        if self.use_weighting:
            # WPO, arXiv 2406.11827, eq. 2
            with torch.no_grad():
                aligned_BS = (values.log_probs - values.log_sum_sq_probs) * mask_BS
                weights_P = (aligned_BS.sum(dim=1) / mask_BS.sum(dim=1).clamp(min=1)).exp().view(2, -1).prod(dim=0)
        tokens_2P, loss = mask.sum(dim=1).view(2, -1), own_2P.new_zeros(())
        for kind, weight in zip(self.loss_types, self.loss_weights, strict=True):
            losses_P = pair_losses(kind, ratios_2P, tokens_2P, self.beta, self.label_smoothing)
            loss = loss + weight * (losses_P * weights_P).mean()
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * values.aux_loss
            self._metrics["train" if self.model.training else "eval"]["aux_loss"].append(values.aux_loss.item())
        self._add_metrics(values, mask_BS, self.beta * ratios_2P.detach(), own_2P.detach(), inputs["attention_mask"].sum())
        return loss

    def _as_reference(self) -> AbstractContextManager[Any]:
        """Context in which a model with adapters is its own reference."""
        model = self.accelerator.unwrap_model(self.model)
        if self.ref_model is not None or not isinstance(model, PeftModel):
            return nullcontext()
        found: AbstractContextManager[Any] = use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)
        return found

    @torch.no_grad()
    def _add_metrics(self, values: Any, mask_BS: Tensor, rewards_2P: Tensor, own_2P: Tensor, num_tokens: Tensor) -> None:
        """Adds means over the pairs and tokens of all ranks, by TRL's names, to those of the next entry of the log."""
        pairs = num_tokens.new_tensor(rewards_2P.shape[1])
        logits_2, right_2, of_answers_2 = (
            (each * mask_BS).reshape(2, -1).sum(dim=1) for each in (values.mean_logits, values.is_top1, mask_BS)
        )
        sums = [(values.entropy * mask_BS).sum(), *logits_2, right_2[0], *rewards_2P.sum(dim=1), *own_2P.sum(dim=1)]
        sums += [(rewards_2P[0] > rewards_2P[1]).sum(), *of_answers_2, pairs, num_tokens]
        totals = self.accelerator.reduce(torch.stack([each.double() for each in sums]), "sum").tolist()
        entropy, for_chosen, for_rejected, right, chosen, rejected, own, others, is_better, *counts = totals
        of_chosen, of_rejected, num_pairs, tokens = counts
        found = self._metrics["train" if self.model.training else "eval"]
        for name, value, count in (
            ("entropy", entropy, of_chosen + of_rejected),
            ("logits/chosen", for_chosen, of_chosen),
            ("logits/rejected", for_rejected, of_rejected),
            ("mean_token_accuracy", right, of_chosen),
            ("rewards/chosen", chosen, num_pairs),
            ("rewards/rejected", rejected, num_pairs),
            ("rewards/accuracies", is_better, num_pairs),
            ("rewards/margins", chosen - rejected, num_pairs),
            ("logps/chosen", own, num_pairs),
            ("logps/rejected", others, num_pairs),
        ):
            found[name].append(value / max(count, 1))
        if self.model.training:
            self._total_train_tokens += int(tokens)
        found["num_tokens"] = [self._total_train_tokens]


class AxolotlLongContextDPOTrainer(LongContextMixin, DPOOfLogProbs):  # type: ignore[misc]
    """axolotl's DPO trainer under plans, with its rows, reference, optimizer groups and schedules."""

    def __init__(self, model: Any, ref_model: Any = None, **kwargs: Any) -> None:
        """Takes the arguments of axolotl's trainer."""
        # the adapters, which TRL draws, must be equal on all ranks
        set_seed(kwargs["args"].seed)
        if kwargs.get("compute_metrics") is not None:
            raise ValueError("compute_metrics would get whole logits, which plans never make; leave it out")
        super().__init__(model=model, ref_model=ref_model, longctx_config=_settings().config, **kwargs)
        if self.ref_model is None and not isinstance(self.accelerator.unwrap_model(self.model), PeftModel):
            raise ValueError("DPO has no reference model, and the model has no adapters to leave out; give one as ref_model")


def _settings() -> AxolotlSettings:
    found: AxolotlSettings = PluginManager.get_instance().plugins[PLUGIN].settings
    return found


class LongContextPlugin(BasePlugin):  # type: ignore[misc]
    """Runs axolotl's supervised trainings and DPO under plans; see docs/guides/axolotl.md."""

    settings: AxolotlSettings
    # the trainer, until the model is saved
    _trainer: AxolotlLongContextTrainer | AxolotlLongContextDPOTrainer | None = None

    def register(self, cfg: Any) -> None:
        """Translates the YAML in place. Raises ValueError naming every field that has no counterpart."""
        self.settings = from_axolotl(cfg, LaunchEnvironment.read())
        for line in self.settings.lines:
            logger.warning("%s", line)
        for name, value in self.settings.changes.items():
            if value is not None:
                cfg[name] = value
            elif name in cfg:
                del cfg[name]
        if cfg.get("rl"):
            # axolotl makes the trainer of a plugin without a model here
            cfg["trainer_cls"] = f"{__name__}.{AxolotlLongContextDPOTrainer.__name__}"

    def get_input_args(self) -> str:
        return f"{__name__}.{LongContextArgs.__name__}"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Says where models are loaded, once all is known of the machine; axolotl then loads the sets itself."""
        is_whole = self.settings.config.parameters == "replicated" and not self.settings.config.may_have_stages
        if not torch.cuda.is_available() or not (is_whole or cfg.load_in_4bit or cfg.load_in_8bit):
            # the trainer moves shards and stages to devices
            cfg.device_map, cfg.experimental_skip_move_to_device = "cpu", True

    def pre_model_load(self, cfg: Any) -> None:
        """Seeds the draws of new weights, such as adapters, which must be equal on all ranks."""
        set_seed(cfg.seed)

    def get_trainer_cls(self, cfg: Any) -> type[Trainer] | None:
        return None if cfg.rl else AxolotlLongContextTrainer

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Fields of `TrainingArguments` that axolotl would set by other steps, ranks or devices."""
        arguments: dict[str, Any] = {**self.settings.arguments}
        if not torch.cuda.is_available():
            arguments["use_cpu"] = True
        if self.settings.config.tokens_per_step is not None:
            # axolotl counted packs or rows
            arguments["max_steps"] = cfg.max_steps or -1
            if cfg.warmup_steps is None:
                arguments["warmup_steps"] = 0.03 if cfg.warmup_ratio is None else cfg.warmup_ratio
        return arguments

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[type, dict[str, Any]]:
        """The collator of transformers, whose effect on rows plans know; axolotl's does the same."""
        return DataCollatorForSeq2Seq, {}

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Raises ValueError if another plugin has brought the trainer."""
        if not isinstance(trainer, AxolotlLongContextTrainer | AxolotlLongContextDPOTrainer):
            raise ValueError(
                f"the trainer is {type(trainer).__name__}, so that no plans would run; name {PLUGIN} before other plugins"
            )
        self._trainer = trainer

    def post_train(self, cfg: Any, model: Any) -> None:
        """Saves the trained model on all ranks; axolotl would save the part that the first rank holds. Collective."""
        if self._trainer is None:
            return
        trainer, self._trainer = self._trainer, None
        trainer.save_model(cfg.output_dir)
        for each in {id(each): each for each in (model, trainer.model)}.values():
            vars(each)["save_pretrained"] = lambda *_, **__: None
