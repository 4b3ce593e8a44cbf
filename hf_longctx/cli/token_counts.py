"""Counts the tokens of texts and conversations with a model's tokenizer, for `hf-longctx plan --lengths FILE:COLUMN --tokenizer`.

A row has as many tokens as `tokenise_text` or `tokenise_chat` would give it in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_longctx.sim.workloads import UncountedRow

_BATCH_ROWS = 256


class TokenCounter:
    """A tokenizer, loaded when the first row is counted; `was_used` tells whether there was one."""

    def __init__(self, name: str) -> None:
        self.name, self.was_used = name, False

    def __call__(self, rows: Sequence[UncountedRow]) -> list[int]:
        """Number of tokens of each row; 0 for a text without characters, which training leaves out."""
        self.was_used = True
        tokenizer = self._load()
        counts: list[int] = []
        for first in range(0, len(rows), _BATCH_ROWS):
            counts += _counted(tokenizer, rows[first : first + _BATCH_ROWS])
        return counts

    def _load(self) -> Any:
        from transformers import AutoTokenizer, ByT5Tokenizer

        from hf_longctx.hf.data.chat import with_training_template

        if self.name == "bytes":
            return ByT5Tokenizer(extra_ids=0)
        try:
            return with_training_template(AutoTokenizer.from_pretrained(self.name))
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(
                f"--tokenizer {self.name!r} cannot be loaded ({reason}); give a folder with a tokenizer, a name on the hub, or "
                f"'bytes'"
            ) from error


def _counted(tokenizer: Any, rows: Sequence[UncountedRow]) -> Iterator[int]:
    texts = [row for row in rows if isinstance(row.value, str) and row.value]
    ids = tokenizer([row.value for row in texts], verbose=False)["input_ids"] if texts else []
    end = tokenizer.eos_token_id
    by_place = {row.place: len(own) + (end is not None and own[-1:] != [end]) for row, own in zip(texts, ids, strict=True)}
    for row in rows:
        yield by_place.get(row.place, 0) if isinstance(row.value, str) else _chat_tokens(tokenizer, row)


def _chat_tokens(tokenizer: Any, row: UncountedRow) -> int:
    from hf_longctx.hf.data.chat import read_messages, read_tools, render_text

    if not tokenizer.chat_template:
        raise ValueError(
            f"{row.place}: a conversation, but the tokenizer has no chat template to turn it into text; give --tokenizer a "
            f"folder whose tokenizer has one"
        )
    messages, tools = read_messages(row.value, row.place), read_tools(row.tools, row.place)
    text = render_text(tokenizer, messages, tools, row.place)
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
