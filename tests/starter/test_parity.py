"""What the starter's thinker and hearing say equals what transformers says with the same weights, in fp32."""

from __future__ import annotations

import wave

import numpy as np
import pytest
import torch
from PIL import Image

from omnistage.models.registry import find_part, load_encoder
from tests.starter.asking import DATA, MEDIA, chat, clip, image, sound
from tests.starter.reference import HearingReference

NUM_TOKENS = 64
GREEDY = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
QUESTIONS = [
    "Hi.",
    "What is the capital of France?",
    "Name three colours and say what they remind you of.",
    "Count from 1 to 30, please: 1, 2, 3,",
    "Übersetze »Guten Morgen« ins Englische. 🌞",
    "Write a Python function that adds two numbers.\n\n```python\n",
    "Why is the sky blue? " * 12,
    "The quick brown fox jumps over the lazy dog. " * 30,
]
CLIPS = [DATA / "speech_young_man.wav", DATA / "speech_amiable.wav", MEDIA / "question.wav"]


def messages_of(text):
    return [{"role": "user", "content": text}]


def conversation(turns):
    """turns: texts of user and assistant in turn."""
    roles = ["user", "assistant"]
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]


def read_wav(path):
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return samples.astype(np.float32) / 32768, file.getframerate()


def test_alone_it_equals_generate(starter, reference):
    prompt = reference.prompt(messages_of(QUESTIONS[2]))
    [reply] = starter.ask(chat(QUESTIONS[2], cache_salt="alone", **GREEDY))
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == NUM_TOKENS
    assert reply.token_ids == reference.generate(prompt, NUM_TOKENS)


def test_it_ends_where_generate_ends(starter, reference):
    """Without ignore_eos: the end token is the reference's next choice, and it is not in the text."""
    [reply] = starter.ask(chat(QUESTIONS[1], max_tokens=NUM_TOKENS))
    assert reply.finish_reason == "stop"
    assert reply.token_ids[-1] == reference.tokenizer.eos_token_id
    assert reply.text == reference.tokenizer.decode(reply.token_ids[:-1])
    reference.assert_greedy(reference.prompt(messages_of(QUESTIONS[1])), reply.token_ids)


def test_log_probabilities_equal_the_reference(starter, reference):
    body = chat(QUESTIONS[3], logprobs=True, top_logprobs=5, cache_salt="logits", **GREEDY)
    [reply] = starter.ask(body)
    chosen = [logprob for event in reply.events[:-1] for logprob in event.logprobs]
    assert [logprob.token_id for logprob in chosen] == list(reply.token_ids)
    expected = reference.log_probabilities(reference.prompt(messages_of(QUESTIONS[3])), reply.token_ids)
    for logprob, row in zip(chosen, expected, strict=True):
        assert logprob.logprob == pytest.approx(row[logprob.token_id].item(), abs=1e-4)
        best = row.topk(5)
        assert [token_id for token_id, _ in logprob.top] == best.indices.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def picture_rows(starter_dir):
    """The thinker's rows for examples/media/chelsea.png, from the vision model by itself."""
    encoder = load_encoder(find_part(starter_dir, "vision"))
    raw = np.asarray(Image.open(MEDIA / "chelsea.png").convert("RGB"))
    work = encoder.encode([encoder.preprocess(raw, {})])
    while True:
        try:
            next(work)
        except StopIteration as stop:
            [payload] = stop.value
            return torch.from_numpy(payload.tensors["embeddings"].numpy().copy())


@pytest.fixture(scope="module")
def transcripts(starter_dir):
    """What transformers hears in each clip: token ids and text."""
    hearing = HearingReference(starter_dir)
    return {path: hearing.transcribe(*read_wav(path)) for path in CLIPS}


