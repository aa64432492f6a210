"""The head families that can be trained, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from jetspec.errors import OptionError
from jetspec.target.target import Target
from jetspec.train.corpus import Corpus
from jetspec.train.method import TrainingMethod
from jetspec.train.weighting import LossOptions

# Where each family is; a module holds its own in FAMILIES, by name. Modules are imported when asked for.
_MODULES = {
    "jetspec": "jetspec.train.block_family",
    "dflash": "jetspec.train.block_family",
    "dspark": "jetspec.train.block_family",
    "eagle3": "jetspec.train.eagle3_family",
    "mtp": "jetspec.train.mtp_family",
}
METHODS = tuple(_MODULES)


@dataclass(frozen=True)
class Family:
    """How to make a head of a family.

    options   a frozen dataclass: the shape of the head, the [head] table of a recipe. Its defaults are the
              family's published form, and its constructor raises OptionError for a value out of range
    loss      the family's published loss, the defaults of the [loss] table
    check     refuse what this target cannot have, before hours of work; raises OptionError
    taps      target layers that the head reads, strictly increasing, of those that can be recorded; None
              for all that the answers hold
    build     the untrained head on its target. The corpus hands out the taps that were asked for; the seed
              is that of the first weights
    adopt     the options with the shape of a head that was read; those about training stay
    check_head   refuse a head that this target cannot have or that cannot be trained; raises HeadError
    build_from   a head that was read, to be trained further
    """

    options: type
    loss: LossOptions
    check: Callable[[Target, Any], None]
    taps: Callable[[Target, Any], tuple[int, ...] | None]
    build: Callable[[Target, Corpus, Any, LossOptions, int], TrainingMethod]
    adopt: Callable[[Any, Any], Any]
    check_head: Callable[[Any, Target], None]
    build_from: Callable[[Target, Corpus, Any, LossOptions, Any], TrainingMethod]


def find_family(method: str) -> Family:
    """The family of a method. Raises OptionError naming the valid ones."""
    if method not in _MODULES:
        raise OptionError(f"method {method!r} is unknown; valid: {', '.join(METHODS)}")
    families: dict[str, Family] = import_module(_MODULES[method]).FAMILIES
    return families[method]
