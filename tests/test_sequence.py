"""One request: where it ends, and what its ids and text are then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.errors import OptionError, PromptError
from jetspec.sampling import Sampling
from jetspec.sequence import Emission, Limits, Sequence

EOS = 256
PROMPT = [1, 2, 3]


def decode(ids: list[int]) -> str:
    """Byte-level toy decoder: id = byte; EOS is special and skipped."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def make(prompt: list[int] | None = None, **limits: Any) -> Sequence:
    """A greedy request on the toy vocabulary."""
    options = {"stop_ids": frozenset({EOS}), **limits}
    return Sequence(0, PROMPT if prompt is None else prompt, Sampling(), Limits(**options), decode)


def feed(sequence: Sequence, ids: list[int], blocks: list[int]) -> list[Emission]:
    """Commit `ids` in rounds of the given sizes (the last one repeated) until the request ends or the ids run
    out."""
    emissions: list[Emission] = []
    round_index = 0
    while ids and not sequence.finished:
        size = blocks[min(round_index, len(blocks) - 1)]
        block, ids = ids[:size], ids[size:]
        emissions += sequence.commit(block[:-1], block[-1])
        round_index += 1
    return emissions


def plain(ids: list[int], **limits: Any) -> Sequence:
    """The reference: the same ids one at a time, as plain decoding gives them."""
    sequence = make(**limits)
    for token in ids:
        if sequence.finished:
            break
        sequence.commit([], token, drafted=False)
    return sequence


def test_commit_appends_accepted_then_bonus() -> None:
    """Guards against a wrong root, position or order after a round."""
    sequence = make()
    assert (sequence.root, sequence.position, sequence.emitted, sequence.text) == (3, 2, [], "")
    emissions = sequence.commit([97, 98], 99)
    assert emissions == [(97, "accepted", "a"), (98, "accepted", "b"), (99, "bonus", "c")]
    assert sequence.commit([], 100) == [(100, "bonus", "d")]
    assert sequence.commit([], 101, drafted=False) == [(101, "plain", "e")]
    assert (sequence.root, sequence.position, sequence.text) == (101, 7, "abcde")
    assert sequence.tokens == [*PROMPT, 97, 98, 99, 100, 101]
    assert sequence.finished is None


@pytest.mark.parametrize("offset", range(5))
def test_eos_at_every_offset_of_a_block(offset: int) -> None:
    """Guards against generation going on when EOS is accepted inside a block (transformers #47912)."""
    block = [97, 98, 99, 100, 101]
    block[offset] = EOS
    sequence = make()
    emissions = sequence.commit(block[:-1], block[-1])
    assert sequence.finished == "stop"
    assert sequence.emitted == block[: offset + 1]  # the EOS itself stays in the ids
    assert sequence.text == "abcde"[:offset]  # and is not shown
    assert [e.token for e in emissions] == sequence.emitted
    assert sequence.room == 0


def test_visible_stop_id_is_not_shown() -> None:
    """Guards against a stop id that is an ordinary word leaking into the text."""
    sequence = make(stop_ids=frozenset({ord(".")}))
    sequence.commit(list(b"ab"), ord("."))
    assert (sequence.text, sequence.emitted, sequence.finished) == ("ab", list(b"ab."), "stop")


def test_ignore_eos_runs_to_the_length() -> None:
    """Guards against runs of fixed length ending early."""
    sequence = make(ignore_eos=True, max_tokens=3)
    sequence.commit([EOS, EOS], EOS)
    assert (sequence.finished, sequence.emitted) == ("length", [EOS] * 3)


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_max_tokens_inside_a_block(max_tokens: int) -> None:
    """Guards against overshooting max_tokens by up to the tree's depth (transformers PR47195), block of 5."""
    sequence = make(max_tokens=max_tokens)
    emissions = sequence.commit(list(b"abcd"), ord("e"))
    kept = min(max_tokens, 5)
    assert len(emissions) == kept
    assert (sequence.emitted, sequence.text) == (list(b"abcde")[:kept], "abcde"[:kept])
    assert sequence.finished == ("length" if max_tokens <= 5 else None)
    assert sequence.room == max(0, max_tokens - 5)


