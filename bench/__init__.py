"""Measurements: tables with the definition of each figure, or JSON. Nothing here is product code."""
