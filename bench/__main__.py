"""`python -m bench` (`make bench`): every experiment with short settings, then bench/results/<date>.md and pictures."""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.figures import cells
from bench.output import RESULTS

EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "paper": ("paper",),
    "paper-sweep": ("paper", "--sweep"),
    **{
        name: (name,)
        for name in ("handoff", "bathtub", "trace", "index", "router", "scale", "transfer", "engine", "start")
    },
}
"""By the name of its result: module and arguments."""


def markdown(results: list[dict[str, Any]], failed: list[str]) -> str:
    """One page of all experiments, from their JSON."""
    lines = ["# Measurements", ""]
    lines += [f"`bench.{name}` ended without a result." for name in failed]
    for one in results:
        lines += [f"## bench.{one['bench']}", "", one["emulated"], "", f"Command: `{one['command']}`", ""]
        lines += [f"Machine: `{json.dumps(one['machine'])}`; {one['date']}", ""]
        lines += ["Settings: `" + json.dumps(one["settings"]) + "`", ""]
        lines += [f"**INVALID RUN: its figures say nothing.** {problem}\n" for problem in one["invalid"]]
        lines += [f"Made again, as the machine was too busy: {run}\n" for run in one["repeated"]]
        lines += [
            f"| figure | value | {one.get('interval', 'interval')} | target | |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [f"| {' | '.join([name, *cells(figure)])} |" for name, figure in one["figures"].items()]
        lines += ["", *(f"![{picture}]({picture})" for picture in one["pictures"]), ""]
    return "\n".join(lines)


def main() -> None:
    """Exit code 1 if any experiment was invalid or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the long settings: about an hour and a half")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace; without it a synthetic one is made")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page of the results that are there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    wanted = parser.parse_args()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    folder = wanted.out
    folder.mkdir(parents=True, exist_ok=True)
    results, codes, failed = [], [], []
    if wanted.page:
        results = [json.loads(found.read_text()) for found in sorted(folder.glob("*.json"))]
    for number, (name, (module, *more)) in enumerate([] if wanted.page else EXPERIMENTS.items(), start=1):
        found = folder / f"{name}.json"
        found.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"bench.{module}", "--out", str(folder), *more]
        command += [] if wanted.full else ["--quick"]
        command += [str(wanted.trace)] if wanted.trace and name == "trace" else []
        print(f"== {number} of {len(EXPERIMENTS)}: {name}, {datetime.datetime.now():%H:%M:%S}", flush=True)
        codes.append(subprocess.run(command, check=False).returncode)
        if found.exists():
            results.append(json.loads(found.read_text()))
        else:
            failed.append(name)
    page = folder / f"{date}.md"
    page.write_text(markdown(results, failed))
    print(f"written: {page}")
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    main()
