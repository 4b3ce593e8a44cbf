"""The loss of a step: losses of tokens summed with their weights, divided once by the weight of the label tokens of all ranks.

Without weights every label token weighs 1, under any plan, so loss and gradients do not depend on the plan. (FlexSP's published
code takes the mean inside each group, so a token's weight depends on its group.) The loss of a token is its cross-entropy, or
what a user's `TokenLoss` returns. The executor, the tiled output head and the evaluation call these functions.

If labels are values instead of classes (regression, several classes at once, given slopes), a label is the number of a row in
`ChunkInputs.label_values`. `Targets.of` binds that table to the loss, so that other code handles an ordinary `TokenLoss`.
It also binds the hidden states of a teacher to a `Distillation`, whose logits then exist for the same tile as the model's own.

Shapes: T tokens, K outputs of the head, N rows of the table, V entries of the vocabulary, C features of a teacher.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.core.chunk_inputs import ChunkInputs


class ValueLoss(ABC):
    """A loss of each token's head outputs and their target values."""

    name: ClassVar[str]
    """The loss in words for the log."""

    @abstractmethod
    def losses(self, logits_TK: Tensor, values_TK: Tensor) -> Tensor:
        """Returns losses [T] of `logits_TK`, in at least fp32."""

    def at(self, values_NK: Tensor | None) -> TokenLoss:
        """Returns the loss of tokens whose labels are row numbers of `values_NK`; None if no token has a label."""
        return AtValues(self, values_NK)


@dataclass(frozen=True, slots=True)
class SquaredError(ValueLoss):
    """Squared error, averaged over the outputs: regression, as transformers computes it."""

    name: ClassVar[str] = "squared error"

    def losses(self, logits_TK: Tensor, values_TK: Tensor) -> Tensor:
        """Losses [T]."""
        return (logits_TK - values_TK).square().mean(dim=1)


@dataclass(frozen=True, slots=True)
class BinaryCrossEntropy(ValueLoss):
    """Binary cross-entropy, averaged over the outputs: several labels at once, as transformers computes it."""

    name: ClassVar[str] = "binary cross-entropy"

    def losses(self, logits_TK: Tensor, values_TK: Tensor) -> Tensor:
        """Losses [T]."""
        values_TK = values_TK.to(logits_TK.dtype)
        return F.binary_cross_entropy_with_logits(logits_TK, values_TK, reduction="none").mean(dim=1)


@dataclass(frozen=True, slots=True)
class OwnLogit:
    """A `TokenLoss` that is the first logit, such as a reward; label weights are then slopes of a loss of rewards."""

    def __call__(self, logits_TK: Tensor, labels_T: Tensor) -> Tensor:
        """Losses [T]."""
        return logits_TK[:, 0]


@dataclass(frozen=True, slots=True)
class AtValues:
    """A `TokenLoss` from a `ValueLoss` and a table, whose rows are numbered by labels.

    values_NK: the table; None if no token has a label. unlabelled: row for tokens without a label.
    """

    loss: ValueLoss
    values_NK: Tensor | None
    unlabelled: int = 0

    def __call__(self, logits_TK: Tensor, labels_T: Tensor) -> Tensor:
        """Returns losses [T]; those of tokens without a label are finite and meaningless."""
        values_NK = torch.zeros(1, logits_TK.shape[1]) if self.values_NK is None else self.values_NK
        rows_T = labels_T.where(labels_T != IGNORE_INDEX, self.unlabelled)
        return self.loss.losses(logits_TK, values_NK.to(logits_TK.device)[rows_T])


IGNORE_INDEX = -100
# most logits whose probabilities exist at once when tokens are scored: 32 MiB in fp32
_SCORED_LOGITS = 2**23


