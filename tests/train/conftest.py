"""Fixtures that tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.target.tiny import save_tokenizer, tiny_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=344, num_hidden_layers=5).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
