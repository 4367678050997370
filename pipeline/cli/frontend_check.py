"""Verb ``frontend-check``: hold any OpenAI-compatible server against the text contract."""

from __future__ import annotations

import argparse
import os
import urllib.parse
from dataclasses import asdict

from pipeline.cli.output import Output
from pipeline.errors import ExitCode, PreflightError

_STYLES = {"passed": "good", "failed": "error", "skipped": "warning"}


def frontend_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``frontend-check``."""
    parser.add_argument("url", metavar="URL", help="address of the server, http://host:port, with or without /v1")
    parser.add_argument("--model", help="model to ask; default: the first one the server lists")
    parser.add_argument(
        "--api-key-env", metavar="NAME", default="OPENAI_API_KEY", help="variable that holds the key (OPENAI_API_KEY)"
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="length of the answers that are compared (48)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="limit of one request (120)")


def frontend_check(args: argparse.Namespace, output: Output) -> int:
    """Run the checks; exit code 3 when one failed.

    Raises:
        PreflightError: The address is none, or a number is out of range.
    """
    from pipeline.frontend.conformance import check_frontend

    address = urllib.parse.urlsplit(args.url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise PreflightError(
            f"{args.url!r} is no address", hint="python -m pipeline frontend-check http://localhost:8000"
        )
    if args.max_tokens < 4 or args.timeout_s <= 0:
        raise PreflightError("--max-tokens must be at least 4 and --timeout-s above 0")
    checks = check_frontend(
        args.url,
        model=args.model,
        api_key=os.environ.get(args.api_key_env),
        timeout_s=args.timeout_s,
        max_tokens=args.max_tokens,
    )
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in _STYLES}
    for check in checks:
        output.line(f"  {output.paint(f'{check.verdict:<7}', _STYLES[check.verdict])}  {check.name}")
        if check.detail:
            output.line(f"           {check.detail}")
    output.line(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    code = ExitCode.FINDING if counts["failed"] else ExitCode.OK
    output.document({"url": args.url, "exit_code": int(code), "counts": counts, "checks": [asdict(c) for c in checks]})
    return code
