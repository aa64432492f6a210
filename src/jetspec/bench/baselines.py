"""Outside baselines in the same run: transformers' `generate`, its prompt lookup, and assisted generation.

They are greedy, one prompt at a time, not compiled, in the target's dtype, on the CPU or the target's device.
The decode clock runs from the first new token, which comes with prefill, to the last; the first one is in
`prefill` and not in `clocked`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from jetspec.bench.clock import Measured
from jetspec.errors import ModelError, OptionError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.loading import read_model
from jetspec.target.target import Target

LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens, the value of transformers' own documentation


class Library:
    """The target once more, as transformers loads it, and the assistant if there is one; loaded when first
    needed.

    model, assistant: as for `--model`. Raises OptionError if the assistant has another tokenizer.
    """

    def __init__(self, target: Target, model: str, assistant: str | None) -> None:
        self.target, self._name, self._assistant_name = target, model, assistant
        self._models: dict[str, Any] = {}
        if assistant is not None:
            self._check(assistant)

    def _check(self, assistant: str) -> None:
        from jetspec.target.tokenizer import Tokenizer

        if Tokenizer(read_model(assistant).tokenizer_dir).hash != self.target.tokenizer.hash:
            raise OptionError(
                f"--assistant {assistant} has another tokenizer than {self._name}; "
                "give a smaller model of the same family"
            )

    def model(self) -> Any:
        """The target, for plain greedy decoding: `generate` would fill what it is not told from the model's
        generation_config.json, penalties and beams included, whichever configuration is handed to it.
        """
        from transformers import GenerationConfig

        loaded = self._load(self._name)
        loaded.generation_config = GenerationConfig()
        return loaded

    def options(self, name: str) -> dict[str, Any]:
        """What method `name` hands to `generate`. Raises OptionError if it needs an assistant that is not
        there."""
        if name == "hf-lookup":
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        if name == "hf-assisted":
            if self._assistant_name is None:
                raise OptionError("no assistant: give a smaller model with --assistant")
            return {"assistant_model": self._load(self._assistant_name)}
        return {}

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end an answer in our engine."""
        return sorted(self.target.tokenizer.eos_ids | frozenset(self.target.config.eos_ids))

    def _load(self, name: str) -> Any:
        if name not in self._models:
            folder = read_model(name).tokenizer_dir
            with _quiet():
                from transformers import AutoModelForCausalLM

                try:
                    model = AutoModelForCausalLM.from_pretrained(
                        folder, dtype=self.target.dtype, local_files_only=True
                    )
                except Exception as error:  # it has its own exception for everything that can be wrong
                    reason = " ".join(str(error).split())
                    raise ModelError(
                        f"transformers cannot load {name} ({reason}); leave the hf- methods out"
                    ) from error
            self._models[name] = model.eval().to(self.target.device)
        return self._models[name]


class LibraryRunner:
    """Decodes a group of one prompt in a single step."""

    def __init__(self, library: Library, name: str) -> None:
        self._model, self._options = library.model(), library.options(name)
        self._stop_ids = library.stop_ids
        self._prompt: list[int] | None = None
        self._limits = Limits()
        self._emitted: list[int] = []
        self._clock = _Clock()

    def start(self, prompts: Many[Many[int]], sampling: Sampling, limits: Limits) -> None:
        """Note the prompt; `generate` prefills by itself."""
        assert len(prompts) == 1 and sampling == Sampling(seed=sampling.seed), "greedy, one prompt at a time"
        self._prompt, self._limits, self._emitted = list(prompts[0]), limits, []

    @property
    def running(self) -> bool:
        """Whether `step` is still to come."""
        return self._prompt is not None

    @property
    def emitted(self) -> int:
        """Tokens of the answer; 0 before the step."""
        return len(self._emitted)

    def step(self) -> None:
        """The whole answer."""
        assert self._prompt is not None
        most = self._limits.max_tokens
        ends: dict[str, Any] = {"eos_token_id": self._stop_ids or None}
        if self._limits.ignore_eos:
            ends["min_new_tokens"] = most
        ids = torch.tensor([self._prompt], device=self._model.device)
        self._clock = _Clock(len(self._prompt))
        with torch.inference_mode(), _quiet():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=most,
                pad_token_id=0,
                streamer=self._clock,
                **ends,
                **self._options,
            )
        self._emitted = output[0, len(self._prompt) :].tolist()
        self._prompt = None

    def finish(self) -> tuple[Measured, list[list[int]]]:
        """From the times at which tokens came by."""
        times, counts = self._clock.times, self._clock.counts
        gaps = [later - earlier for earlier, later in pairwise(times)]
        ended = bool(self._emitted) and self._emitted[-1] in self._stop_ids
        measured = Measured(
            tokens=[len(self._emitted)],
            rounds=[len(counts)],
            finish=["stop" if ended and not self._limits.ignore_eos else "length"],
            seconds=times[-1] - times[0],
            clocked=len(self._emitted) - min(counts[0], len(self._emitted)),
            prefill=times[0] - self._clock.start,
            steps=len(counts),
            step_ms=1e3 * statistics.median(gaps) if gaps else 0.0,
            accepted=sum(counts) - len(counts),
        )
        return measured, [self._emitted]

    def abort(self) -> None:
        """Nothing is held."""
        self._prompt = None


class _Clock:
    """A streamer for `generate`: notes when new tokens come by, and how many."""

    def __init__(self, prompt_len: int = 0) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self._prompt_len = prompt_len
        self._seen_prompt = False
        self.start = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then the tokens of each forward."""
        now = time.perf_counter()
        if not self._seen_prompt:
            assert value.numel() == self._prompt_len
            self._seen_prompt = True
            self.start = now
            return
        self.times.append(now)
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing to do."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal."""
    from transformers.utils import logging

    before: int = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
