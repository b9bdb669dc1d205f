"""Media by data: URL, base64, file and http: what is loaded and what is refused."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.errors import MediaError, MediaTooLarge
from omnistage.serving.media import MediaLoader, MediaSource, decode_base64, decode_data_url, media_key
from omnistage.serving.settings import MediaSettings
from omnistage.serving.sniff import sniff

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
MP4 = b"\0\0\0\x18ftypisom" + bytes(12)
WAV = b"RIFF\x24\0\0\0WAVEfmt " + bytes(40)


async def load(*sources: MediaSource, **settings: object):
    loader = MediaLoader(MediaSettings(**settings))
    try:
        return await loader.load(sources)
    finally:
        await loader.aclose()


def picture(url: str) -> MediaSource:
    return MediaSource("image", "messages[0]", url=url)


@pytest.mark.parametrize(
    ("head", "mime"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"GIF89a", "image/gif"),
        (b"\0\0\0\x1cftypavif", "image/avif"),
        (WAV, "audio/wav"),
        (b"ID3\x04", "audio/mpeg"),
        (b"\xff\xfb\x90\x00", "audio/mpeg"),
        (b"\xff\xf1\x50\x80", "audio/aac"),
        (b"fLaC\0", "audio/flac"),
        (b"OggS\0", "audio/ogg"),
        (b"\0\0\0\x1cftypM4A ", "audio/mp4"),
        (b"\x1aE\xdf\xa3", "audio/webm"),
        (MP4, "audio/mp4"),
        (b"\0\0\0\x14ftypqt  ", "audio/mp4"),
        (b"\0\0\0\x08wide\0\0\0\0mdat", "video/quicktime"),
        (b"RIFF\0\0\0\0AVI LIST", "video/x-msvideo"),
        (b"hello", None),
        (b"", None),
        (b"\xff", None),
    ],
)
def test_sniff(head: bytes, mime: str | None):
    assert sniff(head) == mime


@pytest.mark.parametrize("sound_format", ["wav", "mp3", "flac", "opus", "aac"])
def test_sniff_knows_what_we_encode(sound_format):
    import numpy as np

    from omnistage.audio.containers import StreamEncoder, encode
    from omnistage.audio.pcm import Pcm

    samples = np.zeros(9000, dtype=np.float32)
    encoder = StreamEncoder(sound_format, 22_050)
    for data in (encode(Pcm(samples, 22_050), sound_format), encoder.push(samples) + encoder.close()):
        mime = sniff(data)
        assert mime is not None
        assert mime.startswith("audio/")


@pytest.mark.parametrize(
    ("modality", "data", "mime"),
    [
        ("audio", MP4, "audio/mp4"),
        ("video", MP4, "video/mp4"),
        ("audio", b"\x1aE\xdf\xa3", "audio/webm"),
        ("video", b"\x1aE\xdf\xa3", "video/webm"),
        ("video", b"RIFF\0\0\0\0AVI LIST", "video/x-msvideo"),
        ("audio", b"RIFF\0\0\0\0AVI LIST", None),
        ("video", WAV, None),
        ("video", PNG, None),
        ("image", MP4, None),
    ],
)
async def test_a_container_is_what_it_is_sent_as(modality, data: bytes, mime: str | None):
    if mime is None:
        with pytest.raises(MediaError, match=f"the {modality} looks like .*; send a"):
            await load(MediaSource(modality, "x", data=data))
    else:
        [media] = await load(MediaSource(modality, "x", data=data))
        assert media.mime == mime
        assert media.key == media_key(modality, data, {})


async def test_order_and_keys():
    encoded = base64.b64encode(WAV).decode()
    media = await load(
        picture("data:image/png;base64," + base64.b64encode(PNG).decode()),
        MediaSource("audio", "x", encoded=encoded, declared="wav"),
        MediaSource("audio", "x", data=WAV),
    )
    assert [item.mime for item in media] == ["image/png", "audio/wav", "audio/wav"]
    assert [item.data for item in media] == [PNG, WAV, WAV]
    assert media[1].key == media[2].key != media[0].key


def test_key_covers_bytes_options_and_modality():
    keys = {
        media_key("image", b"a", {}),
        media_key("image", b"b", {}),
        media_key("audio", b"a", {}),
        media_key("image", b"a", {"fps": 2}),
        media_key("image", b"a", {"fps": 2.5}),
    }
    assert len(keys) == 5
    assert media_key("image", b"a", {"x": 1, "y": 2}) == media_key("image", b"a", {"y": 2, "x": 1})


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_data_urls_round_trip(data: bytes):
    encoded = base64.b64encode(data).decode()
    percent = "".join(f"%{byte:02x}" for byte in data)
    assert decode_data_url(f"data:image/png;base64,{encoded}", 200) == data
    assert decode_data_url(f"data:;BASE64,{encoded.replace('+', '%2B')}", 200) == data
    assert decode_data_url(f"data:image/png,{percent}", 200) == data


def test_base64_is_sized_before_it_is_decoded():
    assert decode_base64(base64.b64encode(bytes(100)).decode(), 100) == bytes(100)
    with pytest.raises(MediaTooLarge, match="limit is 100 bytes"):
        decode_base64("A" * 1000, 100)
    for text in ("A", "AA=A", "####", "é"):
        with pytest.raises(MediaError, match="not valid base64"):
            decode_base64(text, 100)


async def test_limits():
    with pytest.raises(MediaError, match="3 pictures, clips and videos together, the limit is 2"):
        await load(*[MediaSource("audio", "x", data=WAV)] * 3, max_items=2)
    with pytest.raises(MediaTooLarge, match=f"limit is {len(WAV) - 1}"):
        await load(MediaSource("audio", "x", data=WAV), max_audio_bytes=len(WAV) - 1)
    with pytest.raises(MediaTooLarge, match="the video has 24 bytes, the limit is 23"):
        await load(MediaSource("video", "x", data=MP4), max_video_bytes=len(MP4) - 1)
    with pytest.raises(MediaTooLarge, match="together"):
        await load(*[MediaSource("audio", "x", data=WAV)] * 2, max_total_bytes=len(WAV) + 1)


async def test_the_first_fault_is_blamed():
    with pytest.raises(MediaError) as caught:
        await load(picture("data:image/png,%00"))
    assert caught.value.param == "messages[0]"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """root/ok.png, root/link -> ok.png, root/out -> secret.png outside, root/fifo, and secret.png."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "ok picture.png").write_bytes(PNG)
    (root / "link.png").symlink_to(root / "ok picture.png")
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "root-evil.png").write_bytes(PNG)
    (root / "out.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(root / "fifo.png")
    return root


async def test_files_under_the_root(tree: Path):
    for path in ("ok%20picture.png", "link.png", "../root/link.png"):
        for host in ("", "localhost"):
            [media] = await load(picture(f"file://{host}{tree}/{path}"), root=tree)
            assert media.data == PNG


@pytest.mark.parametrize(
    "name",
    [
        "/out.png",
        "/../secret.png",
        "/%2e%2e/secret.png",
        "-evil.png",
        "/missing.png",
        "/fifo.png",
        "/",
        "",
        "/a%00b.png",
    ],
)
async def test_files_elsewhere_are_refused_alike(tree: Path, name: str):
    with pytest.raises(MediaError, match="is not a readable file under the media root") as caught:
        await load(picture(f"file://{tree}{name}"), root=tree)
    assert caught.value.code == "forbidden_file"


async def test_files_need_a_root_and_no_host(tree: Path):
    with pytest.raises(MediaError, match="media root"):
        await load(picture(f"file://{tree}/link.png"))
    with pytest.raises(MediaError, match="media root"):
        await load(picture(f"file://otherhost{tree}/link.png"), root=tree)
    with pytest.raises(MediaTooLarge, match="limit is 10"):
        await load(picture(f"file://{tree}/link.png"), root=tree, max_image_bytes=10)


async def test_one_failure_cancels_the_other_downloads():

    cancelled = []

    class SlowFetcher:
        async def fetch(self, url: str, *, max_bytes: int) -> bytes:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(url)
            raise AssertionError

        async def aclose(self) -> None: ...

    loader = MediaLoader(MediaSettings(), SlowFetcher())

    with pytest.raises(MediaError, match="ftp"):
        await loader.load([picture("http://a/x"), picture("ftp://b")])
    assert cancelled == ["http://a/x"]
