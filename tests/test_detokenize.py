"""Incremental detokenizing and stop strings, on small decoders that behave like the real kinds."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jetspec.detokenize import Detokenizer, StopStrings

Decode = Callable[[list[int]], str]

SPECIAL = 256  # an id that every toy decoder skips


def byte_decode(ids: list[int]) -> str:
    """Byte-level: id = byte, broken bytes become U+FFFD; ids from 256 on are special and skipped."""
    return bytes(i for i in ids if i < SPECIAL).decode("utf-8", errors="replace")


def pieces_decode(pieces: list[bytes], strip: Callable[[str], str] = lambda text: text) -> Decode:
    """A decoder over a vocabulary of byte strings, which may strip the front of what it is given."""
    return lambda ids: strip(b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace"))


def drop_one_space(text: str) -> str:
    """What SentencePiece decoders do to the first word."""
    return text[1:] if text.startswith(" ") else text


def run(decode: Decode, ids: list[int]) -> list[str]:
    """All pieces, the last flush included."""
    detokenizer = Detokenizer(decode)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@given(st.text(max_size=60))
def test_bytes_of_any_text(text: str) -> None:
    """Guards against a character shown in halves: a piece never holds U+FFFD unless the text itself does."""
    pieces = run(byte_decode, list(text.encode()))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 300), max_size=200))
@example([0xE2, 0x82] * 60)
@example([0xFF] + [0xF0, 0x9F, 0x98] * 60)
@example([0xFF] * 200 + list("é".encode()))
@example([0x80] * 61 + list("😀".encode()) + [0xF0] * 70)
@settings(max_examples=300, deadline=None)
def test_broken_bytes_equal_one_decode(ids: list[int]) -> None:
    """Guards against lost or doubled U+FFFD marks, and against a cut in the middle of a character after a
    long broken run."""
    assert "".join(run(byte_decode, ids)) == byte_decode(ids)


@pytest.mark.parametrize("offset", range(8))
def test_character_after_a_long_broken_run(offset: int) -> None:
    """Guards against the pending limit splitting a good character: one is planted at each offset around the
    limit of 64."""
    ids = [0xFF] * (56 + offset) + list("😀é".encode()) + [0xFF] * 90 + [0x41]
    assert "".join(run(byte_decode, ids)) == byte_decode(ids)


WORDS = [
    b"a",
    b" a",
    b" ",
    b"  ",
    b"",
    b"\n",
    b"\xe2",
    b"\x82",
    b"\xac",
    b"\xac\xe2",
    b"\x82\xac",
    b"\xe2\x82\xac",
]


@pytest.mark.parametrize("strip", [lambda text: text, drop_one_space, str.lstrip])
@given(st.lists(st.sampled_from(range(len(WORDS))), max_size=30))
@settings(max_examples=500, deadline=None)
def test_decoders_that_strip_the_front(strip: Callable[[str], str], ids: list[int]) -> None:
    """Guards against a lost space at each word (SentencePiece), also after lone spaces and skipped ids."""
    decode = pieces_decode(WORDS, strip)
    assert "".join(run(decode, ids)) == decode(ids)


def test_a_skipped_id_does_not_shield_a_space() -> None:
    """Guards against special ids or lone spaces used as context: they vanish, and the next space too."""
    decode = pieces_decode(WORDS, drop_one_space)
    for ids in ([0, 4, 1], [0, 2, 4, 4, 1], [4, 2, 1, 4, 1], [2, 1], [4, 1, 1], [2, 2, 4, 1]):
        assert "".join(run(decode, ids)) == decode(ids)


@pytest.mark.parametrize(
    "unit", [[b"\x82", b"\xac\xe2"], [b"\x98\x80\xf0\x9f"], [b"\xa9\xc3"], [b"\x82", b"\xf0", b"\x9f\xe2"]]
)
@pytest.mark.parametrize("start", [b"x\xe2", b"\xf0\x9f", b" \xc3", b"\xff"])
def test_tokens_that_always_end_inside_a_character(unit: list[bytes], start: bytes) -> None:
    """Guards against the pending limit splitting characters where for long no id ends on a border."""
    pieces = [start, *(unit * 150), b"\x82\xac."]
    decode, longest = pieces_decode(pieces, drop_one_space), 0

    def watched(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    assert "".join(run(watched, list(range(len(pieces))))) == decode(list(range(len(pieces))))
    assert longest <= 200


def run_llama(text: bytes) -> list[str]:
    """The pieces of a text behind Llama's decoder of the tokenizers library, with byte fallback and strip:
    ASCII characters are words, other bytes are written as bytes."""
    from tokenizers import decoders

    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["▁", *(chr(byte).replace(" ", "▁") if byte < 128 else f"<0x{byte:02X}>" for byte in text)]
    return run(lambda ids: decoder.decode([pieces[i] for i in ids]), list(range(len(pieces))))


@given(st.text(st.sampled_from("ab €é😀"), max_size=30))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_decoder_of_the_tokenizers_library(text: str) -> None:
    """Guards against a toy decoder that differs from real ones."""
    streamed = run_llama(text.encode())
    assert "".join(streamed) == text
    assert not any("\ufffd" in piece for piece in streamed)


@given(
    st.lists(
        st.sampled_from([b"a", b" b", "é".encode(), "😀".encode(), b"\x80", b"\xf0", b"\xc3"]), max_size=15
    ).map(b"".join)
)
@example("hi😀".encode() + b"\xf0")
@example("😀😀😀".encode() + b"\xf0a")
@example("😀".encode() + b"\xf0 b" + "😀é".encode())
@settings(max_examples=300, deadline=None)
def test_wrong_bytes_behind_whole_characters(text: bytes) -> None:
    """Guards characters that were shown, all of whose bytes came once more as marks: the decoder turns a run
    of bytes into marks as a whole if one of them is wrong. Of each run the characters before the first wrong
    byte are out by then, and the others are one mark each."""
    expected = ""
    for run_of_bytes in re.findall(rb"[\x80-\xff]+|[\x00-\x7f]+", text):
        good = run_of_bytes.decode(errors="ignore").encode()
        while not run_of_bytes.startswith(good):
            good = good.decode()[:-1].encode()
        expected += good.decode() + "\ufffd" * (len(run_of_bytes) - len(good))
    assert "".join(run_llama(text)) == expected


def test_text_is_shown_at_once() -> None:
    """Guards against a detokenizer that is exact because it holds everything back."""
    detokenizer = Detokenizer(byte_decode)
    assert [detokenizer.push(i) for i in b"ab"] == ["a", "b"]
    assert [detokenizer.push(i) for i in "€".encode()] == ["", "", "€"]
    mixed = Detokenizer(pieces_decode([b"hello \xe2", b"\x82\xac!"]))
    assert [mixed.push(0), mixed.push(1), mixed.flush()] == ["hello ", "€!", ""]


@pytest.mark.parametrize("text", ["word ", "   ", "€", "\ufffd", "é\n"])
def test_work_is_linear(text: str) -> None:
    """Guards against decoding everything for every token: ids decoded in all may not exceed a constant times
    their number."""
    work = 0

    def decode(ids: list[int]) -> str:
        nonlocal work
        work += len(ids)
        return byte_decode(ids)

    def cost(repeats: int) -> int:
        nonlocal work
        work = 0
        run(decode, list((text * repeats).encode()))
        return work

    assert cost(4000) < 2.2 * cost(2000)


def test_work_is_linear_for_broken_bytes_and_specials() -> None:
    """Guards against a pending list that grows without end when no character ever becomes whole."""
    for unit in ([0xFF], [SPECIAL], [0xE2, 0x82], [0xC3, SPECIAL]):
        longest = 0

        def decode(ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return byte_decode(ids)

        run(decode, unit * 1000)
        assert longest <= 200


# --- stop strings


def feed_all(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """Feed pieces until a stop; return the text shown and whether it stopped."""
    machine, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = machine.feed(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + machine.flush(), False


ALPHABET = st.sampled_from("ab")


@given(
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(ALPHABET, max_size=3), max_size=20),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_against_a_plain_search(stops: list[str], pieces: list[str]) -> None:
    """Guards against a stop that crosses pieces being missed, its beginning being shown, or text being lost
    at the end."""
    before = ""
    for piece in (
        pieces
    ):  # the stop is noticed at the first piece that completes one; of those the earliest start wins
        before += piece
        found = [before.find(stop) for stop in stops if stop in before]
        if found:
            assert feed_all(stops, pieces) == (before[: min(found)], True)
            return
    assert feed_all(stops, pieces) == (before, False)


def test_only_a_possible_beginning_is_held() -> None:
    """Guards against holding a fixed number of characters, which delays streaming for no reason."""
    machine = StopStrings(["\n\nUser:", "END"])
    assert machine.feed("hello") == ("hello", False)
    assert machine.feed(" E") == (" ", False)
    assert machine.feed("N") == ("", False)
    assert machine.feed("T\n") == ("ENT", False)
    assert machine.feed("\n") == ("", False)
    assert machine.feed("\n") == ("\n", False)  # of three newlines the last two may begin the stop
    assert machine.feed("User: no") == ("", True)
