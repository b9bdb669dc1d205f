"""The vocoder stage: frames in, sound out, in slices short enough to share a device.

Knows its model through VocoderModel only.  Each sentence is one utterance with its own streaming
state; the first slice of an answer is small so that sound starts early, later ones are larger.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from omnistage.errors import StreamError
from omnistage.models.protocols import VocoderModel
from omnistage.ops.tensors import to_torch
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import HostTensor, Payload, PortType, Scalar

DEFAULT_CHUNK = 64  # frames


class _Utterance:
    """Frames of one sentence that are still to be decoded.  frames: [num_frames, num_channels]."""

    def __init__(self, frames: Tensor, edge: str) -> None:
        self.frames = frames
        self.edge = edge
        self.state: Any = None
        self.offset = 0

    @property
    def remaining(self) -> int:
        return self.frames.shape[0] - self.offset


class _Playback:
    """One request's sound."""

    def __init__(self, key: RequestKey) -> None:
        self.key = key
        self.utterances: deque[_Utterance] = deque()
        self.is_complete = False  # no more frames will come
        self.num_samples = 0
        self.deadline = time.monotonic()  # when the sound sent so far will have been played


class VocoderStage:
    """See omnistage.stages.stage.Stage."""

    def __init__(self, context: StageContext, model: VocoderModel) -> None:
        self._context = context
        self._model = model
        edge = context.edges_in()[0]
        self._chunk = edge.chunk or DEFAULT_CHUNK
        self._first_chunk = edge.first_chunk or self._chunk
        self._open: dict[RequestKey, _Playback] = {}
        self._chunks = 0
        self._samples = 0

    def submit(self, message: Submit) -> None:
        self._open[message.key] = _Playback(message.key)

    def receive(self, chunk: Chunk) -> None:
        playback = self._open[chunk.key]
        latents = chunk.payload.tensors.get("latents")
        if latents is not None:
            # Copied: the producer's slot is free again as soon as this call returns.
            playback.utterances.append(_Utterance(to_torch(latents).clone(), chunk.edge))
        elif not chunk.is_last:
            raise StreamError(f"stream {chunk.edge!r} brought a chunk without latents to the vocoder")
        playback.is_complete = chunk.is_last

    def abort(self, key: RequestKey) -> None:
        self._open.pop(key, None)

    def deadline(self) -> float | None:
        return min((playback.deadline for playback in self._runnable()), default=None)

    def step(self, outbox: Outbox) -> None:
        playback = min(self._runnable(), key=lambda playback: playback.deadline, default=None)
        if playback is None:
            return
        if not playback.utterances:
            outbox.emit(playback.key, Payload(type=PortType.PCM), is_last=True)
            self._end(playback, outbox)
            return
        outbox.worked.append(playback.key)
        self._decode_slice(playback, outbox)

    def info(self) -> dict[str, Scalar | list[str]]:
        return {
            "sample_rate": self._model.sample_rate,
            "hop": self._model.hop,
            "weight_bytes": self._model.weight_bytes,
        }

    def gauges(self) -> dict[str, float]:
        now = time.monotonic()
        in_hand = [playback.deadline - now for playback in self._open.values() if playback.num_samples]
        return {
            "requests": len(self._open),
            "queued": sum(len(playback.utterances) for playback in self._open.values()),
            "running": len(self._runnable()),
            "chunks": self._chunks,
            "samples": self._samples,
            "audio_in_hand_seconds": min(in_hand, default=0.0),
        }

    def close(self) -> None:
        self._open.clear()

    def _runnable(self) -> list[_Playback]:
        """Requests with sound to make; those whose client reads too slowly (no credits) are skipped."""
        return [
            playback
            for playback in self._open.values()
            if (playback.utterances or playback.is_complete) and self._context.credits(playback.key) != 0
        ]

    def _decode_slice(self, playback: _Playback, outbox: Outbox) -> None:
        utterance = playback.utterances[0]
        if utterance.state is None:
            utterance.state = self._model.start()
        size = self._chunk if playback.num_samples else self._first_chunk
        frames = utterance.frames[utterance.offset : utterance.offset + size]
        utterance.offset += frames.shape[0]
        ends_sentence = utterance.remaining == 0
        with torch.inference_mode():
            samples = self._model.decode(utterance.state, frames, is_last=ends_sentence)
        if ends_sentence:
            playback.utterances.popleft()
            outbox.consumed.append((playback.key, utterance.edge))
        self._chunks += 1
        self._samples += len(samples)
        playback.num_samples += len(samples)
        playback.deadline = max(playback.deadline, time.monotonic()) + len(samples) / self._model.sample_rate
        is_last = playback.is_complete and not playback.utterances
        if len(samples) or is_last:
            payload = Payload(
                type=PortType.PCM,
                tensors={"pcm": HostTensor.from_numpy(samples)},
                info={"sample_rate": self._model.sample_rate},
            )
            outbox.emit(playback.key, payload, is_last=is_last)
        if is_last:
            self._end(playback, outbox)

    def _end(self, playback: _Playback, outbox: Outbox) -> None:
        del self._open[playback.key]
        outbox.end(playback.key)
