"""The support page for people: what works on which GPU at which precision, written from the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.toolchains.job import SMOOTHQUANT, SourceQuantization, ToolJob, family_names, find_family
from pipeline.toolchains.release import Release, data, load_release, release_versions
from pipeline.toolchains.routes import algorithm_of, choose_route
from pipeline.toolchains.support import algorithm_support, is_ticked, kv_cache_support

_MARKS = {"yes": "yes", "no": "–", "unverified": "?"}
_PRECISIONS: Sequence[tuple[str, str]] = (
    ("fp16, bf16", "fp16"),
    ("int8", "int8"),
    ("int4", "int4"),
    ("smoothquant", f"smoothquant:{SMOOTHQUANT[True, True]}"),
    ("fp8", "fp8"),
    ("fp8_rowwise", "fp8_rowwise"),
    ("int4_awq", "int4_awq"),
    ("w4a8_awq", "w4a8_awq"),
    ("nvfp4", "nvfp4"),
    ("from_checkpoint: GPTQ, AWQ", "from_checkpoint:gptq4"),
    ("from_checkpoint: FP8", "from_checkpoint:fp8"),
)


def support_document() -> str:
    """Return the whole page as Markdown."""
    release = load_release(data("index")["default"])
    parts = (
        "# What works where\n",
        "Generated from `pipeline/toolchains/data`; `python -m pipeline plan` gives the answer for one job.\n",
        "## Precision by GPU (engines)\n",
        "yes: documented or permitted by the builder; –: refused or documented as unsupported; ?: nothing found, a "
        "warning in the plan.\n",
        gpu_table(),
        "\nWith an INT8 cache, or an FP8 cache beside weights that are not FP8, W4A8 or NVFP4, the builder turns paged "
        "context attention off: no cache reuse, no chunked context. So does an FP8 cache on Ampere.\n",
        f"## Precision by model family (release {release.version})\n",
        "convert: `convert_checkpoint.py` of the family; quantize: `quantize.py`; –: neither, or never for engines. "
        "In brackets: the tool takes it, upstream's own matrix does not tick it; the plan warns.\n",
        family_table(release),
        "\n## Releases\n",
        release_table(),
    )
    return "\n".join(parts)


def gpu_table() -> str:
    """Return precision × GPU generation as a Markdown table; the one in the README."""
    support = data("support")
    classes = list(support["gpus"])
    header = [f"{support['gpu_names'][c]} (SM {', '.join(map(str, support['gpus'][c]))})" for c in classes]
    first = [support["gpus"][c][0] for c in classes]
    answers = {name: [algorithm_support(algorithm_of(recipe), sm) for sm in first] for name, recipe in _PRECISIONS}
    rows = [[f"`{name}`", *(_MARKS[answer] for answer in row)] for name, row in answers.items()]
    rows += [[f"KV cache `{kv}`", *(_MARKS[kv_cache_support(kv, sm)] for sm in first)] for kv in ("int8", "fp8")]
    return _table(["precision", *header], rows)


def family_table(release: Release) -> str:
    """Return model family × precision for one release as a Markdown table."""
    rows = []
    for name in family_names():
        cells = [_cell(name, recipe, release) for _, recipe in _PRECISIONS]
        if any(cell != "–" for cell in cells):
            rows.append([f"`{name}`", *cells])
    return _table(["family", *(f"`{label}`" for label, _ in _PRECISIONS)], rows)


def release_table() -> str:
    """Return what each release brings as a Markdown table."""
    rows = []
    for version in release_versions():
        release = load_release(version)
        versions, driver = release.document["versions"], release.document["driver"]
        tables = ", ".join(f"`{tool}`" for tool in release.document["tables"]) or "none"
        rows.append(
            [
                f"`{release.name}`",
                ", ".join(release.targets),
                versions["cuda"] or "?",
                versions["tensorrt"] or "?",
                f"{driver['branch']} ({driver['floor']})" if driver["floor"] else "?",
                release.serve_image.rpartition(":")[2] or "?",
                tables,
            ]
        )
    return _table(["toolchain", "targets", "CUDA", "TensorRT", "driver listed", "Triton image", "flag tables"], rows)


def _cell(family_name: str, recipe: str, release: Release) -> str:
    precision, _, detail = recipe.partition(":")
    source = SourceQuantization("gptq" if detail == "gptq4" else "fp8") if precision == "from_checkpoint" else None
    family = find_family(family_name)
    job = ToolJob(family=family_name, precision=precision, source=source)
    route = choose_route(job, family, release)[0] if family else None
    if family is None or route is None:
        return "–"
    only = data("support")["algorithms"][route.algorithm].get("families")
    if only and family.name not in only:
        return "–"
    word = route.tool.partition("/")[0]
    return word if is_ticked(family, route.algorithm, "float16") else f"({word})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
