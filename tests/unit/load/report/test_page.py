"""A run as a page: whatever the run was, it is well-formed, says what it knows and nothing else."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.load.record import Record
from kvrelay.load.report.machine import machine
from kvrelay.load.report.page import Run, page
from kvrelay.load.summary import summarise
from kvrelay.load.surroundings import LinkSample
from tests.unit.load.report.runs import HOSTILE, many, record, run_of, watched

CHARTS = ("first-tokens", "timeline", "hits", "link", "tokens")


def figure(text: str, name: str) -> str:
    found = re.search(rf'<figure id="{name}">.*?</figure>', text, re.DOTALL)
    assert found is not None
    return found.group()


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


class Elements(HTMLParser):
    """Fails at an element that ends where it did not begin."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_every_chart_is_drawn_with_a_title_a_description_and_named_axes_with_units() -> None:
    text = page(run_of(many(60), link=watched(62), link_bytes_per_s=2e6), "a run")
    for name in CHARTS:
        (svg,) = svgs(figure(text, name))
        assert svg.findtext("title") and svg.findtext("desc")
        labels = [label.text or "" for label in svg.iter("text") if "label" in label.get("class", "")]
        assert len(labels) == 2
        units = (r"\((s|ms).*\)", r"\(%\)|MB/s|tokens/s|requests")
        assert re.search(units[0], labels[0]) and re.search(units[1], labels[1])


def test_the_page_names_no_other_place() -> None:
    text = page(run_of(many(60), link=watched(62)), "a run")
    assert not re.search(r"https?:|//[a-z]|\bsrc=|\bhref=|url\(|@import", text)
    assert "default-src 'none'" in text


def test_a_run_without_requests_says_so_in_every_chart() -> None:
    text = page(Run(summarise([], 0.0), []), "nothing")
    assert svgs(text) == []
    for name in CHARTS:
        assert 'class="empty"' in figure(text, name)
    assert "No request was answered whole" in text


def test_a_run_in_which_all_failed_still_shows_when() -> None:
    failed = [record(outcome="failed", error="UNAVAILABLE", failed_leg="main", arrived_ms=(), sources="", wan_bytes=0)]
    text = page(run_of(failed * 3), "all failed")
    assert len(svgs(text)) == 1
    assert "failed" in figure(text, "timeline")
    assert "3 of 3 requests failed" in text
    assert "<td>UNAVAILABLE</td>" in text


def test_a_run_without_relay_says_so() -> None:
    assert "No request was relayed" in page(run_of([record(sources="pmmmmm", relay="")]), "p-md only")
    assert "No request was relayed" not in page(run_of([record()]), "relayed")


def test_what_is_emulated_is_said_if_it_is_known() -> None:
    paced = page(run_of([record()], link=watched(5)), "emulated")
    assert "accelerators are emulated" in paced and "The WAN is emulated" in paced
    real = page(Run(summarise([record()]), [record()]), "real")
    assert "emulated" not in real.replace("WAN emulator", "")


def test_every_figure_of_the_summary_is_there() -> None:
    run = run_of(
        [record(fallbacks=("relay_paused",)), record(outcome="failed", error="UNAVAILABLE", failed_leg="main")]
    )
    text = page(run, "figures")
    for name, spread in run.summary.times_ms.items():
        assert f"<th>{name}</th>" in text and f">{spread.p99:,.1f}</td>" in text
    assert f"BCR {run.summary.bcr:.4f}" in text
    for said in ("p-rld-md: kv-late", "relay_paused", "Failures by leg", "saved by MD&#x27;s cache", "hardware cost"):
        assert said in text


def test_many_requests_are_sampled_and_the_page_says_so() -> None:
    text = page(run_of(many(2000)), "many")
    assert "300 of 2,000, evenly chosen" in text
    (svg,) = svgs(figure(text, "timeline"))
    assert sum(group.get("class", "").startswith("row") for group in svg.iter("g")) == 300
    assert len(text) < 2_000_000


def test_text_from_outside_stays_text() -> None:
    hostile = record(conversation=HOSTILE, reason=HOSTILE, error=HOSTILE, fallbacks=(HOSTILE,), request_id=HOSTILE)
    broken = record(outcome="failed", error=HOSTILE, failed_leg=HOSTILE)
    text = page(
        run_of([hostile, broken], command=HOSTILE, machine=HOSTILE, warnings=[HOSTILE], facts={HOSTILE: HOSTILE}),
        HOSTILE,
    )
    text.encode()
    assert Elements(text).count["script"] == 1
    assert "\x00" not in text


def test_the_machine_is_told_as_far_as_it_says(tmp_path: Path) -> None:

    assert "Python" in machine(tmp_path)
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Quick CPU\n")
    (tmp_path / "meminfo").write_text("MemTotal:       8388608 kB\n")
    assert "of Quick CPU, 8.0 GiB" in machine(tmp_path)


times = st.floats(0, 1e7, allow_nan=False)


@st.composite
def records(draw: st.DrawFn) -> Record:
    arrived = tuple(sorted(draw(st.lists(times, max_size=12))))
    prompt = draw(st.integers(0, 10**6))
    return record(
        conversation=draw(st.text(max_size=5)),
        outcome=draw(st.sampled_from(["ok", "failed", "cancelled", "unfinished"])),
        error=draw(st.text(max_size=20)),
        manner=draw(st.sampled_from(["", "slow", "cancel"])),
        warm_up=draw(st.booleans()),
        due_s=draw(st.floats(-1, 1e5)),
        sent_s=draw(st.floats(-1, 1e5)),
        prompt_tokens=prompt,
        output_tokens=draw(st.sampled_from([0, len(arrived)])),
        pipeline=draw(st.sampled_from(["", "md", "p-md", "p-rld-md", "p-rld"])),
        prefill=draw(st.sampled_from(["", "p1"])),
        main=draw(st.sampled_from(["", "m1"])),
        cached_prefill_tokens=draw(st.integers(0, prompt)),
        cached_main_tokens=draw(st.integers(0, prompt)),
        arrived_ms=arrived,
        sources="".join(draw(st.lists(st.sampled_from("prms"), min_size=len(arrived), max_size=len(arrived)))),
        e2el_ms=draw(times),
        wan_bytes=draw(st.integers(0, 10**12)),
        timeline=draw(
            st.sampled_from([(), (("prefill_started", 5.0),), (("main_ready", 2.0), ("prefill_started", 9.0))])
        ),
    )


samples = st.lists(
    st.builds(LinkSample, at_s=st.floats(0, 1e5), out_bytes=st.integers(0, 10**12), back_bytes=st.integers(0, 10**12),
              backlog_bytes=st.just(0)), max_size=6,
).map(lambda found: sorted(found, key=lambda sample: sample.at_s))  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(records(), max_size=8), samples, st.floats(0, 1e12))
def test_any_run_makes_a_whole_page_without_a_number_that_is_none(
    found: list[Record], link: list[LinkSample], rate: float
) -> None:
    text = page(run_of(found, link=link, link_bytes_per_s=rate), "odd")
    Elements(text)
    for svg in svgs(text):
        said = " ".join(value for part in svg.iter() for key, value in part.attrib.items() if key != "data-tip")
        assert not re.search(r"\b(nan|inf)\b", said, re.IGNORECASE)
    assert not re.search(r">-?(nan|inf)[< ]", text)
