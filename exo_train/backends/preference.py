"""Losses of pairs of answers, from the answers' log-probabilities; the same for both backends.

Owns the formulas and their slopes. In float64, on a few numbers a pair. Must not import a
framework: what it gives back is multiplied with gradients there.

Shapes: B sequences of a microbatch, P = B/2 pairs: chosen answers first, in the same order the
rejected ones.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from exo_train.objective_config import ObjectiveConfig

# A mean log-probability of 0 has infinite odds; float32 knows none nearer to it.
_SUREST = -1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSums:
    """What pairs come to, summed over `num_pairs` of them.

    `chosen` and `rejected` are rewards, `num_right` pairs whose chosen answer has the larger one.
    `nll` (nats a token) and `log_odds` are orpo's.
    """

    num_pairs: int = 0
    chosen: float = 0.0
    rejected: float = 0.0
    num_right: int = 0
    nll: float = 0.0
    log_odds: float = 0.0

    def __add__(self, other: PairSums) -> PairSums:
        names = [field.name for field in fields(self)]
        return PairSums(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss:
    """The loss (nats) summed over pairs; `slopes_B` is its derivative by each log-probability."""

    loss_sum: float
    slopes_B: np.ndarray
    sums: PairSums


class Pairs:
    """What a stage keeps of pairs between its calls: what the base gave, and the sums so far."""

    def __init__(self, objective: ObjectiveConfig) -> None:
        self._objective = objective
        self.begin()

    def begin(self) -> None:
        self._references: dict[int, np.ndarray] = {}  # by microbatch
        self._sums = PairSums()

    def refer(self, index: int, log_probs_S: np.ndarray, mask_BT: np.ndarray) -> None:
        """Keep what the base alone gives, for the microbatch's loss."""
        self._references[index] = summed_by_row(log_probs_S, mask_BT)

    def loss(
        self, index: int, log_probs_S: np.ndarray, mask_BT: np.ndarray, *, evaluation: bool = False
    ) -> PairLoss:
        """Give the loss of microbatch `index`; that of an evaluation is without label smoothing.

        `log_probs_S` are those of its supervised positions.
        """
        objective = replace(self._objective, label_smoothing=0.0) if evaluation else self._objective
        reference_B = self._references.pop(index, None)
        loss = pair_loss(objective, summed_by_row(log_probs_S, mask_BT), mask_BT, reference_B)
        self._sums += loss.sums
        return loss

    def take_sums(self) -> PairSums:
        taken, self._sums = self._sums, PairSums()
        return taken


def summed_by_row(log_probs_S: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """Add up the log-probabilities of supervised positions, in their order, for each row (B)."""
    rows_S = np.nonzero(mask_BT)[0]
    return np.bincount(rows_S, weights=log_probs_S, minlength=len(mask_BT))


def pair_loss(
    objective: ObjectiveConfig,
    log_probs_B: np.ndarray,
    mask_BT: np.ndarray,
    reference_B: np.ndarray | None,
) -> PairLoss:
    """Give the loss of a microbatch's pairs; `reference_B` is what the base alone gives (dpo).

    Numbers that are not finite go through, and are found by whoever looks at the loss.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        if objective.has_reference:
            assert reference_B is not None, "the reference goes before the policy"
            return _dpo(objective, log_probs_B, reference_B)
        return _orpo(objective, log_probs_B, mask_BT.sum(axis=1))


def _dpo(objective: ObjectiveConfig, policy_B: np.ndarray, reference_B: np.ndarray) -> PairLoss:
    """-log sigmoid(beta ((pi_c - ref_c) - (pi_r - ref_r))) (Rafailov et al. 2023, arXiv:2305.18290,
    equation 7), pi and ref being log-probabilities of whole answers.

    Label smoothing s mixes in s of the loss of the pair the other way round: conservative DPO
    (Mitchell 2023, "A note on DPO with noisy preferences", equation 3).
    """
    beta, share = objective.beta, objective.label_smoothing
    rewards_B = beta * (policy_B - reference_B)
    chosen_P, rejected_P = np.split(rewards_B, 2)
    margin_P = chosen_P - rejected_P
    loss_P = (1 - share) * np.logaddexp(0, -margin_P) + share * np.logaddexp(0, margin_P)
    slope_P = beta * (share * _sigmoid(margin_P) - (1 - share) * _sigmoid(-margin_P))
    return PairLoss(
        loss_sum=float(loss_P.sum()),
        slopes_B=np.concatenate([slope_P, -slope_P]),
        sums=_sums(chosen_P, rejected_P),
    )


def _orpo(
    objective: ObjectiveConfig, log_probs_B: np.ndarray, num_tokens_B: np.ndarray
) -> PairLoss:
    """-m_c - beta log sigmoid(log(odds_c / odds_r)), odds = e^m / (1 - e^m), m being an answer's
    mean log-probability a token (Hong et al. 2024, arXiv:2403.07691, equations 1, 3, 6 and 7).

    Rewards are beta m, as TRL reports them.
    """
    mean_B = np.minimum(log_probs_B / num_tokens_B, _SUREST)
    unlike_B = -np.expm1(mean_B)  # 1 - e^m
    chosen_P, rejected_P = np.split(mean_B - np.log(unlike_B), 2)
    log_odds_P = chosen_P - rejected_P
    nll_P = -mean_B[: len(log_odds_P)]
    loss_P = nll_P + objective.beta * np.logaddexp(0, -log_odds_P)
    pull_P = objective.beta * _sigmoid(-log_odds_P)
    # d log odds / d m = 1 / (1 - e^m)
    slopes_B = np.concatenate([-pull_P, pull_P]) / unlike_B
    slopes_B[: len(pull_P)] -= 1
    rewards_P, others_P = np.split(objective.beta * mean_B, 2)
    return PairLoss(
        loss_sum=float(loss_P.sum()),
        slopes_B=slopes_B / num_tokens_B,
        sums=_sums(rewards_P, others_P, nll=nll_P, log_odds=log_odds_P),
    )


def _sums(chosen_P: np.ndarray, rejected_P: np.ndarray, **more_P: np.ndarray) -> PairSums:
    return PairSums(
        num_pairs=len(chosen_P),
        chosen=float(chosen_P.sum()),
        rejected=float(rejected_P.sum()),
        num_right=int((chosen_P > rejected_P).sum()),
        **{name: float(values_P.sum()) for name, values_P in more_P.items()},
    )


def _sigmoid(x_P: np.ndarray) -> np.ndarray:
    """Without an overflow: e^-log(1 + e^-x)."""
    return np.asarray(np.exp(-np.logaddexp(0, -x_P)))
