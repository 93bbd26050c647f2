"""The exception tree. Owns every error a user can meet and its exit code; imports nothing.

ExoTrainError
├── ConfigError            2   an option, a configuration key, a path
│   ├── DataError          2   a data file or row
│   └── ModelError         2   a model directory, file or architecture
├── PeerError              3   the network or another device
│   ├── PeerLostError      3   a device stopped answering during a run
│   ├── TakenOverError     3   another device leads the run now
│   └── ProtocolError      3   a message that breaks the protocol
├── DoesNotFitError        4   memory
├── NumericsError          5   a number went wrong
└── InterruptedRunError  130   stopped on request, state saved

Each message is one sentence (or two): what failed, where, measured against limit, what to do next.
"""


class ExoTrainError(Exception):
    """Base of all errors meant for the user; `str(error)` is the whole message."""

    exit_code = 1


class ConfigError(ExoTrainError):
    exit_code = 2


class DataError(ConfigError):
    pass


class ModelError(ConfigError):
    pass


class PeerError(ExoTrainError):
    exit_code = 3


class PeerLostError(PeerError):
    pass


class TakenOverError(PeerError):
    pass


class ProtocolError(PeerError):
    pass


class DoesNotFitError(ExoTrainError):
    exit_code = 4


class NumericsError(ExoTrainError):
    exit_code = 5


class InterruptedRunError(ExoTrainError):
    exit_code = 130


def error_class(name: str) -> type[ExoTrainError]:
    """Find the class called `name`; an unknown name from another version is the base class."""
    pending: list[type[ExoTrainError]] = [ExoTrainError]
    while pending:
        candidate = pending.pop()
        if candidate.__name__ == name:
            return candidate
        pending.extend(candidate.__subclasses__())
    return ExoTrainError
