"""Layers of decoders: linear, norm, rotary, gated MLP, attention around a backend."""
