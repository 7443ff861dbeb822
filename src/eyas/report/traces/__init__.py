"""Profiler traces of any engine: read as a stream, cut into cycles, every kernel given a name."""
