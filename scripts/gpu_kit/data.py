"""What heads are trained on: the target's answers, and its states at every token of them."""

from __future__ import annotations

import gzip
import time
from typing import Any

from gpu_kit.parts import write_parts
from gpu_kit.state import Kit

GREEDY_FIRST = ((0.0, 0.6), (0.7, 0.15), (1.0, 0.25))
SAMPLED = ((0.7, 0.4), (1.0, 0.6))  # of the later rounds: greedy answers would only come again


def make_answers(kit: Kit) -> None:
    """Answer prompts until there are enough tokens; several times with other seeds if they run out."""
    from jetspec.train.prompts import load_prompts
    from jetspec.train.responses import AnswerOptions, answer_prompts

    options = kit.options
    if options.answers:
        kit.clock.say(f"answers are given: {', '.join(map(str, options.answers))}")
        return
    sources = [*options.prompts, *_own_prompts(kit)]
    if not sources:
        raise SystemExit("no prompts: give --prompts FILE or --own-prompts COUNT")
    found = load_prompts(sources, seed=options.seed, exclude=options.exclude)
    kit.clock.say("; ".join(line.strip() for line in found.report()))
    done, turn = 0, 0
    while done < options.tokens and turn < 8:
        wanted = AnswerOptions(
            tokens=options.tokens - done,
            max_tokens=options.max_tokens,
            temperatures=SAMPLED if turn else GREEDY_FIRST,
            batch=options.batch,
            seed=options.seed + turn * len(found.prompts),  # no two answers share a seed
            features=False,
        )
        folder = kit.work / f"answers-{turn}"
        start, before = time.monotonic(), None

        def watch(progress: Any) -> None:
            nonlocal before
            before = progress.tokens if before is None else before
            kit.clock.check()

        progress = answer_prompts(kit.target, found.prompts, folder, (), wanted, watch)
        made, spent = progress.tokens - (before or 0), time.monotonic() - start
        kit.clock.say(f"{folder}: {made} tokens in {spent:.1f} s; " + "; ".join(progress.report()))
        done, turn = done + progress.tokens, turn + 1
        if not progress.tokens:
            break
    if not (kit.options.out / "answers.jsonl.gz.json").exists():
        text = b"".join(path.read_bytes() for path in kit.texts())
        write_parts(gzip.compress(text), kit.options.out, "answers.jsonl.gz")


def _own_prompts(kit: Kit) -> list[str]:
    """The file of prompts that the target writes itself, if --own-prompts asks for some."""
    from jetspec.train.prompts import load_exclusion
    from jetspec.train.self_instruct import SelfOptions, write_prompts

    options = kit.options
    if not options.own_prompts:
        return []
    path = kit.work / "own-prompts.jsonl"
    wanted = SelfOptions(count=options.own_prompts, seed=options.seed, batch=options.batch)
    counts = write_prompts(kit.target, path, wanted, load_exclusion(options.exclude), kit.clock.check)
    kit.clock.say("; ".join(line.strip() for line in counts.report()))
    return [str(path)]


def make_features(kit: Kit) -> None:
    """Compute what heads are trained on from the text."""
    from jetspec.train.answers import read_answers
    from jetspec.train.replay import replay_answers

    found = [answer for path in kit.texts() for answer in read_answers(path)[0]]
    if not found:
        raise SystemExit("there are no answers; run --step answers first")
    start = time.monotonic()
    done = replay_answers(
        kit.target, found, kit.work / "features", kit.taps(), kit.clock.check, rows=kit.options.rows
    )
    kit.clock.say(
        f"features of {done.answered} answers in {time.monotonic() - start:.1f} s; {done.tokens} tokens"
    )
