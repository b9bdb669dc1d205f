"""Names of Python callables: from a callable to text that another process can load, and back.

A reference is "package.module:name" or "path/to/file.py:name"; name may be dotted (a static method).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from omnistage.errors import PipelineError


def function_reference(function: Callable[..., Any] | str) -> str:
    """The reference of a callable; text is returned as it is.

    A callable of the main script, or of a file that no import would find, is named by the file's
    absolute path.  Raises PipelineError for what has no name at the top of a module: lambdas, functions
    defined inside functions, bound methods, partials and other instances.
    """
    if isinstance(function, str):
        return function
    qualname = getattr(function, "__qualname__", None)
    module_name = getattr(function, "__module__", None)
    remedy = "define it with def at the top of a module, so that a worker process can import it"
    if not isinstance(qualname, str) or not isinstance(module_name, str):
        raise PipelineError(f"{function!r} has no name of its own; {remedy}")
    if "<lambda>" in qualname:
        raise PipelineError(f"{function!r} is a lambda; {remedy}")
    if "<locals>" in qualname:
        raise PipelineError(f"{function!r} is defined inside a function; {remedy}")
    module = sys.modules.get(module_name)
    if module is not None and not _is_at(module, qualname, function):
        raise PipelineError(f"{module_name}:{qualname} is not {function!r}; {remedy}")
    file = _source_file(function)
    if module_name != "__main__" and _finds(module_name, file):
        return f"{module_name}:{qualname}"
    if file is None:
        raise PipelineError(f"{function!r} of module {module_name!r} is in no file; {remedy}")
    return f"{file}:{qualname}"


def load_function(reference: str) -> Callable[..., Any]:
    """Import the callable that a reference names.  Raises PipelineError, naming what is missing.

    What the module itself raises while it is imported is not wrapped.
    """
    place, _, qualname = reference.rpartition(":")
    if not place or not qualname:
        raise PipelineError(f"{reference!r} is no function; write package.module:name or path/file.py:name")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    target: Any = module
    for name in qualname.split("."):
        if not hasattr(target, name):
            raise PipelineError(f"{place} has no {qualname!r}; check the name after the colon")
        target = getattr(target, name)
    if not callable(target):
        raise PipelineError(f"{reference} is a {type(target).__name__}, not a callable")
    loaded: Callable[..., Any] = target
    return loaded


def anchored(reference: str, folder: Path) -> str:
    """The reference with a relative file path taken from `folder`; a module's stays as it is."""
    place, colon, qualname = reference.rpartition(":")
    if not place.endswith(".py") or Path(place).is_absolute():
        return reference
    return f"{(folder / place).resolve()}{colon}{qualname}"


def _is_at(module: ModuleType, qualname: str, function: object) -> bool:
    target: Any = module
    for name in qualname.split("."):
        target = getattr(target, name, None)
    return target is function


def _source_file(function: Callable[..., Any]) -> Path | None:
    try:
        found = inspect.getsourcefile(function)
    except TypeError:  # built in, or written in C
        return None
    return Path(found).resolve() if found and Path(found).is_file() else None


def _finds(module_name: str, file: Path | None) -> bool:
    """Whether a fresh process with this sys.path would import the module, and from this file."""
    search: Sequence[str] | None = None
    found: ModuleSpec | None = None
    parts = module_name.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find_spec(name, search) for find_spec in finders if find_spec is not None)
        found = next((spec for spec in specs if spec is not None), None)
        if found is None:
            return False
        search = found.submodule_search_locations
        if search is None and depth + 1 < len(parts):
            return False
    if file is None:
        return True
    return found is not None and found.origin is not None and Path(found.origin).resolve() == file


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise PipelineError(
                f"no module {missing!r} for the function in {name!r}; install it or give path/to/file.py:name"
            ) from None
        raise


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PipelineError(f"{path} is not a file; a relative path starts at the pipeline file's folder")
    name = f"omnistage_function_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PipelineError(f"{path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look modules up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
