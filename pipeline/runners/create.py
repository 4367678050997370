"""Make a runner by name."""

from __future__ import annotations

import difflib

from pipeline.errors import ConfigError
from pipeline.runners.container import ContainerRunner
from pipeline.runners.job import Options, Runner
from pipeline.runners.local import LocalRunner
from pipeline.runners.pyxis import PyxisRunner

RUNNERS = ("docker", "local", "podman", "pyxis")


def make_runner(kind: str, options: Options | None = None, *, store: str = "") -> Runner:
    """Return the runner of that name.

    Args:
        kind: ``docker``, ``podman``, ``local`` or ``pyxis``.
        options: How its engine is called.
        store: Which store the work is for; on containers as a label.

    Raises:
        ConfigError: There is no such runner.
    """
    if kind == "docker":
        return ContainerRunner("docker", options, store=store)
    if kind == "podman":
        return ContainerRunner("podman", options, store=store)
    if kind == "local":
        return LocalRunner(options)
    if kind == "pyxis":
        return PyxisRunner(options)
    near = difflib.get_close_matches(kind, RUNNERS, n=1)
    raise ConfigError(
        f"runner.kind={kind!r} is not known; expected one of {', '.join(RUNNERS)}",
        hint=f"did you mean {near[0]}?" if near else "",
    )
