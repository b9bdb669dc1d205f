"""Code2Wav of Qwen3-Omni as a stream: codec frames in, samples out, any chunking, one result.

All layers are causal, so a stream is its layers' past: the keys and values of the attention window and
the last rows of every convolution.  A transposed convolution's last outputs lack the next frame; they
come with it.  After n frames the samples [0, n * hop - trim) are out (hop 1920 and trim 555 as
published), which is all that the one-pass decode of n frames gives: the end of an utterance flushes
nothing.  Method: arXiv 2509.17765; numbers as transformers' Qwen3OmniMoeCode2Wav.
Knows no stage and no transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from omnistage.errors import StreamError, WeightsError
from omnistage.models.loader import Checkpoint
from omnistage.models.qwen3_code2wav_config import Code2WavConfig
from omnistage.models.qwen3_code2wav_layers import Packed
from omnistage.models.qwen3_code2wav_weights import Network, build_network
from omnistage.models.registry import PartSource
from omnistage.models.streaming_conv import Histories
from omnistage.models.weights import dtype_of
from omnistage.ops.norm import rms_norm
from omnistage.ops.rotary import RotaryScaling, inverse_frequencies, rotary_angles

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "code_offset")  # derived from config.json
_DTYPES = (torch.float32, torch.bfloat16)
_FRAMES_PER_PASS = 128  # of one stream, through the transformer: bounds the attention's mask
_SLICE_BYTES = 3 * 2**20  # of one stream's activation at the sample rate: slices stay in the cache
_BATCH_BYTES = 12 * 2**20  # of all streams' side by side: more save no weights and leave the cache


class Code2WavState:
    """One utterance's progress.  num_frames: taken in so far.

    nbytes: memory of the past it holds; bounded by the model's `max_state_bytes`, 0 after the end.
    """

    def __init__(self, histories: Histories) -> None:
        self.num_frames = 0
        self.is_finished = False
        self.histories = histories

    @property
    def nbytes(self) -> int:
        return sum(history.untyped_storage().nbytes() for history in self.histories)

    def release(self) -> None:
        """Free the memory; no frames can follow.  Done by the last frames too; repeating is harmless."""
        self.is_finished = True
        self.histories = []


class Qwen3Code2Wav:
    """See omnistage.models.protocols.VocoderModel; frames are codes, int64 [num_frames, num_codebooks].

    sample_rate: Hz.  hop: samples per frame.  trim: samples by which an utterance is shorter than
    num_frames * hop.  weight_bytes: as held.  max_state_bytes: of one utterance, however long.
    """

    def __init__(self, config: Code2WavConfig, network: Network) -> None:
        self.config = config
        self.sample_rate = config.sample_rate
        self.hop = config.hop
        self.trim = config.trim
        self.weight_bytes = network.weight_bytes
        self._network = network
        embedding = network.embedding
        self.max_state_bytes = embedding.element_size() * sum(
            past.num_rows * past.channels for past in network.pasts
        )
        self._offsets = torch.arange(config.num_codebooks, device=embedding.device) * config.codebook_size
        self._frequencies = inverse_frequencies(config.head_dim, config.rope_theta, RotaryScaling()).to(
            embedding.device
        )

    def start(self) -> Code2WavState:
        """A fresh streaming state for one utterance."""
        with torch.inference_mode():
            network = self._network
            return Code2WavState([past.new_history(network.embedding) for past in network.pasts])

    def decode(self, state: Code2WavState, frames: Tensor, *, is_last: bool) -> NDArray[np.float32]:
        """frames: [num_frames, num_codebooks], int64, may be empty.  Returns the samples now complete.

        Samples are float32 in [-1, 1].  After n frames of an utterance config.num_samples(n), that is
        n * hop - trim, are out, whatever the chunking; is_last adds none and frees the state.
        Raises StreamError for frames after the end, of another width or with codes out of range.
        """
        return self.decode_batch([state], [frames], [is_last])[0]

    @torch.inference_mode()
    def decode_batch(
        self, states: Sequence[Code2WavState], frames_list: Sequence[Tensor], is_last_list: Sequence[bool]
    ) -> list[NDArray[np.float32]]:
        """`decode` for several utterances at any places at once, with the same results.

        Nothing is padded: an utterance's samples do not depend on its neighbours (short of float
        rounding, measured below 1e-6).  If it raises, no state has changed.
        """
        assert len({id(state) for state in states}) == len(states), "an utterance comes once per batch"
        assert len(states) == len(is_last_list)
        codes = [self._checked(state, frames) for state, frames in zip(states, frames_list, strict=True)]
        pieces: list[list[Tensor]] = [[] for _ in states]
        for start in range(0, max((len(rows) for rows in codes), default=0), _FRAMES_PER_PASS):
            active = [index for index, rows in enumerate(codes) if len(rows) > start]
            outputs = self._decode_pass(
                [states[index] for index in active],
                [codes[index][start : start + _FRAMES_PER_PASS] for index in active],
            )
            for index, samples in zip(active, outputs, strict=True):
                pieces[index] += samples
        for state, is_last in zip(states, is_last_list, strict=True):
            if is_last:
                state.release()
        return [
            torch.cat(samples).float().cpu().numpy() if samples else np.zeros(0, np.float32)
            for samples in pieces
        ]

    def decode_windows(
        self, frames: Tensor, *, chunk: int = 300, left_context: int = 25
    ) -> NDArray[np.float32]:
        """A whole utterance in windows of `chunk` frames, each decoded alone behind `left_context` frames.

        For comparison: transformers' chunked_decode.  An approximation at the seams, and every window
        lacks its last `trim` samples.  frames: as for `decode`.  Raises StreamError as it does.
        """
        if chunk < 1 or left_context < 0:
            raise StreamError(f"chunk is {chunk} and left_context {left_context}; use at least 1 and 0")
        pieces = [np.zeros(0, np.float32)]
        for start in range(0, len(frames), chunk):
            context = left_context if start > left_context else start
            samples = self.decode(self.start(), frames[start - context : start + chunk], is_last=True)
            pieces.append(samples[context * self.hop :])
        return np.concatenate(pieces)

    def _checked(self, state: Code2WavState, frames: Tensor) -> Tensor:
        """The frames as rows of the embedding table, on the model's device."""
        config = self.config
        if state.is_finished:
            raise StreamError(f"the utterance ended after {state.num_frames} frames; start() a new state")
        if frames.ndim != 2 or frames.shape[1] != config.num_codebooks or frames.is_floating_point():
            raise StreamError(
                f"frames are {frames.dtype} of shape {tuple(frames.shape)}, the vocoder takes int64 "
                f"[num_frames, {config.num_codebooks}]; use the talker it came with"
            )
        if frames.numel():
            low, high = (int(value) for value in torch.aminmax(frames))
            if low < 0 or high >= config.codebook_size:
                raise StreamError(
                    f"codes are {low} to {high}, the codebooks have entries 0 to "
                    f"{config.codebook_size - 1}; remove stop and padding codes"
                )
        return frames.to(self._offsets) + self._offsets

    def _decode_pass(self, states: list[Code2WavState], codes: list[Tensor]) -> list[list[Tensor]]:
        """codes: rows of the embedding table, [num_frames, num_codebooks] each.  Samples in pieces."""
        packed = Packed([state.histories for state in states], [len(rows) for rows in codes])
        hidden, packed = self._hidden(states, codes, packed)
        rows = torch.split(hidden, list(packed.counts))
        # Side by side go streams that are at one another's stage: equal numbers of past and new rows.
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, histories in enumerate(packed.streams):
            pasts = (len(histories[block.upsample.past.slot]) for block in self._network.blocks)
            groups.setdefault((packed.counts[index], *pasts), []).append(index)
        samples: list[list[Tensor]] = [[] for _ in states]
        for members in groups.values():
            num_slices, width = self._slicing(packed.counts[members[0]], hidden.element_size())
            for start in range(0, len(members), width):
                batch = members[start : start + width]
                streams = [packed.streams[index] for index in batch]
                for piece in torch.stack([rows[index] for index in batch]).tensor_split(num_slices, dim=1):
                    for index, wave in zip(batch, self._wave(piece, streams), strict=True):
                        samples[index].append(wave)
        for state, frames in zip(states, codes, strict=True):
            state.num_frames += len(frames)
        return samples

    def _hidden(
        self, states: list[Code2WavState], codes: list[Tensor], packed: Packed
    ) -> tuple[Tensor, Packed]:
        """Transformer and ConvNeXt upsamplers.  Returns [num_rows, hidden] and whose rows they are."""
        network = self._network
        positions = torch.cat(
            [
                torch.arange(state.num_frames, state.num_frames + len(rows), device=rows.device)
                for state, rows in zip(states, codes, strict=True)
            ]
        )
        cosine, sine = rotary_angles(positions, self._frequencies, network.embedding.dtype)
        hidden = F.embedding(torch.cat(codes), network.embedding).mean(1)
        for layer in network.layers:
            hidden = layer(hidden, cosine, sine, packed)
        hidden = rms_norm(hidden, network.norm, self.config.rms_norm_eps)
        for upsampler in network.upsamplers:
            hidden, packed = upsampler(hidden, packed)
        return hidden, packed

    def _slicing(self, num_rows: int, value_bytes: int) -> tuple[int, int]:
        """In how many slices of time the decoder takes `num_rows` rows, and how many streams at once.

        The slices do not depend on the number of streams: with them would change the library's choice
        of kernels, and with that the last bits.
        """
        stream_bytes = num_rows * prod(self.config.upsample_rates) * self.config.last_channels * value_bytes
        num_slices = min(max(-(-stream_bytes // _SLICE_BYTES), 1), num_rows)
        return num_slices, max(_BATCH_BYTES * num_slices // stream_bytes, 1)

    def _wave(self, rows: Tensor, streams: Sequence[Histories]) -> Tensor:
        """rows: [num_streams, num_rows, hidden].  Returns [num_streams, samples complete now]."""
        network = self._network
        window, new = network.entry.past.window(streams, rows.shape[1])
        new.copy_(rows)
        rows = network.entry.push(streams, window)
        for block in network.blocks:
            rows = block(rows, streams)
        return network.head(rows, streams)


def load_code2wav(source: PartSource, *, device: str = "cpu", dtype: str = "float32") -> Qwen3Code2Wav:
    """Load the part: source.config is code2wav_config, the tensors' official names follow source.prefix.

    dtype: "float32" or "bfloat16".  Raises WeightsError if a file or a tensor is missing, damaged or of
    another shape, if one is left over, or for another dtype.
    """
    torch_dtype = dtype_of(dtype)
    if torch_dtype not in _DTYPES:
        raise WeightsError(f"Code2Wav runs in float32 or bfloat16, not in {dtype}; set its stage's dtype")
    config = Code2WavConfig.from_json(source.config)
    checkpoint = Checkpoint(source.directory, prefix=source.prefix)
    network = build_network(config, checkpoint, torch_dtype, device)
    checkpoint.finish(ignored_suffixes=_IGNORED_SUFFIXES)
    return Qwen3Code2Wav(config, network)
