"""Streamed text equals the decode of everything, for byte-level and sentencepiece-like tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from omnistage.engine.detokenizer import IncrementalDetokenizer

CORPUS = [
    "The quick brown fox, jumps over the lazy dog.",
    "naïve café – 東京 🙂🎉 e\u0301",
    "  spaces\n\tand tabs",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama's: words with a leading mark, unknown characters as bytes, first space stripped."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for piece in (
        "▁",
        "▁the",
        "▁cat",
        "t",
        "h",
        "e",
        "c",
        "a",
        "▁t",
        "▁c",
        "th",
        "the",
        "at",
        "cat",
        "ca",
        "▁th",
    ):
        vocab[piece] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "t"), ("c", "at"), ("▁", "cat")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}


def deltas(tokenizer: Tokenizer, ids: Sequence[int], stop: tuple[str, ...] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


TEXTS = [*CORPUS, "the cat", "the the", "🙂", "東京の猫", "the 🙂 cat\n", "naïve", " leading", "trailing "]


@pytest.mark.parametrize("text", TEXTS)
def test_equals_the_whole_decode(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    pieces = deltas(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=30), st.integers(1, 5), st.sampled_from(list(TOKENIZERS)))
def test_any_text_in_any_pieces(text: str, size: int, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids)


def test_half_a_character_is_held_and_flushed_as_decoded(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂").ids[:-1]
    pieces = deltas(tokenizer, ids)
    assert "".join(pieces[:-1]).strip() == ""
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" in pieces[-1]


def test_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|end|>")
    ids = tokenizer.encode("the cat").ids
    assert "".join(deltas(tokenizer, [end, *ids[:1], end, *ids[1:], end])) == "the cat"


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("the lazy dog.", ("lazy",), "the "),
        ("the lazy dog.", ("dog", "zy d"), "the la"),
        ("the lazy dog.", ("zy dig",), "the lazy dog."),
        ("aaab", ("aab",), "a"),
        ("the quick", ("the",), ""),
        ("the quick", ("", "quick!"), "the quick"),
        ("naïve 🙂 café", ("🙂",), "naïve "),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], kept: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    ids = tokenizer.encode(text).ids
    said = ""
    for token_id in ids:
        said += detokenizer.push([token_id])
        assert text.startswith(said)
        assert kept.startswith(said)
    said += detokenizer.flush()
    assert said == kept
    assert detokenizer.stopped == (kept != text)
    if detokenizer.stopped:
        assert detokenizer.push(ids) == ""


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="ab ", max_size=20),
    stop=st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 6),
)
def test_stop_is_found_in_any_pieces(text: str, stop: list[str], size: int) -> None:
    """The earliest end at which a stop string is complete decides, as if characters came one by one."""
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = IncrementalDetokenizer(tokenizer, tuple(stop))
    ids = tokenizer.encode(text).ids
    said = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    if not any(item in text for item in stop):
        assert said == text
        assert not detokenizer.stopped
    else:
        assert detokenizer.stopped
        assert not any(item in said for item in stop)
        assert any(text[len(said) :].startswith(item) for item in stop)
