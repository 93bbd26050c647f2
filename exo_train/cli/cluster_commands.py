"""`join`, `invite`, `leave`, `remove` and `status`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from exo_train.agent.agent import Agent, JoinOptions
from exo_train.agent.joining import become_member, forget_cluster, leave_cluster, remove_member
from exo_train.agent.local_client import Invitation, LocalClient
from exo_train.cluster.hardware import parse_size
from exo_train.cluster.home import Home, open_home
from exo_train.errors import PeerError
from exo_train.peer import Address
from exo_train.ui.tables import status_screen

EXIT_INTERRUPTED = 130
REDRAW_S = 1.0
INVITE_SCHEMA = 1

log = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: exo-train join --name den-pc --memory 12GB",
    )(join)
    app.command(epilog="Example: exo-train invite --json")(invite)
    app.command(epilog="Example: exo-train leave")(leave)
    app.command(epilog="Example: exo-train remove old-laptop")(remove)
    app.command(epilog="Example: exo-train status --json")(status)


def join(
    code: Annotated[
        str | None,
        typer.Option(help="Code that a member shows, like 7-maple-tiger; only the first time."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What others call this device.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST:PORT of a member, where multicast does not pass; with --code, the address "
            "shown with the code. Repeatable."
        ),
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

    The first device makes a cluster and shows a code; `exo-train join --code CODE` on the next one
    pairs it, once. From then on both find each other by themselves, and all they say is encrypted.
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
    stopped = _end_signals()
    if tied:
        threading.Thread(target=_end_with_input, args=(stopped,), daemon=True).start()
    _keep_member(open_home(), code, options, stopped, headless=headless, tied=tied)


def _keep_member(
    home: Home,
    code: str | None,
    options: JoinOptions,
    stopped: threading.Event,
    *,
    headless: bool,
    tied: bool,
) -> None:
    """Pair at need, then be a member until a signal or the membership's end."""
    voice = _Voice()
    say = voice.say
    if headless:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if code is not None:
        become_member(
            home,
            code,
            peers=options.peers,
            interface=options.interface,
            say=say,
            stopped=stopped,
        )
        options = dataclasses.replace(options, peers=())  # they were pairing ports
    with Agent(home, options, say=say) as agent:
        say(f"listening on port {agent.port}; Ctrl-C ends")
        if agent.is_alone and not tied:
            say(_invitation_text(agent.invite()))
        if voice.console.is_terminal and not headless:
            with voice.outlived():
                _draw(agent, stopped, voice.console)
        while not stopped.wait(REDRAW_S) and not agent.ended.is_set():
            pass
        say("leaving" if agent.failure is None else "ending")
    if agent.failure is not None:
        raise agent.failure


def invite(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a fresh code for one more device; it lives ten minutes, and one made before is void."""
    with _running_agent(open_home()) as client:
        invitation = client.invite()
    if as_json:
        content = {
            "schema": INVITE_SCHEMA,
            "code": invitation.code,
            "expires_s": invitation.expires_s,
            "addresses": [str(address) for address in invitation.addresses],
        }
        typer.echo(json.dumps(content, indent=2))
    else:
        typer.echo(_invitation_text(invitation))


def leave(
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Delete the keys here and tell nobody: for a copied home folder, whose original "
            "stays a member.",
        ),
    ] = False,
) -> None:
    """End this device's membership for good: the others are told, its keys are deleted."""
    if forget:
        forget_cluster(open_home())
        typer.echo("this home belongs to no cluster any more; nobody was told")
        return
    told = leave_cluster(open_home())
    typer.echo(f"this device has left; {', '.join(told) or 'nobody'} was told")


def remove(
    device: Annotated[str, typer.Argument(help="Its name, or the start of its id.")],
) -> None:
    """End another device's membership for good: all members refuse it from now on."""
    name, invited = remove_member(open_home(), device)
    typer.echo(f"{name} is a member no more")
    if invited:
        typer.echo(f"it had invited {', '.join(invited)}: remove them too if you do not know them")


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show who is in the cluster, how they are connected, and what runs."""
    with _running_agent(open_home()) as client:
        content: dict[str, Any] = client.status()
    if as_json:
        typer.echo(json.dumps(content, indent=2))
    else:
        Console().print(status_screen(content))


def _running_agent(home: Home) -> LocalClient:
    endpoint = home.agent()
    if endpoint is None:
        raise PeerError("no agent of this home runs; start one with `exo-train join`")
    return LocalClient(endpoint)


def _invitation_text(invitation: Invitation) -> str:
    minutes = round(invitation.expires_s / 60)
    where = invitation.addresses[0] if invitation.addresses else "HOST:PORT"
    return (
        f"to add a device, run there within {minutes} minutes:\n\n"
        f"    exo-train join --code {invitation.code}\n\n"
        f"(if it does not find this one: add --peer {where})"
    )


class _Voice:
    """What an agent says; the agent outlives the terminal, or the program that reads it."""

    def __init__(self) -> None:
        self.console = Console()
        self._is_silent = False
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        with self.outlived():
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def outlived(self) -> Iterator[None]:
        """Go on in silence where nothing can be written any more, whichever thread finds out."""
        try:
            yield
        except (OSError, SystemExit) as error:  # rich raises SystemExit for a broken pipe
            cause = error.__context__ if isinstance(error, SystemExit) else error
            if not self._silence():
                log.warning("nobody reads what is said here (%s): the agent goes on", cause)

    def _silence(self) -> bool:
        """Write nothing any more, at the end of the process either; tell whether it was so."""
        with self._lock:
            was_silent, self._is_silent = self._is_silent, True
            self.console.quiet = True
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return was_silent


def _draw(agent: Agent, stopped: threading.Event, console: Console) -> None:
    """Draw the cluster until the user or the agent itself ends it."""
    with Live(console=console, auto_refresh=False) as live:
        while not stopped.wait(REDRAW_S) and not agent.ended.is_set():
            live.update(status_screen(agent.status()), refresh=True)


def _end_with_input(ended: threading.Event) -> None:
    """Set `ended` when whoever started this agent is gone: its end of the pipe closes."""
    # Not through sys.stdin: a thread in a buffered read would abort the interpreter at its end.
    while os.read(sys.stdin.fileno(), 1):
        pass
    ended.set()


def _end_signals() -> threading.Event:
    """Give an event that Ctrl-C, a closed terminal or a termination request sets.

    The second one ends the process at once: goodbyes may wait for devices that are gone.
    """
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if ended.is_set():
            os._exit(EXIT_INTERRUPTED)  # workers end with their pipes
        ended.set()

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)
    return ended