@runtime_checkable
class TokenLoss(Protocol):
    """A loss to train in place of cross-entropy: a function from the logits of any tokens to one loss per token.

    Plans call it on tiles of tokens, sum its results over the label tokens of the whole step, and divide once by their number
    (or by the sum of their `loss_weights`). So a token's loss must depend on its own logits and label alone. Gradients come from
    autograd. It must be a plain function of its arguments: weights that it holds are not trained.

    Example:

        def focal(logits: Tensor, labels: Tensor) -> Tensor:
            losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
            return (1 - torch.exp(-losses)) ** 2 * losses

        LongContextTrainer(..., token_loss=focal)
    """

    def __call__(self, logits: Tensor, labels: Tensor, /) -> Tensor:
        """Returns losses [T] of logits [T, V], in at least fp32, and labels [T], IGNORE_INDEX for a token without one.

        Losses of tokens without a label are ignored, but must be finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class LabelSmoothing:
    """Cross-entropy with smoothed labels, as transformers computes it for `label_smoothing_factor`.

    The label gets 1 - `factor` of the probability; `factor` is spread evenly over the vocabulary.
    """

    factor: float

    def __call__(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Losses [T]; 0 for tokens without a label."""
        log_p_TV = F.log_softmax(logits_TV, dim=-1)
        is_label_T = labels_T != IGNORE_INDEX
        at_label_T = log_p_TV.gather(1, labels_T.where(is_label_T, 0).unsqueeze(1)).squeeze(1)
        return -((1 - self.factor) * at_label_T + self.factor * log_p_TV.mean(dim=1)).where(is_label_T, 0)


@dataclass(frozen=True, slots=True)
class TemperedCrossEntropy:
    """Cross-entropy of the distribution from which tokens are sampled at a temperature: that of logits / `temperature`."""

    temperature: float

    def __call__(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Losses [T]; 0 for tokens without a label."""
        return F.cross_entropy(logits_TV / self.temperature, labels_T, ignore_index=IGNORE_INDEX, reduction="none")


@dataclass(frozen=True, slots=True)
class LossOfLogProbs(ValueLoss):
    """A loss of each label's log-probability and of numbers that its token has, such as an advantage.

    A row of values has the label, then the columns, and then, if scores are kept, the row of the token among them.
    """

    name: ClassVar[str] = "a loss of log-probabilities"
    # from log-probabilities [T] and columns [T] by name to losses [T], each of its own token alone
    loss: Callable[[Tensor, dict[str, Tensor]], Tensor]
    # names of the columns
    columns: tuple[str, ...]
    temperature: float = 1.0
    # gets the scores (`TokenScores.table_T5`) of each token whose loss is computed, and in row 0 those of tokens without a
    # label; None to keep none
    scores_n5: Tensor | None = None

    def losses(self, logits_TK: Tensor, values_TK: Tensor) -> Tensor:
        """Losses [T]; a label of IGNORE_INDEX counts as one of probability 1."""
        labels_T = values_TK[:, 0].long()
        if self.scores_n5 is not None:
            scores = token_scores(logits_TK.detach(), labels_T, Scoring(self.temperature, with_extras=True))
            self.scores_n5[values_TK[:, -1].long()] = scores.table_T5
        log_probs_T = -TemperedCrossEntropy(self.temperature)(logits_TK, labels_T)
        given = {name: values_TK[:, place].to(log_probs_T.dtype) for place, name in enumerate(self.columns, 1)}
        return self.loss(log_probs_T, given)

    def at(self, values_NK: Tensor | None) -> TokenLoss:
        """Returns the loss of tokens whose labels are row numbers of `values_NK`; None if no token has a label."""
        empty_1K = torch.zeros(1, 1 + len(self.columns) + (self.scores_n5 is not None), dtype=torch.float64)
        # a last row for tokens without a label, so that their gradients are exactly 0, whatever `loss` makes of its columns
        empty_1K[:, 0] = IGNORE_INDEX
        return AtValues(self, empty_1K if values_NK is None else torch.cat([values_NK, empty_1K.to(values_NK)]), unlabelled=-1)


@dataclass(frozen=True, slots=True)
class Distillation:
    """The distance of a token's distribution from that of a teacher, mixed with the cross-entropy of its label.

    The loss is `weight` * D + (1 - `weight`) * cross-entropy. With M = `beta` * teacher + (1 - `beta`) * student,
    D = `beta` * KL(teacher || M) + (1 - `beta`) * KL(student || M): the generalised Jensen-Shannon divergence of GKD (arXiv
    2306.13649, equation 1), computed as TRL's trainers do. Its limits are taken at the ends: 0 is KL(teacher || student), the
    forward divergence, and 1 is KL(student || teacher), the reverse one. Both distributions are those of logits / `temperature`,
    and D is not multiplied by the square of the temperature.

    top_k: D is that of the teacher's k likeliest tokens and of all others together, as one more token; None for all tokens.
    """

    beta: float = 0.0
    temperature: float = 1.0
    weight: float = 1.0
    top_k: int | None = None

    def losses(self, logits_TV: Tensor, teacher_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Returns losses [T] of logits in at least fp32; those of tokens without a label are finite and meaningless."""
        student_TK, teacher_TK = self._tempered(logits_TV), self._tempered(teacher_TV.to(logits_TV.dtype))
        if self.top_k is not None:
            ids_Tk = teacher_TK.topk(self.top_k, dim=-1).indices
            student_TK, teacher_TK = _with_rest(student_TK, ids_Tk), _with_rest(teacher_TK, ids_Tk)
        losses_T = self._divergences(F.log_softmax(student_TK, dim=-1), F.log_softmax(teacher_TK, dim=-1))
        if self.weight == 1:
            return losses_T
        entropies_T = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="none")
        return self.weight * losses_T + (1 - self.weight) * entropies_T

    def _tempered(self, logits_TV: Tensor) -> Tensor:
        if self.temperature < 1:
            # ids that a model hides have the least logit of their dtype, which must stay finite
            logits_TV = logits_TV.clamp_min(torch.finfo(logits_TV.dtype).min * self.temperature / 2)
        return logits_TV / self.temperature

    def _divergences(self, student_TK: Tensor, teacher_TK: Tensor) -> Tensor:
        """Returns D [T] of log-probabilities."""
        if self.beta == 0:
            return _kl(teacher_TK, student_TK)
        if self.beta == 1:
            return _kl(student_TK, teacher_TK)
        mixed_TK = torch.logaddexp(teacher_TK + math.log(self.beta), student_TK + math.log1p(-self.beta))
        return self.beta * _kl(teacher_TK, mixed_TK) + (1 - self.beta) * _kl(student_TK, mixed_TK)


