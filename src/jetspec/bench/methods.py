"""The methods by name: which family of head drafts, and how the tree is grown. All go through one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jetspec.bench.record import file_hash
from jetspec.budget.choose import AUTO, make_budget
from jetspec.decode.engine import Engine
from jetspec.draft.base import Drafter
from jetspec.draft.loading import NAMES as STUBS
from jetspec.draft.loading import folder_drafter, load_drafter, packaged_head
from jetspec.draft.sampled import SampledDrafter
from jetspec.errors import HeadError, OptionError, UserError
from jetspec.storage import user_path
from jetspec.target.target import Target
from jetspec.tree import Grow, accum, best_first, chain, dynamic

DEFAULT_CONFIDENCE = 0.3  # DSpark's chains end at the first depth that its head trusts less


@dataclass(frozen=True)
class Method:
    """How one method decodes.

    name      what users, records and tables call it
    family    of its head; None needs none
    grow      the tree builder
    outside   decoded by the transformers library instead of this project's engine
    in_law    verified by rejection sampling: above T = 0 it has plain decoding's law, but not its text
    about     one line for lists
    """

    name: str
    family: str | None
    grow: Grow | None
    about: str
    outside: bool = False
    in_law: bool = False

    @property
    def is_chain(self) -> bool:
        """Whether it drafts one path, so that a budget beyond the head's depth changes nothing."""
        return self.grow is chain


PLAIN = "plain"
OUTSIDE_PLAIN = "hf-generate"  # plain decoding by another library
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(PLAIN, None, None, "one token per forward; the baseline of every speedup"),
        Method("jetspec-tree", "jetspec", best_first, "JetSpec's head, the n most probable paths"),
        Method("jetspec-chain", "jetspec", chain, "JetSpec's head, one path"),
        Method("jetspec-accum", "jetspec", accum, "JetSpec's released tree: 7 children per popped node"),
        Method("dflash", "dflash", chain, "DFlash's head, one path"),
        Method("ddtree", "dflash", best_first, "DDTree: best-first over DFlash's marginals"),
        Method("eagle3-tree", "eagle3", dynamic, "EAGLE-3's head, dynamic tree, 10 per depth"),
        Method("eagle3-chain", "eagle3", chain, "EAGLE-3's head, one path"),
        Method("dspark", "dspark", chain, "DSpark's head, one path cut by its confidence"),
        Method("dspark-rejection", "dspark", chain, "the same, sampled and rejected (T > 0)", in_law=True),
        Method("mtp", "mtp", chain, "multi-token prediction module, one path"),
        Method(OUTSIDE_PLAIN, None, None, "transformers generate, greedy", outside=True),
        Method("hf-lookup", None, None, "transformers prompt lookup, greedy", outside=True),
        Method("hf-assisted", None, None, "transformers assisted generation (--assistant)", outside=True),
    )
}
FAMILIES = tuple(dict.fromkeys(m.family for m in METHODS.values() if m.family is not None))


def choose_methods(names: Many[str]) -> list[Method]:
    """The methods that `names` stand for, in the order of METHODS; "all" is all of them. Plain decoding is
    always there.

    Raises OptionError naming the unknown one and the valid ones.
    """
    wanted = {PLAIN}
    for name in names:
        if name == "all":
            wanted |= set(METHODS)
        elif name in METHODS:
            wanted.add(name)
        else:
            raise OptionError(f"unknown method {name!r}; valid: all, {', '.join(METHODS)}")
    return [method for name, method in METHODS.items() if name in wanted]


