"""Programs that load torch or vLLM, or start a sandbox, in separate processes.

A broken library ends the program and not `grpocli doctor`. Each program prints JSON objects, one a line, as it goes.
"""
