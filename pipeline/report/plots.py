"""Small charts as inline SVG. Colours come from the page's CSS variables, so light and dark need one drawing.

Built as an element tree: text is escaped by the serializer, whatever it contains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

# The wide size fills the page, the small one a third of it: words come out equally large in both.
WIDE, SMALL = (1000, 260), (330, 270)
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 40


class Chart:
    """A plot area with linear axes: data in, elements out."""

    def __init__(
        self,
        title: str,
        description: str,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        size: tuple[int, int] = WIDE,
    ) -> None:
        width, height = self.width, self.height = size
        self._x, self._y = _wide(x_range), _wide(y_range)
        self.root = ElementTree.Element(
            "svg", {"viewBox": f"0 0 {width} {height}", "role": "img", "class": "chart", "aria-label": title}
        )
        ElementTree.SubElement(self.root, "title").text = title
        ElementTree.SubElement(self.root, "desc").text = description

    def x(self, value: float) -> float:
        """Map a data value to a horizontal position."""
        low, high = self._x
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Map a data value to a vertical position."""
        low, high = self._y
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)

    def add(self, tag: str, css: str, **attributes: float | str) -> ElementTree.Element:
        """Append an element; numbers are rounded to a tenth of a pixel."""
        values = {
            key.replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else str(value)
            for key, value in attributes.items()
        }
        return ElementTree.SubElement(self.root, tag, {"class": css, **values})

    def text(self, x: float, y: float, content: str, css: str = "tick", anchor: str = "middle") -> None:
        """Write a word."""
        self.add("text", css, x=x, y=y, text_anchor=anchor).text = content

    def axes(self, x_label: str, y_label: str, *, x_ticks: Sequence[tuple[float, str]] | None = None) -> None:
        """Draw grid, ticks and labels."""
        bottom = float(self.height - _BOTTOM)
        for value in ticks(*self._y):
            self.add("line", "grid", x1=float(_LEFT), x2=float(self.width - _RIGHT), y1=self.y(value), y2=self.y(value))
            self.text(_LEFT - 8, self.y(value) + 4, label(value), anchor="end")
        for value, word in x_ticks if x_ticks is not None else [(v, label(v)) for v in ticks(*self._x)]:
            self.add("line", "axis", x1=self.x(value), x2=self.x(value), y1=bottom, y2=bottom + 4)
            self.text(self.x(value), bottom + 16, word)
        self.add("line", "axis", x1=float(_LEFT), x2=float(self.width - _RIGHT), y1=bottom, y2=bottom)
        self.text((_LEFT + self.width - _RIGHT) / 2, self.height - 6, x_label, "label")
        middle = (_TOP + bottom) / 2
        element = self.add("text", "label", text_anchor="middle", transform=f"translate(14 {middle:.0f}) rotate(-90)")
        element.text = y_label

    def markup(self) -> Markup:
        """Return the finished drawing."""
        return Markup(ElementTree.tostring(self.root, encoding="unicode"))


