"""Rows with images: their tokens are those of the user's processor, and nothing but headers is read to count them."""

from __future__ import annotations

import random
from typing import Any

import datasets
import pytest
from helpers.models.tiny_processors import FOLDERS, chat, file_of, picture, tiny_processor
from PIL import Image

from hf_longctx.hf.data.chat import DataError
from hf_longctx.hf.data.media.images import image_size, open_image
from hf_longctx.hf.data.media.processors import MediaTokens
from hf_longctx.hf.data.scan import scan_dataset
from hf_longctx.hf.data.tokenise import tokenise_chat, tokenise_completions, tokenise_text, uniform

SIZES = [(40, 28), (17, 64), (96, 33), (64, 64)]


def rows_of(*rows: dict[str, Any]) -> datasets.Dataset:
    return datasets.Dataset.from_list(list(rows))


def truth(processor: Any, messages: list[dict[str, Any]], images: list[Image.Image]) -> list[int]:
    """Token ids by the processor's own template and call, with all images of the row at once."""
    plain = [
        {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]}
        for message in messages
    ]
    tokenizer = processor.tokenizer
    text = tokenizer.apply_chat_template(plain, tokenize=False)
    found = processor(text=[text], images=[images] if images else None, add_special_tokens=False)
    return list(found["input_ids"][0])


@pytest.mark.wide("qwen3_vl", "llava_next")
@pytest.mark.parametrize("folder", FOLDERS)
def test_tokens_are_those_of_the_processor_and_only_the_assistants_are_learnt(folder: str, tmp_path: Any) -> None:
    processor, rng = tiny_processor(folder), random.Random(4)
    number = 1 if folder == "llava_onevision" else 2
    images = [picture(*size, seed) for seed, size in enumerate(rng.sample(SIZES, number))]
    for place, image in enumerate(images):
        image.save(tmp_path / f"{place}.png")
    parts: list[Any] = ["what is this?"]
    for place in range(number):
        parts += [{"type": "image", "path": str(tmp_path / f"{place}.png")}, " and said hello"]
    messages = chat(*parts)
    (row,) = tokenise_chat(rows_of({"messages": messages}), processor)
    assert row["input_ids"] == truth(processor, messages, images)
    learnt = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    assert processor.tokenizer.decode(learnt) == "it is an answer<|end|>"
    feature = MediaTokens(processor).feature
    for item, image in zip(row["media"], images, strict=True):
        pixels = MediaTokens(processor).read(image, "image")[1]["pixel_values"]
        assert item["num_parts"] * item["elements"] == pixels.numel() > 0
        own = slice(item["start"], item["stop"])
        assert row["input_ids"][own].count(feature) == item["num_features"] > 0
        assert set(row["labels"][own]) == {-100}
    assert len(row["media"]) == number
    assert sum(item["num_features"] for item in row["media"]) == row["input_ids"].count(feature)


def test_images_may_be_paths_bytes_images_of_datasets_and_pil_images(tmp_path: Any) -> None:
    processor, image = tiny_processor("qwen3_vl"), picture(40, 28)
    image.save(tmp_path / "a.png")
    messages = chat({"type": "image"}, "what is this?")
    given: list[Any] = [str(tmp_path / "a.png"), file_of(image), {"bytes": file_of(image), "path": None}]
    rows = [tokenise_chat(rows_of({"messages": messages, "images": [each]}), processor)[0] for each in given]
    decoded = datasets.Dataset.from_dict({"messages": [messages], "image": [image]}, features=None)
    listed = datasets.Dataset.from_dict(
        {"messages": [messages], "images": [[{"bytes": file_of(image)}]]},
    ).cast_column("images", datasets.List(datasets.Image()))
    rows += [tokenise_chat(decoded, processor)[0], tokenise_chat(listed, processor)[0]]
    assert len({tuple(row["input_ids"]) for row in rows}) == 1
    for row in rows:
        (file,) = row["media_files"]
        assert open_image(file["path"], file["bytes"], "row 0").tobytes() == image.tobytes()


def test_images_without_a_place_stand_before_the_first_text_of_a_user_as_in_trl(tmp_path: Any) -> None:
    processor, image = tiny_processor("qwen3_vl"), picture(40, 28)
    plain = [{"role": "user", "content": "what is this?"}, {"role": "assistant", "content": "one"}]
    (row,) = tokenise_chat(rows_of({"messages": plain, "images": [file_of(image)]}), processor)
    messages = chat({"type": "image"}, "what is this?", answer="one")
    assert row["input_ids"] == truth(processor, messages, [image])
    # a text may name its place itself
    plain[0]["content"] = "what <|vision_start|><|image_pad|><|vision_end|> is this?"
    (row,) = tokenise_chat(rows_of({"messages": plain, "images": [file_of(image)]}), processor)
    messages = chat("what ", {"type": "image"}, " is this?", answer="one")
    assert row["input_ids"] == truth(processor, messages, [image])


