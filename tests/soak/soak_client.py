"""A raw HTTP client that costs little, so that the server is what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any


def resident_kib(pid: int) -> int:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def encoded(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """Return the bytes of a POST."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Wire:
    """One connection that is used for one request after another."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def open(self) -> Wire:
        """Connect."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return status and body."""
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line)
        if b"content-length" in fields:
            return status, await self.reader.readexactly(int(fields[b"content-length"]))
        parts = []
        while size := int((await self.reader.readline()) or b"0", 16):
            parts.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return status, b"".join(parts)

    async def close(self) -> None:
        """Leave."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
