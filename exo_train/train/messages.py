"""Turns run messages into values and back, with checks: they come from the network.

Owns the mapping between control.proto and Python. Must not send anything.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from exo_train.backends.base import Arrays, MicrobatchInput
from exo_train.cluster.interfaces import without_zone
from exo_train.errors import ExoTrainError, ProtocolError, error_class
from exo_train.peer import Address, has_control_characters
from exo_train.plan.history import StepId
from exo_train.train.batches import Microbatch
from exo_train.train.executor import StepOutcome
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import pairing_pb2

MAX_ARRAY_DIMS = 4
MAX_STATE_ARRAYS = 200_000
STATE_PIECE_BYTES = 4 << 20  # far below what a gRPC message may carry
_STATE_DTYPES: dict[str, np.dtype[Any]] = {"<f4": np.dtype("<f4"), "<i8": np.dtype("<i8")}


def to_endpoints(addresses: Sequence[Address]) -> list[pairing_pb2.Endpoint]:
    """Write addresses down for others: a link-local one's zone means nothing to them."""
    return [pairing_pb2.Endpoint(host=without_zone(a.host), port=a.port) for a in addresses]


def from_endpoints(endpoints: Sequence[pairing_pb2.Endpoint]) -> tuple[Address, ...]:
    for endpoint in endpoints:
        if not 0 < endpoint.port < 65536:
            raise ProtocolError(f"port {endpoint.port} of a device is out of range")
        if not _is_numeric(endpoint.host):  # names are never dialled
            raise ProtocolError("a device sent an address that is no IP address")
    return tuple(Address(e.host, e.port) for e in endpoints)


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return not has_control_characters(host)  # a zone may be any text


def to_failure(error: ExoTrainError) -> pb.Failure:
    return pb.Failure(kind=type(error).__name__, message=str(error))


def from_failure(failure: pb.Failure, *, where: str) -> ExoTrainError:
    """Give the error that another device reports, with the device named once."""
    message = failure.message if where in failure.message else f"{where}: {failure.message}"
    return error_class(failure.kind)(message)


def to_step_id(at: StepId) -> pb.StepId:
    return pb.StepId(generation=at.generation, step=at.step)


def from_step_id(at: pb.StepId) -> StepId:
    return StepId(generation=at.generation, step=at.step)


def to_microbatch_data(
    microbatch: Microbatch, *, with_tokens: bool, with_targets: bool
) -> pb.MicrobatchData:
    """Pack what one rank needs; token ids go to the first stage, targets to the last only."""
    num_sequences, num_positions = microbatch.tokens_BT.shape
    data = pb.MicrobatchData(
        num_sequences=num_sequences,
        num_positions=num_positions,
        row_keys=microbatch.row_keys,
        row_starts=microbatch.row_starts,
    )
    if with_tokens:
        data.tokens = microbatch.tokens_BT.astype("<i4").tobytes()
        data.row_lengths.extend(microbatch.row_lengths)
    if with_targets:
        data.targets = microbatch.targets_BT.astype("<i4").tobytes()
        data.mask = microbatch.mask_BT.astype(np.uint8).tobytes()
    return data


def from_microbatch_data(
    index: int, data: pb.MicrobatchData, *, vocab_size: int, has_pairs: bool = False
) -> MicrobatchInput:
    shape = (data.num_sequences, data.num_positions)
    num_rows = len(data.row_starts) or data.num_sequences
    if len(data.row_keys) != num_rows:
        raise ProtocolError(f"microbatch {index} has {len(data.row_keys)} row keys for {shape}")
    lengths = tuple(data.row_lengths)
    fit = all(0 < length <= data.num_positions for length in lengths)
    if lengths and not (fit and len(lengths) == num_rows):
        raise ProtocolError(f"microbatch {index} has row lengths that do not fit into {shape}")
    row_starts = _row_starts(data.row_starts, shape, f"microbatch {index}")
    mask_BT = None
    if data.mask:
        mask_BT = _array(data.mask, shape, np.dtype(np.uint8), f"mask {index}") != 0
    if has_pairs:
        _check_pairs(shape, row_starts, mask_BT, f"microbatch {index}")
    return MicrobatchInput(
        index=index,
        tokens_BT=_ids(data.tokens, shape, vocab_size, f"tokens {index}"),
        targets_BT=_ids(data.targets, shape, vocab_size, f"targets {index}"),
        mask_BT=mask_BT,
        row_keys=tuple(data.row_keys),
        row_starts=row_starts,
        row_lengths=lengths,
    )


