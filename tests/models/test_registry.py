"""Models and parts are found by name, directory and configuration; faults name the remedy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from omnistage.errors import WeightsError
from omnistage.models.home import omnistage_home
from omnistage.models.registry import (
    FACTORIES,
    PartSource,
    find_part,
    load_decoder,
    load_encoder,
    resolve_model,
)


def write_config(directory, **config):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_home_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path / "here"))
    assert omnistage_home() == tmp_path / "here"
    monkeypatch.delenv("OMNISTAGE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert omnistage_home() == tmp_path / "cache" / "omnistage"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert omnistage_home() == tmp_path / ".cache" / "omnistage"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert omnistage_home() == tmp_path / "Library" / "Caches" / "omnistage"


def test_the_starter_is_found_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path))
    with pytest.raises(WeightsError, match="run `omnistage fetch starter`"):
        resolve_model("starter")
    (tmp_path / "models" / "starter").mkdir(parents=True)
    assert resolve_model("starter") == tmp_path / "models" / "starter"


def test_a_model_may_be_a_directory(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(WeightsError, match="neither 'starter' nor a directory"):
        resolve_model(str(tmp_path / "nowhere"))


def test_a_part_is_a_subdirectory_a_key_or_the_model(tmp_path):
    write_config(tmp_path, model_type="any", thinker_config={"model_type": "qwen3"})
    write_config(tmp_path / "vision", model_type="efficientnet_lite0")
    assert find_part(tmp_path, None).config["model_type"] == find_part(tmp_path, "").model_type == "any"
    assert find_part(tmp_path, "vision") == PartSource(
        tmp_path / "vision", {"model_type": "efficientnet_lite0"}
    )
    assert find_part(tmp_path, "thinker") == PartSource(tmp_path, {"model_type": "qwen3"}, "thinker.")
    with pytest.raises(WeightsError, match="no part 'talker'; its parts: thinker, vision"):
        find_part(tmp_path, "talker")


@pytest.mark.parametrize("content", ["not json", "[1]"])
def test_an_unreadable_configuration_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(WeightsError, match=r"config\.json"):
        find_part(tmp_path, None)


def test_an_unknown_model_type_lists_the_known_ones(tmp_path):
    with pytest.raises(WeightsError, match=r"'bert'.*known: efficientnet_lite0, .*whisper"):
        load_encoder(PartSource(tmp_path, {"model_type": "bert"}))
    with pytest.raises(WeightsError, match="no model_type"):
        load_encoder(PartSource(tmp_path, {}))


def test_devices_and_dtypes_are_checked(tmp_path):
    write_config(tmp_path, model_type="llama")
    with pytest.raises(WeightsError, match="not on 'cuda:0'"):
        load_decoder(find_part(tmp_path, None), device="cuda:0")
    with pytest.raises(WeightsError, match="'int8' is unknown"):
        load_decoder(find_part(tmp_path, None), dtype="int8")


@pytest.mark.starter
def test_every_part_of_the_starter_is_known(starter_dir):
    kinds = {
        path.parent.name: find_part(starter_dir, path.parent.name).model_type
        for path in starter_dir.glob("*/config.json")
    }
    roles = {
        "thinker": "decoder",
        "hearing": "encoder",
        "vision": "encoder",
        "talker": "acoustic",
        "vocoder": "vocoder",
    }
    assert kinds.keys() == roles.keys()
    assert all(kinds[part] in FACTORIES[role] for part, role in roles.items())


@pytest.mark.starter
def test_loading_reports_progress(starter_dir):
    heard = []
    load_encoder(
        find_part(starter_dir, "vision"), progress=lambda fraction, what: heard.append((fraction, what))
    )
    assert heard[0][0] == 0.0
    assert heard[-1] == (1.0, "loaded efficientnet_lite0")
    assert [fraction for fraction, _ in heard] == sorted(fraction for fraction, _ in heard)


def test_importing_registry_and_fetch_imports_no_torch():
    code = (
        "import sys, omnistage.models.registry, omnistage.models.fetch\n"
        "sys.exit(sorted({'torch', 'transformers', 'onnx', 'gguf'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
