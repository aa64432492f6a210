"""The fused loss is the readable one, in value and gradients, without its memory."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jetspec.errors import OptionError
from jetspec.native import native_available
from jetspec.train import loss as loss_module
from jetspec.train.loss import confidence_loss, fused_loss, fused_overlap, reference_loss
from jetspec.train.native_loss import native_learn
from jetspec.train.weighting import LossOptions, expected_length_weights

ROWS, TEACHERS, HIDDEN, RANK, WIDTH = 37, 11, 12, 5, 29
KL = LossOptions(kl=1.0)
LOSSES = {
    "kl": KL,
    "kl-soft": LossOptions(kl=1.0, temperature=2.5),
    "kl-sharp": LossOptions(kl=0.7, temperature=0.5),
    "ce": LossOptions(kl=0.0, ce=1.0),
    "l1": LossOptions(kl=0.0, l1=1.0),
    "dspark": LossOptions(kl=0.0, ce=0.1, l1=0.9),
    "all": LossOptions(kl=0.5, ce=0.3, l1=0.4, temperature=1.5),
}


@pytest.fixture(autouse=True)
def _one_thread(_same_start: None) -> None:
    torch.set_num_threads(1)


def inputs(dtype: torch.dtype, scorer: bool, zero_rows: bool = True) -> dict[str, Any]:
    """Random arguments of a loss; every third row has weight 0 if wanted, every fifth has no label."""
    weight = torch.rand(ROWS, dtype=dtype) + 0.1
    if zero_rows:
        weight[::3] = 0.0
    output = torch.randn(WIDTH, HIDDEN, dtype=dtype)
    pairs = [(torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True), output)]
    if scorer:
        terms = torch.randn(ROWS, RANK, dtype=dtype, requires_grad=True)
        pairs.append((terms, torch.randn(WIDTH, RANK, dtype=dtype, requires_grad=True)))
    labels = torch.randint(0, WIDTH, (ROWS,))
    labels[::5] = -1
    return {
        "pairs": pairs,
        "teacher": torch.randn(TEACHERS, HIDDEN, dtype=dtype),
        "output": output,
        "teacher_row": torch.randint(0, TEACHERS, (ROWS,)),
        "weight": weight,
        "labels": labels,
    }


def gradients(loss: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """Of everything that is trained."""
    leaves = [x for pair in given["pairs"] for x in pair if x.requires_grad]
    return list(torch.autograd.grad(loss * 1.7, leaves))  # a factor, as a later operation would bring


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scorer", [True, False], ids=["scorer", "plain"])
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_fused_equals_reference(chunk: int, scorer: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the hand-written gradients: sign, scale, temperature, rows of weight 0 or without a label, and
    chunk boundaries. The readable loss is differentiated by autograd, in float64."""
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    options = LOSSES[name]
    for zero_rows in (True, False):
        given = inputs(torch.float64, scorer, zero_rows)
        slow = reference_loss(**given, options=options)
        fast = fused_loss(**given, options=options, overlap=True)
        assert torch.allclose(slow.loss, fast.loss, rtol=1e-12)
        counted = given["weight"] > 0
        assert torch.allclose(slow.per_row[counted], fast.per_row[counted], rtol=1e-10)
        assert torch.allclose(slow.overlap[counted], fast.overlap[counted], rtol=1e-10)
        assert torch.equal(slow.agree[counted], fast.agree[counted])
        for column in (fast.per_row, fast.agree, fast.overlap):
            assert not column[~counted].any()
        found = fused_overlap(*(given[k] for k in ("pairs", "teacher", "output", "teacher_row", "weight")))
        assert torch.allclose(found, fast.overlap, rtol=1e-12)
        for a, b in zip(gradients(slow.loss, given), gradients(fast.loss, given), strict=True):
            assert a.abs().max() > 1e-4
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-13)


