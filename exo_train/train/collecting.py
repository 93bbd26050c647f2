"""Fetching state from ranks: who is asked, and what of the answers is believed.

Owns the checks of what arrives: from each rank just the arrays that its layers have, once, and all
of them. Must not know what the state is fetched for (`ring` does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exo_train.backends.base import Arrays
from exo_train.backends.lora import is_adapter
from exo_train.errors import ProtocolError
from exo_train.lora_config import LoraConfig
from exo_train.models.spec import ModelSpec
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.history import StepId
from exo_train.plan.stages import StageSpec
from exo_train.train.conversation import Conversation, Rank
from exo_train.train.messages import StateAssembler, from_step_id
from exo_train.train.state_copies import Layout, check_piece, state_layout
from exo_train.wire.pb import control_pb2 as pb

STATE_TIMEOUT_S = 600.0


def split_state(state: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Give the adapter and the optimizer's arrays of a whole state."""
    adapter = {name: array for name, array in state.items() if is_adapter(name)}
    return adapter, {name: array for name, array in state.items() if name not in adapter}


# Gives the arrays that a rank has to give; None: they are not known beforehand.
LayoutOf = Callable[[Rank], Layout | None]


def layouts(
    request: pb.StateRequest, spec: ModelSpec | None, lora: LoraConfig, optimizer: OptimizerConfig
) -> LayoutOf:
    """Tell what each rank has to give: its own layers' state, or (HELD) what it said it holds."""

    def layout_of(rank: Rank) -> Layout | None:
        if spec is None or request.kind in (pb.GRADIENTS, pb.BOUNDARIES):
            return None
        if request.kind == pb.HELD:
            return _held_layout(rank, from_step_id(request.at), spec, lora, optimizer)
        whole = state_layout(spec, lora, optimizer, rank.plan.stage)
        wants_adapter = request.kind == pb.ADAPTER
        return {name: like for name, like in whole.items() if is_adapter(name) == wants_adapter}

    return layout_of


def _held_layout(
    rank: Rank, at: StepId, spec: ModelSpec, lora: LoraConfig, optimizer: OptimizerConfig
) -> Layout:
    layout: Layout = {}
    for held in rank.holdings:
        # One that reaches outside the model is a lie, and counted for nothing before.
        if held.at == at and 0 <= held.start < held.end <= spec.num_layers:
            stage = StageSpec(
                start=held.start,
                end=held.end,
                embedding=held.start == 0,
                head=held.end == spec.num_layers,
            )
            layout |= state_layout(spec, lora, optimizer, stage)
    return layout


def collect(talk: Conversation, request: pb.StateRequest, layout_of: LayoutOf) -> list[Arrays]:
    """Ask all ranks that are left, and wait; in their order.

    Raises ProtocolError naming the rank whose answer is not what its layers have: that rank is
    gone then, since its state cannot be had. Memory is taken only for what is expected.
    """
    ranks = [rank for rank in talk.ranks if not rank.gone]
    expected = {id(rank): layout_of(rank) for rank in ranks}
    assemblers = {id(rank): StateAssembler() for rank in ranks}
    for rank in ranks:
        talk.tell(rank, state_request=request)
    sets: dict[int, Arrays] = {}
    deadline_s = talk.deadline_s(STATE_TIMEOUT_S)
    while missing := [rank for rank in ranks if id(rank) not in sets]:
        sender, message = talk.next("state_array", deadline_s, missing, "giving state")
        if sender is None or message is None:
            continue
        try:
            if sender not in missing:
                raise ProtocolError("state came twice")
            complete = _added(
                assemblers[id(sender)], message.state_array, request.kind, expected[id(sender)]
            )
        except ProtocolError as error:
            sender.gone = True
            sender.failure = ProtocolError(f"{sender.name} gave wrong state: {error}")
            raise sender.failure from None
        if complete is not None:
            sets[id(sender)] = complete
    return [sets[id(rank)] for rank in ranks]


def merged(sets: Sequence[Arrays]) -> Arrays:
    """Join what ranks gave; `step`, which all have, is the same everywhere."""
    whole: Arrays = {}
    for arrays in sets:
        whole.update(arrays)
    return whole


def _added(
    assembler: StateAssembler, piece: pb.StateArray, kind: pb.StateKind, layout: Layout | None
) -> Arrays | None:
    if piece.kind != kind:
        raise ProtocolError(f"kind {kind} was asked for, kind {piece.kind} came")
    if layout is not None and (piece.name or not piece.last):
        check_piece(piece, layout, kind)
    complete = assembler.add(piece)
    if complete is not None and layout is not None and layout.keys() - complete.keys():
        raise ProtocolError(f"array '{min(layout.keys() - complete.keys())}' is missing")
    return complete