def test_a_mixed_batch_of_sixteen(starter, reference, picture_rows, transcripts):
    cat = image((MEDIA / "chelsea.png").read_bytes())
    voice = sound(CLIPS[1].read_bytes())
    heard = reference.text_rows(transcripts[CLIPS[1]][1])
    talk = conversation(["Hello!", "Hello, how can I help?", "Tell me a joke."])
    system = [{"role": "system", "content": "You answer briefly."}, *messages_of("Who are you?")]
    asked = [(chat(text), reference.prompt(messages_of(text))) for text in QUESTIONS]
    asked += [(chat("") | {"messages": messages}, reference.prompt(messages)) for messages in (talk, system)]
    for text in ("Describe the picture in one sentence.", "What is it?", "Write a poem about it."):
        rows = reference.rows(messages_of(f"Picture of:<cat>. {text}"), {"<cat>": picture_rows})
        asked.append((chat(cat, text), rows))
    rows = reference.rows(messages_of("<voice>\nIs that so?"), {"<voice>": heard})
    asked.append((chat(voice, "Is that so?"), rows))
    rows = reference.rows(
        messages_of("Picture of:<cat>.\n<voice>"), {"<cat>": picture_rows, "<voice>": heard}
    )
    asked.append((chat(cat, voice), rows))
    rows = reference.rows(
        messages_of("Look!\nPicture of:<cat>. Again:\nPicture of:<dog>."),
        {"<cat>": picture_rows, "<dog>": picture_rows},
    )
    asked.append((chat("Look!", cat, "Again:", cat), rows))
    assert len(asked) == 16
    replies = starter.ask(*(body | GREEDY | {"cache_salt": "batch"} for body, _ in asked))
    for reply, (_, rows) in zip(replies, asked, strict=True):
        assert reply.usage.prompt_tokens == len(rows)
        assert len(reply.token_ids) == NUM_TOKENS
        reference.assert_greedy(rows, reply.token_ids)
    assert reference.num_excused <= 2  # of 1024 tokens


def test_prefix_hits(starter, reference, picture_rows):
    cat = image((MEDIA / "chelsea.png").read_bytes())
    text = "Look at it closely, then tell me what it is. " * 4
    fields = GREEDY | {"cache_salt": "prefix"}
    [first] = starter.ask(chat(text, **fields))
    turns = conversation([text, first.text, "Why?"])
    again, longer = starter.ask(chat(text, **fields), chat("", **fields) | {"messages": turns})
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens >= 32
    assert longer.usage.cached_tokens >= 64  # of the first request's answer, too
    reference.assert_greedy(reference.prompt(messages_of(text)), again.token_ids)
    reference.assert_greedy(reference.prompt(turns), longer.token_ids)
    fields["max_tokens"] = 24
    [seen] = starter.ask(chat(cat, text, **fields))
    [seen_again] = starter.ask(chat(cat, text + "Quickly!", **fields))
    assert seen_again.usage.cached_tokens >= 32
    messages = messages_of(f"Picture of:<cat>. {text}Quickly!")
    rows = reference.rows(messages, {"<cat>": picture_rows})
    reference.assert_greedy(rows, seen_again.token_ids)
    assert seen.usage.cached_tokens < seen_again.usage.cached_tokens


@pytest.mark.parametrize("budget", [7, 33])
def test_prompts_in_odd_chunks(thinker_alone, reference, budget):
    pipeline = thinker_alone(kv_cache="128MiB", max_num_seqs=5, max_num_batched_tokens=budget)
    questions = QUESTIONS[:4] + QUESTIONS[6:7]
    for text, reply in zip(
        questions, pipeline.ask(*(chat(text, **GREEDY) for text in questions)), strict=True
    ):
        assert len(reply.token_ids) == NUM_TOKENS
        reference.assert_greedy(reference.prompt(messages_of(text)), reply.token_ids)


def test_after_preemption(thinker_alone, reference):
    pipeline = thinker_alone(kv_cache="20MiB")  # 28 blocks of 16 tokens; the answers need 43
    questions = QUESTIONS[:6]
    replies = pipeline.ask(*(chat(text, **GREEDY) for text in questions))
    assert pipeline.gauges()["thinker"]["preemptions"] > 0
    for text, reply in zip(questions, replies, strict=True):
        assert len(reply.token_ids) == NUM_TOKENS
        reference.assert_greedy(reference.prompt(messages_of(text)), reply.token_ids)


@pytest.mark.parametrize("path", CLIPS, ids=lambda path: path.stem)
def test_hearing_equals_generate(starter, transcripts, path):
    [reply] = starter.ask(clip(path.read_bytes()))
    token_ids, text = transcripts[path]
    assert reply.token_ids == token_ids
    assert reply.text == text
    assert [timing.stage for timing in reply.timings] == ["hearing"]
