"""What a user installs: the wheel holds all of the package, and importing it is light."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What may run in the API process or in a tool that reads pipelines: none needs a tensor library.
LIGHT_MODULES = [
    "omnistage",
    "omnistage.graph",
    "omnistage.transport",
    "omnistage.stages.lease",
    "omnistage.home",
    "omnistage.serving.app",
    "omnistage.serving.cli",
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of every file that git has or would take, and of nothing else."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a git checkout")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    folder = tmp_path_factory.mktemp("checkout")
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # not one that is deleted but still in the index
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    output = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(output)]
    built = subprocess.run([*command, str(checkout)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = output.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_file_of_the_package(checkout: Path, wheel: zipfile.ZipFile) -> None:
    files = {
        str(path.relative_to(checkout)) for path in (checkout / "omnistage").rglob("*") if path.is_file()
    }
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert sorted(files - packaged) == [], "add them to [tool.setuptools.package-data]"
    assert sorted(packaged - files) == []


def test_wheel_holds_every_subpackage_and_pipeline(wheel: zipfile.ZipFile) -> None:
    packages = {name.split("/")[1] for name in wheel.namelist() if name.count("/") == 2}
    expected = {"audio", "configs", "encoders", "engine", "graph", "models", "ops", "serving", "stages"}
    assert expected | {"transport"} <= packages
    for package in expected | {"transport"}:
        assert f"omnistage/{package}/__init__.py" in wheel.namelist()
    assert "omnistage/configs/starter.yaml" in wheel.namelist()
    assert "omnistage/py.typed" in wheel.namelist()


def test_every_folder_with_code_is_a_package(checkout: Path) -> None:
    folders = {path.parent for path in (checkout / "omnistage").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_wheel_describes_itself(wheel: zipfile.ZipFile) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = f"omnistage-{project['version']}.dist-info"
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert metadata["Name"] == "omnistage"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert b"omnistage = omnistage.serving.cli:main" in wheel.read(f"{info}/entry_points.txt")
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")


def test_every_direct_dependency_is_pinned_and_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {requirement.partition(">=")[0].lower() for requirement in wanted}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
    assert [line for line in pins if "==" not in line] == []
    assert sorted(names - pinned) == []
    explained = (ROOT / "docs" / "dependencies.md").read_text().lower()
    assert [name for name in sorted(names) if f"| {name} |" not in explained] == []


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_is_light(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "[]\n", printed.stderr
