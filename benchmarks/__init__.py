"""Runnable comparisons: `python -m benchmarks NAME`. Each writes `benchmarks/results/<name>.json`; nothing here is imported elsewhere."""