def test_losses_are_what_their_names_say() -> None:
    """Guards the reference itself on a law that can be written down: p = (.5, .3, .2), q = (.2, .3, .5),
    token 0 was written."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    given = {
        "pairs": [(q.log().unsqueeze(0), torch.eye(3).double())],
        "teacher": p.log().unsqueeze(0),
        "output": torch.eye(3).double(),
        "teacher_row": torch.tensor([0]),
        "weight": torch.tensor([2.0]).double(),
        "labels": torch.tensor([0]),
    }

    def value(**options: float) -> float:
        return float(reference_loss(**given, options=LossOptions(**{"kl": 0.0, **options})).loss)  # type: ignore[arg-type]

    assert value(kl=1) == pytest.approx(0.5 * math.log(2.5) + 0.2 * math.log(0.4))
    assert value(ce=1) == pytest.approx(-math.log(0.2))
    assert value(l1=1) == pytest.approx(0.6), "the full distance, not half of it"
    soft_p, soft_q = p.sqrt() / p.sqrt().sum(), q.sqrt() / q.sqrt().sum()
    assert value(kl=1, temperature=2) == pytest.approx(4 * float((soft_p * (soft_p / soft_q).log()).sum()))
    assert value(ce=0.1, l1=0.9) == pytest.approx(-0.1 * math.log(0.2) + 0.54)
    result = reference_loss(**given, options=KL)  # type: ignore[arg-type]
    assert float(result.overlap) == pytest.approx(0.7) and not bool(result.agree)


def test_an_output_matrix_of_the_heads_own_learns() -> None:
    """Guards heads with their own output matrix (EAGLE-3): it gets a gradient, the target's gets none."""
    given = inputs(torch.float64, False)
    own = torch.randn(WIDTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    given["pairs"] = [(given["pairs"][0][0], own)]
    slow, fast = reference_loss(**given, options=KL), fused_loss(**given, options=KL)
    for a, b in zip(gradients(slow.loss, given), gradients(fast.loss, given), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-13)
    assert len(gradients(fused_loss(**given, options=KL).loss, given)) == 2


@pytest.mark.parametrize("name", ["kl", "dspark"])
def test_float32_is_as_good_as_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cancellation in the closed form: compared with float64, the error stays within a few
    hundred units in the last place (1e-7) of the largest gradient, as sums of 29 to 37 terms allow."""
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 8)
    single = inputs(torch.float32, True)

    def wide(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x

    double = {name: wide(x) for name, x in single.items() if isinstance(x, Tensor)}
    double["pairs"] = [(wide(x), wide(w)) for x, w in single["pairs"]]  # type: ignore[assignment]
    exact, found = (
        reference_loss(**double, options=LOSSES[name]),  # type: ignore[arg-type]
        fused_loss(**single, options=LOSSES[name]),
    )
    assert abs(exact.loss.item() - found.loss.item()) < 1e-5 * exact.loss.item()
    for a, b in zip(gradients(exact.loss, double), gradients(found.loss, single), strict=True):
        assert (a - b.double()).abs().max() < 3e-5 * a.abs().max()


def test_parts_add_up_to_the_whole() -> None:
    """Guards gradient accumulation: parts divided by the weight of the whole batch, not by their own."""
    given, options = inputs(torch.float64, True), LOSSES["all"]
    whole = fused_loss(**given, options=options)
    total = float(given["weight"].sum())
    losses = []
    for rows in (slice(0, 10), slice(10, ROWS)):
        part = {k: v[rows] if k in ("teacher_row", "weight", "labels") else v for k, v in given.items()}
        (hidden, output), (terms, child_rows) = given["pairs"]
        part["pairs"] = [(hidden[rows], output), (terms[rows], child_rows)]
        losses.append(fused_loss(**part, options=options, total=total).loss)
    assert torch.allclose(sum(losses, torch.zeros(())), whole.loss, rtol=1e-12)
    parts = gradients(losses[0] + losses[1], given)
    for a, b in zip(gradients(whole.loss, given), parts, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-13)


class _Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["kl", "all"])
def test_memory_does_not_grow_with_rows_times_vocabulary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the reason for the fused loss: neither the head's logits nor the teacher's exist as a whole, nor
    for more than a chunk when the vocabulary is large."""
    rows, width, chunk = 800, 300, 16
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    hidden = torch.randn(rows, 4, requires_grad=True)
    teacher, output = torch.randn(rows, 4), torch.randn(width, 4)
    arguments: Any = ([(hidden, output)], teacher, output, torch.randperm(rows), torch.ones(rows))
    labels = torch.randint(0, width, (rows,))
    with _Largest() as fused:
        fused_loss(*arguments, LOSSES[name], labels, overlap=True).loss.backward()
    assert fused.numel <= chunk * width, fused.numel
    monkeypatch.setattr(loss_module, "_CHUNK_LOGITS", 5 * width)
    with _Largest() as small:
        fused_loss(*arguments, LOSSES[name], labels).loss.backward()
    assert small.numel <= max(5 * width, rows * 4), small.numel
    with _Largest() as dense:
        reference_loss(*arguments, LOSSES[name], labels).loss.backward()
    assert dense.numel >= rows * width


def test_confidence_learns_the_chance_of_acceptance() -> None:
    """Guards the label (1 - TV, soft), its missing gradient, and the weights: the gradient of a weighted
    binary cross-entropy is w (c - label) / total, and it vanishes where the stated chance is right."""
    stated = torch.tensor([0.3, -1.2, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    overlap = torch.tensor([0.9, 0.2, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 0.0, 4.0], dtype=torch.float64)
    (found,) = torch.autograd.grad(confidence_loss(stated, overlap, weight, 5.0), [stated])
    assert torch.allclose(found, weight * (stated.sigmoid() - overlap) / 5.0)
    assert found[3] == 0.0
    assert not confidence_loss(stated.detach(), overlap, weight, 5.0).requires_grad


def test_depth_weights() -> None:
    """Guards the meaning of `decay`: 1 for the first slot, falling by e every `decay` slots, or uniform."""
    weights = LossOptions(decay=4.0).depth_weights(5)
    assert weights[0] == 1.0 and torch.allclose(weights[4], torch.tensor(-1.0).exp())
    for options in (
        LossOptions(decay=0.0),
        LossOptions(weighting="uniform"),
        LossOptions(weighting="expected-length"),
    ):
        assert options.depth_weights(3).tolist() == [1.0, 1.0, 1.0]


def test_expected_length_weights_are_its_derivative() -> None:
    """Guards the formula: w_k is proportional to the derivative of 1 + sum_j prod a_j with respect to
    log a_k, taken by autograd; absent depths count nothing, and weights add up to the depths present."""
    overlap = torch.tensor([[0.9, 0.5, 0.7, 0.1], [0.2, 0.3, 0.8, 0.6]], dtype=torch.float64)
    present = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.float64)
    for smoothing in (0.0, 0.5):
        logs = (smoothing + (1 - smoothing) * overlap).log().requires_grad_()
        length = 1 + (logs.exp() * present).cumprod(-1).sum(-1)
        (exact,) = torch.autograd.grad(length.sum(), [logs])
        found = expected_length_weights(overlap, present, smoothing)
        assert torch.allclose(found.sum(-1), present.sum(-1))
        assert torch.allclose(found / found[:, :1], exact / exact[:, :1])
        assert not found[1, 2:].any() and bool((found[:, 0] > found[:, 1]).all())
    assert torch.equal(expected_length_weights(0 * overlap, present, 0.0), present)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl": 0.0}, "no term"),
        ({"ce": -1.0}, "ce must be"),
        ({"decay": 1e-300}, r"decay must be 0 \(uniform weights\) or a number of at least 0\.01, got 1e-300"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"weighting": "linear"}, "uniform, exponential, expected-length"),
        ({"smoothing": 1.5}, "smoothing must be"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    """Guards hours of training with a loss that means nothing."""
    with pytest.raises(OptionError, match=message):
        replace(KL, **options)


@pytest.mark.skipif(not native_available(), reason="no compiler")
@pytest.mark.parametrize("name", [name for name, options in LOSSES.items() if options.temperature == 1])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_compiled_loss_is_the_readable_one(width: int, name: str) -> None:
    """Guards the compiled loss: every term, the ends of rows, rows without a label, teachers that several
    rows share or none has, and laws that are sure of one token."""
    options = LOSSES[name]
    sharp = torch.tensor([1.0, 40.0, 3.0, 1.0, 200.0, 1.0, 5.0])
    logits, target = torch.randn(7, width) * sharp[:, None], torch.randn(4, width) * sharp[:4, None]
    place, labels = torch.tensor([0, 2, 2, 1, 0, 1, 2]), torch.randint(0, width, (7,))
    labels[2] = -1
    eye = torch.eye(width, dtype=torch.float64)
    wanted = logits.double().requires_grad_()
    slow = reference_loss(
        [(wanted, eye)], target.double(), eye, place, torch.ones(7).double(), options, labels
    )
    (slow.loss * 7).backward()
    found = native_learn(logits, target, place, labels, options)
    assert found is not None and wanted.grad is not None
    close = {"rtol": 1e-4, "atol": 2e-5}  # logits of 200 are known to 1e-5
    assert torch.allclose(found.value.double(), slow.per_row, **close)
    assert torch.allclose(found.overlap.double(), slow.overlap, **close)
    assert torch.equal(found.agree, slow.agree)
    assert torch.allclose(logits.double(), wanted.grad, **close)


@pytest.mark.skipif(not native_available(), reason="no compiler")
def test_compiled_loss_has_the_same_bits_for_any_number_of_threads() -> None:
    """Guards exact resuming with another number of threads."""
    given = inputs(torch.float32, scorer=False)
    logits = (given["pairs"][0][0] @ given["output"].T).detach()
    target = given["teacher"] @ given["output"].T
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        own = logits.clone()
        learned = native_learn(own, target, given["teacher_row"], given["labels"], LOSSES["dspark"])
        assert learned is not None
        found.append((own, *learned))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.skipif(not native_available(), reason="no compiler")
def test_compiled_loss_says_that_it_is_not_finite() -> None:
    """Guards the early abort of a run: NaN and infinite logits must not look like a loss."""
    for broken in (math.nan, math.inf):
        logits = torch.randn(2, 40)
        logits[1, 17] = broken
        learned = native_learn(logits, torch.randn(1, 40), torch.tensor([0, 0]), None, KL)
        assert learned is not None
        assert learned.value.isfinite().tolist() == [True, False]


@pytest.mark.skipif(not native_available(), reason="no compiler")
@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_teacher_without_numbers_is_not_read_behind_its_end(broken: float) -> None:
    """Guards memory: what stands behind the end of such a row was its greatest value, and its place was read
    in the head's row, where the next row begins."""
    logits = torch.randn(2, 17)
    logits[0, 5], logits[1, 0] = 10.0, 1e6
    learned = native_learn(logits, torch.full((1, 17), broken), torch.tensor([0, 0]), None, KL)
    assert learned is not None
    assert not learned.agree[0] and not learned.value.isfinite().any()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_batch_without_weight_has_no_loss(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the chunk without rows: on CUDA it ended the run with a ValueError about a range's step."""
    if not compiled:
        monkeypatch.setattr(loss_module, "native_learn", lambda *_: None)
    given = inputs(torch.float32, scorer=True)
    given["weight"].zero_()
    found = fused_loss(**given, options=LOSSES["dspark"], total=2.0, overlap=True)
    assert float(found.loss) == 0.0 and not any(bool(x.any()) for x in gradients(found.loss, given))
    like_cuda: Any = SimpleNamespace(is_cuda=True, shape=(0, WIDTH))
    none = torch.empty(0, dtype=torch.int64)
    assert not list(loss_module._Chunk(none, like_cuda, torch.empty(0, WIDTH), none).parts())


@pytest.mark.parametrize("name", ["kl", "dspark"])
def test_fused_loss_in_float32_is_the_readable_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way of a chunk through the compiled loss, and through torch's operators without it."""
    given = inputs(torch.float32, scorer=True)
    slow = reference_loss(**given, options=LOSSES[name])
    wanted = gradients(slow.loss, given)
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(loss_module, "native_learn", lambda *_: None)
        fast = fused_loss(**given, options=LOSSES[name], overlap=True)
        counted = given["weight"] > 0
        assert torch.allclose(slow.loss, fast.loss, rtol=1e-5)
        assert torch.equal(slow.agree[counted], fast.agree[counted])
        for a, b in zip(wanted, gradients(fast.loss, given), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
