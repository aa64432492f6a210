"""The JSON objects of answers, whole and in chunks, as OpenAI has them; `jetspec` is our own addition."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as Many
from typing import Any

from jetspec.decode.result import Result
from jetspec.decode.stats import Stats
from jetspec.sequence import Emission
from jetspec.serve.prepare import Job


class Answer:
    """Writes the objects of one request.

    model: the name that clients know.
    """

    def __init__(self, job: Job, model: str) -> None:
        self._job, self._model = job, model
        self._id = ("chatcmpl-" if job.chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._begun: set[int] = set()  # choices of which something was sent

    def whole(self, results: Many[Result]) -> dict[str, Any]:
        """The object of a request that does not stream; results in the order of the choices."""
        choices = []
        for index, (result, echo) in enumerate(zip(results, self._job.echoes, strict=True)):
            if self._job.chat:
                said = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
            else:
                said = {"text": echo + result.text}  # type: ignore[dict-item]
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": result.finish})
        name = "chat.completion" if self._job.chat else "text_completion"
        return {**self._head(name), "choices": choices, **self.closing(results)}

    def chunk(self, index: int, emissions: Many[Emission], result: Result | None) -> dict[str, Any] | None:
        """What a choice has emitted since its last chunk; with its result the last one. None if there is
        nothing to say.
        """
        text = "".join(emission.text for emission in emissions)
        first = index not in self._begun
        if not (text or result or self._job.details or (first and self._job.echoes[index])):
            return None
        self._begun.add(index)
        if first:
            text = self._job.echoes[index] + text
        said: dict[str, Any]
        if self._job.chat:
            said = {"delta": {"role": "assistant"} if first else {}}
            if text or first:
                said["delta"]["content"] = text
        else:
            said = {"text": text}
        choice = {
            "index": index,
            **said,
            "logprobs": None,
            "finish_reason": result.finish if result else None,
        }
        own: dict[str, Any] = {}
        if self._job.details:
            own["kinds"] = [emission.kind for emission in emissions]
            own["texts"] = [emission.text for emission in emissions]
        if result is not None:
            own |= self._own([result], self._seed(index))
        return {**self._chunk_head, "choices": [choice], **({"jetspec": own} if own else {})}

    def last_chunk(self, results: Many[Result]) -> dict[str, Any] | None:
        """The chunk without choices that has the usage; None unless it was asked for."""
        if not self._job.include_usage:
            return None
        return {**self._chunk_head, "choices": [], **self.closing(results)}

    def closing(self, results: Many[Result]) -> dict[str, Any]:
        """The usage of a whole request, and what decoding says about it."""
        pooled = _pooled(results)
        completion = sum(len(result.tokens) for result in results)
        usage = {
            "prompt_tokens": self._job.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._job.prompt_tokens + completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": pooled.accepted,
                "rejected_prediction_tokens": pooled.nodes - pooled.accepted,
            },
        }
        return {"usage": usage, "jetspec": self._own(results, self._job.seed)}

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._model}

    @property
    def _chunk_head(self) -> dict[str, Any]:
        usage = {"usage": None} if self._job.include_usage else {}
        return {**self._head("chat.completion.chunk" if self._job.chat else "text_completion"), **usage}

    def _own(self, results: Many[Result], seed: int | None) -> dict[str, Any]:
        pooled = _pooled(results)
        return {"tau": round(pooled.tau, 4), "rounds": pooled.rounds, "seed": seed}

    def _seed(self, index: int) -> int | None:
        return None if self._job.seed is None else self._job.choices[index].sampling.seed


def _pooled(results: Many[Result]) -> Stats:
    """The counters of all; their seconds overlap, and mean nothing here."""
    pooled = Stats()
    for result in results:
        pooled.add(result.stats)
    return pooled
