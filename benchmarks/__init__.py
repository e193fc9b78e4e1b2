"""Benchmarks: what the library costs beside its peers, in the same run (see README.md)."""
