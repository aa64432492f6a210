"""From a name to a target: a Hugging Face folder, a hub id, a `.gguf` file or the default model.

Nothing that is read here can run code: weights are safetensors, templates run in a sandbox, and code that
ships with a model is never executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jetspec.errors import LONGEST_NAME, DownloadError, JetSpecError, ModelError, OptionError, brief
from jetspec.storage import path_kind, remove, say, storage_errors, user_path
from jetspec.target.config import ModelConfig, token_ids
from jetspec.target.default_model import DEFAULT_MODEL, cached_default_model
from jetspec.target.gguf import cached_gguf
from jetspec.target.tokenizer import Tokenizer
from jetspec.target.weights import check_weights, read_weights

if TYPE_CHECKING:
    from jetspec.target.target import Target

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_HUB_NOT = ["consolidated*", "original/*", "onnx/*", "metal/*"]  # the same weights again, in other formats


@dataclass(frozen=True)
class LoadedModel:
    """What lies on disk: configuration, memory-mapped weights, the tokenizer's folder, where it came from."""

    config: dict[str, Any]  # of config.json; eos_token_id also holds the ids of generation_config.json
    weights: dict[
        str, Tensor
    ]  # Hugging Face names; lm_head.weight is absent if the embedding is the output matrix
    tokenizer_dir: Path
    source: str


def load_target(name_or_path: str = DEFAULT_MODEL, *, dtype: str = "float32", device: str = "cpu") -> Target:
    """Read a model and build the target that everything else holds.

    name_or_path: "smollm2-135m", a Hugging Face folder, a `.gguf` file or a hub id (`org/name`).
    dtype: float32, bfloat16, float16 or float64. device: as torch spells it, for example "cpu" or "cuda:0".

    Raises OptionError, ModelError, DownloadError or StorageError.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise OptionError(f"dtype {brief(dtype)} is unknown; valid: {', '.join(DTYPES)}")
    name_or_path = str(name_or_path)  # a Path is welcome
    place = _device(str(device))
    model = read_model(name_or_path)
    from jetspec.target.target import Target

    config = ModelConfig.from_dict(model.config)
    return Target(name_or_path, config, model.weights, Tokenizer(model.tokenizer_dir), DTYPES[dtype], place)


def read_model(
    name_or_path: str = DEFAULT_MODEL, *, verify: bool = False, gguf: Path | None = None
) -> LoadedModel:
    """Find a model, fetch or convert it if need be, and map its weights.

    verify: compare all of a cached model with its manifest, which takes about a second per gigabyte.
    gguf: build the default model from this file instead of fetching it.

    Raises ModelError, DownloadError or StorageError.
    """
    if not name_or_path:  # as a path it would be the current folder
        raise ModelError(f"the name of the model is empty; {_VALID}")
    if name_or_path == DEFAULT_MODEL:
        return _read_cached(lambda full: cached_default_model(verify=full, gguf=gguf), verify, name_or_path)
    path, shown = user_path(name_or_path), brief(name_or_path, LONGEST_NAME)
    try:
        kind = path_kind(path)
    except OSError as error:
        raise ModelError(f"model {shown} cannot be looked up ({error.strerror}); {_VALID}") from error
    if path.suffix == ".gguf":
        if kind != "file":
            raise ModelError(f"{path} does not exist; give the path of a .gguf file")
        return _read_cached(lambda full: cached_gguf(path, verify=full), verify, str(path))
    if kind == "folder":
        return _read_folder(path, str(path))
    if kind == "file":
        raise ModelError(f"{path} is neither a folder nor a .gguf file; {_VALID}")
    if _HUB_ID.fullmatch(name_or_path):
        return _read_folder(_fetch_from_hub(name_or_path), name_or_path)
    raise ModelError(f"model {shown} was not found; {_VALID}")


_VALID = f"valid: {DEFAULT_MODEL}, a Hugging Face folder, a .gguf file, a hub id (org/name)"


def _read_cached(find: Callable[[bool], Path], verify: bool, source: str) -> LoadedModel:
    """Read a folder of the cache; if that fails although its sizes are right, build it anew, once."""
    folder = find(verify)
    try:
        return _read_folder(folder, source)
    except ModelError as error:
        say(f"the cached model cannot be read ({error}); building it again")
    remove(folder)
    return _read_folder(find(True), source)


def _read_folder(folder: Path, source: str) -> LoadedModel:
    values = _read_json(folder / "config.json")
    eos = token_ids(values.get("eos_token_id"))
    if (folder / "generation_config.json").is_file():
        eos |= token_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
    values["eos_token_id"] = sorted(eos)
    config = ModelConfig.from_dict(values)
    weights = read_weights(folder)
    if config.tie_embeddings and "lm_head.weight" in weights:
        if torch.equal(weights["lm_head.weight"], weights.get("model.embed_tokens.weight", torch.empty(0))):
            del weights["lm_head.weight"]
        else:  # the file knows better than its configuration; transformers decides the same way
            values["tie_word_embeddings"] = False
            config = ModelConfig.from_dict(values)
    check_weights(weights, config, source)
    return LoadedModel(values, weights, folder, source)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent} has no {path.name}, so it is not a Hugging Face model folder"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__} instead of an object; download it again")
    return values


def _fetch_from_hub(name: str) -> Path:
    """The local snapshot of a hub repository, downloaded if need be (only data files, never code)."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    gone = (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.HFValidationError)
    try:
        with storage_errors(Path(constants.HF_HUB_CACHE), setting="HF_HOME"):
            fetch = huggingface_hub.snapshot_download
            return Path(fetch(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT))
    except hub.GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its licence on the hub, then run 'hf auth login'"
        ) from error
    except gone as error:
        raise ModelError(
            f"model {name!r} is neither a local folder nor on the hub (or is private); {_VALID}"
        ) from error
    except JetSpecError:
        raise
    except Exception as error:  # the hub's own errors, those of its HTTP library, and those of the network
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(
            f"cannot fetch {name} from the hub ({reason}); check the network and try again"
        ) from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device {brief(name)} is unknown; valid: cpu, cuda, cuda:0, …") from error
    if device.type == "meta":
        raise OptionError(f"device {brief(name)} computes nothing; valid: cpu, cuda, cuda:0, …")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device {brief(name)} was asked for, but this machine has no usable CUDA device; valid: cpu"
        )
    try:
        torch.empty(1, device=device)
    except Exception as error:  # each kind of device has its own exception for not being there
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OptionError(f"device {brief(name)} cannot be used here ({reason}); valid: cpu") from error
    return device
