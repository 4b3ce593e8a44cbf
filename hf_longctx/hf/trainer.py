"""`LongContextTrainer`: a `transformers.Trainer` that runs one plan per step. Read after `runtime/executor.py`.

The mixin builds and hands over: at start it checks everything on every rank and makes the group pool, the loaders yield
planned steps, `training_step` gives them to `StepExecutor`, `RunReport` logs. Parameters live as `PlacementMixin` says,
which overrides a few private methods of `Trainer`; every override here is of a public one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, seed_worker

from hf_longctx.hf.agreement import (
    control_group,
    differing_settings,
    explain_lost_ranks,
    gather_objects,
    raise_together,
)
from hf_longctx.hf.attention import num_attention_layers, patch_model
from hf_longctx.hf.collator import LongContextCollator, PlannedDataset
from hf_longctx.hf.config import LaunchEnvironment, LongContextConfig
from hf_longctx.hf.data import DatasetScan, token_rows, too_long
from hf_longctx.hf.index_cache import scan_on_every_rank
from hf_longctx.hf.model_spec import cluster_spec, model_spec, tokens_that_fit
from hf_longctx.hf.placement import PlacementMixin
from hf_longctx.hf.plan_source import PlannedBatchSampler, PlanSource
from hf_longctx.hf.refusals import (
    argument_problems,
    config_problems,
    launch_problems,
    override_problems,
    setup_problems,
    sharding_problems,
)
from hf_longctx.hf.report import RunReport
from hf_longctx.hf.resume import DataRecorder, data_settings
from hf_longctx.hf.sampler import IntArray, LengthAwareSampler, SequenceIndex
from hf_longctx.hf.streaming import PlannedStream, StreamBatches, StreamRules, is_stream, stream_problems
from hf_longctx.plan.cost import CostModel, block_sizes, default_coefficients
from hf_longctx.plan.specs import PlannerConfig, default_degrees
from hf_longctx.runtime.executor import StepExecutor
from hf_longctx.runtime.mesh import GroupPool

logger = logging.getLogger(__name__)


class LongContextDataLoader(DataLoader):  # type: ignore[type-arg]
    """A `DataLoader` over planned steps that passes the epoch on to its sampler, as the trainer expects."""

    def set_epoch(self, epoch: int) -> None:
        """Selects the shuffle of `epoch`."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class LongContextMixin(PlacementMixin):
    """Turns a `Trainer` subclass into one that runs plans; put it in front: `class Mine(LongContextMixin, Trainer)`."""

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        longctx_config: LongContextConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """As `Trainer`; `longctx_config` says how sequences are cut and spread.

        Raises ValueError on every rank, before any work, listing all settings, models and data that cannot be run.
        """
        args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        self.longctx_config = longctx_config if longctx_config is not None else LongContextConfig()
        # ranks may come late from loading a model or tokenising: wait patiently before the short time-outs begin
        PartialState().wait_for_everyone()
        self._control = control_group(self.longctx_config.collective_timeout_s)
        refused = {"data_collator": data_collator, **kwargs}
        degrees = self._check_setup(model, args, processing_class, refused)
        costs = self._prepare_planning(model, args, degrees)
        self._scans: dict[str, tuple[Any, DatasetScan]] = {}
        self._told: set[str] = set()
        self._check_data(model, args, {"train_dataset": train_dataset, "eval_dataset": eval_dataset})
        patch_model(model)
        self._num_attention_layers = num_attention_layers(model)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self._executor: StepExecutor | None = None
        self._prepare_mesh()
        self._pool = GroupPool(block_sizes(degrees, costs), self.longctx_config.collective_timeout_s, self._control)
        # one more than are fitted: the first step pays for start-up and is left out
        explore_steps = self.longctx_config.calibration_steps and self.longctx_config.calibration_steps + 1
        alive_s = self.longctx_config.collective_timeout_s / 3
        self._source = PlanSource(self._pool, costs, self._planner_config, explore_steps, alive_s)
        self._recorder = DataRecorder()
        # before the report, which lets the other ranks go on after a checkpoint
        self.add_callback(self._recorder)
        self._report = RunReport(self.longctx_config, self._source)
        self.add_callback(self._report)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Planned steps of the training set; not sharded again by accelerate, since every rank draws the same steps."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        if is_stream(self.train_dataset):
            return self._stream_loader(self.train_dataset)
        index = self._index("train_dataset", self.train_dataset)
        sampler = LengthAwareSampler(
            index.lengths,
            sequences_per_step=self.args.per_device_train_batch_size * self.args.world_size,
            tokens_per_step=self.longctx_config.tokens_per_step,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            shuffle=not str(self.args.train_sampling_strategy).endswith("sequential"),
            drop_last=self.args.dataloader_drop_last,
        )
        if not len(sampler):
            raise ValueError(
                f"dataloader_drop_last leaves no step: {len(index)} sequences are fewer than one step of "
                f"{sampler.sequences_per_step}; set it to False or lower per_device_train_batch_size"
            )
        scan = self._scans["train_dataset"][1]
        is_cut = bool((scan.lengths > self._longest).any())
        self._check_resumed(scan.digest, sampler.seed if sampler.shuffle else None, is_cut)
        steps = PlannedBatchSampler(sampler, index.lengths, self._source, True, self._steps_done)
        return self._loader(self.train_dataset, index, steps)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer`; refuses a checkpoint after which samples would be repeated or skipped."""
        self._recorder.resume(resume_from_checkpoint, self.args)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._recorder.resume(None, self.args)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Planned steps of an evaluation set, in its order; the set given here is checked as those given at start."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset")
        index = self._index("eval_dataset", dataset)
        per_step = self.args.per_device_eval_batch_size * self.args.world_size
        sampler = LengthAwareSampler(index.lengths, per_step, self.longctx_config.tokens_per_step, shuffle=False)
        return self._loader(dataset, index, PlannedBatchSampler(sampler, index.lengths, self._source, explore=False))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Sequences of one optimizer step over all ranks; with a token budget, on average (not known for a stream)."""
        if self.longctx_config.tokens_per_step is None or is_stream(self.train_dataset):
            return args.per_device_train_batch_size * args.world_size
        lengths = self._index("train_dataset", self.train_dataset).lengths
        return max(1, round(self.longctx_config.tokens_per_step / float(lengths.mean())))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], int]:
        """One planned step and the number of its label tokens over all ranks."""
        with self._explained():
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
            return batches, self._sum_over_ranks(sum(batch["num_label_tokens"] for batch in batches))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Runs one planned step; returns the step's mean loss over all ranks' label tokens, the same on every rank."""
        assert isinstance(num_items_in_batch, int)
        model.train()
        self._switch_optimizer("train")
        plan = inputs["step"].plan
        with self._explained():
            result = self._training_executor().run(plan.for_rank(self._pool.rank), inputs["chunks"], num_items_in_batch)
        self._report.step_done(plan, result)
        return result.loss

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean cross-entropy over all label tokens of the set (`eval_loss`) and its exponential, under plans."""
        model = self._placed_model()
        model.eval()
        self._switch_optimizer("eval")
        self.callback_handler.eval_dataloader = dataloader
        executor = StepExecutor(model, self._pool, self._num_attention_layers, self.args.device)
        loss_sum, num_label_tokens, num_samples = 0.0, 0, 0
        with self._explained():
            for batch in dataloader:
                step = batch["step"]
                loss_sum += float(executor.evaluate(step.plan.for_rank(self._pool.rank), batch["chunks"]))
                num_label_tokens += self._sum_over_ranks(batch["num_label_tokens"])
                num_samples += len(step.sequences)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        loss = loss_sum / max(num_label_tokens, 1)
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_perplexity": math.exp(min(loss, 700.0))}
        no_predictions: Any = None
        return EvalLoopOutput(predictions=no_predictions, label_ids=None, metrics=metrics, num_samples=num_samples)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: plans return losses, not logits."""
        raise ValueError("predict() is not supported yet; use evaluate(), or load the saved model with transformers")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer`, with the means of the steps since the last log: seconds, tokens per second, padding."""
        if "loss" in logs:
            logs = {**logs, **self._report.take_metrics()}
        super().log(logs, start_time)

    def _check_setup(
        self, model: Any, args: TrainingArguments, processing_class: Any, trainer_arguments: dict[str, Any]
    ) -> tuple[int, ...]:
        """The allowed degrees; raises on every rank if settings, model or ranks do not fit together."""
        config = self.longctx_config
        heads = getattr(getattr(model, "config", None), "num_attention_heads", args.world_size)
        degrees = tuple(sorted(set(config.degrees or default_degrees(args.world_size, heads, config.method))))
        problems = argument_problems(args, trainer_arguments) + config_problems(config, args)
        problems += launch_problems(LaunchEnvironment.read(), args) + override_problems(type(self), LongContextMixin)
        problems += sharding_problems(model, config, args, trainer_arguments)
        problems += setup_problems(model, processing_class, config, args.world_size, degrees)
        # settings before problems: a rank with other settings may be the only one with a problem
        problems += differing_settings({**asdict(config), **_shared_arguments(args)}, self._control)
        raise_together(problems, self._control)
        return (config.static_degree,) if config.static_degree else degrees

    def _prepare_planning(self, model: Any, args: TrainingArguments, degrees: tuple[int, ...]) -> CostModel:
        """Sets the limits of sequences and ranks; returns the cost model to start with."""
        config, launch = self.longctx_config, LaunchEnvironment.read()
        cluster = cluster_spec(args.device, args.world_size, min(launch.ranks_per_node, args.world_size))
        spec = model_spec(model)
        parameters, shard_ranks = self._shared_parameters(args.world_size)
        fitting = min(gather_objects(tokens_that_fit(spec, cluster, parameters, shard_ranks), self._control))
        if config.tokens_per_rank is None and fitting < 1:
            gib = cluster.hardware.device_bytes / 2**30
            raise ValueError(
                f"weights, gradients and Adam states of {spec.num_parameters / 1e9:.2f} billion parameters ({parameters}) leave "
                f"no room for a token in {gib:.1f} GiB; set parameters='sharded' with more ranks, or use a smaller model or a "
                f"larger device"
            )
        self._planner_config = PlannerConfig(
            tokens_per_rank=config.tokens_per_rank or fitting,
            degrees=degrees,
            solver=config.solver,
            static_degree=config.static_degree,
            micro_batch_trials=config.micro_batch_trials,
        )
        self._max_length, self._vocab_size = config.max_length or spec.max_positions, spec.vocab_size
        return CostModel(
            spec, cluster, default_coefficients(spec, cluster), config.method, parameters=parameters, shard_ranks=shard_ranks
        )

    def _check_data(self, model: Any, args: TrainingArguments, datasets: dict[str, Any]) -> None:
        """Reads every set's row lengths; raises on every rank for unusable rows or sets that differ between ranks."""
        self._shows_progress = not args.disable_tqdm
        problems = stream_problems(datasets, self.longctx_config, args)
        settings = {"model config": model.config.to_json_string(), "initial weights": _weights_digest(model)}
        given = {name: dataset for name, dataset in datasets.items() if dataset is not None and not is_stream(dataset)}
        for name, scan in self._scan(given).items():
            problems += scan.problems
            self._scans[name] = (given[name], scan)
            settings[f"tokens of {name}"] = scan.digest
        problems += differing_settings(settings, self._control)
        raise_together(problems, self._control)

    def _scan(self, sets: dict[str, Any]) -> dict[str, DatasetScan]:
        """Lengths and problems of named sets, sequences that are too long included where these are errors."""
        planner = self._planner_config
        scans = scan_on_every_rank(sets, self._vocab_size, self._shows_progress)
        if self.longctx_config.long_sequences != "error":
            return scans
        room = planner.tokens_per_rank * planner.degrees[-1]
        return {
            name: scan
            if scan.problems
            else replace(scan, problems=too_long(scan.lengths, self._max_length, room, planner.tokens_per_rank, name))
            for name, scan in scans.items()
        }

    def _index(self, name: str, dataset: Any) -> SequenceIndex:
        """The sequences of a set after truncation or splitting; a set that was not given at start is checked now."""
        known, scan = self._scans.get(name, (None, None))
        if scan is None or known is not dataset:
            raise_together(stream_problems({name: dataset}, self.longctx_config, self.args), self._control)
            scan = self._scan({name: dataset})[name]
            problems = scan.problems + differing_settings({f"tokens of {name}": scan.digest}, self._control)
            raise_together(problems, self._control)
            self._scans[name] = (dataset, scan)
        limit = self._longest
        index = SequenceIndex.build(scan.lengths, limit, self.longctx_config.long_sequences)
        if self.args.process_index == 0 and known is not None and name not in self._told:
            self._told.add(name)
            _tell_cuts(name, scan.lengths, index, limit)
        return index

    def _loader(self, dataset: Any, index: SequenceIndex, steps: PlannedBatchSampler) -> DataLoader[Any]:
        args, num_workers = self.args, self.args.dataloader_num_workers
        return LongContextDataLoader(
            PlannedDataset(token_rows(dataset), index),
            batch_sampler=steps,
            collate_fn=LongContextCollator(),
            num_workers=num_workers,
            pin_memory=self._pins_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=partial(seed_worker, num_workers=num_workers, rank=args.process_index) if num_workers else None,
        )

    @property
    def _longest(self) -> int:
        """Most tokens of a sequence: longer rows are errors, or are cut."""
        return min(self._max_length, self._planner_config.tokens_per_rank * self._planner_config.degrees[-1])

    def _stream_loader(self, stream: Any) -> DataLoader[Any]:
        """Planned steps of an iterable training set, read by rank 0 alone."""
        args, config, planner = self.args, self.longctx_config, self._planner_config
        assert config.lookahead_batches is not None
        self._check_resumed("stream", None, config.long_sequences != "error")
        rules = StreamRules(
            name="train_dataset",
            vocab_size=self._vocab_size,
            max_length=self._max_length,
            tokens_per_rank=planner.tokens_per_rank,
            max_degree=planner.degrees[-1],
            long_sequences=config.long_sequences,
            sequences_per_step=args.per_device_train_batch_size * args.world_size,
            tokens_per_step=config.tokens_per_step,
            drop_last=args.dataloader_drop_last,
        )
        batches = StreamBatches(stream, rules, self._recorder.start())
        # an epoch of the trainer is the whole run, since nobody knows when the stream ends
        planned = PlannedStream(batches, config.lookahead_batches, self._source, lambda: self._steps_done() % args.max_steps)
        self._recorder.cursor = lambda: planned.cursor
        return planned.loader(self._pins_memory)

    def _check_resumed(self, train_dataset: str, shuffle_seed: int | None, is_cut: bool) -> None:
        """Tells the checkpoints to come which data this is; raises on every rank if the one resumed from had other data."""
        settings = data_settings(self.args, self.longctx_config, train_dataset, shuffle_seed, self._longest if is_cut else None)
        self._recorder.settings = settings
        raise_together(self._recorder.problems() if self.args.process_index == 0 else [], self._control)

    def _steps_done(self) -> int:
        return 0 if self.args.ignore_data_skip else self.state.global_step

    @property
    def _pins_memory(self) -> bool:
        return self.args.dataloader_pin_memory and self.args.device.type == "cuda"

    def _training_executor(self) -> StepExecutor:
        """The executor of the placed model; kept while that stays the same, since it owns gradient buffers."""
        model = self._placed_model()
        if self._executor is None or self._executor.model is not model:
            fp32_gradients = self.longctx_config.fp32_gradients
            self._executor = StepExecutor(model, self._pool, self._num_attention_layers, self.args.device, fp32_gradients)
        return self._executor

    def _explained(self) -> AbstractContextManager[None]:
        timeout_s = self.longctx_config.collective_timeout_s
        return explain_lost_ranks(self.state.global_step + 1, self._pool.rank, timeout_s)

    def _switch_optimizer(self, mode: str) -> None:
        """Schedule-free optimizers hold two sets of weights and have the methods `train` and `eval`."""
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def _sum_over_ranks(self, count: int) -> int:
        """The sum of a host-side integer over all ranks, on the control group: no device is involved."""
        if self._control is None:
            return count
        total = torch.tensor(count, dtype=torch.int64)
        dist.all_reduce(total, group=self._control)
        return int(total)


