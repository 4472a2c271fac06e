"""The decode worker: receives blocks, runs paged attention with continuous batching, streams tokens."""