@pytest.mark.parametrize("max_context", range(4, 10))
def test_context_limit_inside_a_block(max_context: int) -> None:
    """Guards against positions beyond the context; the prompt of 3 counts."""
    sequence = make(max_context=max_context)
    sequence.commit(list(b"abcd"), ord("e"))
    assert len(sequence.tokens) == min(max_context, 8)
    assert sequence.finished == ("length" if max_context <= 8 else None)


def test_prompt_must_leave_room() -> None:
    """Guards against a request that could emit nothing, or has no root."""
    with pytest.raises(PromptError, match="at most 2"):
        make(max_context=3)
    with pytest.raises(PromptError, match="no tokens"):
        make(prompt=[])
    make(max_context=4)


def test_stop_wins_over_length_on_the_same_token() -> None:
    """Guards against finish reason "length" when the last allowed token ends the text by itself."""
    assert plain([97, EOS], max_tokens=2).finished == "stop"
    assert plain(list(b"abX"), max_tokens=3, stop_strings=("X",)).finished == "stop"
    assert plain(list(b"abc"), max_tokens=3).finished == "length"


def test_stop_string_inside_the_budget_while_the_block_crosses_the_cap() -> None:
    """Guards against the cap being tested first, which says "length" and leaks tokens (sglang #31599)."""
    sequence = make(max_tokens=4, stop_strings=("bc",))
    sequence.commit(list(b"abcdef"), ord("g"))
    assert (sequence.finished, sequence.text, sequence.emitted) == ("stop", "a", list(b"a"))


def test_stop_string_beyond_the_budget_is_not_a_stop() -> None:
    """Guards against searching in text that is not part of the output."""
    sequence = make(max_tokens=2, stop_strings=("bc",))
    sequence.commit(list(b"abc"), ord("d"))
    assert (sequence.finished, sequence.text, sequence.emitted) == ("length", "ab", list(b"ab"))


@pytest.mark.parametrize("blocks", [[1], [2], [3], [8], [1, 3], [3, 1], [2, 5]])
def test_stop_string_across_tokens_and_rounds(blocks: list[int]) -> None:
    """Guards against a stop string being missed at a round's border, and its beginning being streamed."""
    sequence = make(stop_strings=("STOP",))
    emissions = feed(sequence, list(b"ab STOP cd"), blocks)
    assert sequence.finished == "stop"
    assert sequence.text == "ab " == "".join(e.text for e in emissions)
    assert sequence.emitted == list(b"ab ")


def test_text_and_ids_are_trimmed_to_the_same_point() -> None:
    """Guards against ids after the stop string surviving (vllm PR47616): straddling and empty cases."""
    words = [b"a", b"b<", b"end", b">", b"c"]
    sequence = Sequence(
        0,
        [0],
        Sampling(),
        Limits(stop_strings=("<end>",)),
        lambda ids: b"".join(words[i] for i in ids).decode(),
    )
    emissions = sequence.commit([0, 1, 2, 3], 4)
    assert sequence.text == "ab"
    assert sequence.emitted == [0, 1]  # token 1 holds the end of the text and the start of the stop string
    assert "".join(e.text for e in emissions) == "ab"
    nothing = make(stop_strings=("ab",))
    nothing.commit(list(b"a"), ord("b"))
    assert (nothing.text, nothing.emitted, nothing.tokens) == ("", [], PROMPT)


def test_split_character_before_a_stop_string_stays_whole() -> None:
    """Guards against ids being cut inside a character that is shown."""
    sequence = make(stop_strings=("!",))
    sequence.commit(list("é€!".encode()), ord("z"))
    assert (sequence.text, sequence.emitted) == ("é€", list("é€".encode()))


def test_held_back_text_comes_out_at_the_end() -> None:
    """Guards against the last characters being lost when the text ends in half a stop string or half a
    character."""
    for limits, ids, reason in [
        ({"max_tokens": 3}, b"aST", "length"),
        ({}, [*b"aST", EOS], "stop"),
    ]:
        sequence = make(stop_strings=("STOP",), **limits)
        emissions = feed(sequence, list(ids), [1])
        assert (sequence.text, sequence.finished) == ("aST", reason)
        assert "".join(e.text for e in emissions) == "aST"
    half = plain([97, 0xE2, 0x82], max_tokens=3)
    assert half.text == "a\ufffd" == decode(half.emitted)


