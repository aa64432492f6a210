"""Results as lines, as table cells and as JSON values."""

from __future__ import annotations

import math
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

from jetspec import __version__

if TYPE_CHECKING:
    from jetspec.api import Comparison, LanguageModel, Result
    from jetspec.config import Request
    from jetspec.decode.compare import Divergence
    from jetspec.decode.stats import Stats
    from jetspec.target.target import Target

_SHORT = 16  # rounds; auto looks at a text again after 8 plain ones, and then more seldom
_ROUND_PHASES = ("draft", "build", "verify", "commit")


def closing_lines(result: Result, model: LanguageModel) -> list[str]:
    """Speed, tau and the split of time of one result."""
    stats = result.stats
    rounds = _rounds(stats, _follows(model))
    head = f"{stats.tokens} tokens · {stats.tokens_per_second:.1f} tok/s · {rounds}"
    total = stats.decode_seconds or math.nan
    split = " · ".join(
        f"{name} {_per_round(stats, name):.2f} ms ({stats.seconds[name] / total:.0%})"
        for name in _ROUND_PHASES
    )
    prefill = f"prefill {1e3 * stats.seconds['prefill']:.0f} ms for {result.prompt_tokens} tokens"
    return [head, f"per round: {split} · {prefill}"]


def _per_round(stats: Stats, phase: str) -> float:
    """Milliseconds of a phase per round."""
    return 1e3 * stats.seconds[phase] / max(1, stats.rounds)


def _follows(model: LanguageModel) -> bool:
    """Whether auto decides for a head that there is."""
    from jetspec.budget.choose import AUTO

    return model.budget == AUTO and model.drafter.name != "off"


def _rounds(stats: Stats, auto: bool = False) -> str:
    """auto: whether a text without drafts is one for which `auto` chose none."""
    if not stats.nodes:
        why = ": auto found drafting not worth it here" if auto else ""
        short = " (short text)" if auto and stats.rounds < _SHORT else ""
        return f"plain decoding, {stats.rounds} rounds{why}{short}"
    share = stats.accepted / stats.tokens if stats.tokens else 0.0
    return f"τ {stats.tau:.2f} over {stats.rounds} rounds · {share:.0%} of the tokens were drafted"


def comparison_lines(comparison: Comparison, model: LanguageModel) -> list[str]:
    """Both speeds, the speedup, and whether the texts agree."""
    sides = (("plain", comparison.plain, False), ("speculative", comparison.speculative, _follows(model)))
    lines = [
        f"{name:<11}  {result.stats.tokens:>5} tokens  {result.stats.tokens_per_second:>8.1f} tok/s"
        f"  {_rounds(result.stats, auto)}"
        for name, result, auto in sides
    ]
    first = comparison.divergence
    verdict = "the texts are identical" if first is None else divergence_text(first, model.target)
    return [*lines, f"speedup {comparison.speedup:.2f}×; {verdict}"]


def divergence_text(first: Divergence, target: Target) -> str:
    """Where two texts part, and whether rounding can be the reason."""
    from jetspec.decode.compare import tie_below

    bound = tie_below(target)
    exact = "NOT a numeric tie: there is none where the compiled code runs"
    over = f"NOT a numeric tie, which ends at {bound:g}" if bound else exact
    why = f"a numeric tie, below {bound:g}" if first.tie else over
    return (
        f"the texts differ at token {first.place + 1}: plain {token_text(target, first.plain)},"
        f" speculative {token_text(target, first.other)}; plain decoding's top-two gap there is"
        f" {first.gap:.2g}, {why}"
    )


def token_text(target: Target, token: int | None) -> str:
    """One token in quotes, with everything invisible escaped."""
    from jetspec.tree.draw import quote

    return "nothing" if token is None else quote(target.tokenizer.decode([token], skip_special=False))


def result_values(result: Result) -> dict[str, Any]:
    """A result for JSON."""
    tokens = [{"id": token, "kind": kind} for token, kind in zip(result.tokens, result.kinds, strict=True)]
    stats = result.stats
    per_round = {name: _per_round(stats, name) for name in _ROUND_PHASES}
    return {
        "text": result.text,
        "finish": result.finish,
        "prompt_tokens": result.prompt_tokens,
        "tokens": tokens,
        "stats": {
            **stats.as_dict(),
            "accepted_share": stats.accepted / stats.tokens if stats.tokens else 0.0,
            "ms_per_round": per_round,
        },
    }


def divergence_values(first: Divergence | None) -> dict[str, Any] | None:
    """A divergence for JSON."""
    return None if first is None else first.as_dict()


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """A comparison for JSON."""
    return {
        "plain": result_values(comparison.plain),
        "speculative": result_values(comparison.speculative),
        "identical": comparison.identical,
        "divergence": divergence_values(comparison.divergence),
        "speedup": comparison.speedup,
    }


def settings_values(model: LanguageModel, head: str, request: Request) -> dict[str, Any]:
    """Everything that the outcome depends on, for JSON."""
    from dataclasses import asdict

    limits = request.limits
    return {
        **model_values(model, head),
        "sampling": asdict(request.sampling),
        "max_tokens": limits.max_tokens,
        "stop": list(limits.stop_strings),
        "raw": request.raw,
        "system": request.system,
    }


def model_values(model: LanguageModel, head: str) -> dict[str, Any]:
    """Target, drafter and machine, for JSON."""
    import torch

    target = model.target
    return {
        "model": target.name,
        "head": head,
        "drafter": model.drafter.name,
        "budget": model.budget,
        "grow": model.grow,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"jetspec": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "transformers", "tokenizers"):
        found[name] = metadata.version(name)
    return found
