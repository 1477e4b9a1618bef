"""Comparisons that need the repository (`python -m benchmarks.NAME`), and the recorded results of all: `results/<name>.json`."""
