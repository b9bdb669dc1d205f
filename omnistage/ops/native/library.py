"""The native kernels: built once by the machine's own compiler, kept, and loaded.

Everything they do has a torch form that is used where there is no compiler, or where
OMNISTAGE_NATIVE=0 says so.  Knows no models.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from omnistage.home import omnistage_home

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
BUILD_SECONDS = 300.0
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

long: Any = ctypes.c_long
pointer: Any = ctypes.c_void_p


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, built if this is their first use on this machine; None without them."""
    if os.environ.get("OMNISTAGE_NATIVE") == "0":
        return None
    compiler = _compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        lack = f"CXX names {named!r}, which is no program" if named else "there is no C++ compiler"
        logger.warning("%s; torch computes everything, at a lower speed", lack)
        return None
    try:
        target = omnistage_home() / "native" / f"{_digest(compiler)}.so"
        if not target.is_file():
            _build(compiler, target)
        return _declare(ctypes.CDLL(str(target)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the native kernels cannot be built or loaded (%s); torch computes instead", error)
        return None


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++", "c++"]:
        found = shutil.which(name)
        if found:
            return found
    return None


def _architecture() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _digest(compiler: str) -> str:
    """Names the sources, the compiler and the processor's abilities."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(SOURCES.glob("*.[hc]*")):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    digest.update(version + " ".join((*FLAGS, _architecture())).encode() + _abilities())
    return digest.hexdigest()


def _abilities() -> bytes:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line.encode()
    return (platform.machine() + platform.processor()).encode()


def _build(compiler: str, target: Path) -> None:
    """Compile beside the target and rename, so that others see all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "library.so"
        command = [compiler, *FLAGS, _architecture(), str(SOURCES / "library.cpp"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()[-800:]}")
        made.replace(target)


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.omnistage_packed_bytes.restype = long
    loaded.omnistage_packed_bytes.argtypes = [long] * 3
    loaded.omnistage_pack.argtypes = [long] * 4 + [pointer] * 2
    loaded.omnistage_linear.argtypes = [long] * 6 + [pointer, long] + [pointer] * 4
    loaded.omnistage_snake.argtypes = [long] * 4 + [pointer, long, pointer, pointer, pointer, long]
    loaded.omnistage_attention.argtypes = [long] * 2 + [pointer] * 5
    loaded.omnistage_decode.argtypes = [long] * 2 + [pointer] * 2
    loaded.omnistage_mlp.argtypes = [long] * 2 + [pointer] + [long] * 2 + [pointer] * 3
    loaded.omnistage_predict.argtypes = [long] * 2 + [pointer, long] + [pointer] * 8
    for name in ("pack", "linear", "snake", "attention", "mlp", "decode", "predict"):
        getattr(loaded, f"omnistage_{name}").restype = None
    return loaded
