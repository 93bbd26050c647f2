"""Choosing a backend: lazily, by name, and with a fast matrix product on Linux."""

from __future__ import annotations

import subprocess
import sys

import pytest

from exo_train.backends import registry
from exo_train.backends.memory import memory_errors_named
from exo_train.errors import ConfigError, DoesNotFitError
from exo_train.plan.stages import StageSpec


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_asking_what_is_available_imports_no_framework() -> None:
    code = (
        "import sys; from exo_train.backends.registry import available_backends\n"
        "print(available_backends(), sorted({'mlx.core', 'torch', 'mlx_lm'} & set(sys.modules)))"
    )
    assert run_python(code).strip() == "('mlx', 'torch') []"


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no backend is called 'jax'; known: mlx, torch"):
        registry.load_backend("jax")


def test_a_missing_package_is_told_with_the_command() -> None:
    # A module blocked in sys.modules is what an uninstalled one is to the import system.
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from exo_train.backends import registry\n"
        "from exo_train.errors import ConfigError\n"
        "print(registry.available_backends())\n"
        "try: registry.load_backend('torch')\n"
        "except ConfigError as error: print(error)"
    )
    listed, message = run_python(code).strip().splitlines()
    assert listed == "('mlx',)"
    assert message.endswith("not installed here; run: pip install 'exo-train[torch]'")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux's wheel is slow")
def test_fast_blas_gives_right_numbers_and_lets_torch_in_afterwards() -> None:
    code = """
from exo_train.backends.fast_blas import load_fast_blas
used = load_fast_blas()
import sys
assert "torch" not in sys.modules
import mlx.core as mx, numpy as np
a = np.random.default_rng(0).standard_normal((300, 200), np.float32)
error = np.abs(np.array(mx.array(a).T @ mx.array(a)) - a.T @ a).max()
import torch
both = np.abs((torch.from_numpy(a).T @ torch.from_numpy(a)).numpy() - a.T @ a).max()
print(used, error < 1e-3, both < 1e-3)
"""
    used, in_mlx, in_torch = run_python(code).split()
    assert used in ("openblas", "torch")
    assert (in_mlx, in_torch) == ("True", "True")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux's wheel is slow")
@pytest.mark.parametrize(
    "first",
    [
        "from exo_train.backends.registry import load_backend; load_backend('mlx')",
        "from exo_train.train.meter import open_meter; open_meter('mlx', 'cpu').release()",
    ],
    ids=["backend", "meter"],
)
def test_whoever_imports_mlx_first_has_a_fast_blas_loaded_before(first: str) -> None:
    """Afterwards is too late: a worker whose meter came first was a tenth as fast."""
    code = f"""
import ctypes, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            print(hasattr(ctypes.CDLL(None), "sgemm_"))
sys.meta_path.insert(0, Watch())
{first}
"""
    assert run_python(code).split() == ["True"]


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes",
        "[malloc] Unable to allocate 8 bytes.",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008)",
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed "
        "buffer size of 8 bytes.",
    ],
)
def test_running_out_of_memory_names_the_layers(text: str) -> None:
    stage = StageSpec(start=2, end=5, embedding=False, head=False)
    told = pytest.raises(DoesNotFitError, match=r"layers 2\.\.4 ran out of memory on cuda:0")
    with told, memory_errors_named(stage, "cuda:0"):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="shape"), memory_errors_named(stage, "cpu"):
        raise RuntimeError("shape mismatch")
