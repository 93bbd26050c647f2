"""The exit codes that scripts rely on, and how an error of another device is raised here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from exo_train import errors
from exo_train.cli import main as command_line
from exo_train.errors import ExoTrainError, error_class

EXIT_CODES = {
    "ExoTrainError": 1,
    "ConfigError": 2,
    "DataError": 2,
    "ModelError": 2,
    "PeerError": 3,
    "PeerLostError": 3,
    "TakenOverError": 3,
    "ProtocolError": 3,
    "DoesNotFitError": 4,
    "NumericsError": 5,
    "InterruptedRunError": 130,
}
PARENTS = {
    "DataError": "ConfigError",
    "ModelError": "ConfigError",
    "PeerLostError": "PeerError",
    "TakenOverError": "PeerError",
    "ProtocolError": "PeerError",
}


def _classes() -> Iterator[type[ExoTrainError]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, ExoTrainError):
            yield value


def test_exit_codes_are_the_documented_ones() -> None:
    assert {cls.__name__: cls.exit_code for cls in _classes()} == EXIT_CODES


def test_a_handler_of_the_wider_error_catches_the_narrower() -> None:
    for child, parent in PARENTS.items():
        assert issubclass(getattr(errors, child), getattr(errors, parent))


def test_tree_at_the_head_of_the_module_is_true() -> None:
    assert errors.__doc__ is not None
    tree = errors.__doc__.splitlines()
    for cls in _classes():
        (line,) = (line for line in tree if cls.__name__ in line.split())
        if cls is not ExoTrainError:
            assert line.split(cls.__name__)[1].split()[0] == str(cls.exit_code)


@pytest.mark.parametrize("name", EXIT_CODES)
def test_error_of_another_device_keeps_its_class_and_message(name: str) -> None:
    error = error_class(name)("den-pc: disk full")
    assert type(error).__name__ == name
    assert str(error) == "den-pc: disk full"


@pytest.mark.parametrize("name", ["ErrorOfALaterVersion", "", "SystemExit", "ValueError", "object"])
def test_unknown_class_is_the_base_and_nothing_else(name: str) -> None:
    assert error_class(name) is ExoTrainError


@pytest.mark.parametrize("name", EXIT_CODES)
def test_user_gets_one_sentence_and_the_exit_code(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error_class(name)("rank 1 (den-pc) has no [disk] left")

    monkeypatch.setattr(command_line, "app", fail)
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == EXIT_CODES[name]
    assert capsys.readouterr() == ("", "exo-train: rank 1 (den-pc) has no [disk] left\n")


def test_wrong_usage_exits_2_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "exo_train", "train", "--no-such-option"],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert done.returncode == EXIT_CODES["ConfigError"]
    assert "--no-such-option" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
