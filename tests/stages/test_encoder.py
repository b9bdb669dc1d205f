"""The encoder stage alone: batches, single flight, and requests that leave at any moment."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from PIL import Image

from omnistage import Graph
from omnistage.stages.encoder import EncoderStage
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import RequestKey, Submit
from omnistage.types import Media
from tests.serving.toy_models import ToyEye


def picture(brightness):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (brightness,) * 3).save(buffer, "PNG")
    return Media(key=f"picture-{brightness}", data=buffer.getvalue())


class Encoder:
    """A stage over a model that counts, and what it has said so far."""

    def __init__(self, **settings):
        graph = Graph("one", model="starter")
        eye, thinker = graph.encoder("eye", **settings), graph.llm("thinker")
        graph.connect(eye, thinker)
        graph.output(text=thinker)
        spec = graph.build()
        self.model = ToyEye()
        context = StageContext(pipeline=spec, spec=spec.stages["eye"], model_dir=Path())
        self.stage = EncoderStage(context, self.model)
        self.outbox = Outbox()

    def submit(self, name, *brightnesses):
        media = tuple(map(picture, brightnesses))
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
