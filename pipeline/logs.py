"""Redaction of secrets, and the log file of a stage.

Whatever leaves the program as text (log records, output of started programs, manifests, reports) goes through
:func:`redact` first. A secret is known because it was registered, because an environment variable with a telling name
holds it, or because it looks like one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

MASK = "***"

# Shorter values ("1", "true", "default") would blank out ordinary words.
MIN_SECRET_CHARS = 8

_SECRET_NAMES = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")
_LOOKS_SECRET = re.compile(
    r"""
      \b(?:nvapi-|sk-|ghp_|github_pat_|glpat-)[\w-]{16,}
    | (?P<scheme>\bbearer\s+)[\w.~+/=-]{8,}
    | (?P<header>\bauthorization["']?\s*[:=]\s*["']?(?:basic\s+)?)[\w.~+/=-]{8,}
    | (?P<user>://[^/\s:@"']+:)[^/\s@"']+(?=@)
    """,
    re.VERBOSE | re.IGNORECASE,
)
# A capital or a digit is wanted (case counts here): identifiers such as hf_transfer are no secrets.
_HUGGING_FACE = re.compile(r"\bhf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{10,}")

_registered: frozenset[str] = frozenset()
_register_lock = threading.Lock()


def register_secret(value: str) -> None:
    """Remember a secret so that :func:`redact` removes it everywhere.

    Values shorter than :data:`MIN_SECRET_CHARS` are ignored: masking them would destroy ordinary text.
    """
    global _registered
    value = value.strip()
    if len(value) >= MIN_SECRET_CHARS:
        with _register_lock:
            _registered |= {value}


def redact(text: str, env: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with every known or likely secret replaced by ``***``.

    Args:
        text: Anything that is about to be written or shown.
        env: Environment to take secrets from, besides the registered ones; default ``os.environ``.
    """
    secrets = _registered | _secrets_of(os.environ if env is None else env)
    if secrets:
        text = _pattern(secrets).sub(MASK, text)
    text = _HUGGING_FACE.sub(MASK, text)
    return _LOOKS_SECRET.sub(_mask_match, text)


def has_secret(text: str) -> bool:
    """Tell whether ``text`` holds a registered secret or something shaped like one."""
    return redact(text, env={}) != text


def _secrets_of(env: Mapping[str, str]) -> frozenset[str]:
    return frozenset(
        value.strip()
        for name, value in env.items()
        if name.upper().endswith(_SECRET_NAMES) and len(value.strip()) >= MIN_SECRET_CHARS
    )


@lru_cache(maxsize=16)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    # The same secret may appear inside a URL or a JSON string.
    forms = {form for s in secrets for form in (s, quote(s, safe=""), json.dumps(s)[1:-1])}
    return re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))


def _mask_match(match: re.Match[str]) -> str:
    return (match["scheme"] or match["header"] or match["user"] or "") + MASK


class RedactingFilter(logging.Filter):
    """Redact a record in place: message, arguments and traceback. Belongs on every handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the record; never drops it."""
        record.msg, record.args = redact(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        return True


class _UtcFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class _StageFileHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Raise inside the caller, who then fails for the reason it is (disk full); the default prints and goes on."""
        raise


@contextmanager
def stage_logger(name: str, path: Path) -> Iterator[logging.Logger]:
    """Open the log file of one stage and yield a logger that writes to it.

    The file is opened for appending, so that started programs can write to it as well. While it is open, records of
    the package's module loggers land in it too.

    Raises:
        OSError: The file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _StageFileHandler(path, encoding="utf-8")
    handler.setFormatter(_UtcFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(RedactingFilter())
    # Not from logging.getLogger: a run leaves nothing behind in the process-wide registry.
    logger = logging.Logger(name, logging.DEBUG)
    logger.addHandler(handler)
    package = logging.getLogger("pipeline")
    package.addHandler(handler)
    try:
        yield logger
    finally:
        package.removeHandler(handler)
        # What a full disk did not take was reported when it was written.
        with suppress(OSError):
            handler.close()
