"""What a run needs, from its config and the model's config alone: `grpocli plan`."""
