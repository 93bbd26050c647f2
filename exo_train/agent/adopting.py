"""What a lost driver has left in the memory of devices, made a checkpoint that a run resumes from.

Owns what is fetched, which step it is of, and that no step's metrics are missing then. Must not
start the run again: the driver does, as with any other checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exo_train.agent.remote_rank import RemoteRank
from exo_train.agent.succession import read_succession
from exo_train.backends.base import Arrays
from exo_train.errors import PeerError, TakenOverError
from exo_train.models.spec import ModelSpec
from exo_train.peer import Address, NodeId
from exo_train.plan.history import StepId, newest_whole
from exo_train.plan.plan import Plan
from exo_train.train.checkpoint import (
    Checkpoint,
    load_checkpoint,
    publish_checkpoint,
    write_checkpoint,
)
from exo_train.train.collecting import split_state
from exo_train.train.disk_pause import DiskPause
from exo_train.train.durable import disk_errors, write_durable
from exo_train.train.left_ring import LeftRing
from exo_train.train.loss_scaling import scale_of
from exo_train.train.metrics import PairMetrics, StepMetrics
from exo_train.train.ring import Ring
from exo_train.train.rundir import METRICS_FILE, RunDir
from exo_train.train.saving import Best
from exo_train.train.watcher import Watcher
from exo_train.transport.tls import MemberTls

# A driver that was only asleep counts its own tries up from where it was; they never come so far.
GENERATIONS_APART = 1000
GONE_S = 10.0  # until members say that the adopted workers are gone, and their memory is free
POLL_S = 0.3
_HELD_OUT = "held_out_step"
_MAX_COUNT = 1 << 53  # in a row of metrics
_MAX_NUMBER = 1e300  # as above; NaN is none of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Estate:
    """A run that another driver, or this device's last one, has left."""

    run_dir: Path
    before: Plan
    checkpoint: Checkpoint | None
    identity: dict[str, Any]
    data_hash: str | None  # of what the run was trained with; None: not known any more
    is_anothers: bool  # another device led it

    @classmethod
    def of(
        cls,
        run_dir: Path,
        before: Plan,
        checkpoint: Checkpoint | None,
        identity: dict[str, Any],
        *,
        data_hash: str | None,
        own_id: NodeId,
    ) -> Estate:
        succession = read_succession(run_dir)
        return cls(
            run_dir=run_dir,
            before=before,
            checkpoint=checkpoint,
            identity=identity,
            data_hash=data_hash,
            is_anothers=succession is not None and succession.coordinator != own_id,
        )

    def taken(
        self,
        status: Callable[[], dict[str, Any]],
        tls: MemberTls,
        pause: DiskPause,
        *,
        spec: ModelSpec,
    ) -> tuple[Plan, Checkpoint | None]:
        """Save what devices still hold in memory if it is newer than the checkpoint, and free it.

        Gives the newest checkpoint, and the plan before, counted from the newest generation that
        any device has seen. A full disk is waited for: what devices hold stays there meanwhile.
        Raises TakenOverError where another driver leads the run.
        """
        orphans = _orphans(status(), self.before.run_id)
        generation = max([self.before.generation, *(o["run"]["generation"] for o in orphans)])
        if orphans or self.is_anothers:
            generation += GENERATIONS_APART
        before = replace(self.before, generation=generation)
        checkpoint = self.checkpoint
        then = {"model_hash": before.model_hash, "data_hash": self.data_hash}
        if orphans and all(self.identity[key] == value for key, value in then.items()):
            names = ", ".join(sorted(str(o["name"]) for o in orphans))
            pause.say(f"taking over what the run's last coordinator has left on {names}")
            try:
                checkpoint = self._from_memory(before, orphans, tls, pause, spec)
            except TakenOverError:
                raise
            except PeerError as error:
                pause.say(f"what is in memory there cannot be had: {error}")
            _wait_gone(status, before.run_id)
        return before, checkpoint

    def _from_memory(
        self,
        before: Plan,
        orphans: list[dict[str, Any]],
        tls: MemberTls,
        pause: DiskPause,
        spec: ModelSpec,
    ) -> Checkpoint | None:
        addresses = {o["id"]: [Address.parse(text) for text in o["addresses"]] for o in orphans}
        ranks = tuple(rank for rank in before.ranks if rank.node_id in addresses)
        channels = [RemoteRank(r.name, addresses[r.node_id], tls.to(r.node_id)) for r in ranks]
        plan = replace(before, ranks=ranks)
        with LeftRing(
            plan, channels, wants_stop=pause.wants_stop, on_note=pause.say, spec=spec
        ) as ring:
            ring.adopt()
            holdings = ring.rewind(before.generation)
            history = History.of(RunDir(self.run_dir).read_metrics(), ring.metrics_left)
            saved_step = self.checkpoint.step if self.checkpoint else 0
            last_step = history.last_step(since=saved_step)
            last = StepId(generation=before.generation, step=last_step)
            known = [h for h in holdings if h.at.step <= last.step]
            at = newest_whole(known, num_layers=before.num_layers, up_to=last)
            if at is None or at.step <= saved_step:
                pause.say(f"memory there has nothing newer than step {saved_step}")
                return self.checkpoint
            state, step = ring.collect_held(at), at.step
            # Here and not after the ring: leaving it ends the devices' workers.
            checkpoint = pause.pausing(lambda: self._save(step, state, history))
        pause.say(f"step {at.step} was still in memory and is saved now")
        return checkpoint

    def _save(self, step: int, state: Arrays, history: History) -> Checkpoint:
        history.write(self.run_dir, last_step=step)
        told = self.checkpoint.state if self.checkpoint else {}
        since = self.checkpoint.step if self.checkpoint else 0
        adapter, optimizer = split_state(state)
        temp = write_checkpoint(
            self.run_dir,
            step=step,
            adapter=adapter,
            optimizer=optimizer,
            state=self.identity | history.state(told, since, step),
        )
        return load_checkpoint(publish_checkpoint(temp))


