"""Moving KV blocks between workers: the ship protocol as state machines, and its transports."""
