"""The profiler process: times one block of a model and says so; spoken to over pipes.

Owns this process: one framed JSON question on standard input, one framed JSON answer on standard
output. It ends when its standard input does, so it cannot outlive its agent. Holds the tensor
framework; the agent does not.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import BinaryIO

from exo_train.errors import ExoTrainError, ProtocolError
from exo_train.models.spec import ModelSpec
from exo_train.plan.block_times import ProfileRequest
from exo_train.train.profiling import profile
from exo_train.train.stage_loading import CONFIG_DTYPES
from exo_train.wire.framing import frame, read_message

PLACE = "the request for a profile"


def answer(document: bytes) -> bytes:
    """Give the answer to a question: `times`, or a `failure` with its kind and sentence."""
    try:
        return json.dumps({"times": _measure(document)}).encode()
    except ExoTrainError as error:
        return _failure(type(error).__name__, str(error))
    except Exception as error:  # noqa: BLE001 - the process' boundary: the agent must hear why
        traceback.print_exc()
        return _failure(ExoTrainError.__name__, f"{type(error).__name__}: {error}")


def _measure(document: bytes) -> dict[str, object]:
    try:
        text = document.decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError(f"{PLACE} is not UTF-8") from None
    request = ProfileRequest.from_json(text, place=PLACE)
    return profile(
        ModelSpec.from_config(json.loads(request.config_json), place="the model's config"),
        backend=request.backend,
        device=request.device,
        compute_dtype=CONFIG_DTYPES[request.compute_dtype],
        lora=request.lora,
        microbatch_size=request.microbatch_size,
        sequence=request.sequence,
        checkpoint_activations=request.checkpoint_activations,
        with_ends=request.with_ends,
        budget_s=request.budget_s,
        quantize=request.quantize,
        base_weights=request.base_weights,
    ).to_fields()


def _failure(kind: str, message: str) -> bytes:
    line = " ".join(message.split())  # who asked shows no sentence of several lines
    return json.dumps({"failure": {"kind": kind, "message": line}}).encode()


def _read(pipe_in: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    try:
        while (message := read_message(pipe_in)) is not None:
            inbox.put(message)
    finally:
        os._exit(0)  # the agent is gone, or needs no answer any more


def main() -> None:
    # Ctrl-C in the agent's terminal reaches this process too; the agent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print to standard output, which is the pipe: give them standard error instead.
    pipe_out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(sys.stdin.buffer, inbox), daemon=True)
    reader.start()
    pipe_out.write(frame(answer(inbox.get())))
    pipe_out.flush()


if __name__ == "__main__":
    # Not sys.exit: the thread that reads the pipe would abort the interpreter's end.
    main()
    sys.stderr.flush()
    os._exit(0)
