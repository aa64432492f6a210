"""Data sets of the hub, read by the real library from an imitation of the hub."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.train.hub import Hub

CARD = b"""---
configs:
- config_name: math
  data_files: math.jsonl
- config_name: code
  data_files:
  - split: test
    path: code.jsonl
---
"""
# The library reads its endpoint when it is imported, so it needs a process of its own.
READ = """
import json, sys
from jetspec.errors import UserError
from jetspec.train.prompts import load_prompts
for source in sys.argv[1:]:
    try:
        found = load_prompts([source], seed=None, limit=3, skip_broken=True)
        told = [[m["content"] for m in p.messages] for p in found.prompts], found.report()
    except UserError as error:
        told = str(error)
    print(json.dumps(told))
"""


def lines(*records: Any) -> bytes:
    """Records as JSON lines."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def parquet(*records: dict[str, Any]) -> bytes:
    """Records as a Parquet file."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), file)
    return file.getvalue()


def talk(*texts: str) -> list[dict[str, str]]:
    """Messages of both in turns."""
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": t} for n, t in enumerate(texts)]


SETS = {
    "org/turns": {"README.md": b"# About\n", "data.jsonl": lines(*({"turns": [f"t{n}"]} for n in range(5)))},
    "org/alpaca": {  # as CodeAlpaca
        "train.parquet": parquet(
            {"instruction": "Sort", "input": "3 1", "output": "1 3"},
            {"instruction": "Say hi", "input": "", "output": "hi"},
        )
    },
    "org/nemotron": {  # as Nemotron Post-Training
        "data/train.parquet": parquet(
            {"messages": talk("Add 1 and 2.", "3"), "category": "math", "reasoning": "off"},
            {"messages": talk("And 3?", "6"), "category": "math", "reasoning": "off"},
        )
    },
    "org/configs": {
        "README.md": CARD,
        "math.jsonl": lines({"prompt": "m1"}),
        "code.jsonl": lines({"messages": talk("c1", "x")}),
    },
    "org/some-useless": {"data.jsonl": lines({"turns": ["good"], "x": 1}, {"turns": [""], "x": 2})},
    "org/script": {"script.py": b"from pathlib import Path\nPath('it-ran').touch()\n"},
    "org/empty": {"README.md": b"# Nothing\n"},
}
EXPECTED: dict[str, Any] = {
    "hf:org/turns": [["t0"], ["t1"], ["t2"]],
    "hf:org/alpaca": [["Sort\n\n3 1"], ["Say hi"]],
    "hf:org/nemotron": [["Add 1 and 2."], ["And 3?"]],
    "hf:org/configs/math": [["m1"]],
    "hf:org/configs/code:test": [["c1"]],
    "hf:org/some-useless": [["good"]],
    "hf:org/configs": ["valid: hf:org/configs/math, hf:org/configs/code"],
    "hf:org/configs/none": ["none", "valid: hf:org/configs/math, hf:org/configs/code"],
    "hf:org/configs/code": ["train", "valid: hf:org/configs/code:test"],
    "hf:org/turns:none": ["none", "valid: hf:org/turns:train"],
    "hf:org/missing": ["org/missing", "check the name", "HF_TOKEN"],
    "hf:org/gated": ["gated", "hf auth login"],
    "hf:org/script": ["scripts are no longer supported"],
    "hf:org/empty": ["data files"],
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each source gave: its prompts and the report, or the error."""
    folder = tmp_path_factory.mktemp("hub")
    hub = Hub(SETS, gated=("org/gated",))
    home = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ, *EXPECTED],
            env={**os.environ, **home},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        hub.shutdown()
        hub.server_close()
    assert done.returncode == 0, done.stderr
    assert not (folder / "it-ran").exists(), "code of a data set was run"
    return dict(zip(EXPECTED, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("source", EXPECTED)
def test_data_sets_are_read_or_refused_in_one_line(source: str, told: dict[str, Any]) -> None:
    """Guards what a fake of the library cannot: its arguments, the records that it really yields, its errors,
    and that none of a data set's own code runs. Errors say what to write instead."""
    expected, found = EXPECTED[source], told[source]
    if isinstance(expected[0], list):
        assert found[0] == expected
        return
    assert isinstance(found, str) and "\n" not in found and found.startswith(f"{source} cannot be read")
    for words in expected:
        assert words in found


def test_records_that_cannot_be_used_are_counted(told: dict[str, Any]) -> None:
    """Guards --skip-broken: a data set's record is left out and said like a file's line."""
    assert any("1 broken" in line for line in told["hf:org/some-useless"][1])
