"""The committed stub is what nanobind.stubgen writes from the built module (`make stubs`)."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_the_stub_is_up_to_date(repository, tmp_path):
    pytest.importorskip("nanobind", reason="nanobind is not installed: it is in the [dev] extra")
    out = tmp_path / "_native.pyi"
    subprocess.run([sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "lohan._native", "-o", str(out)], check=True)
    assert out.read_text() == (repository / "engine" / "lohan" / "_native.pyi").read_text(), "the stub is out of date: run `make stubs`"
