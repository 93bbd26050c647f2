"""Which of a model's own weights are trained, without an adapter, and on which stages.

Owns the choice and its names: those of the Hugging Face files, with the model's own layer numbers.
Embedding, final norm and head are trained when all layers are. Must not import a framework.
"""

from __future__ import annotations

from exo_train.lora_config import LoraConfig, chosen_layers, trains_ends
from exo_train.models.spec import EMBEDDING, LM_HEAD, ModelSpec, Shapes
from exo_train.plan.stages import StageSpec


def weight_shapes(spec: ModelSpec, stage: StageSpec, lora: LoraConfig) -> Shapes:
    """Give the weights trained on a stage; a tied matrix is on both the first and the last one."""
    ends = trains_ends(lora, spec.num_layers)
    chosen = set(chosen_layers(lora.layers, spec.num_layers))
    shapes = spec.tensor_shapes(
        start=stage.start,
        end=stage.end,
        embedding=ends and stage.embedding,
        head=ends and stage.head,
    )
    return {name: shape for name, shape in shapes.items() if layer_of(name) in (None, *chosen)}


def layer_of(name: str) -> int | None:
    """Give the layer that an array is of; None: of an end of the model, or of none at all."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def is_on(name: str, stage: StageSpec, *, tied: bool) -> bool:
    """Tell whether a trained array, or the optimizer's of one, belongs to a stage.

    What is of no part of the model (`step`) belongs to all.
    """
    layer = layer_of(name)
    if layer is not None:
        return layer in stage.layers
    if name.startswith(EMBEDDING):
        return stage.embedding or (tied and stage.head)
    return stage.head or not name.startswith(("model.norm.", LM_HEAD))


def head_name(spec: ModelSpec) -> str:
    """Give the name of the matrix that makes logits."""
    return EMBEDDING if spec.tied_embeddings else LM_HEAD


def shared_weights(spec: ModelSpec, stage: StageSpec, lora: LoraConfig) -> tuple[str, ...]:
    """Name what another stage trains as well: the tied matrix, where its ends lie apart."""
    is_end = stage.embedding != stage.head
    return (
        (EMBEDDING,)
        if is_end and spec.tied_embeddings and trains_ends(lora, spec.num_layers)
        else ()
    )
