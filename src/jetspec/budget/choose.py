"""From "auto", a number or a policy to the budget of an engine."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias, cast

from jetspec.budget.adaptive import AdaptiveBudget
from jetspec.budget.base import Budget
from jetspec.budget.calibration_file import load_calibration
from jetspec.budget.fixed import DEFAULT_BUDGET, FixedBudget
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.profile import SECONDS, SECONDS_AGAIN, Measurement, measure
from jetspec.budget.store import CostFile, cost_facts
from jetspec.draft.base import Drafter
from jetspec.sampling import as_integer
from jetspec.storage import say
from jetspec.target.target import Target
from jetspec.tree import Grow

AUTO: Literal["auto"] = "auto"
BudgetOption: TypeAlias = int | Literal["auto"] | Budget
_WORTH_KEEPING = 0.8  # seconds; what was measured faster is measured again at the next start


def check_budget_option(budget: object) -> None:
    """Raise OptionError unless `budget` is "auto", a valid number of nodes, or a policy."""
    if not (isinstance(budget, str) and budget == AUTO) and not hasattr(budget, "limits"):
        FixedBudget(budget)  # type: ignore[arg-type]


def make_budget(option: BudgetOption, target: Target, drafter: Drafter, grow: Grow) -> Budget:
    """The budget of one engine. "auto" measures the machine at first use (a few seconds, see
    `jetspec.budget.profile`) and then finds what it knows in the cache; engines of one target, drafter and
    builder share what they learn. Raises OptionError for values that are not valid.
    """
    check_budget_option(option)
    nodes = as_integer(option)
    if nodes is not None:
        return FixedBudget(nodes)
    if isinstance(option, str):
        if drafter.name == "off":
            return FixedBudget(0)
        known = knowledge_of(target, drafter, grow)
        return FixedBudget(DEFAULT_BUDGET) if known is None else AdaptiveBudget(known)
    return cast(Budget, option)


_one_at_a_time = threading.RLock()  # two that measure at once disturb each other, and would learn apart
# Per drafter, then per machine state (threads, builder, ...).
_known: weakref.WeakKeyDictionary[Drafter, dict[str, Knowledge | None]] = weakref.WeakKeyDictionary()


def knowledge_of(target: Target, drafter: Drafter, grow: Grow) -> Knowledge | None:
    """What is known about a drafter on its target here; None where the cost of a round cannot be measured,
    which is said once on standard error.
    """
    file = CostFile(cost_facts(target, drafter, grow))
    with _one_at_a_time:
        found = _known.setdefault(drafter, {})
        if file.key not in found:
            found[file.key] = _first_knowledge(file, target, drafter, grow)
        return found[file.key]


def _first_knowledge(file: CostFile, target: Target, drafter: Drafter, grow: Grow) -> Knowledge | None:
    kept = file.load()
    if kept is not None:
        measured = Measurement(kept.cost, SECONDS, noisy=False)
    else:
        try:
            measured = measure(target, drafter, grow)
        except Exception as error:  # whatever it is, a budget must not keep anybody from decoding
            reason = " ".join(str(error).split()) or type(error).__name__
            say(f"the cost of a round cannot be measured ({reason}); the budget is {DEFAULT_BUDGET} nodes")
            return None
    worth_keeping = kept is not None or measured.seconds > _WORTH_KEEPING
    folder = getattr(drafter, "folder", None)
    knowledge = Knowledge(
        measured,
        load_calibration(folder, shares_noise(drafter)) if isinstance(folder, Path) else None,
        gains=kept.gains if kept is not None else None,
        biases=kept.biases if kept is not None else None,
        whole_depth=getattr(drafter, "whole_depth", None),
        measure=_measure_again(target, drafter, grow),
        file=file if worth_keeping else None,
    )
    if kept is None:
        knowledge.keep()
    atexit.register(_keep, weakref.ref(knowledge))
    return knowledge


def shares_noise(drafter: Drafter) -> bool | None:
    """Whether a drafter sees the noise that sampled tokens will be drawn with; None if it cannot."""
    found = getattr(drafter, "shared_noise", None)
    return found if isinstance(found, bool) else None


def _measure_again(target: Target, drafter: Drafter, grow: Grow) -> Callable[[], Measurement | None]:
    """Measures once more, None where that fails. Holds neither target nor drafter."""
    to_target, to_drafter = weakref.ref(target), weakref.ref(drafter)

    def again() -> Measurement | None:
        here, there = to_target(), to_drafter()
        if here is None or there is None:
            return None
        try:
            return measure(here, there, grow, SECONDS_AGAIN)
        except Exception:  # it had worked before; what is known goes on being used
            return None

    return again


def _keep(knowledge: weakref.ref[Knowledge]) -> None:
    """At the end of the process."""
    found = knowledge()
    if found is not None:
        found.keep()
