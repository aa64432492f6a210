"""Rotary position embedding: the frequency variants that the supported families use.

Angles and their sine and cosine are computed in float32 whatever the model's dtype is, exactly as the
models were trained (and as transformers computes them); only the result is cast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetspec.target.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] in float32, and the factor that scales sine and cosine (YaRN;
    otherwise 1).
    """
    dim = int(head_dim * rope.partial_rotary_factor)
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama-3.1 scaling: long wavelengths are divided by the factor, short ones stay, the band between is
    blended.
    """
    context = rope.original_max_positions
    wavelength = 2 * math.pi / plain
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    long = wavelength > context / rope.low_freq_factor
    short = wavelength < context / rope.high_freq_factor
    return torch.where(long, plain / rope.factor, torch.where(short, plain, blended))


def _yarn(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate low frequencies, keep high ones, and scale attention by the
    temperature of its Eq 22.
    """

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    def correction_dim(rotations: float) -> float:
        ratio = rope.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    attention = rope.attention_factor
    if attention is None:
        if rope.mscale and rope.mscale_all_dim:
            attention = magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
        else:
            attention = magnitude(rope.factor)
    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    extrapolated, interpolated = 1.0 / frequencies, 1.0 / (rope.factor * frequencies)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep, attention


class RotaryTable:
    """Sine and cosine of every position up to the largest seen, grown on demand; computed once per forward,
    not per layer.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse, self._scale = inverse_frequencies(rope, head_dim)
        self._dtype, self._device = dtype, device
        empty = torch.empty(0, 2 * self._inverse.shape[0], dtype=dtype, device=device)
        self._tables = empty, empty  # replaced as one, so that threads never meet half of a change

    def at(self, positions: Tensor, largest: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [M, 1, rotary_dim] at `positions` [M]; `largest` is their maximum.

        The two halves of the last axis are equal, and the first half of the sine carries the minus sign of
        the rotation.
        """
        tables = self._tables
        if largest >= tables[0].shape[0]:
            tables = self._tables = self._grown(max(largest + 1, 2 * tables[0].shape[0], 256))
        cos, sin = tables
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def _grown(self, count: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(count, dtype=torch.float32)[:, None] * self._inverse[None, :]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        cos, sin = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)
        return cos.to(self._device, self._dtype), sin.to(self._device, self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [M, heads, head_dim] by tables [M, 1, rotary_dim] (half-split layout); dimensions beyond
    rotary_dim pass.
    """
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        return x * cos + x.roll(dim // 2, dims=-1) * sin
    turned = x[..., :dim] * cos + x[..., :dim].roll(dim // 2, dims=-1) * sin
    return torch.cat([turned, x[..., dim:]], dim=-1)
