"""Opens a model wherever it lies on disk, and checks it before anything is loaded.

Owns the choice of source and the check of names and shapes. Must not touch the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exo_train.errors import ConfigError, ModelError
from exo_train.models.decode import FLOATS, GGUF_PREFIX, encoded_num_bytes
from exo_train.models.gguf_file import GgufFile
from exo_train.models.nf4_dir import Nf4Dir
from exo_train.models.packed import NF4_PACKING
from exo_train.models.packed_dir import PackedDir
from exo_train.models.safetensors_dir import SafetensorsDir, read_json
from exo_train.models.spec import LM_HEAD, ModelSpec
from exo_train.models.tensors import TensorInfo, TensorSource


def open_model(path: Path) -> tuple[ModelSpec, TensorSource]:
    """Open a Hugging Face directory or a .gguf file with all tensors of its spec in place."""
    if not path.exists():
        raise ModelError(f"{path}: no such model directory or file")
    if path.is_dir():
        config_file = path / "config.json"
        if not config_file.is_file():
            raise ModelError(f"{path}: not a model directory, it has no config.json")
        spec = ModelSpec.from_config(read_json(config_file), place=str(config_file))
        stored = SafetensorsDir(path)
        source: TensorSource = stored
        if spec.quantisation is not None and spec.quantisation.default == NF4_PACKING:
            source = Nf4Dir(stored, spec.quantisation, place=str(path))
        elif spec.quantisation is not None:
            source = PackedDir(stored, spec.quantisation, place=str(path))
    elif path.suffix.lower() == ".gguf":
        gguf_file = GgufFile(path)
        spec = ModelSpec.from_config(gguf_file.config, place=str(path))
        source = gguf_file
    else:
        raise ModelError(f"{path}: not a model; give a model directory or a .gguf file")
    check_tensors(spec, source.infos, place=str(path))
    return spec, source


def check_tensors(spec: ModelSpec, infos: Mapping[str, TensorInfo], *, place: str) -> None:
    """Refuse a model that lacks a tensor of its spec, or has one of another shape or encoding."""
    shapes = spec.all_tensor_shapes()
    missing = [name for name in shapes if name not in infos]
    if missing == [LM_HEAD]:
        raise ModelError(
            f"{place}: tensor '{LM_HEAD}' is missing; if the model ties it to the embedding, its "
            'config must say "tie_word_embeddings": true'
        )
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{place}: {len(missing)} of {len(shapes)} tensors are missing: "
            f"{', '.join(missing[:3])}{more}; fetch the model again"
        )
    for name, shape in shapes.items():
        info = infos[name]
        if info.shape != shape:
            raise ModelError(
                f"{place}: tensor '{name}' has shape {list(info.shape)}, "
                f"the config needs {list(shape)}"
            )
        encoded_num_bytes(info.encoding, info.shape, place=f"{place}: tensor '{name}'")


def require_floats(infos: Mapping[str, TensorInfo]) -> None:
    """Refuse a model whose own weights cannot be trained: raises ConfigError for a packed one."""
    for name, info in infos.items():
        if info.encoding.removeprefix(GGUF_PREFIX) not in FLOATS:
            raise ConfigError(
                f"'full' trains the weights themselves, and {name} is quantised "
                f"({info.encoding}): leave --full out, or give the model in F32, F16 or BF16"
            )
