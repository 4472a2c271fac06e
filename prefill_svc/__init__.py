"""The prefill worker: fills paged KV blocks, samples the first token and ships the blocks."""
