"""Data sets of the Hugging Face hub, through the `datasets` library where it is installed.

Owns the one place of the training data that touches the network, and only for names that the
user wrote with `hub:` before them. Must not recognise rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from exo_train.errors import DataError
from exo_train.train.data_files import Record, without_nulls
from exo_train.train.data_sources import SPLITS


def hub_splits(name: str, split: str | None) -> Mapping[str, Iterator[Record]]:
    """Fetch a data set; with a `split` its rows are the training rows.

    Without one, train is, and a validation split is held out. Raises DataError.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"'hub:{name}' is a data set of the hub, and the library that fetches those is not "
            "installed: pip install 'exo-train[datasets]', or give a file"
        ) from None
    try:
        loaded = datasets.load_dataset(name, split=split)
    except Exception as error:  # noqa: BLE001  whatever that library and its network raise
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        wanted = f"split '{split}' of " if split else ""
        raise DataError(
            f"{wanted}data set '{name}' cannot be fetched from the hub ({said}); check the name "
            "and the network, or download it and give the file"
        ) from None
    if split is not None:
        return {"train": _records(loaded)}
    found = {SPLITS[key]: _records(rows) for key, rows in loaded.items() if key in SPLITS}
    if "train" not in found:
        raise DataError(
            f"data set '{name}' has no split 'train' (there are {', '.join(loaded) or 'none'}); "
            f"name the one to train on: hub:{name}:SPLIT"
        )
    return found


def _records(rows: Iterable[dict[str, Any]]) -> Iterator[Record]:
    for number, row in enumerate(rows, start=1):
        yield Record(place=f"row {number}", value=without_nulls(row))
