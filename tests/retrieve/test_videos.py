"""Reading videos, and asking about them by either path."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conduit_kv import InputError
from conduit_kv.engine.vlm import VLM
from conduit_kv.videos import Video, read_video
from tests.tiny import VIDEO_NAMES, tiny_model
from tests.tiny.parts import film

av = pytest.importorskip("av")


def clip(frames: int = 12, *, pictures: bool = True) -> bytes:
    """A video whose frame ``n`` has brightness ``20 n``, 10 frames per second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        if pictures:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for number in range(frames):
                array = np.full((48, 64, 3), 20 * number, np.uint8)
                for packet in stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")):
                    container.mux(packet)
            for packet in stream.encode():
                container.mux(packet)
        else:
            sound = container.add_stream("aac", rate=8000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), "fltp", "mono")
            frame.sample_rate = 8000
            for packet in [*sound.encode(frame), *sound.encode()]:
                container.mux(packet)
    return buffer.getvalue()


def test_frames_are_evenly_spaced(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip())
    video = read_video(path, frames=4)
    brightness = [round(float(np.asarray(frame).mean()) / 20) for frame in video.frames]
    assert brightness == [1, 4, 7, 10]
    assert video.frames[0].size == (64, 48)
    assert video.fps == pytest.approx(10 / 3, rel=0.01)
    assert len(read_video(path).frames) == 12
    assert read_video(video) is video


def test_what_is_no_video_is_one_clear_error(tmp_path: Path) -> None:
    whole = clip()
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    for data, words in (
        (b"", "empty"),
        (b"no video at all" * 50, "damaged or no video"),
        (whole[: len(whole) // 3], "damaged or no video"),
        (clip(pictures=False), "no pictures"),
    ):
        path = tmp_path / "x.mp4"
        path.write_bytes(data)
        with pytest.raises(InputError, match=words):
            read_video(path)
    with pytest.raises(InputError, match="no such file"):
        read_video(tmp_path / "none.mp4")
    with pytest.raises(InputError, match="folder"):
        read_video(tmp_path)
    with pytest.raises(InputError, match="without frames"):
        Video(())
    with pytest.raises(InputError, match="differ in size"):
        Video.of([Image.new("RGB", (8, 8)), Image.new("RGB", (8, 9))])
    with pytest.raises(InputError, match="fps"):
        Video.of([Image.new("RGB", (8, 8))], fps=0)
    with pytest.raises(InputError, match="frames=0"):
        read_video(whole, frames=0)


def test_without_pyav_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"conduit-kv\[video\]"):
        read_video(b"something")


@pytest.mark.parametrize("name", [n for n in VIDEO_NAMES if "sliding" not in n])
def test_videos_go_through_the_processor_where_it_takes_them(name: str) -> None:
    vlm = VLM(*tiny_model(name), name)
    assert vlm.takes_videos
    video = Video(tuple(map(Image.fromarray, film(4, 56, 56))), fps=2.0)
    reply = vlm.ask("What moves?", plan="uniform-frames:0.5", videos=[video], max_new_tokens=2)
    layout = reply.report.sequences[0]
    assert sum(layout.images) > 0 and layout.kept_visual < sum(layout.images)


def test_frames_are_images_elsewhere() -> None:
    vlm = VLM(*tiny_model("llava"), "llava")
    assert not vlm.takes_videos
    frames = tuple(map(Image.fromarray, film(3, 28, 28)))
    chat = vlm.session("random-select:16")
    reply = chat.ask("What moves?", videos=[Video(frames)], max_new_tokens=2)
    assert len(reply.report.sequences[0].images) == 3
    said = [part.get("text") for part in chat.messages[0]["content"]]
    assert said == ["Image 1:", None, "Image 2:", None, "Image 3:", None, "What moves?"]
    again = chat.ask("And now?", max_new_tokens=2)
    assert torch.tensor(again.tokens).numel() <= 2
