"""The promises as figures: `python -m proof` (or `make proof`).

Separate parts, so that each can be doubted on its own:

- `traffic`  what processes do and record
- `faults`   what is done to them, and to their files
- `model`    every interleaving of a small world
- `cluster_model`  the same for writers on one ordered log
- `claims_model`  every order in which the records of a group's claims can arrive
- `judges`   the one judge: a ledger and the recorded calls; which rule is broken, where
- `instruments`  traffic, faults and judge put together, each with its control: the same with
  something broken on purpose, which must turn it red
- `mutants`  the library with something broken on purpose, and which check fails
- `report`   the figures as text and JSON, added up over runs
"""
