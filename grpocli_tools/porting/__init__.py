"""Configs and scripts of TRL as overrides of grpocli."""
