from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.bench import methods as registry
from jetspec.bench.methods import METHODS, PLAIN, Heads, choose_methods, make_engine, sort_out, variants
from jetspec.errors import HeadError, OptionError
from jetspec.tree import accum, best_first, chain
from tests.bench.tiny import tiny_target


def test_choosing() -> None:
    """Guards the baseline: plain decoding is always there and first, and a typo is answered with names."""
    assert [m.name for m in choose_methods(["ddtree", "jetspec-tree"])] == [PLAIN, "jetspec-tree", "ddtree"]
    assert [m.name for m in choose_methods(["all"])] == list(METHODS)
    with pytest.raises(OptionError, match="unknown method 'dtree'; valid: all, plain, jetspec-tree"):
        choose_methods(["dtree"])


def test_builders() -> None:
    """Guards what the names promise: which tree each method grows."""
    grown = {name: METHODS[name].grow for name in METHODS}
    assert grown["jetspec-tree"] is grown["ddtree"] is best_first and grown["jetspec-accum"] is accum
    assert {name for name, method in METHODS.items() if method.is_chain} == {
        "jetspec-chain", "dflash", "eagle3-chain", "dspark",
        "dspark-rejection", "mtp"}  # fmt: skip
    assert grown["jetspec-chain"] is chain


def test_heads_are_looked_up_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards which head is measured: one named for the method wins over its family's, both over --heads, and
    that over the package's own."""
    own, folder = tmp_path / "own", tmp_path / "heads"
    monkeypatch.setattr(registry, "packaged", lambda name, family: own if family == "dflash" else None)
    for name in ("ddtree", "dflash"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    target, ddtree = tiny_target(), METHODS["ddtree"]
    assert Heads(target, {"ddtree": "a", "dflash": "b"}, folder).find(ddtree) == "a"
    assert Heads(target, {"dflash": "b"}, folder).find(ddtree) == "b"
    assert Heads(target, {}, folder).find(ddtree) == str(folder / "ddtree")
    (folder / "ddtree" / "config.json").unlink()
    assert Heads(target, {}, folder).find(ddtree) == str(folder / "dflash")
    assert Heads(target).find(ddtree) == str(own)
    assert Heads(target).find(METHODS["mtp"]) is None
    with pytest.raises(OptionError, match="unknown method 'plain'; valid: jetspec, dflash"):
        Heads(target, {"plain": "a"})
    with pytest.raises(HeadError, match="is no folder"):
        Heads(target, {}, tmp_path / "none")


def test_missing_heads_are_said(tmp_path: Path) -> None:
    """Guards against a method that drops out silently: a missing and an unreadable head are each told with
    the reason, the others go on."""
    target = tiny_target()
    broken = tmp_path / "broken"
    broken.mkdir()
    heads = Heads(target, {"dflash": str(broken), "jetspec": "random"})
    told: list[str] = []
    usable, skipped = sort_out(choose_methods(["dflash", "mtp", "jetspec-tree"]), heads, told.append)
    assert [m.name for m in usable] == [PLAIN, "jetspec-tree"]
    assert set(skipped) == {"dflash", "mtp"} and skipped["mtp"].startswith(
        "no head: there is no --head mtp=FOLDER"
    )
    assert len(told) == 2 and all("is left out: " in text for text in told)


def test_chains_are_not_measured_twice() -> None:
    """Guards the time: a chain cannot be longer than its head's depth (6 for the stubs), so 8 and 16 are the
    same chain; trees differ."""
    heads = Heads(tiny_target(), {"jetspec": "decoy"})
    found = variants(choose_methods(["jetspec-chain", "jetspec-tree"]), [4, 8, 16], heads)
    assert [(m.name, budget) for m, budget in found] == [
        (PLAIN, 0), ("jetspec-tree", 4), ("jetspec-tree", 8), ("jetspec-tree", 16),
        ("jetspec-chain", 4), ("jetspec-chain", 6)]  # fmt: skip


def test_engines_are_what_the_method_says() -> None:
    """Guards the comparison: the method's own builder, budget and drafter, and one drafter for all methods
    that share a head."""
    target = tiny_target()
    heads = Heads(target, {"jetspec": "random"})
    tree, accumulated = (
        make_engine(target, METHODS[n], 5, heads, 3) for n in ("jetspec-tree", "jetspec-accum")
    )
    assert tree.grow is best_first and accumulated.grow is accum
    assert tree.drafter is accumulated.drafter and tree.max_batch == 3
    assert make_engine(target, METHODS[PLAIN], 0, heads, 1).drafter.name == "off"
