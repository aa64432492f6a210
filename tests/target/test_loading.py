from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub
from safetensors.torch import load_file, save_file

from jetspec.errors import DownloadError, ModelError, OptionError, StorageError
from jetspec.target import loading
from jetspec.target.loading import load_target, read_model
from tests.target.tiny import per_expert, save_tokenizer, tiny_model


def save(
    folder: Path, family: str = "llama", *, shard: str | None = None, **changes: Any
) -> dict[str, torch.Tensor]:
    """Write a tiny model as transformers does; returns its tensors, experts one by one."""
    model = tiny_model(family, **changes)
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    return per_expert(model.state_dict())


def refusal(folder: Path | str) -> str:
    """The one-line message with which a model is refused."""
    with pytest.raises(ModelError) as caught:
        read_model(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether names and values are equal, bit for bit."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("shard", [None, "8KB"])
def test_reads_what_transformers_saves(tmp_path: Path, family: str, shard: str | None) -> None:
    """Every tensor of every shard must arrive unchanged under its hub name."""
    state = save(tmp_path, family, shard=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shard is not None)
    model = read_model(str(tmp_path))
    assert same(model.weights, state)
    assert (model.tokenizer_dir, model.source) == (tmp_path, str(tmp_path))


def test_fused_experts_are_split(tmp_path: Path) -> None:
    """Swapping the gate's half with the up half, or transposing an expert, gives plausible but wrong text."""
    state = save(tmp_path, "qwen3_moe")
    reference = read_model(str(tmp_path)).weights
    fused = tiny_model("qwen3_moe")
    fused.load_state_dict(_fuse(state, fused.state_dict()))
    save_file({n: t.clone() for n, t in fused.state_dict().items()}, tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    assert same(read_model(str(tmp_path)).weights, reference)


def _fuse(state: dict[str, torch.Tensor], layout: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for name in layout:
        base, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            rows = [
                torch.cat([state[f"{base}.experts.{e}.{part}.weight"] for part in ("gate_proj", "up_proj")])
                for e in range(4)
            ]
            result[name] = torch.stack(rows)
        elif kind == "down_proj":
            result[name] = torch.stack([state[f"{base}.experts.{e}.down_proj.weight"] for e in range(4)])
        else:
            result[name] = state[name]
    return result


def test_tied_embeddings(tmp_path: Path) -> None:
    """A tied model that also stores its output matrix: dropped if it is the same, used if it differs."""
    state = save(tmp_path, tie_word_embeddings=True)
    del state["lm_head.weight"]
    assert same(read_model(str(tmp_path)).weights, state)
    both = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    save_file(both, tmp_path / "model.safetensors")
    assert same(read_model(str(tmp_path)).weights, state)
    both["lm_head.weight"][3, 3] += 1
    save_file(both, tmp_path / "model.safetensors")
    model = read_model(str(tmp_path))
    assert same(model.weights, both)
    assert model.config["tie_word_embeddings"] is False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
def test_weights_are_mapped(tmp_path: Path) -> None:
    """Copying the weights at start would double the memory and cost seconds for large models."""
    save(tmp_path)
    weights = read_model(str(tmp_path)).weights
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [
        tuple(int(end, 16) for end in fields[0].split("-"))
        for fields in maps
        if fields[-1] == str(tmp_path / "model.safetensors")
    ]
    for name, tensor in weights.items():
        assert any(low <= tensor.data_ptr() < high for low, high in ranges), name


def test_end_ids_of_the_generation_config(tmp_path: Path) -> None:
    """Llama 3 names the end of a turn only in generation_config.json."""
    save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_model(str(tmp_path)).config["eos_token_id"] == [2, 7, 9]


def test_pickles_are_refused(tmp_path: Path) -> None:
    """Opening a .bin file can run code; a folder that holds only that must be refused without opening it."""
    save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert all(part in message for part in ("pytorch_model.bin", "pickle", "safetensors", "save_pretrained"))
    (tmp_path / "pytorch_model.bin").unlink()
    assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    """An interrupted copy ends anywhere: in the length, in the header, in the last tensor."""
    save(tmp_path, shard="8KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:keep])
    message = refusal(tmp_path)
    assert victim.name in message
    assert "incomplete" in message


def test_missing_shard(tmp_path: Path) -> None:
    """A shard that was never downloaded is named, before its tensors are reported as missing."""
    save(tmp_path, shard="8KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[2]
    victim.unlink()
    assert victim.name in refusal(tmp_path)


def test_lfs_pointer(tmp_path: Path) -> None:
    """A clone without Git LFS leaves small text files in place of the weights."""
    save(tmp_path)
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    assert "git lfs pull" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", "{}", "[" * 10**5),
        *('{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../secret.safetensors"}}'),
    ],
    ids=range(6),
)
def test_bad_index(tmp_path: Path, content: str) -> None:
    """An index that is cut off, or that points at files outside its folder."""
    save(tmp_path, shard="8KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "index" in refusal(tmp_path)


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    """Loading leniently would leave random or unused weights and produce nonsense without a word."""
    state = save(tmp_path)
    file = tmp_path / "model.safetensors"
    norm, bias = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"
    save_file({name: tensor for name, tensor in state.items() if name != norm}, file)
    assert norm in refusal(tmp_path)
    save_file({**state, bias: torch.zeros(32)}, file)
    assert bias in refusal(tmp_path)
    save_file({**state, norm: torch.zeros(17)}, file)
    assert f"{norm} [17] instead of [16]" in refusal(tmp_path)
    save_file({**state, norm: torch.zeros(16, dtype=torch.int8)}, file)
    assert "torch.int8" in refusal(tmp_path)
    save_file({name.replace("model.", "other."): tensor for name, tensor in state.items()}, file)
    assert "more" in refusal(tmp_path)
    save_file({**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, file)
    assert same(read_model(str(tmp_path)).weights, state)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_bad_config(tmp_path: Path, content: str | None) -> None:
    """A folder without a readable config.json is not a model."""
    save(tmp_path)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "a/b/c", "", "no.gguf"])
def test_unknown_names(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mistyped path must not go to the hub, and the message lists what would be valid."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    message = refusal(name) if name else refusal("?")
    assert "gguf" in message


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only data files are fetched: never code, never pickles, never a second copy of the weights."""
    state = save(tmp_path)
    asked: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = read_model("org/name")
    assert same(model.weights, state)
    assert (asked["name"], model.source) == ("org/name", "org/name")
    files = [
        "model.safetensors",
        "config.json",
        "modeling_x.py",
        "pytorch_model.bin",
        "consolidated.safetensors",
    ]
    files += ["original/params.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    wanted = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(wanted) == [
        "model.safetensors",
        "config.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    ]


class _NotFound(hub.RepositoryNotFoundError):
    def __init__(self) -> None:
        Exception.__init__(self, "404 Client Error.\n\nRepository Not Found")


class _Gated(hub.GatedRepoError):
    def __init__(self) -> None:
        Exception.__init__(self, "403")


@pytest.mark.parametrize(
    ("error", "expected", "part"),
    [
        (_NotFound(), ModelError, "org/name"),
        (_Gated(), ModelError, "licence"),
        (hub.LocalEntryNotFoundError("offline and not cached\nsecond line"), DownloadError, "try again"),
        (ConnectionError("reset"), DownloadError, "reset"),
        (OSError(28, "No space left on device"), StorageError, "No space.*HF_HOME"),
    ],
)
def test_hub_errors(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], part: str
) -> None:
    """Offline, unknown, gated and full each need another remedy; none may end in a traceback."""

    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(expected, match=part) as caught:
        read_model("org/name")
    assert "\n" not in str(caught.value)


def test_damaged_cache_is_rebuilt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights changed without changing size pass the quick check; failing to read them means one rebuild."""
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path))
    builds: list[Path] = []

    def convert(path: Path, folder: Path) -> None:
        builds.append(folder)
        save(folder)

    monkeypatch.setattr("jetspec.target.default_model.convert_gguf", convert)
    monkeypatch.setattr("jetspec.storage._SMALL_FILE_BYTES", 10)
    gguf = tmp_path / "x.gguf"
    read_model(gguf=gguf)
    weights = tmp_path / "models" / loading.DEFAULT_MODEL / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[8:16] = b"\0" * 8  # the header is no JSON any more
    weights.write_bytes(content)
    assert read_model(gguf=gguf).weights
    assert len(builds) == 2
    monkeypatch.setattr(loading, "_read_folder", _always_bad)
    with pytest.raises(ModelError, match="bad"):
        read_model(gguf=gguf)
    assert len(builds) == 3


def _always_bad(*_: Any) -> None:
    raise ModelError("bad")


def test_load_target(tmp_path: Path) -> None:
    """The options reach the target, and a typing error in one of them is answered with the valid values."""
    save(tmp_path)
    save_tokenizer(tmp_path)
    target = load_target(str(tmp_path), dtype="float64")
    assert target.name == str(tmp_path)
    assert target.config.num_layers == 3
    assert target.dtype == torch.float64
    assert target.tokenizer.decode(target.tokenizer.encode("fox")) == "fox"
    for options, part in (
        ({"dtype": "float8"}, "bfloat16"),
        ({"device": "abacus"}, "cpu"),
        ({"device": "meta"}, "cpu"),
        ({"device": "privateuseone"}, "cannot be used here"),
        *(() if torch.cuda.is_available() else [({"device": "cuda"}, "cpu")]),
    ):
        with pytest.raises(OptionError, match=part):
            load_target(str(tmp_path), **options)


def fresh_python(script: str, *arguments: str, **environment: str) -> str:
    """What a script prints in a new interpreter, in which nothing has been imported yet."""
    path = os.pathsep.join(["src", *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_offline(tmp_path: Path) -> None:
    """Offline, an uncached hub id is one line, even if nothing else has imported the hub library yet."""
    script = (
        "from jetspec.errors import DownloadError\nfrom jetspec.target.loading import read_model\n"
        "try:\n    read_model('org/name')\nexcept DownloadError as error:\n    print(error)"
    )
    message = fresh_python(script, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert message.startswith("cannot fetch org/name from the hub")
    assert "offline" in message.lower()
    assert message.count("\n") == 1


def test_start_needs_no_transformers(tmp_path: Path) -> None:
    """Importing transformers takes seconds; one careless import on this path would slow down every start."""
    save(tmp_path)
    save_tokenizer(tmp_path)
    script = (
        "import json, sys\nfrom jetspec.target.loading import load_target\n"
        "target = load_target(sys.argv[1])\n"
        "target.tokenizer.chat([{'role': 'user', 'content': 'hi'}])\n"
        "slow = ('transformers', 'huggingface_hub', 'gguf')\n"
        "print(json.dumps([name for name in slow if name in sys.modules]))"
    )
    assert json.loads(fresh_python(script, str(tmp_path))) == []
