from __future__ import annotations

import gc
import subprocess
import sys
import threading
import tomllib
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jetspec
from jetspec.api import LanguageModel, load
from jetspec.decode.engine import Engine
from jetspec.decode.round import Outcome
from jetspec.decode.stats import Stats
from jetspec.draft.stubs import Decoy
from jetspec.errors import HeadError, ModelError, OptionError, PromptError
from jetspec.sequence import Emission
from tests.helpers import CONTEXT, tiny_folder

__all__ = ["tiny_folder"]  # a fixture

BYTES = (b"Hello", bytearray(b"Hello"), memoryview(b"Hello"))


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LanguageModel:
    """The tiny model with the drafter that breaks most things."""
    return load(str(tiny_folder), "decoy", budget=12)


@pytest.fixture(scope="module")
def plain(model: LanguageModel) -> LanguageModel:
    """The same target without drafts."""
    return LanguageModel(model.target, None, budget=0)


def test_importing_is_light() -> None:
    """Guards start-up: neither the package nor its trees may pull in torch or transformers."""
    code = "import sys, jetspec, jetspec.tree; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", jetspec.__all__)
def test_public_names_exist(name: str) -> None:
    """Guards the lazy table of names against a rename in the module behind it."""
    assert getattr(jetspec, name) is not None
    assert name in dir(jetspec)


def test_unknown_names_are_attribute_errors() -> None:
    """Guards `hasattr` and imports by name against a lazy loader that raises KeyError or returns None."""
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = jetspec.nonsense


def test_version_is_that_of_the_package() -> None:
    """Guards against a release that raises the version in one of the two places only."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["version"] == jetspec.__version__


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_do_not_change_the_text(
    model: LanguageModel, plain: LanguageModel, temperature: float
) -> None:
    """Guards the promise of the library at its top: same text, whatever drafts; and drafts were accepted."""
    drafted = model.generate("Hello", max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    expected = plain.generate("Hello", max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    assert (drafted.text, drafted.tokens) == (expected.text, expected.tokens)
    assert set(drafted.kinds) == {"accepted", "bonus"} and set(expected.kinds) == {"plain"}
    assert len(drafted.kinds) == len(drafted.tokens) == 40
    assert drafted.stats.tau > 2.0 and expected.stats.tau == 1.0


def test_a_list_is_one_batch(model: LanguageModel) -> None:
    """Guards the batch: results in the order of the prompts, each as if alone, with counters of its own."""
    prompts = ["Hello", "A longer prompt, of more tokens", "x"]
    together = model.generate(prompts, max_tokens=20, ignore_eos=True)
    alone = [model.generate(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [(r.stats.rounds, r.stats.accepted) for r in together] == [
        (r.stats.rounds, r.stats.accepted) for r in alone
    ]
    assert [r.prompt_tokens for r in together] == [len(model.encode(prompt)) for prompt in prompts]
    assert isinstance(model.generate(["Hello"], max_tokens=2), list)


def test_conversations_and_ids_are_prompts_too(model: LanguageModel) -> None:
    """Guards the reading of a list: messages and ids are one prompt, lists of them are a batch."""
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ids = model.encode(talk)
    expected = model.generate(talk, max_tokens=8).tokens
    assert model.generate("Hello", system="Be brief.", max_tokens=8).tokens == expected
    assert model.generate(ids, max_tokens=8).tokens == expected
    assert [r.tokens for r in model.generate([talk, talk], max_tokens=8)] == [expected, expected]
    assert [r.tokens for r in model.generate([ids, ids], max_tokens=8)] == [expected, expected]


def test_raw_leaves_the_template_out(model: LanguageModel) -> None:
    """Guards against a template that is always, or never, applied."""
    raw = model.generate("Hello", raw=True, max_tokens=4)
    chat = model.generate("Hello", max_tokens=4)
    assert raw.prompt_tokens == len(model.target.tokenizer.encode("Hello")) < chat.prompt_tokens


def test_streams_give_what_generate_gives(model: LanguageModel) -> None:
    """Guards the pieces: joined they are the text, one per token, and the result is complete."""
    expected = model.generate("Hello", max_tokens=30, ignore_eos=True)
    stream = model.stream("Hello", max_tokens=30, ignore_eos=True)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == expected.text == stream.result.text
    assert [piece.token for piece in pieces] == expected.tokens == stream.result.tokens
    assert [piece.kind for piece in pieces] == expected.kinds == stream.result.kinds
    assert stream.result.finish == "length"


def test_streams_may_run_side_by_side(model: LanguageModel) -> None:
    """Guards the drafter's memory: two engines must not call their sequences by the same id."""
    expected = [model.generate(text, max_tokens=30, ignore_eos=True) for text in ("Hello", "Good night")]
    streams = [model.stream(text, max_tokens=30, ignore_eos=True) for text in ("Hello", "Good night")]
    pieces: list[list[Emission]] = [[], []]
    for pair in zip(*streams, strict=True):  # one token of each in turn
        for kept, piece in zip(pieces, pair, strict=True):
            kept.append(piece)
    for stream in streams:
        stream.close()
    assert [[piece.token for piece in kept] for kept in pieces] == [r.tokens for r in expected]
    assert [stream.result.stats.accepted for stream in streams] == [r.stats.accepted for r in expected]


