"""The llm stage over an engine whose model breaks down."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from omnistage import Graph
from omnistage.engine.engine import EngineOutput
from omnistage.errors import RequestFailed
from omnistage.stages.llm import LlmStage
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import RequestKey, Submit
from omnistage.types import SamplingParams, TokenSegment


class BrokenEngine:
    """Answers every request with one token, then with an error."""

    def __init__(self):
        self.ids = []
        self.num_steps = 0
        self.last_scheduled = []

    @property
    def has_work(self):
        return bool(self.ids)

    def add_request(self, request):
        self.ids.append(request.request_id)

    def abort(self, request_id):
        if request_id in self.ids:
            self.ids.remove(request_id)

    def step(self):
        self.num_steps += 1
        if self.num_steps == 1:
            return [EngineOutput(request_id, token_ids=(1,)) for request_id in self.ids]
        error = RequestFailed("the model computed NaN at position 3; try float32")
        failed, self.ids = self.ids, []
        return [EngineOutput(request_id, error=error) for request_id in failed]


def test_a_request_the_engine_fails_ends_with_its_error():
    graph = Graph("one", model="starter")
    graph.output(text=graph.llm("thinker"))
    spec = graph.build()
    context = StageContext(pipeline=spec, spec=spec.stages["thinker"], model_dir=Path())
    tokenizer = Tokenizer(WordLevel({"no": 0, "yes": 1}, unk_token="no"))
    stage = LlmStage(context, BrokenEngine(), tokenizer, (0,))
    keys = [RequestKey(name, 0) for name in ("a", "b")]
    for key in keys:
        segments = (TokenSegment((0, 1)),)
        stage.submit(Submit(key=key, seed=0, sampling=SamplingParams(max_tokens=9), segments=segments))
    outbox = Outbox()
    stage.step(outbox)
    assert [emitted.payload.text for emitted in outbox.emitted] == ["yes", "yes"]
    outbox = Outbox()
    stage.step(outbox)
    assert [ended.key for ended in outbox.ended] == keys
    assert all("NaN" in str(ended.error) for ended in outbox.ended)
    assert outbox.emitted == []
    assert stage.deadline() is None
    stage.close()
