"""The documentation against the code: its links, commands, settings and snippets."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from omnistage.errors import PipelineError
from omnistage.graph import load_pipeline
from omnistage.graph.draw import to_svg
from omnistage.graph.schema import settings_markdown
from omnistage.serving.cli import build_parser

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [body for tag, body in FENCE.findall(page.read_text(encoding="utf-8")) if tag == language]


def anchors(page: Path) -> set[str]:
    """What a link's part after # may be, as GitHub makes it from headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    """Every `omnistage ...` with an argument, in running text, tables and shell blocks."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`(omnistage [^`\n]+)`", FENCE.sub("", text))
    lines = [line.strip() for body in blocks(page, "bash") for line in body.splitlines()]
    return inline + [line for line in lines if line.startswith("omnistage ")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    missing = []
    for target in LINK.findall(text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command.split(" > ")[0], comments=True)[1:]
        try:
            build_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{name_of(page)}: the command line does not understand: {command}")


def test_readme_shows_every_command() -> None:
    parsers = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    shown = {command.split()[1] for command in commands(ROOT / "README.md")}
    assert set(parsers[0].choices) - shown == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_compiles(page: Path) -> None:
    for body in blocks(page, "python"):
        compile(body, name_of(page), "exec")


def test_settings_tables_are_the_code_s() -> None:
    text = (ROOT / "docs" / "pipeline-files.md").read_text(encoding="utf-8")
    assert text.endswith("-->\n\n" + settings_markdown()), "paste what settings_markdown() returns"


def test_pipeline_shown_is_the_starter() -> None:
    shown = blocks(ROOT / "docs" / "pipeline-files.md", "yaml")[0]
    assert shown == (ROOT / "omnistage" / "configs" / "starter.yaml").read_text(encoding="utf-8")


def test_problems_shown_are_the_code_s(tmp_path: Path) -> None:
    page = ROOT / "docs" / "pipeline-files.md"
    (pipeline,) = [body for body in blocks(page, "yaml") if body.startswith("name: typo")]
    (tmp_path / "typo.yaml").write_text(pipeline, encoding="utf-8")
    with pytest.raises(PipelineError) as caught:
        load_pipeline(tmp_path / "typo.yaml")
    assert caught.value.message + "\n" in blocks(page, "")


def test_graph_picture_is_the_starter() -> None:
    drawn = (ROOT / "docs" / "starter-graph.svg").read_text(encoding="utf-8")
    assert drawn == to_svg(load_pipeline("starter")), "run docs/make_pictures.py"


def test_error_codes_are_explained() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "omnistage").rglob("*.py"))
    codes = set(re.findall(r"""\bcode ?= ?"([a-z_]+)\"""", sources))
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert codes, "no error has a code any more?"
    assert sorted(code for code in codes if f"`{code}`" not in page) == []
