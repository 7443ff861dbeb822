"""Kernels: one file an operation, each with its Triton kernel, wrapper and cost."""
