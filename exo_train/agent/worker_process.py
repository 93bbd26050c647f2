"""One worker: a child process that holds a tensor framework, spoken to over its pipes.

Owns the child's start, its end and its exit. The child dies with its agent: it ends when its
standard input does. Must not look into the messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from exo_train.errors import ProtocolError
from exo_train.wire.framing import frame, read_message

STOP_TIMEOUT_S = 2.5  # the worker needs one second; Ctrl-C must end an agent within five
MAX_LOG_BYTES = 4 << 20

log = logging.getLogger(__name__)


class WorkerProcess:
    """Callbacks come from the reader thread: `on_message` for each, then `on_exit` once.

    `module` is the program; it must end when its standard input does.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log_path: Path,
        on_message: Callable[[bytes], None],
        on_exit: Callable[[str], None],
        module: str = "exo_train.worker",
    ) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists() and log_path.stat().st_size > MAX_LOG_BYTES:
            log_path.unlink()
        with log_path.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},  # as NVML counts them
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
            )
        self._log_path = log_path
        self._on_message = on_message
        self._on_exit = on_exit
        self._write_lock = threading.Lock()
        self._stopping = False
        self._reader = threading.Thread(target=self._read, name="worker-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Write to the worker; a worker that is gone is reported through `on_exit`, not here."""
        with self._write_lock, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(frame(message))
            self._process.stdin.flush()

    def stop(self, *, at_once: bool = False) -> None:
        """End the worker: close its input, then kill it if it does not go; may be called twice.

        A worker that was stopped (SIGSTOP) reads nothing: who writes to it holds the pipe until the
        worker is killed. `at_once`: it is known to stand still, so it is not waited for.
        """
        self._stopping = True
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        if not at_once and self._write_lock.acquire(timeout=STOP_TIMEOUT_S):
            self._close_input()
            self._write_lock.release()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
                return
        self._process.kill()
        self._process.wait()
        with self._write_lock:
            self._close_input()

    def _close_input(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        reason = ""
        try:
            while (message := read_message(self._process.stdout)) is not None:
                self._on_message(message)
        except ProtocolError as error:
            reason = f"its worker sent no messages but noise ({error}); log: {self._log_path}"
            self._process.kill()
        code = self._process.wait()
        self._process.stdout.close()
        ended_well = code == 0 or self._stopping
        self._on_exit(reason or ("" if ended_well else self._describe(code)))

    def _describe(self, code: int) -> str:
        """Say why a worker ended, as well as its exit code tells."""
        if code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
                hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
                return f"its worker was ended by {name}{hint}; log: {self._log_path}"
        return f"its worker ended with exit code {code}; log: {self._log_path}"
