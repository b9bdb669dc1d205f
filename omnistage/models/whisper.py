"""Whisper as an audio encoder: speech to text, with its own batched greedy decoding.

Knows sound at 16 kHz, tokens and text; nothing of requests, caches or containers.  Decoding follows
"Robust Speech Recognition via Large-Scale Weak Supervision" (arXiv 2212.04356) without timestamps.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from omnistage.errors import InvalidRequest, MediaError, WeightsError
from omnistage.models.protocols import Modality, Sliced, VideoFrames
from omnistage.models.weights import build_module, count_bytes, dtype_of, read_tensors
from omnistage.models.whisper_features import SAMPLE_RATE, log_mel, mel_filters, split_windows
from omnistage.models.whisper_network import Whisper
from omnistage.types import Payload, PortType, Scalar

if TYPE_CHECKING:
    from omnistage.models.registry import PartSource

MAX_ROWS = 8  # windows decoded together; each holds a few tens of MB of cross-attention keys and values
MAX_NEW_TOKENS = 224  # per window: half the text context, as in the paper's decoding
SILENT_PEAK = 1e-4  # of full scale (-80 dB); a window that never exceeds it is not decoded

# A window is called silent if no speech is likely and the text is unlikely or loops (section 4.5 of the
# paper).  The paper's threshold of likelihood is -1.0, under which the English-only tiny model still
# hears " you" in faint noise (-0.56 at the best).
NO_SPEECH_THRESHOLD = 0.6
AVERAGE_LOGPROB_THRESHOLD = -0.5
COMPRESSION_THRESHOLD = 2.4


@dataclass(frozen=True)
class WhisperItem:
    """One clip, ready to encode.

    windows: [num_mels, 3000] float32 each, those that are not silent.  language: None to detect.
    duration: seconds.
    """

    windows: tuple[Tensor, ...]
    language: str | None
    duration: float


@dataclass
class WindowResult:
    """What was heard in one window.  logprob: sum over its tokens and the end token."""

    language: str
    no_speech: float
    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0

    @property
    def average_logprob(self) -> float:
        return self.logprob / (len(self.token_ids) + 1)

    def is_silent(self, text: str) -> bool:
        """text: what the tokens say."""
        encoded = text.encode()
        loops = len(encoded) > COMPRESSION_THRESHOLD * len(zlib.compress(encoded))
        is_unlikely = self.average_logprob < AVERAGE_LOGPROB_THRESHOLD
        return self.no_speech > NO_SPEECH_THRESHOLD and (is_unlikely or loops)


class DecodingRules:
    """The special tokens of a checkpoint: what a prompt begins with, what is never sampled."""

    def __init__(self, generation: dict[str, Any], vocab_size: int, device: torch.device) -> None:
        """generation: the checkpoint's generation_config.json."""
        try:
            self.start = int(generation["decoder_start_token_id"])
            self.end = int(generation["eos_token_id"])
            self.no_speech = int(generation["no_speech_token_id"])
            self._no_timestamps = int(generation["no_timestamps_token_id"])
            languages: dict[str, int] = generation.get("lang_to_id", {})
            self._transcribe = int(generation["task_to_id"]["transcribe"]) if languages else 0
            suppressed, at_begin = generation["suppress_tokens"], generation["begin_suppress_tokens"]
        except KeyError as error:
            raise WeightsError(f"generation_config.json has no {error}; fetch the model again") from error
        self.languages = {token.strip("<|>"): index for token, index in languages.items()}
        self.always = torch.zeros(vocab_size, device=device)  # added to logits
        self.always[suppressed] = -math.inf
        self.first = self.always.clone()  # added to the first token's logits
        self.first[at_begin] = -math.inf

    @property
    def default_language(self) -> str | None:
        """None where the language has to be detected."""
        return None if self.languages else "en"

    def check_language(self, language: str) -> str:
        """Raises InvalidRequest if the checkpoint does not know `language`."""
        known = self.languages or {"en": 0}
        if language not in known:
            raise InvalidRequest(
                f"language {language!r} is not one this model hears; it hears: {', '.join(sorted(known))}",
                param="language",
            )
        return language

    def detect(self, logits: Tensor) -> list[str]:
        """The likeliest language of each row.  logits: [num_rows, vocab], after the start token."""
        if not self.languages:
            return ["en"] * len(logits)
        names = list(self.languages)
        best = logits[:, list(self.languages.values())].argmax(-1)
        return [names[index] for index in best.tolist()]

    def prompt(self, language: str) -> list[int]:
        """The tokens between the start token and the text."""
        task = [self.languages[language], self._transcribe] if self.languages else []
        return [*task, self._no_timestamps]


