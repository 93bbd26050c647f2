"""Asks the system's own tools, each for a bounded time.

Owns the running of other programs for the checks. Never raises, changes nothing, needs no rights:
a tool that is missing, refuses or hangs is an answer of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

TOOL_TIMEOUT_S = 3.0
MAX_ANSWER_CHARS = 100_000
MAX_PARALLEL_TOOLS = 8
# A user's PATH often lacks where the tools of the network live.
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    outcome: Literal["answered", "failed", "missing", "timed out"]
    text: str = ""  # standard output, then standard error

    @property
    def is_answer(self) -> bool:
        return self.outcome == "answered"


def ask_tool(words: tuple[str, ...], *, timeout_s: float = TOOL_TIMEOUT_S) -> ToolAnswer:
    """Run one tool and give what it printed, in English where it can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM_FOLDERS])
    program = shutil.which(words[0], path=path)
    if program is None:
        return ToolAnswer("missing")
    try:
        done = subprocess.run(
            [program, *words[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env=os.environ | {"LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return ToolAnswer("timed out")
    except OSError as error:
        return ToolAnswer("failed", str(error))
    text = (done.stdout + done.stderr).decode("utf-8", "replace")[:MAX_ANSWER_CHARS]
    return ToolAnswer("answered" if done.returncode == 0 else "failed", text)


def ask_tools(
    tools: Mapping[str, tuple[str, ...]], *, timeout_s: float = TOOL_TIMEOUT_S
) -> dict[str, ToolAnswer]:
    """Ask all at once; the whole takes little longer than the slowest."""
    with ThreadPoolExecutor(MAX_PARALLEL_TOOLS, thread_name_prefix="tool") as pool:
        answers = pool.map(lambda words: ask_tool(words, timeout_s=timeout_s), tools.values())
        return dict(zip(tools, answers, strict=True))
