"""Compiled kernels for the CPU. Every one has a portable twin in Python that its callers fall back to."""

from jetspec.native.bindings import library, native_available

__all__ = ["library", "native_available"]
