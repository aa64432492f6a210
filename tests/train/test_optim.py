"""Muon moves matrices along their singular directions, and is AdamW for everything else."""

from __future__ import annotations

import copy

import torch
from torch import nn

from jetspec.train.optim import Muon, make_optimizer, orthogonalise


class Net(nn.Module):
    """Matrices of three shapes, a table and a vector."""

    def __init__(self) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(1)
        shapes = {"wide": (6, 20), "tall": (20, 6), "norm": (6,), "slot_embed": (5, 6)}
        self.tensors = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(shape, generator=dice)) for name, shape in shapes.items()}
        )


def test_singular_values_move_to_one_and_vectors_stay() -> None:
    """Guards the iteration (a wrong coefficient diverges) and the side that is transposed."""
    for shape in ((6, 20), (20, 6), (8, 8)):
        u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
        values = torch.logspace(0, -1.5, min(shape))
        found = orthogonalise(u @ values.diag() @ v)
        core = u.T @ found @ v.T
        assert float(core.diag().min()) > 0.6 and float(core.diag().max()) < 1.3
        assert (core - core.diag().diag()).abs().max() < 1e-3


def test_adamw_group_is_torch_adamw() -> None:
    """Guards the second half: bias correction, epsilon and moments are those of torch.optim.AdamW."""
    ours, theirs = Net(), Net()
    optimizer = make_optimizer(ours, "muon", 0.01, (0.9, 0.95))
    assert isinstance(optimizer, Muon)
    expected = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(5):
        dice = torch.Generator().manual_seed(step)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=dice)
            b.grad = a.grad.clone()
        optimizer.step()
        expected.step()
    for name in ("norm", "slot_embed"):
        assert torch.allclose(ours.tensors[name], theirs.tensors[name], atol=1e-6), name
    assert not torch.allclose(ours.tensors["wide"], theirs.tensors["wide"], atol=1e-2)


def test_a_matrix_moves_as_far_as_with_adamw() -> None:
    """Guards the scale, by which one learning rate serves both groups: an entry's step has root mean square
    0.2 times the rate in matrices of every shape, whatever the size of the gradient."""
    net = Net()
    before = copy.deepcopy(net)
    optimizer = make_optimizer(net, "muon", 0.01, (0.9, 0.95))
    for name, tensor in net.tensors.items():
        tensor.grad = 1e3 * torch.randn(tensor.shape) if name != "norm" else None
    optimizer.step()
    for name in ("wide", "tall"):
        moved = (net.tensors[name] - before.tensors[name]).detach().pow(2).mean().sqrt()
        assert 0.5 * 0.002 < float(moved) < 1.2 * 0.002, name
    assert torch.equal(net.tensors["norm"], before.tensors["norm"]), "no gradient, no step"