@dataclass(frozen=True, slots=True)
class History:
    """A run's metrics by step, and its held-out losses by step."""

    rows: dict[int, dict[str, Any]]
    held_out: dict[int, float | None]

    @classmethod
    def of(cls, written: Iterable[dict[str, Any]], lines: Iterable[str]) -> History:
        """Join what is on the disk with what came with marks; of a step the newest counts."""
        rows = {row["step"]: row for row in written if _is_row(row)}
        held_out: dict[int, float | None] = {}
        for line in lines:
            row = _parsed(line)
            if _is_count(row.get(_HELD_OUT)) and _is_number_or_none(row.get("loss")):
                held_out[row[_HELD_OUT]] = row.get("loss")
            elif _is_row(row):
                before = rows.get(row["step"], row)
                if row["generation"] >= before["generation"]:
                    rows[row["step"]] = row
        return cls(rows, held_out)

    def last_step(self, *, since: int) -> int:
        """Give the last step before which none is missing, after the one of a checkpoint."""
        step = since
        while step + 1 in self.rows:
            step += 1
        return step

    def write(self, run_dir: Path, *, last_step: int) -> None:
        kept = [row for step, row in sorted(self.rows.items()) if step <= last_step]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in kept]
        with disk_errors(METRICS_FILE, run_dir):
            write_durable(run_dir / METRICS_FILE, "".join(lines).encode())

    def state(self, told: dict[str, Any], since: int, step: int) -> dict[str, Any]:
        """Give what a checkpoint of `step` says, from the one of `since` and what came after."""
        rows = [self.rows[at] for at in range(since + 1, step + 1)]
        before = [(int(at), loss) for at, loss in told.get("held_out_losses", [])]
        held_out = {at: loss for at, loss in self.held_out.items() if at <= step} | dict(before)
        best = Best.after(Best.of(told), step, held_out.get(step))
        scale = scale_of(told)
        for row in rows:
            scale = scale.after(overflowed=row["loss"] is None or row["grad_norm"] is None)
        return {
            "tokens": told.get("tokens", 0) + sum(row["tokens"] for row in rows),
            "seconds": told.get("seconds", 0.0) + math.fsum(row["step_s"] for row in rows),
            "num_dropped": told.get("num_dropped", 0)
            + sum(row["loss"] is None or row["grad_norm"] is None for row in rows),
            "held_out_losses": [list(point) for point in sorted(held_out.items())],
            "best": best.to_fields() if best else None,
            "loss_scale": dataclasses.asdict(scale),
        }


def carrying_metrics(watcher: Watcher, ring: Ring) -> Watcher:
    """Have what is measured go with the ring's marks, for a driver that takes the run over."""

    def on_step(metrics: StepMetrics, remaining_s: float | None) -> None:
        ring.metrics_lines.append(json.dumps(metrics.to_dict(), ensure_ascii=False))
        watcher.on_step(metrics, remaining_s)

    def on_evaluation(step: int, loss: float, pairs: PairMetrics | None = None) -> None:
        told = loss if math.isfinite(loss) else None
        ring.metrics_lines.append(json.dumps({_HELD_OUT: step, "loss": told}))
        watcher.on_evaluation(step, loss, pairs)

    return replace(watcher, on_step=on_step, on_evaluation=on_evaluation)


def check_still_led(status: dict[str, Any], run_id: str, generation: int) -> None:
    """Raise TakenOverError where members work for another driver of this run, in a later ring."""
    for member in status["members"]:
        run = member["run"]
        if run is None or run["id"] != run_id or run["generation"] <= generation:
            continue
        if member["state"] == "alive" and run["coordinator"] != status["self"]:
            leader = run["coordinator"]
            names = {m["id"]: m["name"] for m in status["members"]}
            raise TakenOverError(
                f"this run was taken over by {names.get(leader, leader)} and is at generation "
                f"{run['generation']}; it goes on there, and its results are there"
            )


def _orphans(status: dict[str, Any], run_id: str) -> list[dict[str, Any]]:
    """Give the members that keep a worker of the run whose driver is gone."""
    return [
        m
        for m in status["members"]
        if m["state"] == "alive" and m["run"] and m["run"]["id"] == run_id and m["run"]["orphaned"]
    ]


def _wait_gone(status: Callable[[], dict[str, Any]], run_id: str) -> None:
    until_s = time.monotonic() + GONE_S
    while time.monotonic() < until_s:
        runs = [m["run"] for m in status()["members"] if m["state"] == "alive" and m["run"]]
        if not any(run["id"] == run_id for run in runs):
            return
        time.sleep(POLL_S)


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _is_row(row: dict[str, Any]) -> bool:
    """Tell whether a step's metrics have what a run is counted on with: they came from members."""
    return (
        all(_is_count(row.get(key)) for key in ("step", "generation", "tokens"))
        and row.get("step_s") is not None
        and row.keys() >= {"loss", "grad_norm"}
        and all(_is_number_or_none(row[key]) for key in ("step_s", "loss", "grad_norm"))
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_number_or_none(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= _MAX_NUMBER)
