"""One chart as inline SVG: axes, and marks put at values. Colours are classes that the page's style knows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.load.report.markup import NOTHING, Markup, el, joined, number
from kvrelay.load.report.scale import Scale

WIDTH, HEIGHT = 960.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 68.0, 30.0, 14.0, 46.0

Point = tuple[float, float]


def across(low: float, high: float, *, log: bool = False) -> Scale:
    """The x axis of a chart."""
    return Scale(low, high, LEFT, WIDTH - RIGHT, log)


def upwards(low: float, high: float, height: float = HEIGHT) -> Scale:
    """The y axis of a chart."""
    return Scale(low, high, height - BOTTOM, TOP)


@dataclass(frozen=True, slots=True)
class Entry:
    """Of a legend."""

    kind: str
    """A class of the style."""
    name: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What a page shows of one question."""

    name: str
    """Of its element."""
    title: str
    says: str
    """What is drawn, how, and of what."""
    drawn: Markup = NOTHING
    """The SVG; empty: there is nothing to draw."""
    empty: str = ""
    """Why, then."""
    legend: Sequence[Entry] = ()


class Plot:
    """Marks are drawn in the order of the calls; `kind` is a class of the style."""

    def __init__(self, x: Scale, y: Scale, x_label: str, y_label: str, height: float = HEIGHT) -> None:
        self.x, self.y = x, y
        self._height = height
        self._labels = (x_label, y_label)
        self._marks: list[Markup] = []

    def add(self, mark: Markup) -> None:
        """Any element."""
        self._marks.append(mark)

    def line(self, points: Sequence[Point], kind: str) -> None:
        """Straight from point to point."""
        if points:
            self.add(el("path", d="M" + "L".join(self._at(*point) for point in points), class_=f"line {kind}"))

    def area(self, upper: Sequence[Point], lower: Sequence[Point], kind: str) -> None:
        """Between two lines."""
        if upper:
            outline = "L".join(self._at(*point) for point in (*upper, *reversed(lower)))
            self.add(el("path", d=f"M{outline}Z", class_=f"area {kind}"))

    def bar(self, x: tuple[float, float], y: tuple[float, float], kind: str) -> None:
        """A rectangle between values; at least half a pixel wide."""
        left, right = sorted(self.x(value) for value in x)
        top, bottom = sorted(self.y(value) for value in y)
        self.add(rect(left, top, max(0.5, right - left), bottom - top, class_=f"bar {kind}"))

    def level(self, value: float, name: str) -> None:
        """A dashed line across, with its name."""
        y = self.y(value)
        self.add(el("line", x1=self.x.start, x2=self.x.end, y1=y, y2=y, class_="level"))
        self.add(el("text", name, x=self.x.end - 4, y=y - 5, class_="note end"))

    def dot(self, x: float, y: float, name: str, kind: str) -> None:
        """A point with its name to the right, or to the left where there is no room."""
        cx, cy = self.x(x), self.y(y)
        left = cx > self.x.end - 7.0 * len(name) - 12
        self.add(el("circle", cx=cx, cy=cy, r=3.2, class_=f"dot {kind}"))
        if left:
            self.add(el("text", name, x=cx - 7, y=cy - 5, class_="note end"))
        else:
            self.add(el("text", name, x=cx + 7, y=cy + 13, class_="note"))

    def strips(self, tips: Iterable[tuple[float, float, str]]) -> None:
        """(from x, to x, what is there): shown where the pointer is."""
        for low, high, tip in tips:
            left, right = self.x(low), self.x(high)
            top, bottom = self.y.end, self.y.start
            self.add(rect(left, top, max(0.5, right - left), bottom - top, class_="strip", data_tip=tip))

    def drawn(self, name: str, title: str, says: str) -> Markup:
        """The whole chart; title and says are for those who do not see it."""
        ids = f"{name}-title", f"{name}-desc"
        said = joined(el("title", title, id=ids[0]), el("desc", says, id=ids[1]))
        size = f"0 0 {number(WIDTH)} {number(self._height)}"
        return el("svg", said, self._axes(), *self._marks, viewBox=size, role="img", aria_labelledby=" ".join(ids))

    def _at(self, x: float, y: float) -> str:
        return f"{number(self.x(x))} {number(self.y(y))}"

    def _axes(self) -> Markup:
        left, right, bottom, top = (
            self.x.start,
            self.x.end,
            max(self.y.start, self.y.end),
            min(self.y.start, self.y.end),
        )
        parts = []
        for value, name in self.y.ticks(6):
            y = self.y(value)
            parts.append(el("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
            parts.append(el("text", name, x=left - 8, y=y + 4, class_="tick end"))
        for value, name in self.x.ticks(10):
            x = self.x(value)
            parts.append(el("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
            parts.append(el("text", name, x=x, y=bottom + 17, class_="tick middle"))
        x_label, y_label = self._labels
        middle = (top + bottom) / 2
        parts.append(el("text", x_label, x=(left + right) / 2, y=bottom + 38, class_="label middle"))
        turned = f"rotate(-90 14 {number(middle)})"
        parts.append(el("text", y_label, x=14, y=middle, transform=turned, class_="label middle"))
        return joined(*parts)


def rect(x: float, y: float, width: float, height: float, *, class_: str, data_tip: str | None = None) -> Markup:
    """In pixels."""
    return el("rect", x=x, y=y, width=width, height=height, class_=class_, data_tip=data_tip)
