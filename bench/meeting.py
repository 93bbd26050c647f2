"""How fast devices become one membership: quietly, and with 20 % of multicast lost.

Makes hosts as network namespaces (tests/lan), so it needs root on Linux, and nothing else must
keep the cores busy. Quiet: from the start of `join` on a second device until both devices list
both. Lossy: five devices start within 3 s; from the last start until all print one view hash.

Usage, in the repository: python -m bench.meeting [--rounds 20] [--quiet-rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from tests.lan.joining import JOINED_WITHIN_S, NUM_DEVICES, join_under_loss, time_to_member_s
from tests.lan.lan_agents import LanAgents
from tests.lan.namespaces import Lan, why_no_hub, why_not


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quiet-rounds", type=int, default=5)
    options = parser.parse_args()
    missing = why_not() or why_no_hub()
    if missing:
        sys.exit(f"bench/meeting.py: {missing}")
    with tempfile.TemporaryDirectory(prefix="exo-train-bench-") as folder:
        quiet_s = [_quiet_s(Path(folder) / f"quiet{i}") for i in range(options.quiet_rounds)]
        _print_times("join to member, quiet LAN", quiet_s)
        if not _lossy(Path(folder), options.rounds):
            sys.exit(1)


def _quiet_s(root: Path) -> float:
    with Lan() as lan, LanAgents(lan, root) as launch:
        for number in (1, 2):
            lan.add_host(number)
        return time_to_member_s(launch)


def _lossy(root: Path, num_rounds: int) -> bool:
    """Print each round; tell whether all became one membership in time."""
    times_s = []
    with Lan() as lan:
        for number in range(1, NUM_DEVICES + 1):
            lan.add_host(number, on_hub=True)
        for seed in range(num_rounds):
            with LanAgents(lan, root / f"lossy{seed}") as launch:
                try:
                    joined = join_under_loss(lan, launch, seed=seed)
                except AssertionError as error:
                    print(f"round {seed}: not one membership: {error}")
                    continue
            times_s.append(joined.took_s)
            print(f"round {seed}: {joined.took_s:.1f} s, view {' '.join(joined.view_hashes)}")
    print(f"{len(times_s)} of {num_rounds} rounds: one membership within {JOINED_WITHIN_S:.0f} s")
    _print_times(f"{NUM_DEVICES} devices, 20 % of multicast lost", times_s)
    return len(times_s) == num_rounds


def _print_times(what: str, times_s: list[float]) -> None:
    if times_s:
        print(
            f"{what}: median {statistics.median(times_s):.1f} s, "
            f"{min(times_s):.1f} to {max(times_s):.1f} s, {len(times_s)} times"
        )


if __name__ == "__main__":
    main()
