"""Run a real tritonserver on a model repository: start, wait until ready, stop without leaving anything behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from pipeline.errors import ToolError
from pipeline.runners.process import Daemon, describe_exit
from pipeline.triton.install import TritonInstall

HOST = "127.0.0.1"
READY_TIMEOUT_S = 300.0

_POLL_S = 0.05
_LOG_LINES = 400
_QUOTED_LINES = 12
_SHARED_MEMORY = Path("/dev/shm")
_REGION = "trtllm_pipeline_"
_SECRET_ENDINGS = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")

# Log line of the server: level, date and time, process, then for most lines the place in its source.
_LOG_PREFIX = re.compile(r'^[EWI]\d{4} [\d:.]+ \d+ (?:[\w./-]+:\d+\] )?"?')
_PORT_TAKEN = re.compile(r"Socket '[^']*:(\d+)' already in use|[Aa]ddress already in use.*?:(\d+)")
_NOISE = ("NVML", "CUDA", "DCGM", "CudaDriverHelper", "unable to create stream for ensemble")  # there is no GPU
# Of the log's end: the table of options, stack frames, complaints about the missing GPU.
_TELLS_NOTHING = re.compile(r"^\s*(?:[|+].*|\d+# .*)?$|pinned_memory|" + "|".join(_NOISE))
_QUOTED_CHARACTERS = 240
_STUB_DIED = "boost::interprocess::lock_exception"  # the server holds a lock that its model's process never gave back
_ADVICE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"libpython[\d.]+so[\d.]*: cannot open"), "install the libpython package of this Python (make setup)"),
    (re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'"), "install the missing package for the model"),
    (re.compile(r"unable to find backend library for backend '(\w+)'"), "this server lacks that backend"),
    (re.compile(_STUB_DIED), "the log may say more; if it was killed, the machine ran out of memory (see `dmesg`)"),
    (re.compile(r"shared memory|/dev/shm", re.I), "give the server more shared memory (docker: --shm-size=1g)"),
    (re.compile(r"failed to (?:poll from model repository|read text proto)"), "python -m pipeline run emits it again"),
)


def free_port(host: str = HOST) -> int:
    """Return a TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, host: str = HOST) -> bool:
    """Say whether a server could listen on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class TritonServer:
    """One tritonserver process with its python stubs, in a process group of its own, on the loopback interface.

    Args:
        repository: Model repository folder.
        install: From :func:`pipeline.triton.install.ensure_tritonserver`.
        http_port: HTTP and health endpoint. 0 takes a free port; so do the others.
        grpc_port: gRPC endpoint.
        metrics_port: Prometheus endpoint.
        log_path: Everything the server and the models print.
        env: Added to the environment of the server and the models.
        threads: Threads of the reference engine where the repository leaves them open. None lets the engine measure.
        python: Interpreter whose environment the models import from; same X.Y as ours. Default: ours.
        models: Load these only; default all.
    """

    def __init__(
        self,
        repository: Path,
        install: TritonInstall,
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        log_path: Path | None = None,
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        python: Path | None = None,
        models: Sequence[str] = (),
    ) -> None:
        self.repository = repository
        self.http_port, self.grpc_port, self.metrics_port = (
            port or free_port() for port in (http_port, grpc_port, metrics_port)
        )
        self.log_path = log_path
        self._prefix = f"{_REGION}{os.getpid()}_{secrets.token_hex(4)}_"
        self._links = _Links(self._prefix, repository, install.backends)
        self._daemon = Daemon(
            _command(self, install, models),
            env=_environment(install, python or Path(sys.executable), threads, env or {}),
            cwd=install.root,  # the embedded interpreter imports from the working directory first: a neutral one
            log_path=log_path,
            name="tritonserver",
        )

    @property
    def http_url(self) -> str:
        """``http://host:port`` of the HTTP endpoint."""
        return f"http://{HOST}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """``host:port`` of the gRPC endpoint, as tritonclient wants it."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def shared_memory_prefix(self) -> str:
        """Start of the names of this server's regions under /dev/shm."""
        return self._prefix

    def start(self) -> None:
        """Start the process; returns before it is ready.

        Raises:
            ToolError: A port is in use, or the program cannot be started.
        """
        for endpoint, port in self._ports().items():
            if not port_is_free(port):
                raise _port_in_use(port, endpoint)
        remove_stale_regions()
        self._links.make()
        self._daemon.start()

    def wait_ready(self, timeout: float = READY_TIMEOUT_S) -> None:
        """Wait until every model answers.

        Args:
            timeout: Seconds.

        Raises:
            ToolError: The server ended or was not ready in time; says why, with the last log lines.
        """
        deadline = time.monotonic() + timeout
        while not self._is_ready():
            self.check_alive()
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready within {timeout:g} s")
            time.sleep(_POLL_S)

    def poll(self) -> int | None:
        """Return None while the server runs, else its exit code (negative: signal number)."""
        return self._daemon.poll()

    def check_alive(self) -> None:
        """Do nothing while the server runs.

        Raises:
            ToolError: It ended; says why, with the last log lines.
        """
        code = self.poll()
        if code is not None:
            self._daemon.stop(1.0)  # its stubs may be left, and its last lines may be on their way
            self._clean_up()
            raise self._failure(f"ended with {describe_exit(code)}")

    def tail(self, lines: int = 20) -> tuple[str, ...]:
        """Return the last lines of output."""
        return tuple(self._daemon.tail(lines))

    def stop(self, grace_s: float = 10.0) -> int | None:
        """End the server and its stubs (TERM, then KILL) and remove its shared memory. Harmless when not running.

        Returns:
            The exit code, or None if it was never started.
        """
        code = self._daemon.stop(grace_s)
        self._clean_up()
        return code

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _ports(self) -> dict[str, int]:
        return {"HTTP": self.http_port, "gRPC": self.grpc_port, "metrics": self.metrics_port}

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.http_port, timeout=5)  # urllib would ask a proxy
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _failure(self, what: str) -> ToolError:
        lines = self._daemon.tail(_LOG_LINES)
        taken = next((match for line in lines if (match := _PORT_TAKEN.search(line))), None)
        if taken:
            port = int(taken[1] or taken[2])
            return _port_in_use(port, {number: name for name, number in self._ports().items()}.get(port, "a"))
        reasons = failure_reasons(lines)
        where = f" (log: {self.log_path})" if self.log_path else ""
        message = f"tritonserver {what}{where}"
        if reasons:
            message += ": " + reasons[0]
        quoted = "\n".join(f"  | {line}" for line in telling_lines(lines))
        return ToolError(f"{message}\n{quoted}" if quoted else message, hint=_advice(lines))

    def _clean_up(self) -> None:
        self._links.remove()
        if _SHARED_MEMORY.is_dir():
            for region in _SHARED_MEMORY.glob(f"*{self._prefix}*"):
                region.unlink(missing_ok=True)


