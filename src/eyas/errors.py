"""Error classes a user meets.

Every message gives three things: the value that was wrong, the rule it broke, and the remedy.
This file knows nothing of the rest of the package; the CLI prints these without a stack trace.
"""

from __future__ import annotations


class EyasError(Exception):
    """Base of every error that is the user's to mend."""

    def __init__(self, value: str, rule: str, remedy: str) -> None:
        super().__init__(f"{value}: {rule}; {remedy}")
        self.value, self.rule, self.remedy = value, rule, remedy


class ConfigError(EyasError):
    """A configuration value or key that cannot be honoured."""


class CheckpointError(EyasError):
    """A file that is unreadable, or whose tensors do not fit the model."""


class RequestError(EyasError):
    """A prompt or its sampling parameters cannot be served; other requests go on."""


class CapacityError(EyasError):
    """The pools are too small for what was asked."""


class RankError(EyasError):
    """A rank of a tensor-parallel group failed or was lost; its engines cannot go on."""


class RecordError(EyasError):
    """A trace or a record that cannot be read as one."""
