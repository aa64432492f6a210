"""The native decoder against transformers, the independent implementation, on tiny random models.

Tolerances: 1e-4 in float32, where the two add up in different orders. 1e-9 in float64; both sides compute
RMS norms, rotary angles and router probabilities in float32 even there, by the same formulas, so only the
order of float64 sums differs. A wrong mask, position, window or rotation moves these logits by more than
1e-2."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from jetspec.target.cache import KVCache
from jetspec.target.config import ModelConfig
from jetspec.target.plan import Plan, Segment, chunk, pack
from jetspec.target.transformer import Transformer
from jetspec.tree import Tree
from tests.target.tiny import per_expert, tiny_model

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
DTYPES = tuple(TOLERANCE)
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-grouping": ("llama", {"num_key_value_heads": 4}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-biased": ("qwen3", {"attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3-yarn-mscale": ("qwen3", {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}}),
    "qwen3-yarn-factor": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-unscaled": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "qwen3_moe-mixed": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}),
}
FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3-window", "qwen3_moe")  # where one variant each will do


class Pair(NamedTuple):
    """The same weights in transformers and here."""

    oracle: Any
    ours: Transformer


@functools.cache
def pair(variant: str, dtype: torch.dtype) -> Pair:
    """Random weights of order one, norms and biases included: with transformers' own initial values (norms
    1, biases 0, matrices near 0) a forgotten bias or an attention that looks at the wrong rows would not
    be seen."""
    family, changes = VARIANTS[variant]
    oracle = tiny_model(family, attn_implementation="sdpa", experts_implementation="eager", **changes).eval()
    dice = torch.Generator().manual_seed(len(variant))
    for name, parameter in oracle.named_parameters():
        noise = torch.randn(parameter.shape, generator=dice)
        if parameter.ndim == 1:
            parameter.data = 0.5 * noise + (1.0 if "norm" in name else 0.0)
        else:
            parameter.data = 0.4 * noise if "embed" in name else noise * (1.3 / parameter.shape[-1] ** 0.5)
    oracle.tie_weights()
    oracle = oracle.to(dtype)
    config = ModelConfig.from_dict(oracle.config.to_dict())
    return Pair(oracle, Transformer(config, per_expert(oracle.state_dict()), dtype=dtype))


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids of the tiny vocabulary."""
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def oracle_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [n, V] of one sequence by transformers, without a cache."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def filled(ours: Transformer, cache: KVCache, key: int, ids: Sequence[int]) -> None:
    """Cache all of `ids` under a new key."""
    cache.add(key)
    ours.forward(chunk([(key, ids)], cache), cache)
    cache.keep(key, range(len(ids)))


def random_tree(root: int, size: int, seed: int) -> Tree:
    """A bushy random tree whose rows are out of depth-first order, so that siblings' descendants
    interleave."""
    dice = torch.Generator().manual_seed(seed)
    parents, tokens = [-1], [root]
    used: set[tuple[int, int]] = set()
    while len(tokens) < size:
        parent = int(torch.randint(max(0, len(tokens) - 5), len(tokens), (), generator=dice))
        token = int(torch.randint(0, 96, (), generator=dice))
        if (parent, token) not in used:
            used.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    return Tree.of(tokens, parents)


def tree_oracle(model: Any, prefix: Sequence[int], tree: Tree) -> Tensor:
    """Logits [nodes, V]: for each node, transformers on the prefix and the path to the node, and nothing
    else."""
    rows = []
    for node in range(tree.size):
        path = [tree.tokens[n] for n in tree.path_to(node)]
        rows.append(oracle_logits(model, [*prefix, *path])[-1])
    return torch.stack(rows)


def merged(*plans: Plan) -> Plan:
    """Several plans as one forward: their rows end to end."""
    segments: list[Segment] = []
    offset = 0
    for plan in plans:
        segments += [Segment(s.key, s.start + offset, s.count, s.mask, s.logits) for s in plan.segments]
        offset += plan.size
    ids, positions = torch.cat([p.ids for p in plans]), torch.cat([p.positions for p in plans])
    return Plan(ids, positions, tuple(segments), max(p.last for p in plans))


