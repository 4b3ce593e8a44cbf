"""Rows with videos have the tokens and pixels that the model's own processor makes, and faults are named by row."""

from __future__ import annotations

import sys
import wave
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from helpers.models.tiny_processors import chat, file_of, picture, tiny_processor

from hf_longctx import tokenise_chat
from hf_longctx.hf.data.chat import DataError
from hf_longctx.hf.data.media.images import MediaFile
from hf_longctx.hf.data.media.messages import place_media
from hf_longctx.hf.data.media.processors import FileReader, MediaTokens
from hf_longctx.hf.data.media.rows import Medium
from hf_longctx.hf.data.media.videos import Clip, clip_of, open_frames, video_of

VIDEO = {"type": "video"}
TIMES = [0.0, 0.5, 1.0, 2.5, 3.0]


def frames_of(count: int = 5) -> list[bytes]:
    return [file_of(picture(40, 28, seed)) for seed in range(count)]


def pixels_of(count: int = 5) -> torch.Tensor:
    """Frames [count, 3, height, width]."""
    return torch.from_numpy(np.stack([np.asarray(picture(40, 28, seed)) for seed in range(count)])).permute(0, 3, 1, 2)


@pytest.mark.quick
def test_frames_come_with_times_or_a_rate_and_are_refused_without() -> None:
    content = frames_of()
    by_rate = video_of({"frames": content, "fps": 2.0}, "row 0 video 0")
    assert by_rate.times == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert clip_of(by_rate, None, "row 0") == Clip(40, 28, by_rate.times, 2.5, 1.0)
    file = MediaFile.of("video", video_of({"frames": content, "times": TIMES}, "row 0 video 0").as_item())
    assert file.times == tuple(TIMES)
    assert torch.equal(open_frames(file, clip_of(file, None, "row 0"), "row 0"), pixels_of())
    other = [*content[:-1], file_of(picture(40, 30))]
    for value, said in (
        (content, "row 0 is a list of 5 frames without their times; give {frames: "),
        ({"frames": content}, r"row 0 has fps=None and times=None; give one of both"),
        ({"frames": content, "fps": 0}, "row 0 has fps=0 and times=None"),
        ({"frames": content, "times": TIMES[:4]}, "row 0 has 5 frames and 4 times"),
        ({"frames": content, "times": [0.0, 1.0, 1.0, 2.0, 3.0]}, "give every frame a later time than the one before it"),
        (3, r"row 0 is 3 \(int\), expected a path, bytes, or {frames: "),
        ("https://a.b/c.mp4", "row 0 is the address"),
    ):
        with pytest.raises(DataError, match=said):
            video_of(value, "row 0")
    with pytest.raises(DataError, match="row 0 has frames of 2 sizes"):
        clip_of(video_of({"frames": other, "fps": 1}, "row 0"), None, "row 0")


def test_a_processor_without_videos_refuses_them_by_message() -> None:
    rows = datasets.Dataset.from_list([{"messages": chat({**VIDEO, "path": "a.mp4"}, "what?")}])
    with pytest.raises(DataError, match="message 0 has a video, which the processor does not read"):
        tokenise_chat(rows, tiny_processor("llava"))


def test_a_processor_without_videos_refuses_a_column_of_them() -> None:
    with pytest.raises(DataError, match="row 3 has a column with a video, which the processor does not read"):
        place_media(chat("what?"), {"image": [], "video": ["a.mp4"]}, {"image": "<image>"}, "row 3")


