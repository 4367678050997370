"""The page at ``/``: what is served, how busy it is, which Triton servers answer."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence

from pipeline.frontend.backend_pool import Member
from pipeline.frontend.service import Service

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%;margin-bottom:1.5rem}td,th{text-align:left;padding:.3rem .6rem;
border-bottom:1px solid #ddd;vertical-align:top}th{width:14rem;font-weight:600}.ok{color:#176b2c}.bad{color:#a11}
@media (prefers-color-scheme:dark){body{background:#161616;color:#ddd}td,th{border-color:#444}.ok{color:#6c6}
.bad{color:#f77}}"""


def status_page(service: Service, version: str, members: Sequence[Member]) -> str:
    """Return the page; it needs no other file."""
    settings = service.settings
    served = [
        ("Model", settings.name),
        ("Other names", ", ".join([*settings.aliases, *settings.lora]) or "none"),
        ("Target", settings.target or "not stated"),
        ("Context length", str(settings.max_seq_len or "as the model says")),
        ("Chat template", "yes" if service.templates else "none, chat is refused"),
        ("Tool calls", settings.tool_parser),
        ("Version", version),
        ("Since", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(service.created))),
    ]
    load = [
        ("Sequences in flight", str(int(service.metrics.value("frontend_in_flight_sequences")))),
        ("Waiting", str(service.admission.waiting)),
        ("Prompt tokens", str(int(service.metrics.value("frontend_prompt_tokens_total")))),
        ("Completion tokens", str(int(service.metrics.value("frontend_completion_tokens_total")))),
    ]
    servers = "".join(
        f"<tr><th>{html.escape(member.name)}</th><td class={'ok' if member.healthy else 'bad'}>"
        f"{'ready' if member.healthy else 'away'}</td><td>{member.running} running</td></tr>"
        for member in members
    )
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{html.escape(settings.name)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(settings.name)}</h1><table id=served>{_rows(served)}</table><h2>Load</h2>"
        f"<table id=load>{_rows(load)}</table><h2>Triton servers</h2><table id=servers>{servers}</table>"
        "<p><a href='docs'>API description</a> · <a href='metrics'>metrics</a> · <a href='v1/models'>models</a></p>"
        "</body></html>"
    )


def _rows(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in pairs)
