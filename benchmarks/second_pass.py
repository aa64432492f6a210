"""The other way to branches that see themselves: the head runs again, over the tree that it has drafted.

Pass 1 is the head's own: a best-first tree from one forward over [root, mask, mask, ..]. In pass 2 the
block's rows are the nodes of that tree, each with the embedding of its drafted token in place of the mask's,
under the ancestor mask, and below each node one row with the mask's embedding. Such a row sees the context,
the node's ancestors, the node and itself: what slot d + 1 sees in training where the first d slots are
revealed (`[head] reveal` of a recipe; a head trained on masks only has never met tokens in its slots). Its
logits, with the path scorer's term if there is one, are the law of the node's children given their actual
ancestors.

The tree that is verified is best-first over these laws. What pass 1 has not drafted has no such law: below
such nodes the first pass is believed.

    drafter = SecondPass(head, nodes=32)     # drafts like any other, at the price of a second forward
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from jetspec.draft import path_scorer
from jetspec.draft.backbone import Backbone, split_norm
from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.path_scorer import MarkovScorer, Scorer
from jetspec.draft.recurrent import RecurrentScorer
from jetspec.errors import OptionError
from jetspec.sequence import Sequence
from jetspec.target.attention import Visibility
from jetspec.target.plan import Plan, Segment
from jetspec.target.transformer import rms_norm
from jetspec.tree import Tree, best_first
from jetspec.tree.mask import ancestor_mask
from jetspec.tree.proposal import NO_CHILDREN, Children, Proposal, State

Node: TypeAlias = tuple[int | None, State]  # node of the first tree, and what the first pass knows it as


def can_run_twice(drafter: object) -> bool:
    """Whether a second pass over its tree makes sense for a drafter: a causal block head, in place."""
    if not isinstance(drafter, BlockDrafter):
        return False
    return drafter.head.config.causal and drafter.head.config.alignment == "in_place"


class SecondPass:
    """A block drafter that runs its head again over the tree it has drafted.

    again_seconds   time spent on second passes so far, with the growing of the first trees

    Args:
        nodes: of the first tree, root excluded.

    Raises OptionError for heads whose slots see later ones, or whose slots are shifted.
    """

    needs_hidden = False

    def __init__(self, drafter: BlockDrafter, nodes: int = 32) -> None:
        if not can_run_twice(drafter):
            raise OptionError(
                f"a second pass needs a causal head whose slots predict in place, got a {drafter.name} head; "
                "leave --second-pass out, or give a jetspec head"
            )
        self.drafter, self.nodes = drafter, nodes
        self.name = f"{drafter.name}, second pass"
        self.again_seconds = 0.0

    @property
    def taps(self) -> tuple[int, ...]:
        """Those of the head."""
        return self.drafter.taps

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Newly committed rows of a sequence."""
        self.drafter.observe(key, taps, hidden)

    def free(self, key: int) -> None:
        """Forget a sequence."""
        self.drafter.free(key)

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """Both passes. Raises OptionError for requests above temperature 0, whose noise pass 2 ignores."""
        first = self.drafter.propose(sequences)
        return [self.again(s, p, self.nodes) for s, p in zip(sequences, first, strict=True)]

    @torch.inference_mode()
    def again(self, sequence: Sequence, first: Proposal, nodes: int) -> Rescored:
        """Pass 2 over the best `nodes` nodes of `first`, which pass 1 has just proposed for the sequence."""
        if not sequence.sampling.greedy:
            raise OptionError("the second pass is there for temperature 0 only; leave the temperature at 0")
        start = time.perf_counter()
        tree = best_first(sequence.root, first, nodes)
        inner = [n for n in range(1, tree.size) if tree.depths[n] < first.max_depth]
        laws = self._laws(sequence, tree, inner) if inner else {}
        self.again_seconds += time.perf_counter() - start
        return Rescored(first, tree, laws)

    def _laws(self, sequence: Sequence, tree: Tree, inner: list[int]) -> dict[int, Law]:
        """Of the children of each node in `inner`."""
        backbone = self.drafter.backbone
        states, open_states = run_again(backbone, sequence.id, tree, inner)
        logits = backbone.output(open_states).float()  # [n, Vd]
        rows = scorer_terms(self.drafter.scorer, tree, inner, states, open_states)
        if rows is not None:
            terms, child_rows = rows
            logits = logits + (terms @ child_rows.T).float()
        width = min(path_scorer.CANDIDATES, logits.shape[-1])
        logps, index = logits.log_softmax(-1).topk(width, dim=-1)  # [n, K]
        tokens = self.drafter.noise.vocab[index].cpu().numpy()
        scores = logps.clamp(max=0.0).cpu().numpy()
        order = np.lexsort((tokens, -scores), axis=-1)  # by log-prob, then token id
        tokens, scores = (np.take_along_axis(x, order, axis=-1).tolist() for x in (tokens, scores))
        return {node: Law(t, s) for node, t, s in zip(inner, tokens, scores, strict=True)}


class Law(NamedTuple):
    """The likeliest children of a node, best first."""

    tokens: list[int]
    logps: list[float]


class Rescored:
    """Children by the second pass where it has seen their parent, else by the first. Its depths' candidate
    lists are the first pass's."""

    def __init__(self, first: Proposal, tree: Tree, laws: dict[int, Law]) -> None:
        self.first, self._tree, self._laws = first, tree, laws
        self.max_depth = first.max_depth
        # Slot 1 has no drafted ancestor: its law is the first pass's.
        self.root_state: Node = (0, first.root_state)

    def expand(self, states: Many[Node]) -> list[Children]:
        """Children of many nodes."""
        return [self._expand(node, known) for node, known in states]

    def _expand(self, node: int | None, known: State) -> Children:
        before = NO_CHILDREN if known is None else self.first.expand((known,))[0]
        law = None if node is None else self._laws.get(node)
        tokens, logps = (before.tokens, before.logps) if law is None else law
        old = dict(zip(before.tokens, before.states, strict=True))
        nodes = [None if node is None else self._tree.child(node, token) for token in tokens]
        return Children(tokens, logps, [(n, old.get(t)) for n, t in zip(nodes, tokens, strict=True)])