class Heads:
    """Where each method's head is, and the drafters that were loaded from there, each folder once.

    Args:
        given: method or family name -> folder of a head, or a stub's name.
        folder: holds heads in folders named after methods or families; None is no such folder.
        confidence: chance of acceptance below which a DSpark head's chain ends; 0 never cuts.
    Where neither names a head, the package's own for the target is taken.

    Raises OptionError if `given` has an unknown key or `confidence` is no chance, HeadError if `folder` is
    none.
    """

    def __init__(
        self,
        target: Target,
        given: Mapping[str, str] | None = None,
        folder: Path | None = None,
        confidence: float = DEFAULT_CONFIDENCE,
    ) -> None:
        if not 0.0 <= confidence <= 1.0:
            raise OptionError(f"--confidence is a chance of acceptance, from 0 to 1, got {confidence}")
        self._target, self._given, self._folder = target, dict(given or {}), folder
        self.confidence = confidence
        for name in self._given:
            if name not in FAMILIES and (name not in METHODS or METHODS[name].family is None):
                valid = ", ".join(dict.fromkeys([*FAMILIES, *(m.name for m in METHODS.values() if m.family)]))
                raise OptionError(f"--head names the unknown method {name!r}; valid: {valid}")
        if folder is not None and not folder.is_dir():
            raise HeadError(f"--heads {folder} is no folder; give one that holds METHOD/config.json")
        self._loaded: dict[str, Drafter] = {}

    def find(self, method: Method) -> str | None:
        """The folder or stub name of a method's head; None if there is none."""
        family = method.family
        assert family is not None, method
        for name in (method.name, family):
            if name in self._given:
                return self._given[name]
        if self._folder is not None:
            for name in (method.name, family):
                if (self._folder / name / "config.json").is_file():
                    return str(self._folder / name)
        own = packaged(self._target.name, family)
        return None if own is None else str(own)

    def _missing(self, method: Method) -> str:
        """Where a method's head was looked for in vain, and how to get one, in one line."""
        family, target = method.family, self._target.name
        names = " or ".join(f"{name}/config.json" for name in dict.fromkeys([method.name, str(family)]))
        searched = "no --heads" if self._folder is None else f"--heads {self._folder} has no {names}"
        return (
            f"no head: there is no --head {family}=FOLDER, {searched}, and none is packaged for {target}; "
            f"train one with: jetspec train --recipe {family} --model {target}"
        )

    def drafter(self, method: Method) -> Drafter:
        """The drafter of a method. Raises HeadError if there is no head, or it cannot be used."""
        place = self.find(method)
        if place is None:
            raise HeadError(self._missing(method))
        if place not in self._loaded:
            folder = user_path(place)
            self._loaded[place] = (
                load_drafter(place, self._target)
                if place in STUBS or not folder.is_dir()
                else folder_drafter(folder, self._target, confidence_threshold=self.confidence)
            )
        return self._loaded[place]

    def identity(self, method: Method) -> dict[str, Any]:
        """What a record says of a method's head: its name, a hash of its weights, the drafter's own name. The
        path is left out."""
        place = self.find(method)
        assert place is not None, method
        weights = user_path(place) / "model.safetensors"
        if place in STUBS or not weights.is_file():
            return {"name": place if place in STUBS else Path(place).name, "sha256": None}
        own = packaged(self._target.name, method.family or "")
        name = "packaged" if own is not None and str(own) == place else Path(place).name
        return {"name": name, "sha256": file_hash(weights), "drafter": self.drafter(method).name}


def packaged(target_name: str, family: str) -> Path | None:
    """The folder of a family's head that comes with the package for a target, or None: heads/TARGET/FAMILY,
    for JetSpec also the default head."""
    default = packaged_head(target_name)
    if family == "jetspec" and default is not None:
        return default
    if not target_name.replace("-", "").replace(".", "").replace("_", "").isalnum():
        return None
    heads = Path(str(resources.files("jetspec"))) / "heads"
    for folder in (heads / target_name / family, heads / f"{target_name}-{family}"):
        if (folder / "config.json").is_file():
            return folder
    return None


def depth_of(drafter: Drafter) -> int | None:
    """The deepest level a drafter reaches, where it says so."""
    config = getattr(getattr(drafter, "head", None), "config", None)
    for holder in (drafter, config):
        depth = getattr(holder, "depth", None)
        if isinstance(depth, int):
            return depth
    return None


def sort_out(
    methods: Many[Method], heads: Heads, complain: Callable[[str], None], named: Many[str] = ()
) -> tuple[list[Method], dict[str, str]]:
    """The methods of this engine whose heads can be used, and the reason for each of the others.

    `complain` is told of each that is left out, and of a head that is of another family than its method.

    named: methods that the user asked for by name, which are not left out: raises HeadError.
    """
    usable: list[Method] = []
    skipped: dict[str, str] = {}
    for method in methods:
        if method.family is not None:
            try:
                drafter = heads.drafter(method)
            except UserError as error:
                if method.name in named:
                    raise HeadError(f"method {method.name} cannot run: {error}") from None
                skipped[method.name] = str(error)
                complain(f"{method.name} is left out: {error}")
                continue
            known = drafter.name in FAMILIES
            if known and drafter.name != method.family:
                complain(f"{method.name} runs with a head of the family {drafter.name}, as given")
        usable.append(method)
    return usable, skipped


def make_engine(target: Target, method: Method, budget: int | str, heads: Heads, max_batch: int) -> Engine:
    """An engine that decodes as the method does."""
    if method.family is None:
        return Engine(target, None, budget=0, max_batch=max_batch)
    assert method.grow is not None
    drafter = heads.drafter(method)
    sampled = SampledDrafter(drafter, int(budget)) if method.in_law else None
    # Made here, because the cost that "auto" goes by is the builder's own, too.
    policy = make_budget(AUTO if budget == AUTO else int(budget), target, drafter, method.grow)
    engine = Engine(target, sampled or drafter, budget=policy, max_batch=max_batch)
    engine.grow = method.grow
    engine.walker = sampled.walk if sampled is not None else None
    return engine


def variants(methods: Many[Method], budgets: Many[int | str], heads: Heads) -> list[tuple[Method, int | str]]:
    """Every method with every budget that tells it apart: plain decoding and outside methods once, with 0,
    a chain never longer than its head's depth, and rejection sampling with numbers only, because its drafts
    must not be cut.
    """
    found: list[tuple[Method, int | str]] = []
    for method in methods:
        sizes = list(budgets)
        if method.family is None:
            sizes = [0]
        elif method.is_chain and (depth := depth_of(heads.drafter(method))) is not None:
            sizes = [min(size, depth) if isinstance(size, int) else size for size in sizes]
        if method.in_law:
            sizes = [size for size in sizes if isinstance(size, int)]
        found += [(method, size) for size in dict.fromkeys(sizes)]
    return found
