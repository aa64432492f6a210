"""From one `.gguf` file to a Hugging Face folder in float32, once; the folder is what everything else reads.

Dequantising takes seconds and imports transformers' model classes, both too slow for every start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jetspec.errors import ModelError
from jetspec.storage import build_once, file_sha256, say, storage_errors
from jetspec.target.config import ModelConfig
from jetspec.target.weights import check_weights, unfused

# Float32 weights take up to 16 times the bytes of a 2-bit file.
_EXPANSION = 16


def cached_gguf(path: Path, *, verify: bool = False) -> Path:
    """The converted folder of a `.gguf` file, from the cache or made now.

    The cache knows the file by path, size and time of change: hashing gigabytes at every start would be slow.
    Raises ModelError if the file cannot be read and StorageError if the result cannot be written.
    """
    state = path.stat()
    identity = f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    name = f"gguf-{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    need = state.st_size * _EXPANSION
    return build_once(name, lambda folder: convert_gguf(path, folder), need_bytes=need, verify=verify)


def convert_gguf(path: Path, folder: Path) -> None:
    """Write config, float32 weights (safetensors) and tokenizer of a `.gguf` file into an empty folder.

    Raises ModelError if transformers cannot read the file or its architecture is not one of ours.
    """
    _require_readable(path)
    say(f"converting {path.name} to float32 (once)")
    with _quiet_transformers():
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
            model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source)
        except Exception as error:  # transformers raises anything from KeyError to struct.error on a bad file
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"{path} cannot be read as a GGUF model: {reason}") from error
        _restore_splitting(tokenizer.backend_tokenizer, path)
        # The file was quantised, the result is not; with this entry transformers would refuse to save it.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        # Before anything is written: a folder in the cache that fails its checks would count as damaged.
        check_weights(unfused(weights), ModelConfig.from_dict(model.config.to_dict()), str(path))
        with storage_errors(folder):
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            _save(save_file, weights, folder / "model.safetensors")


def check_sha256(path: Path, expected: str) -> None:
    """Raise ModelError unless the file's content has the expected SHA-256."""
    found = file_sha256(path)
    if found != expected:
        raise ModelError(
            f"{path.name} has SHA-256 {found[:16]}… instead of {expected[:16]}…, so it is not the file that"
            " this version knows; try again, and check the package index if it happens twice"
        )


def _restore_splitting(backend: Any, path: Path) -> None:
    """Give the tokenizer the rule for splitting text that the file names and transformers does not read.

    SmolLM was trained with every digit split off before anything else; without it, spaces and line breaks in
    front of a number become other tokens than those the model knows there ("a  5": two instead of one).
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(path).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])


def _save(save_file: Any, weights: dict[str, Any], path: Path) -> None:
    """save_file, with its own exception turned into the OSError that it came from."""
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except OSError:
        raise
    except Exception as error:  # SafetensorError keeps the system's error only as text
        import errno

        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


def _require_readable(path: Path) -> None:
    for package in ("gguf", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"reading {path.name} needs the package {package}, which is not installed;"
                f" run: pip install {package}"
            )
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings about dequantising; our own line says what goes on."""
    import transformers.modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    original = getattr(reader, "tqdm", None)
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    if original is not None:
        reader.tqdm = lambda items, **_: items  # type: ignore[attr-defined]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
        if original is not None:
            reader.tqdm = original  # type: ignore[attr-defined]
