"""A refusal as one record, from which its message, its entry on the error pages and its test are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from hf_longctx.hf.config import LongContextConfig


class _Installed(dict[str, str]):
    """Versions of installed packages by name, each read when it is asked for."""

    def __missing__(self, package: str) -> str:
        return self.setdefault(package, version(package))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts that rules read and that their texts may name; a caller fills in those that its rules need."""

    config: LongContextConfig = field(default_factory=LongContextConfig)
    args: Any = None
    model: Any = None
    # its `ModelFacts`
    known: Any = None
    model_config: Any = None
    # the `HeadTask` of the model
    task: Any = None
    trainer: Any = None
    # other arguments of the trainer's constructor, by name
    given: Mapping[str, Any] = field(default_factory=dict)
    processing_class: Any = None
    num_ranks: int = 1
    degrees: tuple[int, ...] = (1,)
    # plans draw the batches and sum the gradients, instead of the trainer's own loader and DDP
    draws_batches: bool = True
    plans_evaluation: bool = True
    # `compute_metrics` gets arrays of tokens, not logits
    has_tokens: bool = False
    # the class that replaces methods of the trainer
    mixin: type = object
    # the launcher's `LaunchEnvironment`
    launch: Any = None
    # versions of installed packages by name
    versions: Mapping[str, str] = field(default_factory=_Installed)

    @property
    def optim(self) -> str:
        """The name of the optimizer in `args`."""
        return str(getattr(self.args.optim, "value", self.args.optim))


class _Names(dict[str, Any]):
    """Values for a text by name; a name that is missing is looked up in the facts."""

    def __init__(self, facts: Facts, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._facts = facts

    def __missing__(self, name: str) -> Any:
        return getattr(self._facts, name)


@dataclass(frozen=True, slots=True)
class Rule:
    """One refusal. Its key in a dict of rules is its name and its anchor on the error pages."""

    # finding and remedy; names in braces are values from `when`, or else fields of the facts
    text: str
    remedy: str
    # whether the rule applies, or the values for each place where it applies
    when: Callable[[Facts], bool | Iterable[Mapping[str, Any]]]
    # Python code that causes the refusal by changing `config`, `args`, `model`, ... of a plain run on four ranks
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
