"""Measuring and proving: workloads, stopwatches, the lossless audit, tuning, and the report."""
