"""Benchmarks: one file an area; each prints one table and can write it as JSON."""
