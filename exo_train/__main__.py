"""`python -m exo_train` is the command `exo-train`."""

import os
import sys


def main() -> None:
    """Import, which takes a second, and run; Ctrl-C in the meantime is no traceback either."""
    # gRPC writes a line on the screen for each port scan; we count and say once ourselves.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from exo_train.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
