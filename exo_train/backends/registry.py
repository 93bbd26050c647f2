"""Which backends this device has, and how to get one. Owns their names and packages.

Must not import a framework before one is asked for by name: a device may lack either.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Protocol, cast

from exo_train.backends.base import Stage, StageOptions
from exo_train.backends.fast_blas import import_mlx_core
from exo_train.errors import ConfigError
from exo_train.lora_config import LoraConfig
from exo_train.models.spec import ModelSpec
from exo_train.models.tensors import TensorSource
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.stages import StageSpec

# In order of preference: where MLX runs on a GPU it is the faster one.
_PACKAGES = {"mlx": ("mlx", "mlx_lm"), "torch": ("torch",)}
_MODULES = {
    "mlx": "exo_train.backends.mlx_backend",
    "torch": "exo_train.backends.torch_backend",
}
_INSTALL = {"mlx": "pip install mlx mlx-lm", "torch": "pip install 'exo-train[torch]'"}


class Backend(Protocol):
    """What each backend's module offers."""

    def load_stage(
        self,
        spec: ModelSpec,
        stage: StageSpec,
        tensors: TensorSource,
        *,
        device: str,
        lora: LoraConfig,
        optimizer: OptimizerConfig,
        options: StageOptions,
    ) -> Stage:
        """Read this stage's tensors, and no others, and make it ready to train on `device`."""
        ...


def available_backends() -> tuple[str, ...]:
    """Name the backends whose packages are installed, preferred first."""
    return tuple(name for name, packages in _PACKAGES.items() if not _missing(packages))


def load_backend(name: str) -> Backend:
    """Import a backend's framework and give its functions."""
    if name not in _PACKAGES:
        raise ConfigError(f"no backend is called '{name}'; known: {', '.join(_PACKAGES)}")
    missing = _missing(_PACKAGES[name])
    if missing:
        raise ConfigError(
            f"backend '{name}' needs {' and '.join(missing)}, not installed here; run: "
            f"{_INSTALL[name]}"
        )
    if name == "mlx":
        import_mlx_core()  # before the backend's modules import it
    return cast(Backend, importlib.import_module(_MODULES[name]))


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [package for package in packages if importlib.util.find_spec(package) is None]
