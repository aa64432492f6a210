"""From token ids to text as they arrive: whole characters only, nothing that a stop string may still take
back.

Two small machines in a row. `Detokenizer` turns ids into text that later ids can no longer change.
`StopStrings` lets text through once it can no longer become part of a stop string. Neither knows about
requests; `jetspec.sequence` connects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that do not form a character, or do not form one yet
_MAX_PENDING = 64  # ids that may wait for a character to become whole
_WINDOW = 16  # ids that go on waiting when there are more


class Detokenizer:
    """Turns token ids into text piece by piece, in time linear in the number of tokens.

    The pieces, with `flush()` last, join to exactly `decode(all ids)`, for every decoder in which more ids
    only add text or replace trailing U+FFFD marks. Byte-level and SentencePiece decoders are like that, also
    where they strip the leading space of what they are given. A character has to become whole within 16 ids.

    Other decoders rewrite earlier text, which is out and stays as it was. SentencePiece's byte fallback turns
    a whole run of bytes into marks, one for each, if one of them is wrong: the characters shown stay, and the
    bytes behind them become marks, as many as there are; only behind 64 wrong bytes in a row may whole
    characters show again, which the decoder would turn into marks. Switch "clean up tokenization spaces" off.

    Each id is decoded together with a short context (the ids of the last piece that had visible text), and
    the text of the context is taken off again. So a stripped leading space is stripped from the context,
    never from the new piece. Where the decoder rewrites the context, the new ids are decoded alone.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # ids whose text is out; they only stand in front of the pending ones
        self._before = ""  # decode(context)
        self._pending: list[int] = []  # ids since then
        self._shown = 0  # characters of decode(context + pending) that are out, the context's included

    def push(self, token: int) -> str:
        """Take one id and return the text that is now certain, often "" in the middle of a character."""
        self._pending.append(token)
        text = self._text()
        stable = text.rstrip(REPLACEMENT)
        piece = stable[self._shown :]
        self._shown = max(self._shown, len(stable))
        if len(stable) == len(text):
            self._settle(text)
        elif len(self._pending) >= _MAX_PENDING:
            piece += self._shorten(text)
        return piece

    def flush(self) -> str:
        """Return what is left at the end, an incomplete character as U+FFFD; then start afresh."""
        piece = self._text()[self._shown :]
        self._context, self._pending, self._before, self._shown = [], [], "", 0
        return piece

    def _text(self) -> str:
        """decode(context + pending), with the context's text as it was shown."""
        text = self._decode(self._context + self._pending)
        return text if text.startswith(self._before) else self._before + self._decode(self._pending)

    def _settle(self, text: str) -> None:
        """All of `text`, that of context and pending ids, is out."""
        done, self._pending = self._pending, []
        if text[len(self._before) :].strip():
            self._context = done
        elif not self._before:
            self._context = (self._context + done)[-_MAX_PENDING:]
        # Otherwise the older context stays and these ids are forgotten: ids without visible text (special ids
        # that are skipped, lone spaces) may vanish at the front of a decode and cannot shield what follows.
        self._before = self._decode(self._context)
        self._shown = len(self._before)

    def _shorten(self, text: str) -> str:
        """Go on with the last pending ids only, and return text that became certain by that.

        They may begin inside a character, which turns the front of their own decode into marks. That does no
        harm: counted from the end the two texts agree, except where `text` has a whole character, and what is
        whole is out already. Marks older than the remaining ids are final.
        """
        self._context, self._before, self._pending = [], "", self._pending[-_WINDOW:]
        window = self._decode(self._pending)
        open_from = max(self._shown, len(text) - len(window))
        piece = text[self._shown : open_from]
        self._shown = len(window) - (len(text) - open_from)
        return piece


class StopStrings:
    """Holds text back while it may be the beginning of a stop string, and finds the first stop string.

    Work per piece is bounded by the length of the stop strings, not by the text so far.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        assert all(self._stops), "an empty stop string would match everywhere"
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Take the next piece; return (text that may be shown, whether a stop string was completed).

        On completion the text ends just before the stop string that starts first, and what follows is
        dropped.
        """
        text = self._held + piece
        starts = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            self._held = ""
            return text[: min(starts)], True
        held = self._prefix_at_end(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Return what was held back: no stop string will come."""
        text, self._held = self._held, ""
        return text

    def _prefix_at_end(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
