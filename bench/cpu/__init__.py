"""Engines on CPU cores: ours beside its peers, and what limits them (`bench/engine.py` is the command)."""