def _kl(p_TK: Tensor, q_TK: Tensor) -> Tensor:
    """Returns KL(p || q) [T] of finite log-probabilities."""
    return (p_TK.exp() * (p_TK - q_TK)).sum(dim=-1)


def _with_rest(logits_TV: Tensor, ids_Tk: Tensor) -> Tensor:
    """Returns logits [T, k + 1] of these tokens, and of all others together."""
    rest_T1 = logits_TV.scatter(1, ids_Tk, -math.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logits_TV.gather(1, ids_Tk), rest_T1], dim=-1)


@dataclass(frozen=True, slots=True)
class AtTeacher:
    """A `TokenLoss` from a `Distillation` and the teacher's hidden states of the same tokens, in order.

    hidden_1TC: on the host or a device. head: returns the teacher's logits [1, t, V] of hidden states [1, t, C].
    """

    loss: Distillation
    hidden_1TC: Tensor
    head: Callable[[Tensor], Tensor]

    def cut(self, tile: slice) -> AtTeacher:
        """Returns the loss of a tile's tokens."""
        return replace(self, hidden_1TC=self.hidden_1TC[:, tile])

    def __call__(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Returns losses [T]."""
        with torch.no_grad():
            teacher_TV = wide_logits(self.head(self.hidden_1TC.to(logits_TV.device, non_blocking=True)))
        return self.loss.losses(logits_TV, teacher_TV, labels_T)


class TokenTally:
    """Counts how well label tokens are predicted, tile by tile, from the logits of their loss.

    sums_3: number of label tokens, number of those whose label was the likeliest token, and sum of entropies in nats; fp64, on
    `device`. Weights of tokens do not count, but a token of weight 0 has no label.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums_3 = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, logits_1TV: Tensor, labels_1T: Tensor) -> None:
        """Counts the tokens with labels, without a graph and without waiting for the device."""
        scores = token_scores(logits_1TV, labels_1T, Scoring())
        columns = (labels_1T != IGNORE_INDEX).reshape(-1), scores.is_right_T, scores.entropies_T
        self.sums_3 += torch.stack([column.sum(dtype=torch.float64) for column in columns])


