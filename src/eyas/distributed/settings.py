"""Settings of the libraries beneath, as this process sees them: read here, and handed to ranks.

The one file that touches the environment, and only variables that gloo, NCCL, OpenMP, MKL, CUDA and
torch read. eyas itself is told everything by arguments.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

import torch

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_")
NAMES = ("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE")


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySettings:
    """What decides how the libraries of one process work."""

    variables: dict[str, str]
    """Environment variables of the libraries, by name."""
    threads: int
    """Of one operation on a CPU."""
    interop_threads: int
    matmul_precision: str
    """Of float32 products; see `torch.set_float32_matmul_precision`."""
    reduced_precision: bool
    """Whether bfloat16 products on a GPU may add in bfloat16."""

    @classmethod
    def observe(cls) -> Self:
        """The settings of this process now."""
        return cls(
            variables={k: v for k, v in sorted(os.environ.items()) if is_a_librarys(k)},
            threads=torch.get_num_threads(),
            interop_threads=torch.get_num_interop_threads(),
            matmul_precision=torch.get_float32_matmul_precision(),
            reduced_precision=torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        )

    def apply(self) -> None:
        """Make this process's settings these; for a fresh process, before it works."""
        for name in [k for k in os.environ if is_a_librarys(k) and k not in self.variables]:
            del os.environ[name]
        os.environ.update(self.variables)
        torch.set_num_threads(self.threads)
        if torch.get_num_interop_threads() != self.interop_threads:
            torch.set_num_interop_threads(self.interop_threads)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self.reduced_precision


def is_a_librarys(name: str) -> bool:
    """Whether an environment variable is read by a library whose settings ranks must share."""
    return name.startswith(PREFIXES) or name in NAMES
