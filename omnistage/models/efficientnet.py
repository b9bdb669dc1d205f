"""EfficientNet-Lite0 as an image encoder whose output needs no trained projection.

The network classifies a picture; the classes' names, as the thinker's own token embeddings, become
the picture's rows in the thinker's prompt.  Knows nothing of requests, caches or prompts.

Network: "EfficientNet: Rethinking Model Scaling" (arXiv 1905.11946), Lite variant: ReLU6, no
squeeze-and-excitation, batch norms folded into the convolutions when the weights are converted.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from omnistage.errors import MediaError, WeightsError
from omnistage.models.protocols import Modality, Sliced, VideoFrames
from omnistage.models.weights import build_module, count_bytes, dtype_of, read_tensors
from omnistage.types import HostTensor, Payload, PortType, Scalar

if TYPE_CHECKING:
    from omnistage.models.registry import PartSource


class BlockGroup(NamedTuple):
    """A run of inverted-residual blocks; only the first has the stride and changes the width."""

    num_blocks: int
    kernel_size: int
    stride: int
    expansion: int
    num_channels: int


NUM_CANDIDATES = 5  # classes that take part in the projection
MIN_SLOT_MASS = 0.3  # of the candidates' probability, for a slot to be used
BLOCKS_PER_SLICE = 4

STEM_CHANNELS, HEAD_CHANNELS = 32, 1280
LITE0_GROUPS = (
    BlockGroup(1, 3, 1, 1, 16),
    BlockGroup(2, 3, 2, 6, 24),
    BlockGroup(2, 5, 2, 6, 40),
    BlockGroup(3, 3, 2, 6, 80),
    BlockGroup(3, 5, 1, 6, 112),
    BlockGroup(4, 5, 2, 6, 192),
    BlockGroup(1, 3, 1, 6, 320),
)


class SameConv2d(nn.Conv2d):
    """A convolution that pads so that output size = ceil(input size / stride).

    The odd row and column of padding go right and below, as TensorFlow's "SAME" does.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_items, in_channels, height, width]."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[2:])
        before, after = (height // 2, width // 2), (height - height // 2, width - width // 2)
        if before == after:
            return F.conv2d(x, self.weight, self.bias, self.stride, before, groups=self.groups)
        padded = F.pad(x, (before[1], after[1], before[0], after[0]))
        return F.conv2d(padded, self.weight, self.bias, self.stride, groups=self.groups)


class InvertedResidual(nn.Module):
    """Expand, convolve per channel, project; plus the input where the shape is kept."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int, expansion: int
    ) -> None:
        super().__init__()
        inner = in_channels * expansion
        self.expand = SameConv2d(in_channels, inner, 1) if expansion > 1 else None
        self.depthwise = SameConv2d(inner, inner, kernel_size, stride, groups=inner)
        self.project = SameConv2d(inner, out_channels, 1)
        self.has_residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_items, in_channels, height, width]."""
        hidden = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        hidden = F.relu6(self.depthwise(hidden), inplace=True)
        projected: Tensor = self.project(hidden)
        return projected + x if self.has_residual else projected


class EfficientNetLite0(nn.Module):
    """The classifier.  Runs whole, or block by block by `start`, `blocks` and `finish`."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = SameConv2d(3, STEM_CHANNELS, 3, stride=2)
        self.blocks = nn.ModuleList()
        width = STEM_CHANNELS
        for group in LITE0_GROUPS:
            for index in range(group.num_blocks):
                stride = group.stride if index == 0 else 1
                self.blocks.append(
                    InvertedResidual(width, group.num_channels, group.kernel_size, stride, group.expansion)
                )
                width = group.num_channels
        self.head = SameConv2d(width, HEAD_CHANNELS, 1)
        self.classifier = nn.Linear(HEAD_CHANNELS, num_classes)

    def start(self, pixels: Tensor) -> Tensor:
        """pixels: [num_items, 3, height, width], (0..255 - 127) / 128.  Returns the stem's output."""
        return F.relu6(self.stem(pixels))

    def finish(self, hidden: Tensor) -> Tensor:
        """Logits [num_items, num_classes] from the last block's output."""
        features = F.relu6(self.head(hidden))  # [num_items, 1280, 7, 7]
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits [num_items, num_classes]; pixels as in `start`."""
        hidden = self.start(pixels)
        for block in self.blocks:
            hidden = block(hidden)
        return self.finish(hidden)


class ImageProjector:
    """Class probabilities to rows in the thinker's embedding space, without trained weights.

    A picture is clear if its best class has at least `min_confidence` and the best five together at
    least `min_candidate_mass` of the probability (classes of equal name count as one).  Slot j of a
    clear picture is the mean of the j-th token embeddings of the best five classes' names, weighted by
    probability, while the names that are long enough hold more than 0.3 of the five's mass.  Any other
    picture gets the rows of words that say it is unclear: a wrong name would be believed.
    """

    def __init__(self, tensors: dict[str, Tensor], labels: list[str], config: dict[str, Any]) -> None:
        """tensors: see starter_vision.build_projector."""
        try:
            self._names = tensors["names"]  # [num_classes, num_slots, hidden]
            self._lengths = tensors["lengths"]  # [num_classes], slots
            self._unclear = tensors["unclear"]  # [num_rows, hidden]
        except KeyError as error:
            raise WeightsError(f"the projector has no tensor {error}; fetch the model again") from error
        if len(labels) != len(self._names):
            raise WeightsError(
                f"{len(labels)} class names do not fit a projector of {len(self._names)} classes"
            )
        self._labels = labels
        self._min_confidence = float(config["min_confidence"])
        self._min_candidate_mass = float(config["min_candidate_mass"])

    def __call__(self, probabilities: Tensor) -> Payload:
        """probabilities: [num_classes], float32, on the CPU.

        info: "modality", "label" the best class's name, "confidence" its probability, "is_clear".
        """
        top = probabilities.topk(NUM_CANDIDATES)
        mass_by_label: dict[str, float] = {}
        for index, value in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            label = self._labels[index]
            mass_by_label[label] = mass_by_label.get(label, 0.0) + value
        label, confidence = max(mass_by_label.items(), key=lambda item: item[1])
        is_clear = confidence >= self._min_confidence and top.values.sum() >= self._min_candidate_mass
        rows = self._mix(top.indices, top.values) if is_clear else self._unclear
        return Payload(
            type=PortType.EMBEDDINGS,
            tensors={"embeddings": HostTensor.from_numpy(rows.float().numpy())},
            info={
                "modality": "image",
                "label": label,
                "confidence": confidence,
                "is_clear": bool(is_clear),
            },
        )

    def _mix(self, classes: Tensor, mass: Tensor) -> Tensor:
        """Rows [num_used_slots, hidden]; classes and mass: [NUM_CANDIDATES]."""
        names = self._names[classes]  # [candidates, slots, hidden]
        reaches = torch.arange(names.shape[1]) < self._lengths[classes, None]  # [candidates, slots]
        weights = mass[:, None] * reaches / mass.sum()
        slot_mass = weights.sum(0)
        rows = (names * weights[:, :, None]).sum(0) / slot_mass.clamp_min(1e-9)[:, None]
        return rows[: int((slot_mass > MIN_SLOT_MASS).sum())]  # slot_mass never rises


class EfficientNetEncoder:
    """See omnistage.models.protocols.EncoderModel."""

    modalities: tuple[Modality, ...] = ("image",)
    output = PortType.EMBEDDINGS
    sample_rate = 0
    video_fps = 0.0

    def __init__(self, network: EfficientNetLite0, projector: ImageProjector, config: dict[str, Any]) -> None:
        self._network = network.to(memory_format=torch.channels_last)  # a third faster on a CPU
        self._projector = projector
        self._image_size = int(config["image_size"])
        self._crop_ratio = float(config["crop_ratio"])
        self.weight_bytes = count_bytes(network)

    def preprocess(self, raw: NDArray[Any] | VideoFrames, options: dict[str, Scalar]) -> Tensor:
        """The centre square, resized (bicubic): [3, size, size] float32, (0..255 - 127) / 128.

        raw: uint8 [height, width, 3].  Raises MediaError for anything else.
        """
        if isinstance(raw, VideoFrames):
            raise MediaError("this model takes pictures, not videos; send frames as pictures")
        if raw.dtype != np.uint8 or raw.ndim != 3 or raw.shape[2] != 3 or 0 in raw.shape:
            raise MediaError(
                f"a picture must be uint8 [height, width, 3] and not empty, not {raw.dtype} {list(raw.shape)}"
            )
        height, width = raw.shape[:2]
        side = min(height, width) * self._crop_ratio
        left, top = (width - side) / 2, (height - side) / 2
        size = (self._image_size, self._image_size)
        box = (left, top, left + side, top + side)
        square = Image.fromarray(raw).resize(size, Image.Resampling.BICUBIC, box=box)
        pixels = (np.asarray(square, np.float32) - 127.0) / 128.0
        return torch.from_numpy(pixels).permute(2, 0, 1)  # channels last in memory

    def encode(self, items: Sequence[Tensor]) -> Sliced[list[Payload]]:
        """items: from `preprocess`.  One payload of up to num_slots rows per picture.

        Pictures run one by one: a batch of eight is no faster per picture on a CPU, and so a picture's
        rows are the same to the last bit whatever else waits.
        """
        payloads = []
        for item in items:
            logits = yield from self._classify(item)
            payloads.append(self._projector(logits.softmax(-1)))
            yield
        return payloads

    @torch.inference_mode()
    def _classify(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Logits [num_classes], float32, on the CPU.  pixels: [3, size, size]."""
        weight = self._network.stem.weight
        hidden = self._network.start(pixels[None].to(device=weight.device, dtype=weight.dtype))
        for index, block in enumerate(self._network.blocks, start=1):
            hidden = block(hidden)
            if index % BLOCKS_PER_SLICE == 0:
                yield
        return self._network.finish(hidden)[0].float().cpu()


def load_efficientnet(
    source: PartSource, *, device: str = "cpu", dtype: str = "float32"
) -> EfficientNetEncoder:
    """The encoder in `source`.  Raises WeightsError if files are missing or do not fit together."""
    config = source.config
    network = build_module(
        lambda: EfficientNetLite0(int(config["num_classes"])),
        read_tensors(source.directory, prefix=source.prefix),
        device=device,
        dtype=dtype_of(dtype),
    )
    projector = ImageProjector(
        read_tensors(source.directory, "projector.safetensors"), _read_labels(source.directory), config
    )
    return EfficientNetEncoder(network, projector, config)


def _read_labels(directory: Path) -> list[str]:
    path = directory / "labels.json"
    try:
        labels: list[str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read ({error}); fetch the model again") from error
    return labels
