"""The loss that a run trains: cross-entropy, the trainer's label smoothing, or a user's `token_loss`.

Other places where stock transformers takes a loss (`model.loss_function`, `loss_type`, `compute_loss_func`, an overridden
`compute_loss`) are checked at start, and such a loss is refused by name, since plans would train cross-entropy in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.labels import NEXT_TOKEN, HeadTask
from hf_longctx.hf.models.activations import activation_problem
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.rules.arguments import WAY_OUT
from hf_longctx.runtime.core.loss import (
    IGNORE_INDEX,
    AnyLoss,
    BinaryCrossEntropy,
    Distillation,
    LabelSmoothing,
    SquaredError,
    TokenLoss,
    ValueLoss,
)

# losses of transformers that plans train by default, by kind of head: module and names
_MODULE = "transformers.loss.loss_utils"
_STOCK = {"next_token": "ForCausalLMLoss", "document": "ForSequenceClassificationLoss", "token": "ForTokenClassification"}
_TRAINED = {
    "next_token": "the token mean of cross-entropy",
    "document": "the mean over documents of the loss that problem_type names",
    "token": "the token mean of cross-entropy",
}
# share by which the loss of a token may differ if other tokens are computed with it: rounding of fp32
_ROUNDING = 1e-4
# largest difference in fp32 at which a loss counts as cross-entropy
_EQUAL = 1e-6


def chosen_loss(
    args: TrainingArguments,
    token_loss: TokenLoss | None,
    task: HeadTask = NEXT_TOKEN,
    taught_by: LongContextConfig | None = None,
) -> AnyLoss:
    """The loss of a token that plans train; None for cross-entropy.

    task: the labels of the run. taught_by: the settings of a run with a teacher.
    """
    if taught_by is not None:
        return Distillation(**{each.name: getattr(taught_by, f"distillation_{each.name}") for each in fields(Distillation)})
    if task.has_values and token_loss is None:
        return SquaredError() if task.problem == "regression" else BinaryCrossEntropy()
    factor = float(args.label_smoothing_factor)
    return LabelSmoothing(factor) if token_loss is None and factor else token_loss


def loss_name(token_loss: AnyLoss) -> str:
    """The loss of a token, in words for the log."""
    if token_loss is None:
        return "cross-entropy"
    if isinstance(token_loss, Distillation):
        return _distance_name(token_loss)
    if isinstance(token_loss, ValueLoss):
        return token_loss.name
    if isinstance(token_loss, LabelSmoothing):
        return f"cross-entropy with label_smoothing_factor={token_loss.factor:g}"
    return f"token_loss {getattr(token_loss, '__qualname__', type(token_loss).__qualname__)}"


def _distance_name(loss: Distillation) -> str:
    kind = {0.0: "KL(teacher || model)", 1.0: "KL(model || teacher)"}.get(loss.beta, f"generalised JSD, beta {loss.beta:g},")
    among = "" if loss.top_k is None else f" over the teacher's {loss.top_k} likeliest tokens and the rest"
    rest = "" if loss.weight == 1 else f", {loss.weight:g} of the loss; the rest is cross-entropy"
    return f"{kind} at temperature {loss.temperature:g}{among}{rest}"


def loss_problems(facts: ModelFacts, args: TrainingArguments, token_loss: TokenLoss | None) -> list[str]:
    """Problems with a user's `token_loss`, and with losses elsewhere that plans would not train."""
    if token_loss is None:
        return model_loss_problems(facts, args.device)
    problems = token_loss_problems(token_loss, facts.num_outputs, args.device)
    if factor := args.label_smoothing_factor:
        problems.append(f"label_smoothing_factor={factor!r} has no effect beside token_loss; leave one of them out")
    return problems


