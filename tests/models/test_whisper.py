"""Whisper against transformers: features, encoder, tokens alone and batched, long sound, silence."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from omnistage.errors import InvalidRequest, MediaError, WeightsError
from omnistage.models.protocols import VideoFrames
from omnistage.models.registry import find_part, load_encoder
from omnistage.models.whisper_features import WINDOW_SAMPLES, log_mel, mel_filters, split_windows

DATA = Path(__file__).parent.parent / "data"
END = 87  # a word that the random model says at a different time for every clip
LANGUAGES = {"<|en|>": 92, "<|de|>": 93}


def finish(work):
    """Run a sliced computation; returns (its result, the number of slices)."""
    num_slices = 1
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value, num_slices
        num_slices += 1


def encode(encoder, clips, **options):
    items = [encoder.preprocess(clip, options) for clip in clips]
    return finish(encoder.encode(items))[0]


def read_wav(name):
    with wave.open(str(DATA / name)) as file:
        assert (file.getframerate(), file.getnchannels()) == (16_000, 1)
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


def tone(seconds, frequency, seed=0):
    time = np.arange(int(seconds * 16_000)) / 16_000
    noise = np.random.default_rng(seed).normal(0, 0.02, len(time))
    return (0.3 * np.sin(2 * np.pi * frequency * time) * np.sin(3 * time) + noise).astype(np.float32)


def write_tiny(directory, *, multilingual):
    """A random Whisper in the hub's layout; its rows end at different times."""
    torch.manual_seed(3)
    config = WhisperConfig(
        vocab_size=100,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_target_positions=300,
        bos_token_id=91,
        decoder_start_token_id=91,
        eos_token_id=END,
        pad_token_id=90,
        init_std=0.3,
    )
    model = WhisperForConditionalGeneration(config).eval()
    # Without these a random model says one word for ever, whatever it hears.
    nn.init.normal_(model.model.decoder.embed_positions.weight, std=5.0)
    for layer in model.model.decoder.layers:
        nn.init.normal_(layer.encoder_attn.out_proj.weight, std=0.6)
    model.save_pretrained(directory)
    generation = {
        "decoder_start_token_id": 91,
        "eos_token_id": END,
        "no_speech_token_id": 96,
        "no_timestamps_token_id": 97,
        "suppress_tokens": [3, 4, 91, 96, 97],
        "begin_suppress_tokens": [5, END],
    }
    if multilingual:
        generation |= {"lang_to_id": LANGUAGES, "task_to_id": {"transcribe": 94, "translate": 95}}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(100)}, unk_token="w0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    return model, generation


@torch.inference_mode()
def reference_tokens(model, generation, clip, prompt, limit=224):
    """transformers' modules in the plainest greedy loop, one clip at a time."""
    extractor = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    features = extractor(clip, sampling_rate=16_000, return_tensors="pt").input_features
    hidden = model.model.encoder(features)
    tokens, fresh, cache = list(prompt), list(prompt), None
    while len(tokens) < len(prompt) + limit:
        output = model(
            encoder_outputs=hidden,
            decoder_input_ids=torch.tensor([fresh]),
            cache=cache,
            use_cache=True,
        )
        cache, logits = output.cache, output.logits[0, -1].clone()
        logits[generation["suppress_tokens"]] = -torch.inf
        if len(tokens) == len(prompt):
            logits[generation["begin_suppress_tokens"]] = -torch.inf
        token = int(logits.argmax())
        if token == generation["eos_token_id"]:
            break
        tokens.append(token)
        fresh = [token]
    return tuple(tokens[len(prompt) :])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whisper")
    model, generation = write_tiny(directory, multilingual=False)
    return load_encoder(find_part(directory, None)), model, generation


@pytest.fixture
def loud_end(monkeypatch):
    """Random weights rarely say that nothing is said; keep their texts."""
    monkeypatch.setattr("omnistage.models.whisper.NO_SPEECH_THRESHOLD", 1.0)


@pytest.mark.parametrize("seconds", [0.01, 3.3, 30.0])
def test_features_equal_the_reference_extractor(seconds):
    clip = tone(seconds, 330)
    expected = WhisperFeatureExtractor(feature_size=80)(clip, sampling_rate=16_000, return_tensors="pt")
    torch.testing.assert_close(log_mel(clip, mel_filters(80)), expected.input_features[0], atol=1e-5, rtol=0)


def test_encoder_output_equals_transformers(tiny):
    encoder, model, _ = tiny
    features = log_mel(tone(2, 440), mel_filters(80))
    with torch.inference_mode():
        ours, _ = finish(encoder._network.encoder.run(features))
        theirs = model.model.encoder(features[None]).last_hidden_state
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_tokens_equal_transformers_alone_and_batched(tiny, loud_end):
    encoder, model, generation = tiny
    clips = [tone(1 + index, 150 * (index + 1), seed=index) for index in range(10)]  # more than MAX_ROWS
    expected = [reference_tokens(model, generation, clip, [91, 97], limit=224) for clip in clips[:4]]
    alone = [encode(encoder, [clip])[0] for clip in clips]
    together = encode(encoder, clips)
    assert [payload.token_ids for payload in alone[:4]] == expected
    assert [payload.token_ids for payload in together] == [payload.token_ids for payload in alone]
    lengths = {len(payload.token_ids) for payload in alone}
    assert len(lengths) > 3, f"rows end together ({lengths}): nothing is proved"


