"""Which turns of the training prompts are to be answered, and in which order.

A conversation is answered turn by turn: behind the target's own answer comes the user's next turn. Each turn
is an answer of its own, with the conversation so far as its prompt. Where an answer was cut off or is empty
the conversation ends, because nobody would go on from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

from jetspec.train.answer_folder import Progress
from jetspec.train.answers import Answer
from jetspec.train.prompts import Prompt


def prompts_hash(prompts: Many[Prompt]) -> str:
    """Tells prompt sets apart, because folders know their turns by number only."""
    texts = [[prompt.messages, prompt.later] if prompt.later else prompt.messages for prompt in prompts]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def turn_numbers(prompts: Many[Prompt]) -> list[int]:
    """The number of each prompt's first turn; its later turns follow. Without later turns: 0, 1, 2, …"""
    return [0, *accumulate(1 + len(prompt.later) for prompt in prompts)][: len(prompts)]


@dataclass(frozen=True)
class Turn:
    """A user turn to be answered: the `index`-th of prompt `prompt`, number `number` of all."""

    prompt: int
    index: int
    number: int
    messages: tuple[dict[str, str], ...]

    def then(self, answer: str, later: str) -> Turn:
        """The turn that follows an answer."""
        said = ({"role": "assistant", "content": answer}, {"role": "user", "content": later})
        return Turn(self.prompt, self.index + 1, self.number + 1, (*self.messages, *said))


def next_turns(
    prompts: Many[Prompt], part: tuple[int, int], raw: bool, done: dict[int, Answer], progress: Progress
) -> Iterator[Turn]:
    """The first turn of each conversation that is not in `done`; counts conversations that end there."""
    numbers = turn_numbers(prompts)
    for n in range(part[0], len(prompts), part[1]):
        turn: Turn | None = Turn(n, 0, numbers[n], prompts[n].messages)
        while turn is not None and turn.number in done:
            turn = follow(prompts[n], turn, done[turn.number], raw, progress)
        if turn is not None:
            yield turn


def follow(prompt: Prompt, turn: Turn, answer: Answer, raw: bool, progress: Progress) -> Turn | None:
    """The turn after an answered one, None at the end of the conversation."""
    if raw or turn.index >= len(prompt.later):
        return None
    if answer.finish != "stop" or not answer.text.strip():
        progress.cut += 1
        return None
    return turn.then(answer.text, prompt.later[turn.index])
