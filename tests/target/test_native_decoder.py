"""The compiled decoder: the same bits for a row in any company, and the same values as the portable path.

`tests/parity` compares both paths with transformers; here they are compared with themselves, bit for bit.
"""

from __future__ import annotations

import random
import threading

import pytest
import torch

from jetspec.native import native_available
from jetspec.target import native_decoder
from jetspec.target.cache import KVCache
from jetspec.target.config import ModelConfig
from jetspec.target.plan import chunk, pack
from jetspec.target.transformer import Transformer
from jetspec.tree import Tree
from tests.target.tiny import per_expert, tiny_model

pytestmark = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel to test")
WIDE = {"hidden_size": 80, "intermediate_size": 112, "num_hidden_layers": 2}
MODELS = {
    "llama": ("llama", WIDE),
    "biased": ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "window": ("mistral", {**WIDE, "sliding_window": 9}),
    "normed": ("qwen3", {**WIDE, "head_dim": 32}),
    "one-kv-head": ("qwen2", {**WIDE, "num_key_value_heads": 1, "head_dim": 48}),
    "experts": ("qwen3_moe", {**WIDE, "norm_topk_prob": True, "moe_intermediate_size": 32}),
}
SIZES = (1, 2, 3, 8, 12, 13, 16, 24, 25, 33, 64)
VOCAB = 96


def _model(name: str) -> Transformer:
    torch.manual_seed(0)
    family, changes = MODELS[name]
    model = tiny_model(family, initializer_range=0.3, **changes)
    return Transformer(ModelConfig.from_dict(model.config.to_dict()), per_expert(model.state_dict()))


def _random_tree(size: int, dice: random.Random) -> Tree:
    """Chains with gaps: about half of the nodes continue the last one."""
    parents = [-1] + [i - 1 if dice.random() < 0.5 else dice.randrange(i) for i in range(1, size)]
    used: set[tuple[int, int]] = set()
    tokens = [dice.randrange(VOCAB)]
    for parent in parents[1:]:
        token = dice.choice([t for t in range(VOCAB) if (parent, t) not in used])
        used.add((parent, token))
        tokens.append(token)
    return Tree.of(tokens, parents)


def _prefill(model: Transformer, cache: KVCache, key: int, tokens: list[int], pieces: list[int]) -> None:
    cache.add(key)
    for start, end in zip([0, *pieces], [*pieces, len(tokens)], strict=True):
        plan = chunk([(key, tokens[start:end])], cache)
        model.forward(plan, cache)
        cache.keep(key, range(plan.size))


@pytest.mark.parametrize("name", MODELS)
def test_a_path_has_the_bits_of_plain_decoding(name: str) -> None:
    """Guards exact losslessness: logits, taps and cache rows along a path of a tree, verified beside another
    sequence, behind a prompt prefilled in one piece, equal those of one token at a time behind a prompt
    prefilled in uneven pieces. Not within a tolerance: bit for bit.
    """
    model, dice = _model(name), random.Random(1)
    prompt = [dice.randrange(VOCAB) for _ in range(45)]
    for size in SIZES:
        cache = model.new_cache()
        _prefill(model, cache, 0, prompt, [])
        _prefill(model, cache, 1, prompt, [7, 8, 30])
        _prefill(model, cache, 2, prompt[:11], [])
        tree = _random_tree(size, dice)
        plan = pack([(2, _random_tree(5, dice)), (0, tree)], cache)
        output = model.forward(plan, cache, taps=(0, 1), hidden=True)
        path = tree.path_to(dice.randrange(size))
        cache.keep(0, path)
        cache.keep(2, [0])
        for node in path:
            single = model.forward(pack([(1, Tree.root_only(tree.tokens[node]))], cache), cache, (0, 1), True)
            cache.keep(1, [0])
            for one, many in zip(single, output, strict=True):
                assert one is not None and many is not None
                assert torch.equal(one[0], many[5 + node]), (size, node)
        for layer in range(model.config.num_layers):
            assert torch.equal(cache.rows(0, layer), cache.rows(1, layer))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "experts"])
def test_equals_the_portable_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the order of taps, logits of some rows only, and hidden states of all, against the readable
    code. 2e-4: float32 rounding of logits of size 10 through two layers.
    """
    fast = _model(name)
    monkeypatch.setattr(native_decoder, "native_suits", lambda *facts: False)
    slow = _model(name)
    assert fast.native is not None and slow.native is None
    dice = random.Random(2)
    prompt = [dice.randrange(VOCAB) for _ in range(30)]
    trees = [(0, _random_tree(9, dice)), (1, _random_tree(4, dice))]
    outputs = []
    for model in (fast, slow):
        cache = model.new_cache()
        for key in (0, 1):
            _prefill(model, cache, key, prompt[: 30 - key], [])
        plan = pack(trees, cache)
        assert plan.segments[0].logits
        object.__setattr__(plan.segments[0], "logits", False)
        outputs.append(
            [model.forward(plan, cache, taps, hidden) for taps in ((1, 0), ()) for hidden in (False, True)]
        )
    for one, other in zip(*outputs, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.shape == b.shape and (a - b).abs().max() < 2e-4
    assert outputs[0][0].logits is not None and outputs[0][0].logits.shape[0] == 4


def test_forwards_of_several_threads_do_not_disturb_each_other() -> None:
    """Guards shared state: a server may run two engines on one target at the same time."""
    model, dice = _model("llama"), random.Random(3)
    prompts = [[dice.randrange(VOCAB) for _ in range(20 + n)] for n in range(4)]

    def taps_of(prompt: list[int], place: int) -> torch.Tensor:
        cache = model.new_cache()
        cache.add(0)
        taps = model.forward(chunk([(0, prompt)], cache), cache, (place,)).taps
        assert taps is not None
        return taps

    wanted = [taps_of(prompt, n % 2) for n, prompt in enumerate(prompts)]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(20):
            if not torch.equal(taps_of(prompts[n], n % 2), wanted[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_profile_names_every_stage() -> None:
    """Guards the profile: all stages of a forward with taps take some time, and none is left running."""
    model = _model("llama")
    cache = model.new_cache()
    cache.add(0)
    assert model.native is not None
    with model.native.profiled() as seconds:
        model.forward(chunk([(0, list(range(40)))], cache), cache, (0, 1))
    assert list(seconds) == list(native_decoder.STAGES)
    assert all(value > 0 for value in seconds.values()), seconds
    assert model.native.stages is None
