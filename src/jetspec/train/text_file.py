"""Files of prompts and answers: UTF-8 text, packed with gzip or not."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from jetspec.errors import DataError

PACKED = ".gz"


def read_text(path: Path, what: str, advice: str = "") -> str:
    """The text of a file, unpacked if its name ends in `.gz`, and without a byte order mark.

    Raises DataError, which calls the file `what` and ends with `advice`, if it cannot be read.
    """
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == PACKED else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{what} {path} is not UTF-8 ({error}); convert it first") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{what} {path} cannot be read: {reason}{advice}") from None


def unpacked_name(path: Path) -> Path:
    """A path as it is called once it is unpacked."""
    return path.with_suffix("") if path.suffix == PACKED else path
