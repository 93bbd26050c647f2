"""The options of a run: what each is, its default and range. Pure; no rule between two of them."""

from __future__ import annotations

from dataclasses import dataclass

from exo_train.encoding_config import ON_LONG, SYSTEM_ROLES, TRAIN_TURNS
from exo_train.lora_config import ALL_LAYERS, ALL_TARGETS
from exo_train.objective_config import MAX_BETA, OBJECTIVES
from exo_train.optimizer_config import MUON_RATES, OPTIMIZERS, WITH_ADAMW
from exo_train.option_rules import REPORT_LIBRARIES
from exo_train.options import option

DTYPES = ("auto", "fp32", "bf16", "fp16")
LR_SCHEDULES = ("cosine", "linear", "constant")
QUANTIZE_BITS = (0, 4, 8)
BASE_WEIGHTS = ("auto", "packed", "dense")
PIPELINE_SCHEDULES = ("1f1b", "gpipe")
BAD_ROWS = ("error", "drop")
MAX_PROFILE_S = 60.0
_BY_ADAMW = ("optimizer", WITH_ADAMW)
# Headings of the help and of docs/options.md, in their order.
WHAT, CHATS, LENGTH, RATE, ADAPTER, NUMBERS, CHECKS, SAFETY, DEVICES = (
    "What is trained",
    "Chats",
    "Length and batches",
    "Learning rate and optimizer",
    "Adapter",
    "Numbers and memory",
    "Held-out rows",
    "Checkpoints and recovery",
    "Devices",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The fields of a `TrainConfig`, each checked by itself where it is read."""

    model: str = option("", "Model directory, .gguf file or hub id", group=WHAT)
    data: str = option(
        "",
        "Rows: a file, a directory with train (and valid), hub:user/name; several: A:2,B:0.5",
        group=WHAT,
    )
    columns: tuple[str, ...] = option(
        (), "What your columns are to us, such as prompt=question,completion=answer", group=WHAT
    )
    on_bad_row: str = option(
        "error", "what a row leads to that cannot be used", group=WHAT, choices=BAD_ROWS
    )
    objective: str = option(
        "sft",
        "learn answers, or from pairs of answers (dpo, orpo) which one is preferred",
        group=WHAT,
        choices=OBJECTIVES,
    )
    beta: float = option(
        0.1,
        "How firmly dpo holds on to the base; weight of orpo's odds ratio",
        group=WHAT,
        above=0,
        maximum=MAX_BETA,
        only_with=("objective", ("dpo", "orpo")),
    )
    chat_template: str = option(
        "",
        "In place of the model's own: chatml, gemma, llama2, llama3, mistral, zephyr or a file",
        group=CHATS,
    )
    system_role: str = option(
        "template",
        "what becomes of system messages; merge: put before the user's",
        group=CHATS,
        choices=SYSTEM_ROLES,
    )
    train_turns: str = option(
        "all", "which answers of a conversation are learnt", group=CHATS, choices=TRAIN_TURNS
    )
    steps: int = option(
        0, "Optimizer updates; default: --epochs", group=LENGTH, minimum=0, shows_default=False
    )
    epochs: int = option(1, "Passes over the data", group=LENGTH, minimum=1)
    batch_size: int = option(
        8, "Rows or pairs per update, over all microbatches and devices", group=LENGTH, minimum=1
    )
    microbatch_size: int = option(
        0,
        "Rows or pairs per microbatch; default: chosen",
        group=LENGTH,
        minimum=0,
        shows_default=False,
    )
    max_seq_length: int = option(512, "Most tokens of a sequence", group=LENGTH, minimum=1)
    on_long: str = option(
        "truncate",
        "what becomes of longer rows; split: texts into windows",
        group=LENGTH,
        choices=ON_LONG,
    )
    packing: bool = option(
        False,
        "Lay rows end to end in sequences of --max-seq-length; a batch is so many of these",
        group=LENGTH,
    )
    group_by_length: bool = option(
        False, "Put rows of similar length into a batch: less padding", group=LENGTH
    )
    learning_rate: float = option(2e-4, "Peak rate; with --full 2e-5", group=RATE, above=0)
    lr_schedule: str = option(
        "cosine", "how the rate falls after warm-up", group=RATE, choices=LR_SCHEDULES
    )
    warmup_steps: int = option(0, "Updates of linear warm-up", group=RATE, minimum=0)
    warmup_ratio: float = option(
        0.0,
        "Share of all updates to warm up in, where --warmup-steps is 0",
        group=RATE,
        minimum=0,
        maximum=1,
    )
    min_lr_ratio: float = option(
        0.0,
        "Last update's rate over the peak, cosine and linear",
        group=RATE,
        minimum=0,
        maximum=1,
        only_with=("lr_schedule", ("cosine", "linear")),
    )
    full: bool = option(
        False, "All weights of --adapter-layers; of embedding and head if all", group=ADAPTER
    )
    rank: int = option(8, "LoRA rank", group=ADAPTER, minimum=1)
    alpha: float = option(
        0.0,
        "LoRA alpha, scale is alpha/rank; 0: 16, or by --scale",
        group=ADAPTER,
        minimum=0,
        shows_default=False,
    )
    scale: float = option(
        0.0,
        "Instead of --alpha: alpha is scale x rank; 0: by --alpha",
        group=ADAPTER,
        minimum=0,
        shows_default=False,
    )
    rslora: bool = option(
        False, "Rank-stabilised LoRA: scale is alpha over the root of the rank", group=ADAPTER
    )
    dora: bool = option(
        False, "DoRA: each projection's row lengths are trained as well", group=ADAPTER
    )
    dropout: float = option(0.0, "LoRA dropout", group=ADAPTER, minimum=0, below=1)
    targets: tuple[str, ...] = option(
        ALL_TARGETS,
        "Projections, comma-separated: q_proj, self_attn.q_proj, model.layers.3.self_attn.q_proj, "
        "or all-linear (all seven)",
        group=ADAPTER,
    )
    adapter_layers: tuple[str, ...] = option(
        ALL_LAYERS,
        "Layers that are trained: all, last:8, or numbers like 0-3,7",
        group=ADAPTER,
        takes_numbers=True,
    )
    rank_pattern: tuple[str, ...] = option(
        (), "Ranks that differ: q_proj=16,down_proj=4", group=ADAPTER
    )
    alpha_pattern: tuple[str, ...] = option(
        (), "Alphas that differ: q_proj=32,down_proj=8", group=ADAPTER
    )
    init_adapter: str = option(
        "",
        "Start from this adapter: a PEFT or mlx-lm folder, or a run; it settles rank, alpha, "
        "targets and layers",
        group=ADAPTER,
    )
    optimizer: str = option(
        "adamw", "the rule that moves the adapter", group=RATE, choices=OPTIMIZERS
    )
    weight_decay: float = option(
        0.0, "Share of a value taken off per update, times the rate", group=RATE, minimum=0
    )
    adam_beta1: float = option(0.9, "AdamW's", group=RATE, minimum=0, below=1, only_with=_BY_ADAMW)
    adam_beta2: float = option(
        0.999, "AdamW's", group=RATE, minimum=0, below=1, only_with=_BY_ADAMW
    )
    adam_epsilon: float = option(1e-8, "AdamW's", group=RATE, above=0, only_with=_BY_ADAMW)
    momentum: float = option(
        0.9, "SGD's; 0: none", group=RATE, minimum=0, below=1, only_with=("optimizer", ("sgd",))
    )
    muon_momentum: float = option(
        0.95, "Muon's", group=RATE, minimum=0, below=1, only_with=("optimizer", ("muon",))
    )
    muon_rate: str = option(
        MUON_RATES[0],
        "what Muon's rate is multiplied by for a matrix's shape",
        group=RATE,
        choices=MUON_RATES,
        only_with=("optimizer", ("muon",)),
    )
    lora_plus_ratio: float = option(
        1.0, "Rate of LoRA's B over that of A (LoRA+)", group=RATE, above=0
    )
    neftune_alpha: float = option(
        0.0, "Noise on the embeddings in training (NEFTune); 5 is usual", group=RATE, minimum=0
    )
    label_smoothing: float = option(
        0.0,
        "Share of each target spread over the vocabulary in training; dpo: of pairs that are wrong",
        group=RATE,
        minimum=0,
        below=1,
    )
    max_grad_norm: float = option(
        1.0, "Global clipping over all devices; 0: none", group=RATE, minimum=0
    )
    seed: int = option(0, "Decides order, adapters and dropout", group=LENGTH, minimum=0)
    dtype: str = option("auto", "of the frozen base", group=NUMBERS, choices=DTYPES)
    wire_dtype: str = option(
        "auto", "between devices; auto: as the base", group=NUMBERS, choices=DTYPES
    )
    pipeline_schedule: str = option(
        "1f1b", "order of the pipeline's work", group=NUMBERS, choices=PIPELINE_SCHEDULES
    )
    checkpoint_activations: bool = option(
        False, "Recompute layers in backward: less memory, more time", group=NUMBERS
    )
    quantize: int = option(
        0,
        "Bits of the base's projections, 4 or 8; 0: as the model has them",
        group=NUMBERS,
        choices=QUANTIZE_BITS,
        shows_default=False,
    )
    base_weights: str = option(
        "auto",
        "how quantised weights lie in memory; auto: packed, but dense on a CPU with much room",
        group=NUMBERS,
        choices=BASE_WEIGHTS,
    )
    val_rows: int = option(
        0, "Rows held out when the data has no valid part", group=CHECKS, minimum=0
    )
    val_split: float = option(
        0.0, "Share of the rows held out instead of a number", group=CHECKS, minimum=0, below=1
    )
    eval_every: int = option(
        0,
        "Steps between held-out losses; 0: before and after",
        group=CHECKS,
        minimum=0,
        shows_default=False,
    )
    early_stop: int = option(
        0,
        "Evaluations without a better held-out loss that end the run; 0: none",
        group=CHECKS,
        minimum=0,
    )
    stop_loss: float = option(
        3.0,
        "End with exit 5 when losses stay above so many times the first; 0: never",
        group=SAFETY,
        minimum=0,
    )
    save_every: int = option(
        20, "Steps between checkpoints; 0: at the end", group=SAFETY, minimum=0
    )
    save_minutes: float = option(
        0.0, "Minutes between checkpoints at most; 0: by steps", group=SAFETY, minimum=0
    )
    keep: int = option(
        3, "Newest checkpoints to keep, beside the best one", group=SAFETY, minimum=1
    )
    shadow: str = option(
        "auto", "State copied to a neighbour: auto (--full: off), off, every N steps", group=SAFETY
    )
    takeover: bool = option(True, "Another member goes on when this device is gone", group=SAFETY)
    min_devices: int = option(
        1, "Wait for so many, else exit 3; all take part", group=DEVICES, minimum=1
    )
    device_wait_s: float = option(
        30.0, "How long to wait for devices, seconds", group=DEVICES, above=0
    )
    devices: tuple[str, ...] = option((), "Use just these: NAME,NAME", group=DEVICES)
    layers: tuple[str, ...] = option(
        (), "Your own split in ring order, NAME:COUNT,NAME:COUNT", group=DEVICES
    )
    profile_s: float = option(
        3.0,
        "Seconds to time a layer on each device; 0: split by memory",
        group=DEVICES,
        minimum=0,
        maximum=MAX_PROFILE_S,
    )
    report_to: tuple[str, ...] = option(
        (),
        f"Numbers of each step to these, comma-separated: {', '.join(REPORT_LIBRARIES)}",
        group=WHAT,
    )
    run_dir: str = option("", "Where results go; must be empty", group=WHAT)
    step_timeout_s: float = option(
        600.0, "Longest wait within a step, seconds", group=DEVICES, above=0
    )
