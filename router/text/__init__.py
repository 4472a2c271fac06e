"""The text plane: tokenising, chat templates, incremental detokenising and stop strings."""
