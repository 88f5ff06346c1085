"""The page in a real browser, both colour schemes, wide and narrow: drawn, readable, quiet, and asking for nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.load.report.page import Run, page
from kvrelay.load.summary import summarise
from tests.browser import CHROMIUM, MISSING, Tab, browser
from tests.unit.load.report.runs import HOSTILE, many, record, run_of, watched

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=MISSING)

CHARTS = ("first-tokens", "timeline", "hits", "link", "tokens")
OUTSIDE = """
[...document.querySelectorAll("svg")].flatMap(svg => {
  const room = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text, rect, path, circle")].filter(part => {
    const box = part.getBoundingClientRect();
    return box.left < room.left - 1 || box.right > room.right + 1
      || box.top < room.top - 1 || box.bottom > room.bottom + 1;
  }).map(part => svg.parentNode.parentNode.id + ": " + part.outerHTML);
})
"""
"""Marks and texts that are cut off by their chart's edge."""
OVERLAPPING = """
[...document.querySelectorAll("svg")].flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  return texts.flatMap(([one, a], place) => texts.slice(place + 1).filter(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3
  ).map(([other]) => svg.parentNode.parentNode.id + ": " + one + " | " + other));
})
"""
"""Texts of one chart that lie on each other."""


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as tab:
        yield tab


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """No page may complain, ask for anything, or leave its script unfinished."""
    tab: Tab = request.getfixturevalue("tab")
    tab.complaints.clear()
    tab.asked.clear()
    yield
    assert tab.complaints == []
    assert {url.partition(":")[0] for url in tab.asked} == {"file"} and len(set(tab.asked)) == 1
    assert tab.value("document.documentElement.dataset.ready") == ""


