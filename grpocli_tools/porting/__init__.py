"""Configs and scripts of TRL and NeMo RL as overrides of grpocli."""
