"""The stubs keep their own promises; that they do not change the text is tested with the engine."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from jetspec.draft.stubs import Decoy, Echo, Random
from jetspec.errors import OptionError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.tree import GROW, Tree
from jetspec.tree.proposal import Proposal
from tests.decode.tiny import VOCAB, TinyTokenizer, tiny_target


def request(id: int, tokens: list[int], sampling: Sampling | None = None) -> Sequence:
    """A request in progress."""
    return Sequence(id, tokens, sampling or Sampling(), Limits(), decode=TinyTokenizer().decode)


def grown(proposal: Proposal, budget: int = 30) -> Tree:
    """The checked best-first tree of a proposal."""
    tree = GROW["best-first"](1, proposal, budget)
    tree.check()
    return tree


def test_random_depends_on_seed_root_and_position_alone() -> None:
    """Guards repeatability: the same tree whatever else is in the batch and how often it is asked for, and
    another one for another seed, root or position."""
    stub = Random(seed=3, vocab=50, depth=3, width=3)
    (alone,) = stub.propose([request(4, [1, 2, 3])])
    _, again = stub.propose([request(9, [5]), request(8, [7, 7, 3])])
    assert grown(alone) == grown(again) == grown(alone)
    for other in (
        Random(seed=4, vocab=50).propose([request(4, [1, 2, 3])]),
        stub.propose([request(4, [1, 2, 4])]),
        stub.propose([request(4, [1, 2, 0, 3])]),
    ):
        assert grown(other[0], 10).tokens != grown(alone, 10).tokens


def test_random_is_the_same_in_every_process() -> None:
    """Guards against Python's salted hash, which would make a failure impossible to repeat."""
    code = (
        "from jetspec.draft.stubs import Random, _RandomProposal;"
        "print(_RandomProposal(Random(1, 1000), '1 2 3').expand([(), (5,)])[1].tokens)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1 and b"[" in runs.pop()


def test_random_offers_no_more_than_the_vocabulary() -> None:
    """Guards tiny vocabularies: sibling tokens are unique and within range."""
    (proposal,) = Random(seed=0, vocab=2, depth=2, width=5).propose([request(0, [1])])
    tree = grown(proposal)
    assert tree.size == 1 + 2 + 4 and set(tree.tokens[1:]) == {0, 1}


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, top_k=9, seed=6)], ids=["T0", "T1"]
)
def test_echo_drafts_what_decoy_hides(sampling: Sampling) -> None:
    """Guards the decoy's point: the right token stands exactly at `place`, below right parents only it
    continues, and wrong first children have children of their own."""
    torch.set_num_threads(1)
    target = tiny_target()
    sequence = request(0, [3, 1, 4], sampling)
    (chain,) = Echo(target, depth=4).propose([sequence])
    right = grown(chain).tokens[1:]
    assert len(right) == 4
    for place in (0, 1, 2):
        (proposal,) = Decoy(target, depth=4, width=3, place=place).propose([sequence])
        state = proposal.root_state
        for token in right:
            (children,) = proposal.expand([state])
            assert len(set(children.tokens)) == 3 and children.tokens[place] == token
            assert all(a > b for a, b in zip(children.logps, children.logps[1:], strict=False))
            state = children.states[place]
        tree = grown(proposal)
        first = next(n for n in range(1, tree.size) if tree.parents[n] == 0 and tree.tokens[n] != right[0])
        assert tree.children(first), "wrong branches must go on"


def test_echo_catches_up_after_any_number_of_tokens() -> None:
    """Guards the stub's own cache: proposals after one, several or no new tokens equal those of a fresh
    stub."""
    torch.set_num_threads(1)
    target = tiny_target()
    echo = Echo(target, depth=3)
    for tokens in ([5], [5], [5, 6, 7, 8], [5, 6, 7, 8, 9]):
        sequence = request(2, list(tokens))
        (kept,), (fresh,) = echo.propose([sequence]), Echo(target, depth=3).propose([sequence])
        assert grown(kept) == grown(fresh)
        assert echo.cache.length(2) == len(tokens) - 1
    echo.free(2)
    echo.free(2)
    assert echo.cache.bytes == 0


def test_wrong_options_are_refused_in_one_line() -> None:
    """Guards users of the stubs against silent nonsense, such as a right token that is not among the
    siblings."""
    target = tiny_target()
    for make in (
        lambda: Random(0, vocab=0),
        lambda: Random(0, vocab=5, width=0),
        lambda: Echo(target, depth=0),
        lambda: Decoy(target, width=2, place=2),
        lambda: Decoy(target, width=VOCAB + 1),
    ):
        with pytest.raises(OptionError, match="valid") as caught:
            make()
        assert "\n" not in str(caught.value)
