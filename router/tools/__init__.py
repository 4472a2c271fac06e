"""Calls of tools in a model's output: how models write them, how they are read, and grammars that make sure of them.

chat template ─► `formats.py` ─► `grammar.py` ─► constraint of the request
                      └────────► `call_parser.py` ─► content and calls, as the text comes
"""
