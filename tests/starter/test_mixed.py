"""Thirty-two different requests at once: each answer is the one it gets alone, tokens and sound."""

from __future__ import annotations

from tests.starter.asking import AUDIO, DATA, MEDIA, chat, clip, image, relabelled, sound, speech

SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def requests(label):
    """Eight kinds of request, four of each, every other one sampled with a seed of its own.

    label: makes every medium and every prefix new to all caches.
    """

    def medium(path):
        return relabelled(path.read_bytes(), label)

    cat, cup = image(medium(MEDIA / "chelsea.png")), image(medium(DATA / "coffee.jpg"))
    asked = sound(medium(MEDIA / "question.wav"))
    said = sound(medium(DATA / "speech_young_man.wav"))
    bodies = []
    for index in range(4):
        fields = {"seed": 100 + index, "cache_salt": label} | (SAMPLED if index % 2 else {})
        bodies += [
            chat(f"Name {index + 2} animals.", max_tokens=24, **fields),
            chat([cat, cup][index // 2], "Describe the picture in one sentence.", **fields),
            chat(said, "What did I say?", **fields),
            chat([cup, cat][index // 2], asked, **fields),
            chat(f"What is {index} plus {index}? Answer in words.", **AUDIO, **fields),
            chat(cat, asked, max_tokens=12, **AUDIO, **fields),
            speech(f"This is sentence number {index}. And a second one.", seed=index),
            clip([medium(DATA / "speech_amiable.wav"), medium(MEDIA / "question.wav")][index % 2]),
        ]
    return bodies


def test_thirty_two_at_once_equal_alone(starter):
    together = starter.ask(*requests("together"))
    assert len(together) == 32
    assert len({reply.token_ids for reply in together if reply.token_ids}) >= 20  # they do differ
    for reply, body in zip(together, requests("alone"), strict=True):
        [alone] = starter.ask(body)
        reply.assert_same(alone)
        assert reply.text or "input" in body
        assert bool(len(reply.pcm)) == ("input" in body or "audio" in body)
    starter.gauges()  # nothing is left open


def test_another_seed_gives_another_answer(starter):
    """The seeds above matter: without them equality would prove little."""
    bodies = [chat("Tell me a story.", seed=seed, **AUDIO) | SAMPLED for seed in (1, 2, 1)]
    first, second, again = starter.ask(*bodies)
    assert first.token_ids != second.token_ids
    first.assert_same(again)
    spoken = starter.ask(speech("Hello there.", seed=1), speech("Hello there.", seed=2))
    assert spoken[0].pcm.shape != spoken[1].pcm.shape or (spoken[0].pcm != spoken[1].pcm).any()
