"""Give MLX's Linux build a fast matrix product. Owns the search for a BLAS; never fails.

The `mlx[cpu]` wheel for Linux links the reference BLAS. A library with the same symbols that is
loaded globally before it wins the lookup (measured, 2 cores: 6 -> 181 GFLOP/s in float32). Must
run before the first `import mlx.core`, and must not import a framework.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

REFERENCE = "reference"


def load_fast_blas() -> str:
    """Load a fast BLAS for MLX on Linux; say which: "openblas", "torch", "reference", "system"."""
    if not sys.platform.startswith("linux"):
        return "system"
    openblas = ctypes.util.find_library("openblas")
    if openblas and _load_global(openblas):
        return "openblas"
    torch_library = _torch_library()
    if torch_library and _load_global(torch_library):
        return "torch"
    return REFERENCE


def import_mlx_core() -> Any:
    """Give `mlx.core`; whoever may be its first importer in a process takes it from here."""
    load_fast_blas()
    return importlib.import_module("mlx.core")


def _torch_library() -> str | None:
    """Find the library of PyTorch that holds MKL's BLAS, without importing PyTorch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    return str(library) if library.exists() else None


def _load_global(path: str) -> bool:
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    # MLX calls the wheel's cblas_sgemm, and that calls this Fortran symbol.
    return hasattr(library, "sgemm_")
