# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, auto_pickle=False
"""The compiled hot path of exclusivelog.

| part | what |
|---|---|
| `_entry.pxi` | the entry format: encode, stamp, decode, lazy messages, scanning |
| `_batch.pxi` | messages on their way into the log, and the receipts for them |
| `_rows.pxi` | the row that whoever may write is compared with |
| `_queue.pxi` | how long waiters leave a topic to others, and who is next |
| `_pack.pxi` | many small entries into few large ones |
| `_journal.pxi` | the critical section of an append, and the flush that all who wait share |
| `_shared.pxi` | words shared by processes: futexes, and liveness freed by the kernel |
| `_guard.pxi` | stores into a file's mapping that must not kill |
| `_section.pxi` | transactions that an interrupt cannot leave half entered |
| `_native/*.h` | the C below that: futexes, liveness, the journal's locks and file, the SIGBUS handler |

Nothing here knows about files, tables or policy.
"""

cimport cython
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX
from libc.stdint cimport (
    INT64_MAX, UINT32_MAX, UINT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
)
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memcmp, memcpy, memset

import os as _os
import threading as _threading
import time as _time

import msgpack as _msgpack
from google_crc32c import value as _crc32c

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int)

include "_fork.pxi"
include "_entry.pxi"
include "_shared.pxi"
include "_guard.pxi"
include "_pack.pxi"
include "_journal.pxi"
include "_section.pxi"
include "_batch.pxi"
include "_state.pxi"
include "_queue.pxi"
include "_rows.pxi"