class WhisperEncoder:
    """See omnistage.models.protocols.EncoderModel.

    preprocess takes the option "language" ("en", ...), which a multilingual checkpoint otherwise detects.
    """

    modalities: tuple[Modality, ...] = ("audio",)
    output = PortType.TEXT
    sample_rate = SAMPLE_RATE
    video_fps = 0.0

    def __init__(self, network: Whisper, tokenizer: Tokenizer, rules: DecodingRules, num_mels: int) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._rules = rules
        self._filters = mel_filters(num_mels)
        self.weight_bytes = count_bytes(network)

    def preprocess(self, raw: NDArray[Any] | VideoFrames, options: dict[str, Scalar]) -> WhisperItem:
        """Log-mel windows of a clip of any length.

        raw: float32 [num_samples], 16 kHz.  Raises MediaError if it is empty, not finite or a video, and
        InvalidRequest for a language the model does not know.
        """
        if isinstance(raw, VideoFrames):
            raise MediaError("this model takes sound, not videos; send the sound track alone")
        if raw.ndim != 1 or raw.size == 0:
            raise MediaError(f"audio must be one channel of at least one sample, not shape {list(raw.shape)}")
        samples = raw.astype(np.float32, copy=False)
        if not np.isfinite(samples).all():
            raise MediaError("audio holds samples that are not finite numbers; check how it was encoded")
        language = self._rules.default_language
        if options.get("language"):
            language = self._rules.check_language(str(options["language"]))
        windows = tuple(
            log_mel(window, self._filters)
            for window in split_windows(samples)
            if np.abs(window).max(initial=0.0) > SILENT_PEAK
        )
        return WhisperItem(windows, language, len(samples) / SAMPLE_RATE)

    @torch.inference_mode()
    def encode(self, items: Sequence[WhisperItem]) -> Sliced[list[Payload]]:
        """items: from `preprocess`.  One payload of text per clip; "" if nothing is said in it.

        Windows pass the network's encoder one by one (a batch is no faster there on a CPU) and are
        decoded up to MAX_ROWS together, each row as if alone.
        """
        windows = [(index, window) for index, item in enumerate(items) for window in item.windows]
        results: list[list[WindowResult]] = [[] for _ in items]
        for first in range(0, len(windows), MAX_ROWS):
            group = windows[first : first + MAX_ROWS]
            encoded = []
            for _, features in group:
                weight = self._network.encoder.conv1.weight
                features = features.to(device=weight.device, dtype=weight.dtype)
                encoded.append((yield from self._network.encoder.run(features)))
                yield
            languages = [items[index].language for index, _ in group]
            heard = yield from self._decode(encoded, languages)
            for (index, _), result in zip(group, heard, strict=True):
                results[index].append(result)
        return [self._payload(item, heard) for item, heard in zip(items, results, strict=True)]

    def _decode(
        self, encoded: Sequence[Tensor], languages: Sequence[str | None]
    ) -> Sliced[list[WindowResult]]:
        """Greedy tokens of each row.  encoded: [1, positions, hidden] of each row.

        All rows are at the same position, so none needs padding.  Rows that have ended stay until half
        of them have, since dropping them copies the others' caches.
        """
        decoder, rules = self._network.decoder, self._rules
        device = encoded[0].device
        state = yield from decoder.start(encoded)
        starts = torch.full((len(encoded), 1), rules.start, device=device)
        logits = decoder(starts, state)
        yield
        silence = logits.softmax(-1)[:, rules.no_speech].tolist()
        chosen = [given or found for given, found in zip(languages, rules.detect(logits), strict=True)]
        results = [WindowResult(*pair) for pair in zip(chosen, silence, strict=True)]
        prompts = torch.tensor([rules.prompt(language) for language in chosen], device=device)
        logits = decoder(prompts, state) + rules.first
        active = list(range(len(results)))  # the result each row writes to, -1 once it has ended
        for _ in range(MAX_NEW_TOKENS):
            yield
            logprobs, tokens = logits.log_softmax(-1).max(-1)
            for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
                if active[row] < 0:
                    continue
                results[active[row]].logprob += logprob
                if token == rules.end:
                    active[row] = -1
                else:
                    results[active[row]].token_ids.append(token)
            rows = [row for row, result in enumerate(active) if result >= 0]
            if not rows:
                break
            if len(rows) * 2 <= len(active):
                kept = torch.tensor(rows, device=device)
                state.keep(kept)
                tokens, active = tokens[kept], [active[row] for row in rows]
            logits = decoder(tokens[:, None], state) + rules.always
        return results

    def _payload(self, item: WhisperItem, heard: list[WindowResult]) -> Payload:
        """info: "modality", "language", "duration" in seconds, "no_speech" of the window likeliest to hold
        speech.
        """
        texts, token_ids = [], []
        for result in heard:
            text = self._tokenizer.decode(result.token_ids, skip_special_tokens=True).strip()
            if text and not result.is_silent(text):
                texts.append(text)
                token_ids += result.token_ids
        language = heard[0].language if heard else item.language or "en"
        return Payload(
            type=PortType.TEXT,
            text=" ".join(texts),
            token_ids=tuple(token_ids),
            info={
                "modality": "audio",
                "language": language,
                "duration": item.duration,
                "no_speech": min((result.no_speech for result in heard), default=1.0),
            },
        )


def load_whisper(source: PartSource, *, device: str = "cpu", dtype: str = "float32") -> WhisperEncoder:
    """The encoder in `source`.  Raises WeightsError if files are missing or do not fit together."""
    config, directory = source.config, source.directory
    try:
        network = build_module(
            lambda: Whisper(config),
            read_tensors(directory, prefix=f"{source.prefix}model."),
            device=device,
            dtype=dtype_of(dtype),
        )
        vocab_size, num_mels = int(config["vocab_size"]), int(config["num_mel_bins"])
    except KeyError as error:
        raise WeightsError(f"config.json of {directory} has no {error}; fetch the model again") from error
    rules = DecodingRules(_read_json(directory / "generation_config.json"), vocab_size, torch.device(device))
    tokenizer = _read_tokenizer(directory / "tokenizer.json")
    return WhisperEncoder(network, tokenizer, rules, num_mels)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read ({error}); fetch the model again") from error
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise WeightsError(f"{path} cannot be read ({error}); fetch the model again") from error
