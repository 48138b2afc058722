# What the parts of _core share with one another (and with other Cython modules).

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef class Entry:
    cdef readonly object data
    cdef readonly Py_ssize_t nbytes
    cdef Py_buffer view
    cdef readonly uint64_t topic
    cdef readonly uint64_t base_offset
    cdef readonly uint64_t end              # the offset behind the last message
    cdef readonly uint64_t epoch
    cdef readonly uint64_t session
    cdef readonly int64_t base_sequence
    cdef readonly int64_t publish_time
    cdef readonly uint32_t count
    cdef readonly uint16_t flags
    cdef public object loads
    cdef object _name
    cdef const char* start
    cdef const uint8_t* value_valid
    cdef const uint32_t* value_offsets
    cdef const char* values
    cdef const uint8_t* key_valid
    cdef const uint32_t* key_offsets
    cdef const char* keys
    cdef const uint8_t* event_valid
    cdef const int64_t* events
    cdef const int64_t* sequences
    cdef const uint32_t* property_offsets
    cdef const char* properties
    cdef const uint32_t* times
    cdef const uint32_t* gaps
    cdef const char* name
    cdef uint16_t name_length


cdef class Message:
    cdef Entry entry
    cdef uint32_t index


cdef class Cursor:
    cdef readonly uint64_t position
    cdef Entry entry
    cdef list queue
    cdef Py_ssize_t queued
    cdef bint advance(self) except -1
    cdef Message take(self)


cdef class TopicRow:
    cdef public uint64_t id
    cdef public uint64_t epoch
    cdef public uint64_t first_offset
    cdef public uint64_t next_offset
    cdef public int64_t last_publish_time
    cdef public uint64_t owner
    cdef public uint32_t shared
    cdef public uint32_t waiting
    cdef public uint64_t freed
    cdef public uint64_t later
    cdef public uint64_t due
    cdef public uint32_t flags
    cdef public str name
