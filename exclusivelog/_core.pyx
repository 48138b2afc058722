# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, auto_pickle=False
"""The compiled hot path of exclusivelog.

The parts are in `_native/`, each with one subject:

| part | subject |
|---|---|
| `checksum`, `layout` | CRC-32C; the footer of an entry, and finding its sections and blocks |
| `columns`, `encode` | encoding messages as an entry that has no offset yet |
| `compression` | compressed entries |
| `entry`, `message`, `cursor` | entries, messages that are decoded on demand, reading in order |
| `values` | reading values in order, without creating messages |
| `plain` | what a serialiser takes: classes, depth, comparison of a value with what comes back |
| `shapes`, `extensions` | models whose objects come back as they are; msgpack inside of extension types |
| `pack` | packing many small entries into few large ones |
| `shared`, `guard`, `fork` | shared memory: atomics, futexes, liveness; SIGBUS; forked children |
| `figures` | counters shared by the processes of a ledger |
| `lock`, `section` | a lock of threads; transactions that are safe against interrupts |
| `changes` | what a transaction changes that others remember: versions of topics and claims |
| `frames`, `tails` | reading frames of the journal; the last offset and time of each topic |
| `journal`, `append`, `flush` | the shared header; the critical section; the shared flush |
| `deaths` | locks that outlive their thread |
| `checkpoint`, `merge`, `fresh` | the journal's frames, grouped by topic; the table rows that they change; journal frames packed for a reader |
| `batch`, `receipt`, `appender`, `commit_queue` | messages that are being sent |
| `group`, `joint` | group commit: many producers, one write; the frames of a transaction |
| `replica` | get and put of a shared map |
| `queue`, `rows` | selecting the next waiter; the topic row and the fencing check |
| `*.h` | C code: the sections and blocks of an entry, CRC-32C, futexes, liveness, the journal, LZ4 ahead of readers, SIGBUS, which process this is |

It does not depend on the directory, the tables or policies.
"""

cimport cython
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.buffer cimport (
    PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_CheckSignals
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cpython.object cimport PyObject, PyObject_GenericGetAttr

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX
from libc.stdint cimport (
    INT64_MAX, UINT32_MAX, UINT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
)
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memcmp, memcpy, memset

import atexit as _atexit
import collections as _collections
import collections.abc as _abc
import datetime as _datetime
import enum as _enum
import os as _os
import sys as _sys
import threading as _threading
import time as _time

import msgpack as _msgpack

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int)

cdef extern from "pythread.h" nogil:
    unsigned long PyThread_get_thread_ident()

include "_native/fork.pxi"
include "_native/checksum.pxi"
include "_native/layout.pxi"
include "_native/columns.pxi"
include "_native/encode.pxi"
include "_native/compression.pxi"
include "_native/entry.pxi"
include "_native/message.pxi"
include "_native/cursor.pxi"
include "_native/values.pxi"
include "_native/plain.pxi"
include "_native/shapes.pxi"
include "_native/extensions.pxi"
include "_native/lock.pxi"
include "_native/shared.pxi"
include "_native/guard.pxi"
include "_native/figures.pxi"
include "_native/pack.pxi"
include "_native/frames.pxi"
include "_native/tails.pxi"
include "_native/changes.pxi"
include "_native/journal.pxi"
include "_native/deaths.pxi"
include "_native/private_lock.pxi"
include "_native/append.pxi"
include "_native/flush.pxi"
include "_native/checkpoint.pxi"
include "_native/fresh.pxi"
include "_native/section.pxi"
include "_native/batch.pxi"
include "_native/receipt.pxi"
include "_native/commit_queue.pxi"
include "_native/appender.pxi"
include "_native/group.pxi"
include "_native/call.pxi"
include "_native/joint.pxi"
include "_native/replica.pxi"
include "_native/queue.pxi"
include "_native/rows.pxi"
include "_native/merge.pxi"
