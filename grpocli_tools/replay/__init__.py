"""`grpocli replay`: recompute recorded steps and compare them with the records."""
