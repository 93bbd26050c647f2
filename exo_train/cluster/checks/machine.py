"""Has this device what training needs: disk, memory, open files.

Owns the thresholds and the sentences. Pure: `reading.py` gives the facts.
"""

from __future__ import annotations

from dataclasses import dataclass

from exo_train.cluster.checks.finding import Finding

GB = 10**9
DISK_WRONG_BYTES = 1 * GB
DISK_NOTE_BYTES = 10 * GB  # a model of 8B parameters in 16 bits takes 16 GB, half of it 8
MEMORY_WRONG_BYTES = GB // 2
MEMORY_NOTE_BYTES = 2 * GB
# Share of the time of the last minute in which some process waited for memory (Linux' PSI).
PRESSURE_NOTE_PERCENT = 10.0
OPEN_FILES_NOTE = 1024
OPEN_FILES_WRONG_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    home: str
    free_bytes: int | None  # None: could not be asked
    write_error: str = ""  # why the home cannot be written


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None  # of a container or service
    limit_free_bytes: int = 0
    pressure_percent: float | None = None
    macos_pressure: int | None = None  # kern.memorystatus_vm_pressure_level: 1, 2 or 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFilesFacts:
    limit: int | None  # None: this system has none
    open_by_agent: int | None = None


def check_disk(facts: DiskFacts) -> list[Finding]:
    """Find a home that cannot be written or is about to be full."""
    if facts.write_error:
        said = f"the home folder {facts.home} cannot be written: {facts.write_error}"
        fix = "make it writable, or set EXO_TRAIN_HOME to a folder that is"
        return [Finding("disk", "wrong", said, fix, "configuration")]
    if facts.free_bytes is None:
        return [Finding("disk", "unknown", f"free space at {facts.home} could not be read")]
    said = f"{facts.free_bytes / GB:.1f} GB are free at {facts.home}"
    fix = "free space there, or set EXO_TRAIN_HOME to a folder on another disk"
    if facts.free_bytes < DISK_WRONG_BYTES:
        said += f", less than {DISK_WRONG_BYTES / GB:.0f} GB: models and checkpoints do not fit"
        return [Finding("disk", "wrong", said, fix, "configuration")]
    if facts.free_bytes < DISK_NOTE_BYTES:
        said += f", less than {DISK_NOTE_BYTES / GB:.0f} GB: a large model may not fit"
        return [Finding("disk", "note", said, fix, "configuration")]
    return [Finding("disk", "ok", said, area="configuration")]


def check_memory(facts: MemoryFacts) -> list[Finding]:
    """Find limits that containers set, too little free memory, and a system that swaps."""
    found = []
    free_bytes = facts.available_bytes
    if facts.limit_bytes is not None and facts.limit_bytes < facts.total_bytes:
        free_bytes = min(free_bytes, facts.limit_free_bytes)
        said = (
            f"a container or service may take {facts.limit_bytes / GB:.1f} GB of this device's "
            f"{facts.total_bytes / GB:.1f} GB ({facts.limit_free_bytes / GB:.1f} GB left); only "
            f"that is offered for training"
        )
        fix = "raise the limit (docker run --memory, or MemoryMax= of the service) to offer more"
        found.append(Finding("memory", "note", said, fix, "memory"))
    said = f"{free_bytes / GB:.1f} GB of {facts.total_bytes / GB:.1f} GB memory are free"
    fix = "close other programs, or offer less and let larger devices carry more layers"
    if free_bytes < MEMORY_WRONG_BYTES:
        said += f", less than the {MEMORY_WRONG_BYTES / GB:.1f} GB that a stage needs at least"
        found.append(Finding("memory", "wrong", said, fix, "memory"))
    elif free_bytes < MEMORY_NOTE_BYTES:
        found.append(Finding("memory", "note", f"{said}: enough for small shares", fix, "memory"))
    else:
        found.append(Finding("memory", "ok", said, area="memory"))
    if facts.pressure_percent is not None and facts.pressure_percent >= PRESSURE_NOTE_PERCENT:
        said = (
            f"programs waited for memory in {facts.pressure_percent:.0f} % of the last minute: the "
            f"system swaps, and this device will be slow"
        )
        found.append(Finding("memory", "note", said, "close other programs", "memory"))
    if facts.macos_pressure in (2, 4):
        word = "critical" if facts.macos_pressure == 4 else "raised"
        said = f"macOS says that memory pressure is {word}; this device will be slow"
        found.append(Finding("memory", "note", said, "close other programs", "memory"))
    return found


def check_open_files(facts: OpenFilesFacts) -> list[Finding]:
    """Find a limit of open files that connections could run into."""
    limit, used = facts.limit, facts.open_by_agent
    if limit is None:
        return []
    fix = f"run `ulimit -n {4 * OPEN_FILES_NOTE}` in the shell before `exo-train join`"
    if used is not None and used > OPEN_FILES_WRONG_SHARE * limit:
        said = f"the agent has {used} of {limit} allowed files and connections open"
        return [Finding("open files", "wrong", said, fix, "configuration")]
    if limit < OPEN_FILES_NOTE:
        said = (
            f"only {limit} files and connections may be open at once ({OPEN_FILES_NOTE} is usual)"
        )
        return [Finding("open files", "note", said, fix, "configuration")]
    return [Finding("open files", "ok", f"up to {limit} open files", area="configuration")]
