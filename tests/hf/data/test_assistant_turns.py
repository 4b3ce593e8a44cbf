"""Stock templates without markers: turns are those that markers would give, or the conversation is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from helpers.models.chats import byte_tokenizer, conversation
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from hf_longctx import tokenise_chat
from hf_longctx.hf.data.chat import DataError, render_chat

BEGIN, END = "{% generation %}", "{% endgeneration %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
# templates with markers; without them each is one that cannot say by itself who speaks
MARKED = {
    "branches": (
        "{% for m in messages %}\n    {{- '<|' + m.role + '|>' }}\n    {%- if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}\n    {%- else %}{{ m['content'] + '<|end|>\n' }}{% endif %}\n"
        "{%- endfor %}" + PROMPT
    ),
    # white space around tags is part of the text, and a comment and a quoted text look like tags
    "white space": (
        "{# {% for m in messages %} #}{{ '{% endfor %}' }}\n{% for m in messages -%}\n  {% if m['role'] != 'assistant' %}\n"
        "<|user|>{{ m['content'] | trim }}<|end|>{% else %}"
        "<|assistant|>{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
        "{% endif %}\n{% endfor -%}\n\n" + PROMPT
    ),
    "no prompt": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
        "{% else %}<|user|>{{ m.content }}<|user|>{% endif %}{% endfor %}"
    ),
    "skipped messages and loops inside": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% set ns = namespace(n=0) %}"
        "{% for x in messages %}{% if x.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {{ ns.n }}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}" + PROMPT
    ),
}
CHATS = {
    "two turns": conversation(" hi ", "hello", "ok?", "and 😀 <|user|>"),
    "system": conversation("a", "hello", "b", " é\n", system="be kind"),
    "tools": [*conversation("hi", "hello"), {"role": "tool", "content": "hello"}, {"role": "assistant", "content": "done"}],
    "no answer": conversation("hi"),
}


def unmarked(template: str) -> str:
    return template.replace(BEGIN, "").replace(END, "")


@pytest.mark.parametrize("name", MARKED)
def test_turns_are_those_that_markers_give(name: str) -> None:
    rows = Dataset.from_list([{"messages": messages} for messages in CHATS.values()])
    expected = tokenise_chat(rows, byte_tokenizer(MARKED[name]))
    found = tokenise_chat(rows, byte_tokenizer(unmarked(MARKED[name])))
    assert len(found) == 3
    assert found["input_ids"][:] == expected["input_ids"][:]
    assert found["labels"][:] == expected["labels"][:]


LOOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOP, "row 7.*of tokenizer .* begins with '<|assistant|>hello.*not with its generation prompt ''"),
        (LOOP.replace("<|end|>", "\n") + PROMPT, "a turn of the assistant ends with '<|assistant|>hello\\\\n'"),
        (LOOP + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}", "not with its generation prompt '.*<think>'"),
        ("{% set t %}" + LOOP + "{% endset %}{{ t | upper | lower }}" + PROMPT, None),
        ("{% set t %}" + LOOP + "{% endset %}{{ t[:20] }}" + PROMPT, "not give the same text when marks stand between"),
        (LOOP.replace("<|{{", "{% if m.content | length > 7 %}long{% endif %}<|{{") + PROMPT, "not give the same text"),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>"
            "{% if not loop.last %}{{ messages[loop.index].content }}<|end|>{% endif %}{% endif %}{% endfor %}" + PROMPT,
            "puts what others say into a turn",
        ),
        (LOOP.replace("<|{{", "{% if loop.last %}{% break %}{% endif %}<|{{") + PROMPT, "2 messages .* give 1 pieces of text"),
        ("{% if add_generation_prompt %}<|pad|>{% endif %}" + LOOP + PROMPT, "changes the text before it"),
    ],
)
def test_what_cannot_be_proven_is_refused_by_row(template: str, message: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    messages = conversation("hi, you", "hello", "how are you?", "fine")
    if message is None:
        spans = render_chat(tokenizer, messages, None, "row 7").spans
        assert [end - start for start, end in spans] == [len("hello<|end|>"), len("fine<|end|>")]
        return
    with pytest.raises(DataError, match=message):
        render_chat(tokenizer, messages, None, "row 7")


# the package TRL has stock templates of many families, and training templates with markers for most of them


def _tokenizer(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"eos_token": "</s>", "bos_token": "<s>"})
    ends = ["<end_of_utterance>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>", "<|return|>"]
    tokenizer.add_tokens([AddedToken(end, special=True) for end in ends])
    return tokenizer


def _learnt(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    rendered = render_chat(tokenizer, messages, None, "a row")
    return rendered.text, [rendered.text[start:stop].strip() for start, stop in rendered.spans]


@pytest.mark.trl
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)")
@pytest.mark.parametrize(
    "family", ["cohere2", "gemma3", "lfm2", "llama3", "qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"]
)
def test_turns_of_stock_templates_are_those_of_trls_training_templates(family: str) -> None:
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    stock, training = (_tokenizer((folder / f"{family}{end}.jinja").read_text()) for end in ("", "_training"))
    for messages in (CHATS["two turns"], conversation("a", "hello", "b", "fine")):
        assert _learnt(stock, messages) == _learnt(training, messages)
    rows = Dataset.from_list([{"messages": conversation("hi", "hello", "a", "b")}])
    found, expected = tokenise_chat(rows, stock)[0], tokenise_chat(rows, training)[0]
    assert found == expected


@pytest.mark.trl
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)")
def test_a_stock_template_gets_trls_training_template(caplog: pytest.LogCaptureFixture) -> None:
    import trl

    # in its turns before the last one, the stock template leaves out what its prompt begins: it cannot be proven
    stock = (Path(trl.__file__).parent / "chat_templates" / "qwen3_5_think.jinja").read_text()
    tokenizer = _tokenizer(stock)
    rows = Dataset.from_list([{"messages": CHATS["two turns"]}])
    with pytest.raises(DataError, match="not with its generation prompt"):
        render_chat(tokenizer, rows[0]["messages"], None, "row 0")
    found = tokenise_chat(rows, tokenizer)[0]
    assert "is replaced by TRL's training template" in caplog.text and tokenizer.chat_template == stock
    learnt = tokenizer.decode([label for label in found["labels"] if label >= 0])
    assert learnt.count("<think>") == learnt.count("<|im_end|>") == 2 and "ok?" not in learnt
