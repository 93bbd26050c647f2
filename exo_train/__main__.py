"""`python -m exo_train` is the command `exo-train`."""

from exo_train.cli.main import main

main()
