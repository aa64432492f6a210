"""Where the time of a round goes, by phase and by operator, beside what the machine could do.

Each operator has a floor: the longer of its bytes at the speed at which memory is read and its arithmetic at
the speed of a large product, both measured in the same run. `of ceiling` is floor / time. Bytes are weights,
keys and values; activations stay in the caches and are left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from jetspec.decode.engine import Engine
from jetspec.decode.stats import Stats
from jetspec.draft.base import Drafter
from jetspec.draft.jetspec import BlockDrafter
from jetspec.errors import OptionError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.linear import Linear
from jetspec.target.native_decoder import STAGES
from jetspec.target.packed import PackedMatrix, ReadProbe, product_speed
from jetspec.target.target import Target
from jetspec.target.transformer import Transformer

PHASES = ("draft", "build", "verify", "commit")
SCORER = "path scorer"  # torch operators


@dataclass(frozen=True)
class Operator:
    """One line of a profile; all figures per round (step of the engine).

    seconds        wall time
    bytes, flops   read from memory, and floating-point operations; 0 where they are not counted
    of_ceiling     floor / time, None where nothing is counted
    compiled       whether the time passed in compiled kernels of the target or the head
    """

    phase: str
    name: str
    seconds: float
    bytes: float = 0.0
    flops: float = 0.0
    of_ceiling: float | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Ceilings:
    """What the machine gives: bytes per second from memory, operations per second in a large product."""

    read: float
    product: float


@dataclass(frozen=True)
class Profile:
    """One way of decoding, taken apart. `host` is the share of a round outside compiled kernels."""

    method: str
    budget: int
    rounds: int
    tau: float
    rows: float  # verified rows per round, roots included
    context: float  # committed tokens, mean over rounds
    seconds: float  # of a round
    host: float
    operators: list[Operator]


def measure_ceilings() -> Ceilings:
    """Measure them: medians, in about a second."""
    probe = ReadProbe()
    return Ceilings(statistics.median(probe.read() for _ in range(15)), product_speed())


def profile(
    target: Target,
    drafter: Drafter,
    prompts: Many[Many[int]],
    ceilings: Ceilings,
    *,
    method: str,
    budget: int,
    grow: str,
    tokens: int,
    on_prompt: Callable[[], None] = lambda: None,
) -> Profile:
    """Decode the prompts greedily one by one and take the rounds apart.

    Forwards of the target count as verification, so a stub that drafts with the target itself (echo, decoy)
    is not told apart.

    Raises OptionError where the compiled decoder does not run, since only that one has a clock per operator.
    """
    transformer = target.transformer
    if transformer.native is None:
        raise OptionError(
            "a profile needs the compiled decoder, which does not run here: it takes a C compiler, float32, "
            "the CPU and a dense model"
        )
    engine = Engine(target, drafter, budget=budget, grow=grow, max_batch=1)
    limits = Limits(max_tokens=tokens, ignore_eos=True)
    engine.generate([prompts[0]], Sampling(), Limits(max_tokens=min(tokens, 16), ignore_eos=True))  # warm-up
    taken = _Taken()
    for prompt in prompts:
        _take_apart(engine, prompt, limits, taken)
        on_prompt()
    stats, rounds = taken.stats, taken.stats.rounds
    rows, context = 1 + stats.nodes / rounds, sum(taken.contexts) / rounds
    costs = {
        "verify": operator_costs(target.transformer, rows, context),
        "draft": _draft_costs(drafter),
    }
    operators: list[Operator] = []
    for phase in PHASES:
        own = {name: value / rounds for (where, name), value in taken.operators.items() if where == phase}
        operators += [
            _operator(phase, name, value, costs.get(phase, {}).get(name), ceilings)
            for name, value in own.items()
        ]
        rest = stats.seconds[phase] / rounds - sum(own.values())
        operators.append(Operator(phase, "the rest" if own else "all", max(0.0, rest)))
    each = taken.seconds / rounds
    operators.append(Operator("engine", "all", max(0.0, each - stats.decode_seconds / rounds)))
    compiled = sum(operator.seconds for operator in operators if operator.compiled)
    return Profile(method, budget, rounds, stats.tau, rows, context, each, 1 - compiled / each, operators)


@dataclass
class _Taken:
    """What the rounds of all prompts took: stats, wall time, contexts, seconds by (phase, operator)."""

    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    contexts: list[int] = field(default_factory=list)
    operators: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, phase: str, name: str, seconds: float) -> None:
        self.operators[phase, name] = self.operators.get((phase, name), 0.0) + seconds


def _take_apart(engine: Engine, prompt: Many[int], limits: Limits, taken: _Taken) -> None:
    """Decode one prompt; its prefill and first round are left out."""
    transformer, drafter = engine.target.transformer, engine.drafter
    draft_stack = drafter.backbone.native if isinstance(drafter, BlockDrafter) else None
    sequence = engine.add(prompt, Sampling(), limits)
    while not engine.step():
        pass
    engine.stats = Stats()
    output_before = transformer.output_seconds
    scorer_before = drafter.scorer_seconds if isinstance(drafter, BlockDrafter) else 0.0
    assert transformer.native is not None
    with transformer.native.profiled() as stages, ExitStack() as more:
        draft_stages = more.enter_context(draft_stack.profiled()) if draft_stack is not None else {}
        PackedMatrix.clock = {}
        try:
            while sequence.finished is None:
                taken.contexts.append(len(sequence.tokens) - 1)
                start = time.perf_counter()
                engine.step()
                taken.seconds += time.perf_counter() - start
        finally:
            products, PackedMatrix.clock = PackedMatrix.clock, None
    taken.stats.add(engine.stats)
    for name in STAGES:
        taken.add("verify", name, stages[name])
    taken.add("verify", "output matrix", transformer.output_seconds - output_before)
    if draft_stages:
        taken.add("draft", "layers", sum(draft_stages.values()))
    inside = 0.0
    for name, value in (products or {}).items():
        taken.add("draft", name, value)
        inside += value if name in scorer_products(drafter) else 0.0
    if isinstance(drafter, BlockDrafter):
        taken.add("draft", SCORER, drafter.scorer_seconds - scorer_before - inside)


def operator_costs(transformer: Transformer, rows: float, context: float) -> dict[str, tuple[float, float]]:
    """Bytes and floating-point operations of one forward of `rows` rows behind `context` committed ones."""
    config = transformer.config
    layers, keys = transformer.layers, 2 * config.num_kv_heads * config.head_dim * 4
    seen = context + rows / 2  # a row of a tree sees its ancestors only; half is an upper guess, small beside
    costs = {
        "qkv": _matrices([layer.qkv for layer in layers], rows),
        "attention output": _matrices([layer.out for layer in layers], rows),
        "gate and up": _matrices([layer.mlp.gate_up for layer in layers], rows),
        "down": _matrices([layer.mlp.down for layer in layers], rows),
        "output matrix": _matrices([transformer.output], rows),
    }
    flops = 4 * rows * config.num_heads * config.head_dim * seen * config.num_layers
    costs["attention"] = (keys * (context + rows) * config.num_layers, flops)
    return costs


def _draft_costs(drafter: Drafter) -> dict[str, tuple[float, float]]:
    if not isinstance(drafter, BlockDrafter):
        return {}
    backbone = drafter.backbone
    block = backbone.config.block_size
    inside = [
        m for layer in backbone.layers for m in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down)
    ]
    costs = {"layers": _matrices(inside, block)}
    alone = [(backbone.output, block - 1), (backbone.fusion, 1), (backbone.context, 1), (backbone.direct, 1)]
    for linear, rows in alone:
        if linear is not None and linear.native is not None:
            costs[linear.native.name] = _matrices([linear], rows)
    return costs


def scorer_products(drafter: Drafter) -> set[str]:
    """Compiled products inside the path scorer, which have lines of their own."""
    linear = getattr(getattr(drafter, "scorer", None), "to_children", None)
    return {linear.native.name} if isinstance(linear, Linear) and linear.native is not None else set()


def _matrices(matrices: Many[Any], rows: float) -> tuple[float, float]:
    packed = [
        linear.native for linear in matrices if isinstance(linear, Linear) and linear.native is not None
    ]
    return float(sum(m.bytes for m in packed)), 2 * rows * sum(m.n * m.k for m in packed)


def _operator(
    phase: str, name: str, seconds: float, cost: tuple[float, float] | None, ceilings: Ceilings
) -> Operator:
    if cost is None or seconds <= 0:
        return Operator(phase, name, seconds, compiled=name != SCORER)
    moved, flops = cost
    floor = max(moved / ceilings.read, flops / ceilings.product)
    return Operator(phase, name, seconds, moved, flops, floor / seconds, compiled=True)


def as_record(ceilings: Ceilings, profiles: Many[Profile]) -> dict[str, Any]:
    """For JSON."""
    return {"ceilings": asdict(ceilings), "profiles": [asdict(p) for p in profiles]}
