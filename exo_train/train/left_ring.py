"""What a lost driver has left of its ring: workers with state in memory, and nobody to lead them.

Owns how another driver comes to speak with them. Nothing is computed here: what they hold is
fetched after a rewind, and leaving the ring ends them.
"""

from __future__ import annotations

import contextlib

from exo_train.errors import TakenOverError
from exo_train.train.conversation import LostRankError
from exo_train.train.ring import PREPARE_TIMEOUT_S, Ring


class LeftRing(Ring):
    """Its plan has those ranks of the last one whose devices are here; they may be too few."""

    def __enter__(self) -> LeftRing:
        return self

    def adopt(self) -> None:
        """Have each rank go on under this driver; those that cannot be had count as gone.

        Raises TakenOverError where another driver leads the run.
        """
        for rank in self._talk.ranks:
            with contextlib.suppress(LostRankError):
                self._begin_with(rank, adopt=True)
        self._talk.hear_out("prepared", timeout_s=PREPARE_TIMEOUT_S, what="taking over a worker")
        for rank in self._talk.ranks:
            if isinstance(rank.failure, TakenOverError):
                raise rank.failure
