"""The matrix that is embedding and head at once, where two ranks train it: one gradient for both.

Owns the exchange after a step's last backward: the first and the last rank send each other their
gradients over the links that are there, the ranks between pass them on, and both ends add the same
two float32 numbers, so that they get the same bits and make the same update. Must not know a
framework or a transport.

Rows travel in chunks of at most CHUNK_BYTES, a few at a time in each direction; every wait has the
link's deadline and names the neighbour. Tags count from TIED_BASE, above all microbatches'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exo_train.backends.base import Stage
from exo_train.errors import ProtocolError
from exo_train.lora_config import LoraConfig, trains_ends
from exo_train.models.spec import EMBEDDING, ModelSpec
from exo_train.transport.base import OUTBOX_TENSORS, Link, Tag
from exo_train.wire.tensor import DType, HostTensor

TIED_BASE = 1 << 22
CHUNK_BYTES = 4 << 20
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedMatrix:
    """Which array it is; `shape` is (rows, columns)."""

    name: str
    shape: tuple[int, int]

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Give the ranges of rows that travel at once."""
        rows, columns = self.shape
        per_chunk = max(1, CHUNK_BYTES // (FLOAT_BYTES * columns))
        return tuple((start, min(rows, start + per_chunk)) for start in range(0, rows, per_chunk))


def tied_matrix(spec: ModelSpec, lora: LoraConfig, num_ranks: int) -> TiedMatrix | None:
    """Give what the first and the last of several ranks both train; None: nothing."""
    if num_ranks == 1 or not (spec.tied_embeddings and trains_ends(lora, spec.num_layers)):
        return None
    return TiedMatrix(name=EMBEDDING, shape=(spec.vocab_size, spec.hidden_size))


def share_gradient(
    matrix: TiedMatrix,
    stage: Stage,
    step: int,
    *,
    below: Link | None,
    above: Link | None,
    timeout_s: float,
) -> None:
    """Do this rank's part; on the first and last rank the stage has the whole gradient then."""
    if below is not None and above is not None:
        _pass_on(matrix, step, below, above, timeout_s)
    elif (link := below or above) is not None:
        total_VD = stage.gradient_of(matrix.name)
        _exchange(matrix, total_VD, step, link, timeout_s)
        stage.set_gradient(matrix.name, total_VD)


def _exchange(
    matrix: TiedMatrix, total_VD: np.ndarray, step: int, link: Link, timeout_s: float
) -> None:
    """Send each chunk of rows, and add the other end's to it once it has left."""
    chunks = matrix.chunks
    # No more are on their way than a queue holds: nobody can be stuck with sending.
    for index in range(len(chunks) + OUTBOX_TENSORS):
        if index < len(chunks):
            own_RD = total_VD[slice(*chunks[index])].copy()
            link.send(Tag(step, TIED_BASE + index), HostTensor.from_numpy(own_RD))
        if (done := index - OUTBOX_TENSORS) >= 0:
            chunk = _received(matrix, step, done, link, timeout_s)
            total_VD[slice(*chunks[done])] += chunk.to_numpy()


def _pass_on(matrix: TiedMatrix, step: int, below: Link, above: Link, timeout_s: float) -> None:
    for index in range(len(matrix.chunks)):
        for source, target in ((below, above), (above, below)):
            chunk = _received(matrix, step, index, source, timeout_s)
            target.send(Tag(step, TIED_BASE + index), chunk)


def _received(
    matrix: TiedMatrix, step: int, index: int, link: Link, timeout_s: float
) -> HostTensor:
    """Take a chunk; raises ProtocolError naming the neighbour where it is not those rows."""
    chunk = link.wait_recv(Tag(step, TIED_BASE + index), timeout_s=timeout_s)
    start, end = matrix.chunks[index]
    if (chunk.dtype, chunk.shape) != (DType.FP32, (end - start, matrix.shape[1])):
        raise ProtocolError(
            f"{link.identity.peer} sent {list(chunk.shape)} {chunk.dtype.name} as rows {start} to "
            f"{end} of the gradient of {matrix.name}"
        )
    return chunk
