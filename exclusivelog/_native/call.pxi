# A call that an exception may end anywhere: one that another thread or a signal handler raises.


@cython.final
cdef class Call:
    """Makes a call in this thread, and tells whether it is under way.

    No exception can be raised between the end of the call and the moment at which `running` is False,
    since Python raises those of other threads between two of its own instructions only."""

    cdef readonly bint running

    def run(self, function):
        """`function()`, its result or its exception."""
        self.running = True
        try:
            return function()
        finally:
            self.running = False
