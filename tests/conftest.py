"""Before any framework is imported: one compute thread, as several tests share the cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
