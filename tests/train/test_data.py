"""What a batch says: roots, parents, teachers and weights, compared with the target itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetspec.errors import DataError
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from jetspec.train.data import Batch, Corpus, batches_at
from jetspec.train.features import read_shard, shard_paths, write_shard
from tests.draft.tiny import TAPS, tiny_answers, tiny_target

DEPTH = 4
STEP: dict[str, Any] = {"seed": 3, "answers": 4, "anchors": 6, "weights": torch.ones(DEPTH), "part": 3}


@pytest.fixture(autouse=True)
def _one_thread(_same_start: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Answers of the target with its features, greedy and sampled ones."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("answers")
    return tiny_answers(target, folder, tokens=9, temperatures=((0.0, 0.5), (1.0, 0.5)))


def identify(corpus: Corpus, batch: Batch, row: int) -> list[int]:
    """Tokens of the answer that a row of a batch was made of, found by its taps."""
    for entry in corpus.training:
        taps = corpus.taps_of(entry)
        if torch.equal(taps, batch.taps[row, : taps.shape[0]]) and not batch.taps[row, taps.shape[0] :].any():
            return corpus.tokens(entry).tolist()
    raise AssertionError("a row of the batch is no answer of the corpus")


def test_what_a_slot_learns_is_the_targets_own_law(target: Target, corpus: Corpus) -> None:
    """Guards every off-by-one of training: slot k of the block at root a learns the target's law of token
    a + k given all tokens before it, its parent is token a + k - 1, and the last taps are those of row a - 1.

    Logits of size up to 40 come from states rounded to float16 (1e-3), so they may differ by 0.1; laws of
    neighbouring tokens differ by 10."""
    matrix = target.transformer.output_matrix
    supervised = 0
    for batch in batches_at(corpus, 0, **STEP):
        for n in range(batch.anchors.shape[0]):
            tokens = identify(corpus, batch, n)
            cache = target.new_cache()
            cache.add(0)
            plan = chunk([(0, tokens)], cache, logits=True)
            output = target.forward(plan, cache, TAPS)
            assert output.logits is not None and output.taps is not None
            for a, anchor in enumerate(batch.anchors[n].tolist()):
                assert int(batch.roots[n, a]) == tokens[anchor]
                last = output.taps[anchor - 1] if anchor else torch.zeros(len(TAPS) * 64)
                assert torch.allclose(batch.last_taps[n, a], last, rtol=2e-3, atol=2e-3)
                for k in range(1, DEPTH + 1):
                    exists = anchor + k < len(tokens)
                    assert bool(batch.weight[n, a, k - 1]) == exists
                    if not exists:
                        continue
                    supervised += 1
                    assert int(batch.labels[n, a, k - 1]) == tokens[anchor + k]
                    assert int(batch.parents[n, a, k - 1]) == tokens[anchor + k - 1]
                    law = matrix @ batch.teacher[int(batch.teacher_row[n, a, k - 1])]
                    assert (law - output.logits[anchor + k - 1]).abs().max() < 0.1
    assert supervised > 30


def test_every_anchor_is_supervised_and_lies_in_the_answer(corpus: Corpus) -> None:
    """Guards against anchors that learn nothing or that learn the prompt (TorchSpec #129)."""
    starts = {tuple(corpus.tokens(entry).tolist()): entry.prompt_len for entry in corpus.training}
    for step in range(8):
        for batch in batches_at(corpus, step, **STEP):
            assert bool((batch.weight[:, :, 0] > 0).all())
            for n in range(batch.anchors.shape[0]):
                first = starts[tuple(identify(corpus, batch, n))] - 1
                assert int(batch.anchors[n].min()) >= first
                assert len(set(batch.anchors[n].tolist())) == STEP["anchors"]


def test_a_batch_depends_on_seed_and_step_alone(corpus: Corpus) -> None:
    """Guards exact resume: whatever was drawn before, a step sees the same batch; other steps and seeds see
    others, and an epoch sees no answer twice."""
    torch.manual_seed(1)
    first = list(batches_at(corpus, 5, **STEP))
    torch.manual_seed(2)
    list(batches_at(corpus, 4, **STEP))
    again = list(batches_at(Corpus([corpus.training[0].path.parent], holdout=4), 5, **STEP))
    for a, b in zip(first, again, strict=True):
        for field in Batch.__dataclass_fields__:
            ours, theirs = getattr(a, field), getattr(b, field)
            same = ours == theirs if ours is None or field == "entries" else torch.equal(ours, theirs)
            assert same, field
    for other in ({"step": 6}, {"step": 5, "seed": 4}):
        batches = list(batches_at(corpus, **{**STEP, **other}))  # type: ignore[arg-type]
        assert any(not torch.equal(a.anchors, b.anchors) for a, b in zip(first, batches, strict=True))
    per_epoch = len(corpus.training) // STEP["answers"]
    seen = [
        tuple(identify(corpus, batch, n))
        for step in range(per_epoch)
        for batch in batches_at(corpus, step, **STEP)
        for n in range(batch.anchors.shape[0])
    ]
    assert len(seen) == len(set(seen)) == per_epoch * STEP["answers"]


def test_held_out_answers_are_never_trained_on(corpus: Corpus) -> None:
    """Guards validation against a leak."""
    training = {(entry.path, entry.start) for entry in corpus.training}
    assert len(corpus.held_out) == 3
    assert not training & {(entry.path, entry.start) for entry in corpus.held_out}


@pytest.mark.parametrize(
    ("temperatures", "expected"),
    [
        ([1, 1, 0, 1, 1, 0, 1], [2, 4]),  # the first greedy answer is exchanged for answer 0
        ([1, 1, 0, 1, 0, 1, 0], [0, 4]),  # one is held out as it is
        ([1, 1, 0], [2]),
        ([1, 1, 1, 1, 1], [0, 4]),
    ],
)
def test_a_greedy_answer_is_held_out(
    target: Target, tmp_path: Path, temperatures: list[int], expected: list[int]
) -> None:
    """Guards the tau of small runs: with 41 answers the two that were held out could both be sampled ones."""
    tiny_answers(target, tmp_path, prompts=len(temperatures), tokens=4)
    (path,) = shard_paths(tmp_path)
    samples = [
        replace(sample, prompt=n, temperature=float(temperature))
        for n, (sample, temperature) in enumerate(zip(read_shard(path), temperatures, strict=True))
    ]
    write_shard(tmp_path, 0, samples, TAPS)
    starts = [sum(len(sample.tokens) for sample in samples[:n]) for n in range(len(samples))]
    found = Corpus([tmp_path], holdout=4)
    assert [starts.index(entry.start) for entry in found.held_out] == expected
    assert len(found.training) == len(temperatures) - len(expected)
    before = Corpus([tmp_path], holdout=4, hold_greedy=False)
    assert [starts.index(entry.start) for entry in before.held_out] == list(range(0, len(temperatures), 4))


def test_draft_vocabulary_is_the_most_frequent_ids(corpus: Corpus) -> None:
    """Guards the vocabulary against counting prompts, losing order, or leaving out ids that come up."""
    counts = torch.zeros(200, dtype=torch.long)
    for entry in corpus.training:
        counts += torch.bincount(corpus.tokens(entry)[entry.prompt_len :], minlength=200)
    vocab = corpus.frequent_ids(20, 200)
    assert vocab.tolist() == sorted(set(vocab.tolist())) and len(vocab) == 20
    rest = counts.clone()
    rest[vocab] = 0
    assert int(counts[vocab].min()) >= int(rest.max())
    assert torch.equal(corpus.frequent_ids(200, 200), torch.arange(200))


def test_corpus_keeps_to_the_shards_it_began_with(target: Target, tmp_path: Path) -> None:
    """Guards exact resume while more answers are being written, and says so when answers have gone."""
    whole = tiny_answers(target, tmp_path, prompts=70, tokens=3)
    assert whole.shards == [2]
    early = Corpus([tmp_path], shards=[1])
    assert len(early.training) + len(early.held_out) == 64
    with pytest.raises(DataError, match="are gone"):
        Corpus([tmp_path], shards=[3])


def test_a_head_may_read_some_of_the_recorded_taps(corpus: Corpus) -> None:
    """Guards heads with fewer taps on the same answers: the right layers in the right order, in batches as
    well; a layer that was not recorded is named, and the corpus itself stays as it was."""
    entry = corpus.training[0]
    whole = corpus.taps_of(entry).view(entry.length, len(TAPS), 64)
    for taps in ((TAPS[0], TAPS[2]), (TAPS[1],), TAPS):
        chosen = corpus.with_taps(taps)
        assert chosen.taps == taps and corpus.taps == TAPS
        found = chosen.taps_of(entry)
        assert torch.equal(found, whole[:, [TAPS.index(layer) for layer in taps]].flatten(1))
        batch = next(iter(batches_at(chosen, 0, **STEP)))
        assert batch.taps.shape[-1] == batch.last_taps.shape[-1] == len(taps) * 64
    assert corpus.with_taps(()).taps_of(entry).shape == (entry.length, 0)
    with pytest.raises(DataError, match=r"layers \[0, 1, 2\], but the head reads layer 3"):
        corpus.with_taps((0, 3))


def broken_shards() -> dict[str, Any]:
    """Changes of a shard's tensors, each of which breaks it."""

    def without(name: str) -> Any:
        return lambda x: x.pop(name)

    def changed(name: str, change: Any) -> Any:
        return lambda x: x.update({name: change(x[name]).contiguous()})

    def first(value: float) -> Any:
        return lambda x: torch.cat([torch.tensor([value]).to(x.dtype), x[1:]])

    return {
        **{f"no-{name}": without(name) for name in ("tokens", "taps", "hidden", "lengths")},
        **{f"few-{name}": changed(name, lambda x: x[:-1]) for name in ("tokens", "taps", "hidden")},
        "few-temperatures": changed("temperatures", lambda x: x[:-1]),
        "nan-temperature": changed("temperatures", first(float("nan"))),
        "no-prompt": changed("prompt_lens", first(0)),
        "long-prompt": changed("prompt_lens", first(1000)),
        "negative-length": changed("lengths", first(-4)),
        "negative-id": changed("tokens", first(-1)),
        "float-tokens": changed("tokens", lambda x: x.float()),
        "flat-hidden": changed("hidden", lambda x: x.flatten()),
        "narrow-taps": changed("taps", lambda x: x[:, :-1]),
    }


@pytest.mark.parametrize("fault", broken_shards())
def test_shards_that_lie_are_named(target: Target, tmp_path: Path, fault: str) -> None:
    """Guards against a traceback deep in training and, where rows are missing, against training silently on
    those of other answers; the folder's own reader refuses them too."""
    tiny_answers(target, tmp_path, prompts=4, tokens=3)
    (path,) = shard_paths(tmp_path)
    tensors = load_file(path)
    broken_shards()[fault](tensors)
    save_file(tensors, path, {"taps": json.dumps(TAPS)})
    with pytest.raises(DataError, match=rf"{path.name} is not a feature shard .*; delete it and run again"):
        Corpus([tmp_path])
    with pytest.raises(DataError, match=path.name):
        tiny_answers(target, tmp_path, prompts=4, tokens=3)


@pytest.mark.parametrize("taps", ['{"0": 1}', '["a"]', "5", "[true]", "[-1]", "no JSON", "[0, 1]"])
def test_shards_without_proper_taps_are_named(target: Target, tmp_path: Path, taps: str) -> None:
    """Guards the metadata: keys of an object were taken for layers."""
    tiny_answers(target, tmp_path, prompts=4, tokens=3)
    (path,) = shard_paths(tmp_path)
    save_file(load_file(path), path, {"taps": taps})
    with pytest.raises(DataError, match=rf"{path.name} is not a feature shard \(.*taps are"):
        Corpus([tmp_path])


def test_ids_and_widths_of_another_target_are_named(target: Target, tmp_path: Path) -> None:
    """Guards against an index error of the embedding, and against rows that cannot be stacked."""
    corpus = tiny_answers(target, tmp_path / "a", prompts=4, tokens=3)
    largest = max(int(corpus.tokens(entry).max()) for entry in corpus.training + corpus.held_out)
    corpus.check_ids(largest + 1)
    with pytest.raises(
        DataError, match=rf"features-00000.* holds the token id {largest}, but the target has"
    ):
        corpus.check_ids(largest)
    tiny_answers(tiny_target(hidden_size=32), tmp_path / "b", prompts=4, tokens=3)
    with pytest.raises(DataError, match=r"b/features-00000.* holds states of width 32, but .* of width 64"):
        Corpus([tmp_path / "a", tmp_path / "b"])


def test_a_single_answer_is_said_to_be_held_out(target: Target, tmp_path: Path) -> None:
    """Guards the message: one answer of 24 tokens was said to be shorter than 2."""
    tiny_answers(target, tmp_path, prompts=2)
    (path,) = shard_paths(tmp_path)
    samples = list(read_shard(path))[:1]
    write_shard(tmp_path, 0, samples, TAPS)
    with pytest.raises(DataError, match=r"a single answer .* held out for validation; answer more prompts"):
        Corpus([tmp_path])


def test_damaged_shards_are_named(target: Target, tmp_path: Path) -> None:
    """Guards against a traceback or, worse, training on half a file."""
    with pytest.raises(DataError, match="jetspec answers"):
        Corpus([tmp_path])
    tiny_answers(target, tmp_path, prompts=4, tokens=3)
    (path,) = shard_paths(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(DataError, match=path.name):
        Corpus([tmp_path])


def test_a_folder_given_twice_is_refused(target: Target, tmp_path: Path) -> None:
    """Guards validation: of a folder that was given twice the held-out answers were trained on, as those of
    the other time."""
    tiny_answers(target, tmp_path / "a", prompts=4, tokens=3)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for again in (tmp_path / "a", tmp_path / "a" / ".." / "a", tmp_path / "b"):
        with pytest.raises(DataError, match=r"is given twice; give each folder once"):
            Corpus([tmp_path / "a", again])


def test_answers_without_features_name_the_way_to_them(tmp_path: Path) -> None:
    """Guards the message about a folder of `--text-only` or an endpoint, which said it had none."""
    (tmp_path / "answers.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=rf"jetspec answers --from {tmp_path}/answers\.jsonl"):
        Corpus([tmp_path])
