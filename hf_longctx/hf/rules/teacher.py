"""Refuses teachers whose distributions plans could not compare with those of the model, or not exactly.

In facts, `known` is of the model that is trained, and `given["taught_by"]` is the `ModelFacts` of the teacher.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import HeadKind
from hf_longctx.hf.rules.arguments import least_heads, setup_problems
from hf_longctx.hf.rules.rule import Facts, Rule, refusals
from hf_longctx.hf.rules.trl import is_scored
from hf_longctx.runtime.core.loss import Distillation
from hf_longctx.runtime.parameters.sharded import is_sharded

# numbers of a weight by which ranks compare their teachers
_FEW = 16
# settings that a teacher reads
_SETTINGS = tuple(f"distillation_{each.name}" for each in fields(Distillation))


def _unused(run: Facts) -> Iterator[dict[str, Any]]:
    plain = LongContextConfig()
    names = (name for name in _SETTINGS if getattr(run.config, name) != getattr(plain, name))
    yield from ({"name": name, "value": getattr(run.config, name)} for name in names)


def _shared(run: Facts) -> Iterator[dict[str, str]]:
    """Yields the first tensor of the teacher that is one of the model's, too."""
    # weights that are still to be read have no address
    own = {weight.data_ptr() for weight in run.model.parameters()} - {0}
    weights = run.given["taught_by"].model.named_parameters()
    yield from [{"name": name} for name, weight in weights if weight.data_ptr() in own][:1]


def _training(run: Facts) -> Iterator[dict[str, str]]:
    modules = run.given["taught_by"].model.named_modules()
    yield from [{"module": name or type(module).__name__} for name, module in modules if module.training][:1]


def _kind(run: Facts) -> HeadKind:
    return next((each for each in (run.given["taught_by"].head_kind, run.known.head_kind) if each != "next_token"), "next_token")


def _few_heads(run: Facts) -> Iterator[dict[str, int]]:
    heads = least_heads(run.given["taught_by"])
    if heads < run.degrees[-1] and heads < least_heads(run.known):
        yield {"heads": heads, "degree": run.degrees[-1]}


def _other_tokenizer(run: Facts) -> Iterator[dict[str, Any]]:
    """Yields the first token that the teacher's tokenizer has another number for, if its files are on this machine."""
    own, name = run.processing_class, getattr(run.given["taught_by"].base.config, "name_or_path", "")
    if not isinstance(own, PreTrainedTokenizerBase) or not name:
        return
    try:
        other = AutoTokenizer.from_pretrained(name, local_files_only=True).get_vocab()
    except Exception:
        # a folder of weights alone; vocabularies of one size are then trusted
        return
    mine = own.get_vocab()
    differing = sorted(token for token in mine.keys() & other.keys() if mine[token] != other[token])
    missing = sorted(mine.keys() ^ other.keys())
    # tokens for chats may be added on one side alone
    if differing or len(missing) > len(mine) // 100:
        (token, *_) = differing or missing
        yield {"token": token, "own": mine.get(token), "other": other.get(token), "name": name}


