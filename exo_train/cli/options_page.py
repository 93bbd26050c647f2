"""docs/options.md out of the options themselves, so that it cannot drift.

`make options` writes it anew; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator

from exo_train.aliases import foreign_names
from exo_train.config import OPTIONS
from exo_train.options import Option

HEAD = """# Options of `exo-train train`

Made from the code by `make options`; a test compares the two.

Each option may stand on the command line or, without its dashes, in the YAML file of `--config`;
the command line wins over the file, the file over the default. A key that is not here is refused
with the nearest name. A number may be written as 0.0001, 1e-4 or "1e-4".
`exo-train train … --print-config` prints all of them with the place each is from, and trains
nothing; what it prints is a file for `--config`.
"""

FOREIGN = """## Names of other programs

Options under the names that mlx-lm, TRL, axolotl and LLaMA-Factory have for them are read in the
file and on the command line, and said: "'lora_r' is read as 'rank'". Two names of one option with
different values are refused, and so is what has no meaning here, with what to say instead.
`batch_size` is always the sequences of one update over all devices, while in other programs it may
be those of a device or of a microbatch.

| name | here |
|---|---|"""


def options_page() -> str:
    """Give the page as Markdown."""
    rows = [f"| {names} | {about} |" for names, about in foreign_names()]
    return "\n".join([HEAD, *_groups(), FOREIGN, *rows, ""])


def _groups() -> Iterator[str]:
    groups = dict.fromkeys(option.about.group for option in OPTIONS.values())
    for group in groups:
        yield f"## {group}\n\n| option | default | range | what it does |\n|---|---|---|---|"
        for option in OPTIONS.values():
            if option.about.group == group:
                cells = (f"`{_flag(option)}`", _default(option), _range(option), option.help)
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _flag(option: Option) -> str:
    return "MODEL" if option.name == "model" else option.flag


def _default(option: Option) -> str:
    value = option.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _range(option: Option) -> str:
    about = option.about
    if about.choices:
        return ", ".join(map(str, about.choices))
    return about.range_words().removeprefix("be ").replace("not be negative", "0 or more")


if __name__ == "__main__":
    print(options_page(), end="")
