"""The chi-square script of both verification rules, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetspec.errors import OptionError
from jetspec.target.target import Target
from tests.benchmarks.tiny import drafter, script
from tests.draft.tiny import tiny_target

PROMPT = [1, 9, 4, 30]
LAW = {"temperature": 1.0, "top_k": 6}


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


@pytest.mark.parametrize("reject", [False, True])
def test_drafted_texts_follow_the_law(target: Target, reject: bool) -> None:
    """Guards the script against a comparison that nothing fails or nothing passes: the same texts must pass
    for the law that they were drawn from and fail for a colder one.
    """
    module = script("sampling_law")
    texts, engine = module.decode(target, drafter(target), PROMPT, LAW, range(900), 2, reject=reject)
    pairs = [(text[0], text[1]) for text in texts]
    assert engine.stats.nodes > 0
    assert module.chi_square(target, PROMPT, pairs, LAW)[0] > module.ALARM
    assert module.chi_square(target, PROMPT, pairs, {**LAW, "temperature": 0.5})[0] < module.ALARM


def test_rejection_has_texts_of_its_own(target: Target) -> None:
    """Guards against a rejection case that is the walk under another name."""
    module = script("sampling_law")
    plain, _ = module.decode(target, None, PROMPT, LAW, range(40), 0)
    walk, _ = module.decode(target, drafter(target), PROMPT, LAW, range(40), 2)
    rejection, _ = module.decode(target, drafter(target), PROMPT, LAW, range(40), 2, reject=True)
    assert walk == plain and rejection != plain


def test_too_few_seeds_are_refused(target: Target, tmp_path: Path) -> None:
    """Guards against odds that are not a number, which a record cannot hold."""
    module = script("sampling_law")
    texts, _ = module.decode(target, None, PROMPT, LAW, range(3), 0)
    with pytest.raises(OptionError, match="too few"):
        module.chi_square(target, PROMPT, [(text[0], text[1]) for text in texts], LAW)
    module._keep(tmp_path / "law.jsonl", [{"case": "T 1", "odds": 0.5}], {"arguments": {}})
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "law.jsonl").read_text().splitlines()]
    assert kinds == ["run", "case"]
