"""A base image from the host's own Debian-like mirror, for machines that reach no image registry. Knows no kvrelay."""

import re
import shutil
import subprocess
from pathlib import Path

from tests.containers.shell import output, run

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
LEFT_OUT = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man")


def build_base(docker: dict[str, str], tag: str, scratch: Path) -> None:
    """Makes an image of Python and its venv under `tag`. CalledProcessError if a step fails.

    The host's certificates go with it: where a mirror can be reached only through a proxy, they are what pip needs.
    """
    root = scratch / "rootfs"
    packages = "python3,python3-venv,ca-certificates"
    run(["debootstrap", "--variant=minbase", f"--include={packages}", suite(), str(root), mirror()], limit_s=900)
    for unneeded in LEFT_OUT:
        shutil.rmtree(root / unneeded, ignore_errors=True)
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
        (root / "etc/pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}\n")
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(["docker", "import", "-", tag], stdin=tar.stdout, check=True, env=docker, timeout=300)
    shutil.rmtree(root)


def suite() -> str:
    """The host's own release, such as "bookworm"."""
    return output(["sh", "-c", ". /etc/os-release; echo $VERSION_CODENAME"])


def mirror() -> str:
    """Where the host's own packages come from. LookupError if apt has no source."""
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for source in (path for path in sources if path.is_file()):
        found = re.search(r"^(?:URIs:|deb(?:\s+\[[^\]]*\])?)\s+(\S+)", source.read_text(), re.MULTILINE)
        if found:
            return found[1]
    raise LookupError("apt has no source")
