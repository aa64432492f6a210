"""What a drafter promises to the round.

A drafter sees only committed tokens and the target's taps at them. What it proposes can cost time, but
never change text.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from torch import Tensor

from jetspec.sequence import Sequence
from jetspec.tree.proposal import Proposal


class Drafter(Protocol):
    """Proposes continuations of sequences; one instance serves any number of them at once, told apart by
    `Sequence.id`.
    """

    name: str

    @property
    def taps(self) -> tuple[int, ...]:
        """Zero-based target layers whose outputs it reads; () for none."""
        ...

    @property
    def needs_hidden(self) -> bool:
        """Whether `observe` must also be given the final normed state."""
        ...

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Newly committed rows of sequence `key`, in order: taps [n, taps * H], hidden [n, H]. First call
        starts the sequence.
        """
        ...

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """One proposal per sequence, all from one draft forward. The rows before each root have been
        observed.

        A drafter that also has a number `whole_depth` takes a second argument, the depth down to which is
        drafted, and needs less time for less of it. One that has a `shared_noise`, whether it looks at the
        target's noise, takes a keyword `shared`: False keeps it from looking in this call.
        """
        ...

    def free(self, key: int) -> None:
        """Forget a sequence; unknown keys are ignored."""
        ...
