"""Refuses trainers that the callback cannot serve, alone or attached."""

from __future__ import annotations

from collections.abc import Iterator

from hf_longctx.hf.checkpoints.deferred import source_of
from hf_longctx.hf.models.attention import runs_plans
from hf_longctx.hf.models.experts import has_balance
from hf_longctx.hf.rules.arguments import rounds_by_chance
from hf_longctx.hf.rules.rule import Facts, Rule

# a trainer that was built to save at SIGTERM by itself
SIGNALS = {
    "jit-checkpoint": Rule(
        "enable_jit_checkpoint=True saves on the ranks that got the signal, each in a step of its own, while the others wait",
        "leave it out: the callback saves at SIGTERM without it",
        lambda run: bool(getattr(run.args, "enable_jit_checkpoint", False)),
        "args.enable_jit_checkpoint = True",
    ),
}
_OF_TRAINER = {
    "callback-and-frozen-weights": Rule(
        "frozen_weights='fp8' needs LongContextTrainer, since a stock trainer goes on with the model afterwards",
        "use it, or leave frozen_weights out",
        lambda run: run.config.frozen_weights == "fp8",
        "config = LongContextConfig(frozen_weights='fp8')",
    ),
    "callback-and-unread-weights": Rule(
        "weights of the model are still to be read (load_sharded, load_pipeline_stage), which a stock trainer does not do",
        "use LongContextTrainer, or load the model with from_pretrained",
        lambda run: run.config.parameters == "replicated" and source_of(run.model) is not None,
        "model.longctx_source = 'checkpoints'",
    ),
    "callback-and-layer-weights": Rule(
        "layer_weights={config.layer_weights!r} needs LongContextTrainer and parameters='sharded'",
        "leave it out",
        lambda run: run.config.parameters == "replicated" and run.config.layer_weights != "device",
        "config = LongContextConfig(layer_weights='host')",
    ),
}
# settings that a callback in `callbacks=[...]` cannot follow, since it does not control the loader; given: a trainer's attributes
ALONE = {
    "callback-and-async-save": Rule(
        "async_save=True needs the exchange with which planned steps begin, where ranks agree that a checkpoint is written",
        "call attach(trainer), or leave it out",
        lambda run: run.config.async_save,
        "config = LongContextConfig(async_save=True)",
    ),
    "callback-and-stages": Rule(
        "stages={config.stages!r} needs plans of whole steps, since every forward of a stock trainer runs the whole model",
        "call attach(trainer), or use LongContextTrainer",
        lambda run: run.config.may_have_stages,
        "config = LongContextConfig(stages=2)",
    ),
    "callback-and-shards": Rule(
        "parameters={config.parameters!r} needs LongContextTrainer, since here the trainer's own DDP holds the parameters",
        "use it, or leave parameters out",
        lambda run: run.config.parameters != "replicated",
        "config = LongContextConfig(parameters='sharded')",
    ),
    **_OF_TRAINER,
    "callback-and-compiled-layers": Rule(
        "compile_layers=True needs plans of whole steps",
        "call attach(trainer), or use LongContextTrainer",
        lambda run: bool(run.config.compile_layers),
        "config = LongContextConfig(compile_layers=True)",
    ),
    "callback-and-tokens-per-step": Rule(
        "tokens_per_step={config.tokens_per_step} needs the trainer's loader",
        "call attach(trainer), or leave it out and set per_device_train_batch_size",
        lambda run: run.config.tokens_per_step is not None,
        "config = LongContextConfig(tokens_per_step=4096)",
    ),
    "callback-and-long-sequences": Rule(
        "long_sequences={config.long_sequences!r} needs the trainer's loader",
        "call attach(trainer), or cut the dataset",
        lambda run: run.config.long_sequences != "error",
        "config = LongContextConfig(long_sequences='split')",
    ),
    "callback-and-rounding": Rule(
        "bf16_stochastic_round=True in optim_args would round the copies of a weight on every rank by other random numbers",
        "call attach(trainer) or use LongContextTrainer, with fp32_master_weights=False, or leave it out",
        # the ranks of DDP would draw each for itself
        lambda run: run.num_ranks > 1 and rounds_by_chance(run.args),
        "args = TrainingArguments(optim='adamw_torch_8bit', optim_args='bf16_stochastic_round=True')",
    ),
    **SIGNALS,
    "callback-twice": Rule(
        "the model runs plans already (LongContextTrainer, or a second callback)",
        "use one of them",
        lambda run: runs_plans(run.model),
        "patch_model(model)",
    ),
    "callback-and-classifiers": Rule(
        "model class {model_class} classifies documents or tokens, and a stock forward reads whole rows for its loss",
        "call attach(trainer), or use LongContextTrainer",
        lambda run: [{"model_class": run.known.name}] if run.known.head_kind != "next_token" else (),
        "model = transformers.LlamaForSequenceClassification(model.config)",
    ),
    "callback-and-balance": Rule(
        "the model's config asks for a load-balancing loss of its experts (output_router_logits=True), which a stock trainer "
        "computes from each rank's tokens alone",
        "attach the callback to the trainer, or set it to False",
        lambda run: has_balance(run.model),
        "model.config.output_router_logits = True",
    ),
    "callback-and-noise": Rule(
        "neftune_noise_alpha={alpha!r} would draw other noise on every rank that shares a document",
        "leave it out, or train with attach(trainer) or LongContextTrainer, which draw noise by token",
        # the trainer adds noise by its own attribute, whatever its arguments say
        lambda run: ({"alpha": alpha} for alpha in [run.given.get("neftune_noise_alpha")] if alpha is not None),
        "given['neftune_noise_alpha'] = 5.0",
    ),
    "callback-after-evaluation": Rule(
        "evaluate() or predict() ran before train(), and accelerate then trains every rank alone, without DDP",
        "call them after train(), set eval_on_start=True, or attach the callback to the trainer",
        lambda run: run.num_ranks > 1 and bool(vars(run.model).get("_is_accelerate_prepared")),
        "model._is_accelerate_prepared = True",
    ),
}


