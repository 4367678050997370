"""API keys: where they come from and how a request is checked."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from starlette.types import Scope

from pipeline.errors import SourceError
from pipeline.frontend.api_errors import unauthorized


class ApiKeys:
    """The keys that open this server; without any, it is open.

    Only digests are kept. A changed key file is read again with the next request.
    """

    def __init__(self, file: Path | None = None, variable: str = "") -> None:
        """Read the keys.

        Args:
            file: One key per line, ``#`` starts a comment.
            variable: Environment variable with comma-separated keys.

        Raises:
            SourceError: The file cannot be read, or no key was found where keys were asked for.
        """
        self._file = file
        self._variable = variable
        self._stamp: tuple[int, int] | None = None
        self._digests: tuple[bytes, ...] = ()
        self._reload()
        if self.required and not self._digests:
            raise SourceError("API keys are asked for, but none was found.", hint="Put one key per line into the file.")

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return self._file is not None or bool(self._variable)

    def check(self, scope: Scope) -> None:
        """Let a request in.

        Raises:
            ApiError: 401, no key or a wrong one.
        """
        if not self.required:
            return
        self._reload()
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise unauthorized("You didn't provide an API key; send it as 'Authorization: Bearer KEY'.")
        digest = hashlib.sha256(key.strip()).digest()
        # All keys are compared, each in constant time, so the time says nothing about which one nearly matched.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise unauthorized("Incorrect API key provided.")

    def _reload(self) -> None:
        keys = os.environ.get(self._variable, "").split(",") if self._variable else []
        if self._file is not None:
            try:
                status = self._file.stat()
                stamp = (status.st_mtime_ns, status.st_size)
                if stamp == self._stamp:
                    return
                lines = self._file.read_text("utf-8").splitlines()
            except OSError as error:
                if self._digests:
                    return  # a file that is being replaced; the old keys hold
                raise SourceError(f"Cannot read the API keys from {self._file}: {error.strerror}.") from error
            self._stamp = stamp
            keys += [line.partition("#")[0] for line in lines]
        self._digests = tuple(hashlib.sha256(key.strip().encode()).digest() for key in keys if key.strip())
