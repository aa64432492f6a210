"""One request: its tokens, its text, its limits, and where it ends.

A Sequence knows nothing about models, caches or trees. Decoding hands it what a round produced (`commit`); it
takes the tokens one by one and stops at the first reason to stop, so that a block accepted at once ends
exactly where plain decoding would have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jetspec.detokenize import Detokenizer, StopStrings
from jetspec.errors import OptionError, PromptError, brief
from jetspec.sampling import Sampling, as_integer

Kind = Literal["accepted", "bonus", "plain"]
Finish = Literal["stop", "length", "abort"]

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Limits:
    """When a request ends. Construction checks every field and raises OptionError.

    max_tokens    most tokens to emit, at least 1
    stop_ids      ids that end the text, usually the target's end-of-text ids
    stop_strings  texts that end the output and are not part of it; none may be empty
    ignore_eos    treat stop_ids as ordinary tokens (for measurements of fixed length)
    max_context   most tokens of prompt and output together
    """

    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_context: int = NO_LIMIT

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_context"):
            value = getattr(self, name)
            number = as_integer(value)
            if number is None or number < 1:
                raise OptionError(f"{name} must be an integer of at least 1, got {brief(value)}")
            object.__setattr__(self, name, number)
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos must be True or False, got {brief(self.ignore_eos)}")
        stops: object = self.stop_strings
        if isinstance(stops, str):  # would be read as one stop per letter
            raise OptionError(
                f"stop_strings must be a list of texts, got {brief(stops)}; write [{brief(stops)}]"
            )
        if not isinstance(stops, Iterable):
            raise OptionError(f"stop_strings must be a list of texts, got {brief(stops)}")
        texts = tuple(stops)
        for stop in texts:
            if not isinstance(stop, str) or not stop:
                raise OptionError(f"stop_strings must be texts of at least one character, got {brief(stop)}")
        given: object = self.stop_ids
        ids = [as_integer(token) for token in given] if isinstance(given, Iterable) else [None]
        if any(token is None or token < 0 for token in ids):
            raise OptionError(f"stop_ids must be a set of token ids, which count from 0, got {brief(given)}")
        object.__setattr__(self, "stop_ids", frozenset(ids))
        object.__setattr__(self, "stop_strings", texts)


class Emission(NamedTuple):
    """One token as it is taken in, and the text that may be shown since the one before."""

    token: int
    kind: Kind  # drafted and accepted; added by the target after the path; from a round without a draft
    text: str


class Sequence:
    """One request in progress.

    `tokens` is the prompt followed by `emitted`; its last token is the root. Joining the texts of emissions
    (and of `abort`) gives `text`. Until it finishes, a sequence never loses a token.

    What remains at the end:
      - stop id: kept in `emitted`, not shown in `text`;
      - stop string: `text` ends just before it, and `emitted` is cut to the shortest run of tokens that holds
        that text (a token with the end of the text and the start of the stop string stays whole). Emissions
        had gone out before, so after a stop string there can be more emissions than `emitted` tokens;
      - max_tokens or max_context: everything held back is shown. A stop on the last allowed token wins.

    Without a stop string `text` equals decode(emitted), the stop id left out.

    Raises PromptError if the prompt is empty or leaves no room for one token in max_context.
    """

    def __init__(
        self,
        id: int,
        prompt: Iterable[int],
        sampling: Sampling,
        limits: Limits,
        decode: Callable[[list[int]], str],
    ) -> None:
        self.id = id
        self.tokens: list[int] = list(prompt)
        self.prompt_len = len(self.tokens)
        self.sampling = sampling
        self.limits = limits
        self.finished: Finish | None = None
        if self.prompt_len == 0:
            raise PromptError(
                "the prompt has no tokens; give at least one (a beginning-of-text token will do)"
            )
        if self.prompt_len >= limits.max_context:
            raise PromptError(
                f"the prompt has {self.prompt_len} tokens, but the context ends at {limits.max_context}; "
                f"shorten it to at most {limits.max_context - 1}"
            )
        self._stop_ids: frozenset[int] = frozenset() if limits.ignore_eos else limits.stop_ids
        self._detokenizer = Detokenizer(decode)
        self._stop_strings = StopStrings(limits.stop_strings)
        self._pieces: list[str] = []  # shown text
        self._ends: list[
            int
        ] = []  # per emitted token, a stop id excepted: characters certain after it, held-back ones too
        self._certain = 0
        self._shown = 0

    @property
    def root(self) -> int:
        """The last token: node 0 of the next tree, not in the cache yet."""
        return self.tokens[-1]

    @property
    def position(self) -> int:
        """Absolute position of the root, counted from 0 with the prompt included."""
        return len(self.tokens) - 1

    @property
    def emitted(self) -> list[int]:
        """The emitted tokens, a new list each time."""
        return self.tokens[self.prompt_len :]

    @property
    def text(self) -> str:
        """All text that may be shown so far; after the end, the final text. It only ever grows."""
        return "".join(self._pieces)

    @property
    def room(self) -> int:
        """Tokens that may still be emitted; a deeper tree is wasted. 0 once finished."""
        if self.finished:
            return 0
        emitted = len(self.tokens) - self.prompt_len
        return min(self.limits.max_tokens - emitted, self.limits.max_context - len(self.tokens))

    def commit(self, accepted: list[int], bonus: int, *, drafted: bool = True) -> list[Emission]:
        """Take the accepted tokens and then the bonus; what comes after the end is dropped.

        `drafted=False` marks the token of a round without a draft as "plain". Returns an emission per token
        taken, at least one.
        """
        assert self.finished is None, "nothing may be committed after the end"
        assert drafted or not accepted, "only drafted tokens can be accepted"
        last: Kind = "bonus" if drafted else "plain"
        emissions: list[Emission] = []
        for index, token in enumerate([*accepted, bonus]):
            text = self._take(token)
            emissions.append(Emission(token, "accepted" if index < len(accepted) else last, text))
            if not self.room:
                break
        return emissions

    def abort(self) -> str:
        """End the request from outside and return the text held back; "" if it has ended already.

        Half a character comes out as U+FFFD. Where that completes a stop string the text ends before it, but
        the target stopped nowhere: the tokens stay, and the reason is "abort".
        """
        if self.finished:
            return ""
        text, stopped = self._stop_strings.feed(self._detokenizer.flush())
        if not stopped:
            text += self._stop_strings.flush()
        self._show(text)
        self.finished = "abort"
        return text

    def _take(self, token: int) -> str:
        """Append one token, end if there is a reason to, and return the text that may be shown now."""
        self.tokens.append(token)
        if token in self._stop_ids:
            return self._finish("stop")
        piece = self._detokenizer.push(token)
        self._certain += len(piece)
        self._ends.append(self._certain)
        text, stopped = self._feed(piece)
        if stopped:
            return text
        if not self.room:
            text += self._finish("length")
        return text

    def _feed(self, piece: str) -> tuple[str, bool]:
        """Pass certain text through the stop strings; return what may be shown and whether one was found."""
        text, stopped = self._stop_strings.feed(piece)
        self._show(text)
        if stopped:
            self.finished = "stop"
            kept = bisect_left(self._ends, self._shown) + 1 if self._shown else 0
            del self.tokens[self.prompt_len + kept :], self._ends[kept:]
        return text, stopped

    def _finish(self, reason: Finish) -> str:
        """Show everything that was held back and end; a stop string in the last characters still counts."""
        text, stopped = self._feed(self._detokenizer.flush())
        if not stopped:
            rest = self._stop_strings.flush()
            self._show(rest)
            text += rest
            self.finished = reason
        return text

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._shown += len(text)