def stock_loss_problems(facts: ModelFacts, args: TrainingArguments, config: LongContextConfig) -> list[str]:
    """Problems with losses that a stock loop cannot compute from one rank's share of a plan (the callback alone)."""
    problems = []
    if factor := args.label_smoothing_factor:
        problems.append(
            f"label_smoothing_factor={factor!r} needs the logits of whole batches, which a plan spreads over ranks; call "
            f"attach(trainer), or use LongContextTrainer"
        )
    if facts.family.takes_shifted_labels:
        problems.append(
            f"the forward of {facts.name} computes a mean over the labels of one rank itself, which does not add up to that of "
            f"all ranks; call attach(trainer), or use LongContextTrainer"
        )
    found = _other_loss(facts)
    if found is None or _is_cross_entropy(found, facts.num_outputs, args.device, is_shifted=True):
        return problems
    name = _described(facts.base, found)
    if not _adds_up(found, facts.num_outputs, args.device):
        problems.append(
            f"{name}, whose values on two parts of a row do not add up to that on the whole row, as those of the ranks must; let "
            f"it read shift_labels and divide a sum by num_items_in_batch, or {WAY_OUT}"
        )
    elif config.activations == "auto" and config.tile_tokens != 0 and not activation_problem(facts.base):
        problems.append(f"{name}, but a loss in tiles would never call it; set tile_tokens=0 to keep whole logits, or {WAY_OUT}")
    return problems


def model_loss_problems(facts: ModelFacts, device: torch.device) -> list[str]:
    """Problem with a model whose `loss_function` is not the token mean of cross-entropy that plans train."""
    found = _other_loss(facts)
    if found is None or (facts.head_kind == "next_token" and _is_cross_entropy(found, facts.num_outputs, device)):
        return []
    return [
        f"{_described(facts.base, found)}, but plans train {_TRAINED[facts.head_kind]} and would never call it; {WAY_OUT}, or "
        f"restore the model's own loss"
    ]


def _other_loss(facts: ModelFacts) -> Any:
    """The model's loss function if it is not that of transformers for causal language models, else None."""
    # other models are refused for their class
    if not isinstance(facts.base, PreTrainedModel) or not facts.num_outputs:
        return None
    found = facts.base.loss_function
    stock = (_MODULE, _STOCK[facts.head_kind])
    return None if (getattr(found, "__module__", ""), getattr(found, "__qualname__", "")) == stock else found


def _described(base: PreTrainedModel, found: Any) -> str:
    how = "loss_function" if "_loss_function" in vars(base) else f"loss_type={getattr(base, 'loss_type', None)!r}"
    return f"the model's {how} computes {found.__module__}.{getattr(found, '__qualname__', type(found).__qualname__)}"


def _is_cross_entropy(found: Any, vocab_size: int, device: torch.device, is_shifted: bool = False) -> bool:
    """Whether a model's loss function has the value and the gradient of cross-entropy on random logits."""
    logits_TV, labels_T = _probe_tokens(vocab_size, device)
    results = []
    for function in (found, ForCausalLMLoss):
        logits_1TV = (4 * logits_TV.double()).unsqueeze(0).requires_grad_(True)
        try:
            loss = _called(function, logits_1TV, labels_T.unsqueeze(0), is_shifted)
            results.append((loss.detach().double(), *torch.autograd.grad(loss, logits_1TV)))
        except Exception:
            # the loop would raise the error too, with a better trace
            return False
    return all(torch.allclose(own, usual, rtol=_EQUAL, atol=_EQUAL) for own, usual in zip(*results, strict=True))


def _adds_up(found: Any, vocab_size: int, device: torch.device) -> bool:
    """Whether a model's loss of a row is the sum of its losses on two parts of it, given shifted labels."""
    logits_TV, labels_T = _probe_tokens(vocab_size, device)
    cuts = (slice(None), slice(0, 3), slice(3, None))
    try:
        whole, first, second = (
            float(_called(found, logits_TV[cut].unsqueeze(0), labels_T[cut].unsqueeze(0), is_shifted=True)) for cut in cuts
        )
    except Exception:
        return False
    return abs(whole - first - second) <= _ROUNDING * max(abs(whole), 1e-3)


def _called(function: Any, logits_1TV: Tensor, labels_1T: Tensor, is_shifted: bool) -> Tensor:
    """Calls a loss function as models do, with the number of label tokens of a larger batch."""
    shifted = {"shift_labels": labels_1T} if is_shifted else {}
    num_items, vocab_size = torch.tensor(7, device=labels_1T.device), logits_1TV.shape[-1]
    loss: Tensor = function(logits=logits_1TV, labels=labels_1T, vocab_size=vocab_size, num_items_in_batch=num_items, **shifted)
    return loss


