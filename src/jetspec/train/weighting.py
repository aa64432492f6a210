"""Which terms a loss has, and how much each depth counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.config import check_least
from jetspec.errors import OptionError

WEIGHTINGS = ("uniform", "exponential", "expected-length")
_SHORTEST_DECAY = 0.01  # depth 2 counts exp(-100) then; what is much shorter divides to infinity and NaN


@dataclass(frozen=True)
class LossOptions:
    """The loss of a slot, and the weight of its depth.

    kl           weight of the forward KL divergence from the target's law to the head's
    temperature  that softens both laws of the KL; its value is multiplied by temperature^2
    ce           weight of the cross-entropy of the token that the target wrote
    l1           weight of the L1 distance of the two laws (twice the total variation distance)
    confidence   weight of the confidence head's binary cross-entropy, in families that have one
    weighting    of the depths k = 1, 2, ..: "uniform"; "exponential", exp(-(k - 1) / decay); or
                 "expected-length", see `expected_length_weights`
    decay        of the exponential weights, in slots: at least 0.01, or 0, which makes them uniform
    smoothing    of the expected-length weights, 0..1
    """

    kl: float = 1.0
    temperature: float = 1.0
    ce: float = 0.0
    l1: float = 0.0
    confidence: float = 0.0
    weighting: str = "exponential"
    decay: float = 4.0
    smoothing: float = 0.5

    def __post_init__(self) -> None:
        check_least(0, kl=self.kl, ce=self.ce, l1=self.l1, confidence=self.confidence, decay=self.decay)
        if 0 < self.decay < _SHORTEST_DECAY:
            raise OptionError(
                f"decay must be 0 (uniform weights) or a number of at least {_SHORTEST_DECAY}, "
                f"got {self.decay!r}"
            )
        check_least(0.01, temperature=self.temperature)
        check_least(0, smoothing=self.smoothing)
        if self.smoothing > 1:
            raise OptionError(f"smoothing must be a number from 0 to 1, got {self.smoothing!r}")
        if self.kl == self.ce == self.l1 == 0:
            raise OptionError("the loss has no term: give at least one of kl, ce and l1 a weight above 0")
        if self.weighting not in WEIGHTINGS:
            raise OptionError(f"weighting {self.weighting!r} is unknown; valid: {', '.join(WEIGHTINGS)}")

    def depth_weights(self, depth: int) -> Tensor:
        """Weights [D] of the depths before anything is known of the head: those of "exponential" (DFlash,
        arXiv 2602.06036, appendix A; JetSpec, arXiv 2606.18394), else ones.
        """
        if self.weighting != "exponential" or self.decay == 0:
            return torch.ones(depth)
        return torch.exp(-torch.arange(depth, dtype=torch.float32) / self.decay)

    def describe(self) -> str:
        """One line for a manifest."""
        soft = f" at temperature {self.temperature:g}" if self.temperature != 1 else ""
        names = {"kl": f"forward KL{soft}", "ce": "cross-entropy", "l1": "L1", "confidence": "confidence BCE"}
        terms = [f"{getattr(self, key):g} {name}" for key, name in names.items() if getattr(self, key)]
        details = {
            "exponential": f" (decay {self.decay:g})",
            "expected-length": f" (smoothing {self.smoothing:g})",
        }
        return f"{' + '.join(terms)}; {self.weighting} depth weights{details.get(self.weighting, '')}"


def expected_length_weights(overlap: Tensor, present: Tensor, smoothing: float) -> Tensor:
    """Weights of the depths by what each of them adds to the expected number of accepted tokens.

    With a_k the chance that depth k is accepted after depth k - 1 was (`overlap`: 1 - TV), the expected
    length is 1 + sum_j S_j with S_j = a_1 * .. * a_j, and

        w_k = d E[length] / d log a_k = sum over j >= k of S_j

    so a depth counts by how often it is reached and by all that lies behind it (the idea of D-PACE, arXiv
    2605.18810). An untrained head accepts nearly nothing, which would leave depths beyond the first
    untrained, so a_k is replaced by smoothing + (1 - smoothing) * a_k. The weights of an anchor are scaled to
    add up to the number of its supervised depths, and carry no gradient.

    Args:
        overlap: [..., D]. present: [..., D], 1 where a token is supervised, 0 behind the end.
    """
    accepted = (smoothing + (1 - smoothing) * overlap.detach()) * present
    survival = accepted.cumprod(-1)  # [..., D]; an absent depth ends it
    reached = survival.flip(-1).cumsum(-1).flip(-1) * present
    total, count = reached.sum(-1, keepdim=True), present.sum(-1, keepdim=True)
    return torch.where(total > 0, reached * count / total, present.to(reached.dtype))
