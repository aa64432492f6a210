"""Lossless speculative decoding with draft trees.

    import jetspec

    model = jetspec.load()
    print(model.generate("Why is the sky blue?").text)

Public names are loaded when they are first used: `import jetspec` and `import jetspec.tree` load neither
torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetspec.api import Comparison, LanguageModel, Result, Stream, load
    from jetspec.decode.engine import Engine
    from jetspec.decode.stats import Stats
    from jetspec.draft.base import Drafter
    from jetspec.draft.loading import load_drafter
    from jetspec.errors import JetSpecError, UserError
    from jetspec.sampling import Sampling
    from jetspec.sequence import Emission, Limits, Sequence
    from jetspec.target.loading import load_target
    from jetspec.target.target import Target
    from jetspec.tree import Tree

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Drafter",
    "Emission",
    "Engine",
    "JetSpecError",
    "LanguageModel",
    "Limits",
    "Result",
    "Sampling",
    "Sequence",
    "Stats",
    "Stream",
    "Target",
    "Tree",
    "UserError",
    "__version__",
    "load",
    "load_drafter",
    "load_target",
]

_HOMES = {
    "jetspec.api": ("Comparison", "LanguageModel", "Result", "Stream", "load"),
    "jetspec.decode.engine": ("Engine",),
    "jetspec.decode.stats": ("Stats",),
    "jetspec.draft.base": ("Drafter",),
    "jetspec.draft.loading": ("load_drafter",),
    "jetspec.errors": ("JetSpecError", "UserError"),
    "jetspec.sampling": ("Sampling",),
    "jetspec.sequence": ("Emission", "Limits", "Sequence"),
    "jetspec.target.loading": ("load_target",),
    "jetspec.target.target": ("Target",),
    "jetspec.tree": ("Tree",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the home of a public name on its first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jetspec' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
