"""Real programs are started, watched and killed; nothing is mocked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import ExitCode, StoreError, ToolError
from pipeline.runners.process import Daemon, ProcessFailed, run

TOKEN = "hf_TESTSECRET1234567890"


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def read_pid(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def test_run_gives_lines_to_callback_log_and_tail(tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "logs" / "tool.log"
    done = run(["sh", "-c", "echo out; echo err >&2; printf last"], log_path=log, on_line=lines.append)
    assert lines == ["out", "err", "last"]
    assert done.tail == ("out", "err", "last")
    assert log.read_text() == "out\nerr\nlast\n"
    assert done.returncode == 0
    assert done.seconds > 0


def test_run_appends_to_the_log_of_a_stage(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    log.write_text("start\n")
    run(["echo", "tool"], log_path=log)
    assert log.read_text() == "start\ntool\n"


def test_run_splits_progress_bars_at_carriage_returns() -> None:
    assert run(["printf", "10%%\\r20%%\\r\\nend"]).tail == ("10%", "20%", "end")


def test_run_redacts_secrets_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-no-known-shape")
    log = tmp_path / "log"
    done = run(["sh", "-c", "echo token is $HF_TOKEN."], log_path=log)
    assert done.tail == ("token is ***.",)
    assert log.read_text() == "token is ***.\n"


def test_run_refuses_secrets_in_arguments() -> None:
    with pytest.raises(ToolError, match="argument 1 of echo holds a secret") as caught:
        run(["echo", TOKEN])
    assert TOKEN not in str(caught.value)


def test_run_reports_exit_code_log_and_last_20_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ProcessFailed) as caught:
        run(["sh", "-c", "seq 30; exit 3"], log_path=log)
    message = str(caught.value)
    assert message.startswith(f"sh ended with exit code 3 (log: {log})")
    assert "| 11\n" in message and "| 30" in message
    assert "| 10\n" not in message
    assert caught.value.exit_code == ExitCode.TOOL
    assert (caught.value.returncode, caught.value.tail[-1]) == (3, "30")


def test_run_names_the_signal_that_ended_a_program() -> None:
    with pytest.raises(ProcessFailed, match="signal SIGKILL") as caught:
        run(["sh", "-c", "kill -KILL $$"])
    assert "memory" in caught.value.hint
    with pytest.raises(ProcessFailed, match="signal SIGSEGV"):
        run(["sh", "-c", "kill -SEGV $$"])


def test_run_returns_failures_when_not_checking() -> None:
    assert run(["sh", "-c", "exit 7"], check=False).returncode == 7


def test_run_names_a_missing_program_and_the_path() -> None:
    with pytest.raises(ToolError, match=r"no-such-tool: not found in PATH=/nowhere") as caught:
        run(["no-such-tool"], env={"PATH": "/nowhere"})
    assert "PATH" in caught.value.hint
    with pytest.raises(ToolError, match=r"/no/such/tool: no such file"):
        run(["/no/such/tool"])


def test_run_tells_missing_folder_and_interpreter_from_missing_program(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="working directory"):
        run(["true"], cwd=tmp_path / "gone")
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(ToolError, match="interpreter is missing"):
        run([str(script)])
    script.chmod(0o644)
    with pytest.raises(ToolError, match="Permission denied"):
        run([str(script)])


def test_run_gives_no_input_to_the_program() -> None:
    assert run(["cat"], timeout_s=5).returncode == 0


def test_run_stops_the_whole_tree_when_time_is_up(tmp_path: Path) -> None:
    # The grandchild ignores TERM, has a session of its own and holds the output pipe.
    script = f"setsid sh -c 'trap \"\" TERM; echo $$ > {tmp_path}/pid; sleep 60; sleep 60' & echo up; sleep 60"
    started = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"did not end within 0\.5 s") as caught:
        run(["sh", "-c", script], timeout_s=0.5)
    assert caught.value.timed_out
    assert caught.value.tail == ("up",)
    assert time.monotonic() - started < 10
    assert not is_running(read_pid(tmp_path / "pid"))


def test_run_ends_children_that_a_finished_program_left_behind(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; echo done"])
    assert done.tail == ("done",)
    assert time.monotonic() - started < 10
    assert not is_running(read_pid(tmp_path / "pid"))


def test_run_stops_the_tree_when_the_callback_fails(tmp_path: Path) -> None:
    def fail(line: str) -> None:
        raise ValueError(line)

    with pytest.raises(ValueError, match="first"):
        run(["sh", "-c", f"echo $$ > {tmp_path}/pid; echo first; sleep 60"], on_line=fail)
    assert not is_running(read_pid(tmp_path / "pid"))


def test_run_says_so_when_the_log_cannot_be_written(tmp_path: Path) -> None:
    # /dev/full answers every write with "no space left".
    with pytest.raises(StoreError, match="No space left"):
        run(["sh", "-c", "echo line; sleep 60"], log_path=Path("/dev/full"))
    with pytest.raises(StoreError, match="cannot write the log"):
        run(["true"], log_path=tmp_path)


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "owner.py"
    path.write_text(body)
    return [sys.executable, str(path), str(tmp_path)]


OWNER_OF_RUN = """
import sys
from pipeline.runners.process import run
run(["sh", "-c", "echo $$ > $0/pid; sleep 60; true", sys.argv[1]])
"""
OWNER_OF_DAEMON = """
import sys, threading
from pipeline.runners.process import Daemon
# Started by a thread that ends: the program must live on.
daemon = Daemon(["sh", "-c", "setsid sleep 60 & echo $! > $0/pid; sleep 60", sys.argv[1]], name="server")
thread = threading.Thread(target=daemon.start)
thread.start(); thread.join()
daemon.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
@pytest.mark.parametrize("body", [OWNER_OF_RUN, OWNER_OF_DAEMON], ids=["run", "daemon"])
def test_programs_end_when_their_owner_does(tmp_path: Path, body: str, number: signal.Signals) -> None:
    with subprocess.Popen(script(tmp_path, body), stderr=subprocess.DEVNULL) as owner:
        pid = read_pid(tmp_path / "pid")
        assert is_running(pid)
        owner.send_signal(number)
    until(lambda: not is_running(pid))


