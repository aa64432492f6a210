from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetspec.bench.baselines import Library, LibraryRunner
from jetspec.bench.clock import EngineRunner, take_turns
from jetspec.bench.methods import METHODS, PLAIN, Heads, make_engine
from jetspec.errors import ModelError, OptionError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.loading import load_target
from jetspec.target.target import Target
from tests.helpers import changed_model, tiny_folder

__all__ = ["tiny_folder"]  # a fixture


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    """The tiny model as our engine holds it."""
    return load_target(str(tiny_folder))


@pytest.mark.parametrize("name", ["hf-generate", "hf-lookup", "hf-assisted"])
@pytest.mark.parametrize("ignore_eos", [True, False], ids=["fixed", "ends"])
def test_they_decode_the_same_text(target: Target, tiny_folder: Path, name: str, ignore_eos: bool) -> None:
    """Guards the comparison: the same greedy tokens as our plain decoding, the same end, and counts that fit
    together; the text repeats itself, so prompt lookup must find something."""
    library = Library(target, str(tiny_folder), str(tiny_folder))
    ids = [5, 17, 9, 5, 17, 9, 5, 17]
    limits = Limits(max_tokens=24, ignore_eos=ignore_eos)
    outside = LibraryRunner(library, name)
    plain = EngineRunner(make_engine(target, METHODS[PLAIN], 0, Heads(target), 1))
    (ours, expected), (theirs, found) = take_turns([plain, outside], [ids], Sampling(), limits)
    assert found == expected
    assert theirs.tokens == ours.tokens and theirs.finish == ours.finish
    assert theirs.seconds > 0.0 and theirs.prefill > 0.0 and 1 <= theirs.rounds[0] <= theirs.tokens[0]
    assert theirs.clocked < theirs.tokens[0] if name == "hf-generate" else theirs.clocked <= theirs.tokens[0]
    assert theirs.accepted == theirs.tokens[0] - theirs.rounds[0]
    if name == "hf-generate":
        assert theirs.rounds == theirs.tokens and theirs.clocked == theirs.tokens[0] - 1
    if name == "hf-assisted":  # the target assists itself, so its drafts are accepted
        assert theirs.rounds[0] <= theirs.tokens[0] / 2
    assert not outside.running


@pytest.mark.parametrize("name", ["hf-generate", "hf-lookup", "hf-assisted"])
def test_they_are_greedy_whatever_the_model_suggests(
    target: Target, tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    """Guards the comparison with models whose generation_config.json has penalties, as Qwen2.5's has:
    `generate` applied them to greedy text too, which then was another one than plain decoding's."""
    folder = changed_model(tiny_folder, tmp_path / "model")
    ids, limits = [5, 17, 9, 5, 17, 9, 5, 17], Limits(max_tokens=12, ignore_eos=True)
    plain = EngineRunner(make_engine(target, METHODS[PLAIN], 0, Heads(target), 1))
    ((_, (expected,)),) = take_turns([plain], [ids], Sampling(), limits)
    suggested = {
        "repetition_penalty": 2.0,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": [expected[0]],
        "bad_words_ids": [[expected[1]]],
        "do_sample": True,
        "top_k": 5,
    }
    (folder / "generation_config.json").write_text(json.dumps(suggested), "utf-8")
    outside = LibraryRunner(Library(target, str(folder), str(folder)), name)
    ((_, (answer,)),) = take_turns([outside], [ids], Sampling(), limits)
    assert answer == expected


def test_an_answer_ends_at_its_end(
    target: Target, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the stop ids: those of our engine, not only those in the model's own configuration."""
    library = Library(target, str(tiny_folder), None)
    runner = LibraryRunner(library, "hf-generate")
    ids, limits = [5, 17, 9], Limits(max_tokens=12)
    ((_, (free,)),) = take_turns([runner], [ids], Sampling(), Limits(max_tokens=12, ignore_eos=True))
    last = free[4]
    monkeypatch.setattr(Library, "stop_ids", property(lambda self: [last]))
    ((measured, (answer,)),) = take_turns([LibraryRunner(library, "hf-generate")], [ids], Sampling(), limits)
    assert answer == free[: free.index(last) + 1] and measured.finish == ["stop"]


def test_refusals(target: Target, tiny_folder: Path, tmp_path: Path) -> None:
    """Guards the messages for a missing assistant, one with another tokenizer, and a model that transformers
    cannot read."""
    with pytest.raises(OptionError, match="no assistant: give a smaller model with --assistant"):
        Library(target, str(tiny_folder), None).options("hf-assisted")
    other = changed_model(tiny_folder, tmp_path / "other")
    text = (other / "tokenizer.json").read_text("utf-8")
    (other / "tokenizer.json").write_text(text + "\n", "utf-8")
    with pytest.raises(OptionError, match="has another tokenizer than"):
        Library(target, str(tiny_folder), str(other))
    broken = changed_model(tiny_folder, tmp_path / "broken", hidden_act="nonsense")
    with pytest.raises(ModelError, match=r"leave the hf- methods out|nonsense|hidden_act"):
        Library(target, str(broken), None).model()