def test_leaving_a_stream_gives_everything_back(model: LanguageModel) -> None:
    """Guards memory: rows of engine and drafter are freed when a caller stops half-way or never starts."""
    assert isinstance(model.drafter, Decoy)
    with model.stream("Hello", max_tokens=50) as stream:
        next(stream)
        with pytest.raises(OptionError, match="has not ended"):
            _ = stream.result
    assert stream.result.finish == "abort" and stream.result.tokens
    unread = model.stream("Hello")
    unread.close()
    assert unread.result.finish == "abort" and unread.result.tokens == []
    for engine in (stream._engine, unread._engine):
        assert not engine.busy and engine.cache.bytes == 0
    assert model.drafter.cache.bytes == 0


def test_dropping_a_stream_gives_everything_back(model: LanguageModel) -> None:
    """Guards memory of a stream that is left half-way without closing it: the generator held the stream, so
    rows stayed until a garbage collection."""
    assert isinstance(model.drafter, Decoy)
    gc.collect()
    gc.disable()
    try:
        stream = model.stream("Hello", max_tokens=50, ignore_eos=True)
        next(stream)
        engine = weakref.ref(stream._engine)
        assert model.drafter.cache.bytes > 0
        del stream
        assert engine() is None and model.drafter.cache.bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("read", [1, 2, 3, 7])
def test_a_stream_closed_early_has_what_was_read(
    model: LanguageModel, plain: LanguageModel, read: int
) -> None:
    """Guards the result after an early end: it held the rest of the round as well, which nobody was given and
    which depends on the draft."""
    cut = []
    for one in (model, plain):
        with one.stream("Hello", max_tokens=8, ignore_eos=True) as stream:
            pieces = [next(stream) for _ in range(read)]
            with pytest.raises(OptionError, match="has not ended"):
                _ = stream.result  # also where the last round is over, but not read
        result = stream.result
        assert result.text == "".join(piece.text for piece in pieces)
        assert result.kinds == [piece.kind for piece in pieces]
        assert result.stats.tokens == len(result.tokens) == read and result.finish == "abort"
        assert result.stats.accepted == result.kinds.count("accepted")
        cut.append((result.text, result.tokens))
    assert cut[0] == cut[1]


