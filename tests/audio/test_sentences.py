"""The splitter's rules one by one, and its promise: chunking never matters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.audio.sentences import FIRST_CHARACTERS, MAX_CHARACTERS, SentenceSplitter, speakable


def split(text: str, sizes: list[int] | None = None, **limits: int) -> list[str]:
    splitter = SentenceSplitter(**limits)
    sentences: list[str] = []
    start = turn = 0
    while start < len(text):
        end = start + (sizes[turn % len(sizes)] if sizes else len(text))
        sentences += splitter.push(text[start:end])
        start, turn = end, turn + 1
    return sentences + splitter.flush()


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Dr. Smith saw Mrs. Jones. They left.", ["Dr. Smith saw Mrs. Jones.", "They left."]),
        ("It costs 3.14 dollars. Yes.", ["It costs 3.14 dollars.", "Yes."]),
        ("J. R. R. Tolkien wrote. So do I. Good.", ["J. R. R. Tolkien wrote.", "So do I.", "Good."]),
        ("Use e.g. Python. Or i.e. C.", ["Use e.g. Python.", "Or i.e. C."]),
        ("Wait... what? Well... Then no.", ["Wait... what?", "Well...", "Then no."]),
        ("Wait… what? Well… Then no.", ["Wait… what?", "Well…", "Then no."]),
        ('He said "No." Then left.', ['He said "No."', "Then left."]),
        ('"Really?" she asked. (Yes.) Good.', ['"Really?" she asked.', "(Yes.)", "Good."]),
        ("At 5 p.m. Then home.", ["At 5 p.m.", "Then home."]),
        ("What?! No way!!! Yes.", ["What?!", "No way!!!", "Yes."]),
        ("See example.com or v1.2.3 now. End.", ["See example.com or v1.2.3 now.", "End."]),
        ("A line\nAnother line\n\nand a third", ["A line", "Another line", "and a third"]),
        ("A wrapped\nline goes on. End", ["A wrapped line goes on.", "End"]),
        ("# Title\n\n- one\n- two\n* three", ["Title", "one", "two", "three"]),
        ("1. First thing\n2. Second thing", ["1. First thing", "2. Second thing"]),
        ("Some **bold** and `code` and _this_ but a_b.", ["Some bold and code and this but a_b."]),
        ("```python\nprint(1)\n```\nDone.", ["python print(1)", "Done."]),
        ("See [the page](http://x.org/a_b) now.", ["See the page now."]),
        ("| a | b |", ["a b"]),
        ("你好。世界！Ok.", ["你好。", "世界！", "Ok."]),
        ("", []),
        ("...", []),
        ("😀 !!! \n\n ---", []),
        ("One. ... 😀 Two.", ["One.", "😀 Two."]),
        ("   \n  Spaces   everywhere .  Yes. ", ["Spaces everywhere .", "Yes."]),
    ],
)
def test_rules(text: str, sentences: list[str]) -> None:
    assert split(text) == sentences
    assert split(text, [1]) == sentences


def test_a_sentence_comes_as_soon_as_it_is_certain() -> None:
    splitter = SentenceSplitter()
    assert splitter.push("Hello there.") == []
    assert splitter.push(" ") == []
    assert splitter.push("How") == ["Hello there."]
    assert splitter.push(" are you?") == []
    assert splitter.flush() == ["How are you?"]


def test_a_long_first_sentence_is_cut_at_a_clause() -> None:
    long = "This is quite a long sentence, which has several clauses, and goes on without an end for a while."
    first, *rest = split(long)
    assert first == "This is quite a long sentence, which has several clauses,"
    assert rest == ["and goes on without an end for a while."]
    assert split("Short. " + long) == ["Short.", long]  # later ones stay whole
    assert split(long, first_characters=MAX_CHARACTERS) == [long]
    splitter = SentenceSplitter()
    assert splitter.push(long[: FIRST_CHARACTERS + 1]) == [first]  # not only at the end


def test_a_long_first_sentence_without_clauses_stays_whole() -> None:
    text = "word " * 30 + "end."
    assert split(text) == [text]


def test_very_long_sentences_are_cut() -> None:
    clauses = split("and so on, " * 100)
    assert all(sentence.endswith("on,") for sentence in clauses)
    assert max(map(len, clauses[1:])) > MAX_CHARACTERS - 20
    words = split("word " * 300)
    assert all(set(sentence.split()) == {"word"} for sentence in words)
    assert "".join(split("x" * 1000)) == "x" * 1000
    assert max(map(len, clauses + words + split("x" * 1000))) <= MAX_CHARACTERS


def test_a_splitter_can_be_used_again_after_flush() -> None:
    splitter = SentenceSplitter()
    assert splitter.push("One. Two") + splitter.flush() == ["One.", "Two"]
    assert splitter.push("Three. Four") + splitter.flush() == ["Three.", "Four"]
    assert splitter.flush() == []


def test_an_endless_stream_is_bounded() -> None:
    splitter = SentenceSplitter()
    for _ in range(500):
        splitter.push("word, " * 5)
        assert len(splitter._buffer) <= MAX_CHARACTERS + 30


TEXTS = st.text(alphabet='aBc 1.,!?…\n"*-:;)`_é。', max_size=200) | st.text(max_size=80)


@given(text=TEXTS, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=400, deadline=None)
def test_chunking_never_matters(text: str, sizes: list[int]) -> None:
    limits = {"max_characters": 40, "first_characters": 16}
    whole = split(text, **limits)
    assert split(text, sizes, **limits) == whole
    assert all(0 < len(sentence) <= 40 for sentence in whole)


@given(text=TEXTS, more=TEXTS)
@settings(max_examples=200, deadline=None)
def test_what_was_said_is_never_taken_back(text: str, more: str) -> None:
    early = SentenceSplitter(max_characters=40, first_characters=16).push(text)
    assert split(text + more, max_characters=40, first_characters=16)[: len(early)] == early


@given(st.text(alphabet="abcDEF 123.,!?\n\"'", max_size=300))
@settings(deadline=None)
def test_no_letter_is_lost_or_repeated(text: str) -> None:
    kept = "".join(character for character in "".join(split(text)) if character.isalnum())
    assert kept == "".join(character for character in text if character.isalnum())


def test_speakable_needs_a_letter_or_digit() -> None:
    assert speakable("**1**") == "1"
    assert speakable("*** --- ...") == ""
