"""Tensor parallelism: the group of ranks that hold one network together."""
