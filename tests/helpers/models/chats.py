"""Tokenizers built on the spot and conversations, with labels worked out from UTF-8 bytes instead of the tokenizer's offsets."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
# in this template the end token stands outside the generation markers, so a span may end in the middle of a token
BARE_TEMPLATE = TEMPLATE.replace("{{ message.content + '<|end|>' }}{% endgen", "{{ message.content }}{% endgen").replace(
    "{% endgeneration %}", "{% endgeneration %}{{ '<|end|>' }}"
)
_TEXT = ["the cat sat on the mat and said hello to you", "what is this? it is an answer to a question", "one two three four"]


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Tokenizer of byte-level BPE: some words are one token, an emoji is several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXT * 5, trainer)
    return _wrapped(tokenizer, template)


def word_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Tokenizer of words and punctuation; white space has no token."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(_TEXT, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return _wrapped(tokenizer, template)


def number_tokenizer(pad_token: str = "64", padding_side: str = "right") -> PreTrainedTokenizerFast:
    """Tokenizer of the words 0 to 64, whose ids they are."""
    words = {str(number): number for number in range(65)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token=pad_token)
    made.padding_side = padding_side
    return made


def conversation(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages that user and assistant write in turn."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def rendered_by_hand(messages: list[dict[str, str]], end_is_learnt: bool = True) -> tuple[str, list[tuple[int, int]]]:
    """The text of TEMPLATE (or BARE_TEMPLATE), and the byte spans of what the assistant said."""
    text, spans = "", []
    for message in messages:
        text += f"<|{message['role']}|>"
        start = len(text.encode())
        text += message["content"]
        stop = len(text.encode())
        text += "<|end|>"
        if message["role"] == "assistant":
            spans.append((start, len(text.encode()) if end_is_learnt else stop))
    return text, spans


def labels_by_bytes(tokenizer: PreTrainedTokenizerFast, ids: list[int], spans: list[tuple[int, int]]) -> list[int]:
    """Labels of byte-level tokens; the bytes of the tokens are counted to find where each lies in the text."""
    from_unicode = {character: byte for byte, character in bytes_to_unicode().items()}
    labels, place = [], 0
    for token_id, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        data = token.encode() if token in SPECIAL else bytes(from_unicode[character] for character in token)
        stop = place + len(data)
        labels.append(token_id if any(place < end and stop > begin for begin, end in spans) else -100)
        place = stop
    return labels


def _wrapped(tokenizer: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    wrapped.chat_template = template
    return wrapped


def tokenizer_of(num_tokens: int) -> PreTrainedTokenizerFast:
    """A tokenizer with `num_tokens` words."""
    words = {f"w{number}": number for number in range(num_tokens)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0")
