"""The settings of a training run: a recipe, changed by the options of `jetspec train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetspec.train.from_head import SourceHead
    from jetspec.train.recipe import Settings

_FEWEST_TOKENS = 20_000  # fewer answers than this teach no head, however short the training


def starting_recipe(recipe: str | None, model: str, begin: SourceHead | None) -> Settings:
    """The recipe; with a head to begin from, one of its method and with its shape, and with what a file of
    the user's says about the shape, which is checked with the options.
    """
    from jetspec.train.recipe import change, find_recipe, stated_head

    if begin is None:
        return find_recipe(recipe or "jetspec", model)
    settings = begin.adopt(find_recipe(recipe or begin.method, model))
    return settings if recipe is None else change(settings, {"head": stated_head(recipe)}, recipe)


def run_folder(recipe: str | None, model: str, begin: SourceHead | None) -> Path:
    """Where a run is kept unless --out says so."""
    end = Path(model).name.lower()
    if begin is not None:
        return Path("runs") / f"{begin.method}-{end}-tuned"
    name = recipe or "jetspec"
    return Path("runs") / f"{Path(name).stem if name.endswith('.toml') else name}-{end}"


def scorer_options(scorer: str | None, rank: int | None) -> dict[str, Any]:
    """The scorer and rank that one or both of the two options mean."""
    if rank == 0 and scorer is None:
        return {"scorer": "none", "rank": 0}
    if scorer == "none" and rank is None:
        return {"scorer": "none", "rank": 0}
    return {"scorer": scorer, "rank": rank}


def changed(settings: Settings, tables: dict[str, dict[str, Any]], sets: list[str]) -> Settings:
    """The settings with what options and `--set` say; raises OptionError."""
    from jetspec.train.recipe import change, parse_sets

    given = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
    }
    head = given["head"]  # a scorer without a rank, or a rank without a scorer, goes on from the recipe's
    if hasattr(settings.head, "scorer"):
        if head.get("scorer", "none") != "none" and "rank" not in head and not settings.head.rank:
            head["rank"] = 64
        if head.get("rank") and "scorer" not in head and settings.head.scorer == "none":
            head["scorer"] = "gated"
    return change(change(settings, given, "options"), parse_sets(sets), "--set")


def timed(
    settings: Settings,
    minutes: float | None,
    steps: int | None,
    seed: int,
    folder: Path,
    answers_given: bool,
) -> Settings:
    """The length of the schedule: what is given replaces all that the recipe says about it.

    A training of fewer minutes than the recipe's also gets fewer answers, to the same degree, so that making
    them does not take longer than learning from them; unless their number was given. A run in `folder` whose
    training has begun keeps the answers that it has.
    """
    loop, full = replace(settings.loop, seed=seed), settings.loop
    if steps is not None:
        loop = replace(loop, steps=steps, epochs=None)
    if minutes is not None:
        loop = replace(loop, minutes=minutes, steps=steps, epochs=None)
    settings = replace(settings, loop=loop)
    if minutes is None or steps is not None or full.epochs is not None or not full.minutes or answers_given:
        return settings
    tokens = settings.answers.tokens
    fewer = max(_FEWEST_TOKENS, round(tokens * minutes / full.minutes))
    if (folder / "checkpoint.safetensors").exists():
        fewer = 1
    return replace(settings, answers=replace(settings.answers, tokens=min(fewer, tokens)))


def answers_given(tokens: int | None, sets: list[str]) -> bool:
    """Whether an option says how many answer tokens to make."""
    return tokens is not None or any(text.replace(" ", "").startswith("answers.tokens=") for text in sets)
