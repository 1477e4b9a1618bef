"""Does the engine learn what plain PyTorch learns? `python -m benchmarks.convergence`."""
