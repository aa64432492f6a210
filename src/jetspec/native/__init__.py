"""Compiled kernels. Everything here is optional: without a C compiler the portable path runs, with the same results up to rounding."""
