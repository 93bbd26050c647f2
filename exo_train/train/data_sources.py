"""What `--data` names: paths, each perhaps with a weight, and data sets of the hub.

Owns the reading of that text, the splits of a directory, and the sentence for a path that is not
there. Must not open a file. Nothing without `hub:` before it is ever looked up on the network.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exo_train.errors import ConfigError, DataError
from exo_train.train.data_files import is_data_file

MAX_SOURCES = 64
MAX_WEIGHT = 1000.0
MAX_LISTED = 8
HUB = "hub:"
SPLITS = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "test": "test",
}

_WEIGHT = re.compile(r"\d+(\.\d*)?|\.\d+")
_HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?)"
    r"(:(?P<split>[A-Za-z_][\w.-]*(\[[^\]]*\])?))?"
)
_SPLIT_FILE = re.compile(r"(?P<split>[a-z]+)(?P<part>-\d+-of-\d+)?(\.[a-z]+)(\.gz)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file, a directory or `hub:name[:split]`; its rows come `weight` times in an epoch."""

    place: str
    weight: float = 1.0

    @property
    def path(self) -> Path:
        return Path(self.place).expanduser()

    @property
    def hub_name(self) -> tuple[str, str | None] | None:
        """Give name and split of a hub's data set; None for a path."""
        if not self.place.startswith(HUB):
            return None
        match = _HUB_NAME.fullmatch(self.place.removeprefix(HUB))
        if match is None:
            raise ConfigError(
                f"'data': '{self.place}' names no data set of the hub; write it as "
                f"{HUB}user/name or {HUB}user/name:split"
            )
        return match["name"], match["split"]


def read_sources(text: str) -> tuple[Source, ...]:
    """Read `a.jsonl:2,b.csv:0.5`; what exists as a path is one, whatever is in its name.

    Raises ConfigError for what cannot be a place or a weight.
    """
    if exists(text):
        return (Source(place=text),)
    parts = text.split(",")
    if len(parts) > MAX_SOURCES:
        raise ConfigError(f"'data' names {len(parts)} places; {MAX_SOURCES} are the most")
    sources: list[Source] = []
    while parts:
        # The longest name that exists, as names may hold commas; else up to the next comma.
        ends = range(len(parts), 1, -1)
        end = next((end for end in ends if _is_there(",".join(parts[:end]))), 1)
        sources.append(_source(",".join(parts[:end]).strip()))
        parts = parts[end:]
    return tuple(sources)


def absolute(text: str) -> str:
    """Give the same places for a process that starts in another directory."""
    return ",".join(
        (source.place if source.hub_name else str(source.path.resolve()))
        + ("" if source.weight == 1 else f":{source.weight:g}")
        for source in read_sources(text)
    )


def split_files(folder: Path) -> Mapping[str, Sequence[Path]]:
    """Find the files of each split in a directory: train, valid (validation, val) and test.

    A split is one file of any format, or the parts that the hub makes (train-00000-of-00002).
    Raises DataError where there is no train, or two files claim to be one split.
    """
    found: dict[str, list[Path]] = {}
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise DataError(f"cannot read '{folder}': {error.strerror or error}") from None
    for name in names:
        match = _SPLIT_FILE.fullmatch(name.lower())
        if match and match["split"] in SPLITS and is_data_file(name):
            found.setdefault(SPLITS[match["split"]], []).append(folder / name)
    if "train" not in found:
        there = ", ".join([name for name in names if is_data_file(name)][:MAX_LISTED])
        raise DataError(
            f"directory '{folder}' has no train.jsonl, nor train in another format (data files "
            f"there: {there or 'none'}); rename the file with the training rows, or give its path"
        )
    for split, paths in found.items():
        if len(paths) > 1 and not all("-of-" in path.name for path in paths):
            raise DataError(
                f"directory '{folder}' has {len(paths)} files for the {split} rows: "
                f"{', '.join(path.name for path in paths)}; leave one, or name files with commas"
            )
    return found


def exists(place: str) -> bool:
    try:
        return bool(place.strip()) and os.path.exists(Path(place).expanduser())
    except (OSError, RuntimeError, ValueError):  # too long, ~unknown user, a NUL
        return False


def missing(place: str) -> DataError:
    """Say that a path is not there, with the nearest name that is."""
    path = Path(place)
    with contextlib.suppress(RuntimeError):  # ~unknown
        path = path.expanduser()
    hint = _nearest_path(path)
    if not hint and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", place):
        hint = f"; a data set of the hub is written {HUB}{place}"
    return DataError(f"no data file or directory at '{place}'{hint or '; check the spelling'}")


def _is_there(text: str) -> bool:
    place, weight = _parted(text.strip())
    return exists(text.strip()) or (weight is not None and exists(place))


def _source(text: str) -> Source:
    if not text:
        raise ConfigError("'data' has nothing between two commas; give paths, comma-separated")
    place, weight = _parted(text)
    if weight is None or exists(text):
        return Source(place=text)
    if not 0 < weight <= MAX_WEIGHT:
        raise ConfigError(
            f"'data': the weight of '{place}' must be above 0 and at most {MAX_WEIGHT:g}, got "
            f"{weight:g}; leave the file out, or name it without a weight"
        )
    return Source(place=place, weight=weight)


def _parted(text: str) -> tuple[str, float | None]:
    """Part a weight from its place; None: what follows the last colon is no number."""
    place, _, tail = text.rpartition(":")
    return (place, float(tail)) if place and _WEIGHT.fullmatch(tail) else (text, None)


def _nearest_path(path: Path) -> str:
    """Suggest the nearest existing name for the first part of `path` that does not exist."""
    part = path
    while part.parent != part and not exists(str(part.parent)):
        part = part.parent
    try:
        names = os.listdir(part.parent)
    except (OSError, ValueError):
        names = []
    close = difflib.get_close_matches(part.name, names, n=1)
    return f"; did you mean '{part.parent / close[0]}'?" if close else ""
