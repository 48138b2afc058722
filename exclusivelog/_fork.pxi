# A forked child has a copy of everything, and a right to nothing of it (rule C5).

# Counts the forks above this process: who was begun in an earlier one is the parent's.
cdef int _generation = 0


def _count_fork():
    global _generation
    _generation += 1


_os.register_at_fork(after_in_child=_count_fork)


def _inherited():
    from exclusivelog.errors import EngineClosedError
    return EngineClosedError(
        "this is the parent's, inherited through fork(); open an engine of your own in the child")
