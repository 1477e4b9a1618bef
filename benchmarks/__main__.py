"""`python -m benchmarks [NAME…] [--json]`: run, print a table, write the results."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from benchmarks import adam, disk
from benchmarks.records import write

BENCHMARKS = {"adam": adam.run, "disk": disk.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}; none: all")
    parser.add_argument("--json", action="store_true", help="print the records as they are written")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    for name in arguments.names or BENCHMARKS:
        records = BENCHMARKS[name]()
        path = write(name, records)
        if arguments.json:
            sys.stdout.write(json.dumps(records, indent=1) + "\n")
            continue
        columns = list(dict.fromkeys(key for record in records for key in record))
        table = Table(*columns, title=f"{name} ({path.name})", title_justify="left")
        for record in records:
            table.add_row(*(_shown(record.get(column)) for column in columns))
        Console(width=None if sys.stdout.isatty() else 160).print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}" if isinstance(value, float) else str(value)
    )


if __name__ == "__main__":
    main()
