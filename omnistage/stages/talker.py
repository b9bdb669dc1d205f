"""The llm stage that speaks: hears the thinker's prompt and token ids, makes frames of codes.

It begins with the first token id, is skipped without blocking while it waits for the next, and ends
when it falls silent by itself, at its own limit, or when there is nothing to say.
Knows no scheduling: that is the engine's; and nothing of how frames become sound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from omnistage.engine.engine import EmbeddingRows, Engine, EngineOutput, EngineRequest
from omnistage.errors import OmnistageError, StreamError
from omnistage.models.generation import overlay
from omnistage.models.qwen3_omni_positions import (
    PositionRules,
    last_assistant_row,
    talker_rope_index,
    user_rows,
)
from omnistage.models.qwen3_omni_talker import NUM_LEADING_IDS, NUM_SPEECH_ROWS, Talker
from omnistage.ops.tensors import to_torch
from omnistage.stages.engine_names import engine_gauges, engine_id
from omnistage.stages.qwen3_handover import HIDDEN, HeardPrompt
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import (
    FinishReason,
    HostTensor,
    Payload,
    PortType,
    SamplingParams,
    Scalar,
    Usage,
)

GROUP_FRAMES = 8  # sent together, half a second: a message for each would wake its consumer as often
IN_HAND_SECONDS = 0.25  # of sound at the listener's; with less, frames do not wait for one another


@dataclass(frozen=True, kw_only=True)
class TalkerRules:
    """What config.json says about hearing a prompt.

    positions: see PositionRules.of_talker.  media_ids: placeholders, whose rows are the thinker's.
    frames_per_second: of the sound.
    """

    positions: PositionRules
    im_start_id: int
    user_id: int
    assistant_id: int
    pad_id: int
    frames_per_second: float

    @property
    def media_ids(self) -> tuple[int, int, int]:
        rules = self.positions
        return rules.image_token_id, rules.video_token_id, rules.audio_token_id


@dataclass(eq=False)
class _Speech:
    """One request's speech.

    prompt, hidden: what was heard before the answer; None until the thinker's first chunk.
    unspoken: ids of the answer that are to be said and whose rows the engine does not have yet.
    finish: how the thinker's answer ended, once it has.  is_begun: whether the engine has the request.
    is_closed: whether the engine knows that no more text comes.
    deadline: when the sound sent so far will have been played.
    num_frames: sent.  unsent: frames made since.
    """

    message: Submit
    voice: str
    sampling: SamplingParams
    frames: list[tuple[int, ...]]  # forced ones
    deadline: float
    prompt: HeardPrompt | None = None
    hidden: Tensor | None = None
    unspoken: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    is_begun: bool = False
    is_closed: bool = False
    num_frames: int = 0
    unsent: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def has_news(self) -> bool:
        """Whether something heard has not been passed on to the engine."""
        if self.prompt is None or self.is_closed:
            return False
        return bool(self.unspoken) or self.finish is not None


class TalkerStage:
    """See omnistage.stages.stage.Stage."""

    def __init__(
        self,
        context: StageContext,
        engine: Engine,
        talker: Talker,
        rules: TalkerRules,
        sampling: SamplingParams,
    ) -> None:
        """sampling: defaults, which a request's stage_params are laid over."""
        self._context = context
        self._engine = engine
        self._talker = talker
        self._rules = rules
        self._sampling = sampling
        # Frames that become the first sound; until they are made the request is as urgent as it was.
        self._lead = max((edge.first_chunk or edge.chunk or 1 for edge in context.edges_out()), default=1)
        self._eos_token_ids = (talker.talker_config.codec_eos_id,)
        self._open: dict[RequestKey, _Speech] = {}
        self._by_id: dict[str, RequestKey] = {}
        self._replayed: list[RequestKey] = []  # submitted with frames that are still to be emitted
        self._num_frames = 0

    def submit(self, message: Submit) -> None:
        voice = str(message.options.get("voice") or "") or next(iter(self._talker.talker_config.speakers), "")
        self._talker.talker_config.speaker_code(voice)
        sampling = overlay(self._sampling, {"seed": message.seed}, param="seed")
        sampling = overlay(sampling, message.stage_params, param=f"stage_params.{self._context.spec.name}")
        frames = _frames(message.forced_token_ids, self._talker.talker_config.num_groups)
        speech = _Speech(message, voice, sampling, frames, deadline=time.monotonic())
        self._open[message.key] = speech
        self._by_id[engine_id(message.key)] = message.key
        if frames or message.options.get("forced_finish"):
            self._replayed.append(message.key)

    def receive(self, chunk: Chunk) -> None:
        speech = self._open[chunk.key]
        payload = chunk.payload
        if speech.prompt is None:
            speech.prompt = HeardPrompt.of(payload)
            hidden = payload.tensors.get(HIDDEN)
            # Copied: the producer's slot is free again as soon as `receive` returns.
            speech.hidden = None if hidden is None else to_torch(hidden).clone()
            start = last_assistant_row(
                speech.prompt.token_ids,
                im_start_id=self._rules.im_start_id,
                assistant_id=self._rules.assistant_id,
            )
            speech.unspoken.extend(speech.prompt.token_ids[start:].tolist())
        token_ids = payload.token_ids
        if chunk.is_last:
            speech.finish = FinishReason(str(payload.info.get("finish_reason", FinishReason.STOP)))
            num_others = len(speech.unspoken) + len(token_ids) - 1
            is_alone = num_others < NUM_LEADING_IDS and not speech.is_begun
            # The last token is never spoken (as in the reference), unless it is all there is to say.
            if not (is_alone and speech.finish is FinishReason.LENGTH):
                token_ids = token_ids[:-1]
        speech.unspoken.extend(token_ids)

    def abort(self, key: RequestKey) -> None:
        if self._open.pop(key, None) is not None:
            del self._by_id[engine_id(key)]
            self._engine.abort(engine_id(key))
        if key in self._replayed:
            self._replayed.remove(key)

    def deadline(self) -> float | None:
        if not (self._engine.has_work or self._replayed or self._with_news()):
            return None
        return min(speech.deadline for speech in self._open.values())

    def step(self, outbox: Outbox) -> None:
        replayed, self._replayed = self._replayed, []
        for again in replayed:
            self._emit_journal(again, outbox)
        self._pass_on(outbox)
        outputs = self._engine.step()
        outbox.worked.extend(key for name in self._engine.last_scheduled if (key := self._by_id.get(name)))
        for output in outputs:
            self._emit(output, outbox)

    def info(self) -> dict[str, Scalar | list[str]]:
        return {
            "kv_blocks": self._engine.stats().blocks_total,
            "max_model_len": self._engine.max_rows,
            "weight_bytes": self._engine.weight_bytes,
            "voices": list(self._talker.talker_config.speakers),
        }

    def gauges(self) -> dict[str, float]:
        now = time.monotonic()
        in_hand = [speech.deadline - now for speech in self._open.values() if speech.num_frames]
        return {
            "requests": len(self._open),
            "frames": self._num_frames,
            "audio_in_hand_seconds": min(in_hand, default=0.0),
            **engine_gauges(self._engine),
        }

    def close(self) -> None:
        for key in list(self._open):
            self.abort(key)

    def _with_news(self) -> list[RequestKey]:
        return [key for key, speech in self._open.items() if speech.has_news]

    @torch.inference_mode()
    def _pass_on(self, outbox: Outbox) -> None:
        """Give the engine what has been heard: prompts of speeches that can begin, rows of new tokens."""
        fed: list[tuple[RequestKey, _Speech]] = []
        for key in self._with_news():
            speech = self._open[key]
            try:
                if not speech.is_begun and len(speech.unspoken) >= NUM_LEADING_IDS:
                    self._begin(key, speech)
            except OmnistageError as error:
                self.abort(key)
                outbox.end(key, error=error)
                continue
            if speech.is_begun:
                fed.append((key, speech))
            elif speech.finish is not None:
                self._end(key, FinishReason.STOP, outbox)  # an answer without words
        if fed:
            self._feed(fed)

    def _begin(self, key: RequestKey, speech: _Speech) -> None:
        """Queue the prompt: the users' turns as heard, and the rows that begin the speech."""
        assert speech.prompt is not None
        rules, talker = self._rules, self._talker
        leading, speech.unspoken = speech.unspoken[:NUM_LEADING_IDS], speech.unspoken[NUM_LEADING_IDS:]
        ids = speech.prompt.token_ids
        rows = user_rows(ids, im_start_id=rules.im_start_id, user_id=rules.user_id)
        heard = talker.text_rows(torch.from_numpy(ids[rows]))
        is_media = np.isin(ids[rows], rules.media_ids)
        if speech.hidden is not None:
            if len(speech.hidden) != int(is_media.sum()):
                raise StreamError(
                    f"the thinker sent {len(speech.hidden)} hidden rows for {is_media.sum()} rows of media"
                )
            heard[torch.from_numpy(is_media)] = talker.media_rows(speech.hidden)
        media = speech.prompt.media
        index = talker_rope_index(ids[rows], NUM_SPEECH_ROWS, rules.pad_id, media, rules.positions)
        forced = torch.tensor(speech.frames, dtype=torch.int64) if speech.frames else None
        self._engine.add_request(
            EngineRequest(
                request_id=engine_id(key),
                rows=(
                    EmbeddingRows(
                        torch.cat((heard, talker.speech_rows(leading, speech.voice))),
                        digest=None,
                        positions=index.positions,
                    ),
                ),
                sampling=speech.sampling,
                forced_token_ids=tuple(frame[0] for frame in speech.frames),
                forced_rows=None if forced is None else talker.frame_rows(forced),
                seed_stage=self._context.spec.name,
                eos_token_ids=self._eos_token_ids,
            )
        )
        speech.is_begun = True
        speech.hidden = None

    def _feed(self, fed: list[tuple[RequestKey, _Speech]]) -> None:
        """Rows of new tokens, all requests' together; behind an answer's last one those of its end."""
        token_ids = [token_id for _, speech in fed for token_id in speech.unspoken]
        rows = self._talker.text_rows(torch.tensor(token_ids, dtype=torch.int64))
        for key, speech in fed:
            part, rows = rows[: len(speech.unspoken)], rows[len(speech.unspoken) :]
            speech.unspoken = []
            if speech.finish is None:
                self._engine.feed(engine_id(key), part)
            else:
                speech.is_closed = True
                closing = torch.cat((part, self._talker.closing_row.unsqueeze(0)))
                self._engine.feed(engine_id(key), closing, filler=self._talker.pad_row)

    def _emit_journal(self, key: RequestKey, outbox: Outbox) -> None:
        """Send the frames of an earlier attempt to this attempt's consumers."""
        speech = self._open[key]
        if speech.frames:
            self._send(key, speech, speech.frames, outbox)
        finish = speech.message.options.get("forced_finish")
        if finish:
            self._end(key, FinishReason(str(finish)), outbox)

    def _emit(self, output: EngineOutput, outbox: Outbox) -> None:
        key = self._by_id.get(output.request_id)
        if key is None:
            return
        speech = self._open[key]
        if output.error is not None:
            self.abort(key)
            outbox.end(key, error=output.error)
            return
        if output.frame:
            self._collect(key, speech, output.frame, outbox)
        if output.finish_reason is not None:
            self._send_collected(key, speech, outbox)
            self._end(key, output.finish_reason, outbox)

    def _collect(self, key: RequestKey, speech: _Speech, frame: tuple[int, ...], outbox: Outbox) -> None:
        """Send frames in groups, or at once where little sound is in hand."""
        speech.unsent.append(frame)
        in_hand = speech.deadline - time.monotonic()
        is_first = speech.num_frames < self._lead
        wanted = self._lead - speech.num_frames if is_first else GROUP_FRAMES
        if len(speech.unsent) >= wanted or (not is_first and in_hand < IN_HAND_SECONDS):
            self._send_collected(key, speech, outbox)

    def _send_collected(self, key: RequestKey, speech: _Speech, outbox: Outbox) -> None:
        frames, speech.unsent = speech.unsent, []
        if frames:
            outbox.journal.append((key, tuple(code for frame in frames for code in frame)))
            self._send(key, speech, frames, outbox)

    def _send(
        self, key: RequestKey, speech: _Speech, frames: Sequence[tuple[int, ...]], outbox: Outbox
    ) -> None:
        self._num_frames += len(frames)
        speech.num_frames += len(frames)
        now = time.monotonic()
        if speech.num_frames - len(frames) >= self._lead:
            speech.deadline = max(speech.deadline, now) + len(frames) / self._rules.frames_per_second
        elif speech.num_frames >= self._lead:  # only now there is something to play
            speech.deadline = now + speech.num_frames / self._rules.frames_per_second
        codes = HostTensor.from_numpy(np.array(frames, dtype=np.int64))
        outbox.emit(key, Payload(type=PortType.CODEC_FRAMES, tensors={"codes": codes}))

    def _end(self, key: RequestKey, reason: FinishReason, outbox: Outbox) -> None:
        """The stream's last chunk brings no frame.  completion_tokens: frames."""
        num_frames = self._open[key].num_frames
        self.abort(key)
        outbox.emit(key, Payload(type=PortType.CODEC_FRAMES), is_last=True)
        outbox.end(key, usage=Usage(completion_tokens=num_frames), finish_reason=reason)


def _frames(codes: Sequence[int], num_groups: int) -> list[tuple[int, ...]]:
    """Frames of a journal.  Raises StreamError if it does not hold whole frames."""
    if len(codes) % num_groups:
        raise StreamError(f"a journal of {len(codes)} codes does not hold frames of {num_groups}")
    return [tuple(codes[start : start + num_groups]) for start in range(0, len(codes), num_groups)]
