"""`grpocli doctor`: checks whether this machine is ready for a run."""
