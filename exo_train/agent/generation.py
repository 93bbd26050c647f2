"""Answers prompts with what a run trained, the whole model on this device.

Owns the way from a run directory to text. One device is enough for now: generating on the ring
is not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exo_train.agent.planning import model_shape
from exo_train.agent.run_template import tokenizer_of_run
from exo_train.backends.base import Stage, StageOptions
from exo_train.backends.full import weight_shapes
from exo_train.backends.registry import load_backend
from exo_train.backends.sampling import generate_tokens
from exo_train.cluster.hardware import detect
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.encoding_config import SYSTEM_ROLES
from exo_train.errors import ConfigError
from exo_train.export.adapter_formats import Adapter
from exo_train.export.adapters import read_adapter
from exo_train.lora_config import LoraConfig
from exo_train.models.hub import resolve_model
from exo_train.models.open import open_model
from exo_train.models.tokenizer import load_tokenizer
from exo_train.objective_config import ObjectiveConfig
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.device_memory import Processor
from exo_train.plan.stages import StageSpec
from exo_train.plan.workloads import held_shape, weights_held
from exo_train.train.chat import encode_prompt, end_of_turn
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.full_model import read_weights
from exo_train.train.rows import Message
from exo_train.train.rundir import CONFIG_FILE, RunDir
from exo_train.train.stage_loading import CONFIG_DTYPES


def _adapter_of(run: Path) -> tuple[Adapter, str]:
    """Give what a run trained and where it lies: in its newest checkpoint if it ended early."""
    folder = run / "adapters" / "mlx"
    if folder.is_dir():
        return read_adapter(folder), str(folder)
    opened = RunDir.open(run)
    config = TrainConfig.from_stored(opened.read_config(), source=f"{run}/config.yaml")
    if config.full and opened.model.is_dir():
        spec, _ = open_model(opened.model)
        whole = StageSpec(start=0, end=spec.num_layers, embedding=True, head=True)
        weights = read_weights(opened.model, weight_shapes(spec, whole, config.lora))
        return Adapter(arrays=weights, lora=config.lora, base_model=config.model), str(opened.model)
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise ConfigError(f"{run} has trained nothing yet: the run saved no step")
    adapter = Adapter(arrays=checkpoint.adapter, lora=config.lora, base_model=config.model)
    return adapter, str(checkpoint.path)


class Generator:
    """Loads once; `adapter_path` says which adapter is active, None: the base alone."""

    def __init__(self, home: Home, run_or_model: str, *, backend: str = "auto") -> None:
        run = Path(run_or_model).expanduser()
        self.adapter_path: str | None = None
        adapter = None
        model_name = run_or_model
        self._system_role = SYSTEM_ROLES[0]
        config: dict[str, Any] = {}
        if (run / CONFIG_FILE).is_file():
            config = RunDir.open(run).read_config()
            model_name = str(config.get("model", ""))
            self._system_role = str(config.get("system_role", self._system_role))
            adapter, self.adapter_path = _adapter_of(run)
        path = resolve_model(model_name, cache_dir=home.cache)
        spec, source = open_model(path)
        hardware = detect(backend=backend)
        self.device = f"{hardware.backend}/{hardware.device}"
        compute_dtype = CONFIG_DTYPES[hardware.dtypes[0]]
        quantize = int(config.get("quantize", 0))
        self._stage = load_backend(hardware.backend).load_stage(
            spec,
            StageSpec(start=0, end=spec.num_layers, embedding=True, head=True),
            source,
            device=hardware.device,
            lora=adapter.lora if adapter else LoraConfig(rank=1),
            optimizer=OptimizerConfig(name="sgd", momentum=0.0),  # which keeps nothing in memory
            options=StageOptions(
                seed=0,
                compute_dtype=compute_dtype,
                wire_dtype=CONFIG_DTYPES["fp32"],
                quantize=quantize,
                objective=ObjectiveConfig(
                    name=str(config.get("objective", "sft")), beta=float(config.get("beta", 0.1))
                ),
                base_weights=weights_held(
                    # A token is not a batch: where memory allows, speed counts.
                    held_shape(model_shape(spec), quantize=quantize, base_weights="packed"),
                    Processor(backend=hardware.backend, device=hardware.device),
                    wanted=str(config.get("base_weights", "auto")),
                    quantize=0,
                    usable_bytes=hardware.usable_memory_bytes,
                    value_bytes=compute_dtype.num_bytes,
                ),
            ),
        )
        # As it starts: an adapter that does nothing, or the base.
        self._base = self._stage.adapter()
        self._tuned = adapter.arrays if adapter else None
        self.use_adapter(adapter is not None)
        # As the run was trained; a bare model has no run directory, and its own template.
        self._tokenizer = (
            tokenizer_of_run(run, model_path=path) if adapter else load_tokenizer(path)
        )
        self._max_position = spec.max_position

    @property
    def stage(self) -> Stage:
        """The whole model."""
        return self._stage

    def use_adapter(self, wanted: bool) -> None:
        """Answer with the adapter on, or as the base alone does."""
        assert self._tuned is not None or not wanted
        self._stage.load_adapter(self._tuned if wanted and self._tuned else self._base)

    def answer(
        self,
        prompt: str,
        *,
        system: str | None = None,
        max_tokens: int = 200,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Yield the answer piece by piece; a tokenizer without chat template continues the text."""
        return self.continuation(
            self._encode(prompt, system),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def continuation(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 200,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Yield what follows the ids of a prompt, up to the end of the answer."""
        room = self._max_position - len(tokens)
        if room < 1:
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens, the model {self._max_position} "
                f"positions; shorten it"
            )
        ids: list[int] = []
        said = ""
        for token in generate_tokens(
            self._stage.start_decoding(),
            list(tokens),
            max_tokens=min(max_tokens, room),
            temperature=temperature,
            seed=seed,
            stop_ids=self._stop_ids(),
        ):
            ids.append(token)
            text = self.decode(ids)
            if text.endswith("\ufffd"):  # the rest of a character comes with the next token
                continue
            yield text[len(said) :]
            said = text
        yield self.decode(ids)[len(said) :]

    def _encode(self, prompt: str, system: str | None) -> list[int]:
        if not self._tokenizer.chat_template:
            return list(self._tokenizer.encode(prompt))
        messages = [Message(role="user", content=prompt)]
        if system is not None:
            messages.insert(0, Message(role="system", content=system))
        return list(encode_prompt(messages, self._tokenizer, system_role=self._system_role))

    def _stop_ids(self) -> set[int]:
        """Give the ids that end an answer: EOS, and the end-of-turn marks that templates use.

        Known marks count in any vocabulary: without a template, too, a chat model writes them.
        """
        marks = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
        vocabulary = self._tokenizer.get_vocab()
        stop = {vocabulary[mark] for mark in marks if mark in vocabulary}
        if self._tokenizer.chat_template and (end := end_of_turn(self._tokenizer)) is not None:
            stop.add(end)
        if self._tokenizer.eos_token_id is not None:
            stop.add(int(self._tokenizer.eos_token_id))
        return stop
