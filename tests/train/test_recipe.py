"""Recipes are complete, strict, and mean what the published methods say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jetspec.errors import OptionError
from jetspec.train.families import METHODS, find_family
from jetspec.train.pipeline import check_confidence
from jetspec.train.recipe import (
    change,
    default_settings,
    find_recipe,
    packaged_recipes,
    parse_sets,
    read_recipe,
)

MODELS = ("smollm2-135m", "qwen3-8b", "qwen3-30b-a3b")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_recipe_for_every_model(method: str, model: str) -> None:
    """Guards the set of recipes: each is found by method and model, and is of that method."""
    found = find_recipe(method, {"qwen3-8b": "Qwen/Qwen3-8B"}.get(model, model))
    assert found == find_recipe(f"{method}-{model}", "another")
    assert found.method == method and found.about
    assert found.target is not None and found.target.rsplit("/", 1)[-1].lower() == model
    assert isinstance(found.head, find_family(method).options)
    check_confidence(found, further=False)
    check_confidence(default_settings(method), further=False)


def test_published_settings() -> None:
    """Guards the numbers of the papers against a slip, and block heads on the CPU against unequal terms."""
    jet, dflash, dspark = (find_recipe(name, "Qwen/Qwen3-8B") for name in ("jetspec", "dflash", "dspark"))
    assert all(recipe.head.taps == (1, 9, 17, 25, 33) for recipe in (jet, dflash, dspark))
    assert (jet.head.causal, jet.head.scorer, jet.loss.kl, jet.loss.weighting) == (
        True,
        "none",
        1.0,
        "uniform",
    )
    assert (dflash.head.causal, dflash.loss.ce, dflash.loss.kl, dflash.loss.decay) == (False, 1.0, 0.0, 7.0)
    assert (jet.loop.learning_rate, dflash.loop.learning_rate, dspark.loop.learning_rate) == (
        3e-4,
        6e-4,
        6e-4,
    )
    assert (dspark.head.alignment, dspark.head.block_size, dspark.head.rank) == ("shifted", 7, 256)
    assert (dspark.loss.ce, dspark.loss.l1, dspark.loss.confidence) == (0.1, 0.9, 1.0)
    small = [find_recipe(method, "smollm2-135m") for method in METHODS]
    assert len({(r.loop.answers, r.loop.anchors, r.loop.minutes, r.answers) for r in small}) == 1


def test_a_model_without_a_recipe_gets_the_methods_defaults() -> None:
    """Guards models that nobody wrote a recipe for; a name that is neither is refused with what is valid."""
    assert find_recipe("dspark", "my/model") == default_settings("dspark")
    with pytest.raises(OptionError, match=r"jetspec, dflash, dspark.*dflash-qwen3-8b"):
        find_recipe("medusa", "smollm2-135m")


def test_packaged_recipes_belong_to_the_package() -> None:
    """Guards the wheel: recipes outside the package would be missing after an installation."""
    import jetspec

    root = Path(jetspec.__file__).parent
    assert len(packaged_recipes()) >= 9
    assert all(path.is_relative_to(root) for path in packaged_recipes())


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    """Guards own recipes: what they leave out is the method's default; lists and whole numbers are taken."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'method = "dspark"\n[head]\ntaps = [0, 3]\n[loss]\nl1 = 1\n[training]\nbetas = [0.8, 0.9]\n'
    )
    found, base = find_recipe(path, "x"), default_settings("dspark")
    assert found.head.taps == (0, 3) and found.loss.l1 == 1.0 and found.loop.betas == (0.8, 0.9)
    assert found.loss.ce == base.loss.ce and found.answers == base.answers
    with pytest.raises(OptionError, match=r"none\.toml cannot be read"):
        find_recipe(tmp_path / "none.toml", "x")
    path.write_text("method = ")
    with pytest.raises(OptionError, match=r"mine\.toml is not valid TOML"):
        find_recipe(path, "x")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "has no method"),
        ({"method": "medusa"}, "'medusa' is unknown"),
        ({"method": "jetspec", "heads": {}}, "unknown key 'heads'"),
        ({"method": "jetspec", "head": {"layer": 2}}, r"\[head\]: unknown key 'layer'; valid: layers"),
        ({"method": "jetspec", "head": {"layers": 2.5}}, r"\[head\] layers is 2.5; valid: a whole number"),
        ({"method": "jetspec", "head": {"plain": 1}}, "plain is 1; valid: true or false"),
        ({"method": "jetspec", "head": {"taps": "all"}}, "taps is 'all'; valid: a list"),
        ({"method": "jetspec", "head": {"scorer": "lstm"}}, "none, vanilla, gated, rnn"),
        ({"method": "jetspec", "loss": {"kl": True}}, "kl is True; valid: a number"),
        ({"method": "jetspec", "training": {"betas": [0.9]}}, "betas is"),
        ({"method": "jetspec", "training": {"optimizer": "sgd"}}, "adamw, muon"),
        ({"method": "jetspec", "answers": 5}, "answers is 5; valid: a table"),
        ({"method": "jetspec", "about": 5}, "about is 5"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    """Guards against a key that is silently ignored, and so a run that is not what was asked for."""
    with pytest.raises(OptionError, match=message) as caught:
        read_recipe(values, "mine.toml")
    assert "\n" not in str(caught.value)


def test_single_changes() -> None:
    """Guards `--set`: values are TOML, a bare word is a text, and a text of another form is refused."""
    tables = parse_sets(
        ["loss.temperature=2", "head.taps=[1, 2]", "head.scorer=rnn", "training.optimizer = muon"]
    )
    found = change(default_settings("jetspec"), tables, "--set")
    assert (found.loss.temperature, found.head.taps, found.head.scorer) == (2.0, (1, 2), "rnn")
    assert found.loop.optimizer == "muon"
    for wrong in ("loss", "loss.kl", "kl=2", ".kl=2"):
        with pytest.raises(OptionError, match=r"TABLE\.KEY=VALUE"):
            parse_sets([wrong])
    with pytest.raises(OptionError, match="unknown key 'losses'"):
        change(found, parse_sets(["losses.kl=1"]), "--set")