def _replaced(run: Facts) -> Iterator[dict[str, str]]:
    """Yields methods that were put on the instance of a trainer and that plans replace."""
    names = ["train", "training_step", "get_train_dataloader", "get_batch_samples"]
    if run.plans_evaluation:
        names += ["get_eval_dataloader", "evaluation_loop", "prediction_step", "predict", "save_model"]
    yield from ({"name": name} for name in names if name in run.given)


# metrics of a stock trainer that predicts next tokens, evaluated under plans
WHOLE_LOGITS = {
    "attach-and-logits": Rule(
        "compute_metrics and preprocess_logits_for_metrics of a stock trainer get whole logits, which evaluation under plans (in "
        "pipeline stages, or of rows with images) never makes",
        "leave them out, or use LongContextTrainer, where compute_metrics gets likeliest tokens and log-probabilities",
        lambda run: any(run.given.get(name) is not None for name in ("compute_metrics", "preprocess_logits_for_metrics")),
        "given['compute_metrics'] = print",
    ),
}
# settings that plans attached to a trainer cannot follow; given: attributes of the trainer
ATTACHED = {
    "attach-and-shards": Rule(
        "parameters={config.parameters!r} would leave a sharded model in a stock trainer",
        "use LongContextTrainer, or parameters='replicated'",
        lambda run: run.config.parameters != "replicated",
        "config = LongContextConfig(parameters='sharded')",
    ),
    **_OF_TRAINER,
    "attach-stages-after-optimizer": Rule(
        "the trainer has an optimizer or scheduler already, for weights of all stages, but stages={config.stages!r} leaves each "
        "rank with one stage",
        "set trainer.optimizer = trainer.lr_scheduler = None before attach, or choose it by optim",
        lambda run: (
            run.config.may_have_stages and (run.given.get("optimizer") is not None or run.given.get("lr_scheduler") is not None)
        ),
        "config = LongContextConfig(stages=2); given['optimizer'] = torch.optim.SGD(model.parameters())",
    ),
    "attach-without-data": Rule(
        "the trainer has no train_dataset",
        "give it one, or call attach on the trainer that trains",
        lambda run: run.given.get("train_dataset") is None,
        "given['train_dataset'] = None",
    ),
    "attach-and-replaced-methods": Rule(
        "{name} was replaced on the trainer instance and would not run under plans",
        "override it in a class",
        _replaced,
        "given['training_step'] = print",
    ),
}