def test_a_stream_can_be_closed_while_it_is_read(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a disconnect: closing while another thread was in its next step failed ("generator already
    executing"), and the request ran on."""
    stream = model.stream("Hello", max_tokens=100, ignore_eos=True)
    step, inside, closed = stream._engine.step, threading.Event(), threading.Event()

    def slow() -> list[Outcome]:
        inside.set()
        assert closed.wait(30)
        return step()

    monkeypatch.setattr(stream._engine, "step", slow)
    pieces: list[Emission] = []
    reader = threading.Thread(target=lambda: pieces.extend(stream))
    reader.start()
    assert inside.wait(30)
    try:
        stream.close()
    finally:
        closed.set()
        reader.join(30)
    assert not reader.is_alive() and not stream._engine.busy and stream._engine.cache.bytes == 0
    assert stream.result.finish == "abort"
    assert stream.result.tokens == [piece.token for piece in pieces] and len(pieces) == 1


def test_counters_are_those_of_what_is_left(model: LanguageModel) -> None:
    """Guards tau and speed where a stop string takes tokens back: they were counted as emitted."""
    whole = model.generate("Hello", max_tokens=40, ignore_eos=True)
    taken_back = 0
    for start in range(0, len(whole.text) - 6, 3):
        cut = model.generate("Hello", max_tokens=40, ignore_eos=True, stop=whole.text[start : start + 6])
        assert cut.stats.tokens == len(cut.tokens)
        assert cut.stats.accepted == cut.kinds.count("accepted")
        assert cut.stats.accepted == sum(kept for _, kept in cut.stats.by_depth)
        taken_back += not cut.tokens
    assert taken_back, "no stop string took everything back"
    assert model.compare("Hello", max_tokens=40, ignore_eos=True, stop=whole.text[:6]).speedup > 0


def test_a_batch_has_counters_of_its_own(model: LanguageModel) -> None:
    """Guards a batch's speed: each result has the seconds of all, so that pooled results made it too slow."""
    results = model.generate(["Hello", "A longer prompt"], max_tokens=9, ignore_eos=True)
    pooled = Stats()
    for result in results:
        pooled.add(result.stats)
    for result in results:
        assert (result.batch.tokens, result.batch.rounds) == (18, pooled.rounds)
        assert result.batch.seconds == result.stats.seconds
        assert result.batch.forwards == max(r.stats.forwards for r in results)
    assert results[0].batch.tokens_per_second == pytest.approx(2 * pooled.tokens_per_second)
    alone = model.generate("Hello", max_tokens=9)
    assert alone.batch == alone.stats


def test_a_batch_takes_a_seed_for_each_prompt(model: LanguageModel) -> None:
    """Guards independent samples of one prompt: with one seed they are all the same text. And it must stay
    that text, for a prompt has the same one alone and in any batch."""
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    alone = [model.generate("Hello", seed=seed, **options).tokens for seed in (3, 4)]
    assert alone[0] != alone[1]
    same = model.generate(["Hello", "Hello"], seed=3, **options)
    assert [r.tokens for r in same] == [alone[0], alone[0]]
    each = model.generate(["Hello", "Hello"], seed=[np.int64(3), 4], **options)
    assert [r.tokens for r in each] == alone
    for prompts, seed, message in (
        (["Hello"], [1, 2], "2 seeds for 1 prompts"),
        ("Hello", [1], "goes with a list of prompts"),
        (["Hello"], [True], "seed must be an integer"),
        (["Hello"], "1", "seed must be an integer"),
    ):
        with pytest.raises(OptionError, match=message):
            model.generate(prompts, seed=seed)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="goes with a list of prompts"):
        model.stream("Hello", seed=[1])


def test_a_prompt_that_cannot_be_decoded_is_named(tiny_folder: Path) -> None:
    """Guards a batch against an error that tells neither whom it is about nor that the others are fine."""
    damaged = load(str(tiny_folder), "off").target
    damaged.transformer.embedding[7] = float("nan")
    broken = LanguageModel(damaged, None, budget=0)
    ban: dict[str, Any] = {"logit_bias": {7: -1e9}, "max_tokens": 5}
    with pytest.raises(ModelError, match=r"prompt 1 of the batch, counted from 0, .* not finite") as caught:
        broken.generate([[5, 6], [5, 7], [6, 6]], **ban)
    assert len(caught.value.sequences) == 1
    assert len(broken.generate([[5, 6], [6, 6]], **ban)) == 2


def test_a_stop_text_cuts_tokens_and_kinds_alike(model: LanguageModel) -> None:
    """Guards the alignment of tokens and kinds where a stop string takes tokens back that were emitted."""
    whole = model.generate("Hello", max_tokens=40, ignore_eos=True)
    stop = whole.text[len(whole.text) // 2 :][:2]
    for given in (stop, [stop, "never"]):
        cut = model.generate("Hello", max_tokens=40, ignore_eos=True, stop=given)
        assert cut.finish == "stop" and cut.text == whole.text[: whole.text.index(stop)]
        assert len(cut.kinds) == len(cut.tokens) < 40


def test_compare_runs_both_sides(model: LanguageModel, plain: LanguageModel) -> None:
    """Guards the comparison: both outputs are the ones of separate runs, warm-up rounds are not counted."""
    seen: list[int] = []
    comparison = model.compare(
        "Hello",
        lambda outcome: seen.extend(piece.token for piece in outcome.emissions),
        max_tokens=20,
        ignore_eos=True,
    )
    expected = plain.generate("Hello", max_tokens=20, ignore_eos=True)
    assert comparison.identical and comparison.lossless
    assert comparison.plain.tokens == comparison.speculative.tokens == expected.tokens == seen
    assert comparison.plain.stats.rounds == 20 > comparison.speculative.stats.rounds
    assert comparison.plain.stats.tokens == comparison.speculative.stats.tokens == 20
    assert comparison.speedup > 0.0


def test_compare_sees_a_broken_round(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a comparison that always says identical: here speculation mixes up cache rows."""
    from jetspec.target.cache import KVCache

    keep = KVCache.keep

    def wrong(self: KVCache, key: int, path: list[int]) -> None:
        keep(self, key, range(len(path)) if path and path[-1] >= len(path) else path)

    monkeypatch.setattr(KVCache, "keep", wrong)
    comparison = model.compare("Hello", max_tokens=40, ignore_eos=True)
    assert not comparison.identical and not comparison.lossless
    first = comparison.divergence
    assert first is not None and first.gap > 1e-3
    assert comparison.plain.tokens[: first.place] == comparison.speculative.tokens[: first.place]
    assert (first.plain, first.other) == (
        comparison.plain.tokens[first.place],
        comparison.speculative.tokens[first.place],
    )


@pytest.mark.parametrize("prompt", ["", "  \n", [], [""], [[]], ["Hello", ""]])
def test_empty_prompts_are_refused(model: LanguageModel, prompt: object) -> None:
    """Guards against an empty forward deep in the engine, with a message nobody can use."""
    with pytest.raises(PromptError):
        model.generate(prompt)  # type: ignore[call-overload]


def test_errors_speak_of_the_library(model: LanguageModel) -> None:
    """Guards against advice for the command line where there is none."""
    with pytest.raises(PromptError, match=r"^the prompt is empty: give at least one word$"):
        model.generate("")


def test_a_model_says_what_it_is(model: LanguageModel, tiny_folder: Path) -> None:
    """Guards notebooks and logs against a bare address."""
    assert repr(model) == f"<LanguageModel {str(tiny_folder)!r}, head decoy, budget 12>"
    assert repr(LanguageModel(model.target)).endswith(", head off, budget auto>")


@pytest.mark.parametrize(
    "prompt", [None, 7, *BYTES, [BYTES[1]], [1, "a"], [{"role": "user"}, 3], [None], [True]]
)
def test_what_is_no_prompt_is_refused(model: LanguageModel, prompt: object) -> None:
    """Guards against a traceback from the tokenizer for a prompt of the wrong type."""
    with pytest.raises(PromptError):
        model.generate(prompt)  # type: ignore[call-overload]


def test_a_prompt_must_fit(model: LanguageModel) -> None:
    """Guards the context's end: a prompt that fills it is refused at once, by stream() too."""
    with pytest.raises(PromptError, match=f"context ends at {CONTEXT}"):
        model.stream("a b " * CONTEXT)
    assert model.generate([5] * (CONTEXT - 1), ignore_eos=True).finish == "length"


def test_numpys_integers_are_budgets(model: LanguageModel) -> None:
    """Guards a budget out of an array: it was refused, while such a max_tokens was not."""
    budget: Any = np.int64(12)
    expected = model.generate("Hello", max_tokens=20, ignore_eos=True)
    found = LanguageModel(model.target, model.drafter, budget=budget).generate(
        "Hello", max_tokens=np.int64(20), ignore_eos=True
    )
    assert (found.tokens, found.stats.rounds) == (expected.tokens, expected.stats.rounds)


def test_options_are_strict(model: LanguageModel) -> None:
    """Guards against misspelled options that are silently ignored."""
    with pytest.raises(OptionError, match="unknown option 'temprature'; valid: temperature"):
        model.generate("Hello", temprature=1.0)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="choose one of them"):
        model.generate("Hello", raw=True, system="Be brief.")
    with pytest.raises(OptionError, match="top_p"):
        model.stream("Hello", top_p=0.0)
    for stop in (None, 5, b"x"):
        with pytest.raises(OptionError, match="stop must be a text or a list of texts"):
            model.generate("Hello", stop=stop)  # type: ignore[call-overload]


def test_options_that_would_do_nothing_are_refused(model: LanguageModel) -> None:
    """Guards against a system message or a switch that is silently ignored, and switches that are none."""
    for extra in ({"system": "Be brief."}, {"thinking": False}):
        with pytest.raises(PromptError, match="token ids do not go through"):
            model.generate([5, 6], **extra)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="thinking is part of the chat template"):
        model.generate("Hello", raw=True, thinking=True)
    for name, value in (("raw", 1), ("raw", None), ("ignore_eos", "no"), ("thinking", 0), ("system", 5)):
        with pytest.raises(OptionError, match=f"^{name} must be"):
            model.generate("Hello", **{name: value})  # type: ignore[call-overload]


def test_ids_out_of_an_array_are_a_prompt(model: LanguageModel) -> None:
    """Guards NumPy's integers: a list of them was taken for a batch of prompts that are none."""
    expected = model.generate([5, 6, 7], max_tokens=3)
    given: Any = list(np.array([5, 6, 7]))
    assert model.generate(given, max_tokens=3).tokens == expected.tokens
    assert [r.tokens for r in model.generate([given, given], max_tokens=3)] == [expected.tokens] * 2


def test_load_checks_cheap_things_first() -> None:
    """Guards the user's time: a bad budget or builder shows before a model is read, or fetched."""
    with pytest.raises(OptionError, match="budget"):
        load("no such model", budget=-1)
    with pytest.raises(OptionError, match="budget"):
        load("no such model", budget="16")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="valid: best-first, beam, chain"):
        load("no such model", grow="worst-first")
    with pytest.raises(OptionError, match="budget"):
        load("no such model", budget=np.array([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="'~no-such-user/x' was not found"):
        load("~no-such-user/x")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"confidence_threshold": "x"}, OptionError, "confidence threshold must be a number from 0 up to 1"),
        ({"confidence_threshold": None}, OptionError, "confidence threshold must be a number"),
        ({"confidence_threshold": True}, OptionError, "confidence threshold must be a number"),
        ({"dtype": ["x"]}, OptionError, r"dtype \['x'\] is unknown; valid: float32"),
        ({"model": "x" * 5000}, ModelError, "cannot be looked up .*; valid: smollm2-135m"),
        ({"model": "x" * 5000 + ".gguf"}, ModelError, "cannot be looked up"),
        ({"model": ""}, ModelError, "name of the model is empty; valid: smollm2-135m"),
        ({"model": "a\0b"}, ModelError, "was not found"),
        ({"head": "x" * 5000}, HeadError, "cannot be looked up .*; valid: auto, default, off"),
        ({"head": ""}, HeadError, "name of the head is empty; valid: auto, default, off"),
        ({"head": "a\0b"}, HeadError, "was not found"),
        ({"head": __file__}, HeadError, "is no folder; valid: auto, default, off"),
    ],
)
def test_load_has_errors_of_its_own(
    tiny_folder: Path,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the errors that are documented: Python's own came through, an empty name meant the current
    folder, and a file for a head was said not to exist."""
    monkeypatch.chdir(tiny_folder)
    with pytest.raises(error, match=message) as caught:
        load(**{"model": str(tiny_folder), "head": "off", **options})
    assert len(str(caught.value)) < 600


def test_load_names_a_missing_head(tiny_folder: Path) -> None:
    """Guards against a typo in the head's name that decodes plainly without a word."""
    with pytest.raises(HeadError, match="'nowhere' was not found"):
        load(str(tiny_folder), "nowhere")


def test_engine_accepts_the_loaded_parts(model: LanguageModel) -> None:
    """Guards the way down: target and drafter of a loaded model work in an engine made by hand."""
    engine = Engine(model.target, model.drafter, budget=12)
    sequence = engine.generate([model.encode("Hello")])[0]
    assert sequence.emitted == model.generate("Hello").tokens
