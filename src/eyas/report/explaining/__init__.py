"""A running engine taken apart: ranges around its parts, clocks, counts, their sums."""
