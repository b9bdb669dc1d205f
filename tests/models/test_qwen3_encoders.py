"""Pictures, videos and sound through the encoders, alone and in any company, give what transformers gives."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor

from omnistage import Graph
from omnistage.audio.containers import wav_header
from omnistage.errors import MediaError, WeightsError
from omnistage.models.protocols import VideoFrames
from omnistage.models.qwen3_encoders import Qwen3AudioEncoder, Qwen3VisionEncoder
from omnistage.models.registry import find_part, load_encoder
from omnistage.ops.tensors import to_torch
from omnistage.stages.factory import build_stage
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import RequestKey, Submit
from omnistage.types import Media, Payload, PortType
from tests.encoders.video_files import video_file
from tests.models.qwen_checkpoints import make_audio, make_image, make_video, result_of

TOLERANCE = 1e-5
NEIGHBOUR_TOLERANCE = 1e-6
PICTURES = [make_image(160, 128), make_image(96, 200, 1), make_image(40, 30, 2), make_image(448, 64, 3)]
VIDEOS = [
    VideoFrames(make_video(5, 64, 48), 2.0),
    VideoFrames(make_video(1, 33, 40, 1), 0.5),
    VideoFrames(make_video(8, 112, 112, 2), 7.5),
]
CLIPS = [make_audio(seconds, seed) for seed, seconds in enumerate((1.5, 0.3, 4.7, 1.0))]


class Reference:
    """transformers' processor and model of one directory, one item at a time."""

    def __init__(self, directory: Path, kind: str) -> None:
        import transformers

        self.processor = AutoProcessor.from_pretrained(directory)
        model = getattr(transformers, kind).from_pretrained(directory).eval()
        self.towers = getattr(model, "thinker", model).model

    @torch.inference_mode()
    def picture(self, pixels: np.ndarray) -> tuple[Tensor, Tensor, list[int]]:
        """Rows [num_tokens, hidden], deepstack rows [num_deepstack, num_tokens, hidden], and the grid."""
        made = self.processor.image_processor(
            [torch.from_numpy(pixels.transpose(2, 0, 1).copy())],
            input_data_format="channels_first",
            return_tensors="pt",
        )
        out = self.towers.visual(made["pixel_values"], grid_thw=made["image_grid_thw"])
        return out.pooler_output, torch.stack(out.deepstack_features), made["image_grid_thw"][0].tolist()

    @torch.inference_mode()
    def video(self, video: VideoFrames) -> tuple[Tensor, Tensor, list[int], float]:
        """As picture(), and the seconds between frame pairs."""
        settings = {"do_sample_frames": False, "fps": video.fps, "cap_pixels_per_frame": False}
        made = self.processor(
            text=[self.processor.video_token],
            videos=[video.frames],
            videos_kwargs=settings,
            return_tensors="pt",
        )
        out = self.towers.visual(made["pixel_values_videos"], grid_thw=made["video_grid_thw"])
        grid, seconds = made["video_grid_thw"][0].tolist(), float(made["video_second_per_grid"][0])
        return out.pooler_output, torch.stack(out.deepstack_features), grid, seconds

    @torch.inference_mode()
    def clip(self, samples: np.ndarray) -> Tensor:
        """Rows [num_tokens, hidden]."""
        made = self.processor(text=[self.processor.audio_token], audio=[samples], return_tensors="pt")
        length = made["feature_attention_mask"].sum(1)
        rows: Tensor = self.towers.audio_tower(
            made["input_features"][0, :, : int(length)], feature_lens=length
        ).last_hidden_state
        return rows


@pytest.fixture(scope="module")
def omni(qwen3_omni_dir: Path) -> Reference:
    return Reference(qwen3_omni_dir, "Qwen3OmniMoeForConditionalGeneration")


@pytest.fixture(scope="module")
def vision(qwen3_omni_dir: Path) -> Any:
    return load_encoder(find_part(qwen3_omni_dir, "visual"))


@pytest.fixture(scope="module")
def audio(qwen3_omni_dir: Path) -> Any:
    return load_encoder(find_part(qwen3_omni_dir, "audio_tower"))


