"""How pytest's workers share the tests of a run: one of them has all that use what is made once.

Groups of xdist 3.8 would do it, if pytest 9.2 still let it rename tests.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

# By the beginnings of their paths: what is made for the first of them serves all.
TOGETHER = (
    "tests/cluster/test_mirror_broker",
    "tests/core/test_native",
    "proof/tests/test_cluster_torture",
    "tests/faces/test_package",
    "tests/spark/",
    "tests/test_words",
)


class Together(LoadScopeScheduling):
    """Each test by itself, but those of one of `TOGETHER` in one worker: else each worker starts a
    JVM of its own, or compiles the same program."""

    def _split_scope(self, nodeid: str) -> str:
        return next((name for name in TOGETHER if nodeid.startswith(name)), nodeid)

    def schedule(self) -> None:
        """A worker runs a test when it knows the next one, or that there is none: one that replaces
        a dead worker is given one unit, and would wait for another for ever (xdist 3.8)."""
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Give what a dead worker has left to the others. The test that it has died in has failed:
        it is not run again. Nor is handed on what it had done: a worker that is given a unit in
        which nothing is left to do asks for no other (xdist 3.8 hangs so)."""
        units = self.assigned_work.pop(node)
        died_in = None
        for scope, unit in units.items():
            left = [test for test, done in unit.items() if not done]
            if left and died_in is None:
                died_in = left.pop(0)
                unit[died_in] = True
            if left:
                self.workqueue[scope] = unit
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in
