"""What exit codes and engines' own words mean. The words were taken from the engines named."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from pipeline.runners.exits import engine_message, explain
from pipeline.runners.owner import Owner


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("docker: Cannot connect to the Docker daemon at unix:///x.sock. Is the docker daemon running?", "not answer"),
        ("permission denied while trying to connect to the Docker daemon socket at unix:///x", "may not use"),
        ("docker: Error response from daemon: No such image: nope:1", "image is not there"),
        ("Error: nope:1: image not known", "image is not there"),
        ("Error response from daemon: manifest for nvcr.io/x:1 not found: manifest unknown", "image is not there"),
        ("Error response from daemon: Head https://nvcr.io/v2/x: unauthorized: authentication required", "refuses"),
        ('docker: Error: could not select device driver "" with capabilities: [[gpu]].', "cannot give GPUs"),
        ("Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all", "cannot give GPUs"),
        ("docker: Error response from daemon: Unknown runtime specified nvidia.", "cannot give GPUs"),
        ('Error: default OCI runtime "nvidia" not found: invalid argument', "cannot give GPUs"),
        ("runc: error setting rlimit type 8: operation not permitted", "may not raise the limits"),
        ('invalid mount config for type "bind": bind source path does not exist: /x', "does not see a path"),
        ("Error: statfs /x: no such file or directory", "does not see a path"),
        ('Error: creating container storage: the container name "a" is already in use by 1', "name exists"),
        ("write /var/lib/docker/tmp/x: no space left on device", "disk is full"),
        ("srun: unrecognized option '--container-image=x'", "no pyxis plugin"),
        ("srun: error: Unable to allocate resources: Invalid account or account/partition", "refuses the job"),
    ],
)
def test_engine_message_is_recognised(words: str, what: str) -> None:
    found, hint = engine_message(["something before", words])
    assert what in found
    assert hint


def test_engine_message_is_empty_for_what_is_not_known() -> None:
    assert engine_message(["Traceback (most recent call last):"]) == ("", "")


@pytest.mark.parametrize(
    ("code", "tail", "engine", "what"),
    [
        (3, (), "docker", "ended with exit code 3"),
        (125, (), "docker", "did not run: docker failed (exit code 125)"),
        (125, (), "", "ended with exit code 125"),
        (126, ("error setting rlimit type 7",), "podman", "did not start: this user may not raise the limits"),
        (127, ('exec: "x": executable file not found in $PATH: unknown',), "docker", "was not found in IMAGE"),
        (127, ("[FATAL tini (7)] exec x failed: No such file or directory",), "docker", "was not found in IMAGE"),
        (1, ("ERROR (catatonit:2): failed to exec pid1: No such file or directory",), "podman", "was not found in"),
        (127, ("env: ‘x’: No such file or directory",), "", "was not found in IMAGE"),
        (127, ("bash: line 1: y: command not found",), "docker", "ended with exit code 127"),
        (137, (), "docker", "ended with SIGKILL"),
        (-9, (), "", "ended with SIGKILL"),
        (139, (), "podman", "ended with SIGSEGV"),
        (255, (), "docker", "ended with exit code 255"),
    ],
)
def test_explain_says_how_a_program_ended(code: int, tail: tuple[str, ...], engine: str, what: str) -> None:
    assert explain(code, tail, place="IMAGE", engine=engine)[0].startswith(what)


def test_owner_is_read_back_from_its_label() -> None:
    owner = Owner.current()
    assert Owner.parse(owner.label) == owner
    assert Owner.parse("") is None
    assert Owner.parse("<no value>") is None
    assert Owner.parse("a/b/c/d/e") is None


def test_owner_is_dead_only_when_that_is_certain() -> None:
    living = Owner.current()
    assert living.host == socket.gethostname()
    assert not living.is_dead()
    # The id is in use again, by a process that started later.
    assert replace(living, start=living.start + 1).is_dead()
    assert replace(living, pid=2**22 + 1).is_dead()
    assert replace(living, boot="another").is_dead()
    assert not replace(living, namespace="another", pid=2**22 + 1).is_dead()
    assert not replace(living, host="another", boot="another").is_dead()
