"""The web process stays small: importing it loads none of the numerical libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "scipy", "pyarrow")


@pytest.mark.parametrize("module", ["lohan_app.main", "lohan_app.worker.celery", "lohan_app.runs.prepare"])
def test_importing_and_building_the_service_loads_nothing_heavy(module: str, tmp_path):
    build = (
        "from lohan_app.settings import Settings; from lohan_app.main import create_app; create_app(Settings())" if "main" in module else ""
    )
    program = f"import sys, {module}\n{build}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