def assert_close(actual: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal up to the tolerance of the dtype, which is absolute: logits here are of order one."""
    assert actual is not None
    assert actual.shape == expected.shape
    worst = (actual - expected).abs().max().item()
    assert worst <= TOLERANCE[dtype], f"off by {worst:.3g}"


every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_family = pytest.mark.parametrize("variant", FAMILIES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "float64"))


@every_dtype
@every_variant
def test_logits_without_cache(variant: str, dtype: torch.dtype) -> None:
    """Guards every switch of every family: biases, norms, rotary scaling, windows, tied matrices, experts."""
    model, ours = pair(variant, dtype)
    ids = random_ids(41, 1)
    cache = ours.new_cache()
    cache.add(0)
    output = ours.forward(chunk([(0, ids)], cache, logits=True), cache)
    assert_close(output.logits, oracle_logits(model, ids), dtype)


@every_dtype
@pytest.mark.parametrize("sizes", [(1,), (3, 1), (7,), (16, 2)], ids=str)
@every_family
def test_chunked_prefill(variant: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Guards positions, windows and cache growth across pieces: any way of cutting a prompt gives the same
    logits."""
    model, ours = pair(variant, dtype)
    ids = random_ids(75, 2)  # longer than a fresh block, so that it grows in the middle
    cache = ours.new_cache()
    cache.add(5, capacity=1)
    rows: list[Tensor] = []
    at = turn = 0
    while at < len(ids):
        piece = ids[at : at + sizes[turn % len(sizes)]]
        logits = ours.forward(chunk([(5, piece)], cache, logits=True), cache).logits
        assert logits is not None
        cache.keep(5, range(len(piece)))
        rows.append(logits)
        at, turn = at + len(piece), turn + 1
    assert_close(torch.cat(rows), oracle_logits(model, ids), dtype)


@every_dtype
@every_variant
def test_tree_with_gaps(variant: str, dtype: torch.dtype) -> None:
    """Guards the tree's mask and positions (per node against its own path), and that a kept path with gaps
    leaves the same cache as if its tokens had been decoded one by one: a second tree on top of it is right
    as well."""
    model, ours = pair(variant, dtype)
    prefix = random_ids(13, 3)
    cache = ours.new_cache()
    filled(ours, cache, 0, prefix)
    tree = random_tree(root=17, size=12, seed=4)
    output = ours.forward(pack([(0, tree)], cache), cache)
    assert_close(output.logits, tree_oracle(model, prefix, tree), dtype)

    deepest = max(range(tree.size), key=lambda node: tree.depths[node])
    path = tree.path_to(deepest)
    assert path != list(range(len(path))), "the path must have a gap, or this test is weak"
    cache.keep(0, path)
    longer = [*prefix, *(tree.tokens[node] for node in path)]
    assert cache.length(0) == len(longer)
    second = random_tree(root=23, size=9, seed=5)
    output = ours.forward(pack([(0, second)], cache), cache)
    assert_close(output.logits, tree_oracle(model, longer, second), dtype)


@every_dtype
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.endswith("-window")])
def test_window_inside_a_deep_tree(variant: str, dtype: torch.dtype) -> None:
    """Guards windows that end inside the tree: what lies too far back is counted in positions, not in
    rows."""
    model, ours = pair(variant, dtype)
    prefix = random_ids(4, 18)
    cache = ours.new_cache()
    filled(ours, cache, 0, prefix)
    parents = [-1] + [max(0, node - 2) for node in range(1, 24)]  # two branches, row by row in turn
    tree = Tree.of(random_ids(24, 19), parents)
    assert tree.depth > 10
    output = ours.forward(pack([(0, tree)], cache), cache)
    assert_close(output.logits, tree_oracle(model, prefix, tree), dtype)


@every_dtype
@every_variant
def test_ragged_batch_of_chunks_and_trees(variant: str, dtype: torch.dtype) -> None:
    """Guards segments of one forward against each other: sequences of different lengths, a piece of
    prefill without logits, one with, and two trees must not see each other or trade rows, and only
    asked-for rows give logits."""
    model, ours = pair(variant, dtype)
    cache = ours.new_cache()
    a, b, c, d = random_ids(9, 6), random_ids(21, 7), random_ids(30, 8), random_ids(14, 9)
    filled(ours, cache, 1, a)
    filled(ours, cache, 2, b)
    filled(ours, cache, 3, c[:11])
    cache.add(4)
    trees = [random_tree(3, 7, 10), random_tree(4, 10, 11)]
    plan = merged(
        pack([(1, trees[0])], cache),
        chunk([(3, c[11:])], cache),
        pack([(2, trees[1])], cache),
        chunk([(4, d)], cache, logits=True),
    )
    output = ours.forward(plan, cache)
    expected = [tree_oracle(model, a, trees[0]), tree_oracle(model, b, trees[1]), oracle_logits(model, d)]
    assert_close(output.logits, torch.cat(expected), dtype)

    cache.keep(3, range(len(c) - 11))  # the piece without logits has been cached all the same
    cache.keep(1, [])
    after = ours.forward(merged(pack([(3, trees[0])], cache), pack([(1, trees[1])], cache)), cache)
    expected = [tree_oracle(model, c, trees[0]), tree_oracle(model, a, trees[1])]
    assert_close(after.logits, torch.cat(expected), dtype)


