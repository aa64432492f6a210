"""What can only be tried on a CUDA machine: the target, lossless decoding, and training against the CPU.

The tests bring all they need, so that this folder runs on a machine without network:
`python -m pytest tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.decode.engine import Engine
from jetspec.draft.base import Drafter
from jetspec.draft.stubs import Decoy, Echo, Random
from jetspec.noise import gumbel_noise
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.config import ModelConfig
from jetspec.target.plan import chunk
from jetspec.target.pooled_cache import PooledCache
from jetspec.target.target import Target
from jetspec.train.data import Corpus, batches_at
from jetspec.train.distributed import Copies
from jetspec.train.loop import LoopOptions, train
from jetspec.train.method import TrainingMethod
from tests.draft.tiny import TAPS, VOCAB, tiny_answers, tiny_target
from tests.train.test_distributed import METHODS, corpus_of, new_method

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# float32 products on a GPU add up in another order, and their results differ by about 1e-6 of the largest;
# TF32 stays off by default. Logits here are of order 10.
LOGIT_BOUND = 2e-3
PROMPTS = [[1, 5, 9, 22, 31], [1, 40], [1, *range(50, 90)], [1, 7, 7, 7, 8, 120, 121, 13]]
STUBS: dict[str, Callable[[Target], Drafter]] = {
    "random": lambda target: Random(seed=5, vocab=VOCAB, depth=3, width=4),
    "echo": lambda target: Echo(target, depth=3),
    "decoy": lambda target: Decoy(target, depth=3, width=3),
}


@pytest.fixture(autouse=True)
def _whole_float32() -> None:
    torch.set_float32_matmul_precision("highest")


def cuda_target(**changes: Any) -> Target:
    """The tiny target on the GPU; the same weights as on the CPU."""
    made: list[Any] = []
    real = Target.__init__

    def kept(self: Target, name: str, config: ModelConfig, weights: Any, tokenizer: Any, *rest: Any) -> None:
        made.append((name, config, weights, tokenizer))
        real(self, name, config, weights, tokenizer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "__init__", kept)
        tiny_target(**changes)
    return Target(*made[0], torch.float32, "cuda")


def forward(target: Target, ids: list[int]) -> tuple[torch.Tensor, ...]:
    """Logits, taps and final states of a text, on the CPU."""
    cache = target.new_cache()
    cache.add(0)
    output = target.forward(chunk([(0, ids)], cache, logits=True), cache, TAPS, hidden=True)
    assert output.logits is not None and output.taps is not None and output.hidden is not None
    return output.logits.cpu(), output.taps.cpu(), output.hidden.cpu()


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "mistral", "sliding_window": 7}], ids=["llama", "window"]
)
def test_forward_equals_the_cpu(changes: dict[str, Any]) -> None:
    """Guards every tensor that a device may forget: masks, rotation, cache, taps."""
    on_cpu, on_gpu = tiny_target(**changes), cuda_target(**changes)
    for ids in PROMPTS:
        for one, other in zip(forward(on_cpu, ids), forward(on_gpu, ids), strict=True):
            scale = float(one.abs().max())
            assert float((one - other).abs().max()) < 1e-4 * scale


def test_noise_equals_the_cpu() -> None:
    """Guards the same text for the same seed on every device: bits are exact, one logarithm in 2**28 may be
    rounded the other way."""
    positions = torch.tensor([0, 3, 2**31, 77])
    for seed in (7, [1, 2**63, 5, 2**40]):
        one, other = gumbel_noise(seed, positions, 5000), gumbel_noise(seed, positions.cuda(), 5000).cpu()
        assert int((one != other).sum()) <= 2 and float((one - other).abs().max()) < 1e-5


def texts(target: Target, drafter: Drafter | None, budget: int) -> list[list[int]]:
    """What an engine emits for all prompts, greedy and sampled, as one batch."""
    engine = Engine(target, drafter, budget=budget, max_batch=16)
    assert isinstance(engine.cache, PooledCache)
    samplings = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=11), Sampling(temperature=1.0, seed=4)]
    sequences = [
        engine.add(prompt, sampling, Limits(max_tokens=24, ignore_eos=True))
        for prompt in PROMPTS
        for sampling in samplings
    ]
    for _ in engine.run(sequences):
        pass
    assert engine.cache.bytes == 0
    return [sequence.emitted for sequence in sequences]


def first_difference(target: Target, one: list[int], other: list[int], prompt: list[int]) -> float:
    """By how much the target prefers one token to the other where greedy texts part; 0 if they do not."""
    for n, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            logits = forward(target, [*prompt, *one[:n]])[0][-1]
            return float((logits[a] - logits[b]).abs())
    return 0.0


@pytest.mark.parametrize("budget", [3, 12])
@pytest.mark.parametrize("stub", STUBS)
def test_lossless_but_for_ties(stub: str, budget: int) -> None:
    """Guards the promise on a GPU: text is that of plain decoding. Sums over one row and over many differ in
    their last bits there, so a greedy text may part where two tokens tie within the bound, and no more than
    one text in eight may part at all."""
    target = cuda_target()
    plain, drafted = texts(target, None, 0), texts(target, STUBS[stub](target), budget)
    parted = [n for n, (one, other) in enumerate(zip(plain, drafted, strict=True)) if one != other]
    assert len(parted) <= len(plain) // 8
    for n in parted:
        if n % 3 == 0:  # the greedy ones
            assert first_difference(target, plain[n], drafted[n], PROMPTS[n // 3]) < LOGIT_BOUND


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the target, made on the CPU."""
    folder = tmp_path_factory.mktemp("answers")
    tiny_answers(tiny_target(), folder)
    return folder