# the loss that a run trains; None for cross-entropy
AnyLoss = TokenLoss | ValueLoss | Distillation | None


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of the tokens of a shard: next-token labels, each with a weight, and the loss of one token."""

    # IGNORE_INDEX for a token without a label, or of weight 0
    labels_1T: Tensor
    # None if every label weighs 1
    weights_1T: Tensor | None = None
    # None for cross-entropy
    token_loss: TokenLoss | None = None
    # counts the tokens when their loss is computed
    tally: TokenTally | None = None

    @classmethod
    def of(
        cls,
        inputs: ChunkInputs,
        token_loss: AnyLoss = None,
        tally: TokenTally | None = None,
        teacher_head: Callable[[Tensor], Tensor] | None = None,
    ) -> Targets:
        """Makes the targets of a chunk's tokens, on the device of `inputs`. teacher_head: see `AtTeacher`."""
        labels_1T, weights_1T = inputs.shift_labels, inputs.loss_weights
        if isinstance(token_loss, Distillation):
            assert inputs.teacher_1TC is not None and teacher_head is not None, "the teacher has not run"
            token_loss = AtTeacher(token_loss, inputs.teacher_1TC, teacher_head)
        if isinstance(token_loss, ValueLoss):
            token_loss = token_loss.at(inputs.label_values)
        if weights_1T is not None:
            # drop labels of weight 0, so that tiles without others are skipped and infinite losses of weight 0 are not NaN
            labels_1T = labels_1T.masked_fill(weights_1T == 0, IGNORE_INDEX)
        return cls(labels_1T, weights_1T, token_loss, tally)

    def total_weight(self) -> float:
        """Sums the weights of all label tokens; returns their number if there are no weights."""
        is_label_1T = self.labels_1T != IGNORE_INDEX
        counted_1T = is_label_1T if self.weights_1T is None else self.weights_1T[is_label_1T]
        return float(counted_1T.sum())


def summed_loss(logits_1TV: Tensor, targets: Targets) -> Tensor:
    """Sums the losses of this rank's label tokens with their weights: a scalar in at least fp32.

    If no token has a label, loss and gradients are exactly zero.
    """
    if targets.tally is not None:
        targets.tally.add(logits_1TV, targets.labels_1T)
    if targets.token_loss is None and targets.weights_1T is None:
        return summed_cross_entropy(logits_1TV, targets.labels_1T)
    logits_TV, labels_T = wide_logits(logits_1TV), targets.labels_1T.reshape(-1)
    if targets.token_loss is not None:
        losses_T = custom_losses(targets.token_loss, logits_TV, labels_T)
    else:
        losses_T = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="none")
    return weighted(losses_T, targets.weights_1T).sum()


