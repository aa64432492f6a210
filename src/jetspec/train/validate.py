"""Validation tau: how long the accepted paths would be, computed from known continuations without running
the target.

At temperature 0 the target's tokens are the recorded answer itself, so a draft tree can be walked along it:
the result is what decoding these prompts would give, at the cost of draft forwards alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from jetspec.draft.path_scorer import Marginals, MarkovScorer
from jetspec.train.data import Corpus, Entry, make_batch
from jetspec.train.model import HeadModule
from jetspec.tree import Grow
from jetspec.verify import walk


@dataclass
class Validation:
    """tau by (builder, budget), and the share of rounds that accepted at least k tokens, k = 1.. (largest
    best-first budget).
    """

    tau: dict[str, float] = field(default_factory=dict)
    survival: list[float] = field(default_factory=list)


@torch.no_grad()
def validate(
    module: HeadModule,
    corpus: Corpus,
    entries: Many[Entry],
    vocab: torch.Tensor,
    output: torch.Tensor,
    settings: Many[tuple[str, Grow, int]],
) -> Validation:
    """Walk the trees of `settings` (builder name, builder, budget) along recorded greedy answers.

    Args:
        vocab: ids [Vd]; output: [Vd, H], the target's output matrix for them.
    """
    head = module.to_head(vocab)
    device, depth = output.device, module.config.depth
    scorer = (
        Marginals(vocab)
        if module.config.scorer == "none"
        else MarkovScorer(head, vocab, torch.float32, device)
    )
    rounds = dict.fromkeys(range(len(settings)), 0)
    kept = {n: [0] * (depth + 1) for n in rounds}
    for entry in entries:
        tokens = corpus.tokens(entry).tolist()
        anchors = torch.arange(entry.prompt_len - 1, entry.length - 1).unsqueeze(0)
        batch = make_batch(corpus, [entry], anchors, torch.ones(depth))
        hidden = module(batch)[0]  # [A, D, H]
        proposals = scorer.proposals(hidden, hidden @ output.T, batch.roots[0].tolist())
        for n, (_, grow, budget) in enumerate(settings):
            position = entry.prompt_len - 1
            while position < entry.length - 1:
                tree = grow(tokens[position], proposals[position - entry.prompt_len + 1], budget)
                path, _ = walk(tree, _follow(tree.depths, tokens, position))
                accepted = min(len(path) - 1, entry.length - 2 - position)
                rounds[n] += 1
                kept[n][accepted] += 1
                position += accepted + 1
    result = Validation()
    for n, (name, _, budget) in enumerate(settings):
        accepted_sum = sum(k * count for k, count in enumerate(kept[n]))
        result.tau[f"{name}-{budget}"] = 1 + accepted_sum / max(1, rounds[n])
    largest = max(range(len(settings)), key=lambda n: settings[n][2])
    total = max(1, rounds[largest])
    result.survival = [sum(kept[largest][k:]) / total for k in range(1, depth + 1)]
    return result


def _follow(depths: Many[int], tokens: list[int], position: int):  # type: ignore[no-untyped-def]
    """The target's pick at a node whose path agrees with the answer: the answer's next token, -1 behind its
    end.
    """

    def pick(node: int) -> int:
        place = position + depths[node] + 1
        return tokens[place] if place < len(tokens) else -1

    return pick


def unigram_coverage(corpus: Corpus, vocab: torch.Tensor) -> float:
    """Share of the training answers' tokens that the draft vocabulary holds."""
    inside = total = 0
    for entry in corpus.training:
        answer = corpus.tokens(entry)[entry.prompt_len :]
        inside += int(torch.isin(answer, vocab).sum())
        total += answer.shape[0]
    return inside / max(1, total)
