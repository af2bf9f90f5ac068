"""The notebook layer: cells that run on all ranks."""
