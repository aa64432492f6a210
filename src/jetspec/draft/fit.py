"""Whether a head belongs to a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetspec.errors import HeadError
from jetspec.target.target import Target


def check_fits_target(target: Target, manifest: Mapping[str, Any], *, hidden: int, vocab: int) -> None:
    """Refuse a head made for a target of another width, vocabulary or tokenizer. Raises HeadError."""
    config = target.config
    pairs = [("hidden size", hidden, config.hidden_size), ("vocabulary", vocab, config.vocab_size)]
    for what, wanted, found in pairs:
        if wanted != found:
            raise HeadError(
                f"the head was made for another target: its {what} is {wanted}, {target.name} has {found}; "
                "give a head trained for this target, or --head off"
            )
    recorded = (manifest.get("target") or {}).get("tokenizer_hash")
    if recorded and recorded != target.tokenizer.hash:
        raise HeadError(
            f"the head was trained with another tokenizer than that of {target.name}; "
            "give a head trained for this target, or --head off"
        )
