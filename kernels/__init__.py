"""Operators, one a file; `reference.py` is plain PyTorch and the truth every faster version is compared with."""
