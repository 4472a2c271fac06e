"""The router: request lifecycle, text plane, worker membership, HTTP. It never loads torch."""
