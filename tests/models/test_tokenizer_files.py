"""tokenizer.json made from vocab.json and merges.txt: equal ids, made once, and clear errors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from omnistage.errors import WeightsError
from omnistage.models import tokenizer_files
from omnistage.models.tokenizer_files import tokenizer_file

TEXTS = (
    "<|im_start|>user\nDescribe the picture.<|im_end|>\n",
    "<|vision_start|><|image_pad|><|vision_end|> naïve café — 日本語 🙂\t  x\n\n 12345",
    "it's <tts_pad> n\u0303 \r\n{}",
)
FILES = ("vocab.json", "merges.txt", "tokenizer_config.json", "config.json")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def bare(qwen3_omni_dir: Path, tmp_path: Path) -> Path:
    """The small Qwen3-Omni's tokenizer without tokenizer.json."""
    directory = tmp_path / "bare"
    directory.mkdir()
    for name in FILES:
        shutil.copy(qwen3_omni_dir / name, directory)
    return directory


def test_a_checkpoint_s_own_is_taken(qwen3_omni_dir: Path, home: Path):
    assert tokenizer_file(qwen3_omni_dir) == qwen3_omni_dir / "tokenizer.json"
    assert not home.exists()


def test_ids_equal_the_original_s(
    bare: Path, qwen3_omni_dir: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    made = tokenizer_file(bare)
    assert made.is_relative_to(home / "tokenizers")
    assert [path.name for path in made.parent.iterdir()] == ["tokenizer.json"], "nothing half made stays"
    original = Tokenizer.from_file(str(qwen3_omni_dir / "tokenizer.json"))
    converted = Tokenizer.from_file(str(made))
    assert converted.get_vocab(with_added_tokens=True) == original.get_vocab(with_added_tokens=True)
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert converted.encode(text, add_special_tokens=False).ids == ids
        assert converted.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )
    monkeypatch.setattr(tokenizer_files, "_run", lambda *paths: pytest.fail("converted again"))
    assert tokenizer_file(bare) == made
    moved = bare.rename(bare.with_name("moved"))
    assert tokenizer_file(moved) == made, "it is the content that counts"


def test_another_vocabulary_is_another_file(bare: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer_files, "_run", lambda directory, target: target.write_text("{}"))
    first = tokenizer_file(bare)
    (bare / "merges.txt").write_text("#version: 0.2\n")
    assert tokenizer_file(bare) != first


def test_errors_name_the_remedy(bare: Path, home: Path, tmp_path: Path):
    with pytest.raises(WeightsError, match=r"neither tokenizer\.json nor vocab\.json.*fetch the model again"):
        tokenizer_file(tmp_path)
    (bare / "vocab.json").write_text("{")
    with pytest.raises(WeightsError, match=r"cannot be converted to tokenizer\.json \(.*put its"):
        tokenizer_file(bare)
    assert not list(home.rglob("tokenizer.json"))


def test_a_home_that_cannot_be_written(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match="set OMNISTAGE_HOME"):
        tokenizer_file(bare)


def test_it_imports_neither_torch_nor_transformers():
    code = (
        "import sys, omnistage.models.tokenizer_files\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