def _check_pairs(
    shape: tuple[int, int], row_starts: tuple[int, ...], mask_BT: np.ndarray | None, what: str
) -> None:
    """Check that rows are chosen and rejected answers, each with something to judge it by."""
    if shape[0] % 2 or row_starts:
        raise ProtocolError(f"{what}: its rows {shape} are no pairs")
    if mask_BT is not None and not mask_BT.any(axis=1).all():
        raise ProtocolError(f"{what}: an answer of a pair has no supervised position")


def _row_starts(given: Sequence[int], shape: tuple[int, int], what: str) -> tuple[int, ...]:
    """Check that rows follow each other, and that each sequence begins with one."""
    num_sequences, num_positions = shape
    starts = tuple(given)
    if starts:
        firsts = range(0, num_sequences * num_positions, num_positions or 1)
        follow = all(one < other for one, other in itertools.pairwise(starts))
        inside = starts[-1] < num_sequences * num_positions
        if not (follow and inside and set(firsts) <= set(starts)):
            raise ProtocolError(f"{what}: its rows do not lie end to end in {shape}")
    return starts


def _ids(raw: bytes, shape: tuple[int, int], vocab_size: int, what: str) -> np.ndarray | None:
    if not raw:
        return None
    ids_BT = _array(raw, shape, np.dtype("<i4"), what)
    if ids_BT.size and (ids_BT.min() < 0 or ids_BT.max() >= vocab_size):
        raise ProtocolError(f"{what}: ids reach outside the vocabulary of {vocab_size}")
    return ids_BT.astype(np.int32)


def to_state_arrays(kind: pb.StateKind, arrays: Arrays) -> Iterator[pb.StateArray]:
    """Give the messages of a set in pieces, the last one marked; an empty set is one message."""
    if not arrays:
        yield pb.StateArray(kind=kind, last=True)
    for position, (name, array) in enumerate(sorted(arrays.items()), start=1):
        dtype = "<i8" if array.dtype.kind == "i" else "<f4"
        data = np.asarray(array, dtype=dtype).tobytes()
        starts = range(0, max(len(data), 1), STATE_PIECE_BYTES)
        for start in starts:
            yield pb.StateArray(
                kind=kind,
                name=name,
                dtype=dtype,
                shape=array.shape,
                data=data[start : start + STATE_PIECE_BYTES],
                last=position == len(arrays) and start == starts[-1],
            )


class StateAssembler:
    """Collects the pieces of one set until the last has come."""

    def __init__(self) -> None:
        self._arrays: Arrays = {}
        self._current: pb.StateArray | None = None  # the first piece of an unfinished array
        self._pieces = bytearray()

    def add(self, message: pb.StateArray) -> Arrays | None:
        """Take one message; gives the whole set when it is complete."""
        if message.name:
            self._add_piece(message)
        if not message.last:
            return None
        if self._current is not None:
            raise ProtocolError(f"state array '{self._current.name}' ended too early")
        complete, self._arrays = self._arrays, {}
        return complete

    def _add_piece(self, message: pb.StateArray) -> None:
        first = self._current or message
        dtype = _STATE_DTYPES.get(message.dtype)
        same = (message.name, message.dtype, message.shape) == (
            first.name,
            first.dtype,
            first.shape,
        )
        if dtype is None or len(message.shape) > MAX_ARRAY_DIMS or not same:
            raise ProtocolError(f"a piece of state array '{message.name}' has the wrong shape")
        if message.name in self._arrays or len(self._arrays) >= MAX_STATE_ARRAYS:
            raise ProtocolError(f"state array '{message.name}' came twice or is one too many")
        shape = tuple(message.shape)
        expected_bytes = math.prod(shape) * dtype.itemsize
        self._pieces += message.data
        if len(self._pieces) < expected_bytes:
            self._current = first
            return
        self._arrays[message.name] = _array(bytes(self._pieces), shape, dtype, message.name)
        self._current = None
        self._pieces = bytearray()


def _array(raw: bytes, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> np.ndarray:
    expected = math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise ProtocolError(f"{what}: shape {shape} needs {expected} bytes, got {len(raw)}")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def to_step_report(request: pb.StepInput, outcome: StepOutcome, peak_bytes: int) -> pb.StepReport:
    sums = outcome.pair_sums
    return pb.StepReport(
        step=request.step,
        evaluation=request.evaluation,
        loss_sum=outcome.loss_sum,
        grad_square_sum=outcome.grad_square_sum,
        busy_s=outcome.busy_s,
        step_s=outcome.step_s,
        sent_bytes=outcome.sent_bytes,
        peak_memory_bytes=peak_bytes,
        period_s=outcome.period_s,
        trouble=outcome.trouble,
        pairs=pb.PairSums(**dataclasses.asdict(sums)) if sums.num_pairs else None,
    )
