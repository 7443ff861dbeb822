"""Paged key-value memory."""
