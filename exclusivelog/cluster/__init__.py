"""The log on a cluster: the same rules over a totally ordered log.

`ordered` is what it needs of a backend, `frames` are the records as bytes, and `rule` says which of
them count.
"""