def summed_cross_entropy(logits_1TV: Tensor, shift_labels_1T: Tensor) -> Tensor:
    """Sums cross-entropy over this rank's label tokens: a scalar in at least fp32.

    shift_labels_1T: the next token of each position (shifted before sequences were cut), IGNORE_INDEX if there is none.
    If all labels are masked, loss and gradients are exactly zero.
    """
    logits_TV = wide_logits(logits_1TV)
    return F.cross_entropy(logits_TV, shift_labels_1T.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")


def wide_logits(logits_1TV: Tensor) -> Tensor:
    """Returns logits [T, V] in at least fp32."""
    logits_TV = logits_1TV.reshape(-1, logits_1TV.shape[-1])
    return logits_TV.float() if logits_TV.dtype in (torch.float16, torch.bfloat16) else logits_TV


def label_logits(logits_1TV: Tensor, labels_1T: Tensor) -> Tensor:
    """Returns logits [n, V] of the tokens with labels, in order, in at least fp32."""
    return wide_logits(logits_1TV)[labels_1T.reshape(-1) != IGNORE_INDEX]


def custom_losses(token_loss: TokenLoss, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Returns losses [T] by a user's function in at least fp32, 0 without a label; raises ValueError for another shape."""
    losses_T = token_loss(logits_TV, labels_T)
    if losses_T.shape != labels_T.shape:
        raise ValueError(
            f"token_loss returned shape {tuple(losses_T.shape)} for {len(labels_T)} tokens; return one loss per token "
            f"(reduction='none')"
        )
    return losses_T.to(torch.promote_types(losses_T.dtype, torch.float32)).where(labels_T != IGNORE_INDEX, 0)


def weighted(losses_T: Tensor, weights_1T: Tensor | None) -> Tensor:
    """Multiplies losses of tokens by their weights, if any."""
    return losses_T if weights_1T is None else losses_T * weights_1T.reshape(-1).to(losses_T.dtype)


@dataclass(frozen=True, slots=True)
class Scoring:
    """Settings of scores: distribution of logits / `temperature`; with_extras: also compute `TokenScores.extras_2T`."""

    temperature: float = 1.0
    with_extras: bool = False


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Prediction quality of each token of a shard, without a graph, whatever loss is trained."""

    # cross-entropy, computed in at least fp32 and stored as fp64; 0 for tokens without a label
    losses_T: Tensor
    # the most likely token; IGNORE_INDEX in tiles without labels, which are left out
    likeliest_T: Tensor
    # whether the most likely token is the label; False without a label
    is_right_T: Tensor
    # entropy in nats of the distribution over the next token, computed and stored like losses; 0 without a label
    entropies_T: Tensor
    # mean of the (tempered) logits over the vocabulary, and logarithm of the sum of squared probabilities; empty unless
    # requested by `Scoring`
    extras_2T: Tensor

    @classmethod
    def joined(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """Concatenates the scores of consecutive tokens."""
        names = ("losses_T", "likeliest_T", "is_right_T", "entropies_T", "extras_2T")
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names))

    @property
    def table_T5(self) -> Tensor:
        """Loss, whether the likeliest token is right, entropy and the two extras of each token, in fp64."""
        return torch.stack([self.losses_T, self.is_right_T.double(), self.entropies_T, *self.extras_2T], dim=1)


@torch.no_grad()
def token_scores(logits_1TV: Tensor, shift_labels_1T: Tensor, scoring: Scoring) -> TokenScores:
    """Scores every token of a shard; at temperature 1 the losses add up to `summed_cross_entropy`."""
    logits_TV, labels_T = logits_1TV.reshape(-1, logits_1TV.shape[-1]), shift_labels_1T.reshape(-1)
    num_tokens = max(1, _SCORED_LOGITS // logits_TV.shape[1])
    pairs = zip(logits_TV.split(num_tokens), labels_T.split(num_tokens), strict=True)
    return TokenScores.joined([_scores(wide_logits(logits_tV), labels_t, scoring) for logits_tV, labels_t in pairs])


def _scores(logits_tV: Tensor, labels_t: Tensor, scoring: Scoring) -> TokenScores:
    if scoring.temperature != 1:
        logits_tV = logits_tV / scoring.temperature
    likeliest_t, is_label_t = logits_tV.argmax(-1), labels_t != IGNORE_INDEX
    log_p_tV = F.log_softmax(logits_tV, dim=-1)
    losses_t = -log_p_tV.gather(1, labels_t.where(is_label_t, 0).unsqueeze(1)).squeeze(1).where(is_label_t, 0)
    extras_2t = losses_t.new_zeros(2, 0 if not scoring.with_extras else len(labels_t))
    if scoring.with_extras:
        extras_2t = torch.stack([logits_tV.mean(-1), (2 * log_p_tV).logsumexp(-1)])
    p_tV = log_p_tV.exp_()
    # 0 for a token of probability 0, whose logarithm is infinite
    entropies_t = torch.special.entr(p_tV, out=p_tV).sum(-1).where(is_label_t, 0)
    return TokenScores(losses_t.double(), likeliest_t, likeliest_t == labels_t, entropies_t.double(), extras_2t.double())


def step_loss(loss_sum: Tensor, total_weight: float) -> Tensor:
    """Returns one chunk's contribution to the loss of the step.

    Summed over ranks and chunks, the contributions are the mean over all label tokens of the step. total_weight: their number,
    or the sum of their weights. A step without label tokens has loss zero.
    """
    return loss_sum / (total_weight or 1)