def test_abort_flushes_once() -> None:
    """Guards against an aborted request keeping its held text, or abort changing a finished one."""
    sequence = make(stop_strings=("STOP",))
    sequence.commit(list(b"aS"), ord("T"))
    assert (sequence.text, sequence.abort(), sequence.text, sequence.finished) == ("a", "ST", "aST", "abort")
    assert sequence.abort() == ""
    done = plain([EOS])
    assert (done.abort(), done.finished) == ("", "stop")


@pytest.mark.parametrize(
    ("stop", "ids", "shown"),
    [
        ("\ufffd", [97, 0xE2, 0x82], "a"),
        ("a\ufffd", [98, 97, 0xE2], "b"),
        ("\ufffd\ufffd", [97, 0xE2, 0x82], "a\ufffd"),
    ],
)
def test_abort_inside_a_character_is_no_stop(stop: str, ids: list[int], shown: str) -> None:
    """Guards an abort whose half character became the U+FFFD of a stop string: the request ended as "stop",
    without the tokens it had."""
    sequence = make(stop_strings=(stop,))
    emissions = feed(sequence, ids, [1])
    assert sequence.finished is None
    rest = sequence.abort()
    assert (sequence.finished, sequence.emitted) == ("abort", ids)
    assert sequence.text == shown == "".join(e.text for e in emissions) + rest


def test_nothing_is_committed_after_the_end() -> None:
    """Guards against an engine that steps a finished request."""
    with pytest.raises(AssertionError):
        plain([EOS]).commit([], 97)


@given(
    st.lists(st.sampled_from([*b"ab", *"€".encode(), *"😀".encode(), EOS]), min_size=1, max_size=30)
    | st.text("ab€😀", min_size=1, max_size=12).map(lambda text: list(text.encode())),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2),
    st.integers(1, 30),
    st.integers(4, 34),
)
@settings(max_examples=400, deadline=None)
def test_rounds_do_not_change_the_result(
    ids: list[int], blocks: list[int], stops: list[str], max_tokens: int, max_context: int
) -> None:
    """Guards against anything that depends on where rounds end: ids, text, finish reason equal one token per
    round."""
    limits = {"stop_strings": tuple(stops), "max_tokens": max_tokens, "max_context": max_context}
    sequence, reference = make(**limits), plain(ids, **limits)
    emissions = feed(sequence, ids, blocks)
    assert (sequence.tokens, sequence.text, sequence.finished) == (
        reference.tokens,
        reference.text,
        reference.finished,
    )
    assert "".join(e.text for e in emissions) == sequence.text
    assert not any(stop in sequence.text for stop in stops)
    assert len(sequence.emitted) <= max_tokens and len(sequence.tokens) <= max_context
    if sequence.finished == "length":
        assert sequence.text == decode(sequence.emitted)
    assert decode(sequence.emitted).startswith(sequence.text)


@given(st.text(max_size=30), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_any_text_streams_in_whole_characters(text: str, blocks: list[int]) -> None:
    """Guards against U+FFFD in a stream when a character's bytes are split across tokens and rounds."""
    sequence = make()
    emissions = feed(sequence, [*text.encode(), EOS], blocks)
    assert sequence.text == text == "".join(e.text for e in emissions)
    assert all("\ufffd" not in e.text for e in emissions) or "\ufffd" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_context", 0),
        ("stop_strings", "STOP"),
        ("stop_strings", ("",)),
        ("stop_strings", (1,)),
        ("stop_strings", None),
        ("stop_ids", 5),
        ("stop_ids", {"a"}),
        ("stop_ids", {-1}),
        ("stop_ids", {True}),
        ("ignore_eos", 1),
    ],
)
def test_bad_limit_is_refused(field: str, value: Any) -> None:
    """Guards against an empty stop string (it matches everywhere), a text taken as a list of letters, and ids
    that nothing checked."""
    with pytest.raises(OptionError, match=field):
        Limits(**{field: value})


def test_limits_take_numpys_integers_and_any_iterable() -> None:
    """Guards ids and lengths out of arrays, which were refused, and a generator of stop strings, which the
    check used up."""
    limits = Limits(np.int64(5), np.array([3, 4]), (text for text in ("a", "b")))  # type: ignore[arg-type]
    assert limits == Limits(5, frozenset({3, 4}), ("a", "b"))
    assert type(limits.max_tokens) is int and {type(token) for token in limits.stop_ids} == {int}
