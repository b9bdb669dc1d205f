"""The vocoder stage: frames in, sound out, in slices short enough to share a device.

Knows its model through VocoderModel only.  Frames come as latents, each chunk a whole sentence, or as
codec frames that trickle in.  Each sentence is one utterance with its own streaming state; the first
slice of an answer is small so that sound starts early, later ones are larger.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnistage.errors import OmnistageError, StreamError
from omnistage.models.protocols import VocoderModel
from omnistage.ops.tensors import to_torch
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import HostTensor, Payload, PortType, Scalar

DEFAULT_CHUNK = 64  # frames
IN_HAND_SECONDS = 0.12  # of sound; with less, a slice does not wait until it is full
# Frames of several requests decoded together; a single request's slice may be larger.
CPU_BATCH_FRAMES, DEVICE_BATCH_FRAMES = 64, 1024


@dataclass
class _Piece:
    """What one chunk brought.  frames: [num_frames, width].  offset: of the first not yet decoded."""

    frames: Tensor
    edge: str
    offset: int = 0


class _Utterance:
    """Frames of one sentence that are still to be decoded.

    sentence: its index in the answer.  is_complete: no more frames will come.  remaining: frames.
    """

    def __init__(self, sentence: Scalar) -> None:
        self.sentence = sentence
        self.is_complete = False
        self.remaining = 0
        self._none = torch.empty(0)  # frames, as wide as those that came
        self.state: Any = None
        self.pieces: deque[_Piece] = deque()

    def append(self, frames: Tensor, edge: str) -> None:
        """Raises StreamError for frames unlike those before them."""
        if frames.ndim != 2 or (self.pieces and frames.shape[1] != self._none.shape[1]):
            raise StreamError(
                f"stream {edge!r} brought frames of shape {list(frames.shape)} after "
                f"{list(self._none.shape)}; frames are [num_frames, width] and of one width"
            )
        self._none = frames[:0]
        self.remaining += frames.shape[0]
        self.pieces.append(_Piece(frames, edge))

    def take(self, size: int) -> tuple[Tensor, list[str]]:
        """The next frames, at most `size`, and the edges of the chunks used up, one entry each."""
        taken = [self._none]
        used_up: list[str] = []
        while self.pieces:
            piece = self.pieces[0]
            taken.append(piece.frames[piece.offset : piece.offset + size])
            piece.offset += taken[-1].shape[0]
            size -= taken[-1].shape[0]
            self.remaining -= taken[-1].shape[0]
            if piece.offset < piece.frames.shape[0]:
                break
            used_up.append(self.pieces.popleft().edge)
        return torch.cat(taken), used_up


class _Playback:
    """One request's sound."""

    def __init__(self, key: RequestKey) -> None:
        self.key = key
        self.utterances: deque[_Utterance] = deque()
        self.is_complete = False  # no more frames will come
        self.num_samples = 0
        self.deadline = time.monotonic()  # when the sound sent so far will have been played

    def drop_silent(self) -> None:
        """Forget utterances that ended before their first frame."""
        while self.utterances:
            first = self.utterances[0]
            if not first.is_complete or first.pieces or first.state is not None:
                return
            self.utterances.popleft()


@dataclass
class _Slice:
    """Frames of one utterance on their way through the model.  used_up: edges of the chunks they end."""

    playback: _Playback
    utterance: _Utterance
    frames: Tensor
    used_up: list[str]

    @property
    def is_last(self) -> bool:
        """Whether the utterance ends with these frames."""
        return self.utterance.is_complete and not self.utterance.pieces