def _wide(bounds: tuple[float, float]) -> tuple[float, float]:
    """Give an empty range some width."""
    low, high = bounds
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round values between ``low`` and ``high``."""
    raw = (high - low) / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """Write a number short."""
    if value == 0:
        return "0"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if abs(value) < 1e-3 else f"{value:g}"


def block_differences(text: Mapping[str, Any], limit: float | None) -> Markup:
    """Bars: mean log-probability lost per block, with the limit for scale.

    Args:
        text: The ``text`` section of gate.json.
        limit: Perplexity ratio allowed; its logarithm is a line in this plot.
    """
    values: list[float] = text["block_differences"]
    allowed = math.log(limit) if limit else 0.0
    reach = max(max((abs(value) for value in values), default=0.0), allowed) * 1.15 or 1e-6
    mean = sum(values) / max(len(values), 1)
    chart = Chart(
        "Log-probability lost per block of text",
        f"{len(values)} blocks of {text['block_tokens']} tokens; mean {mean:.4g} nats per token, limit {allowed:.4g}.",
        (0, len(values)),
        (-reach, reach),
    )
    chart.axes(f"block of {text['block_tokens']} tokens", "nats per token (up is worse)")
    width = (chart.x(1) - chart.x(0)) * 0.72
    for index, value in enumerate(values):
        top, bottom = chart.y(max(value, 0)), chart.y(min(value, 0))
        css = "bar worse" if value > 0 else "bar better"
        chart.add("rect", css, x=chart.x(index + 0.14), width=width, y=top, height=max(bottom - top, 0.8))
    end = float(chart.width - _RIGHT)
    chart.add("line", "zero", x1=float(_LEFT), x2=end, y1=chart.y(0), y2=chart.y(0))
    if limit:
        chart.add("line", "limit", x1=float(_LEFT), x2=end, y1=chart.y(allowed), y2=chart.y(allowed))
        chart.text(end, chart.y(allowed) - 5, f"limit {limit:g}×", "mark", "end")
    return chart.markup()


def logprob_scatter(text: Mapping[str, Any]) -> Markup:
    """Dots: log probability of the same token, baseline against candidate."""
    pairs: list[list[float]] = text["logprob_pairs"]
    low = min((min(pair) for pair in pairs), default=-1.0)
    chart = Chart(
        "Log probability of the same tokens",
        f"{len(pairs)} tokens; on the diagonal both models agree.",
        (low, 0),
        (low, 0),
        SMALL,
    )
    chart.axes("baseline, nats", "candidate, nats")
    chart.add("line", "zero", x1=chart.x(low), y1=chart.y(low), x2=chart.x(0), y2=chart.y(0))
    for before, after in pairs:
        chart.add("circle", "dot", cx=chart.x(before), cy=chart.y(after), r=1.8)
    return chart.markup()


def histogram(
    title: str, x_label: str, edges: Sequence[float], counts: Sequence[int], *, powers_of_ten: bool = False
) -> Markup:
    """Bars over bins; ``powers_of_ten`` when the edges are exponents."""
    used = [index for index, count in enumerate(counts) if count]
    if powers_of_ten and used:  # leave out empty decades at both ends
        first, last = max(used[0] - 1, 0), min(used[-1] + 2, len(counts))
        edges, counts = edges[first : last + 1], counts[first:last]
    chart = Chart(
        title,
        f"{sum(counts)} values in {len(counts)} bins from {edges[0]:.3g} to {edges[-1]:.3g}.",
        (edges[0], edges[-1]),
        (0, max(counts) * 1.08),
        SMALL,
    )
    exponents = range(math.ceil(edges[0]), math.floor(edges[-1]) + 1) if powers_of_ten else None
    chart.axes(x_label, "tokens", x_ticks=None if exponents is None else [(e, _power(e)) for e in exponents])
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            top = chart.y(count)
            height = chart.y(0) - top
            chart.add(
                "rect", "bar", x=chart.x(left) + 0.5, width=chart.x(right) - chart.x(left) - 1, y=top, height=height
            )
    return chart.markup()


def _power(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def interval_strip(measure: Mapping[str, Any]) -> Markup:
    """One row: the confidence interval against its limit, allowed side tinted."""
    low, high = measure["interval"] or (measure["value"], measure["value"])
    numbers = (measure["value"], measure["limit"], low, high)
    if any(number is None for number in numbers):
        return Markup("")
    value, limit, low, high = (float(number) for number in numbers)
    points = (value, low, high, limit)
    pad = (max(points) - min(points)) * 0.25 or abs(limit) * 0.1 or 0.1
    start, end = min(points) - pad, max(points) + pad
    width, height = 220, 26

    def x(position: float) -> float:
        return (position - start) / (end - start) * width

    root = ElementTree.Element("svg", {"viewBox": f"0 0 {width} {height}", "role": "img", "class": "strip"})
    words = f"{value:.4g}, interval {low:.4g} to {high:.4g}, limit {measure['limit_is']} {limit:g}"
    ElementTree.SubElement(root, "title").text = words
    at_most = measure["limit_is"] == "at most"
    rows: list[tuple[str, str, dict[str, float]]] = [
        (
            "rect",
            "allowed",
            {"x": 0 if at_most else x(limit), "width": x(limit) if at_most else width - x(limit), "y": 3, "height": 20},
        ),
        ("line", "limit", {"x1": x(limit), "x2": x(limit), "y1": 1, "y2": 25}),
        ("line", f"whisker {measure['status']}", {"x1": x(low), "x2": x(high), "y1": 13, "y2": 13}),
        ("circle", f"point {measure['status']}", {"cx": x(value), "cy": 13, "r": 4}),
    ]
    for tag, css, places in rows:
        ElementTree.SubElement(root, tag, {"class": css, **{key: f"{number:.1f}" for key, number in places.items()}})
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def task_bars(tasks: Sequence[Mapping[str, Any]]) -> Markup:
    """Pairs of bars: accuracy of baseline and candidate per task, guessing as a line."""
    chart = Chart(
        "Multiple-choice accuracy, length-normalized",
        "; ".join(
            f"{task['name']}: baseline {task['baseline']['acc_norm']:.0%}, "
            f"candidate {task['candidate']['acc_norm']:.0%}, guessing {task['chance']:.0%}"
            for task in tasks
        ),
        (0, len(tasks)),
        (0, 1),
    )
    chart.axes("task", "share right", x_ticks=[(index + 0.5, task["name"]) for index, task in enumerate(tasks)])
    unit = chart.x(1) - chart.x(0)
    for index, task in enumerate(tasks):
        for offset, side, css in ((0.22, "baseline", "bar muted"), (0.51, "candidate", "bar")):
            share = task[side]["acc_norm"]
            left, wide = chart.x(index + offset), unit * 0.27
            chart.add("rect", css, x=left, width=wide, y=chart.y(share), height=chart.y(0) - chart.y(share))
            chart.text(left + wide / 2, chart.y(share) - 5, f"{share:.0%}", "mark")
        left, right = chart.x(index + 0.16), chart.x(index + 0.84)
        chart.add("line", "limit", x1=left, x2=right, y1=chart.y(task["chance"]), y2=chart.y(task["chance"]))
    return chart.markup()
