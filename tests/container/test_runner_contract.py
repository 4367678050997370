"""What every runner promises, on real engines: one suite for docker, podman, pyxis (stand-in) and local."""

from __future__ import annotations

import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from container_case import Case, Setting, until

from pipeline.errors import ToolError
from pipeline.runners.create import make_runner
from pipeline.runners.job import Bind, Cancelled, ContainerJob, Secret
from pipeline.runners.owner import OWNER_LABEL, Owner
from pipeline.runners.process import ProcessFailed

pytestmark = pytest.mark.container

SECRET = "hf_TESTSECRET1234567890"
WAITS = "trap 'echo bye > /out/bye; exit 3' TERM; echo at work; echo > /out/ready; while :; do sleep 0.1; done"


def test_run_gives_lines_to_callback_log_and_tail(case: Case, tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "logs" / "stage.log"
    job = case.job(tmp_path, "sh", "-c", "echo out; echo err >&2")
    done = case.runner().run(job, log_path=log, on_line=lines.append)
    assert sorted(lines) == ["err", "out"]
    assert sorted(done.tail) == ["err", "out"]
    first, *rest = log.read_text().splitlines()
    assert first.startswith("$ ")
    assert sorted(rest) == ["err", "out"]


def test_run_cannot_change_inputs(isolating: Case, tmp_path: Path) -> None:
    job = isolating.job(tmp_path, "sh", "-c", "echo changed > /in/model/file")
    (tmp_path / "in" / "file").write_text("as it was")
    (tmp_path / "in" / "file").chmod(0o666)
    with pytest.raises(ProcessFailed, match="Read-only file system"):
        isolating.runner().run(job)
    assert (tmp_path / "in" / "file").read_text() == "as it was"


@pytest.mark.parametrize("harm", ["echo x >> /in/model/file", "rm /in/model/file", "touch /in/model/new"])
def test_run_without_container_fails_when_an_input_was_changed(tmp_path: Path, harm: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("as it was")
    # The path has to stand alone to be rewritten, so it goes in as an argument of its own.
    program, path = harm.rsplit(" ", 1)
    argv = ("sh", "-c", f'{program} "$0"', path)
    job = ContainerJob("job", argv, "local", tmp_path / "scratch", (Bind(tmp_path / "in", "/in/model"),))
    with pytest.raises(ToolError, match="changed what it may only read"):
        make_runner("local").run(job)


def test_run_leaves_outputs_that_belong_to_the_caller(case: Case, tmp_path: Path) -> None:
    script = "import os, pathlib; os.makedirs('{0}/deep'); pathlib.Path('{0}/deep/file').touch(); raise SystemExit({1})"
    for code in (0, 5):
        folder = tmp_path / str(code)
        out = str(folder / "out") if case.name == "local" else "/out"
        job = case.job(folder, "python3", "-c", script.format(out, code))
        if code == 0:
            case.runner().run(job)
        else:
            with pytest.raises(ProcessFailed, match="exit code 5"):
                case.runner().run(job)
        made = folder / "out" / "deep"
        owners = {(path.stat().st_uid, path.stat().st_gid) for path in (made, made / "file")}
        assert owners == {(case.options.caller.uid, case.options.caller.gid)}


def test_run_has_no_network(isolating: Case, tmp_path: Path) -> None:
    lines: list[str] = []
    isolating.runner().run(isolating.job(tmp_path, "ls", "/sys/class/net"), on_line=lines.append)
    assert lines == ["lo"]


def test_run_reports_the_exit_code_of_the_program(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="sh ended with exit code 7") as caught:
        case.runner().run(case.job(tmp_path, "sh", "-c", "echo last words; exit 7"))
    assert caught.value.returncode == 7
    assert caught.value.tail == ("last words",)


@pytest.mark.parametrize(("name", "advice"), [("KILL", "memory ran out"), ("SEGV", "driver")])
def test_run_explains_a_signal(case: Case, tmp_path: Path, name: str, advice: str) -> None:
    job = case.job(tmp_path, "python3", "-c", f"import os, signal; os.kill(os.getpid(), signal.SIG{name})")
    with pytest.raises(ProcessFailed, match=f"SIG{name}") as caught:
        case.runner().run(job)
    assert advice in caught.value.hint


def test_run_says_when_the_program_is_missing(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="no-such-tool was not found in ") as caught:
        case.runner().run(case.job(tmp_path, "no-such-tool", "--help"))
    assert "release" in caught.value.hint


def test_run_sets_variables_home_and_working_directory(case: Case, tmp_path: Path) -> None:
    odd = "two words, a 'quote', a \"double\", $HOME and\na new line"
    script = "import json, os, pathlib; pathlib.Path(os.environ['HOME'], 'cache').touch(); "
    script += "print(json.dumps([os.environ['ODD'], os.getcwd(), os.environ['HOME']]))"
    lines: list[str] = []
    job = case.job(tmp_path, "python3", "-c", script)
    job = replace(job, env={**job.env, "ODD": odd})
    case.runner().run(job, on_line=lines.append)
    value, folder, home = json.loads(lines[0])
    assert value == odd
    if case.isolates:
        assert (folder, home) == ("/tmp", "/tmp/home")
    # Caches are on the host's disk, beside the job and not in its output.
    assert (tmp_path / "scratch" / "home" / "cache").exists()
    assert list((tmp_path / "out").iterdir()) == []


def test_run_streams_lines_while_the_program_works(case: Case, tmp_path: Path) -> None:
    delays: list[float] = []
    script = "import time\nfor _ in range(10): print(time.time()); time.sleep(0.05)"
    job = case.job(tmp_path, "python3", "-c", script)
    case.runner().run(job, on_line=lambda line: delays.append(time.time() - float(line)))
    assert len(delays) == 10
    # A buffer anywhere would hold the first line for the whole half second.
    assert statistics.median(delays) < 0.2


def test_run_passes_secrets_by_file_only(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    log = tmp_path / "log" / "stage.log"
    script = "import os, time; text = open(os.environ['HF_TOKEN_PATH']).read(); print('in environment:', text in "
    script += (
        "' '.join(v for k, v in os.environ.items())); print(text, len(text)); open('{}/ready', 'w'); time.sleep(1)"
    )
    out = str(tmp_path / "out") if case.name == "local" else "/out"
    job = case.job(tmp_path, "python3", "-c", script.format(out))
    job = replace(job, secrets=(Secret("HF_TOKEN", "HF_TOKEN_PATH"),))
    runner = case.runner()
    lines: list[str] = []
    seen: list[str] = []

    def look() -> None:
        until(lambda: (tmp_path / "out" / "ready").exists())
        if case.engine:
            argv = [case.engine, "inspect", *case.containers()]
            seen.append(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        seen.append(subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout)

    looking = threading.Thread(target=look)
    looking.start()
    runner.run(job, log_path=log, on_line=lines.append)
    looking.join()
    assert lines == ["in environment: False", f"*** {len(SECRET)}"]
    written = log.read_text() + (log.parent / "repro.sh").read_text() + " ".join(runner.command_line(job))
    assert seen
    assert SECRET not in written + "".join(seen)
    assert not job.secret_file(job.secrets[0]).exists()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and SECRET in path.read_text()] == []


def test_run_says_which_secret_is_not_set(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    job = replace(case.job(tmp_path, "true"), secrets=(Secret("HF_TOKEN", "HF_TOKEN_PATH"),))
    with pytest.raises(ToolError, match="needs the secret HF_TOKEN, which is not set"):
        case.runner().run(job)


def test_run_ends_a_program_that_takes_too_long(case: Case, tmp_path: Path) -> None:
    job = case.job(tmp_path, "sh", "-c", localised(case, tmp_path, WAITS), timeout_s=1.5)
    started = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"did not end within 1.5 s and was stopped") as caught:
        case.runner().run(job)
    assert caught.value.timed_out
    assert time.monotonic() - started < 10
    # It was asked first, and had the time to tidy up.
    assert (tmp_path / "out" / "bye").exists()
    assert case.containers() == []


def test_run_kills_a_program_that_does_not_listen(isolating: Case, tmp_path: Path) -> None:
    job = isolating.job(tmp_path, "sh", "-c", "trap '' TERM; while :; do sleep 0.1; done", timeout_s=0.5)
    with pytest.raises(ProcessFailed, match="was stopped"):
        isolating.runner(grace_s=1).run(job)
    assert isolating.containers() == []


def test_run_stops_on_cancel(case: Case, tmp_path: Path) -> None:
    job = case.job(tmp_path, "sh", "-c", localised(case, tmp_path, WAITS))
    cancel = Setting((tmp_path / "out" / "ready").exists)
    with pytest.raises(Cancelled, match="was stopped on request"):
        case.runner().run(job, cancel=cancel.event)
    assert (tmp_path / "out" / "bye").exists()
    assert case.containers() == []


def test_run_stops_the_program_on_ctrl_c(case: Case, tmp_path: Path) -> None:
    with started_elsewhere(case, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert (tmp_path / "out" / "bye").exists()
    assert case.containers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_we_are_killed_and_the_next_run_sweeps(
    case: Case, tmp_path: Path, number: signal.Signals
) -> None:
    with started_elsewhere(case, tmp_path) as process:
        process.send_signal(number)
        process.communicate(timeout=30)
    case.new_runner().run(case.job(tmp_path / "next", "true"))
    assert case.containers() == []
    if case.name == "local":
        until(lambda: str(tmp_path / "out") not in processes())


def test_sweep_stops_what_dead_runs_have_left_and_nothing_else(engine: Case) -> None:
    living = Owner.current()
    owners = {
        "orphan": replace(living, start=living.start + 1),
        "of-an-earlier-boot": replace(living, boot="0", namespace="0"),
        "at-work": living,
        "in-another-container": replace(living, namespace="0"),
        "of-another-machine": replace(living, host="elsewhere", boot="0"),
    }
    for name, owner in owners.items():
        label = f"--label={OWNER_LABEL}={owner.label}"
        argv = [engine.engine, "run", "--detach", "--init", "--network=none", f"--name={name}", label]
        subprocess.run([*argv, engine.image, "sleep", "60"], check=True, capture_output=True)
    try:
        assert sorted(engine.new_runner().sweep()) == ["of-an-earlier-boot", "orphan"]
        assert sorted(engine.containers()) == ["at-work", "in-another-container", "of-another-machine"]
        assert engine.new_runner().sweep() == ()
    finally:
        for name in owners:
            subprocess.run([engine.engine, "rm", "--force", name], check=False, capture_output=True)


def test_eight_jobs_at_once_keep_their_own_outcomes(case: Case, tmp_path: Path) -> None:
    codes: dict[int, int] = {}
    runner = case.runner()

    def work(number: int) -> None:
        job = case.job(tmp_path / str(number), "sh", "-c", f"exit {number}")
        try:
            codes[number] = runner.run(job).returncode
        except ProcessFailed as error:
            codes[number] = error.returncode

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {number: number for number in range(8)}
    assert case.containers() == []


def test_run_takes_any_path(case: Case, tmp_path: Path) -> None:
    names = ["epoch=3-step=10_(v1)@x%y#z", "quo\"te'd", "ünïcode\\n", "$HOME"]
    if case.name != "pyxis":
        names += ["two words", "a,b", "a:b"]
    job = case.job(tmp_path / "folder", "cp", *(f"/in/{number}/{name}" for number, name in enumerate(names)), "/out")
    binds = []
    for number, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
        binds.append(Bind(tmp_path / name, f"/in/{number}"))
    job = replace(job, binds=(*binds, job.binds[1]))
    case.runner().run(job, log_path=tmp_path / "two words" / "stage.log")
    assert {path.name: path.read_text() for path in (tmp_path / "folder" / "out").iterdir()} == {
        name: name for name in names
    }


@pytest.mark.parametrize("name", ["two words", "a,b", "a:b"])
def test_pyxis_refuses_paths_that_it_cannot_pass_on(tmp_path: Path, name: str) -> None:
    job = ContainerJob("job", ("true",), "image", tmp_path, (Bind(tmp_path / name, "/in/model"),))
    with pytest.raises(ToolError, match="pyxis cannot mount"):
        make_runner("pyxis").command_line(job)


def test_run_refuses_a_missing_input_before_it_starts(case: Case, tmp_path: Path) -> None:
    job = case.job(tmp_path, "true")
    (tmp_path / "in").rmdir()
    with pytest.raises(ToolError, match=r"in does not exist; it is what the tool would see as /in/model"):
        case.runner().run(job)
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize("link", ["../blobs/weights", "/somewhere/weights"])
def test_run_refuses_links_that_would_be_broken_inside(case: Case, tmp_path: Path, link: str) -> None:
    job = case.job(tmp_path, "true")
    (tmp_path / "in" / "model.safetensors").symlink_to(link)
    with pytest.raises(ToolError, match="has links that lead out of it") as caught:
        case.runner().run(job)
    assert f"model.safetensors → {link}" in caught.value.message


def test_repro_script_does_the_same_again(case: Case, tmp_path: Path) -> None:
    job = case.job(tmp_path, "cp", "/in/model/file", "/out/copy")
    (tmp_path / "in" / "file").write_text("content")
    case.runner().run(job, log_path=tmp_path / "log" / "stage.log")
    (tmp_path / "out" / "copy").unlink()
    subprocess.run([tmp_path / "log" / "repro.sh"], check=True, capture_output=True, timeout=60)
    assert (tmp_path / "out" / "copy").read_text() == "content"


def localised(case: Case, folder: Path, script: str) -> str:
    """Paths inside a shell script are nothing that a runner rewrites."""
    return script.replace("/out", str(folder / "out")) if case.name == "local" else script


def processes() -> str:
    """Return the command lines of all processes."""
    return subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout


def started_elsewhere(case: Case, folder: Path) -> subprocess.Popen[str]:
    """Run a job from a Python of its own; return when its program is at work."""
    job = case.job(folder, "sh", "-c", localised(case, folder, WAITS))
    log = folder / "stage.log"
    (folder / "work.pickle").write_bytes(pickle.dumps((case, replace(job, env=dict(job.env)), log)))
    code = "import pickle, sys; case, job, log = pickle.load(open(sys.argv[1], 'rb')); "
    code += "case.runner().run(job, log_path=log)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder / "work.pickle"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    until(lambda: log.exists() and "at work" in log.read_text().splitlines())
    return process