class VocoderStage:
    """See omnistage.stages.stage.Stage.

    A chunk with "latents" [num_frames, channels] is a sentence.  One with "codes" [num_frames,
    num_codebooks], int64, continues the sentence that its info "sentence" names (0 if it names none); a
    sentence ends where the next begins, or with the stream, whose last chunk may bring nothing.
    """

    def __init__(self, context: StageContext, model: VocoderModel) -> None:
        self._context = context
        self._model = model
        self._decode_batch: Any = getattr(model, "decode_batch", None)  # see BatchVocoderModel
        edge = context.edges_in()[0]
        self._chunk = edge.chunk or DEFAULT_CHUNK
        self._first_chunk = edge.first_chunk or self._chunk
        self._credits = edge.credits
        self._max_batch = context.spec.max_num_seqs if self._decode_batch is not None else 1
        on_cpu = context.spec.devices_of(context.replica)[0] == "cpu"
        self._max_batch_frames = CPU_BATCH_FRAMES if on_cpu else DEVICE_BATCH_FRAMES
        self._open: dict[RequestKey, _Playback] = {}
        self._chunks = 0
        self._samples = 0

    def submit(self, message: Submit) -> None:
        self._open[message.key] = _Playback(message.key)

    def receive(self, chunk: Chunk) -> None:
        playback = self._open[chunk.key]
        latents, codes = (chunk.payload.tensors.get(name) for name in ("latents", "codes"))
        if latents is not None:
            self._append(playback, chunk, latents, len(playback.utterances))
            playback.utterances[-1].is_complete = True
        elif codes is not None:
            sentence = chunk.payload.info.get("sentence", 0)
            if playback.utterances and playback.utterances[-1].sentence != sentence:
                playback.utterances[-1].is_complete = True
            self._append(playback, chunk, codes, sentence)
        elif not chunk.is_last:
            raise StreamError(f"stream {chunk.edge!r} brought a chunk without frames to the vocoder")
        if chunk.is_last and playback.utterances:
            playback.utterances[-1].is_complete = True
        playback.is_complete = chunk.is_last
        playback.drop_silent()

    def abort(self, key: RequestKey) -> None:
        self._open.pop(key, None)

    def deadline(self) -> float | None:
        return min((playback.deadline for playback in self._runnable()), default=None)

    def step(self, outbox: Outbox) -> None:
        runnable = sorted(self._runnable(), key=lambda playback: playback.deadline)
        if not runnable:
            return
        if not runnable[0].utterances:
            outbox.emit(runnable[0].key, Payload(type=PortType.PCM), is_last=True)
            self._end(runnable[0], outbox)
            return
        slices = self._slices(runnable)
        outbox.worked.extend(each.playback.key for each in slices)
        for each, result in zip(slices, self._decode(slices), strict=True):
            if isinstance(result, OmnistageError):
                self.abort(each.playback.key)
                outbox.end(each.playback.key, error=result)
            else:
                self._deliver(each, result, outbox)

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

    def _append(self, playback: _Playback, chunk: Chunk, frames: HostTensor, sentence: Scalar) -> None:
        """Add frames to the last utterance, or begin one if that is complete or there is none."""
        if not playback.utterances or playback.utterances[-1].is_complete:
            playback.utterances.append(_Utterance(sentence))
        # Copied: the producer's slot is free again as soon as `receive` returns.
        playback.utterances[-1].append(to_torch(frames).clone(), chunk.edge)

    def _runnable(self) -> list[_Playback]:
        """Requests with sound to make; those whose client reads too slowly (no credits) are skipped."""
        return [
            playback
            for playback in self._open.values()
            if self._is_ready(playback) and self._context.credits(playback.key) != 0
        ]

    def _is_ready(self, playback: _Playback) -> bool:
        """Whether a slice is full, or waiting for more frames would be in vain."""
        if not playback.utterances:
            return playback.is_complete
        first = playback.utterances[0]
        if first.is_complete or (self._credits is not None and len(first.pieces) >= self._credits):
            return True
        size = self._size(playback)
        if playback.num_samples and time.monotonic() + IN_HAND_SECONDS >= playback.deadline:
            size = min(size, self._first_chunk)
        return first.remaining >= size

    def _size(self, playback: _Playback) -> int:
        """Frames of the request's next slice."""
        return self._chunk if playback.num_samples else self._first_chunk

    def _slices(self, runnable: list[_Playback]) -> list[_Slice]:
        """The most urgent request's slice, and the next ones' if the model decodes several at once.

        runnable: by deadline.
        """
        slices: list[_Slice] = []
        room = self._max_batch_frames
        for playback in runnable:
            if not playback.utterances:
                continue
            utterance = playback.utterances[0]
            size = min(self._size(playback), utterance.remaining)
            if len(slices) >= self._max_batch or (slices and size > room):
                break
            slices.append(_Slice(playback, utterance, *utterance.take(size)))
            room -= size
        return slices

    @torch.inference_mode()
    def _decode(self, slices: list[_Slice]) -> list[NDArray[np.float32] | OmnistageError]:
        """Samples of each slice, or what is wrong with it."""
        for each in slices:
            if each.utterance.state is None:
                each.utterance.state = self._model.start()
        if len(slices) > 1:
            try:
                return list(
                    self._decode_batch(
                        [each.utterance.state for each in slices],
                        [each.frames for each in slices],
                        [each.is_last for each in slices],
                    )
                )
            except OmnistageError:
                pass  # no state has changed; decoding them one by one tells whose fault it is
        results: list[NDArray[np.float32] | OmnistageError] = []
        for each in slices:
            try:
                results.append(self._model.decode(each.utterance.state, each.frames, is_last=each.is_last))
            except OmnistageError as error:
                results.append(error.with_traceback(None))  # which would keep the states in memory
        return results

    def _deliver(self, done: _Slice, samples: NDArray[np.float32], outbox: Outbox) -> None:
        playback = done.playback
        outbox.consumed.extend((playback.key, edge) for edge in done.used_up)
        if done.is_last:
            playback.utterances.popleft()
            playback.drop_silent()
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
