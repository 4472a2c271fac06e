"""Torch-free common ground of all kvferry processes, and the public Python client."""

__version__ = "0.1.0"
