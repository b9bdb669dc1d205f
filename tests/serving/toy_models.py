"""Stages over toy models: the real stage classes, workers and orchestrator, arithmetic for networks."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
import torch

from omnistage.errors import MediaError
from omnistage.graph import Graph
from omnistage.stages.encoder import EncoderStage
from omnistage.stages.function import FunctionStage, load_callable
from omnistage.stages.generator import GeneratorStage
from omnistage.stages.vocoder import VocoderStage
from omnistage.types import FinishReason, HostTensor, MediaSegment, Payload, PortType, StageKind, Usage

SAMPLE_RATE = 1000
HOP = 10
CHANNELS = 4


class ToyEar:
    """Hears a clip as its number of samples."""

    modalities = ("audio",)
    output = PortType.TEXT
    sample_rate = 16000
    video_fps = 0.0
    weight_bytes = 0

    def preprocess(self, raw, options):
        return len(raw)

    def encode(self, items):
        yield
        return [Payload(type=PortType.TEXT, text=f"{item} samples") for item in items]


class ToyEye:
    """Sees a picture as 8 rows of its mean brightness; refuses black ones."""

    modalities = ("image",)
    output = PortType.EMBEDDINGS
    sample_rate = 0
    video_fps = 0.0
    weight_bytes = 0

    def __init__(self):
        self.num_encoded = 0

    def preprocess(self, raw, options):
        if raw.max() == 0:
            raise MediaError("the picture is black; turn on the light")
        return float(raw.mean())

    def encode(self, items):
        yield
        self.num_encoded += len(items)
        # Large enough to travel by shared memory.
        rows = [np.full((8, 1024), item, np.float32) for item in items]
        return [
            Payload(type=PortType.EMBEDDINGS, tensors={"embeddings": HostTensor.from_numpy(row)})
            for row in rows
        ]


class ToyMouth:
    """One frame per character of the sentence, keyed by seed and position."""

    voices = ("low", "high")
    num_channels = CHANNELS
    weight_bytes = 0
    frame_rate = SAMPLE_RATE / HOP

    def synthesize(self, sentence, *, voice, seed, position, speed):
        yield
        digest = hashlib.sha256(f"{sentence}|{voice}|{seed}|{position}|{speed}".encode()).digest()
        noise = torch.frombuffer(bytearray(digest[:CHANNELS]), dtype=torch.uint8).float() / 255
        codes = torch.tensor([ord(letter) % 97 for letter in sentence]) / 97
        return codes[:, None] * noise[None, :]


class ToyThroat:
    """HOP samples per frame; each remembers the frame before it, so state matters."""

    sample_rate = SAMPLE_RATE
    hop = HOP
    weight_bytes = 0

    def start(self):
        return {"previous": torch.zeros(CHANNELS)}

    def decode(self, state, frames, *, is_last):
        out = []
        for frame in frames:
            mixed = (0.75 * frame + 0.25 * state["previous"]).mean()
            state["previous"] = frame
            out.append(np.full(HOP, mixed, np.float32))
        return np.concatenate(out) if out else np.zeros(0, np.float32)


class ToyLlm:
    """Answers with max_tokens words, token i as "W<i>", a full stop every fourth; counts what it was given.

    crash_at: raise (as a broken engine would) before this token of this attempt.
    """

    def __init__(self, context, *, crash_at=None, delay=0.0):
        self._context = context
        self._crash_at = crash_at
        self._delay = delay
        self._open = {}

    def submit(self, message):
        missing = {
            (segment.stage, segment.item) for segment in message.segments if isinstance(segment, MediaSegment)
        }
        self._open[message.key] = {
            "message": message,
            "missing": missing,
            "next": len(message.forced_token_ids),
            "heard": [],
            "journal": bool(message.forced_token_ids),
        }

    def receive(self, chunk):
        state = self._open[chunk.key]
        state["missing"].discard((chunk.edge.split("->")[0], chunk.item))
        state["heard"].append(chunk.payload.text or float(chunk.payload.tensors["embeddings"].numpy()[0, 0]))

    def abort(self, key):
        self._open.pop(key, None)

    def _runnable(self):
        return [key for key, state in self._open.items() if not state["missing"] or state["journal"]]

    def deadline(self):
        return time.monotonic() if self._runnable() else None

    def step(self, outbox):
        if self._delay:
            time.sleep(self._delay)
        for key in self._runnable():
            self._step(key, self._open[key], outbox)

    def _step(self, key, state, outbox):
        message = state["message"]
        limit = message.sampling.max_tokens
        if state["journal"]:
            state["journal"] = False
            ids = message.forced_token_ids
            is_last = "forced_finish" in message.options
            outbox.emit(key, self._payload(ids, state), is_last=is_last)
        else:
            index = state["next"]
            if self._crash_at is not None and (message.key.attempt, index) == self._crash_at:
                raise RuntimeError("the toy engine broke, as told")
            state["next"] += 1
            ids = (index,)
            outbox.journal.append((key, ids))
            is_last = state["next"] >= limit
            outbox.emit(key, self._payload(ids, state), is_last=is_last)
        outbox.worked.append(key)
        if is_last:
            del self._open[key]
            usage = Usage(prompt_tokens=3, completion_tokens=limit)
            outbox.end(key, usage=usage, finish_reason=FinishReason.LENGTH)

    @staticmethod
    def _payload(ids, state):
        heard = "".join(f"[{item}]" for item in state["heard"])
        words = [
            (heard if index == 0 else "") + f"W{index}" + (". " if index % 4 == 3 else " ") for index in ids
        ]
        return Payload(type=PortType.TEXT, text="".join(words), token_ids=tuple(ids))

    def info(self):
        return {"max_model_len": 1000}

    def gauges(self):
        return {"requests": len(self._open), "kv_blocks_used": len(self._open)}

    def close(self):
        pass


def toy_graph(**function):
    """hearing, vision -> thinker -> [upper ->] talker -> vocoder."""
    graph = Graph("toy", model=str(Path(__file__).parent))
    hearing = graph.encoder("hearing")
    vision = graph.encoder("vision")
    thinker = graph.llm("thinker", max_num_seqs=64)
    talker = graph.generator("talker", max_num_seqs=64)
    vocoder = graph.vocoder("vocoder", max_num_seqs=64)
    graph.connect(hearing, thinker)
    graph.connect(vision, thinker)
    if function:
        stage = graph.function("change", **function)
        graph.connect(thinker, stage, stream=True)
        graph.connect(stage, talker, stream=True)
        graph.output(text=stage, audio=vocoder)
    else:
        graph.connect(thinker, talker, stream=True)
        graph.output(text=thinker, audio=vocoder)
    graph.connect(talker, vocoder, stream=True, first_chunk=2, chunk=7, credits=2)
    return graph.build()


def toy_builder(*, eye=None, llm=None):
    """A LaunchOptions.build for toy_graph.  llm: keyword arguments of ToyLlm."""

    def build(context):
        match context.spec.kind:
            case StageKind.ENCODER:
                model = ToyEar() if context.spec.name == "hearing" else (eye or ToyEye())
                return EncoderStage(context, model)
            case StageKind.LLM:
                return ToyLlm(context, **(llm or {}))
            case StageKind.GENERATOR:
                return GeneratorStage(context, ToyMouth(), frames_per_second=ToyMouth.frame_rate)
            case StageKind.VOCODER:
                return VocoderStage(context, ToyThroat())
            case _:
                return FunctionStage(context, load_callable(context.spec.function))

    return build
