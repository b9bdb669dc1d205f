"""Only the stages a request needs take part, media are encoded once, and salts keep users apart."""

from __future__ import annotations

import json

import pytest

from tests.starter.asking import AUDIO, DATA, MEDIA, chat, clip, image, relabelled, sound, speech

CHELSEA = MEDIA / "chelsea.png"
QUESTION = MEDIA / "question.wav"
DESCRIBE = "Describe the picture in one sentence."


@pytest.mark.parametrize(
    ("body", "stages"),
    [
        (chat("Hello."), {"thinker"}),
        (chat(image(CHELSEA.read_bytes()), DESCRIBE), {"vision", "thinker"}),
        (chat(sound(QUESTION.read_bytes())), {"hearing", "thinker"}),
        (chat("Hello.", **AUDIO), {"thinker", "talker", "vocoder"}),
        (speech("Hello."), {"talker", "vocoder"}),
        (clip(QUESTION.read_bytes()), {"hearing"}),
    ],
    ids=["text", "picture", "voice", "speech out", "speech alone", "transcription"],
)
def test_other_stages_hear_nothing_of_a_request(starter, body, stages):
    starter.traffic.sent.clear()
    [reply] = starter.ask(body)
    assert set(starter.traffic.sent) == stages
    assert {timing.stage for timing in reply.timings} == stages


def test_text_alone_wakes_neither_talker_nor_vocoder(starter):
    before = starter.gauges()
    starter.ask(*(chat(f"Count to {number}.") for number in range(5, 10)))
    after = starter.gauges()
    for stage, counter in [("talker", "sentences"), ("talker", "frames"), ("vocoder", "samples")]:
        assert after[stage][counter] == before[stage][counter]
    for stage in ("talker", "vocoder"):
        assert after[stage]["computed_seconds"] == before[stage]["computed_seconds"]


def test_a_picture_is_encoded_once_for_all_users(starter):
    cat = image(relabelled(CHELSEA.read_bytes(), "once"))
    before = starter.gauges()["vision"]["encoded_items"]
    at_once = [chat(cat, cat, DESCRIBE, cache_salt=salt) for salt in ("alice", "bob", "bob")]
    replies = starter.ask(*at_once)
    replies += starter.ask(chat(cat, cat, DESCRIBE, cache_salt="carol"), chat(cat, cat, DESCRIBE))
    assert starter.gauges()["vision"]["encoded_items"] == before + 1
    for reply in replies:
        assert reply.token_ids == replies[0].token_ids


def test_another_picture_is_encoded_again(starter):
    before = starter.gauges()["vision"]["encoded_items"]
    starter.ask(chat(image(relabelled(CHELSEA.read_bytes(), "other")), DESCRIBE))
    assert starter.gauges()["vision"]["encoded_items"] == before + 1


def test_kv_blocks_are_shared_under_one_salt_only(starter):
    """The system message makes the prefix one that no other test has asked for; no salt is a salt, too."""
    text = "Look at the ears, the eyes, the nose and the fur. " * 3 + DESCRIBE
    body = chat(image(CHELSEA.read_bytes()), text)
    body["messages"].insert(0, {"role": "system", "content": "You know pepper and salt."})
    cached = {}
    for salt in ("first", None, "second", "first", None, "second"):
        [reply] = starter.ask(body | {"cache_salt": salt})
        cached.setdefault(salt, []).append(reply.usage.cached_tokens)
    assert len(cached) == 3
    for first, again in cached.values():
        assert first == 0
        assert again >= 32


@pytest.mark.parametrize("path", [CHELSEA, DATA / "cat.jpg"], ids=lambda path: path.name)
def test_a_cat_is_called_a_cat(starter, path):
    [reply] = starter.ask(chat(image(path.read_bytes()), DESCRIBE, max_tokens=48))
    assert "cat" in reply.text.lower()


def test_coffee_is_seen(starter):
    [reply] = starter.ask(chat(image((DATA / "coffee.jpg").read_bytes()), DESCRIBE, max_tokens=48))
    assert "espresso" in reply.text.lower() or "coffee" in reply.text.lower()


def test_a_picture_no_class_fits_is_given_no_name(starter, reference, starter_dir):
    """An astronaut is none of the 1000 classes.  The prompt says "something unclear" in its place."""
    [reply] = starter.ask(chat(image((DATA / "astronaut.jpg").read_bytes()), DESCRIBE, max_tokens=48))
    messages = [{"role": "user", "content": f"Picture of:<it>. {DESCRIBE}"}]
    rows = reference.rows(messages, {"<it>": reference.text_rows(" something unclear")})
    reference.assert_greedy(rows, reply.token_ids)
    labels = json.loads((starter_dir / "vision" / "labels.json").read_text())
    assert reply.text
    assert [label for label in labels if f" {label} " in reply.text.lower()] == []
