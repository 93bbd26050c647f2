"""Is the software here as it should be: libraries, Python, backend, variables of a proxy.

Owns the bounds' comparison and the sentences. Pure: `reading.py` gives the facts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exo_train.cluster.checks.finding import Finding

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# Those whose wrong pairing breaks the cluster, not just one model's format.
CHECKED_LIBRARIES = ("grpcio", "protobuf", "zeroconf", "cryptography", "spake2", "numpy")
SLOW_BLAS_FACTOR = 30  # measured, 2 cores, float32: 6 instead of 181 GFLOP/s


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFacts:
    name: str
    wanted: str  # a specifier like ">=6.31.1,<8"
    installed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    platform: str
    machine: str  # "arm64", "x86_64", …
    installed: tuple[str, ...]  # "mlx", "torch"
    blas: str | None = None  # Linux: as `load_fast_blas` says; None: not asked or no answer
    has_metal: bool | None = None  # macOS; None: not asked or no answer
    is_translated: bool = False  # macOS: an Intel Python on an Apple chip


def check_libraries(libraries: Sequence[LibraryFacts]) -> list[Finding]:
    """Compare installed versions with what this version of exo-train asks for."""
    found, fine = [], []
    for library in libraries:
        wanted = f"{library.name}{library.wanted}"
        fix = f"pip install '{wanted}'"
        if library.installed is None:
            said = f"{library.name} is not installed; exo-train needs {wanted}"
        elif not satisfies(library.installed, library.wanted):
            said = f"{library.name} {library.installed} is installed; exo-train needs {wanted}"
        else:
            fine.append(f"{library.name} {library.installed}")
            continue
        found.append(Finding("libraries", "wrong", said, fix, "configuration"))
    if fine:
        found.append(Finding("libraries", "ok", ", ".join(fine), area="configuration"))
    if not libraries:
        said = "what this copy of exo-train asks for is not on record (it was not installed by pip)"
        found.append(Finding("libraries", "unknown", said, area="configuration"))
    return found


def satisfies(version: str, specifier: str) -> bool:
    """Compare the release numbers alone, for >=, >, <=, <, == and !=; other clauses hold."""
    have = _release(version)
    for clause in specifier.split(","):
        match = re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*([0-9][0-9.]*)\s*", clause)
        if match is None:
            continue
        want = _release(match[2])
        width = max(len(have), len(want))
        left, right = _padded(have, width), _padded(want, width)
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            ">": left > right,
            "<": left < right,
        }
        if not holds[match[1]]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _padded(release: tuple[int, ...], width: int) -> tuple[int, ...]:
    return release + (0,) * (width - len(release))


def check_python(version: str, wanted: str) -> list[Finding]:
    if satisfies(version, wanted):
        return [Finding("python", "ok", f"Python {version}", area="configuration")]
    said = f"Python {version} runs exo-train, which needs {wanted}"
    fix = "install a newer Python and exo-train in it"
    return [Finding("python", "wrong", said, fix, "configuration")]


def check_backend(facts: BackendFacts) -> list[Finding]:
    """Find what makes this device compute slowly or not at all."""
    if facts.platform == "darwin" and facts.is_translated:
        said = (
            "this Python was made for Intel and runs translated (Rosetta): MLX does not work in it"
        )
        fix = "install Python for Apple silicon (arm64), and exo-train in it"
        return [Finding("backend", "wrong", said, fix, "configuration")]
    if not facts.installed:
        fix = "pip install 'exo-train[torch]'"
        said = "no backend is installed: this device can coordinate, but not compute"
        return [Finding("backend", "wrong", said, fix, "configuration")]
    if facts.platform == "darwin" and "mlx" in facts.installed and facts.has_metal is False:
        said = "MLX does not find Metal, so the GPU is not used (a virtual machine, or no login)"
        fix = "run exo-train on the Mac itself, as a user who is logged in"
        return [Finding("backend", "wrong", said, fix, "configuration")]
    if facts.platform == "linux" and "mlx" in facts.installed and facts.blas == "reference":
        said = (
            f"MLX computes with the reference BLAS, about {SLOW_BLAS_FACTOR} times slower than "
            f"this processor can; OpenBLAS (libopenblas0 or openblas in the system's packages) or "
            f"PyTorch brings a fast one"
        )
        fix = "pip install 'exo-train[torch]'"
        return [Finding("backend", "wrong", said, fix, "configuration")]
    said = f"backends: {', '.join(facts.installed)}"
    asks = "mlx" in facts.installed and facts.platform in ("linux", "darwin")
    if asks and facts.blas is None and facts.has_metal is None:
        said += "; how fast MLX computes here could not be asked"
        return [Finding("backend", "unknown", said, area="configuration")]
    if facts.blas:
        said += f" (MLX's matrix products by {facts.blas})"
    return [Finding("backend", "ok", said, area="configuration")]


def check_proxy(environment: Mapping[str, str]) -> list[Finding]:
    """Tell what a proxy is used for: downloads of models, never the cluster's own connections."""
    names = {name for name in environment if name.lower() in PROXY_VARIABLES and environment[name]}
    if not names:
        return [Finding("proxy", "ok", "no proxy is set", area="configuration")]
    said = (
        f"a proxy is set ({', '.join(sorted(names))}): it is used for downloads of models only; "
        f"devices are always connected to directly"
    )
    return [Finding("proxy", "note", said, area="configuration")]
