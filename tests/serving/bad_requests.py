"""Bad requests and what each must get: body or form, status, code, param, a word of the message."""

from __future__ import annotations

import base64
from typing import Any

USER = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"model": "starter", "messages": [USER]}
SPEECH: dict[str, Any] = {"model": "starter", "input": "Hello.", "voice": "joe"}
SPOKEN: dict[str, Any] = {**CHAT, "modalities": ["text", "audio"], "audio": {"format": "wav", "voice": "joe"}}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 40).decode()
WAV = base64.b64encode(b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40).decode()

MISSING, INVALID, TYPE = "missing_required_parameter", "invalid_value", "invalid_type"
UNSUPPORTED, UNKNOWN = "unsupported_parameter", "unknown_parameter"


def part(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": [{"type": kind, kind: value, **more}]}]}


def image(url: str, **more: Any) -> dict[str, Any]:
    return part("image_url", {"url": url, **more})


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


URL = "messages[0].content[0].image_url.url"
VIDEO = "messages[0].content[0].video_url.url"
CLIP = "messages[0].content[0].input_audio.data"

CHAT_ROWS: list[tuple[Any, int, str, str | None, str]] = [
    ({"messages": [USER]}, 400, MISSING, "model", "required"),
    ({"model": "starter"}, 400, MISSING, "messages", "required"),
    ({"model": "starter", "mesages": [USER]}, 400, UNKNOWN, "mesages", "did you mean 'messages'"),
    ({**CHAT, "temprature": 1}, 400, UNKNOWN, "temprature", "did you mean 'temperature'"),
    ({**CHAT, "model": "gpt-4o"}, 404, "model_not_found", "model", "use 'starter'"),
    ({**CHAT, "model": 3}, 400, TYPE, "model", "got 3"),
    ({**CHAT, "model": "\ud83d\ude00" * 400}, 404, "model_not_found", "model", "use 'starter'"),
    ({**CHAT, "messages": []}, 400, INVALID, "messages", "at least 1"),
    ({**CHAT, "messages": "Hello"}, 400, TYPE, "messages", "list"),
    ({**CHAT, "messages": [3]}, 400, TYPE, "messages[0]", "got 3"),
    ({**CHAT, "messages": [{"content": "x"}]}, 400, MISSING, "messages[0].role", "required"),
    ({**CHAT, "messages": [{"role": "tool", "content": "x"}]}, 400, INVALID, "messages[0].role", "'tool'"),
    ({**CHAT, "messages": [USER, {"role": "user"}]}, 400, MISSING, "messages[1].content", "required"),
    ({**CHAT, "messages": [{"role": "user", "content": 5}]}, 400, TYPE, "messages[0].content", "got 5"),
    (
        {**CHAT, "messages": [{"role": "user", "content": []}]},
        400,
        INVALID,
        "messages[0].content",
        "at least 1",
    ),
    ({**CHAT, "messages": [{**USER, "name": "Ann"}]}, 400, UNSUPPORTED, "messages[0].name", "text"),
    ({**CHAT, "messages": [{**USER, "nick": "Ann"}]}, 400, UNKNOWN, "messages[0].nick", "nick"),
    ({**CHAT, "messages": [{**USER, "audio": {"id": "a"}}]}, 400, INVALID, "messages[0].audio", "assistant"),
    (
        {**CHAT, "messages": [{"role": "assistant", "content": "a", "audio": {"id": "a"}}]},
        400,
        INVALID,
        "messages[0].audio",
        "both",
    ),
    (
        {**CHAT, "messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]},
        404,
        "audio_not_found",
        "messages[0].audio.id",
        "audio_1",
    ),
    (
        {**CHAT, "messages": [USER, {"role": "system", "content": "late"}]},
        400,
        "chat_template_error",
        "messages",
        "must come first",
    ),
    (
        {
            **CHAT,
            "messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        },
        400,
        INVALID,
        "messages[0].content[0]",
        "system",
    ),
    (part("txt", "x"), 400, INVALID, "messages[0].content[0]", "'txt'"),
    (
        {**CHAT, "messages": [{"role": "user", "content": [{}]}]},
        400,
        MISSING,
        "messages[0].content[0]",
        "type",
    ),
    (part("text", 3), 400, TYPE, "messages[0].content[0].text", "got 3"),
    (part("video_url", {"url": "x"}), 400, "unsupported_modality", VIDEO, "takes no video"),
    (part("video_url", {}), 400, MISSING, VIDEO, "required"),
    (part("video_url", {"url": "x", "fps": 0}), 400, INVALID, VIDEO.replace("url.url", "url.fps"), "got 0"),
    (part("video_url", {"url": "x", "fps": 61}), 400, INVALID, VIDEO.replace("url.url", "url.fps"), "60"),
    (part("video_url", {"url": "x", "rate": 1}), 400, UNKNOWN, VIDEO.replace("url.url", "url.rate"), "rate"),
    (part("image_url", {"url": "x"}, size=3), 400, UNKNOWN, "messages[0].content[0].size", "size"),
    (part("image_url", {"link": "x"}), 400, UNKNOWN, "messages[0].content[0].image_url.link", "url"),
    (part("image_url", {}), 400, MISSING, URL, "required"),
    (part("image_url", 3), 400, TYPE, "messages[0].content[0].image_url", "got 3"),
    (part("video_url", None), 400, TYPE, "messages[0].content[0].video_url", "got None"),
    (part("file", {"file_id": "x"}), 400, UNSUPPORTED, "messages[0].content[0].file", "image_url"),
    (image("x", detail="high"), 400, INVALID, "messages[0].content[0].image_url.detail", "high"),
    (image("ftp://host/a.png"), 400, "invalid_media", URL, "ftp"),
    (image("data:image/png;base64,@@@"), 400, "invalid_base64", URL, "base64"),
    (image("data:image/png;base64"), 400, "invalid_media", URL, "comma"),
    (image(data_url(b"")), 400, "invalid_media", URL, "empty"),
    (image(data_url(b"plain text")), 400, "invalid_media", URL, "no known format"),
    (image(data_url(base64.b64decode(WAV))), 400, "invalid_media", URL, "audio/wav"),
    (image(data_url(b"\x89PNG\r\n\x1a\n" + bytes(3000))), 413, "media_too_large", URL, "limit is 2000"),
    (image("http://127.0.0.1:1/a.png"), 400, "forbidden_media_host", URL, "loopback"),
    (image("http://localhost:1/a.png"), 400, "forbidden_media_host", URL, "private"),
    (image("file:///etc/passwd"), 400, "forbidden_file", URL, "file"),
    (
        {
            **CHAT,
            "messages": [
                {"role": "user", "content": [image(data_url(b"x"))["messages"][0]["content"][0]] * 5}
            ],
        },
        400,
        "invalid_media",
        "messages",
        "limit is 4",
    ),
    (
        part("input_audio", {"data": WAV}),
        400,
        MISSING,
        "messages[0].content[0].input_audio.format",
        "required",
    ),
    (
        part("input_audio", {"data": WAV, "format": "midi"}),
        400,
        INVALID,
        CLIP.replace("data", "format"),
        "midi",
    ),
    (part("input_audio", {"data": "%", "format": "wav"}), 400, "invalid_base64", CLIP, "base64"),
    (part("input_audio", {"data": WAV, "format": "mp3"}), 400, "invalid_media", CLIP, "declared as mp3"),
    (part("input_audio", {"data": PNG, "format": "wav"}), 400, "invalid_media", CLIP, "image/png"),
    ({**CHAT, "modalities": ["text", "video"]}, 400, INVALID, "modalities[1]", "video"),
    ({**CHAT, "modalities": ["text", "text"]}, 400, INVALID, "modalities", "once"),
    ({**CHAT, "modalities": []}, 400, INVALID, "modalities", "at least 1"),
    ({**CHAT, "modalities": ["text", "audio"]}, 400, MISSING, "audio", "required"),
    ({**CHAT, "audio": {"format": "wav"}}, 400, INVALID, "audio", "modalities"),
    ({**SPOKEN, "audio": {"voice": "joe"}}, 400, MISSING, "audio.format", "required"),
    ({**SPOKEN, "audio": {"voice": "joe", "format": "ogg"}}, 400, INVALID, "audio.format", "ogg"),
    ({**SPOKEN, "audio": {"voice": "jo", "format": "wav"}}, 404, "voice_not_found", "audio.voice", "'joe'"),
    ({**CHAT, "temperature": 2.5}, 400, INVALID, "temperature", "got 2.5"),
    ({**CHAT, "temperature": "0.5"}, 400, TYPE, "temperature", "number"),
    ({**CHAT, "temperature": True}, 400, TYPE, "temperature", "number"),
    ({**CHAT, "top_p": 0}, 400, INVALID, "top_p", "greater than 0"),
    ({**CHAT, "top_k": -2}, 400, INVALID, "top_k", "-1"),
    ({**CHAT, "min_p": 1.5}, 400, INVALID, "min_p", "got 1.5"),
    ({**CHAT, "presence_penalty": 3}, 400, INVALID, "presence_penalty", "got 3"),
    ({**CHAT, "frequency_penalty": -3}, 400, INVALID, "frequency_penalty", "got -3"),
    ({**CHAT, "repetition_penalty": 0}, 400, INVALID, "repetition_penalty", "got 0"),
    ({**CHAT, "max_tokens": 0}, 400, INVALID, "max_tokens", "got 0"),
    ({**CHAT, "max_tokens": 1.5}, 400, TYPE, "max_tokens", "1.5"),
    ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, 400, INVALID, "max_tokens", "differ"),
    ({**CHAT, "min_tokens": 9, "max_tokens": 3}, 400, INVALID, "min_tokens", "3"),
    ({**CHAT, "max_tokens": 5000}, 400, "context_length_exceeded", "max_completion_tokens", "512"),
    (
        {**CHAT, "messages": [{"role": "user", "content": "x y " * 900}]},
        400,
        "context_length_exceeded",
        "messages",
        "512",
    ),
    ({**CHAT, "n": 0}, 400, INVALID, "n", "got 0"),
    ({**CHAT, "n": 9}, 400, INVALID, "n", "limit is 8"),
    ({**CHAT, "seed": 2**70}, 400, INVALID, "seed", "less than"),
    ({**CHAT, "logprobs": 3}, 400, TYPE, "logprobs", "got 3"),
    ({**CHAT, "top_logprobs": 3}, 400, INVALID, "top_logprobs", "logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, 400, INVALID, "top_logprobs", "20"),
    ({**CHAT, "logit_bias": {"cat": 1}}, 400, INVALID, "logit_bias", "'cat'"),
    ({**CHAT, "logit_bias": {"5": 101}}, 400, INVALID, "logit_bias", "101"),
    ({**CHAT, "logit_bias": {"999999": 1}}, 400, INVALID, "logit_bias", "vocabulary"),
    ({**CHAT, "stop_token_ids": [-1]}, 400, INVALID, "stop_token_ids", "-1"),
    ({**CHAT, "stop": ["a", ""]}, 400, INVALID, "stop", "empty"),
    ({**CHAT, "stop": ["a"] * 17}, 400, INVALID, "stop", "16"),
    ({**CHAT, "stream_options": {"include_usage": True}}, 400, INVALID, "stream_options", "stream"),
    (
        {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        UNSUPPORTED,
        "stream_options.include_obfuscation",
        "padded",
    ),
    ({**CHAT, "stream": "yes"}, 400, TYPE, "stream", "'yes'"),
    ({**CHAT, "tools": [{"type": "function"}]}, 400, UNSUPPORTED, "tools", "calls no tools"),
    ({**CHAT, "tool_choice": "auto"}, 400, UNSUPPORTED, "tool_choice", "calls no tools"),
    ({**CHAT, "functions": [{}]}, 400, UNSUPPORTED, "functions", "calls no tools"),
    ({**CHAT, "response_format": {"type": "json_object"}}, 400, UNSUPPORTED, "response_format", "text"),
    ({**CHAT, "reasoning_effort": "high"}, 400, UNSUPPORTED, "reasoning_effort", "reason"),
    ({**CHAT, "store": True}, 400, UNSUPPORTED, "store", "stored"),
    ({**CHAT, "service_tier": "flex"}, 400, UNSUPPORTED, "service_tier", "one tier"),
    ({**CHAT, "prediction": {"type": "content"}}, 400, UNSUPPORTED, "prediction", "leave"),
    ({**CHAT, "metadata": {"k": "v" * 600}}, 400, INVALID, "metadata", "512"),
    ({**CHAT, "metadata": {"k": 1}}, 400, TYPE, "metadata.k", "got 1"),
    ({**CHAT, "mm_processor_kwargs": {"fps": 0}}, 400, INVALID, "mm_processor_kwargs.fps", "greater than 0"),
    ({**CHAT, "mm_processor_kwargs": {"fps": "2"}}, 400, TYPE, "mm_processor_kwargs.fps", "number"),
    (
        {**CHAT, "mm_processor_kwargs": {"fsp": 2}},
        400,
        UNKNOWN,
        "mm_processor_kwargs.fsp",
        "did you mean 'fps'",
    ),
    (
        {**CHAT, "mm_processor_kwargs": {"use_audio_in_video": 1}},
        400,
        TYPE,
        "mm_processor_kwargs.use_audio_in_video",
        "boolean",
    ),
    (
        {**CHAT, "mm_processor_kwargs": {"use_audio_in_video": True}},
        400,
        "unsupported_modality",
        "mm_processor_kwargs.use_audio_in_video",
        "hears no videos; it takes text, image, audio",
    ),
    ({**CHAT, "stage_params": []}, 400, TYPE, "stage_params", "dictionary"),
    ({**CHAT, "stage_params": {"thinker": 3}}, 400, TYPE, "stage_params.thinker", "got 3"),
    ({**CHAT, "stage_params": {"Thinkr": {}}}, 400, UNKNOWN, "stage_params.Thinkr", "did you mean 'thinker'"),
    ({**CHAT, "stage_params": {"vision": {}}}, 400, UNKNOWN, "stage_params.vision", "known: "),
    (
        {**CHAT, "stage_params": {"talker": {"temp": 1}}},
        400,
        UNKNOWN,
        "stage_params.talker.temp",
        "there are temperature",
    ),
    (
        {**CHAT, "stage_params": {"thinker": {"top_p": "x"}}},
        400,
        TYPE,
        "stage_params.thinker.top_p",
        "must be a number",
    ),
    (
        {**CHAT, "stage_params": {"talker": {"top_p": 0}}},
        400,
        INVALID,
        "stage_params.talker.top_p",
        "above 0 and at most 1",
    ),
    (
        {**CHAT, "stage_params": {"thinker": {"max_tokens": 5000}}},
        400,
        "context_length_exceeded",
        "max_completion_tokens",
        "512",
    ),
    ({**CHAT, "cache_salt": ""}, 400, INVALID, "cache_salt", "at least 1"),
]

SPEECH_ROWS: list[tuple[Any, int, str, str | None, str]] = [
    ({"model": "starter", "voice": "joe"}, 400, MISSING, "input", "required"),
    ({"model": "starter", "input": "a"}, 400, MISSING, "voice", "required"),
    ({**SPEECH, "model": "tts-1"}, 404, "model_not_found", "model", "use 'starter'"),
    ({**SPEECH, "voice": "alloy"}, 404, "voice_not_found", "voice", "known: amy, joe"),
    ({**SPEECH, "input": ""}, 400, INVALID, "input", "at least 1"),
    ({**SPEECH, "input": " \n"}, 400, INVALID, "input", "nothing to say"),
    ({**SPEECH, "input": "...\U0001f600"}, 400, INVALID, "input", "nothing to say"),
    ({**SPEECH, "input": "a" * 5000}, 400, "string_above_max_length", "input", "4096"),
    ({**SPEECH, "speed": 5}, 400, INVALID, "speed", "got 5"),
    ({**SPEECH, "response_format": "pcm16"}, 400, INVALID, "response_format", "pcm16"),
    ({**SPEECH, "stream_format": "wav"}, 400, INVALID, "stream_format", "wav"),
    ({**SPEECH, "instructions": "whisper"}, 400, UNSUPPORTED, "instructions", "voice"),
    ({**SPEECH, "pitch": 2}, 400, UNKNOWN, "pitch", "pitch"),
]

FORM_ROWS: list[tuple[dict[str, Any], int, str, str | None, str]] = [
    ({}, 400, MISSING, "model", "required"),
    ({"model": "whisper-1"}, 404, "model_not_found", "model", "use 'starter'"),
    ({"model": "starter", "language": "de"}, 400, INVALID, "language", "en"),
    ({"model": "starter", "prompt": "Names: Ann"}, 400, UNSUPPORTED, "prompt", "hints"),
    ({"model": "starter", "temperature": "0.4"}, 400, INVALID, "temperature", "0.4"),
    ({"model": "starter", "temperature": "hot"}, 400, TYPE, "temperature", "hot"),
    ({"model": "starter", "response_format": "srt"}, 400, INVALID, "response_format", "srt"),
    (
        {"model": "starter", "response_format": "text", "stream": "true"},
        400,
        INVALID,
        "response_format",
        "stream",
    ),
    (
        {"model": "starter", "timestamp_granularities[]": "word"},
        400,
        UNSUPPORTED,
        "timestamp_granularities[]",
        "time",
    ),
    ({"model": "starter", "lang": "en"}, 400, UNKNOWN, "lang", "language"),
    ({"model": ["starter", "starter"]}, 400, INVALID, "model", "twice"),
]
