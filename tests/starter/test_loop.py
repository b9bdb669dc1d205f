"""The loop closes: what the starter says, its own hearing stage hears."""

from __future__ import annotations

import re

from omnistage.audio.containers import encode
from omnistage.audio.pcm import Pcm
from tests.starter.asking import clip, speech

MAX_WORD_ERROR_RATE = 0.25
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A cat is sleeping on the warm window sill.",
    "Please close the door when you leave the house.",
    "The train to the city leaves at seven in the morning.",
    "She bought three apples and a loaf of bread.",
    "It will probably rain in the afternoon.",
    "My brother plays the piano every evening.",
    "The children are building a castle in the sand.",
    "Could you tell me the way to the station?",
    "We are going to visit our friends next weekend.",
]


def words(text):
    return re.findall(r"[a-z0-9']+", text.lower())


def word_error_rate(said, heard):
    """Substitutions, insertions and deletions (Levenshtein) over the number of words said."""
    row = list(range(len(heard) + 1))
    for index, word in enumerate(said, start=1):
        previous, row[0] = row[0], index
        for column, other in enumerate(heard, start=1):
            previous, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, previous + (word != other)),
            )
    return row[-1] / len(said)


def test_word_error_rate():
    assert word_error_rate(["a", "b", "c"], ["a", "b", "c"]) == 0
    assert word_error_rate(["a", "b", "c", "d"], ["a", "x", "d", "e"]) == 3 / 4
    assert word_error_rate(["a"], []) == 1
    assert word_error_rate(["a"], ["b", "c", "d"]) == 3


def test_what_it_says_it_hears(starter):
    spoken = starter.ask(*(speech(text, seed=index) for index, text in enumerate(SENTENCES)))
    clips = [encode(Pcm(reply.pcm, reply.sample_rate), "wav") for reply in spoken]
    heard = [words(reply.text) for reply in starter.ask(*map(clip, clips))]
    rates = {text: word_error_rate(words(text), found) for text, found in zip(SENTENCES, heard, strict=True)}
    mean = sum(rates.values()) / len(rates)
    assert mean <= MAX_WORD_ERROR_RATE, (mean, rates, heard)