def remove_stale_regions(folder: Path = _SHARED_MEMORY) -> None:
    """Remove shared memory of servers whose starter was killed before it could do so; others' are left alone."""
    for region in folder.glob(f"{_REGION}*"):
        owner = region.name.removeprefix(_REGION).split("_")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            region.unlink(missing_ok=True)


class _Links:
    """Short, plain names for the folders the server is given.

    The python backend starts its stubs through a shell and quotes nothing, so a path with a blank or a parenthesis
    would end in a stub that never starts, and one with a semicolon in worse.
    """

    def __init__(self, name: str, repository: Path, backends: Path) -> None:
        self._targets = {"models": repository.resolve(), "backends": backends.resolve()}
        self._folder = Path(_plain_temporary_folder(), name.rstrip("_"))
        self.repository, self.backends = (self._folder / link for link in self._targets)

    def make(self) -> None:
        self._folder.mkdir(mode=0o700)
        for link, target in self._targets.items():
            (self._folder / link).symlink_to(target)

    def remove(self) -> None:
        for link in self._targets:
            (self._folder / link).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._folder.rmdir()


def _plain_temporary_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if re.fullmatch(r"[\w./-]+", folder, re.ASCII) else "/tmp"


def telling_lines(lines: Iterable[str]) -> list[str]:
    """Return the last lines of a log that say something, long ones cut short."""
    known = [line for line in lines if not _TELLS_NOTHING.search(line)]
    telling = [line for line in known if not re.match(r"^I\d{4} ", line)] or known
    return [
        line if len(line) <= _QUOTED_CHARACTERS else f"{line[:_QUOTED_CHARACTERS]} ..."
        for line in telling[-_QUOTED_LINES:]
    ]


