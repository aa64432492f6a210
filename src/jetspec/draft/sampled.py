"""Chains sampled from a head's own law, for methods whose published rule is rejection sampling."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import pairwise

import torch
from torch import Tensor

from jetspec.draft.base import Drafter
from jetspec.sampling import History, process_logits
from jetspec.sequence import Sequence
from jetspec.tree import Tree
from jetspec.tree.proposal import NO_CHILDREN, Children, Proposal
from jetspec.verify.rejection import DRAFT_STREAM, REST_STREAM, draw, uniform, verify_chain


class SampledDrafter:
    """Wraps a drafter: each proposal becomes one path, sampled from the children's laws at the request's
    temperature; greedy requests get the most probable path.

    The law of a depth is the drafter's, restricted to the children that it offers and normalised again, which
    is what the path is sampled from. `walk` verifies with it; give it to the engine as `walker`.

    Args:
        depth: most tokens drafted.
    """

    def __init__(self, inner: Drafter, depth: int) -> None:
        self.name, self.depth = f"sampled {inner.name}", depth
        self._inner = inner
        self._laws: dict[
            int, list[tuple[list[int], Tensor]]
        ] = {}  # per sequence and depth: ids, probabilities

    @property
    def taps(self) -> tuple[int, ...]:
        """Those of the wrapped drafter."""
        return self._inner.taps

    @property
    def needs_hidden(self) -> bool:
        """As the wrapped drafter."""
        return self._inner.needs_hidden

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Passed on."""
        self._inner.observe(key, taps, hidden)

    def free(self, key: int) -> None:
        """Passed on."""
        self._laws.pop(key, None)
        self._inner.free(key)

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """One sampled path per sequence."""
        if hasattr(self._inner, "shared_noise"):  # the rule's own coins know nothing of the target's noise
            proposals = self._inner.propose(sequences, shared=False)  # type: ignore[call-arg]
        else:
            proposals = self._inner.propose(sequences)
        return [self._sample(s, proposal) for s, proposal in zip(sequences, proposals, strict=True)]

    def _sample(self, s: Sequence, proposal: Proposal) -> Proposal:
        state, laws, path = proposal.root_state, list[tuple[list[int], Tensor]](), list[Children]()
        for depth in range(1, min(self.depth, proposal.max_depth, s.room - 1) + 1):
            children = proposal.expand((state,))[0]
            if not children.tokens:
                break
            tokens, logps = list(children.tokens), torch.tensor(children.logps, dtype=torch.float64)
            if s.sampling.greedy:
                chosen = 0
            else:
                laws.append((tokens, (logps / s.sampling.temperature).softmax(-1)))
                chosen = draw(laws[-1][1], s.sampling.seed, s.position + depth, DRAFT_STREAM)
            path.append(Children(tokens[chosen : chosen + 1], [float(logps[chosen])], [depth]))
            state = children.states[chosen]
        self._laws[s.id] = laws
        return _Path(path)

    def walk(self, s: Sequence, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        """Verify one chain [K + 1, V] by rejection sampling; for requests above temperature 0."""
        assert all(b == a + 1 for a, b in pairwise(tree.parents)), "rejection sampling is for chains"
        tokens = list(tree.tokens[1:])
        histories = [History([*s.tokens, *tokens[:depth]], s.prompt_len) for depth in range(tree.size)]
        scores = process_logits(logits, s.sampling, histories)  # [K + 1, V]
        target = scores.double().softmax(-1)
        drafted = []
        for ids, law in self._laws[s.id][: len(tokens)]:
            whole = torch.zeros(target.shape[-1], dtype=torch.float64, device=target.device)
            whole[torch.tensor(ids, device=target.device)] = law.to(target.device)
            drafted.append(whole)
        first = s.position + 1  # absolute position of the token that follows the root
        seed = s.sampling.seed
        accepted, rest = verify_chain(tokens, drafted, target, lambda number: uniform(seed, first + number))
        return list(range(accepted + 1)), draw(rest, seed, first + accepted, REST_STREAM)


class _Path:
    """A proposal of one path; the state of a node is its depth."""

    root_state = 0

    def __init__(self, path: list[Children]) -> None:
        self._path, self.max_depth = path, len(path)

    def expand(self, states: Many[int]) -> list[Children]:
        return [self._path[depth] if depth < self.max_depth else NO_CHILDREN for depth in states]
