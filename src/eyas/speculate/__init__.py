"""Speculation: draft trees, drafters, acceptance, drafter checkpoints."""
