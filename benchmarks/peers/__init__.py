"""Whole training steps of other systems beside LoHan's: `python -m benchmarks.peers`."""