def test_trees_within_trees_end_together(tmp_path: Path) -> None:
    owner = script(tmp_path, OWNER_OF_RUN)
    with Daemon(owner, name="outer"):
        pid = read_pid(tmp_path / "pid")
    assert not is_running(pid)


def test_daemon_runs_until_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Daemon(["sh", "-c", "echo up; exec sleep 60"], name="server", log_path=log) as daemon:
        until(lambda: daemon.tail() == ("up",))
        assert daemon.poll() is None
        assert daemon.wait(0.05) is None
        assert is_running(daemon.pid)
        assert os.getpgid(daemon.pid) == daemon.pid
    assert daemon.poll() == -signal.SIGTERM
    assert not is_running(daemon.pid)
    assert log.read_text() == "up\n"
    assert daemon.stop() == -signal.SIGTERM


def test_daemon_stop_kills_what_ignores_term() -> None:
    daemon = Daemon(["sh", "-c", "trap '' TERM; echo up; sleep 60; sleep 60"], name="stubborn").start()
    until(lambda: daemon.tail() == ("up",))
    assert daemon.stop(grace_s=0.3) == -signal.SIGKILL


def test_daemon_that_died_gives_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    daemon = Daemon(["sh", "-c", "echo no port left; exit 4"], name="tritonserver", log_path=log).start()
    assert daemon.wait(10) == 4
    until(lambda: daemon.tail(1) == ("no port left",))
    error = daemon.failure()
    assert str(error) == f"tritonserver ended with exit code 4 (log: {log})\n  | no port left"
    assert daemon.stop() == 4


def test_daemon_is_usable_only_after_start() -> None:
    daemon = Daemon(["true"])
    assert daemon.tail() == ()
    assert daemon.stop() is None
    with pytest.raises(ToolError, match="true was not started"):
        daemon.poll()
