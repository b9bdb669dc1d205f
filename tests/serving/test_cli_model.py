"""The command line with a published model in place of a pipeline."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from omnistage.audio.containers import decode
from omnistage.errors import FetchError
from omnistage.graph.loader import resolve_text
from omnistage.serving import cli_pipeline
from omnistage.serving.cli import main
from omnistage.serving.cli_pipeline import LoadProgress
from tests.models.hub_cache import fill_cache, use_cache


def rows_of(text: str) -> dict[str, list[str]]:
    """The lines of a plan's first table, by stage."""
    lines = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    return {line[1]: line for line in lines}


def test_dry_run_prints_the_plan_and_starts_nothing(qwen3_omni_dir, capsys, monkeypatch):
    from omnistage.serving import cli_serve

    monkeypatch.setattr(cli_serve, "listen", lambda host, port: pytest.fail("a server was started"))
    assert main(["serve", str(qwen3_omni_dir), "--dry-run", "--memory", "3GiB", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr()
    rows = rows_of(printed.out)
    assert list(rows) == ["vision", "hearing", "thinker", "talker", "vocoder", "all"]
    assert rows["all"][-2:] == ["3.0", "GiB"]
    assert "exported/token" in printed.out
    (thinker,) = [line.split() for line in printed.out.splitlines() if line.startswith("thinker")]
    assert all(float(rate) > 0 for rate in thinker[-3:]), "upper bounds of the rates"
    assert printed.err == ""


def test_dry_run_of_a_pipeline_file(qwen3_omni_dir, tmp_path, capsys):
    path = tmp_path / "p.yaml"
    stage = "{kind: llm, part: thinker, kv_cache: 1MiB}"
    path.write_text(f"name: p\nmodel: {qwen3_omni_dir}\nstages: {{mind: {stage}}}\noutputs: {{text: mind}}\n")
    assert main(["serve", str(path), "--dry-run"]) == 0
    assert list(rows_of(capsys.readouterr().out)) == ["mind", "all"]
    assert main(["serve", str(path), "--dry-run", "--memory", "100MiB"]) == 2
    printed = capsys.readouterr()
    assert "mind" in printed.out
    assert "device cpu has 100 MiB, but its stages need" in printed.err
    assert main(["serve", str(path), "--dry-run", "--set", "mind.devices=[cuda:0]"]) == 2
    assert "only cpu runs yet" in capsys.readouterr().err


def test_every_command_takes_a_model(qwen3_omni_dir, capsys):
    directory = str(qwen3_omni_dir)
    assert main(["config", directory, "--name", "mine", "--dtype", "float32", "--memory", "4GiB"]) == 0
    text = capsys.readouterr().out
    spec = resolve_text(text).spec
    assert (spec.name, spec.model, dict(spec.device_memory)) == ("mine", directory, {"cpu": 4 * 1024**3})
    assert {stage.dtype for stage in spec.stages.values()} == {"float32"}
    assert "# the memory there is" in text
    assert "# flag --dtype float32" in text
    assert main(["plan", directory, "--prompt-tokens", "100"]) == 0
    assert "Requests of 100 prompt" in capsys.readouterr().out
    assert main(["graph", directory]) == 0
    assert "code2wav" in capsys.readouterr().out


def test_a_name_on_the_hub_is_taken_from_the_cache(qwen3_vl_dir, tmp_path, monkeypatch, capsys):
    fill_cache(use_cache(tmp_path, monkeypatch), "an-org/a-model", qwen3_vl_dir)
    assert main(["serve", "an-org/a-model", "--dry-run"]) == 0
    assert list(rows_of(capsys.readouterr().out)) == ["vision", "thinker", "all"]
    assert main(["plan", "an-org/another"]) == 1
    assert "run `omnistage fetch an-org/another`" in capsys.readouterr().err


def test_what_is_left_out_is_said(qwen3_omni_dir, tmp_path, capsys):
    from tests.serving.test_choose import copy_without

    directory = copy_without(qwen3_omni_dir, tmp_path / "mute", "talker.", "code2wav.")
    assert main(["graph", str(directory)]) == 0
    assert capsys.readouterr().err == f"omnistage: no talker and code2wav weights in {directory}: text only\n"


def test_fetching_a_model(monkeypatch, capsys):
    from omnistage.models import hub

    monkeypatch.setattr(hub, "download_model", lambda name: Path("/cache") / name)
    assert main(["fetch", "an-org/a-model"]) == 0
    assert capsys.readouterr().out == "/cache/an-org/a-model\n"
    assert main(["fetch", "stater"]) == 1
    assert "neither 'starter' nor ORG/NAME" in capsys.readouterr().err


def test_a_model_that_cannot_be_fetched_stops_the_start(monkeypatch, capsys):
    from omnistage.serving import launch

    def refuse(name):
        raise FetchError(f"no {name}")

    monkeypatch.setattr(launch, "fetch_model", refuse)
    assert main(["serve", "an-org/a-model", "--port", "0"]) == 1
    assert capsys.readouterr().err == "omnistage: no an-org/a-model\n"


@pytest.mark.parametrize("size", ["8 GB please", "1.5", "-1", "1.0000001KiB"])
def test_wrong_sizes_are_usage_errors(size, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", f"--memory={size}"])
    assert caught.value.code == 2
    assert "--memory" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_moves_in_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    progress = LoadProgress(stream)
    progress("thinker.0", 0.5, "loading qwen3: 1.0 GiB of 2.0 GiB")
    progress("vision.0", 1.0, "ready")
    last = stream.getvalue().split("\r\x1b[K")[-1]
    assert last == "loading  thinker.0  50%  vision.0 100%  (thinker.0: loading qwen3: 1.0 GiB of 2.0 GiB)"
    monkeypatch.setenv("COLUMNS", "20")
    progress("vision.0", 1.0, "ready")
    assert len(stream.getvalue().split("\r\x1b[K")[-1]) == 19
    progress.finish()
    assert "ready after" in stream.getvalue().split("\r\x1b[K")[-1]


def test_progress_elsewhere_is_a_line_now_and_then(monkeypatch):
    stream = io.StringIO()
    progress = LoadProgress(stream)
    progress("thinker.0", 0.1, "importing")
    assert stream.getvalue() == ""
    monkeypatch.setattr(cli_pipeline, "REPORT_SECONDS", 0.0)
    progress("thinker.0", 0.5, "loading")
    assert stream.getvalue() == "loading  thinker.0  50%  (thinker.0: loading)\n"


@pytest.mark.processes
def test_a_question_to_a_model_is_answered_aloud(qwen3_omni_dir, tmp_path, capsys):
    out = tmp_path / "answer.wav"
    question = ["--text", "Say hello.", "--max-tokens", "6", "--seed", "1", "--out", str(out)]
    assert main(["run", str(qwen3_omni_dir), "--dtype", "float32", "--memory", "2GiB", *question]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert decode(out.read_bytes(), max_seconds=600).duration > 0.05
    assert "talker" in printed.err
