"""Drafters that run once per depth: each draft step reads the step before (EAGLE-3, arXiv 2503.01840; MTP,
arXiv 2412.19437).

A row of such a head joins the state at one position with the token of the next: row i holds feature i and
token i + 1, and its output is the head's guess at the state behind that token. Committed rows hold the
target's own features; a drafted node's row holds the output of its parent's row. The head keeps keys and
values of every committed row, and behind them those of the nodes drafted in the current round, which the next
round drops.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from jetspec.draft.autoregressive import AutoregressiveProposal
from jetspec.draft.draft_cache import DraftCache, DraftVisibility
from jetspec.draft.ranking import CANDIDATES, ranked_children
from jetspec.draft.shared_noise import NoiseWeights, SharedNoise
from jetspec.sequence import Sequence
from jetspec.target.attention import Visibility
from jetspec.target.config import ModelConfig
from jetspec.target.plan import Plan, Segment
from jetspec.target.rope import RotaryTable
from jetspec.tree.proposal import EmptyProposal, Proposal

FLUSH_ROWS = 128  # raw rows kept back until the next draft; more (prefill) become features at once
CHUNK_ROWS = 256  # rows of one forward that catches up with committed tokens


class Context(NamedTuple):
    """What a layer needs beside its input; `cache` layer n belongs to module n."""

    plan: Plan
    cache: DraftCache
    rotary: tuple[Tensor, Tensor]
    visibility: Visibility


class SequentialNetwork(Protocol):
    """The weights of a head that drafts depth by depth, one layer per module.

    model    shape of the modules' layers: `model.num_layers` modules, each with a cache layer of its own
    vocab    ids [Vd] that it drafts, ascending
    dtype, device   of its weights
    """

    model: ModelConfig
    vocab: Tensor
    dtype: torch.dtype
    device: torch.device

    def features(self, rows: Tensor) -> Tensor:
        """What the target gave at committed tokens, [n, taps * H] or [n, H], as features [n, H]."""
        ...

    def run(self, module: int, features: Tensor, ids: Tensor, context: Context) -> Tensor:
        """Rows of features [n, H] and token ids [n] through one module: outputs [n, H], which are the
        features of the next step.
        """
        ...

    def logits(self, module: int, states: Tensor) -> Tensor:
        """Outputs [n, H] of a module to logits [n, Vd]."""
        ...


class SequentialDrafter:
    """Drafts depth by depth with any `SequentialNetwork`.

    Depth d runs through module min(d, modules) (counted from 1): a head of one module reuses it for every
    depth. A module's rows see the committed rows and their own ancestors in the same module.

    Args:
        depth: deepest node that it drafts; one forward per depth.
        taps, needs_hidden: what the network's features are made of.
        candidates: children offered per node at most.
        weights: of the shared noise; None takes the defaults.
    """

    folder: Path | None = None  # where the head was read from
    shared_noise = True  # as in `BlockDrafter`

    def __init__(
        self,
        name: str,
        network: SequentialNetwork,
        *,
        depth: int,
        taps: tuple[int, ...] = (),
        needs_hidden: bool = False,
        candidates: int = CANDIDATES,
        weights: NoiseWeights | None = None,
    ) -> None:
        model = network.model
        self.name, self.network, self.depth = name, network, depth
        self.default_grow = "dynamic" if name == "eagle3" else "chain"  # as the families were published
        self.taps, self.needs_hidden, self.candidates = taps, needs_hidden, candidates
        self.noise = SharedNoise(network.vocab, depth, network.model.vocab_size, weights)
        self.modules = model.num_layers
        self.cache = DraftCache(
            model.num_layers, model.num_kv_heads, model.head_dim, dtype=network.dtype, device=network.device
        )
        self._rotary = RotaryTable(model.rope, model.head_dim, network.dtype, network.device)
        self._raw: dict[int, list[Tensor]] = {}  # rows as observed
        self._ready: dict[int, list[Tensor]] = {}  # features whose rows have not been run
        self._last: dict[int, Tensor] = {}  # output [H] of each sequence's newest row
        self._round: dict[int, AutoregressiveProposal] = {}

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Newly committed rows of a sequence; the proposal of its last round ends here."""
        rows = hidden if self.needs_hidden else taps
        assert rows is not None
        if key not in self.cache:
            self.cache.add(key)
        self._drop(key)
        waiting = self._raw.setdefault(key, [])
        waiting.append(rows)
        if sum(part.shape[0] for part in waiting) >= FLUSH_ROWS:
            self._make_features([key])

    def free(self, key: int) -> None:
        """Forget a sequence."""
        self._drop(key)
        for store in (self._raw, self._ready, self._last):
            store.pop(key, None)
        if key in self.cache:
            self.cache.free(key)

    @torch.inference_mode()
    def propose(self, sequences: Many[Sequence], *, shared: bool = True) -> list[Proposal]:
        """One packed forward over the newly committed rows of all sequences gives the roots' children;
        deeper levels are drafted as the builders ask for them. `shared` as in `BlockDrafter`.

        A prompt of one token has no row yet, and nothing is drafted in its first round.
        """
        able = [s for s in sequences if s.position > 0]
        if not able:
            return [EmptyProposal() for _ in sequences]
        for s in able:
            self._drop(s.id)
        self._make_features([s.id for s in able if self._raw.get(s.id)])
        self._catch_up(able)
        states = torch.stack([self._last[s.id] for s in able])  # [B, H]
        logits = self.network.logits(0, states)  # [B, Vd]
        draws = self.noise.draws(able) if shared and self.shared_noise else None
        if draws is not None:
            logits = draws.below([0]).score(logits.unsqueeze(1)).squeeze(1)
        children = ranked_children(logits, self.network.vocab, self.candidates)
        proposals = [
            AutoregressiveProposal(self, s.id, s.position, self._last[s.id], *found)
            for s, found in zip(able, children, strict=True)
        ]
        if draws is not None:
            for n, (s, proposal) in enumerate(zip(able, proposals, strict=True)):
                proposal.draws = None if s.sampling.greedy else draws.of(n)
        for s, proposal in zip(able, proposals, strict=True):
            proposal.peers = proposals
            self._round[s.id] = proposal
        return [self._round[s.id] if s.position > 0 else EmptyProposal() for s in sequences]

    def forward(
        self, module: int, features: Tensor, ids: Tensor, positions: list[int], segments: tuple[Segment, ...]
    ) -> Tensor:
        """One module over rows for which the cache has made room: outputs [n, H]."""
        model, cache = self.network.model, self.cache
        plan = Plan.of(ids, positions, segments, ids.device)
        groups, window = model.num_heads // model.num_kv_heads, model.windows[module]
        drafted = any(segment.mask is not None for segment in segments)
        visibility = (
            DraftVisibility(plan, cache, groups, window, features.dtype)
            if drafted
            else Visibility(plan, cache, groups, window, features.dtype)
        )
        rotary = self._rotary.at(plan.positions, plan.last)
        return self.network.run(module, features, ids, Context(plan, cache, rotary, visibility))

    def is_current(self, key: int, proposal: AutoregressiveProposal) -> bool:
        """Whether a proposal's rows are still the ones behind the committed rows."""
        return self._round.get(key) is proposal

    def _drop(self, key: int) -> None:
        """Give the rows of the last proposal back."""
        ended = self._round.pop(key, None)
        if ended is not None:
            ended.peers = ()  # a ring of proposals would keep their states until the next garbage collection
        if key in self.cache:
            self.cache.keep(key, [])

    def _make_features(self, keys: Many[int]) -> None:
        """Turn raw rows into features, all sequences in one product."""
        if not keys:
            return
        parts = [torch.cat(self._raw.pop(key)) for key in keys]
        features = self.network.features(torch.cat(parts))
        for key, part in zip(keys, features.split([part.shape[0] for part in parts]), strict=True):
            self._ready.setdefault(key, []).append(part)

    def _catch_up(self, sequences: Iterable[Sequence]) -> None:
        """Run the rows of newly committed tokens and commit their keys and values."""
        waiting = {s.id: (s, torch.cat(self._ready.pop(s.id))) for s in sequences if s.id in self._ready}
        while waiting:
            parts: list[tuple[int, Tensor]] = []
            room = CHUNK_ROWS
            for key, (_, features) in waiting.items():
                if room > 0:
                    parts.append((key, features[:room]))
                    room -= parts[-1][1].shape[0]
            self._run_committed([(waiting[key][0], features) for key, features in parts])
            for key, features in parts:
                s, rest = waiting.pop(key)
                if rest.shape[0] > features.shape[0]:
                    waiting[key] = (s, rest[features.shape[0] :])

    def _run_committed(self, parts: Many[tuple[Sequence, Tensor]]) -> None:
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for s, features in parts:
            count = features.shape[0]
            base = self.cache.extend(s.id, count)
            assert base + count <= s.position, "more rows were observed than stand before the root"
            segments.append(Segment(s.id, len(ids), count, None, logits=False))
            ids.extend(s.tokens[base + 1 : base + 1 + count])
            positions.extend(range(base, base + count))
        features = torch.cat([part for _, part in parts])
        tokens = torch.tensor(ids, device=features.device)
        # Later modules need keys and values only; their outputs at committed rows are not used.
        outputs = [
            self.forward(module, features, tokens, positions, tuple(segments))
            for module in range(self.modules)
        ]
        for segment in segments:
            self.cache.keep(segment.key, range(segment.count))
            self._last[segment.key] = outputs[0][segment.start + segment.count - 1].clone()