def encode(encoder: Any, raws: Sequence[np.ndarray | VideoFrames]) -> list[Payload]:
    payloads: list[Payload] = result_of(encoder.encode([encoder.preprocess(raw, {}) for raw in raws]))
    return payloads


def close(own: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(own, expected, atol=tolerance, rtol=0)


def assert_is_picture(payload: Payload, reference: Reference, pixels: np.ndarray) -> None:
    rows, deepstack, grid = reference.picture(pixels)
    assert_is_visual(payload, rows, deepstack, grid)
    assert payload.info["modality"] == "image"
    assert "second_per_grid" not in payload.info


def assert_is_video(payload: Payload, reference: Reference, video: VideoFrames) -> None:
    rows, deepstack, grid, seconds = reference.video(video)
    assert_is_visual(payload, rows, deepstack, grid)
    assert payload.info["modality"] == "video"
    assert payload.info["second_per_grid"] == pytest.approx(seconds) == 2 / video.fps


def assert_is_visual(payload: Payload, rows: Tensor, deepstack: Tensor, grid: list[int]) -> None:
    assert payload.type is PortType.EMBEDDINGS
    close(to_torch(payload.tensors["embeddings"]), rows)
    close(to_torch(payload.tensors["deepstack"]), deepstack)
    assert [payload.info[name] for name in "thw"] == grid
    assert payload.info["num_tokens"] == len(rows)


def assert_is_clip(payload: Payload, reference: Reference, samples: np.ndarray) -> None:
    rows = reference.clip(samples)
    assert payload.type is PortType.EMBEDDINGS
    close(to_torch(payload.tensors["embeddings"]), rows)
    assert payload.info == {**payload.info, "modality": "audio", "num_tokens": len(rows)}


def test_pictures(vision: Any, omni: Reference) -> None:
    assert isinstance(vision, Qwen3VisionEncoder)
    assert (vision.modalities, vision.video_fps) == (("image", "video"), 2.0)
    assert (vision.output, vision.sample_rate) == (PortType.EMBEDDINGS, 0)
    assert vision.weight_bytes == sum(weight.nbytes for weight in omni.towers.visual.parameters())
    for pixels, together in zip(PICTURES, encode(vision, PICTURES), strict=True):
        assert_is_picture(together, omni, pixels)
        (alone,) = encode(vision, [pixels])
        assert_is_picture(alone, omni, pixels)
        for name in ("embeddings", "deepstack"):
            close(to_torch(together.tensors[name]), to_torch(alone.tensors[name]), NEIGHBOUR_TOLERANCE)


def test_pictures_and_videos_together(vision: Any, omni: Reference) -> None:
    raws = [PICTURES[0], VIDEOS[0], PICTURES[1], PICTURES[3], VIDEOS[1], VIDEOS[2]]
    for raw, together in zip(raws, encode(vision, raws), strict=True):
        (alone,) = encode(vision, [raw])
        for payload in (together, alone):
            if isinstance(raw, VideoFrames):
                assert_is_video(payload, omni, raw)
            else:
                assert_is_picture(payload, omni, raw)
        for name in ("embeddings", "deepstack"):
            close(to_torch(together.tensors[name]), to_torch(alone.tensors[name]), NEIGHBOUR_TOLERANCE)


def test_pictures_for_qwen3_vl(qwen3_vl_dir: Path) -> None:
    reference = Reference(qwen3_vl_dir, "Qwen3VLForConditionalGeneration")
    encoder = load_encoder(find_part(qwen3_vl_dir, "visual"))
    assert (encoder.modalities, encoder.video_fps) == (("image",), 0.0)
    with pytest.raises(MediaError, match="takes no videos here"):
        encoder.preprocess(VIDEOS[0], {})
    for pixels, payload in zip(PICTURES, encode(encoder, PICTURES), strict=True):
        assert_is_picture(payload, reference, pixels)


def test_clips(audio: Any, omni: Reference) -> None:
    assert isinstance(audio, Qwen3AudioEncoder)
    assert (audio.modalities, audio.video_fps) == (("audio",), 0.0)
    assert (audio.output, audio.sample_rate) == (PortType.EMBEDDINGS, 16000)
    assert audio.weight_bytes == sum(weight.nbytes for weight in omni.towers.audio_tower.parameters())
    for samples, together in zip(CLIPS, encode(audio, CLIPS), strict=True):
        assert_is_clip(together, omni, samples)
        (alone,) = encode(audio, [samples])
        assert_is_clip(alone, omni, samples)
        close(
            to_torch(together.tensors["embeddings"]),
            to_torch(alone.tensors["embeddings"]),
            NEIGHBOUR_TOLERANCE,
        )


@pytest.mark.parametrize("part", ["visual", "audio_tower"])
def test_bfloat16_is_close_to_float32(qwen3_omni_dir: Path, vision: Any, audio: Any, part: str) -> None:
    raws = CLIPS[:2] if part == "audio_tower" else [PICTURES[1], VIDEOS[0]]
    short: Any = load_encoder(find_part(qwen3_omni_dir, part), dtype="bfloat16")
    full = audio if part == "audio_tower" else vision
    assert short.weight_bytes < 0.6 * full.weight_bytes  # but the grid of learned positions
    for rounded, exact in zip(encode(short, raws), encode(full, raws), strict=True):
        assert rounded.info == exact.info
        assert rounded.tensors.keys() == exact.tensors.keys()
        for name, tensor in rounded.tensors.items():
            assert (tensor.dtype, exact.tensors[name].dtype) == ("bfloat16", "float32")
            expected = to_torch(exact.tensors[name])
            error = to_torch(tensor).float() - expected
            assert error.square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()


def test_unusable_media(vision: Any, audio: Any) -> None:
    with pytest.raises(MediaError, match="send it in another size"):
        vision.preprocess(make_image(2, 900), {})
    with pytest.raises(MediaError, match="send a longer clip"):
        audio.preprocess(np.zeros(10, np.float32), {})
    with pytest.raises(MediaError, match="give it the sound track"):
        audio.preprocess(VIDEOS[0], {})


def test_a_model_without_feature_extractor(qwen3_omni_dir: Path, audio: Any) -> None:
    processing = audio._processing
    rate, processing.sample_rate = processing.sample_rate, 0
    try:
        with pytest.raises(WeightsError, match="no feature extractor"):
            Qwen3AudioEncoder(audio._tower, processing)
    finally:
        processing.sample_rate = rate


# --- as stages


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def wav(samples: np.ndarray) -> bytes:
    """A file of float samples, which holds them exactly."""
    return wav_header(16_000, num_bytes=samples.nbytes, is_float=True) + samples.tobytes()


def serve(directory: Path, part: str, requests: dict[str, list[Media]]) -> tuple[Outbox, dict[str, Any]]:
    """All requests through one encoder stage built as a worker builds it; what it says, and its facts."""
    graph = Graph("one", model=str(directory))
    encoder, thinker = graph.encoder("encoder", part=part), graph.llm("thinker", part="thinker")
    graph.connect(encoder, thinker)
    graph.output(text=thinker)
    spec = graph.build()
    stage = build_stage(StageContext(pipeline=spec, spec=spec.stages["encoder"], model_dir=directory))
    for name, media in requests.items():
        stage.submit(Submit(key=RequestKey(name, 0), seed=0, media=tuple(media)))
    outbox = Outbox()
    while stage.deadline() is not None:
        stage.step(outbox)
    facts = stage.info()
    stage.close()
    return outbox, facts


def payloads_of(outbox: Outbox) -> dict[tuple[str, int], Payload]:
    return {(one.key.request_id, one.item): one.payload for one in outbox.emitted}


def test_picture_files_through_a_stage(qwen3_omni_dir: Path, omni: Reference) -> None:
    media = [Media(key=f"p{index}", data=png(pixels)) for index, pixels in enumerate(PICTURES)]
    requests = {"a": media[:3], "b": [media[3]], "c": [media[0]]}
    outbox, facts = serve(qwen3_omni_dir, "visual", requests)
    assert (facts["modalities"], facts["output"]) == (["image", "video"], "embeddings")
    payloads = payloads_of(outbox)
    sources = {("a", 0): 0, ("a", 1): 1, ("a", 2): 2, ("b", 0): 3, ("c", 0): 0}
    assert payloads.keys() == sources.keys()
    for place, index in sources.items():
        assert_is_picture(payloads[place], omni, PICTURES[index])
        assert payloads[place].info["digest"] == f"visual:p{index}"
    assert all(ended.error is None for ended in outbox.ended)


def test_sound_files_through_a_stage(qwen3_omni_dir: Path, omni: Reference) -> None:
    media = [Media(key=f"s{index}", data=wav(samples)) for index, samples in enumerate(CLIPS)]
    requests = {"a": media[:2], "b": media[2:], "short": [Media(key="short", data=wav(CLIPS[0][:50]))]}
    outbox, facts = serve(qwen3_omni_dir, "audio_tower", requests)
    assert (facts["modalities"], facts["output"]) == (["audio"], "embeddings")
    payloads = payloads_of(outbox)
    sources = {("a", 0): 0, ("a", 1): 1, ("b", 0): 2, ("b", 1): 3}
    assert payloads.keys() == sources.keys()
    for place, index in sources.items():
        assert_is_clip(payloads[place], omni, CLIPS[index])
    errors = {ended.key.request_id: ended.error for ended in outbox.ended}
    assert isinstance(errors.pop("short"), MediaError)
    assert errors == {"a": None, "b": None}


def recorded(num_frames: int, rate: int, seed: float, *, sound: np.ndarray | None = None) -> bytes:
    """A film that holds its frames and its sound as they are."""
    frames = make_video(num_frames, 64, 48, seed)
    return video_file(frames, rate, sound=sound, sound_codec="pcm_f32le")


def test_video_files_through_a_stage(qwen3_omni_dir: Path, omni: Reference) -> None:
    """One that cannot be used among good ones ends its own request only."""
    film = recorded(50, 25, 0.0)  # two seconds
    media = {
        "film": Media(key="film", data=film, mime="video/x-matroska"),
        "faster": Media(key="faster", data=film, mime="video/x-matroska", options={"fps": 5}),
        "picture": Media(key="picture", data=png(PICTURES[0]), mime="image/png", options={"fps": 5}),
        "cut": Media(key="cut", data=film[: len(film) // 2], mime="video/x-matroska"),
        "odd": Media(key="odd", data=film, mime="video/x-matroska", options={"fps": "fast"}),
    }
    names = {
        "a": ["film", "picture"],
        "bad": ["picture", "cut"],
        "b": ["faster"],
        "odd": ["odd"],
        "c": ["film"],
    }
    requests = {request: [media[name] for name in chosen] for request, chosen in names.items()}
    outbox, _ = serve(qwen3_omni_dir, "visual", requests)
    errors = {ended.key.request_id: ended.error for ended in outbox.ended}
    assert "cut short" in str(errors.pop("bad"))
    assert "fps is 'fast', but must be a number" in str(errors.pop("odd"))
    assert errors == {"a": None, "b": None, "c": None}
    payloads = payloads_of(outbox)
    frames = make_video(50, 64, 48)
    for place in (("a", 0), ("c", 0)):
        assert_is_video(payloads[place], omni, VideoFrames(frames[[0, 12, 25, 37]], 2.0))
    assert_is_video(payloads["b", 0], omni, VideoFrames(frames[::5], 5.0))
    assert_is_picture(payloads["a", 1], omni, PICTURES[0])


def test_the_sound_of_videos_through_a_stage(qwen3_omni_dir: Path, omni: Reference) -> None:
    sound = make_audio(2.0, seed=5)
    requests = {
        "film": [Media(key="film", data=recorded(50, 25, 0.0, sound=sound), mime="video/x-matroska")],
        "silent": [Media(key="silent", data=recorded(50, 25, 0.0), mime="video/x-matroska")],
        "wav": [Media(key="wav", data=wav(sound), mime="audio/wav")],
    }
    outbox, _ = serve(qwen3_omni_dir, "audio_tower", requests)
    errors = {ended.key.request_id: ended.error for ended in outbox.ended}
    assert "leave out use_audio_in_video, which needs one" in str(errors.pop("silent"))
    assert errors == {"film": None, "wav": None}
    for payload in payloads_of(outbox).values():
        assert_is_clip(payload, omni, sound)


def test_importing_the_encoders_imports_no_transformers() -> None:
    code = "import sys, omnistage.models.qwen3_encoders\nsys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