def test_prompts_and_completions_have_a_placeholder_for_each_image() -> None:
    processor, images = tiny_processor("llava"), [picture(40, 28), picture(64, 64)]
    row = {"prompt": "what <image> is <image>this? ", "completion": "one two", "images": [file_of(each) for each in images]}
    (made,) = tokenise_completions(rows_of(row), processor)
    text = row["prompt"] + row["completion"]
    expected = list(processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0])
    end = processor.tokenizer.eos_token_id
    assert made["input_ids"] == expected + ([] if end is None else [end])
    learnt = [token for token, label in zip(made["input_ids"], made["labels"], strict=True) if label != -100]
    # the token across the border belongs to the completion
    assert processor.tokenizer.decode(learnt).lstrip().startswith("one two")
    assert [item["num_features"] for item in made["media"]] == [16, 16]
    with pytest.raises(DataError, match="row 0 has 1 images but 2 placeholders '<image>' in its text"):
        tokenise_completions(rows_of(row | {"images": [file_of(images[0])]}), processor)


def test_images_side_by_side_are_refused_where_positions_could_not_tell_them_apart() -> None:
    row = {"prompt": "<|image_pad|><|image_pad|> what? ", "completion": "one", "images": [file_of(picture(40, 28))] * 2}
    with pytest.raises(DataError, match="row 0 image 1 stands right behind another image, where classes with positions"):
        tokenise_completions(rows_of(row), tiny_processor("qwen3_vl"))
    row["prompt"] = "<image><image> what? "
    assert len(tokenise_completions(rows_of(row), tiny_processor("llava"))[0]["media"]) == 2


def test_what_is_not_learnt_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    image_rows()
    assert caplog.text.count("no token of an image or a video is learnt: their labels are -100") == 1


