"""HTML and SVG elements whose texts and attributes are escaped by construction. Knows no chart."""

import math
from html import escape


class Markup(str):
    """Text that is HTML already; every other string becomes text."""

    __slots__ = ()


NOTHING = Markup("")


def el(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element. `class_` is class, `data_tip` is data-tip; an attribute that is None is left out.

    ValueError: an attribute is a number that is not finite.
    """
    said = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    return Markup(f"<{name}{said}>{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    """One after the other."""
    return Markup("".join(child if isinstance(child, Markup) else text(child) for child in children))


UNSHOWN = dict.fromkeys([*(code for code in range(32) if chr(code) not in "\t\n"), 127, 0xFFFE, 0xFFFF], "?")


def text(said: str) -> Markup:
    """Escaped. What no page may hold (control characters, a file name's bytes that are not UTF-8) becomes "?"."""
    return Markup(escape(said.translate(UNSHOWN).encode("utf-8", "replace").decode("utf-8")))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return text(value) if isinstance(value, str) else number(value)


def number(value: float) -> str:
    """Short, of hundredths. ValueError if it is not finite."""
    if not math.isfinite(value):
        raise ValueError(f"{value} cannot be drawn")
    return f"{value:.2f}".rstrip("0").rstrip(".")
