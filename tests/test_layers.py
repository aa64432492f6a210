"""The shape of the package: imports go one way, files stay short, the light packages stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
FILES = sorted((SOURCE / "jetspec").rglob("*.py"))
MAX_LINES = 400

# A module may import its own stage and those above it.
STAGES = (
    ("errors", "config", "storage", "native", "cuts", "noise", "sampling", "detokenize", "sequence"),
    ("tree",),
    ("verify",),
    ("target",),
    ("draft",),
    ("budget",),
    ("decode",),
    ("api",),
    ("train", "bench", "serve"),
    ("cli", "__main__"),
)
STAGE_OF = {name: number for number, names in enumerate(STAGES) for name in names}
LAST = len(STAGES) - 1


def module_of(path: Path, root: Path = SOURCE) -> tuple[str, ...]:
    """src/jetspec/tree/mask.py -> (jetspec, tree, mask); a package is named by its folder."""
    parts = path.relative_to(root).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(code: str, module: tuple[str, ...], is_package: bool) -> list[tuple[int, str]]:
    """(line, stage name) of every import of jetspec in `code`: nested, relative, and by name as a string too.

    A name taken from the top package itself is "cli", as anything may stand behind it; `__version__` is free.
    """
    found: list[tuple[int, str]] = []

    def add(line: int, dotted: tuple[str, ...]) -> None:
        if dotted[0] == "jetspec" and dotted[1:] != ("__version__",):
            known = len(dotted) > 1 and (dotted[1] in STAGE_OF or len(dotted) > 2)
            found.append((line, dotted[1] if known else "cli"))

    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(node.lineno, tuple(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            own = module if is_package else module[:-1]
            base = own[: len(own) + 1 - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                add(node.lineno, (*base, alias.name))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                add(node.lineno, tuple(node.args[0].value.split(".")))
    return found


def violations(code: str, module: tuple[str, ...], is_package: bool = False) -> list[str]:
    """One message per import that goes the wrong way; the top package's `__init__` may import everything."""
    if module == ("jetspec",):
        return []
    stage = module[1]
    assert stage in STAGE_OF, f"{'.'.join(module)} belongs to no stage; add {stage!r} to STAGES"
    return [
        f"line {line}: {'.'.join(module)} ({stage}) imports {other}, a later stage"
        for line, other in imports_of(code, module, is_package)
        if STAGE_OF.get(other, LAST) > STAGE_OF[stage]
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: ".".join(module_of(path)))
def test_imports_go_one_way(path: Path) -> None:
    """Guards the reading order of the package: a part must not reach for one that is built on it."""
    assert not violations(path.read_text(encoding="utf-8"), module_of(path), path.name == "__init__.py")


@pytest.mark.parametrize(
    ("code", "module", "count"),
    [
        ("from jetspec.verify import walk", "jetspec.tree.mask", 1),
        ("import jetspec.decode.engine", "jetspec.target.plan", 1),
        ("from jetspec import decode", "jetspec.target.plan", 1),
        ("from jetspec import Engine", "jetspec.bench.run", 1),
        ("from ..decode import round", "jetspec.draft.base", 1),
        ("from .. import decode", "jetspec.draft.base", 1),
        ("def f():\n    from jetspec.cli.main import main", "jetspec.serve.app", 1),
        ("import importlib\nimportlib.import_module('jetspec.train.loop')", "jetspec.draft.base", 1),
        ("from jetspec.tree import Tree\nfrom jetspec.cli import x", "jetspec.errors", 2),
        ("from jetspec.tree import Tree, beam", "jetspec.verify.walk", 0),
        ("from . import plan\nfrom .cache import KVCache", "jetspec.target.target", 0),
        ("from jetspec.sampling import Sampling", "jetspec.sequence", 0),
        ("from jetspec import errors, __version__", "jetspec.tree.tree", 0),
        ("from jetspec.bench.clock import Clock", "jetspec.train.loop", 0),
        ("from jetspec import Engine", "jetspec.cli.chat", 0),
        ("import torch, transformers", "jetspec.tree.mask", 0),
    ],
)
def test_the_check_sees_every_form_of_import(code: str, module: str, count: int) -> None:
    """Guards the check itself: each form of a wrong import is seen, and right ones pass."""
    assert len(violations(code, tuple(module.split(".")))) == count


def test_unknown_packages_need_a_stage() -> None:
    """Guards against a new package that no rule covers."""
    with pytest.raises(AssertionError, match="belongs to no stage"):
        violations("", ("jetspec", "utils", "misc"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: ".".join(module_of(path)))
def test_files_are_short(path: Path) -> None:
    """Guards readability: a file is one idea."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("package", ["jetspec.tree", "jetspec.verify", "jetspec.errors"])
def test_light_packages_load_no_transformers(package: str) -> None:
    """Guards start-up time, and users of the trees alone: transformers takes seconds to import."""
    code = f"import sys, {package}; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