@pytest.mark.quick
def test_sizes_come_from_headers_and_obey_the_orientation_of_cameras() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = file_of(picture(300, 100), "JPEG", exif=exif)
    assert image_size(None, content, "row 0") == (100, 300)
    assert open_image(None, content, "row 0").size == (100, 300)
    # pixels are missing, the header is there
    assert image_size(None, content[: len(content) // 2], "row 0") == (100, 300)
    with pytest.raises(DataError, match="row 0 cannot be read"):
        open_image(None, content[: len(content) // 2], "row 0")


def test_the_processor_is_asked_once_per_size(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = tiny_processor("qwen3_vl")
    calls = []
    tokens = MediaTokens(processor)
    read = MediaTokens.read
    monkeypatch.setattr(MediaTokens, "read", lambda *each: calls.append(each[1].size) or read(*each))
    for size in [*SIZES, *SIZES]:
        tokens.of_size(*size, "row 0")
    assert calls == SIZES


def test_other_settings_of_the_processor_are_not_answered_from_the_cache(tmp_path: Any) -> None:
    rows = rows_of({"messages": chat({"type": "image"}, "what?"), "images": [file_of(picture(96, 96))]})
    rows.save_to_disk(tmp_path / "rows")
    rows = datasets.load_from_disk(tmp_path / "rows")
    lengths = []
    for most in (1024, 256):
        processor = tiny_processor("qwen3_vl")
        processor.image_processor.size = {"shortest_edge": 64, "longest_edge": most}
        lengths.append(len(tokenise_chat(rows, processor)[0]["input_ids"]))
    assert lengths[0] > lengths[1]


PATH = {"type": "image", "path": "missing.png"}
ONE = {"type": "image"}


@pytest.mark.parametrize(
    "row, said",
    [
        ({"messages": chat(PATH, "a")}, r"row 0 column 'messages' message 0 image|row 0 image 0 \(missing.png\) cannot be read"),
        ({"messages": chat(ONE, "a")}, r"message 0 has a part \{type: image\} without an image; give it as"),
        ({"messages": chat("a"), "images": [b"x", b"y"]}, "row 0 image 0 cannot be read .UnidentifiedImageError"),
        (
            {"messages": chat({**ONE, "url": "https://a.b/c.png"}, "a")},
            "is the address 'https://a.b/c.png', and loaders read files",
        ),
        ({"messages": chat(ONE, "a"), "images": ["a", "b"]}, "has 2 images in its columns, but 1 parts"),
        ({"messages": chat("see <|image_pad|>")}, r"row 0 has 0 images but 1 placeholders '<\|image_pad\|>' in its text"),
        ({"messages": chat(ONE, "a"), "images": ["a"], "image": "b"}, "has images in both columns images and image"),
        ({"messages": chat({**ONE, "image": 3}, "a")}, r"is 3 \(int\), expected a path, bytes"),
        (
            {"messages": [{"role": "assistant", "content": "a"}], "images": ["a"]},
            "has 1 images and no message of a user in which they could stand",
        ),
    ],
)
def test_bad_images_are_refused_by_row_with_a_remedy(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        tokenise_chat(rows_of(row), tiny_processor("qwen3_vl"))


def test_images_that_a_processor_refuses_and_moving_images_are_named() -> None:
    messages, processor = chat(ONE, "a"), tiny_processor("qwen3_vl")
    with pytest.raises(
        DataError, match=r"row 0 image 0 \(900 x 4 pixels\) is refused by Qwen3VLProcessor .*absolute aspect ratio"
    ):
        tokenise_chat(rows_of({"messages": messages, "images": [file_of(picture(900, 4))]}), processor)
    moving = file_of(picture(8, 8), "GIF", save_all=True, append_images=[picture(8, 8, 1)])
    with pytest.raises(DataError, match="row 0 image 0 has 2 frames; give one image"):
        tokenise_chat(rows_of({"messages": messages, "images": [moving]}), processor)


def test_processors_that_do_not_fit_are_refused_by_name() -> None:
    processor = tiny_processor("llava")
    processor.image_token = "<nothing>"
    with pytest.raises(DataError, match=r"\(LlavaProcessor\) names images by '<nothing>', which is no token of its own"):
        _ = MediaTokens(processor).placeholder
    processor.image_processor = None
    with pytest.raises(DataError, match=r"the processor \(LlavaProcessor\) has no image_processor, so it reads no images"):
        tokenise_chat(rows_of({"messages": chat(ONE, "a")}), processor)


def test_text_around_an_image_that_depends_on_its_size_is_refused() -> None:
    tokens = MediaTokens(tiny_processor("gemma3"))
    # the text as learnt from an image of another size
    vars(tokens)["ends"] = ("here is ", "")
    with pytest.raises(DataError, match="row 0: Gemma3Processor names no features, or puts text at the ends of an image that"):
        tokens.of_size(96, 32, "row 0")


def test_a_message_may_have_an_image_alone() -> None:
    processor, image = tiny_processor("qwen3_vl"), picture(40, 28)
    (row,) = tokenise_chat(rows_of({"messages": chat(ONE), "images": [file_of(image)]}), processor)
    assert row["input_ids"] == truth(processor, chat(ONE), [image])


def test_several_images_are_refused_where_a_class_gives_them_other_tokens_together() -> None:
    images = [file_of(picture(40, 28, seed)) for seed in range(2)]
    rows = rows_of({"messages": chat(ONE, ONE, "a"), "images": images})
    with pytest.raises(
        DataError, match="row 0 has 2 images, but LlavaOnevisionProcessor gives an image another number of tokens"
    ):
        tokenise_chat(rows, tiny_processor("llava_onevision"))


def test_a_tokenizer_alone_refuses_parts_with_images_and_names_the_processor() -> None:
    tokenizer = tiny_processor("qwen3_vl").tokenizer
    with pytest.raises(DataError, match="for images, tokenise with the model's processor in place of its tokenizer"):
        tokenise_chat(rows_of({"messages": chat(ONE, "a")}), tokenizer)


ROW = {"messages": chat("a"), "prompt": "what? ", "completion": "one", "text": "one two"}
WAYS = (tokenise_chat, tokenise_completions, tokenise_text)
FILES = datasets.Image(decode=False)


def rows_with(name: str, value: Any, feature: Any = None) -> datasets.Dataset:
    """Three rows that any of the functions reads, the last of which has a value in a further column."""
    rows = datasets.Dataset.from_list([ROW | {name: each} for each in (None, None, value)])
    return rows if feature is None else rows.cast_column(name, feature)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name, value, feature",
    [
        *(("images", ["a.png"], None), ("image", "a.png", None), ("videos", ["a.mp4"], None), ("audio", b"x", None)),
        *(("img_path", "a.png", None), ("imageFile", "a.png", None), ("image_2", "a.png", None), ("jpg", b"x", None)),
        ("image", [[1.0, 2.0]], datasets.Array2D((1, 2), "float32")),
        *(("pixel_values", [[0.5]], None), ("image", [[1, 2]], None), ("multi_modal_data", {"image": ["a.png"]}, None)),
        *(("shot", {"bytes": b"x", "path": None}, FILES), ("shots", [{"bytes": b"x", "path": None}], datasets.List(FILES))),
        *(
            ("shot", {"bytes": file_of(picture(8, 8)), "path": None}, datasets.Image()),
            ("seen", {"by": [{"bytes": b"x", "path": ""}]}, None),
        ),
    ],
)
def test_a_row_whose_image_video_or_sound_a_tokenizer_would_ignore_is_refused(
    way: Any, name: str, value: Any, feature: Any
) -> None:
    said = f"row 2 has '{name}': .*, which is not read, and to ignore it would change the text; tokenise_chat and .* processor"
    with pytest.raises(DataError, match=said):
        way(rows_with(name, value, feature), tiny_processor("qwen3_vl").tokenizer)
    with pytest.raises(DataError, match=said.replace("row 2", "row 7")):
        way(rows_with(name, value, feature), tiny_processor("qwen3_vl").tokenizer, row_numbers=(3, 5, 7))


@pytest.mark.daily("tokenise_text")
@pytest.mark.parametrize("way", WAYS)
def test_columns_without_images_and_columns_about_images_are_no_media(way: Any) -> None:
    tokenizer = tiny_processor("qwen3_vl").tokenizer
    expected = way(datasets.Dataset.from_list([ROW] * 3), tokenizer)[:]
    empty: tuple[Any, ...] = ([], [None], "", {"bytes": None, "path": None}, None)
    harmless = {
        "image_id": 3,
        "num_images": 2,
        "images": 2,
        "image_url": "https://a.b/c.png",
        "image_caption": "a cat",
        "path": "a",
    }
    for name, value in (*(("images", each) for each in empty), *harmless.items()):
        if (way, value) != (tokenise_chat, 2):
            assert way(rows_with(name, value), tokenizer)[:] == expected
    assert way(rows_with("shot", None, datasets.Image()), tokenizer)[:] == expected


@pytest.mark.parametrize("way", [tokenise_chat, tokenise_completions])
@pytest.mark.parametrize("name, value", [("videos", ["a.mp4"]), ("img_path", "a.png"), ("shot", {"bytes": b"x", "path": None})])
def test_a_processor_refuses_rows_with_media_that_it_does_not_read(way: Any, name: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"row 2 has '{name}': .*, which is not read"):
        way(rows_with(name, value), tiny_processor("qwen3_vl"))


def image_rows() -> tuple[datasets.Dataset, tuple[int, ...], int]:
    """Two rows, the first with an image; ids that stand for images, and the vocabulary."""
    processor = tiny_processor("qwen3_vl")
    rows = rows_of({"messages": chat(ONE, "a"), "images": [file_of(picture(40, 28))]}, {"messages": chat("b"), "images": []})
    return tokenise_chat(rows, processor), (MediaTokens(processor).feature,), len(processor.tokenizer)


@pytest.mark.parametrize("listed", [False, True])
def test_a_scan_counts_rows_with_images_and_refuses_places_that_are_wrong(listed: bool) -> None:
    tokens, placeholders, vocab_size = image_rows()
    rows = [dict(row) for row in tokens]
    scan = scan_dataset(rows if listed else tokens, "d", vocab_size, placeholders=placeholders)
    assert scan.problems == []
    assert scan.media_features is not None
    assert scan.media_features.tolist() == [12, 0]
    assert scan.media is not None
    numbers = ("start", "stop", "num_features", "num_parts", "elements")
    assert scan.media.tolist() == [[0, *(item[name] for name in numbers), 0] for item in tokens[0]["media"]]
    for change in ({"start": 0, "stop": 3}, {"num_features": 11}, {"stop": 1000}):
        rows[0]["media"] = [rows[0]["media"][0] | change]
        given = rows if listed else datasets.Dataset.from_list(rows, features=tokens.features)
        (problem,) = scan_dataset(given, "d", vocab_size, placeholders=placeholders).problems
        assert problem.startswith("d row 0 has 12 tokens that stand for images, sound or video")
        rows = [dict(row) for row in tokens]
    (problem,) = scan_dataset(tokens.remove_columns("media"), "d", vocab_size, placeholders=placeholders).problems
    assert "but its row has none; give conversations with images to tokenise_chat and the model's processor" in problem


def test_sets_with_images_are_not_mixed_with_others_since_that_would_drop_the_images() -> None:
    with pytest.raises(DataError, match="has a column 'media', which mixing would drop"):
        uniform(image_rows()[0], True)
