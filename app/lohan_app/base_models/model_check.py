"""Looks into a foreign model. Runs in a limited child (`worker.limited`) with torch; weights are counted, not read.

main([MODEL, FOLDER]) writes config.json, the tokenizer's files and workload.json into FOLDER and returns the workload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lohan.models.blocks import trace_workload
from lohan.models.load import empty_model, load_config, open_weights
from lohan.models.tokenizer_files import write_tokenizer

WORKLOAD_FILE = "workload.json"


def main(arguments: list[str]) -> dict[str, Any]:
    """Check that the model at `arguments[0]` can be trained.

    Raises:
        ModelError: unknown type, missing or wrong weights, no tokenizer, or code of its own.
    """
    path, folder = Path(arguments[0]), Path(arguments[1])
    config = load_config(path)
    with open_weights(path) as weights:
        weights.check(empty_model(config))
    workload = trace_workload(config)
    write_tokenizer(path, folder)
    (folder / WORKLOAD_FILE).write_text(workload.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return workload.model_dump(mode="json")
