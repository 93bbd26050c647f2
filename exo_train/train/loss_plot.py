"""The picture of a run's loss. Owns its look; must not open a window or touch pyplot's state."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

Points = Sequence[tuple[int, float | None]]

_TRAIN_COLOUR = "#4c72b0"
_SMOOTH_COLOUR = "#1f3b6f"
_HELD_OUT_COLOUR = "#c44e52"
_SMOOTH_FROM_POINTS = 20


def draw_loss(*, train: Points, held_out: Points) -> bytes:
    """Give a PNG of the training loss with the held-out loss as points; bad values are gaps."""
    # Matplotlib takes half a second to import: only when a picture is wanted.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = _finite(train)
    crowded = len(steps) >= _SMOOTH_FROM_POINTS
    if steps:
        axes.plot(
            steps,
            losses,
            color=_TRAIN_COLOUR,
            linewidth=1.0 if crowded else 1.6,
            alpha=0.45 if crowded else 1.0,
            marker="" if crowded else "o",
            markersize=4,
            label="training",
        )
    if crowded:
        axes.plot(
            steps, _smooth(losses), color=_SMOOTH_COLOUR, linewidth=1.8, label="training, smoothed"
        )
    held_steps, held_losses = _finite(held_out)
    if held_steps:
        axes.plot(
            held_steps,
            held_losses,
            color=_HELD_OUT_COLOUR,
            linewidth=1.2,
            linestyle="--",
            marker="o",
            markersize=6,
            label="held out",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if steps or held_steps:
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _finite(points: Points) -> tuple[list[int], list[float]]:
    good = [(step, loss) for step, loss in points if loss is not None and math.isfinite(loss)]
    return [step for step, _ in good], [loss for _, loss in good]


def _smooth(losses: Sequence[float]) -> list[float]:
    """Average over about a tenth of the run on both sides, so that the curve does not lag."""
    half = max(len(losses) // 20, 2)
    result = []
    for i in range(len(losses)):
        reach = min(half, i, len(losses) - 1 - i)
        window = losses[i - reach : i + reach + 1]
        result.append(sum(window) / len(window))
    return result
