"""A refusal as one record, of which its message, its entry on the pages of errors and its test are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_longctx.hf.config import LongContextConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that rules read, as far as those rules need them that are asked; texts may name these fields.

    given: other arguments of the trainer's constructor, by name. draws_batches: whether plans draw the batches and sum the
    gradients, instead of the trainer's own loader and DDP. plans_evaluation: whether evaluations run under plans. has_tokens:
    whether `compute_metrics` gets arrays of tokens, not logits. mixin: the class that replaces methods of the trainer. launch:
    the launcher's `LaunchEnvironment`. task: the `HeadTask` of a model.
    """

    config: LongContextConfig = field(default_factory=LongContextConfig)
    args: Any = None
    model: Any = None
    model_config: Any = None
    task: Any = None
    trainer: Any = None
    given: Mapping[str, Any] = field(default_factory=dict)
    processing_class: Any = None
    num_ranks: int = 1
    degrees: tuple[int, ...] = (1,)
    draws_batches: bool = True
    plans_evaluation: bool = True
    has_tokens: bool = False
    mixin: type = object
    launch: Any = None

    @property
    def optim(self) -> str:
        """The name of the optimizer in `args`."""
        return str(getattr(self.args.optim, "value", self.args.optim))


class _Names(dict[str, Any]):
    """Values of a text by name, and the fields of the facts behind them."""

    def __init__(self, facts: Facts, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._facts = facts

    def __missing__(self, name: str) -> Any:
        return getattr(self._facts, name)


@dataclass(frozen=True, slots=True)
class Rule:
    """One refusal. Its key in a dict of rules is its name and its anchor on the pages of errors.

    text, remedy: what was found and what to do; names in braces are values from `when`, or else fields of the facts. when:
    whether the rule applies, or the values for each place where it does. example: Python that leads to the refusal, changing the
    `config`, `args`, `model`, ... of a plain run on four ranks.
    """

    text: str
    remedy: str
    when: Callable[[Facts], bool | Iterable[Mapping[str, Any]]]
    example: str

    def messages(self, facts: Facts) -> Iterator[str]:
        """Yields the message of each place where the rule applies."""
        found = self.when(facts)
        for values in [{}] if found is True else found or ():
            yield f"{self.text}; {self.remedy}".format_map(_Names(facts, values))


Rules = dict[str, Rule]


def refusals(rules: Rules, facts: Facts) -> list[str]:
    """Messages of all rules that apply, in the order of the rules."""
    return [message for rule in rules.values() for message in rule.messages(facts)]
