"""A step's microbatches as messages of bounded size. Owns where they are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

from exo_train.errors import ProtocolError
from exo_train.wire.pb import control_pb2 as pb

STEP_PIECE_BYTES = 4 << 20


def step_pieces(data: Sequence[pb.MicrobatchData], max_bytes: int) -> list[pb.StepInput]:
    """Cut a step's microbatches into messages of `max_bytes`; all but the last say `more`.

    A microbatch that is larger is a message of its own.
    """
    pieces = [pb.StepInput()]
    size_bytes = 0
    for microbatch in data:
        size_bytes += microbatch.ByteSize()
        if pieces[-1].microbatches and size_bytes > max_bytes:
            pieces.append(pb.StepInput())
            size_bytes = microbatch.ByteSize()
        pieces[-1].microbatches.append(microbatch)
    for piece in pieces[:-1]:
        piece.more = True
    return pieces


def checked_report(name: str, report: pb.StepReport, step: int) -> pb.StepReport:
    """Give the report of the rank `name`; raises ProtocolError for one that cannot be right."""
    if report.step != step:
        raise ProtocolError(f"{name} reported step {report.step}, not {step}")
    for time_s in (report.busy_s, report.step_s, report.period_s):
        if not 0 <= time_s < math.inf:
            raise ProtocolError(f"{name} reported a time of {time_s} s")
    if report.pairs.num_right > report.pairs.num_pairs:
        raise ProtocolError(f"{name} reported more good pairs than pairs")
    return report
