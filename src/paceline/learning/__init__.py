"""Learning from traffic: a server keeps what its target wrote, and a trainer beside it adapts the head that drafts.

ring.py             what the target wrote, as token ids, in files of bounded size
trainer.py          the trainer, a process of its own with the lowest priority
trainer_process.py  … as the server starts, pauses and stops it
decision.py         when a head is swapped in and when it is rolled back
engine.py           an engine that records its traffic
learner.py          swaps and rollbacks, beside a running server
files.py            the folder that all of them share; every file in it is whole or absent
"""
