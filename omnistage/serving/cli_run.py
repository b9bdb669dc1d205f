"""`omnistage run`: one question with files, the answer as it streams, and its timeline."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omnistage.errors import InvalidRequest, MediaError, RequestFailed
from omnistage.serving.cli_pipeline import open_talker
from omnistage.serving.requests import AudioDelta, Done, Event, TextDelta
from omnistage.serving.timeline import Recorder, Timeline, timeline_as_text

if TYPE_CHECKING:
    from omnistage.audio.containers import AudioFormat

_FORMATS: dict[str, AudioFormat] = {
    ".wav": "wav",
    ".mp3": "mp3",
    ".flac": "flac",
    ".opus": "opus",
    ".ogg": "opus",
    ".aac": "aac",
}


@dataclass(frozen=True, eq=False)
class Answered:
    """An answer that has been printed.  samples: [num_samples] float32.  sample_rate: Hz, 0 without sound."""

    text: str
    samples: NDArray[np.float32]
    sample_rate: int
    timeline: Timeline


def run(options: Namespace) -> int:
    content = question_parts(options.text, images=options.image, clips=options.audio)
    if not content:
        raise InvalidRequest("nothing is asked; give --text, --image or --audio")
    if options.out is not None:
        sound_format(options.out)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    body = request_body(
        options, [*messages, {"role": "user", "content": content}], speak=options.out is not None
    )
    talker = open_talker(options)
    try:
        answer = print_answer(talker.stream(body))
    finally:
        talker.close()
    if options.out is not None:
        write_sound(options.out, answer)
        print(f"{options.out}: {answer.timeline.audio_seconds:.2f} s of speech", file=sys.stderr)
    print("\n" + timeline_as_text(answer.timeline), file=sys.stderr)
    if options.timeline is not None:
        from omnistage.serving.timeline_svg import timeline_as_svg

        options.timeline.write_text(timeline_as_svg(answer.timeline), encoding="utf-8")
    return 0


def question_parts(
    text: str | None, *, images: list[Path] | None = None, clips: list[Path] | None = None
) -> list[dict[str, Any]]:
    """Content parts: pictures, then speech, then text.  Raises MediaError for a file that is not there."""
    parts: list[dict[str, Any]] = []
    for path in images or []:
        parts.append({"type": "image_url", "image_url": {"url": file_url(path)}})
    for path in clips or []:
        parts.append({"type": "audio_url", "audio_url": {"url": file_url(path)}})
    if text:
        parts.append({"type": "text", "text": text})
    return parts


def file_url(path: Path) -> str:
    """Raises MediaError if there is no such file."""
    if not path.is_file():
        raise MediaError(f"there is no file {path}; give the path of a picture or a clip")
    return path.resolve().as_uri()


def request_body(options: Namespace, messages: list[dict[str, Any]], *, speak: bool) -> dict[str, Any]:
    """A chat completion's body, without its model."""
    body: dict[str, Any] = {
        "messages": messages,
        "temperature": options.temperature,
        "max_completion_tokens": options.max_tokens,
    }
    if options.seed is not None:
        body["seed"] = options.seed
    if speak:
        body["modalities"] = ["text", "audio"]
        body["audio"] = {"format": "pcm16", "voice": options.voice}
    return body


def print_answer(events: Iterator[Event]) -> Answered:
    """Print text as it comes.  Raises what the stream raises; what was printed stays."""
    recorder = Recorder()
    text = ""
    pieces: list[NDArray[np.float32]] = []
    sample_rate = 0
    done: Done | None = None
    for event in events:
        recorder.observe(event)
        if isinstance(event, TextDelta):
            text += event.text
            print(event.text, end="", flush=True)
        elif isinstance(event, AudioDelta):
            pieces.append(event.pcm)
            sample_rate = event.sample_rate
        else:
            done = event
    print(flush=True)
    if done is None:
        raise RequestFailed("the answer broke off without a reason")
    samples = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)
    return Answered(text, samples, sample_rate, recorder.timeline(done))


def sound_format(path: Path) -> AudioFormat:
    """By the file's name.  Raises InvalidRequest for a name that says no format."""
    if path.suffix.lower() not in _FORMATS:
        raise InvalidRequest(f"{path} names no sound format; end it in one of {', '.join(_FORMATS)}")
    return _FORMATS[path.suffix.lower()]


def write_sound(path: Path, answer: Answered) -> None:
    """Raises RequestFailed if the answer has no sound or the file cannot be written."""
    from omnistage.audio.containers import encode
    from omnistage.audio.pcm import Pcm

    if not answer.sample_rate:
        raise RequestFailed("the answer has no sound: it is empty")
    try:
        path.write_bytes(encode(Pcm(answer.samples, answer.sample_rate), sound_format(path)))
    except OSError as error:
        raise RequestFailed(f"cannot write {path} ({error.strerror})") from error
