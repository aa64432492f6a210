"""Verification: from the target's picks to the accepted path and the bonus token."""

from __future__ import annotations

from jetspec.verify.walk import walk

__all__ = ["walk"]
