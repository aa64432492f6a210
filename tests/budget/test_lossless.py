"""No policy can change the text: what is drafted, cut or skipped decides how long a round takes.

float64, so that two forwards of different shape cannot swap the two best tokens (odds below 1e-9)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Many

import pytest

from jetspec.budget.adaptive import AdaptiveBudget
from jetspec.budget.base import Spent
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.maps import chances
from jetspec.budget.plan import keep, rank
from jetspec.budget.profile import Measurement
from jetspec.decode.engine import Engine
from jetspec.draft.base import Drafter
from jetspec.draft.stubs import Decoy, Echo, Off, Random
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.tree import GROW, MarginalProposal, Tree
from jetspec.verify import walk
from tests.budget.world import Machine
from tests.decode.tiny import LENGTH, PROMPTS, SAMPLINGS, VOCAB, Recorder, plain, shared_target, steps

STUBS: dict[str, Callable[[Target], Drafter]] = {
    "off": lambda target: Off(),
    "random": lambda target: Random(seed=5, vocab=VOCAB, depth=3, width=4),
    "echo": lambda target: Echo(target, depth=3),
    "decoy": lambda target: Decoy(target, depth=3, width=3),
}


class Whim:
    """A policy without any sense: any limits, any cuts that are trees, skipped drafts, chosen by dice that
    have seen the whole tree."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def limits(self, sequences: Many[Sequence]) -> list[int]:
        """Nothing in some rounds, 0 to 12 nodes in the others."""
        if self._dice.random() < 0.3:
            return [0] * len(sequences)
        return [self._dice.randrange(13) for _ in sequences]

    def cut(self, sequences: Many[Sequence], trees: Many[Tree]) -> list[Tree]:
        """The best nodes by chances made up for each tree."""
        found = []
        for tree in trees:
            values = [1.0]
            for node in range(1, tree.size):
                values.append(min(values[tree.parents[node]], self._dice.random() ** 0.5))
            _, _, nodes = rank([values])
            found.append(keep(tree, sorted(nodes[: self._dice.randrange(tree.size)])))
        return found

    def record(
        self, sequences: Many[Sequence], trees: Many[Tree], paths: Many[Many[int]], spent: Spent
    ) -> None:
        """Learn nothing."""
        assert len(sequences) == len(trees) == len(paths) and min(spent) >= 0.0


def budgets(target: Target, drafter: Drafter) -> list[object]:
    """Policies: by whim, measured here, and with costs that make cuts likely."""
    stairs = Machine(verify=lambda rows: 0.01 * (1 + int(rows) // 5))
    made_up = Knowledge(Measurement(stairs.model(), 1.0, False))
    return [Whim(1), Whim(2), "auto", AdaptiveBudget(made_up)]


@pytest.mark.parametrize("grow", GROW)
@pytest.mark.parametrize("stub", STUBS)
def test_same_tokens_as_plain_decoding(stub: str, grow: str) -> None:
    """Guards the promise under every policy, for every builder and sampling, in batches and alone; the rows
    of the drafter must be complete after rounds that did not draft, too."""
    target = shared_target()
    gaps = 0
    for number, budget in enumerate(budgets(target, STUBS[stub](target))):
        recorder = Recorder(STUBS[stub](target))
        engine = Engine(target, recorder, budget=budget, grow=grow, max_batch=1 + 2 * (number % 2))  # type: ignore[arg-type]
        made = []
        for turn, name in enumerate(SAMPLINGS):
            prompt = PROMPTS[turn % len(PROMPTS)]
            made.append((engine.add(prompt, SAMPLINGS[name], Limits(max_tokens=LENGTH)), prompt, name))
        for outcome in steps(engine, [sequence for sequence, _, _ in made]):
            gaps += outcome.path != list(range(len(outcome.path)))
        for sequence, prompt, name in made:
            assert tuple(sequence.emitted) == plain(tuple(prompt), name), (number, name)
    if stub == "decoy" and grow != "chain":
        assert gaps > 0, "no accepted path had a gap: this run proves little"


def test_the_law_of_the_output_does_not_depend_on_the_policy() -> None:
    """Guards the distribution itself, by enumeration on three tokens: over all draws of the target, a policy
    that looks at the drafted tokens and cuts by them emits pairs with the target's probabilities exactly. (A
    rule that accepts by min(1, p/q) fails this.)"""
    law = {(): (0.5, 0.3, 0.2), (0,): (0.1, 0.6, 0.3), (1,): (0.7, 0.1, 0.2), (2,): (0.3, 0.3, 0.4)}
    head = MarginalProposal([[0, 1, 2], [1, 0, 2]], [[-0.3, -1.5, -3.0], [-0.4, -1.4, -2.6]])
    grown = GROW["best-first"](9, head, 8)
    values = chances(Knowledge(Measurement(Machine().model(), 1.0, False)).calibration, grown, False)
    _, _, nodes = rank([values])
    for policy in range(9):
        emitted: defaultdict[tuple[int, int], float] = defaultdict(float)
        for draws, weight in _draws(law):
            tokens: list[int] = []
            while len(tokens) < 2:
                # The first round verifies the best nodes, the second is plain decoding.
                kept = sorted(nodes[:policy]) if not tokens else []
                tokens += _emit(keep(grown, kept), draws, tuple(tokens))
            emitted[tokens[0], tokens[1]] += weight
        for first in range(3):
            for second in range(3):
                assert abs(emitted[first, second] - law[()][first] * law[first,][second]) < 1e-12


def _emit(tree: Tree, draws: dict[tuple[int, ...], int], start: tuple[int, ...]) -> list[int]:
    """One round behind the tokens `start`."""
    path, bonus = walk(tree, lambda node: draws.get((*start, *tree.tokens_of(tree.path_to(node))), 0))
    return [*tree.tokens_of(path), bonus]


def _draws(law: dict[tuple[int, ...], tuple[float, ...]]) -> list[tuple[dict[tuple[int, ...], int], float]]:
    """Every outcome of one draw per prefix, with its probability."""
    found: list[tuple[dict[tuple[int, ...], int], float]] = [({}, 1.0)]
    for prefix, chances_of in law.items():
        found = [
            ({**draws, prefix: token}, weight * chance)
            for draws, weight in found
            for token, chance in enumerate(chances_of)
        ]
    return found


def test_trees_of_another_rule_are_not_cut() -> None:
    """Guards rejection sampling: its chains are drawn from the head's law, and a cut that looks at what was
    drawn would bias it. Greedy requests of the same batch are cut as always."""
    target = shared_target()
    seen: list[int] = []

    def walker(s: Sequence, tree: Tree, logits: object) -> tuple[list[int], int]:
        seen.append(tree.budget)
        return [0], 1

    class Nothing(Whim):
        def limits(self, sequences: Many[Sequence]) -> list[int]:
            return [5] * len(sequences)

        def cut(self, sequences: Many[Sequence], trees: Many[Tree]) -> list[Tree]:
            return [tree.cut(0) for tree in trees]

    engine = Engine(target, Echo(target, depth=5), budget=Nothing(0), grow="chain")
    engine.walker = walker
    limits = Limits(max_tokens=8)
    engine.add(PROMPTS[0], Sampling(temperature=1.0), limits)
    engine.add(PROMPTS[0], Sampling(), limits)
    outcomes = engine.step()
    assert seen == [5] and [o.tree.budget for o in outcomes] == [5, 0]
