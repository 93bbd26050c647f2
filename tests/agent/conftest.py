"""Agents in this process, and commands typed in their homes."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exo_train.cli.main import main
from exo_train.cluster.home import Home
from tests.agent.agents_here import Done, Here
from tests.paired_homes import ensure_member

Join = Callable[..., Here]
Command = Callable[..., Done]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Makes members of the cluster with this label, paired offline; they leave after the test."""
    with contextlib.ExitStack() as stack:

        def join(
            name: str,
            *peers: Here,
            port: int = 0,
            cluster: str = "tests",
            folder: str = "",
            discover: bool = False,
        ) -> Here:
            home = Home(tmp_path / (folder or name))
            ensure_member(home, root=tmp_path, cluster=cluster)
            ports = [peer.port for peer in peers]
            here = Here(home, name, *ports, port=port, discover=discover)
            stack.enter_context(here.agent)
            return here

        yield join


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command of the product in a home; its exit code and texts are the user's."""

    def command(home: Home, *arguments: str) -> Done:
        monkeypatch.setenv("EXO_TRAIN_HOME", str(home.path))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["exo-train", *arguments])
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return command
