"""The engine of this process: schedule, propose, forward, verify, postprocess."""
