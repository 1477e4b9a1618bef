"""Fetch the browser libraries into `static/vendor/`: pages load nothing from other hosts, so the files are part of the repository.

Run by `make vendor` after a version below changes, then commit what it wrote. Needs `npm`, used only as a downloader: packages are
named by name and version, no script of theirs runs, and only the files listed here are kept.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VENDOR_FOLDER = Path(__file__).parent / "static" / "vendor"
README_HEAD = """# Vendored browser libraries

Written by `make vendor` (`web/vendor.py`); do not edit. Each file is the published one, byte for byte.

| file | package | version | licence | SHA-256 |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Package:
    """One npm package and the files kept of it: path inside the package -> name here (which carries the version)."""

    name: str
    version: str
    licence: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "htmx.org", "2.0.11", "0BSD",
        {"dist/htmx.min.js": "htmx-2.0.11.min.js", "LICENSE": "htmx-2.0.11.LICENSE"},
    ),
    Package(
        "uplot", "1.6.32", "MIT",
        {
            "dist/uPlot.iife.min.js": "uplot-1.6.32.min.js",
            "dist/uPlot.min.css": "uplot-1.6.32.min.css",
            "LICENSE": "uplot-1.6.32.LICENSE",
        },
    ),
    Package(
        "swagger-ui-dist", "5.35.0", "Apache-2.0",
        {
            "swagger-ui-bundle.js": "swagger-ui-5.35.0.min.js",
            "swagger-ui.css": "swagger-ui-5.35.0.min.css",
            "LICENSE": "swagger-ui-5.35.0.LICENSE",
            "NOTICE": "swagger-ui-5.35.0.NOTICE",
            "swagger-ui-bundle.js.LICENSE.txt": "swagger-ui-5.35.0.bundled-LICENSES.txt",
        },
    ),
)  # fmt: skip


def fetch(package: Package, folder: Path) -> bytes:
    """Download the package's archive into `folder` and return its bytes.

    Raises:
        SystemExit: npm is missing or could not get the package.
    """
    command = ["npm", "pack", "--silent", "--ignore-scripts", f"{package.name}@{package.version}"]
    try:
        result = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit("vendor: npm is not installed; install Node.js with npm and run this again")
    except subprocess.CalledProcessError as error:
        sys.exit(f"vendor: {' '.join(command)} failed: {error.stderr.strip()}")
    return (folder / result.stdout.strip().splitlines()[-1]).read_bytes()


def extract(package: Package, archive: bytes) -> dict[str, bytes]:
    """The kept files of the package, by their name here."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        contents = {}
        for source, target in package.files.items():
            member = tar.extractfile(f"package/{source}")
            if member is None:
                sys.exit(f"vendor: {package.name} {package.version} has no file {source}")
            contents[target] = member.read()
    return contents


def main() -> None:
    rows = []
    for old in VENDOR_FOLDER.glob("*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        for package in PACKAGES:
            for name, content in extract(package, fetch(package, Path(temporary))).items():
                (VENDOR_FOLDER / name).write_bytes(content)
                digest = hashlib.sha256(content).hexdigest()
                rows.append(f"| {name} | {package.name} | {package.version} | {package.licence} | {digest} |\n")
    (VENDOR_FOLDER / "README.md").write_text(README_HEAD + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
