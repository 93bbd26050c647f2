"""`join` and `status`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from exo_train.agent.agent import Agent, JoinOptions
from exo_train.agent.local_client import LocalClient
from exo_train.cluster.hardware import parse_size
from exo_train.cluster.home import open_home
from exo_train.errors import PeerError
from exo_train.peer import Address
from exo_train.ui.tables import status_table

REDRAW_S = 1.0


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: exo-train join --name den-pc --memory 12GB",
    )(join)
    app.command(epilog="Example: exo-train status --json")(status)


def join(
    name: Annotated[str | None, typer.Option(help="What others call this device.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT of a member, where multicast does not pass; repeatable."),
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="Use this network interface only, e.g. en0.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 0,
    memory: Annotated[
        str | None, typer.Option(help="Memory to offer, e.g. 8GB; default: what is free.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, mlx or torch.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, gpu or cuda:N.")] = "auto",
    headless: Annotated[bool, typer.Option(help="Lines instead of a screen.")] = False,
    tied: Annotated[bool, typer.Option(hidden=True, help="End when standard input does.")] = False,
) -> None:
    """Make this device a member and keep it one until Ctrl-C.

    Devices of one network with the same EXO_TRAIN_CLUSTER (default "home") find each other by
    mDNS. There is no pairing and no encryption yet: use it on a network you trust.
    """
    options = JoinOptions(
        name=name,
        peers=tuple(Address.parse(text) for text in peer or ()),
        interface=interface,
        port=port,
        memory_bytes=parse_size(memory) if memory else None,
        backend=backend,
        device=device,
    )
    console = Console()
    on_terminal = console.is_terminal and not headless
    if headless:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    ended = _end_signals()
    if tied:
        threading.Thread(target=_end_with_input, args=(ended,), daemon=True).start()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    with Agent(open_home(), options, say=say) as agent:
        say(f"listening on port {agent.port}; Ctrl-C leaves")
        if on_terminal:
            with Live(console=console, auto_refresh=False) as live:
                while not ended.wait(REDRAW_S):
                    live.update(status_table(agent.status()), refresh=True)
        else:
            ended.wait()
        say("leaving")


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show who is in the cluster, as this home's agent sees it."""
    endpoint = open_home().agent()
    if endpoint is None:
        raise PeerError("no agent of this home runs; start one with `exo-train join`")
    with LocalClient(endpoint) as client:
        content: dict[str, Any] = client.status()
    if as_json:
        typer.echo(json.dumps(content, indent=2))
    else:
        Console().print(status_table(content))


def _end_with_input(ended: threading.Event) -> None:
    """Set `ended` when whoever started this agent is gone: its end of the pipe closes."""
    # Not through sys.stdin: a thread in a buffered read would abort the interpreter at its end.
    while os.read(sys.stdin.fileno(), 1):
        pass
    ended.set()


def _end_signals() -> threading.Event:
    """Give an event that Ctrl-C, a closed terminal or a termination request sets."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)
    return ended
