"""Commands in messages, ready to be pasted into this system's shell. Pure."""

from __future__ import annotations

import os
import shlex
import subprocess


def command_line(*words: object) -> str:
    """Join words, quoted where they need it."""
    texts = [str(word) for word in words]
    return subprocess.list2cmdline(texts) if os.name == "nt" else shlex.join(texts)
