"""Parts of `bench/paper.py`: workloads, step times, the simulated systems, tables and plots."""
