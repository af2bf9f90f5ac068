"""The workload, one loop for all variants, and how a run is recorded."""
