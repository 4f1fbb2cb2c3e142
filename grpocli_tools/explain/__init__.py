"""A composed run as mathematics: `grpocli explain`, and docs/algorithms.md."""
