"""Find and signal a process tree; run as a script, be the watchdog that ends trees when their owner dies.

This file is also started on its own (``python -I -S tree.py``), so it imports the standard library only.

A process group does not catch children that made a session of their own. Each tree therefore carries a tag in its
environment, which the kernel hands down to every descendant and shows in ``/proc/<pid>/environ``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_PREFIX = "TRTLLM_PIPELINE_TREE_"


def tag_environment(tag: str) -> dict[str, str]:
    """Return the variable that marks a tree. Its name is its own, so that trees within trees carry both."""
    return {_PREFIX + tag: "1"}


def members(tag: str) -> list[int]:
    """Return the ids of living processes that carry ``tag``; zombies have no environment and are left out."""
    needle = f"{_PREFIX}{tag}=".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            environ = Path(entry.path, "environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        if needle in environ:
            found.append(int(entry.name))
    return found


def signal_tree(tag: str, sig: signal.Signals, group: int | None) -> bool:
    """Send ``sig`` to the process group and to every member; tell whether anything was there.

    Args:
        tag: Tag of the tree.
        sig: The signal.
        group: Process group, or None when its leader was reaped already: the number may belong to others by now.
    """
    found = members(tag)
    if group is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, sig)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, sig)
    return bool(found)


def end_tree(tag: str, group: int | None, grace_s: float) -> None:
    """TERM the tree, wait up to ``grace_s`` seconds for it to go, then KILL what is left."""
    if not signal_tree(tag, signal.SIGTERM, group):
        return
    deadline = time.monotonic() + grace_s
    while members(tag):
        if time.monotonic() >= deadline:
            signal_tree(tag, signal.SIGKILL, group)
            # A member may have forked between the look and the kill; a few looks later all are gone.
            for _ in range(100):
                if not signal_tree(tag, signal.SIGKILL, None):
                    return
                time.sleep(0.01)
            return
        time.sleep(0.02)


def watch(grace_s: float = 5.0) -> None:
    """Read ``+ tag`` and ``- tag`` lines from stdin; at its end, end every tree that was not taken off."""
    # Whoever ends our owner's whole group must not end us before our work is done.
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    alive: set[str] = set()
    for line in sys.stdin:
        verb, _, tag = line.strip().partition(" ")
        if verb == "+":
            alive.add(tag)
        else:
            alive.discard(tag)
    for tag in alive:
        signal_tree(tag, signal.SIGTERM, None)
    for tag in alive:
        end_tree(tag, None, grace_s)


if __name__ == "__main__":
    watch()
