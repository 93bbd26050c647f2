"""What a stage's memory is for. Owns the sum by kind; the bytes themselves are `memory`'s.

Pure. Must not decide what fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from exo_train.plan.profiles import StageCosts
from exo_train.plan.stages import StageSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByKind:
    """The parts of a stage's need; they add up to it.

    A layer's workspace, an update's and the logits' chunk are never there together, so only the
    largest counts and the others are 0. `adapters_bytes` has gradients and the optimizer's state in
    it, `copies_bytes` the trained state as it was before, and a neighbour's. `process_bytes` are
    what the process takes before it holds a model.
    """

    weights_bytes: int
    adapters_bytes: int
    copies_bytes: int
    activations_bytes: int
    workspace_bytes: int
    logits_bytes: int
    process_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.adapters_bytes
            + self.copies_bytes
            + self.activations_bytes
            + self.workspace_bytes
            + self.logits_bytes
            + self.process_bytes
        )


def memory_by_kind(costs: StageCosts, stage: StageSpec, *, in_flight: int) -> MemoryByKind:
    """Split what `stage` needs with `in_flight` microbatches held."""
    head, extra = costs.head, costs.per_stage
    parts = [costs.embedding] * stage.embedding + [costs.layer] * stage.num_layers
    parts += [head] * stage.head
    adapters_bytes = sum(part.adapter_bytes for part in parts)
    computing_bytes = sum(part.computing_bytes for part in parts)
    copies_bytes = sum(part.copies_bytes for part in parts)
    weights_bytes = sum(part.static_bytes for part in parts)
    weights_bytes -= adapters_bytes + computing_bytes + copies_bytes
    if stage.embedding and stage.head:
        weights_bytes -= head.tied_bytes - head.tied_copies_bytes
        copies_bytes -= head.tied_copies_bytes
    logits_bytes = head.workspace_bytes if stage.head else 0
    workspace_bytes = max(
        (part.transient_bytes for part in parts[: len(parts) - stage.head]), default=0
    )
    workspace_bytes = max(workspace_bytes, head.update_bytes * stage.head)
    if logits_bytes > workspace_bytes:
        workspace_bytes = 0
    else:
        logits_bytes = 0
    per_microbatch_bytes = sum(part.per_microbatch_bytes for part in (*parts, extra))
    return MemoryByKind(
        weights_bytes=weights_bytes,
        adapters_bytes=adapters_bytes,
        copies_bytes=copies_bytes,
        activations_bytes=in_flight * per_microbatch_bytes,
        workspace_bytes=computing_bytes + workspace_bytes + extra.workspace_bytes,
        logits_bytes=logits_bytes,
        process_bytes=extra.static_bytes,
    )
