"""`exo-train doctor` as a process.

Each runs in a network namespace of its own: the doctor asks the network by multicast.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exo_train.cluster.checks.finding import Finding, exit_code
from exo_train.cluster.home import Home, RememberedPeer
from exo_train.peer import Address
from tests.paired_homes import admit

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        sys.platform != "linux" or not shutil.which("ip") or not shutil.which("unshare"),
        reason="needs Linux' unshare and ip",
    ),
]

LAN = """
ip link set lo up
ip link add lan0 type veth peer name far0
ip addr add 10.57.0.1/24 dev lan0
ip link set lan0 up
ip link set far0 up
ip route add default via 10.57.0.9
"""


def run_alone(setup: str, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor in a network namespace that has what `setup` makes."""
    prefix = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-ec"]
    probe = subprocess.run([*prefix, "ip link set lo up"], capture_output=True, timeout=20)
    if probe.returncode != 0:
        pytest.skip(f"no network namespaces here: {probe.stderr.decode().strip()}")
    script = f'{setup}\nexec "$0" -m exo_train doctor "$@"'
    return subprocess.run(
        [*prefix, script, sys.executable, *options],
        env={**os.environ, "EXO_TRAIN_HOME": str(home), "COLUMNS": "60"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_process_on_a_quiet_network(tmp_path: Path) -> None:
    done = run_alone(LAN, tmp_path, "--json")
    content = json.loads(done.stdout)
    assert content["schema"] == 1
    rows = content["findings"]
    assert done.returncode == exit_code([Finding(**row) for row in rows]), done.stderr
    assert content["ok"] == (done.returncode == 0)
    by_check = {row["check"]: row for row in rows}
    assert by_check["interfaces"]["verdict"] == "ok"
    assert by_check["vpn"]["said"] == "the default route is on lan0, no VPN"
    assert by_check["multicast"]["said"].startswith("no mDNS (UDP 5353) at all comes in on lan0; 2")
    assert by_check["agent"]["verdict"] == "unknown"
    assert not [row for row in rows if row["verdict"] == "wrong" and row["area"] == "network"]


def test_the_process_without_a_network_exits_3_and_says_so(tmp_path: Path) -> None:
    done = run_alone("ip link set lo up", tmp_path)
    assert done.returncode == 3, done.stderr
    first = done.stdout.splitlines()[0]
    assert "wrong" in first
    assert "no usable network" in first
    assert first.endswith("at which others can reach this device"), "lines are not wrapped"


@pytest.mark.parametrize("name", ["cluster.json", "roster.json"])
def test_a_damaged_home_is_told_without_a_traceback(tmp_path: Path, name: str) -> None:
    Home(tmp_path).found()
    (tmp_path / name).write_text("{}")
    done = run_alone(LAN, tmp_path, "--json")
    content = json.loads(done.stdout)
    by_check = {row["check"]: row for row in content["findings"]}
    assert by_check["identity"]["verdict"] == "wrong"
    assert f"{name} is damaged" in by_check["identity"]["said"]
    assert by_check["identity"]["fix"].startswith("pair this device anew: exo-train leave")
    assert by_check["agent"]["fix"] == "", "join would be refused"
    assert done.returncode == 2, done.stdout
    assert content["ok"] is False
    assert "Traceback" not in done.stderr


def test_a_device_that_was_removed_is_told_so(tmp_path: Path) -> None:
    home = Home(tmp_path)
    identity = home.found()
    roster = home.roster(identity)
    roster.remove(identity.node_id, by=identity.node_id)
    home.save_roster(roster)
    done = run_alone(LAN, tmp_path, "--json")
    by_check = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    assert by_check["identity"]["said"].startswith("this device was removed from its cluster")
    assert "exo-train join --code CODE" in by_check["identity"]["fix"]
    assert done.returncode == 2, done.stdout


def test_members_met_earlier_are_dialled_and_removed_ones_are_not(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.found()
    met = []
    for name in ("kept", "removed"):
        node_id = admit(Home(tmp_path / name), home).node_id
        address = Address("127.0.0.1", 9)
        met.append(RememberedPeer(node_id=node_id, name=name, addresses=(address,)))
    home.remember_peers(met)
    identity = home.paired_identity()
    roster = home.roster(identity)
    roster.remove(met[1].node_id, by=identity.node_id)
    home.save_roster(roster)
    done = run_alone(LAN, home.path, "--json")
    said = [row["said"] for row in json.loads(done.stdout)["findings"]]
    assert [text.partition(" at ")[0] for text in said if "refuses connections" in text] == [
        "kept refuses connections"
    ]
    assert not [text for text in said if text.startswith("removed")]


def test_a_home_on_a_read_only_disk_is_told(tmp_path: Path) -> None:
    setup = f"{LAN}\nmount -t tmpfs -o ro,size=4g tmpfs '{tmp_path}'"
    rows = json.loads(run_alone(setup, tmp_path, "--json").stdout)["findings"]
    [disk] = [row for row in rows if row["check"] == "disk"]
    assert disk["verdict"] == "wrong"
    assert "Read-only file system" in disk["said"]
    assert str(tmp_path) in disk["said"]