@every_dtype
@every_variant
def test_taps_and_hidden(variant: str, dtype: torch.dtype) -> None:
    """Guards the convention: layer id n is the OUTPUT of layer n, hidden_states[n + 1] of transformers,
    the last one BEFORE the final norm (transformers shows it after the norm, so a hook reads it); `hidden`
    is after it. The order asked for is kept."""
    model, ours = pair(variant, dtype)
    ids = random_ids(19, 12)
    last_output: list[Tensor] = []

    def remember(_module: Any, _inputs: Any, output: Any) -> None:
        last_output.append(output[0] if isinstance(output, tuple) else output)

    hook = model.model.layers[-1].register_forward_hook(remember)
    with torch.inference_mode():
        states = model.model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    hook.remove()
    cache = ours.new_cache()
    cache.add(0)
    output = ours.forward(chunk([(0, ids)], cache), cache, taps=(2, 0), hidden=True)
    assert output.logits is None
    expected = torch.cat([last_output[0].reshape(len(ids), -1), states.hidden_states[1][0]], dim=-1)
    assert_close(output.taps, expected, dtype)
    assert_close(output.hidden, states.last_hidden_state[0], dtype)


@every_family
def test_taps_of_a_tree(variant: str) -> None:
    """Guards taps at tree rows: a drafter reads them for the kept path, so they must be those of plain
    decoding."""
    dtype = torch.float64
    model, ours = pair(variant, dtype)
    prefix, tree = random_ids(8, 13), random_tree(5, 10, 14)
    cache = ours.new_cache()
    filled(ours, cache, 0, prefix)
    output = ours.forward(pack([(0, tree)], cache), cache, taps=(0, 1), hidden=True)
    assert output.taps is not None and output.hidden is not None
    for node in range(tree.size):
        ids = [*prefix, *(tree.tokens[n] for n in tree.path_to(node))]
        with torch.inference_mode():
            states = model.model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        taps = torch.cat([states.hidden_states[1][0, -1], states.hidden_states[2][0, -1]])
        assert_close(output.taps[node], taps, dtype)
        assert_close(output.hidden[node], states.last_hidden_state[0, -1], dtype)


def test_fused_experts() -> None:
    """Guards the second layout of experts (one tensor per layer, as recent checkpoints have them)."""
    model, split = pair("qwen3_moe", torch.float64)
    fused = Transformer(split.config, model.state_dict(), dtype=torch.float64)
    ids = random_ids(12, 15)
    cache = fused.new_cache()
    cache.add(0)
    output = fused.forward(chunk([(0, ids)], cache, logits=True), cache)
    assert_close(output.logits, oracle_logits(model, ids), torch.float64)


def test_packed_products() -> None:
    """Guards the packed float32 product, which tiny matrices never use: a model wide enough for it, rows 1
    to 40."""
    model = tiny_model("llama", hidden_size=128, head_dim=32, intermediate_size=192, attention_bias=True)
    model = model.eval()
    dice = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = 0.15 * torch.randn(parameter.shape, generator=dice)
    ours = Transformer(ModelConfig.from_dict(model.config.to_dict()), model.state_dict())
    ids = random_ids(48, 16)
    expected = oracle_logits(model, ids)
    for first in (1, 2, 17, 40):
        cache = ours.new_cache()
        cache.add(0)
        logits = ours.forward(chunk([(0, ids[:first])], cache, logits=True), cache).logits
        assert_close(logits, expected[:first], torch.float32)
        cache.keep(0, range(first))
        logits = ours.forward(chunk([(0, ids[first:])], cache, logits=True), cache).logits
        assert_close(logits, expected[first:], torch.float32)


def test_rotary_table_grows() -> None:
    """Guards positions beyond the first table: growing it must not change or lose rows."""
    model, ours = pair("llama", torch.float64)
    ids = random_ids(120, 17)
    cache = ours.new_cache()
    cache.add(0)
    ours._rotary._tables = ours._rotary._grown(4)  # as if only short sequences had been seen
    logits = ours.forward(chunk([(0, ids)], cache, logits=True), cache).logits
    assert_close(logits, oracle_logits(model, ids), torch.float64)
