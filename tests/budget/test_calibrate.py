from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.budget.calibrate import Sample, fit, judge, reliability
from jetspec.budget.calibration_file import FILE, load_calibration, save_calibration
from jetspec.budget.early import fit_early
from jetspec.budget.isotonic import isotonic
from jetspec.budget.maps import Calibration, Group, Knot, Ratios, chances, from_values, spines, to_values
from jetspec.budget.plan import keep, rank
from jetspec.tree import GROW, MarginalProposal, Tree
from tests.budget.world import Head

LOGP = st.floats(-30.0, 0.0)


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    """Maps with any monotone knots, for some of the groups."""
    knots: dict[Group, list[Knot]] = {}
    for sampled in (False, True):
        for spine in (False, True):
            for depth in draw(st.sets(st.integers(0, 4))):
                stated = sorted(draw(st.sets(LOGP, min_size=1, max_size=5)))
                values = sorted(draw(st.lists(LOGP, min_size=len(stated), max_size=len(stated))))
                knots[Group(sampled, spine, depth)] = [
                    Knot(x, y, 1) for x, y in zip(stated, values, strict=True)
                ]
    return Calibration(knots)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree, in any order that a builder may use."""
    size = draw(st.integers(0, 9))
    parents, logps = [-1], [0.0]
    for node in range(1, size + 1):
        parent = draw(st.integers(0, node - 1))
        parents.append(parent)
        logps.append(logps[parent] + draw(st.floats(-8.0, 0.0)))
    return Tree.of(list(range(size + 1)), parents, logps)


RATIO = st.floats(0.01, 3.0)


@given(calibrations(), trees(), st.booleans(), st.lists(RATIO, min_size=4, max_size=4), st.integers(0, 9))
def test_every_beginning_of_the_ranking_is_a_tree(
    calibration: Calibration, tree: Tree, sampled: bool, ratios: list[float], count: int
) -> None:
    """Guards the contract between maps and cuts, for any maps, factors and trees: chances lie in 0..1, no
    child exceeds its parent, siblings keep their order, and the best n nodes hold their parents."""
    found = chances(calibration, tree, sampled, Ratios(ratios, ratios[::-1]))
    assert found[0] == 1.0 and all(0.0 <= value <= 1.0 for value in found)
    for node in range(1, tree.size):
        assert found[node] <= found[tree.parents[node]]
        for other in range(1, node):
            if tree.parents[other] == tree.parents[node]:
                a, b = sorted((node, other), key=lambda n: tree.logps[n])
                assert found[a] <= found[b]
    _, _, nodes = rank([found])
    keep(tree, sorted(nodes[:count])).check()


@given(calibrations())
def test_maps_rise_and_come_back_from_json(calibration: Calibration) -> None:
    """Guards monotony of the tables (a likelier path must not count for less) and the file's content."""
    back = from_values(json.loads(json.dumps(to_values(calibration))))
    for group in calibration.knots:
        table = calibration.table(group)
        assert all(a >= b for a, b in pairwise(table)) and 0.0 < table[0] <= 1.0
        assert back.table(group) == table


def test_without_maps_the_head_is_believed() -> None:
    """Guards the start without a calibration: chances are the stated probabilities."""
    tree = Tree.of([0, 1, 2], [-1, 0, 1], [0.0, -0.5, -1.25])
    assert chances(Calibration(), tree, False) == pytest.approx([1.0, math.exp(-0.5), math.exp(-1.25)])


def test_spine() -> None:
    """Guards the groups: below a second child everything is off the spine, the second child itself is not."""
    tree = Tree.of([0, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 1, 3])
    assert spines(tree) == [True, True, True, True, False, True, True]


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 4)), min_size=1, max_size=7), st.data())
def test_isotonic_is_the_nearest_monotone_sequence(
    pairs: list[tuple[float, float]], data: st.DataObject
) -> None:
    """Guards the regression: its result rises, keeps the mean, and no other rising sequence is nearer."""
    values, weights = [p[0] for p in pairs], [p[1] for p in pairs]
    found = isotonic(values, weights)
    assert len(found) == len(values) and all(a <= b + 1e-12 for a, b in pairwise(found))

    def distance(other: list[float]) -> float:
        return sum(w * (a - b) ** 2 for w, a, b in zip(weights, values, other, strict=True))

    other = sorted(data.draw(st.lists(st.floats(-5, 5), min_size=len(values), max_size=len(values))))
    assert distance(found) <= distance(other) + 1e-9
    assert sum(w * a for w, a in zip(weights, found, strict=True)) == pytest.approx(
        sum(w * a for w, a in zip(weights, values, strict=True)), abs=1e-6
    )


def samples(head: Head, rounds: int, sampled: bool = False) -> list[Sample]:
    """Rounds of a made-up head with trees of 24 nodes."""
    found = []
    for number in range(rounds):
        proposal, truth = head.draft()
        tree = GROW["best-first"](0, proposal, 24)
        path, node = [0], 0
        while (child := tree.child(node, truth[tree.depths[node]])) is not None:
            node = child
            path.append(node)
        found.append(Sample(number, sampled, tree, tuple(path)))
    return found


