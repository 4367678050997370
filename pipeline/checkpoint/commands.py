"""The verb ``checkpoint``: ``convert``, ``inspect``, ``diff``, ``verify``. No numpy until one runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.options import DTYPES, EMBEDDING_SHARDINGS, KV_CACHES, QUANTIZATIONS, ConvertOptions
from pipeline.errors import ConfigError, Finding, SourceError

Progress = Callable[[float, "float | None", str], None]
# Converts with calibration: (options of the command line, conversion, progress) -> values of the report. Measuring
# needs an engine, which lies above this package, so whoever calls hands it in.
Calibrate = Callable[[argparse.Namespace, ConvertOptions, "Progress | None"], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CommandReport:
    """Outcome of a command, for people and for ``--json``.

    Attributes:
        command: ``convert``, ``inspect``, ``diff`` or ``verify``.
        values: JSON values, one section per key.
        findings: Problems; one of severity error means exit code 3.
    """

    command: str
    values: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands and their options to a parser. The chosen one is in ``args.command``."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="convert|inspect|diff|verify")
    convert = commands.add_parser("convert", help="write a TensorRT-LLM checkpoint from a model folder or a .gguf file")
    convert.add_argument("source", type=Path, metavar="SRC", help="model folder, or .gguf file")
    convert.add_argument("out", type=Path, metavar="OUT", help="folder for config.json and rank*.safetensors")
    convert.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: the source's)")
    convert.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallel size (default: 1)")
    convert.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline parallel size (default: 1)")
    convert.add_argument(
        "--embedding-sharding",
        choices=EMBEDDING_SHARDINGS,
        default="none",
        help="split the embedding over the ranks by rows (vocab) or columns (hidden)",
    )
    convert.add_argument(
        "--quant", choices=QUANTIZATIONS, help="quantize the linear layers; FP8 sources are recognised"
    )
    convert.add_argument(
        "--alpha",
        type=_alpha,
        metavar="A",
        help="strength of smoothing; auto takes the least loss on the calibration text (default: 0.5, int8_sq auto)",
    )
    convert.add_argument(
        "--per-channel", action="store_true", help="smoothquant: a scale per output channel of weights"
    )
    convert.add_argument(
        "--per-token", action="store_true", help="smoothquant: activations scaled per token at run time"
    )
    convert.add_argument(
        "--group-size", type=_group_size, metavar="N", help="weights that share a scale, or auto (default: auto)"
    )
    convert.add_argument("--kv-cache", choices=KV_CACHES, help="quantize the KV cache")
    convert.add_argument("--ranges", type=Path, metavar="FILE", help="measured activation ranges (.safetensors)")
    convert.add_argument("--calibration", metavar="TEXT", help=".txt or .jsonl to measure on; 'shipped' for ours")
    convert.add_argument("--calibration-field", default="text", metavar="F", help="field of a .jsonl (default: text)")
    convert.add_argument("--samples", type=int, default=32, metavar="N", help="sequences to measure on (default: 32)")
    convert.add_argument("--seq-len", type=int, default=512, metavar="N", help="tokens of each (default: 512)")
    convert.add_argument("--dequantize", action="store_true", help="turn a quantized source into plain weights")
    convert.add_argument("--source-digest", action="store_true", help="also report the sha256 of config and weights")
    convert.add_argument("--workers", type=int, metavar="N", help="threads (default: processors, at most 4)")
    inspect = commands.add_parser("inspect", help="check and describe a model or a checkpoint")
    inspect.add_argument("path", type=Path, metavar="PATH")
    inspect.add_argument("--digests", action="store_true", help="also the sha256 of each tensor (reads all weights)")
    diff = commands.add_parser("diff", help="what differs between two checkpoints")
    diff.add_argument("a", type=Path, metavar="A")
    diff.add_argument("b", type=Path, metavar="B")
    verify = commands.add_parser("verify", help="check a finished checkpoint against its config.json")
    verify.add_argument("path", type=Path, metavar="PATH")


def main(
    args: argparse.Namespace, *, progress: Progress | None = None, calibrate: Calibrate | None = None
) -> CommandReport:
    """Run the chosen command.

    Args:
        args: As parsed.
        progress: Called with (done, total, unit).
        calibrate: Converts where ranges have to be measured first.

    Raises:
        PipelineError: The source, the options or the output folder are not usable.
    """
    if args.command == "convert":
        return _convert(args, progress, calibrate)
    command: CommandReport = _COMMANDS[args.command](args, progress)
    return command


def _alpha(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _group_size(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _convert(args: argparse.Namespace, progress: Progress | None, calibrate: Calibrate | None) -> CommandReport:
    from pipeline.checkpoint.convert import convert_checkpoint

    if args.calibration is not None and args.ranges is not None:
        raise ConfigError("--calibration and --ranges exclude each other: one measures, the other was measured")
    options = ConvertOptions(
        dtype=args.dtype,
        tp=args.tp,
        pp=args.pp,
        embedding_sharding=args.embedding_sharding,
        quant=args.quant,
        # modelopt's own default is 1; 0.5 is that of TensorRT-LLM's converter.
        alpha=args.alpha if isinstance(args.alpha, float) else 1.0 if args.quant == "int8_sq" else 0.5,
        per_channel=args.per_channel,
        per_token=args.per_token,
        group_size=args.group_size if isinstance(args.group_size, int) else 128,
        dequantize=args.dequantize,
        kv_cache=args.kv_cache,
        ranges=args.ranges,
        digest_source=args.source_digest,
        workers=args.workers,
    )
    if args.calibration is not None and calibrate is not None:
        return CommandReport("convert", {"out": str(args.out), **calibrate(args, options, progress)})
    report = convert_checkpoint(args.source, args.out, options=options, progress=progress)
    return CommandReport("convert", {"out": str(args.out), **asdict(report)})


def _inspect(args: argparse.Namespace, progress: Progress | None) -> CommandReport:
    from pipeline.checkpoint.description import describe

    return CommandReport("inspect", describe(args.path, digests=args.digests))


def _diff(args: argparse.Namespace, progress: Progress | None) -> CommandReport:
    from pipeline.checkpoint.description import differences

    values = differences(args.a, args.b)
    return CommandReport("diff", values, tuple(_difference_findings(values)))


def _difference_findings(values: Mapping[str, Any]) -> list[Finding]:
    return [
        Finding("checkpoints-differ", "info", entry["where"], f"{entry['what']}: {entry['a']} against {entry['b']}")
        for entry in values["differences"]
    ]


def _verify(args: argparse.Namespace, progress: Progress | None) -> CommandReport:
    from pipeline.checkpoint.verification import verify_checkpoint

    if not args.path.is_dir():
        raise SourceError(f"{args.path}: is no folder; expected a checkpoint")
    findings = tuple(verify_checkpoint(args.path))
    return CommandReport("verify", {"path": str(args.path), "sound": not findings}, findings)


_COMMANDS: Mapping[str, Callable[[argparse.Namespace, Progress | None], CommandReport]] = {
    "inspect": _inspect,
    "diff": _diff,
    "verify": _verify,
}


def render(report: CommandReport) -> Any:
    """Return what rich prints for a report: a table per section."""
    from rich.console import Group
    from rich.table import Table

    tables = []
    plain = Table(title=report.command, show_header=False, title_justify="left")
    for key, value in report.values.items():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            table = Table(*value[0], title=key.replace("_", " "), title_justify="left")
            for row in value:
                table.add_row(*(str(cell) for cell in row.values()))
            tables.append(table)
        elif isinstance(value, Mapping):
            text = "\n".join(f"{name}: {_text(item)}" for name, item in value.items())
            plain.add_row(key.replace("_", " "), text or "none")
        else:
            plain.add_row(key.replace("_", " "), _text(value))
    for finding in report.findings:
        plain.add_row(f"{finding.severity} {finding.rule}", f"{finding.path}: {finding.message}")
    return Group(plain, *tables)


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
