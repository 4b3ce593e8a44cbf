"""Runs full plans in a stock trainer: the methods that it gets while `LongContextCallback` is attached to it.

With pipeline stages each rank has one stage while the callback is attached. Afterwards the model is whole again on every rank,
unless it was loaded as one stage.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, cast

from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import HeadKind
from hf_longctx.hf.models.refusing import refuse_all
from hf_longctx.hf.models.whole_again import WholeModel
from hf_longctx.hf.ranks.agreement import raise_together
from hf_longctx.hf.ranks.loader_workers import keep_workers
from hf_longctx.hf.rules.arguments import METRICS, argument_problems, set_loss_problems
from hf_longctx.hf.rules.callbacks import ATTACHED, SIGNALS, WHOLE_LOGITS
from hf_longctx.hf.rules.collators import Collation, forward_columns
from hf_longctx.hf.rules.media import may_have_media
from hf_longctx.hf.rules.rule import Facts, refusals
from hf_longctx.hf.rules.trl import NOT_ATTACHED, image_problems, read_columns, trainer_problems
from hf_longctx.hf.run.run import RunRequest
from hf_longctx.hf.run.saver import ReplicaCheck
from hf_longctx.hf.run.sets import chosen_evaluation_set, evaluation_set_problems, evaluation_sets
from hf_longctx.hf.start.stages import own_stage
from hf_longctx.hf.trainer.open_stages import one_stage_line
from hf_longctx.hf.trainer.trainer import LongContextMixin
from hf_longctx.runtime.core.loss import TokenLoss

logger = logging.getLogger(__name__)

# attribute of a model by which accelerate knows it
_PREPARED = "_is_accelerate_prepared"


class Attaching(Protocol):
    """A callback that is attached to a trainer until `abandon`."""

    config: LongContextConfig
    stopped_by: str

    def abandon(self) -> None: ...


class AttachedMixin(LongContextMixin):
    """The training half of `LongContextMixin`; evaluation, prediction and their loaders remain the trainer's own.

    With pipeline stages no rank has a model for a stock forward, and a stock loader drops the images of tokenised rows: then
    evaluation runs under plans, too, and prediction is refused.
    """

    plans_evaluation = False
    _longctx_callback: Attaching

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains under plans; afterwards the trainer is stock again, even if the training raised.

        Unless its model was loaded as one stage: then the trainer goes on with plans until `LongContextCallback.detach`.
        """
        callback = self._longctx_callback
        try:
            with self._explained("training"):
                output = super().train(*args, **kwargs)
                callback.stopped_by = self.stopped_by
                if self.args.process_index == 0 and self.longctx_run.sets.reads_media:
                    logger.warning(
                        "the trainer is stock again, whose own loops read no images of tokenised rows; attach the callback again "
                        "before evaluate()"
                    )
                # other ranks may still read from the groups that are closed next
                self.accelerator.wait_for_everyone()
                if not self._is_loaded_stage:
                    self.give_back()
        except BaseException:
            callback.abandon()
            raise
        if not self._is_loaded_stage:
            callback.abandon()
        return output

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        if self.plans_evaluation:
            run = self.longctx_run
            raise_together(_evaluation_problems(self, run.task.kind), run.control, "the evaluation cannot run under plans")
            return super().get_eval_dataloader(eval_dataset)
        if eval_dataset is not None or self.eval_dataset is not None:
            self._refuse_images(chosen_evaluation_set(eval_dataset, self.eval_dataset)[1])
        loader: DataLoader[Any] = super(LongContextMixin, self).get_eval_dataloader(eval_dataset)
        keep_workers(loader)
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        self._refuse_images(test_dataset)
        loader: DataLoader[Any] = super(LongContextMixin, self).get_test_dataloader(test_dataset)
        return loader

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        if self.plans_evaluation:
            return super().evaluation_loop(*args, **kwargs)
        return super(LongContextMixin, self).evaluation_loop(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        if self.plans_evaluation:
            raise ValueError(
                "predict() of a stock trainer returns whole logits, which evaluation under plans never makes; use "
                "LongContextTrainer, whose predict() scores rows, or, for rows of text, call it after train() with a model that "
                "was loaded whole"
            )
        return super(LongContextMixin, self).predict(*args, **kwargs)

    def _refuse_images(self, dataset: Any) -> None:
        """Raises ValueError for rows whose images the trainer's own loader would drop, and its model take for text."""
        if may_have_media(dataset, self.model, self.processing_class):
            raise ValueError(
                "the rows to evaluate may have images, which the loader of a stock trainer drops; give the trainer this set as "
                "eval_dataset before the callback is attached, so that plans evaluate it, or use LongContextTrainer"
            )

    @property
    def _is_loaded_stage(self) -> bool:
        """Whether the model was loaded as one stage, so that no rank can get it whole."""
        return self.longctx_run.whole is not None and self.longctx_run.whole.is_loaded

    def give_back(self) -> None:
        """Makes a model that was cut into stages whole again, with the trained weights. Collective over all ranks.

        Drops the optimizer, which has states of only this rank's stage.
        """
        whole = self.longctx_run.whole
        if whole is None:
            return
        with self._explained("making the model whole"):
            self._give_back(whole)

    def _give_back(self, whole: WholeModel) -> None:
        self._switch_optimizer("eval")
        nothing: Any = None
        self._steps.forget_executor()
        self.optimizer = self.lr_scheduler = nothing
        self.callback_handler.optimizer = self.callback_handler.lr_scheduler = nothing
        # the accelerator holds the optimizer
        self.accelerator.free_memory()
        whole.gather(self.longctx_run.pool)


def lend_plans(trainer: Trainer, callback: Attaching, token_loss: TokenLoss | None, undo: ExitStack) -> None:
    """Puts `AttachedMixin` in front of the class of this one trainer instance, and starts a planned run on it."""
    stock, own, lent, config = type(trainer), set(vars(trainer)), set[str](), callback.config
    facts = ModelFacts.of(trainer.model)
    evaluates_media = any(
        may_have_media(each, facts.model, trainer.processing_class) for each in evaluation_sets(trainer.eval_dataset).values()
    )
    plans_evaluation = config.may_have_stages or evaluates_media
    problems = _attach_problems(trainer, facts, config, plans_evaluation)
    if (ranges := facts.loaded_ranges) is not None:
        undo.callback(refuse_all, facts.model, own_stage(len(ranges)), len(ranges))
    undo.callback(_unprepare, trainer)
    undo.callback(_remove_attributes, trainer, lent)
    undo.callback(setattr, trainer, "__class__", stock)
    undo.callback(setattr, trainer, "train_dataset", trainer.train_dataset)
    trainer.__class__ = type(f"LongContext{stock.__name__}", (AttachedMixin, stock), {})
    planned = cast(AttachedMixin, trainer)
    try:
        planned._longctx_callback, planned.plans_evaluation = callback, plans_evaluation
        planned._first_collator = trainer.data_collator
        args, processing_class = trainer.args, trainer.processing_class
        collation = Collation(trainer.data_collator, facts.head_kind, forward_columns(facts.base, args))
        trainer.train_dataset = read_columns(stock, trainer.train_dataset, collation.reads_all)
        sets = {"train_dataset": trainer.train_dataset}
        if planned.plans_evaluation:
            undo.callback(setattr, trainer, "eval_dataset", trainer.eval_dataset)
            trainer.eval_dataset = read_columns(stock, trainer.eval_dataset, collation.reads_all)
            sets |= evaluation_sets(trainer.eval_dataset)
        request = RunRequest(config, facts, args, processing_class, problems, sets, None, token_loss, None, True, collation)
        planned._start(request)
        run = planned.longctx_run
        if run.whole is not None:
            undo.callback(_bind_again, trainer, run.whole)
        undo.callback(run.close)
        planned.plans_evaluation = run.setup.num_stages > 1 or evaluates_media
        planned._report()
        undo.callback(run.report.console.take_over(trainer))
        planned._translated(config, args)
        if line := one_stage_line(config, "plans are attached to a trainer, which keeps its whole model by default"):
            planned._lines += (line,)
        planned._log_settings()
        undo.callback(trainer.remove_callback, run.report)
        undo.callback(trainer.remove_callback, planned._stop)
        undo.callback(trainer.remove_callback, ReplicaCheck)
        if run.whole is not None:
            run.whole.release()
    finally:
        # trainings set the attributes for which our classes have defaults
        ours = [cls for cls in AttachedMixin.__mro__ if cls.__module__.startswith("hf_longctx.")]
        lent |= {*vars(trainer), *(name for cls in ours for name in cls.__annotations__ if name in vars(cls))} - own


def _bind_again(trainer: Trainer, whole: WholeModel) -> None:
    """Binds autocast to the forward of a model that is whole again, as it is bound after any training.

    Accelerate then knows the model, so that no evaluation prepares it without DDP; a model that is still a stage is only known.
    """
    assert trainer.model is not None
    if vars(trainer.model).get(_PREPARED):
        if whole.is_here:
            del vars(trainer.model)[_PREPARED]
        trainer.accelerator.prepare_model(trainer.model, device_placement=False, evaluation_mode=True)


def _unprepare(trainer: Trainer) -> None:
    """Makes accelerate forget the model, so that the next stock training prepares the model again, with DDP.

    Autocast stays bound to the model, as after any training.
    """
    assert trainer.model is not None
    trainer.model_wrapped = trainer.model
    vars(trainer.model).pop(_PREPARED, None)


def _remove_attributes(trainer: Trainer, names: set[str]) -> None:
    for name in names & set(vars(trainer)):
        delattr(trainer, name)


def _attach_problems(trainer: Trainer, known: ModelFacts, config: LongContextConfig, plans_evaluation: bool) -> list[str]:
    """Problems with a built trainer: settings that plans would ignore."""
    given = {"model_init": trainer.model_init}
    facts = Facts(config=config, args=trainer.args, given=given, plans_evaluation=plans_evaluation)
    problems = argument_problems(facts) + refusals(SIGNALS, facts)
    if outside := refusals(NOT_ATTACHED, Facts(trainer=type(trainer))) or trainer_problems(type(trainer), trainer.args, config):
        return problems + outside
    problems += refusals(ATTACHED, replace(facts, given=vars(trainer))) + set_loss_problems(trainer) + image_problems(trainer)
    if plans_evaluation:
        problems += evaluation_set_problems(trainer.eval_dataset) + _evaluation_problems(trainer, known.head_kind)
    return problems


def _evaluation_problems(trainer: Trainer, kind: HeadKind) -> list[str]:
    """Returns why plans would evaluate something else than the trainer's own loop over batches of its collator."""
    problems = refusals(METRICS, Facts(args=trainer.args)) if trainer.compute_metrics is not None else []
    return problems + (refusals(WHOLE_LOGITS, Facts(given=vars(trainer))) if kind == "next_token" else [])
