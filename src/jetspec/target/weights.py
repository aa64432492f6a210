"""Read a decoder's tensors from memory-mapped safetensors files and check that they are the expected ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetspec.errors import ModelError
from jetspec.target.config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
# Left over from old releases; computed from the configuration nowadays.
_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.masked_bias|self_attn\.bias)")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a model, in Hugging Face's names; experts one by one."""
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        base = f"model.layers.{layer}"
        shapes[f"{base}.input_layernorm.weight"] = (hidden,)
        shapes[f"{base}.post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            shapes[f"{base}.self_attn.{name}.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{base}.self_attn.{name}.bias"] = (rows,)
        shapes[f"{base}.self_attn.o_proj.weight"] = (hidden, query)
        if config.o_bias:
            shapes[f"{base}.self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[f"{base}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{base}.self_attn.k_norm.weight"] = (head_dim,)
        if config.moe is not None and config.moe.sparse_layers[layer]:
            shapes[f"{base}.mlp.gate.weight"] = (config.moe.num_experts, hidden)
            for expert in range(config.moe.num_experts):
                shapes |= _mlp(
                    f"{base}.mlp.experts.{expert}", hidden, config.moe.intermediate_size, bias=False
                )
        else:
            shapes |= _mlp(f"{base}.mlp", hidden, config.intermediate_size, bias=config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files as views of the mapped files; fused experts are split.

    Raises ModelError if a file is missing, incomplete or no safetensors file.
    """
    weights: dict[str, Tensor] = {}
    for path in _shards(folder):
        for name, tensor in _read_file(path).items():
            if not _IGNORED.fullmatch(name):
                weights[name] = tensor
    return unfused(weights)


def unfused(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with one entry (a view) per expert, whichever way the experts are stored."""
    parts: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        parts |= _split_experts(name, tensor)
    return parts


def check_weights(weights: dict[str, Tensor], config: ModelConfig, source: str) -> None:
    """Raise ModelError naming the tensors that are missing, unexpected, of another shape or quantised."""
    expected = expected_tensors(config)
    if missing := [name for name in expected if name not in weights]:
        raise ModelError(
            f"{source} lacks {_some(missing)}, which its config.json asks for; download it again"
        )
    if unexpected := [name for name in weights if name not in expected]:
        raise ModelError(
            f"{source} has {_some(unexpected)}, which its config.json (model_type) does not explain"
        )
    misshaped = [
        f"{name} {list(weights[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if tuple(weights[name].shape) != shape
    ]
    if misshaped:
        raise ModelError(f"{source}: shapes do not fit config.json: {_some(misshaped)}")
    if quantised := [f"{name} ({t.dtype})" for name, t in weights.items() if t.dtype not in _FLOATS]:
        raise ModelError(
            f"{source} is quantised: {_some(quantised)}; valid: float32, bfloat16, float16, float64"
        )


def _mlp(base: str, hidden: int, inner: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    ):
        shapes[f"{base}.{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{base}.{name}.bias"] = (rows,)
    return shapes


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in the index's order, all of them present."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(_no_safetensors(folder))
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = [str(name) for name in dict.fromkeys(found)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is not a valid index of shards ({error!r}); download it again") from error
    if outside := [name for name in names if Path(name).name != name]:
        raise ModelError(f"{index} points outside its folder: {outside[0]!r}; valid: plain file names")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks {_some(missing)} of {len(names)} shards; download it again")
    return [folder / name for name in names]


def _no_safetensors(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if not pickles:
        return f"{folder} holds no {SINGLE} and no {INDEX}, so there are no weights to read"
    return (
        f"{folder} holds only {pickles[0]}: opening a pickle can run any code, so jetspec reads safetensors"
        " only; if you trust the file, convert it with transformers:"
        " AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
    )


def _read_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        with path.open("rb") as stream:
            pointer = stream.read(16).startswith(b"version https://")
        if pointer:
            raise ModelError(
                f"{path} is a Git LFS pointer instead of the weights; run: git lfs pull"
            ) from error
        raise ModelError(f"{path} is damaged or incomplete ({error}); download it again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def _split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor per expert (views) where a layer's experts lie in one tensor, as in transformers 5."""
    base, _, kind = name.rpartition(".")
    if not base.endswith(".mlp.experts") or tensor.ndim != 3:
        return {name: tensor}
    if kind == "down_proj":
        return {f"{base}.{expert}.down_proj.weight": part for expert, part in enumerate(tensor)}
    if kind != "gate_up_proj" or tensor.shape[1] % 2:
        return {name: tensor}
    parts: dict[str, Tensor] = {}
    for expert, both in enumerate(tensor):  # [2 * inner, hidden]: the gate's rows, then the up rows
        gate, up = both.chunk(2)
        parts |= {f"{base}.{expert}.gate_proj.weight": gate, f"{base}.{expert}.up_proj.weight": up}
    return parts


def _some(names: Iterable[Any], limit: int = 3) -> str:
    """The first names and the number of the others."""
    listed = list(names)
    shown = ", ".join(str(name) for name in listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
