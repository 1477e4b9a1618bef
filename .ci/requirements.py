"""Prints requirements of pyproject.toml, one a line: `python .ci/requirements.py base app dev`.

Without torch, which is installed first and alone.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def main(groups: list[str]) -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group in groups:
        lines = project["dependencies"] if group == "base" else project["optional-dependencies"][group]
        for line in lines:
            if re.match(r"torch\b", line) is None:
                sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
