"""What a caller may ask for: options by name, checked in one place for the library and the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from jetspec.errors import OptionError, PromptError, brief
from jetspec.sampling import Sampling
from jetspec.sequence import Limits


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `compare`; unknown ones raise OptionError.

    temperature … seed  as in `Sampling`. One seed serves a whole batch, so that a prompt has the text there
                        that it has alone: equal prompts get equal answers, and different ones share their
                        noise. For independent samples `generate` takes a list, one seed for each prompt.
    max_tokens          most tokens to emit (256)
    stop                a text or several that end the output and are not part of it
    ignore_eos          go on after the end-of-text token
    raw                 use a text as it is instead of putting it into the chat template as the user's message
    system              the system message that goes before a text prompt
    thinking            the chat template's `enable_thinking`; None leaves its default
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | Many[int]
    max_tokens: int
    stop: str | Many[str]
    ignore_eos: bool
    raw: bool
    system: str | None
    thinking: bool | None


_SAMPLING = frozenset(field.name for field in fields(Sampling))


@dataclass(frozen=True)
class Request:
    """Options, checked and sorted by who needs them; made before a model is loaded.

    seeds   those of a batch, one for each prompt; None where `sampling` holds the seed of all
    """

    sampling: Sampling
    limits: Limits
    raw: bool
    system: str | None
    thinking: bool | None
    seeds: tuple[int, ...] | None = None

    def samplings(self, prompts: int | None = None) -> list[Sampling]:
        """How each of the prompts of a batch is sampled; None is a single prompt.

        Raises OptionError if there are seeds in another number.
        """
        if self.seeds is None:
            return [self.sampling] * (1 if prompts is None else prompts)
        if prompts is None:
            raise OptionError(
                "a list of seeds goes with a list of prompts, one for each; give one seed for one prompt"
            )
        if len(self.seeds) != prompts:
            raise OptionError(
                f"seed lists {len(self.seeds)} seeds for {prompts} prompts; give one for each, or one for all"
            )
        return [replace(self.sampling, seed=seed) for seed in self.seeds]

    @staticmethod
    def of(options: Options) -> Request:
        """Check options. Raises OptionError naming the one at fault."""
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            valid = ", ".join(Options.__annotations__)
            raise OptionError(f"unknown option {unknown[0]!r}; valid: {valid}")
        stop: Any = options.get("stop", ())
        if not isinstance(stop, (str, Many)) or isinstance(stop, bytes):
            raise OptionError(f"stop must be a text or a list of texts, got {brief(stop)}")
        raw, system, thinking = options.get("raw", False), options.get("system"), options.get("thinking")
        if not isinstance(raw, bool):
            raise OptionError(f"raw must be True or False, got {brief(raw)}")
        if system is not None and not isinstance(system, str):
            raise OptionError(f"system must be a text or None, got {brief(system)}")
        if thinking is not None and not isinstance(thinking, bool):
            raise OptionError(f"thinking must be True, False or None, got {brief(thinking)}")
        for name, value in (("system", system), ("thinking", thinking)):
            if raw and value is not None:
                raise OptionError(
                    f"{name} is part of the chat template, which raw leaves out; choose one of them"
                )
        given: dict[str, Any] = {name: value for name, value in options.items() if name in _SAMPLING}
        seeds: tuple[int, ...] | None = None
        if isinstance(given.get("seed"), Many) and not isinstance(given["seed"], (str, bytes)):
            seeds = tuple(Sampling(seed=seed).seed for seed in given.pop("seed"))
        limits = Limits(
            max_tokens=options.get("max_tokens", 256),
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=options.get("ignore_eos", False),
        )
        return Request(Sampling(**given), limits, raw, system, thinking, seeds)


MAX_TRAIN_SEED = 2**32 - 1  # prompts and steps are counted up from it


def check_least(least: float, **values: float | None) -> None:
    """Raise OptionError for the first value that is below `least`, or not finite; None is not set."""
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:  # NaN fails every comparison
            raise OptionError(f"{name} must be a number of at least {least:g}, got {brief(value)}")


def check_train_seed(seed: int) -> None:
    """Raise OptionError unless the seed is one that training can count up from."""
    if not 0 <= seed <= MAX_TRAIN_SEED:
        raise OptionError(f"seed must be an integer from 0 to {MAX_TRAIN_SEED}, got {brief(seed)}")


def check_text(text: str, raw: bool = False) -> None:
    """Raise PromptError if a text prompt is empty; blanks are a prompt only if it is used raw."""
    if not (text if raw else text.strip()):
        raise PromptError("the prompt is empty: give at least one word")
