"""Fixtures that tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.target.tiny import save_tokenizer, tiny_model


@pytest.fixture(scope="module")
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk, with a tokenizer and a chat template: a Llama of five layers, or the (family,
    layers) that a test gives as its parameter.
    """
    family, layers = getattr(request, "param", ("llama", 5))
    folder = tmp_path_factory.mktemp("model")
    tiny_model(family, vocab_size=344, num_hidden_layers=layers).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
