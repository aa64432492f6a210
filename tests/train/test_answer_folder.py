"""A folder of answers has one writer at a time, which leaves everything it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.errors import DataError, StorageError
from jetspec.train import answer_folder
from jetspec.train.answer_folder import AnswerFolder
from jetspec.train.answers import ANSWERS_FILE, Answer, read_answers
from jetspec.train.features import Recorder, Sample, read_shard, shard_paths

TAPS = (0, 2)
SETTINGS = {"target": "tiny"}


def answer(number: int) -> Answer:
    """An answer of a few words."""
    messages = ({"role": "user", "content": f"question {number}"},)
    return Answer(number, str(number), messages, "some words", "stop", 0.0, number)


def sample(number: int) -> Sample:
    """Its features: four tokens, two of them the prompt's, and two taps of eight values."""
    return Sample(number, 2, 0.0, torch.arange(4), torch.ones(4, 2, 8).half(), torch.ones(4, 8).half())


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    """Guards the files against any caller that forgets the lock: the folder takes it before it touches them.
    The refused one cuts no line off and writes none, and the first one goes on."""
    folder, path = tmp_path / "answers", tmp_path / "answers" / ANSWERS_FILE
    with AnswerFolder(folder, None, SETTINGS) as first:
        first.add(answer(0))
        with path.open("a") as file:
            file.write('{"half a line')
        before = path.read_bytes()
        for settings in (SETTINGS, {"target": "another"}):
            with pytest.raises(StorageError, match="another process is writing to"):
                AnswerFolder(folder, None, settings)
        assert path.read_bytes() == before
        path.write_bytes(before.removesuffix(b'{"half a line'))
        first.add(answer(1))
        assert read_answers(path) == ([answer(0), answer(1)], 0)
    with AnswerFolder(folder, None, SETTINGS) as second:
        assert second.answers == [answer(0), answer(1)]


def test_a_folder_that_is_refused_stays_free(tmp_path: Path) -> None:
    """Guards against a lock that outlives a failed opening: the next one in this process must get it."""
    with AnswerFolder(tmp_path, None, SETTINGS):
        pass
    with pytest.raises(DataError, match="other settings") as kept:  # kept: its frames live on
        AnswerFolder(tmp_path, None, {"target": "another"})
    with AnswerFolder(tmp_path, None, SETTINGS):
        assert "target" in str(kept.value)


def test_a_fault_writes_what_waits_and_frees_the_folder(tmp_path: Path) -> None:
    """Guards the answers that are finished when Ctrl-C comes, and the run that goes on from them."""
    with pytest.raises(KeyboardInterrupt), AnswerFolder(tmp_path, TAPS, SETTINGS) as store:
        store.add(answer(5), sample(5))
        assert not shard_paths(tmp_path)
        raise KeyboardInterrupt
    assert [found.prompt for path in shard_paths(tmp_path) for found in read_shard(path)] == [5]
    with AnswerFolder(tmp_path, TAPS, SETTINGS) as store:
        assert store.answers == [answer(5)]


@pytest.mark.parametrize("order", [1, -1])
def test_answers_of_prompts_and_answers_of_text_do_not_mix(tmp_path: Path, order: int) -> None:
    """Guards a folder made from prompts against `--from`, and the other way round: a key that only one of
    them records counted as equal, so answers of both got the same numbers in one folder."""
    begun, other = [{**SETTINGS, "prompts": "abc"}, {**SETTINGS, "from": "def"}][::order]
    with AnswerFolder(tmp_path, TAPS, begun) as store:
        store.add(answer(0), sample(0))
    with pytest.raises(DataError, match=r"other settings \((from, prompts|prompts, from)\)"):
        AnswerFolder(tmp_path, TAPS, other)
    with AnswerFolder(tmp_path, TAPS, begun) as store:
        assert store.answers == [answer(0)]


def test_ctrl_c_within_a_shard_loses_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the answers of a shard whose writing is interrupted: they were forgotten before it was there."""
    write = answer_folder.write_shard

    def interrupted(*given: Any) -> Path:
        monkeypatch.setattr(answer_folder, "write_shard", write)
        raise KeyboardInterrupt

    monkeypatch.setattr(answer_folder, "SHARD_SAMPLES", 2)
    monkeypatch.setattr(answer_folder, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt), AnswerFolder(tmp_path, TAPS, SETTINGS) as store:
        store.add(answer(0), sample(0))
        store.add(answer(1), sample(1))
    assert [found.prompt for path in shard_paths(tmp_path) for found in read_shard(path)] == [0, 1]
    assert read_answers(tmp_path / ANSWERS_FILE)[0] == [answer(0), answer(1)]


def test_what_half_precision_cannot_hold_is_cut() -> None:
    """Guards targets in bfloat16: float16's greatest number, rounded to bfloat16, became infinite."""
    recorder = Recorder((0,))
    rows = torch.tensor([[70000.0, -1e6, 1.0]], dtype=torch.bfloat16)
    recorder.observe(0, rows, rows)
    recorder.free(0)
    taps, hidden = recorder.take(0, 2)
    assert taps.tolist() == hidden.tolist() == [[65504.0, -65504.0, 1.0], [0.0, 0.0, 0.0]]
    assert taps.dtype == torch.float16