def movie(folder: Path, count: int = 12, rate: int = 4) -> str:
    """A file of so many frames."""
    av = pytest.importorskip("av")
    with av.open(str(folder / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for seed in range(count):
            frame = av.VideoFrame.from_ndarray(np.asarray(picture(48, 32, seed)), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return str(folder / "a.mp4")


def decoded(path: str) -> torch.Tensor:
    import av

    with av.open(path) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)


def truth(processor: Any, parts: list[Any], video: torch.Tensor, metadata: Any, samples: bool) -> Any:
    """Returns the output of the processor for a whole conversation."""
    text = processor.tokenizer.apply_chat_template(chat(*parts), tokenize=False)
    return processor(
        text=[text],
        videos=[video],
        video_metadata=[metadata],
        do_sample_frames=samples,
        return_tensors="pt",
        add_special_tokens=False,
    )


def reader_of(processor: Any) -> FileReader:
    made = MediaTokens(processor)
    return FileReader(made, made.features, {"video": ("pixel_values_videos", "video_grid_thw")}, None)


def check(processor: Any, row: dict[str, Any], expected: Any) -> None:
    """Asserts that a tokenised row with one video has these tokens, and that towers read these pixels."""
    assert row["input_ids"] == expected["input_ids"][0].tolist()
    (item,), (file,) = row["media"], row["media_files"]
    medium = Medium.of(item)
    assert medium.grid == tuple(expected["video_grid_thw"][0].tolist())
    assert medium.seconds == (float(expected["second_per_grid_ts"][0]) if "second_per_grid_ts" in expected else 0.0)
    own = row["input_ids"][medium.start : medium.stop]
    assert own.count(processor.video_token_id) == medium.num_features == row["input_ids"].count(processor.video_token_id)
    assert set(row["labels"][medium.start : medium.stop]) == {-100}
    found = reader_of(processor).tower_inputs(medium, file, own, "row 0 video 0")
    assert torch.equal(found.tensors["pixel_values_videos"], expected["pixel_values_videos"])
    assert medium.num_parts == medium.grid[0]
    assert medium.num_parts * medium.elements == expected["pixel_values_videos"].numel()


@pytest.mark.parametrize("folder", ["qwen3_vl", "qwen2_5_vl"])
def test_tokens_and_pixels_of_frames_are_those_of_the_processor(folder: str) -> None:
    pytest.importorskip("torchvision")
    from transformers.video_utils import VideoMetadata

    processor = tiny_processor(folder, has_videos=True)
    metadata = VideoMetadata(total_num_frames=5, fps=2.0, frames_indices=list(range(5)))
    expected = truth(processor, [VIDEO, "what is this?"], pixels_of(), metadata, False)
    video = {"frames": frames_of(), "fps": 2.0}
    for row in (
        {"messages": chat({**VIDEO, **video}, "what is this?")},
        {"messages": chat(VIDEO, "what is this?"), "videos": [video]},
        {"messages": chat("what is this?"), "videos": [video]},
    ):
        (made,) = tokenise_chat(datasets.Dataset.from_list([row]), processor)
        check(processor, made, expected)
    # one frame, fewer than towers join
    row = {"messages": chat("what?"), "videos": [video | {"frames": frames_of(1)}]}
    (alone,) = tokenise_chat(datasets.Dataset.from_list([row]), processor)
    metadata = VideoMetadata(total_num_frames=1, fps=1.0, frames_indices=[0])
    check(processor, alone, truth(processor, [VIDEO, "what?"], pixels_of(1), metadata, False))
    with pytest.raises(DataError, match=r"row 0 video 0 \(5 frames of 40 x 28 pixels\) takes \d+ tokens now, but its row has"):
        medium = Medium.of(made["media"][0])
        ids = made["input_ids"][medium.start : medium.stop - 1]
        reader_of(processor).tower_inputs(medium, made["media_files"][0], ids, "row 0 video 0")


@pytest.mark.parametrize("folder", ["qwen3_vl", "qwen2_5_vl"])
def test_frames_of_a_file_are_those_that_the_processor_samples_and_are_counted_without_decoding(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchvision")
    from transformers.video_utils import VideoMetadata

    path, processor = movie(tmp_path), tiny_processor(folder, has_videos=True)
    expected = truth(processor, [VIDEO, "what?"], decoded(path), VideoMetadata(total_num_frames=12, fps=4.0), True)
    rows = datasets.Dataset.from_list([{"messages": chat({**VIDEO, "path": path}, "what?")}])
    with monkeypatch.context() as patch:
        patch.setattr("hf_longctx.hf.data.media.videos._decoded", None)
        (row,) = tokenise_chat(rows, processor)
    assert 2 <= len(clip_of(MediaFile("video", path), processor.video_processor, "row 0").numbers) < 12
    check(processor, row, expected)
    content = datasets.Dataset.from_list([{"messages": chat(VIDEO, "what?"), "videos": [Path(path).read_bytes()]}])
    check(processor, tokenise_chat(content, processor)[0], expected)


def test_damaged_files_and_a_missing_decoder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = movie(tmp_path)
    file = MediaFile("video", content=Path(path).read_bytes()[:200])
    with pytest.raises(DataError, match="row 0 cannot be read"):
        clip_of(file, None, "row 0")
    with pytest.raises(DataError, match=r"row 0 \(.*b.mp4\) cannot be read \(FileNotFoundError"):
        clip_of(MediaFile("video", str(tmp_path / "b.mp4")), None, "row 0")
    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(1600))
    with pytest.raises(DataError, match=r"row 0 \(.*a.wav\) has no pictures; give a video, or remove the row"):
        clip_of(MediaFile("video", str(tmp_path / "a.wav")), None, "row 0")
    with pytest.raises(DataError, match=r"row 0 \(.*a.mp4\) ends before its frame 40"):
        open_frames(MediaFile("video", path), Clip(48, 32, (0, 40), 41, 4.0), "row 0")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"row 0 is the file of a video, which PyAV decodes .* install it"):
        clip_of(MediaFile("video", path), None, "row 0")
