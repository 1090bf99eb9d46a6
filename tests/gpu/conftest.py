"""Kernels that need no GPU."""

from fake_kernels import h200, kernels  # noqa: F401