def failure_reasons(lines: Sequence[str]) -> list[str]:
    """Return what the server's log says went wrong, most telling first, without prefixes and repetition."""
    # A reason with a traceback is logged as one line with escaped line ends; its first part is the reason.
    errors = [
        _LOG_PREFIX.sub("", line).split("\\n\\nAt:")[0].strip().strip('"')
        for line in lines
        if re.match(r"^E\d{4} ", line)
    ]
    exceptions = [line.strip() for line in lines if re.match(r"^\s*[\w.]*(?:Error|Exception): ", line)]
    crashes = [line.strip() for line in lines if line.startswith("terminate called after throwing")]
    if any(_STUB_DIED in line for line in crashes):
        crashes.insert(0, "the python process of a model died (killed, or crashed), and the server with it")
    telling = [text for text in errors if "failed to load" in text or "at least one version" in text]
    ordered = [*crashes, *telling, *exceptions, *errors]
    return list(dict.fromkeys(text for text in ordered if text and not text.startswith(_NOISE)))


def _advice(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return next((advice for pattern, advice in _ADVICE if pattern.search(text)), "")


def _port_in_use(port: int, endpoint: str) -> ToolError:
    return ToolError(
        f"port {port} (Triton's {endpoint} endpoint) is in use on {HOST}",
        hint=f"stop what listens there (ss -ltnp 'sport = :{port}') or choose another port",
    )


def _command(server: TritonServer, install: TritonInstall, models: Sequence[str]) -> list[str]:
    explicit = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)] if models else []
    return [
        str(install.binary),
        f"--model-repository={server._links.repository}",
        f"--backend-directory={server._links.backends}",
        f"--http-address={HOST}",
        f"--http-port={server.http_port}",
        f"--grpc-address={HOST}",
        f"--grpc-port={server.grpc_port}",
        f"--metrics-address={HOST}",
        f"--metrics-port={server.metrics_port}",
        f"--backend-config=python,shm-region-prefix-name={server.shared_memory_prefix}",
        "--allow-gpu-metrics=false",
        "--exit-timeout-secs=5",
        "--disable-auto-complete-config",  # our configs are complete; completing them starts every stub twice
        *explicit,
    ]


def _environment(install: TritonInstall, python: Path, threads: int | None, extra: Mapping[str, str]) -> dict[str, str]:
    # Models need no secret of ours; what they inherit ends up in core dumps and child processes.
    env = {name: value for name, value in os.environ.items() if not name.upper().endswith(_SECRET_ENDINGS)}
    env["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, install.libraries), *_split(env.get("LD_LIBRARY_PATH"))])
    # NOTE: the stub starts its interpreter isolated: it ignores PYTHONPATH and PYTHONHOME, looks for `python3` on PATH
    # and takes standard library and virtual environment from there.
    env["PATH"] = os.pathsep.join([str(python.parent), *_split(env.get("PATH"))])
    env.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"})
    env["TOKENIZERS_PARALLELISM"] = "false"
    # The engine has its own threads; those of the math libraries spin against each other when a machine is busy.
    env.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    if threads is not None:
        env["REFERENCE_ENGINE_THREADS"] = str(threads)
    env.update(extra)
    return env


def _split(value: str | None) -> list[str]:
    return [part for part in (value or "").split(os.pathsep) if part]
