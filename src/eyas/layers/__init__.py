"""Layers of decoders: linear, norm, rotary, gated MLP, attentions around a backend."""
