"""README's command lines, as they stand there. Runs nothing."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("make", "docker", ".venv/bin/kvrelay", ".venv/bin/grpcurl", ".venv/bin/python", "git")


def commands(*beginnings: str) -> list[str]:
    """Lines of the fenced blocks that begin with one of `beginnings` (or with any program), without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [re.split(r"\s+#\s", line)[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(beginnings or PROGRAMS)]
