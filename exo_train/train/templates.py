"""Which chat template a run uses: the model's own, a known one by name, or one from a file.

Owns the known templates (`chat_templates/`), what they need of a tokenizer, and the refusals.
Must not render conversations and must not add tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from exo_train.errors import ConfigError
from exo_train.models.tokenizer import adds_bos, is_one_token
from exo_train.options import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEMPLATE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTemplate:
    """`marks` must be single tokens; `end_of_turn` ends an answer, None: the tokenizer's EOS."""

    marks: tuple[str, ...] = ()
    end_of_turn: str | None = None


# Each writes what the models named in docs/templates.md were trained on.
KNOWN_TEMPLATES = {
    "chatml": KnownTemplate(marks=("<|im_start|>", "<|im_end|>"), end_of_turn="<|im_end|>"),
    "gemma": KnownTemplate(marks=("<start_of_turn>", "<end_of_turn>"), end_of_turn="<end_of_turn>"),
    "llama2": KnownTemplate(),
    "llama3": KnownTemplate(
        marks=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), end_of_turn="<|eot_id|>"
    ),
    "mistral": KnownTemplate(),
    "zephyr": KnownTemplate(),
}


def read_template(named: str) -> str:
    """Give the text of a known template, or of the file `named`; raises ConfigError."""
    if named in KNOWN_TEMPLATES:
        folder = resources.files("exo_train.train") / "chat_templates"
        return (folder / f"{named}.jinja").read_text("utf-8")
    path = Path(named).expanduser()
    if not os.path.exists(path):
        raise ConfigError(
            f"--chat-template: there is no file '{named}', and no known template of that "
            f"name{nearest(named, KNOWN_TEMPLATES)}; known are {', '.join(KNOWN_TEMPLATES)}"
        )
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--chat-template: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--chat-template: {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    if len(data) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"--chat-template: {path} is longer than {MAX_TEMPLATE_BYTES:,} bytes")
    if not text.strip():
        raise ConfigError(f"--chat-template: {path} is empty")
    return text


def use_template(tokenizer: PreTrainedTokenizerBase, named: str) -> None:
    """Have `tokenizer` render with the template `named` instead of its own; "": with its own.

    Raises ConfigError for a template that cannot be read, has a mistake, or needs tokens that the
    tokenizer does not have.
    """
    if not named:
        return
    text = read_template(named)
    if named in KNOWN_TEMPLATES:
        if missing := _missing(tokenizer, KNOWN_TEMPLATES[named]):
            raise ConfigError(
                f"--chat-template {named} needs {', '.join(missing)}, which the model's tokenizer "
                f"does not have as a single token{_offer(tokenizer)}"
            )
        if adds_bos(tokenizer) and "bos_token" not in text:
            # Other programs render the saved template and add nothing: it must say all of it.
            text = "{{- bos_token }}\n" + text
    _check_syntax(tokenizer, text, named)
    tokenizer.chat_template = text


def fitting_templates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Name the known templates whose marks the tokenizer has, those with marks of their own first.

    A mark that is one token was put into the vocabulary for just that.
    """
    fitting = [name for name, known in KNOWN_TEMPLATES.items() if not _missing(tokenizer, known)]
    return sorted(fitting, key=lambda name: not KNOWN_TEMPLATES[name].marks)


def _missing(tokenizer: PreTrainedTokenizerBase, known: KnownTemplate) -> list[str]:
    missing = [mark for mark in known.marks if not is_one_token(tokenizer, mark)]
    if known.end_of_turn is None and tokenizer.eos_token_id is None:
        missing.append("an 'eos_token'")
    return missing


def _offer(tokenizer: PreTrainedTokenizerBase) -> str:
    fitting = fitting_templates(tokenizer)
    return f"; it has what these need: {', '.join(fitting)}" if fitting else ""


def _check_syntax(tokenizer: PreTrainedTokenizerBase, text: str, named: str) -> None:
    """Compile by rendering once, as the tokenizer will; refused roles are no matter here."""
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], chat_template=text, tokenize=False
        )
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"--chat-template: {named}, line {error.lineno}: {error.message}; correct the template"
        ) from None
    except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError):
        return
