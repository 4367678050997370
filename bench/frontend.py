"""What the frontend costs: tokens/s, CPU per token and time to first token against a raw gRPC client.

    python bench/frontend.py [--seconds 4] [--rounds 3] [--tokens 32] [--concurrency 1 16 64] [--idle 1000]

A token-echo model runs behind a real tritonserver. Slices of both paths alternate in one run, so that a noisy machine
hits both alike; only ratios and CPU per token say something. The raw client is tritonclient.grpc.aio with one stream a
request, in this process; the frontend's client is a bare socket reader, so that what is measured is the frontend.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "triton"))

from echo_repository import write_model  # noqa: E402

from pipeline.triton.install import ensure_tritonserver  # noqa: E402
from pipeline.triton.server import TritonServer, free_port  # noqa: E402

TOKENIZER = ROOT / "tests" / "data" / "frontend" / "tokenizers" / "byte_level"
PROMPT = [72, 79, 66, 68]
SERVE = (
    "import sys; from pathlib import Path; from pipeline.frontend import FrontendSettings, serve; "
    "sys.exit(serve(FrontendSettings.from_json(Path(sys.argv[1]))))"
)
PACE_S = 0.05
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Tally:
    """Sums over the slices of one path."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


class Reader(asyncio.Protocol):
    """Sends one request after another over one connection and finds the end of each stream."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.done: asyncio.Future[float] | None = None
        self.sent_s = 0.0
        self.first_s = 0.0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.first_s and b"data: " in data:
            self.first_s = time.perf_counter() - self.sent_s
        self.tail = (self.tail + data)[-64:]
        if self.tail.endswith(b"0\r\n\r\n") and self.done is not None and not self.done.done():
            self.done.set_result(self.first_s)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(error or ConnectionError("closed"))

    async def ask(self) -> float:
        self.done = asyncio.get_running_loop().create_future()
        self.first_s, self.tail, self.sent_s = 0.0, b"", time.perf_counter()
        self.transport.write(self.request)  # type: ignore[attr-defined]
        return await self.done


def http_request(port: int, tokens: int) -> bytes:
    body = json.dumps({"model": "echo", "prompt": PROMPT, "max_tokens": tokens, "stream": True, "temperature": 0})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def through_frontend(
    port: int, concurrency: int, seconds: float, tokens: int, tally: Tally, *, apart_s: float = 0.0
) -> None:
    loop = asyncio.get_running_loop()
    readers = []
    for _ in range(concurrency):
        _, reader = await loop.create_connection(lambda: Reader(http_request(port, tokens)), "127.0.0.1", port)
        readers.append(reader)
    start = time.perf_counter()
    made = 0

    async def go(number: int, reader: Reader) -> None:
        nonlocal made
        await asyncio.sleep(number * apart_s)
        while time.perf_counter() - start < seconds:
            tally.first_s.append(await reader.ask())
            made += tokens

    await asyncio.gather(*(go(number, reader) for number, reader in enumerate(readers)))
    note(tally, made, time.perf_counter() - start)
    for reader in readers:
        reader.transport.close()


async def raw(
    address: str,
    concurrency: int,
    seconds: float,
    tokens: int,
    tally: Tally,
    *,
    model: str = "tensorrt_llm",
    apart_s: float = 0.0,
) -> None:
    from tritonclient.grpc import InferInput
    from tritonclient.grpc.aio import InferenceServerClient

    def tensor(name: str, kind: str, array: Any) -> InferInput:
        item = InferInput(name, list(array.shape), kind)
        item.set_data_from_numpy(array)
        return item

    def inputs() -> list[InferInput]:
        return [
            tensor("input_ids", "INT32", np.array([PROMPT], np.int32)),
            tensor("input_lengths", "INT32", np.array([[len(PROMPT)]], np.int32)),
            tensor("request_output_len", "INT32", np.array([[tokens]], np.int32)),
            tensor("streaming", "BOOL", np.array([[True]])),
            tensor("runtime_top_k", "INT32", np.array([[1]], np.int32)),
        ]

    start = time.perf_counter()
    made = 0
    async with InferenceServerClient(address) as client:

        async def go(number: int) -> None:
            nonlocal made
            count = 0
            await asyncio.sleep(number * apart_s)
            while time.perf_counter() - start < seconds:
                count += 1
                sent = time.perf_counter()
                seen = 0

                async def one() -> Any:
                    yield {"model_name": model, "inputs": inputs(), "request_id": f"b{number}-{count}"}  # noqa: B023

                async for result, error in client.stream_infer(one()):
                    if error is not None:
                        raise error
                    if not seen:
                        tally.first_s.append(time.perf_counter() - sent)
                    seen += result.as_numpy("output_ids").size
                made += seen

        await asyncio.gather(*(go(number) for number in range(concurrency)))
    note(tally, made, time.perf_counter() - start)


def note(tally: Tally, tokens: int, seconds: float) -> None:
    tally.tokens += tokens
    tally.seconds += seconds
    tally.rates.append(tokens / seconds)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000


def compare(arguments: argparse.Namespace, triton: TritonServer, port: int, pid: int) -> list[dict[str, Any]]:
    found = []
    for concurrency in arguments.concurrency:
        ours, theirs = Tally(), Tally()
        asyncio.run(through_frontend(port, concurrency, 1.0, arguments.tokens, Tally()))
        for _ in range(arguments.rounds):
            asyncio.run(raw(triton.grpc_url, concurrency, arguments.seconds, arguments.tokens, theirs))
            before = cpu_seconds(pid)
            asyncio.run(through_frontend(port, concurrency, arguments.seconds, arguments.tokens, ours))
            ours.cpu_s += cpu_seconds(pid) - before
        ratios = [mine / other for mine, other in zip(ours.rates, theirs.rates, strict=True)]
        found.append(
            {
                "concurrency": concurrency,
                "frontend_tokens_per_s": round(ours.tokens / ours.seconds),
                "raw_tokens_per_s": round(theirs.tokens / theirs.seconds),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "cpu_us_per_token": round(ours.cpu_s / ours.tokens * 1e6),
                "raw_ttft_p50_ms": round(percentile(theirs.first_s, 0.5), 2),
                "raw_ttft_p99_ms": round(percentile(theirs.first_s, 0.99), 2),
                "added_ttft_p50_ms": round(percentile(ours.first_s, 0.5) - percentile(theirs.first_s, 0.5), 2),
                "added_ttft_p99_ms": round(percentile(ours.first_s, 0.99) - percentile(theirs.first_s, 0.99), 2),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def compare_first_tokens(arguments: argparse.Namespace, triton: TritonServer, port: int) -> dict[str, Any]:
    """Time to the first token while 64 streams run at a model's pace, begun one after another as people do."""
    ours, theirs = Tally(), Tally()
    apart_s = arguments.tokens * PACE_S / 64
    for _ in range(arguments.rounds):
        seconds = arguments.tokens * PACE_S * 3
        asyncio.run(raw(triton.grpc_url, 64, seconds, arguments.tokens, theirs, model="paced", apart_s=apart_s))
        asyncio.run(through_frontend(port, 64, seconds, arguments.tokens, ours, apart_s=apart_s))
    found: dict[str, Any] = {"paced_streams": 64, "pace_ms": PACE_S * 1000, "first_tokens": len(ours.first_s)}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        there, here = percentile(theirs.first_s, share), percentile(ours.first_s, share)
        found |= {f"raw_ttft_{name}_ms": round(there, 2), f"added_ttft_{name}_ms": round(here - there, 2)}
    print(json.dumps(found), flush=True)
    return found