def shown(tab: Tab, run: Run, path: Path, scheme: str = "light", width: int = 1200) -> None:
    file = path / "page.html"
    file.write_text(page(run, "a run"), encoding="utf-8")
    tab.show(file, scheme=scheme, width=width)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_and_can_be_read(tab: Tab, tmp_path: Path, scheme: str) -> None:
    shown(tab, run_of(many(120), link=watched(62), link_bytes_per_s=2e6), tmp_path, scheme)
    for name in CHARTS:
        kinds = f"[...document.querySelectorAll('#{name} svg :is(.line, .area, .bar)')]"
        assert tab.value(f"{kinds}.filter(mark => mark.getBoundingClientRect().width > 0).length") >= 2, name
        unseen = (
            "['none', 'rgba(0, 0, 0, 0)'].includes(getComputedStyle(mark)[mark.matches('.line') ? 'stroke' : 'fill'])"
        )
        assert tab.value(f"{kinds}.filter(mark => {unseen}).length") == 0, name
    assert tab.value(OUTSIDE) == []
    assert tab.value(OVERLAPPING) == []
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 30)"}[scheme]
    tab.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def luminance(colour: str) -> str:
    """Of a CSS variable, by WCAG 2, as JavaScript."""
    return f"""(() => {{
      const probe = document.body.appendChild(document.createElement("i"));
      probe.style.color = "var(--{colour})";
      const parts = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(part => part / 255);
      probe.remove();
      const [r, g, b] = parts.map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    }})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("colour", "least"),
    [("ink", 7.0), ("soft", 4.5), ("prefill", 3.0), ("main", 3.0), ("handoff", 3.0), ("failed", 3.0)],
)
def test_text_and_marks_stand_out_from_the_ground(
    tab: Tab, tmp_path: Path, scheme: str, colour: str, least: float
) -> None:
    shown(tab, run_of([record()]), tmp_path, scheme)
    ratio = [tab.value(luminance(name)) + 0.05 for name in ("ground", colour)]
    assert max(ratio) / min(ratio) >= least


@pytest.mark.parametrize("width", [380, 1200, 2400])
def test_the_page_fits_any_window(tab: Tab, tmp_path: Path, width: int) -> None:
    shown(tab, run_of(many(60), command="kvrelay load " + "--very-long-flag=" * 30), tmp_path, width=width)
    tab.value("document.querySelector('details').open = true")
    assert tab.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("times_ms", [(0.1, 0.2), (9_000.0, 1_234_567.0), (100.0, 100.0)])
def test_few_or_far_apart_times_are_drawn_within_the_chart(
    tab: Tab, tmp_path: Path, count: int, times_ms: tuple[float, float]
) -> None:
    one = record(arrived_ms=times_ms, sources="pm", output_tokens=2, e2el_ms=times_ms[1] + 1)
    quick = record(arrived_ms=(5.0, 6.0), sources="pm", output_tokens=2, e2el_ms=7.0, sent_s=3.0, due_s=3.0)
    shown(tab, run_of([one, *[quick] * (count - 1)]), tmp_path)
    assert tab.value(OUTSIDE) == []
    assert tab.value(OVERLAPPING) == []


def test_an_empty_run_says_so_in_place_of_every_chart(tab: Tab, tmp_path: Path) -> None:
    shown(tab, Run(summarise([], 0.0), []), tmp_path)
    assert tab.value("document.querySelectorAll('svg').length") == 0
    empty = "[...document.querySelectorAll('figure .empty')].filter(said => said.innerText.length > 5).length"
    assert tab.value(empty) == len(CHARTS)


def test_a_tip_says_what_is_under_the_pointer_and_goes_with_it(tab: Tab, tmp_path: Path) -> None:
    shown(tab, run_of([record()]), tmp_path)
    tab.value("document.querySelector('#timeline').scrollIntoView()")
    x, y = tab.value(
        "(box => [box.x + box.width / 2, box.y + box.height / 2])"
        "(document.querySelector('#timeline .bar.main').getBoundingClientRect())"
    )
    tab.move(x, y)
    said = tab.value("document.querySelector('#tip').innerText")
    assert "first token 100 ms" in said and "2 relay" in said and "kv-late" in said
    box = tab.value("(({ left, right, top, bottom }) => [left, right, top, bottom])(tip.getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= 1200 and 0 <= box[2] < box[3] <= 900
    tab.move(2, 2)
    assert tab.value("document.querySelector('#tip').hidden") is True
    assert tab.value("document.querySelectorAll('svg > title').length") == len(CHARTS)


def test_the_requests_sort_by_number_and_turn_round_with_unknown_last(tab: Tab, tmp_path: Path) -> None:
    sizes = [9, 1000, 50]
    shown(tab, run_of([record(prompt_tokens=n, handoff_stall_ms=None if n == 9 else n * 1.0) for n in sizes]), tmp_path)
    tab.value("document.querySelector('details').open = true")

    def sorted_by(column: str) -> list[str]:
        head = f"[...document.querySelectorAll('.requests th')].find(head => head.textContent === '{column}')"
        tab.value(f"{head}.click()")
        rows = f"[...document.querySelectorAll('.requests tbody tr')].map(row => row.cells[{head}.cellIndex].innerText)"
        found: list[str] = tab.value(rows)
        return found

    assert sorted_by("prompt") == ["9", "50", "1,000"]
    assert sorted_by("prompt") == ["1,000", "50", "9"]
    assert sorted_by("stall, ms") == ["50.0", "1,000.0", ""]
    assert sorted_by("stall, ms") == ["1,000.0", "50.0", ""]


def test_text_from_outside_never_runs(tab: Tab, tmp_path: Path) -> None:
    shown(tab, run_of([record(conversation=HOSTILE, error=HOSTILE, reason=HOSTILE)], command=HOSTILE), tmp_path)
    assert tab.value("document.title") == "a run"
    assert "document.title = 'broken'" in tab.value("document.querySelector('#command').innerText")
    assert tab.value("document.querySelectorAll('script').length") == 1
