"""`python -m exo_train` is the command `exo-train`."""

import sys


def main() -> None:
    """Import, which takes a second, and run; Ctrl-C in the meantime is no traceback either."""
    try:
        from exo_train.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
