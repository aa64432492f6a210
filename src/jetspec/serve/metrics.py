"""What is counted, in Prometheus' format; written by the engine's thread and the event loop."""

from __future__ import annotations

from collections.abc import Sequence as Many

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jetspec.decode.engine import Engine
from jetspec.decode.result import Result
from jetspec.decode.round import Outcome

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
_POWERS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
OUTCOMES = ("done", "refused", "full", "cancelled", "failed")


class Metrics:
    """The metrics of one server, in a registry of their own. Names and meanings: docs/serving.md."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"jetspec_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"jetspec_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"jetspec_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "HTTP requests for completions by outcome", "outcome")
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.answers = counter("answers", "Answers decoded to their end, by finish reason", "finish")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answers decoded to their end")
        self.tokens = counter("generated_tokens", "Emitted tokens by kind: accepted, bonus, plain", "kind")
        for kind in ("accepted", "bonus", "plain"):
            self.tokens.labels(kind)
        self.nodes = counter("drafted_nodes", "Drafted nodes that were verified")
        self.rounds = counter("rounds", "Rounds, one for each request in it")
        self.forwards = counter("forwards", "Target forwards of rounds, whatever the batch")
        self.tau = gauge("tau", "Tokens per request and round since the start")
        self.waiting = gauge("waiting", "Answers that wait for a place in the batch")
        self.running = gauge("running", "Answers being decoded, their prompts being read included")
        self.cache_bytes = gauge("cache_bytes", "Memory reserved for keys and values")
        self.drafting = gauge(
            "drafting", "1 while there is a draft head in use, 0 if there is none or it failed"
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "From queueing to the first token", _SECONDS
        )
        self.per_token = histogram(
            "time_per_token_seconds", "Between the first and last token, per token", _SECONDS_PER_TOKEN
        )
        self.batch = histogram("batch_size", "Requests decoded together in a round", _POWERS)
        self.round_nodes = histogram("nodes_per_round", "Drafted nodes of a round, over its batch", _POWERS)

    def count_round(self, outcomes: Many[Outcome]) -> None:
        """A round of all requests that were ready."""
        kinds = [emission.kind for outcome in outcomes for emission in outcome.emissions]
        for kind in set(kinds):
            self.tokens.labels(kind).inc(kinds.count(kind))
        nodes = sum(outcome.tree.budget for outcome in outcomes)
        self.nodes.inc(nodes)
        self.rounds.inc(len(outcomes))
        self.forwards.inc()
        self.batch.observe(len(outcomes))
        self.round_nodes.observe(nodes)

    def count_answer(self, result: Result, seconds: float) -> None:
        """An answer that was decoded to its end, `seconds` after its first token."""
        self.answers.labels(result.finish).inc()
        self.prompt_tokens.inc(result.prompt_tokens)
        if len(result.tokens) > 1:
            self.per_token.observe(seconds / (len(result.tokens) - 1))

    def look_at(self, engine: Engine) -> None:
        """How full the engine is; only for the thread that owns it."""
        self.waiting.set(engine.waiting)
        self.running.set(engine.running)
        self.cache_bytes.set(engine.cache.bytes)
        self.tau.set(engine.stats.tau)

    def text(self) -> bytes:
        """All of it, for GET /metrics."""
        return generate_latest(self.registry)
