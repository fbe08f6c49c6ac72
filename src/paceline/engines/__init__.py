"""Requests in, pieces out: local (scheduler, memory and one worker thread), and engines of others behind `Engine`."""