async def hold_streams(port: int, count: int, pid: int) -> dict[str, Any]:
    """Open many streams on the slow model and see what each costs in memory."""
    loop = asyncio.get_running_loop()
    before = resident_kib(pid)
    readers: list[Reader] = []
    for _ in range(count):
        _, reader = await loop.create_connection(lambda: Reader(http_request(port, 20)), "127.0.0.1", port)
        readers.append(reader)
    asked = [asyncio.ensure_future(reader.ask()) for reader in readers]
    peak = before
    while not all(task.done() for task in asked):
        await asyncio.sleep(0.5)
        peak = max(peak, resident_kib(pid))
    failed = sum(task.exception() is not None for task in asked)
    for reader in readers:
        reader.transport.close()
    result = {"streams": count, "failed": failed, "kib_per_stream": round((peak - before) / count, 1)}
    print(json.dumps(result), flush=True)
    return result


def start_frontend(folder: Path, address: str, model: str) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    settings = {"tokenizer": str(TOKENIZER), "served_model": "echo", "port": port, "triton": [address], "model": model}
    path = folder / f"{model}.json"
    path.write_text(json.dumps({**settings, "log_format": "none", "max_seq_len": 8192}))
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(path)])
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5).close()
            return process, port
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit("the frontend did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--idle", type=int, default=0, help="streams to hold at the same time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "models", "tensorrt_llm")
        write_model(folder / "models", "slow", delay_ms="500")
        write_model(folder / "models", "paced", delay_ms=str(PACE_S * 1000))
        with TritonServer(folder / "models", ensure_tritonserver(), log_path=folder / "triton.log") as triton:
            triton.wait_ready()
            process, port = start_frontend(folder, triton.grpc_url, "tensorrt_llm")
            try:
                result: dict[str, Any] = {"compared": compare(arguments, triton, port, process.pid)}
            finally:
                process.terminate()
                process.wait(30)
            process, port = start_frontend(folder, triton.grpc_url, "paced")
            try:
                result["first_tokens"] = compare_first_tokens(arguments, triton, port)
            finally:
                process.terminate()
                process.wait(30)
            if arguments.idle:
                process, port = start_frontend(folder, triton.grpc_url, "slow")
                try:
                    result["held"] = asyncio.run(hold_streams(port, arguments.idle, process.pid))
                finally:
                    process.terminate()
                    process.wait(30)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
