"""The encoder stage: media in, embeddings or text out, each distinct item computed once.

Knows its model through EncoderModel only.  Items of several requests share a batch; equal media
keys share one computation (single flight) and later requests take the cached output.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from omnistage.encoders.cache import EncoderCache
from omnistage.encoders.media import decode_image
from omnistage.errors import InvalidRequest, OmnistageError
from omnistage.models.protocols import EncoderModel, VideoFrames
from omnistage.stages.stage import FIRST_OUTPUT_SECONDS, Outbox, StageContext
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import Media, Payload, Scalar

# Items computed together.  All of a batch are done at its end, and larger ones are hardly faster per item:
# of 16 spoken clips on a CPU the last is heard after 8 s at any size, the average after 5.5 s, not 8.
MAX_BATCH = 4
# A batch takes no further item once its decoded media are this large: each may hold a gigabyte.
MAX_BATCH_BYTES = 256 * 1024**2

Waiter = tuple[RequestKey, int]  # a request, and the index of the item among its media


class _Item:
    """One distinct medium on its way through the encoder."""

    def __init__(self, media: Media, arrived: float) -> None:
        self.media = media
        self.arrived = arrived
        self.waiters: list[Waiter] = []
        self.num_bytes = 0  # of the decoded medium
        self.prepared: Any = None


class EncoderStage:
    """See omnistage.stages.stage.Stage."""

    def __init__(self, context: StageContext, model: EncoderModel) -> None:
        self._context = context
        self._model = model
        self._max_batch = min(context.spec.max_num_seqs, MAX_BATCH)
        self._cache = EncoderCache(
            max_bytes=context.spec.encoder_cache, share=context.share, unshare=context.unshare
        )
        self._queued: OrderedDict[str, _Item] = OrderedDict()  # by media key
        self._running: list[_Item] = []
        self._work: Generator[None, None, list[Payload]] | None = None
        self._ready: list[tuple[Waiter, Payload]] = []  # cache hits, to be emitted by the next step
        self._open: dict[RequestKey, set[int]] = {}  # items still to be emitted
        self._encoded = 0

    def submit(self, message: Submit) -> None:
        if not message.media:
            raise InvalidRequest(f"stage {self._context.spec.name!r} was given no media")
        self._open[message.key] = set(range(len(message.media)))
        for index, media in enumerate(message.media):
            waiter = (message.key, index)
            flying = self._in_flight(media.key)
            if flying is not None:
                flying.waiters.append(waiter)
                self._cache.hits += 1
                continue
            payload = self._cache.get(media.key)
            if payload is not None:
                self._ready.append((waiter, payload))
            else:
                item = _Item(media, time.monotonic())
                item.waiters.append(waiter)
                self._queued[media.key] = item

    def receive(self, chunk: Chunk) -> None:
        raise InvalidRequest(
            f"encoder {self._context.spec.name!r} takes media, not the stream {chunk.edge!r}"
        )

    def abort(self, key: RequestKey) -> None:
        """One waiter's abort never cancels the others; an item nobody waits for is dropped if it can be."""
        if self._open.pop(key, None) is None:
            return
        self._ready = [(waiter, payload) for waiter, payload in self._ready if waiter[0] != key]
        for item in [*self._queued.values(), *self._running]:
            item.waiters = [waiter for waiter in item.waiters if waiter[0] != key]
        for media_key in [name for name, item in self._queued.items() if not item.waiters]:
            del self._queued[media_key]
        if self._work is None:
            self._running = [item for item in self._running if item.waiters]

    def deadline(self) -> float | None:
        if self._ready:
            return 0.0
        items = self._running or list(self._queued.values())
        return min((item.arrived + FIRST_OUTPUT_SECONDS for item in items), default=None)

    def step(self, outbox: Outbox) -> None:
        if self._ready:
            ready, self._ready = self._ready, []
            for waiter, payload in ready:
                self._deliver(waiter, payload, outbox)
            return
        if self._work is None:
            self._start_batch(outbox)
        outbox.worked.extend(dict.fromkeys(key for item in self._running for key, _ in item.waiters))
        if self._work is None:
            return
        try:
            next(self._work)
        except StopIteration as stop:
            self._finish_batch(stop.value, outbox)

    def info(self) -> dict[str, Scalar | list[str]]:
        return {
            "modalities": list(self._model.modalities),
            "output": str(self._model.output),
            "weight_bytes": self._model.weight_bytes,
        }

    def gauges(self) -> dict[str, float]:
        return {
            "queued": len(self._queued),
            "running": len(self._running),
            "requests": len(self._open),
            "encoded_items": self._encoded,
            "cache_entries": len(self._cache),
            "cache_bytes": self._cache.num_bytes,
            "cache_hits": self._cache.hits,
        }

    def close(self) -> None:
        self._cache.clear()

    def _in_flight(self, media_key: str) -> _Item | None:
        queued = self._queued.get(media_key)
        if queued is not None:
            return queued
        return next((item for item in self._running if item.media.key == media_key), None)

    def _start_batch(self, outbox: Outbox) -> None:
        """Decode one queued item; start the batch once it is full or nothing else is queued."""
        if self._queued:  # empty if the last one was aborted after others had been decoded
            self._decode_next(outbox)
        if self._running and (not self._queued or self._is_full()):
            prepared: Sequence[Any] = [running.prepared for running in self._running]
            self._work = self._model.encode(prepared)

    def _is_full(self) -> bool:
        num_bytes = sum(item.num_bytes for item in self._running)
        return len(self._running) >= self._max_batch or num_bytes >= MAX_BATCH_BYTES

    def _decode_next(self, outbox: Outbox) -> None:
        _, item = self._queued.popitem(last=False)
        try:
            raw = self._decode(item.media)
            item.num_bytes = raw.frames.nbytes if isinstance(raw, VideoFrames) else raw.nbytes
            item.prepared = self._model.preprocess(raw, item.media.options)
        except OmnistageError as error:
            outbox.worked.extend(key for key, _ in item.waiters)
            for key in dict.fromkeys(key for key, _ in item.waiters):
                self.abort(key)
                outbox.end(key, error=error)
        else:
            self._running.append(item)

    def _decode(self, media: Media) -> NDArray[Any] | VideoFrames:
        """A video for a stage that takes videos; of any file its sound for one that hears; else a picture."""
        modalities = self._model.modalities
        max_seconds = self._context.spec.max_media_seconds
        if "video" in modalities and media.mime.startswith("video/"):
            from omnistage.encoders.video import decode_video

            fps = media.options.get("fps", self._model.video_fps)
            if isinstance(fps, str | bool):
                raise InvalidRequest(
                    f"fps is {fps!r}, but must be a number of frames per second", param="fps"
                )
            return decode_video(media.data, fps=fps, max_seconds=max_seconds)
        if "image" in modalities:
            return decode_image(media.data)
        from omnistage.audio.containers import decode
        from omnistage.audio.pcm import resample

        pcm = decode(media.data, max_seconds=max_seconds)
        return resample(pcm, self._model.sample_rate).samples

    def _finish_batch(self, payloads: list[Payload], outbox: Outbox) -> None:
        finished, self._running, self._work = self._running, [], None
        for item, payload in zip(finished, payloads, strict=True):
            self._encoded += 1
            digest = f"{self._context.spec.part}:{item.media.key}"
            keyed = msgspec.structs.replace(payload, info={**payload.info, "digest": digest})
            shared, evicted = self._cache.put(item.media.key, keyed)
            outbox.cached.append(item.media.key)
            outbox.evicted.extend(evicted)
            for waiter in item.waiters:
                self._deliver(waiter, shared, outbox)

    def _deliver(self, waiter: Waiter, payload: Payload, outbox: Outbox) -> None:
        key, index = waiter
        missing = self._open.get(key)
        if missing is None:
            return
        missing.discard(index)
        outbox.emit(key, payload, is_last=not missing, item=index)
        if not missing:
            del self._open[key]
            outbox.end(key)
