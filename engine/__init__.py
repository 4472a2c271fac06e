"""Device code shared by both services: sequences, blocks, scheduling, models and the step loop."""
