"""Reading the small YAML files that users write. Owns their limits and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from exo_train.errors import ConfigError

MAX_FILE_BYTES = 1 << 20


def read_mapping(file: Path, *, option: str) -> dict[str, Any]:
    """Give the file's top-level mapping ({} for an empty file); `option` names it in messages."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{option} {file} is larger than {MAX_FILE_BYTES} bytes")
        content = yaml.safe_load(file.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file} is no YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{option} {file} must hold 'key: value' lines")
    return {str(key): value for key, value in content.items()}
