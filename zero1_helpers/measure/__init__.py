"""Record what a step does: profiler, memory ledger, emulated link, run folders."""
