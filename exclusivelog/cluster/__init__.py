"""The log on a cluster: the same rules over a totally ordered log.

`ordered` has the protocol of a backend, `frames` encodes records, and `rule` decides which of them
count. `Mirror` copies a ledger to a Pulsar cluster; it needs the extra `[cluster]`.
"""

from exclusivelog.cluster.mirror import Comparison, Mirror, Progress

__all__ = ["Comparison", "Mirror", "Progress"]
