"""The loop with what a real run gives it: saver, timer, disk pause. For tests only."""

from __future__ import annotations

from pathlib import Path

from exo_train.config import TrainConfig
from exo_train.plan.prediction import Prediction
from exo_train.train.batches import plan_batches
from exo_train.train.checkpoint import Checkpoint
from exo_train.train.disk_pause import DiskPause
from exo_train.train.loop import Data, Trainer
from exo_train.train.regrouping import Regrouping
from exo_train.train.ring import Ring
from exo_train.train.rundir import RunDir
from exo_train.train.saving import Saver, SaveTimer
from exo_train.train.watcher import Watcher
from tests.ring.rings import random_examples

VOCAB_SIZE = 1  # a guess costs nothing: the first loss alone is what later ones are held against


def random_data(vocab_size: int, config: TrainConfig, *, num_rows: int) -> Data:
    """Give `num_rows` of 24 random rows to train on; the others are held out."""
    examples = random_examples(vocab_size)
    batches = plan_batches(examples[:num_rows], config)
    return Data(batches=batches, held_out=examples[num_rows:])


def make_trainer(
    ring: Ring,
    config: TrainConfig,
    data: Data,
    run_dir: Path,
    *,
    num_steps: int,
    watcher: Watcher,
    resumed: Checkpoint | None = None,
    prediction: Prediction | None = None,
    regrouping: Regrouping | None = None,
) -> Trainer:
    pause = DiskPause(device="device0", say=watcher.on_note, wants_stop=watcher.wants_stop)
    directory = RunDir.create(run_dir, allow_existing=True)
    return Trainer(
        ring,
        config,
        data,
        directory,
        num_steps=num_steps,
        vocab_size=VOCAB_SIZE,
        identity={},
        watcher=watcher,
        saver=Saver(directory.path, keep=config.keep, pause=pause, resumed=resumed),
        timer=SaveTimer(every_steps=config.save_every, every_minutes=config.save_minutes),
        pause=pause,
        regrouping=regrouping,
        prediction=prediction,
    )