def test_a_multilingual_model_detects_or_takes_the_language(tmp_path, loud_end):
    model, generation = write_tiny(tmp_path, multilingual=True)
    encoder = load_encoder(find_part(tmp_path, None))
    clips = [tone(2, 200), tone(3, 700)]
    for code, token in (("en", 92), ("de", 93)):
        payloads = encode(encoder, clips, language=code)
        for clip, payload in zip(clips, payloads, strict=True):
            assert payload.info["language"] == code
            prompt = [91, token, 94, 97]
            assert payload.token_ids[:10] == reference_tokens(model, generation, clip, prompt, limit=10)
    extractor = WhisperFeatureExtractor(feature_size=80)
    features = extractor(clips[0], sampling_rate=16_000, return_tensors="pt").input_features
    with torch.inference_mode():
        logits = model(features, decoder_input_ids=torch.tensor([[91]])).logits[0, -1]
    likelier = "en" if logits[92] > logits[93] else "de"
    assert encode(encoder, clips[:1])[0].info["language"] == likelier
    with pytest.raises(InvalidRequest, match=r"'fr'.*de, en"):
        encoder.preprocess(clips[0], {"language": "fr"})


def test_long_sound_is_cut_at_the_quiet_point_and_loses_nothing():
    quiet_from, quiet_to = int(24.0 * 16_000), int(24.6 * 16_000)
    samples = tone(75, 300)
    samples[quiet_from:quiet_to] *= 1e-3
    pieces = split_windows(samples)
    assert quiet_from < len(pieces[0]) < quiet_to
    assert all(0 < len(piece) <= WINDOW_SAMPLES for piece in pieces)
    assert np.array_equal(np.concatenate(pieces), samples)


def test_work_comes_in_slices(tiny):
    encoder, _, _ = tiny
    _, num_slices = finish(encoder.encode([encoder.preprocess(tone(1, 300), {})]))
    assert num_slices > 20


def test_digital_silence_is_empty_without_running_the_network(tiny):
    encoder, _, _ = tiny
    item = encoder.preprocess(np.zeros(16_000, np.float32), {})
    (payload,), num_slices = finish(encoder.encode([item]))
    assert (payload.text, payload.token_ids, num_slices) == ("", (), 1)
    assert payload.info == {"modality": "audio", "language": "en", "duration": 1.0, "no_speech": 1.0}


@pytest.mark.parametrize(
    "samples", [np.zeros(0, np.float32), np.zeros((2, 9), np.float32), np.array([0.1, np.nan], np.float32)]
)
def test_sound_that_cannot_be_used_is_named(tiny, samples):
    with pytest.raises(MediaError):
        tiny[0].preprocess(samples, {})


def test_the_frames_of_a_video_are_refused(tiny):
    assert (tiny[0].modalities, tiny[0].video_fps) == (("audio",), 0.0)
    with pytest.raises(MediaError, match="send the sound track"):
        tiny[0].preprocess(VideoFrames(np.zeros((1, 4, 4, 3), np.uint8), 2.0), {})


def test_missing_files_are_named(tmp_path):
    write_tiny(tmp_path, multilingual=False)
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(WeightsError, match="decoder_start_token_id"):
        load_encoder(find_part(tmp_path, None))
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_encoder(find_part(tmp_path, None))


@pytest.fixture(scope="module")
def hearing(starter_dir):
    return load_encoder(find_part(starter_dir, "hearing"))


@pytest.fixture(scope="module")
def reference(starter_dir):
    """transformers' model with the starter's weights, as a function from a clip to tokens."""
    directory = starter_dir / "hearing"
    model = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    generation = json.loads((directory / "generation_config.json").read_text())
    prompt = [generation["decoder_start_token_id"], generation["no_timestamps_token_id"]]
    return lambda clip: reference_tokens(model, generation, clip, prompt)


@pytest.mark.starter
def test_real_speech_equals_transformers_alone_and_batched(hearing, reference):
    clips = [read_wav("speech_young_man.wav"), read_wav("speech_amiable.wav")]
    clips.append(np.concatenate(clips))
    expected = [reference(clip) for clip in clips]
    assert [encode(hearing, [clip])[0].token_ids for clip in clips] == expected
    together = encode(hearing, clips)
    assert [payload.token_ids for payload in together] == expected
    assert together[1].text == "He might even have been made amiable himself."


@pytest.mark.starter
def test_sound_over_a_window_long_is_heard_whole(hearing, reference):
    first, second, pause = read_wav("speech_young_man.wav"), read_wav("speech_amiable.wav"), np.zeros(8_000)
    long = np.concatenate([first, pause, second, pause] * 5).astype(np.float32)
    (payload,) = encode(hearing, [long])
    assert payload.info["duration"] > 35
    pieces = split_windows(long)
    assert len(pieces) == 2
    assert payload.token_ids == reference(pieces[0]) + reference(pieces[1])
    assert payload.text.startswith("He was not")
    assert payload.text.endswith("himself.")


@pytest.mark.starter
def test_noise_is_not_heard_as_words(hearing):
    noises = [
        np.random.default_rng(0).normal(0, level, 48_000).astype(np.float32) for level in (3e-4, 1e-2, 0.3)
    ]
    assert [payload.text for payload in encode(hearing, noises)] == ["", "", ""]