def learnt(
    method: TrainingMethod, corpus: Corpus, device: str, **options: Any
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one batch."""
    given: dict[str, Any] = {"seed": 0, "answers": 4, "anchors": 4, "weights": method.weights, "part": 2}
    parts = [batch.to(torch.device(device)) for batch in batches_at(corpus, 0, **given)]
    loss = Copies(method, **options).learn(parts).loss
    return loss, {key: x.grad.cpu() for key, x in method.module.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("name", METHODS)
def test_a_step_equals_the_cpu(name: str, answers: Path) -> None:
    """Guards every family's forward, loss and backward on a GPU, features resident there included; bfloat16
    products keep the loss within 2 %."""
    corpus = corpus_of(Corpus([answers], holdout=4), name)
    loss, wanted = learnt(new_method(tiny_target(), corpus, name), corpus, "cpu")
    found, grads = learnt(new_method(cuda_target(), corpus, name), corpus.resident("cuda"), "cuda")
    assert found == pytest.approx(loss, rel=1e-4) and grads.keys() == wanted.keys()
    for key, one in wanted.items():
        assert float((one - grads[key]).norm()) <= 2e-3 * float(one.norm()) + 1e-7, key
    mixed, _ = learnt(new_method(cuda_target(), corpus, name), corpus, "cuda", autocast=torch.bfloat16)
    assert mixed == pytest.approx(loss, rel=0.02)


@pytest.mark.parametrize("name", ["jetspec", "dspark", "eagle3"])
def test_a_run_validates_and_resumes(name: str, answers: Path, tmp_path: Path) -> None:
    """Guards what a run does besides its steps: checkpoints with fused moments, validation with drafting on
    the GPU, a saved head."""
    corpus = corpus_of(Corpus([answers], holdout=4), name)
    options = LoopOptions(steps=3, answers=4, anchors=4, checkpoint_minutes=0.0, validate_minutes=0.0)
    for steps in (3, 5):
        method = new_method(cuda_target(), corpus, name)
        options = LoopOptions(**{**vars(options), "steps": steps})
        folder = train(method, corpus, tmp_path, options, {}, device="cuda", autocast=torch.bfloat16)
    assert (folder / "model.safetensors").exists()
