"""Plain data that every layer shares: ports, tensors on the host, payloads, sampling.

Imports neither torch nor anything above it.  All structs are frozen and cross process
boundaries as msgpack; tensors inside them travel out of band (omnistage.transport).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


class PortType(StrEnum):
    """What passes through a port."""

    TEXT = "text"
    TOKENS = "tokens"
    EMBEDDINGS = "embeddings"
    HIDDEN_STATES = "hidden_states"
    CODEC_FRAMES = "codec_frames"
    LATENTS = "latents"
    PCM = "pcm"
    IMAGE = "image"


class StageKind(StrEnum):
    """What a stage does; `llm` is autoregressive, `generator` makes its output in a few passes."""

    ENCODER = "encoder"
    LLM = "llm"
    GENERATOR = "generator"
    VOCODER = "vocoder"
    FUNCTION = "function"


class HostTensor:
    """A contiguous tensor in host memory, independent of torch.  Treat as immutable.

    dtype: torch's name without the prefix ("float32", "bfloat16", "int64").
    data: the raw little-endian bytes, C order; possibly a view into shared memory that stays
    valid until the message that brought it is released.
    handle: owned by the transport; None for ordinary memory.
    """

    __slots__ = ("data", "dtype", "handle", "shape")

    def __init__(
        self, dtype: str, shape: tuple[int, ...], data: memoryview | bytes, handle: Any = None
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data
        self.handle = handle

    @property
    def nbytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> HostTensor:
        """Wrap an array (copied only if not contiguous)."""
        contiguous = np.ascontiguousarray(array)
        return cls(str(contiguous.dtype), array.shape, contiguous.reshape(-1).view(np.uint8).data)

    def numpy(self) -> NDArray[Any]:
        """A read-only view.  Raises TypeError for bfloat16, which numpy lacks."""
        array = np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)
        array.flags.writeable = False
        return array


class TokenLogprob(msgspec.Struct, frozen=True):
    """One sampled token's log-probability and its best alternatives (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Scalar = int | float | str | bool


class Payload(msgspec.Struct, frozen=True):
    """What one chunk of a stream carries.  The port's type says which fields are meaningful.

    text: a delta.  token_ids: the ids behind it.  tensors: by name, for instance "pcm"
    [num_samples] float32, "latents" [num_frames, channels], "embeddings" [num_rows, hidden].
    info: small facts ("sample_rate" in Hz, "sentence" index).
    """

    type: PortType
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tensors: dict[str, HostTensor] = {}
    info: dict[str, Scalar] = {}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How an llm stage picks tokens.  Noise is keyed (seed, stage, position), never by batch.

    temperature 0 is greedy.  top_k 0 and top_p 1.0 and min_p 0.0 are off.
    logprobs: number of alternatives to report per token, None for no log-probabilities.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None


class TokenSegment(msgspec.Struct, frozen=True, tag="tokens"):
    """A piece of prompt that is known as token ids."""

    token_ids: tuple[int, ...]


class MediaSegment(msgspec.Struct, frozen=True, tag="media"):
    """A piece of prompt that an encoder stage will fill, with embeddings or with text.

    stage: the encoder's name in the graph.  item: index into the request's media of that stage.
    """

    stage: str
    item: int


class MergedSegment(msgspec.Struct, frozen=True, tag="merged"):
    """A video and its sound track; their rows stand in the prompt by time."""

    video: MediaSegment
    sound: MediaSegment


Segment = TokenSegment | MediaSegment | MergedSegment


class Media(msgspec.Struct, frozen=True):
    """One picture or clip, still in its container format.

    key: digest of the bytes, the processor's settings and positional arguments; equal keys give
    equal encoder outputs.  data: the file's bytes.  options: processor settings of this request.
    """

    key: str
    data: bytes
    mime: str = ""
    options: dict[str, Scalar] = {}


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Usage(msgspec.Struct, frozen=True):
    """Tokens a stage counted for one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class StageTiming(msgspec.Struct, frozen=True):
    """Where one request's time went in one stage.  All in seconds; instants are time.monotonic().

    transferred: spent encoding, copying and decoding its chunks.  first_output, finished: 0.0 if never.
    """

    stage: str
    received: float
    started: float = 0.0
    first_output: float = 0.0
    finished: float = 0.0
    computed: float = 0.0
    transferred: float = 0.0

    @property
    def queued(self) -> float:
        """Seconds between arrival and the first computation."""
        return max(0.0, self.started - self.received) if self.started else 0.0
