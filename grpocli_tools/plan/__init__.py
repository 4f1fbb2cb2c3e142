"""`grpocli plan`: memory and work of a run, from its config and the model's config alone."""
