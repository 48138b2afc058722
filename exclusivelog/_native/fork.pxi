# Forked children must not use objects of their parent (rules C5, C8).
#
# Python's hooks do not run in a child that C code forks (uWSGI, a C library, a bare system call). So
# each object keeps the stamp of its process, and compares it; what is to be done in a child is done
# by the first call that notices.

cdef extern from "_native/identity.h" nogil:
    uint32_t xi_here()
    void xi_start(bint)
    bint xi_thread_is_known()


xi_start(True)

cdef list _in_child = []
cdef uint32_t _settled = xi_here()      # the process in which all of them have run
cdef uint32_t _settling = 0             # the one in which a thread runs them, and that thread
cdef unsigned long _settling_thread = 0


def in_forked_child(function not None):
    """Call `function()` once in each forked child, before an inherited object is used there: by
    Python's hook, or by the first call that notices the fork. Returns the function."""
    _in_child.append(function)
    return function


def this_process():
    """A number that no forked child of this process has. In a child, it first calls the functions
    that were given to `in_forked_child`."""
    if _settled != xi_here():
        _settle_in_child()
    return xi_here()


def thread_is_known():
    """Does the C library know the id of this thread? Not in a child made by a bare system call."""
    return xi_thread_is_known()


def _settle_in_child():
    global _settled, _settling, _settling_thread
    cdef uint32_t here = xi_here()
    cdef unsigned long thread = PyThread_get_thread_ident()
    while _settled != here and _settling == here:
        if _settling_thread == thread:
            return      # called by one of the functions
        _time.sleep(0.0002)
    if _settled == here:
        return
    _settling_thread, _settling = thread, here
    try:
        for function in _in_child:
            _call_unraised(function)
    finally:
        _settled = here


cdef void _call_unraised(function) noexcept:
    """Call it; an exception goes to `sys.unraisablehook`, as the other functions are as necessary."""
    function()


_os.register_at_fork(after_in_child=_settle_in_child)
_atexit.register(this_process)      # before the interpreter drops what was inherited


# Python's part of the library gives the core these errors (see errors.py).
cdef object _engine_closed = RuntimeError
cdef object _wait_timeout = TimeoutError
cdef object _undeserialised = None


def use_errors(*, closed, timeout, undeserialised):
    """Set the errors that the core raises: `closed` for objects that were closed or inherited
    through fork(), `timeout` for waits, and the result of `undeserialised(topic, offset, part, raw,
    cause)` for values and keys that cannot be deserialised: `cause` itself if that is none of the
    deserializer's errors."""
    global _engine_closed, _wait_timeout, _undeserialised
    _engine_closed, _wait_timeout, _undeserialised = closed, timeout, undeserialised


def _inherited():
    this_process()
    return _engine_closed(
        "this object is of an engine that was inherited through fork(); open an engine of your own in "
        "the child")