# settings without a teacher
WITHOUT_TEACHER = {
    "distillation-without-teacher": Rule(
        "{name}={value!r} has no effect, since there is no teacher",
        "leave it out, or pass teacher=model to LongContextTrainer",
        _unused,
        "config = LongContextConfig(distillation_beta=0.5)",
    ),
}
# how a teacher, its model and the settings of the run fit together
_TEACHER = {
    "teacher-and-trainer-of-trl": Rule(
        "{trainer.__name__} has a loss of its own, in which a teacher has no effect",
        "leave teacher out, or train on rows with class Mine(LongContextMixin, SFTTrainer)",
        lambda run: is_scored(run.trainer),
        "trainer = of_trl('DPOTrainer')",
    ),
    "teacher-and-token-loss": Rule(
        "teacher and token_loss were given, and each is the loss of a token",
        "leave one of them out; distillation_weight mixes the distance from the teacher with cross-entropy",
        lambda run: run.given["token_loss"] is not None,
        "given['token_loss'] = print",
    ),
    "teacher-and-label-smoothing": Rule(
        "label_smoothing_factor={args.label_smoothing_factor!r} has no effect beside a teacher",
        "leave it out",
        lambda run: bool(run.args.label_smoothing_factor),
        "args.label_smoothing_factor = 0.1",
    ),
    "teacher-and-model-init": Rule(
        "model_init makes a model for each training, but a teacher is placed for one run alone",
        "pass model=..., or leave teacher out",
        lambda run: run.given.get("model_init") is not None,
        "given['model_init'] = tiny_llama",
    ),
    "teacher-and-lending": Rule(
        "lend_stages=True leaves every rank with all stages, for which a teacher has no layer ranges",
        "leave one of them out",
        lambda run: run.config.lend_stages,
        "config = LongContextConfig(stages=2, lend_stages=True)",
    ),
    "teacher-and-classifier": Rule(
        "a model that classifies {kind}s has no next tokens to compare with those of a teacher",
        "use causal language models for both, or leave teacher out",
        lambda run: ({"kind": kind} for kind in [_kind(run)] if kind != "next_token"),
        "model = transformers.LlamaForSequenceClassification(model.config)",
    ),
    "vocabulary-of-teacher": Rule(
        "the teacher has {given[taught_by].num_outputs} tokens and the model {known.num_outputs}",
        "use a teacher with the model's tokenizer; if it is padded to another size, call "
        "teacher.resize_token_embeddings({known.num_outputs}), which leaves the padding out",
        lambda run: run.given["taught_by"].num_outputs != run.known.num_outputs,
        "given['taught_by'] = known_of(tiny_llama(vocab_size=99))",
    ),
    "tokenizer-of-teacher": Rule(
        "the tokenizer of the teacher ({name}) gives the token {token!r} the number {other}, and the trainer's {own}",
        "use a teacher with the model's tokenizer",
        _other_tokenizer,
        "processing_class = tokenizer('a b'); given['taught_by'] = known_of(beside_tokenizer(tokenizer('b a')))",
    ),
    "top-k-of-teacher": Rule(
        "distillation_top_k={config.distillation_top_k} leaves no other of the {known.num_outputs} tokens",
        "give a smaller number, or leave it out to compare all",
        lambda run: run.known.num_outputs <= (run.config.distillation_top_k or 0),
        "config = LongContextConfig(distillation_top_k=97)",
    ),
    "teacher-in-training-mode": Rule(
        "the teacher is in training mode (first module: {module}), in which dropout would change its targets",
        "call teacher.eval()",
        _training,
        "given['taught_by'].model.train()",
    ),
    "teacher-of-shared-weights": Rule(
        "the teacher's weight {name} is a weight of the model, too, so the teacher would change with the model or be cut with it",
        "load the teacher by itself (from_pretrained), even if both begin with equal weights",
        _shared,
        "given['taught_by'] = known_of(model)",
    ),
    "heads-of-teacher": Rule(
        "the teacher has {heads} attention heads, fewer than the model and than the {degree} ranks of the largest group",
        "set degrees with at most {heads} ranks",
        _few_heads,
        "given['taught_by'] = known_of(tiny_llama(num_attention_heads=2, num_key_value_heads=2))",
    ),
    "sharded-teacher": Rule(
        "the teacher is sharded already (fully_shard), or was loaded as one stage",
        "pass it whole, or by hf_longctx.load_sharded; plans place it like the model",
        lambda run: is_sharded(run.given["taught_by"].model) or run.given["taught_by"].loaded_ranges is not None,
        "given['taught_by'] = known_of(sharded(tiny_llama().eval()))",
    ),
}


# rules about rows, once the sets were read; `given["has_images"]` says whether they have images
TAUGHT_ROWS = {
    "teacher-and-images": Rule(
        "rows have images, and a teacher reads text alone",
        "remove them, for example with dataset.filter, or leave teacher out",
        lambda run: bool(run.given.get("has_images")),
        "given['has_images'] = True",
    ),
}


def teacher_digest(teacher: ModelFacts) -> str:
    """Describes a teacher by its class, its size and a few numbers of every weight, which must be equal on all ranks."""
    weights = [weight for weight in teacher.model.parameters() if not weight.is_meta]
    few = b"".join(weight.detach().reshape(-1)[:_FEW].double().cpu().numpy().tobytes() for weight in weights)
    return f"{teacher.name} of {sum(weight.numel() for weight in weights)} parameters, {zlib.crc32(few):08x}"


def teacher_problems(facts: Facts) -> list[str]:
    """Problems with a teacher, or with settings that need one; `given["taught_by"]` is None without one."""
    teacher: ModelFacts | None = facts.given["taught_by"]
    if teacher is None:
        return refusals(WITHOUT_TEACHER, facts)
    found = setup_problems(teacher, None, facts.config, facts.num_ranks, facts.degrees, is_trained=False)
    if not found and (problem := activation_problem(teacher.base)):
        found = [f"its logits cannot be computed in tiles: {problem}; use a teacher of another class"]
    return [f"the teacher: {each}" for each in found] + refusals(_TEACHER, facts)
