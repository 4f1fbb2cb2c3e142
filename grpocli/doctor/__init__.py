"""`grpocli doctor`: checks whether this machine is ready."""