class LongContextTrainer(LongContextMixin, Trainer):
    """`transformers.Trainer` under one plan per optimizer step.

    Example:

        trainer = LongContextTrainer(
            model=model,
            args=TrainingArguments(output_dir="out", per_device_train_batch_size=16),
            train_dataset=dataset,  # rows with input_ids, and labels if they differ
            longctx_config=LongContextConfig(max_length=32768, long_sequences="split"),
        )
        trainer.train()
    """


def _tell_cuts(name: str, row_lengths: IntArray, index: SequenceIndex, limit: int) -> None:
    """Says once how many rows were cut, and what that cost."""
    num_long = int((row_lengths > limit).sum())
    if num_long:
        dropped = int(row_lengths.sum() - index.lengths.sum())
        what = (
            f"truncated, {dropped} tokens dropped" if dropped else f"split, {len(index)} sequences from {len(row_lengths)} rows"
        )
        logger.warning("%s: %d rows above %d tokens %s", name, num_long, limit, what)


def _weights_digest(model: nn.Module) -> str:
    """A hash over one sum per parameter: equal on all ranks if they start from the same weights."""
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:16]


# what may differ between ranks: places, names and how much is said
_OWN_ARGUMENTS = re.compile(
    r"local_rank|.*_dir$|run_name|log_level.*|disable_tqdm|report_to|project|trackio.*|hub_.*|push_to_hub.*|debug|"
    r"resume_from_checkpoint|ddp_backend|use_cpu|dataloader_pin_memory|_n_gpu"
)


def _shared_arguments(args: TrainingArguments) -> dict[str, str]:
    """Every training argument that shapes the run, as text."""
    return {name: str(value) for name, value in args.to_dict().items() if not _OWN_ARGUMENTS.fullmatch(name)}
