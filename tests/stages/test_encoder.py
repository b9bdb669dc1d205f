"""The encoder stage alone: batches, single flight, and requests that leave at any moment."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omnistage import Graph
from omnistage.errors import MediaTooLarge
from omnistage.stages.encoder import EncoderStage
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import RequestKey, Submit
from omnistage.types import Media
from tests.encoders.video_files import noise_frames, video_file
from tests.serving.toy_models import ToyEar, ToyEye


def picture(brightness):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (brightness,) * 3).save(buffer, "PNG")
    return Media(key=f"picture-{brightness}", data=buffer.getvalue())


class ToyWatcher(ToyEye):
    """Sees pictures and videos; remembers what it was given, and how much at once."""

    modalities = ("image", "video")
    video_fps = 2.0

    def __init__(self):
        super().__init__()
        self.seen = []
        self.batches = []

    def preprocess(self, raw, options):
        self.seen.append(raw)
        return 1.0

    def encode(self, items):
        self.batches.append(len(items))
        return super().encode(items)


FRAMES = noise_frames(50)
FILM = video_file(FRAMES, 25, sound=np.zeros(32_000, np.float32), sound_codec="pcm_f32le")


def film(key="film", data=FILM, **options):
    return Media(key=key, data=data, mime="video/x-matroska", options=options)


class Encoder:
    """A stage over a model that counts, and what it has said so far."""

    def __init__(self, model=None, **settings):
        graph = Graph("one", model="starter")
        eye, thinker = graph.encoder("eye", **settings), graph.llm("thinker")
        graph.connect(eye, thinker)
        graph.output(text=thinker)
        spec = graph.build()
        self.model = model or ToyEye()
        context = StageContext(pipeline=spec, spec=spec.stages["eye"], model_dir=Path())
        self.stage = EncoderStage(context, self.model)
        self.outbox = Outbox()

    def submit(self, name, *brightnesses):
        self.give(name, *map(picture, brightnesses))

    def give(self, name, *media):
        self.stage.submit(Submit(key=RequestKey(name, 0), seed=0, media=media))

    def abort(self, name):
        self.stage.abort(RequestKey(name, 0))

    def step(self):
        self.stage.step(self.outbox)

    def drain(self):
        for _ in range(1000):
            if self.stage.deadline() is None:
                return
            self.step()
        raise AssertionError(f"never at rest: {self.stage.gauges()}")

    def delivered(self):
        """(request, item) of everything sent."""
        return sorted((emitted.key.request_id, emitted.item) for emitted in self.outbox.emitted)

    def ended(self):
        return {ended.key.request_id: ended.error for ended in self.outbox.ended}


def test_the_last_queued_item_is_aborted_after_another_was_decoded():
    encoder = Encoder()
    encoder.submit("a", 1)
    encoder.submit("b", 2)
    encoder.step()  # decodes a's picture, and waits for b's to join the batch
    encoder.abort("b")
    encoder.drain()
    assert encoder.delivered() == [("a", 0)]
    assert encoder.model.num_encoded == 1


def test_a_decoded_item_nobody_waits_for_is_not_encoded():
    encoder = Encoder()
    encoder.submit("a", 1)
    encoder.submit("b", 2)
    encoder.step()
    encoder.abort("a")
    encoder.drain()
    assert encoder.delivered() == [("b", 0)]
    assert encoder.model.num_encoded == 1


def test_a_bad_item_ends_its_request_and_no_other():
    encoder = Encoder()
    encoder.submit("a", 1)
    encoder.submit("bad", 3, 0, 4)  # the model refuses black
    encoder.submit("b", 3)
    encoder.drain()
    assert encoder.delivered() == [("a", 0), ("b", 0)]
    ended = encoder.ended()
    assert set(ended) == {"a", "bad", "b"}
    assert "black" in str(ended["bad"])
    assert ended["a"] is ended["b"] is None


def test_a_video_gives_frames_at_the_rate_asked_for():
    encoder = Encoder(ToyWatcher())
    encoder.give("a", film(), film("faster", fps=5), picture(9))
    encoder.drain()
    two, five, still = encoder.model.seen
    assert (two.fps, five.fps) == (2.0, 5)
    assert np.array_equal(two.frames, FRAMES[[0, 12, 25, 37]])
    assert np.array_equal(five.frames, FRAMES[::5])
    assert still.shape == (8, 8, 3)
    assert encoder.stage.info()["modalities"] == ["image", "video"]


def test_a_stage_that_hears_takes_the_sound_of_a_video():
    encoder = Encoder(ToyEar())
    encoder.give("a", film())
    encoder.give("silent", film("silent", video_file(FRAMES, 25)))
    encoder.drain()
    assert [emitted.payload.text for emitted in encoder.outbox.emitted] == ["32000 samples"]
    ended = encoder.ended()
    assert ended["a"] is None
    assert "use_audio_in_video" in str(ended["silent"])


def test_a_bad_video_ends_its_request_and_no_other():
    encoder = Encoder(ToyWatcher())
    encoder.give("a", film())
    encoder.give("cut", picture(1), film("cut", FILM[: len(FILM) // 2]), film("unheard"))
    encoder.give("odd", film("odd", fps="fast"))
    encoder.give("b", picture(1), film())
    encoder.drain()
    assert encoder.delivered() == [("a", 0), ("b", 0), ("b", 1)]
    ended = encoder.ended()
    assert ended["a"] is ended["b"] is None
    assert "cut short" in str(ended["cut"])
    assert (ended["odd"].param, "'fast'" in str(ended["odd"])) == ("fps", True)


def test_a_stage_without_video_refuses_it():
    encoder = Encoder()
    encoder.give("a", film())
    encoder.drain()
    assert "not a picture in a known format" in str(encoder.ended()["a"])


@pytest.mark.parametrize("model", [ToyWatcher, ToyEar])
def test_a_clip_longer_than_the_stage_allows(model):
    encoder = Encoder(model(), max_media_seconds=1)
    encoder.give("a", film())
    encoder.drain()
    assert isinstance(encoder.ended()["a"], MediaTooLarge)


def test_large_media_are_not_gathered_in_memory(monkeypatch):
    """A batch takes no further item once it holds many bytes; small ones still run together."""
    monkeypatch.setattr("omnistage.stages.encoder.MAX_BATCH_BYTES", 4 * FRAMES[0].nbytes)
    encoder = Encoder(ToyWatcher())
    for index in range(3):
        encoder.give(f"film{index}", film(f"film{index}"))
    for index in range(4):
        encoder.give(f"picture{index}", picture(10 + index))
    encoder.drain()
    assert encoder.model.batches == [1, 1, 1, 4]
    assert len(encoder.delivered()) == 7


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_come_and_go_at_random(seed):
    """Whoever stays is served in full; nothing is left of the others."""
    dice = random.Random(seed)
    encoder = Encoder(max_num_seqs=dice.choice([1, 2, 8]))
    wanted, gone = {}, set()
    for index in range(60):
        name = f"r{index}"
        wanted[name] = [dice.randrange(1, 25) for _ in range(dice.randrange(1, 4))]
        encoder.submit(name, *wanted[name])
        if dice.random() < 0.4:
            gone.add(victim := dice.choice(list(wanted)))
            encoder.abort(victim)
        for _ in range(dice.randrange(0, 4)):
            if encoder.stage.deadline() is not None:
                encoder.step()
    encoder.drain()
    delivered = encoder.delivered()
    for name, pictures in wanted.items():
        if name not in gone:
            assert [item for owner, item in delivered if owner == name] == list(range(len(pictures)))
    assert set(wanted) - gone <= set(encoder.ended())
    assert encoder.model.num_encoded <= 24
    gauges = encoder.stage.gauges()
    assert gauges["requests"] == gauges["queued"] == gauges["running"] == 0