def smoother_problems(trainer: Any, token_loss: AnyLoss) -> list[str]:
    """Problem with a `label_smoother` that was set on a built trainer, where plans train `token_loss`."""
    factor = float(getattr(trainer.label_smoother, "epsilon", 0.0))
    trained = token_loss.factor if isinstance(token_loss, LabelSmoothing) else 0.0
    if trainer.label_smoother is None or factor == trained:
        return []
    return [
        f"label_smoother was set on the trainer (epsilon {factor:g}), but plans train {loss_name(token_loss)} and would never "
        f"call it; set label_smoothing_factor in TrainingArguments before the trainer is made"
    ]


def collator_of_own_problems(trainer: Any, first: Any) -> list[str]:
    """Problem with a `data_collator` that was set on a built trainer, which had `first`."""
    if trainer.data_collator is first:
        return []
    return [
        "data_collator was set on the trainer, but plans make batches themselves and would never call it; pass it to "
        "the constructor, which tries it on rows, or do its work with dataset.map"
    ]


def token_loss_problems(token_loss: Any, vocab_size: int, device: torch.device) -> list[str]:
    """Problems with a user's loss, found by running it on a few tokens; plans may run it on any part of a step's tokens."""
    if not callable(token_loss):
        return [f"token_loss is {token_loss!r:.60}; pass a function from logits [T, V] and labels [T] to losses [T]"]
    if isinstance(token_loss, nn.Module) and any(weight.requires_grad for weight in token_loss.parameters()):
        return ["token_loss has weights of its own that require gradients, but plans train the model's alone; freeze them"]
    if not vocab_size:
        return []
    try:
        return list(_probe(token_loss, *_probe_tokens(vocab_size, device)))
    except Exception as error:
        return [
            f"token_loss failed on a probe of a few tokens ({type(error).__name__}: {error}); it gets logits [T, V] in at least "
            f"fp32 and labels [T], which are {IGNORE_INDEX} for a token without a label, and returns losses [T]"
        ]


def loss_digest(token_loss: TokenLoss | None, vocab_size: int, device: torch.device) -> str:
    """The loss and its value on fixed tokens, which must be equal on all ranks; only the name for a loss that fails."""
    if token_loss is None or not vocab_size:
        return loss_name(token_loss)
    try:
        return f"{loss_name(token_loss)}, {float(token_loss(*_probe_tokens(vocab_size, device)).sum()):.4g} on a probe"
    except Exception:
        return loss_name(token_loss)


def _probe_tokens(vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits [5, V] in fp32 and labels [5], two of which are missing."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(5, vocab_size, generator=generator)
    labels_T = torch.randint(vocab_size, (5,), generator=generator)
    labels_T[[1, 4]] = IGNORE_INDEX
    return logits_TV.to(device), labels_T.to(device)


def _probe(token_loss: TokenLoss, logits_TV: Tensor, labels_T: Tensor) -> Iterator[str]:
    """Yields the first problem of a loss on these tokens."""
    logits_TV = logits_TV.requires_grad_(True)
    losses_T = token_loss(logits_TV, labels_T)
    if not isinstance(losses_T, Tensor) or losses_T.shape != labels_T.shape:
        shape = tuple(losses_T.shape) if isinstance(losses_T, Tensor) else type(losses_T).__name__
        yield f"token_loss returned {shape} for {len(labels_T)} tokens; return one loss per token, shape [T] (reduction='none')"
        return
    if not losses_T.requires_grad:
        yield "the loss that token_loss returns has no gradient; compute it from the logits with torch, without detach or no_grad"
        return
    is_label_T = labels_T != IGNORE_INDEX
    (slopes_TV,) = torch.autograd.grad(losses_T.where(is_label_T, 0).sum(), logits_TV)
    if not bool(torch.isfinite(losses_T).all() and torch.isfinite(slopes_TV).all()):
        yield (
            f"token_loss or its gradient is not finite on a probe of random logits, in which some tokens have no label "
            f"({IGNORE_INDEX}); return finite losses for those too"
        )
        return
    for token in range(len(labels_T)):
        own = slice(token, token + 1)
        alone, beside = token_loss(logits_TV[own], labels_T[own]).detach(), losses_T[own].detach()
        if is_label_T[token] and not torch.allclose(alone, beside, rtol=_ROUNDING, atol=_ROUNDING):
            yield (
                f"token_loss gives a token {float(beside):.6g} beside other tokens and {float(alone):.6g} alone, so it would "
                f"depend on the plan; compute a token's loss from its own logits and label, without means over tokens or chance"
            )
            return
