"""axolotl's plugin: its YAML, data and models, under plans. axolotl imports this module, and nothing of ours does.

    plugins:
      - hf_longctx.integrations.axolotl.LongContextPlugin
    long_context:
      parameters: sharded

`register` translates the file before axolotl checks it (`hf/rules/axolotl.py`), and the trainer replaces axolotl's for supervised
training. Source: axolotl 0.19.0, `integrations/base.py`, `train.py`, `core/builders` and `core/trainers/mixins`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from axolotl.core.trainers.mixins import OptimizerMixin, SchedulerMixin
from axolotl.integrations.base import BasePlugin, PluginManager
from pydantic import BaseModel
from transformers import DataCollatorForSeq2Seq, Trainer, set_seed

from hf_longctx.hf.ranks.launch import LaunchEnvironment, on_first_rank
from hf_longctx.hf.rules.axolotl import AxolotlSettings, from_axolotl
from hf_longctx.hf.trainer.trainer import LongContextMixin

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
        settings = PluginManager.get_instance().plugins[PLUGIN].settings
        super().__init__(*args, longctx_config=settings.config, **kwargs)


class LongContextPlugin(BasePlugin):  # type: ignore[misc]
    """Runs axolotl's supervised trainings under plans; see docs/guides/axolotl.md."""

    settings: AxolotlSettings
    # the trainer, until the model is saved
    _trainer: AxolotlLongContextTrainer | None = None

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

    def get_trainer_cls(self, cfg: Any) -> type[Trainer]:
        return AxolotlLongContextTrainer

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
        if not isinstance(trainer, AxolotlLongContextTrainer):
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
