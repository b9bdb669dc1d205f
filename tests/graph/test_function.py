from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from omnistage.errors import PipelineError
from omnistage.graph.function import anchored, function_reference, load_function


class Box:
    @staticmethod
    def inner(text: str) -> str:
        return text

    def method(self, text: str) -> str:
        return text


def write_module(folder: Path, text: str) -> Path:
    path = folder / "helpers.py"
    path.write_text(text)
    return path


def load_as(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_an_importable_callable_is_named_by_its_module():
    assert function_reference(json.dumps) == "json:dumps"
    assert load_function("json:dumps") is json.dumps
    assert function_reference(json.JSONEncoder) == "json.encoder:JSONEncoder"


def test_text_stays_as_it_is():
    assert function_reference("pkg.mod:name") == "pkg.mod:name"


def test_a_callable_that_no_import_finds_is_named_by_its_file(tmp_path, monkeypatch):
    path = write_module(tmp_path, "def shout(text):\n    return text.upper()\n")
    module = load_as("omnistage_test_helpers", path)
    monkeypatch.delitem(sys.modules, "omnistage_test_helpers", raising=False)
    monkeypatch.setitem(sys.modules, "omnistage_test_helpers", module)
    reference = function_reference(module.shout)
    assert reference == f"{path.resolve()}:shout"
    assert load_function(reference)("hi") == "HI"


def test_a_module_of_the_same_name_elsewhere_is_not_mistaken_for_it(tmp_path, monkeypatch):
    path = write_module(tmp_path, "def dumps(text):\n    return text\n")
    module = load_as("omnistage_shadow", path)
    module.dumps.__module__ = "json"
    monkeypatch.setitem(sys.modules, "omnistage_shadow", module)
    with pytest.raises(PipelineError, match=r"json:dumps is not <function"):
        function_reference(module.dumps)


def test_a_callable_of_the_main_script_is_named_by_its_file(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from omnistage.graph.function import function_reference\n"
        "def shout(text):\n    return text.upper()\n"
        "print(function_reference(shout))\n"
    )
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"{script.resolve()}:shout"


def test_a_static_method_has_a_dotted_name():
    reference = function_reference(Box.inner)
    assert reference.endswith(":Box.inner")
    assert load_function(reference)("x") == "x"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: text, "is a lambda"),
        (functools.partial(json.dumps), "no name of its own"),
        (Box().method, "is not <bound method"),
        (3, "no name of its own"),
    ],
)
def test_what_has_no_name_is_refused(function, message):
    with pytest.raises(PipelineError, match=message):
        function_reference(function)


def test_a_closure_is_refused():
    def inside(text):
        return text

    with pytest.raises(PipelineError, match="defined inside a function; define it with def at the top"):
        function_reference(inside)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("json", "write package.module:name"),
        ("json:", "write package.module:name"),
        ("no_such_module_here:f", "no module 'no_such_module_here'"),
        ("json.no_such:f", "no module 'json.no_such'"),
        ("json:no_such", "json has no 'no_such'"),
        ("json:__doc__", "is a str, not a callable"),
        ("/no/such/file.py:f", "is not a file"),
    ],
)
def test_what_cannot_be_loaded_says_what_is_missing(reference, message):
    with pytest.raises(PipelineError, match=message):
        load_function(reference)


def test_errors_of_the_users_own_module_come_through(tmp_path):
    path = write_module(tmp_path, "import no_such_module_there\n")
    before = set(sys.modules)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_there"):
        load_function(f"{path}:f")
    assert set(sys.modules) == before


def test_relative_paths_are_taken_from_a_folder(tmp_path):
    assert anchored("sub/f.py:g", tmp_path) == f"{tmp_path.resolve()}/sub/f.py:g"
    assert anchored("/abs/f.py:g", tmp_path) == "/abs/f.py:g"
    assert anchored("pkg.mod:g", tmp_path) == "pkg.mod:g"