@pytest.mark.parametrize("boast", [0.35, 1.0, 2.0])
def test_fitted_maps_tell_the_share_that_is_accepted(boast: float) -> None:
    """Guards the fit: for a head that promises too much, too little or just enough, chances on other rounds
    are right to 3 % (and better than its own word, where that is wrong)."""
    calibration = fit(samples(Head(boast=boast, seed=1), 700))
    held_out = samples(Head(boast=boast, seed=2), 700)
    before, after = judge(Calibration(), held_out), judge(calibration, held_out)
    for name in ("path", "step"):
        assert after[name].error < 0.03, name
        if boast != 1.0:
            assert after[name].error < 0.6 * before[name].error, name


@pytest.mark.parametrize("boast", [0.3, 1.0, 2.0])
def test_a_dozen_trees_are_enough_to_see_through_a_head(boast: float) -> None:
    """Guards maps that are fitted on the way: a few trees hold few accepted nodes, and shares of those alone
    would be noise. Chances are nearer to shares than the head's own word, or hardly further where that is
    right."""
    calibration = fit_early(samples(Head(boast=boast, seed=1), 12))
    held_out = samples(Head(boast=boast, seed=2), 500)
    before, after = judge(Calibration(), held_out), judge(calibration, held_out)
    assert after["path"].error < max(0.3 * before["path"].error, 0.02)
    for group in calibration.knots:
        table = calibration.table(group)
        assert all(a >= b for a, b in pairwise(table)) and 0.0 < table[0] <= 1.0


def test_depths_and_kinds_without_rounds_lean_on_others() -> None:
    """Guards small tables: an unseen depth uses the map of all depths, sampling that of greedy decoding."""
    calibration = fit(samples(Head(boast=0.3, depth=3), 300))
    assert calibration.table(Group(False, True, 9)) == calibration.table(Group(False, True, 0))
    assert calibration.table(Group(True, True, 2)) == calibration.table(Group(False, True, 2))


def test_reliability_is_the_mean_distance_in_bins() -> None:
    """Guards the error that is reported: by hand, two bins of three and one nodes."""
    found = reliability([0.11, 0.12, 0.13, 0.95], [True, False, False, True])
    assert found.error == pytest.approx((3 * abs(0.12 - 1 / 3) + 1 * 0.05) / 4)
    assert [count for _, _, count in found.bins] == [3, 1]


def test_a_calibration_of_other_weights_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against maps that outlive a training run, and against damaged files: both are left out with one
    line, and never stop anybody from decoding."""
    (tmp_path / "model.safetensors").write_bytes(random.Random(0).randbytes(3_000_000))
    assert load_calibration(tmp_path) is None
    calibration = fit(samples(Head(), 100))
    save_calibration(tmp_path, calibration, {"command": "test", "rounds": 100})
    found = load_calibration(tmp_path)
    assert found is not None and set(found.knots) == set(calibration.knots)
    other = load_calibration(tmp_path, shared_noise=True)
    assert other is not None and not any(group.sampled for group in other.knots)
    assert capsys.readouterr().err == ""
    (tmp_path / "model.safetensors").write_bytes(random.Random(1).randbytes(3_000_000))
    assert load_calibration(tmp_path) is None
    assert "made for other weights" in capsys.readouterr().err
    for text in ("", "[]", "null", '{"format": 1}', (tmp_path / FILE).read_text()[:500]):
        (tmp_path / FILE).write_text(text)
        assert load_calibration(tmp_path) is None
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"gains": {', '"gains": [0.5], "other": {'),
        ('"depth": 1,', '"depth": 1e999,'),
        ('"stated": [', f'"stated": [-{"9" * 401}, '),
    ],
)
def test_odd_values_in_a_calibration_are_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    """Guards decoding: values of another type, and numbers beyond every float, ended it with a traceback."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    text = save_calibration(tmp_path, fit(samples(Head(), 100)), {}).read_text()
    assert old in text
    (tmp_path / FILE).write_text(text.replace(old, new, 1))
    assert load_calibration(tmp_path) is None
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("chance", [[-1.0, -2.0], [-1.0, 0.5], [-1.0, float("nan")]])
def test_maps_that_are_not_monotone_are_refused(chance: list[float]) -> None:
    """Guards against an edited file whose cuts would tear trees apart."""
    entry = {"sampled": False, "spine": True, "depth": 1, "stated": [-3.0, -1.0], "count": [5, 5]}
    with pytest.raises(ValueError, match="not monotone"):
        from_values([{**entry, "chance": chance}])


def test_a_marginal_tree_may_be_ranked_in_another_order_than_it_was_grown() -> None:
    """Guards cutting by chance instead of by prefix: off the spine a head may be worth less."""
    proposal = MarginalProposal([[1, 2], [3, 4]], [[-0.6, -0.8], [-0.2, -2.0]])
    tree = GROW["best-first"](0, proposal, 5)
    off = {Group(False, False, 0): [Knot(-5.0, -9.0, 9), Knot(0.0, -4.0, 9)]}
    _, _, nodes = rank([chances(Calibration(off), tree, False)])
    assert nodes != sorted(nodes)
    keep(tree, sorted(nodes[:3])).check()