def run_again(backbone: Backbone, key: int, tree: Tree, inner: list[int]) -> tuple[Tensor, Tensor]:
    """The head over a drafted tree: normed states [n, H] of the nodes `inner`, whose slots hold their own
    tokens, and of the open slots below them [n, H].

    Nodes that are not in `inner` (with children of its own, none may be missing) have no rows. The sequence's
    rows before the root have been projected, as they are after pass 1.
    """
    config, model, device = backbone.config, backbone.model, backbone.mask_row.device
    place = {node: row for row, node in enumerate([0, *inner])}
    seen = ancestor_mask(
        Tree(
            tuple(tree.tokens[n] for n in place),
            (-1, *(place[tree.parents[n]] for n in inner)),
            tuple(tree.depths[n] for n in place),
            tuple(tree.logps[n] for n in place),
        )
    )
    count, rows = len(inner), len(place)
    mask = torch.eye(rows + count, dtype=torch.bool)
    mask[:rows, :rows] = seen
    mask[rows:, :rows] = seen[1:]  # an open slot sees what its node sees, and itself
    depths = torch.tensor([tree.depths[n] for n in place])
    slots = torch.cat([depths, depths[1:] + 1]).to(device)
    tokens = backbone.embed(torch.tensor([tree.tokens[n] for n in place], device=device))
    x = torch.cat([tokens, backbone.mask_row.expand(count, -1)])  # [m, H]
    if config.slot_embedding:
        x = x + backbone.weights["slot_embed.weight"][slots]
    if backbone.direct is not None:
        taps = len(config.taps)
        last = backbone._last.get(key, x.new_zeros(1, taps * x.shape[1]))
        joined = torch.cat([tokens[:1], split_norm(last, taps, model.rms_norm_eps)], dim=-1)
        x = x + backbone.direct(joined)
    x = x.contiguous()
    base = backbone.cache.extend(key, len(slots))
    segment = Segment(key, 0, len(slots), mask, logits=True)
    plan = Plan.of(torch.empty(0), (base + slots).tolist(), (segment,), device)
    rotary = backbone.rotary.at(plan.positions, plan.last)
    if backbone.native is not None:
        backbone.native.run(x, plan, backbone.cache, rotary)
    else:
        groups = model.num_heads // model.num_kv_heads
        masks = {w: Visibility(plan, backbone.cache, groups, w, x.dtype) for w in set(model.windows)}
        for layer in backbone.layers:
            x = layer(x, plan, backbone.cache, rotary, masks[model.windows[layer.index]])
    backbone.cache.keep(key, [])
    states = rms_norm(x, backbone.weights["norm.weight"], model.rms_norm_eps)
    return states[1:rows], states[rows:]


def scorer_terms(
    scorer: Scorer, tree: Tree, inner: list[int], states: Tensor, open_states: Tensor
) -> tuple[Tensor, Tensor] | None:
    """What the path scorer adds to the logits below the nodes `inner`: terms [n, r] and the child rows
    [Vd, r] that they are multiplied with; None without a scorer.

    states, open_states: as from `run_again`; the scorer reads them as it does in training.
    """
    scorer = getattr(scorer, "_inner", scorer)  # of a head with confidences
    if isinstance(scorer, MarkovScorer):
        tokens = torch.tensor([tree.tokens[n] for n in inner], device=open_states.device)
        rows = scorer.parent_rows[tokens].view(1, len(inner), 1, -1)
        terms = scorer._gated(rows, scorer._state_gate(open_states.unsqueeze(0)))
        return terms.view(len(inner), -1), scorer.child_rows
    if isinstance(scorer, RecurrentScorer):
        return _recurrent_terms(scorer, tree, inner, states, open_states), scorer.child_rows
    return None


def _recurrent_terms(
    scorer: RecurrentScorer, tree: Tree, inner: list[int], states: Tensor, open_states: Tensor
) -> Tensor:
    """tanh(o) [n, r] below every node: the recurrence runs through the slots of its ancestors, which hold
    tokens, its own, and then the open one."""
    device = states.device
    place = {node: row for row, node in enumerate(inner)}
    tokens = torch.tensor([tree.tokens[n] for n in inner], device=device)
    parents = torch.tensor([tree.tokens[tree.parents[n]] for n in inner], device=device)
    depths = torch.tensor([tree.depths[n] for n in inner], device=device)
    above = torch.tensor([place.get(tree.parents[n], -1) for n in inner], device=device)

    def step(before: Tensor, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        given = torch.cat([before, rows], dim=-1) @ scorer._path.T + hidden @ scorer._slot.T + scorer._bias
        gate, update, out = given.chunk(3, dim=-1)
        keep = gate.sigmoid()
        return keep * before + (1 - keep) * update.tanh(), out.tanh()

    carried = torch.zeros(len(inner) + 1, scorer.parent_rows.shape[1], dtype=states.dtype, device=device)
    for depth in range(1, int(depths.max()) + 1):  # the last row of `carried` is the root's state, zero
        own = (depths == depth).nonzero().squeeze(-1)
        carried[own] = step(carried[above[own]], scorer.parent_rows[parents[own]], states[own])[0]
    return step(carried[:-1], scorer.parent_rows[tokens], open_states)[1]
