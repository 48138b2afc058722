# What the parts of _core share with one another (and with other Cython modules).

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "_native/sections.h":
    # An entry as it is read: the fields of its footer, and where its sections lie (NULL: it has
    # none).
    ctypedef struct Laid "xe_laid":
        const char* start
        size_t size
        uint64_t topic
        uint64_t base_offset
        uint64_t epoch
        uint64_t session
        int64_t base_sequence
        int64_t publish_time
        uint32_t count
        uint16_t flags
        uint16_t name_length
        uint32_t last_gap
        uint32_t last_time
        uint8_t version
        size_t body
        size_t blocks
        const uint32_t* sums
        size_t chunk
        size_t sections
        const char* chunks
        uint8_t method
        const uint8_t* value_valid
        const uint32_t* value_offsets
        const char* values
        const uint8_t* key_valid
        const uint32_t* key_offsets
        const char* keys
        const uint8_t* event_valid
        const int64_t* events
        const int64_t* sequences
        const uint32_t* property_offsets
        const char* properties
        const uint32_t* times
        const uint32_t* gaps
        const char* name


    ctypedef struct ChunkPlace "xe_place_of_chunk":
        size_t at
        size_t decompressed
        uint32_t size
        uint32_t sum

cdef extern from "_native/ahead.h":
    ctypedef struct Job "xa_job":
        const char* from_ "from"
        char* to
        const ChunkPlace* places
        size_t chunk
        uint32_t* states


cdef class Deserializer:
    cdef readonly str topic
    cdef readonly object value              # functions of bytes, or None
    cdef readonly object key


cdef class Entry:
    cdef readonly object data
    cdef readonly Py_ssize_t nbytes
    cdef readonly uint64_t end              # the offset behind the last message
    cdef readonly Deserializer loads
    cdef Py_buffer view
    cdef Laid laid
    cdef object _name
    cdef bint mapped                        # in a file, and not read yet
    cdef uint8_t* seen                      # of each block: is it sound? NULL: it has none
    cdef uint32_t sound_from                # the messages from here
    cdef uint32_t sound_to                  # ... to before here are known to be sound
    cdef ChunkPlace* places                 # of a compressed entry: its chunks in `view`
    cdef object decompress
    cdef Job* job                           # NULL: only `decompress` can decompress it
    cdef uint32_t process                   # the process that has begun the job
    cdef readonly str damage                # what is wrong with the chunk that was damaged last
    cdef int _find_blocks(self) except -1
    cdef int _open_compressed(self) except -1
    cdef bint _decompress_requested(self) except -1
    cdef bint _decompress(self, size_t number) except -1
    cdef int _open_job(self) except -1
    cdef bint _make(self, size_t number) except -1
    cdef bint _are_sound(self, uint32_t start, uint32_t stop, bint out_of_order) except -1
    cdef bint _is_section_sound(self, const void* section) except -1
    cdef bint verify(self, uint32_t index, uint32_t ahead) except -1
    cdef bint _is_whole(self) noexcept
    cdef uint32_t _ahead(self) noexcept


cdef class Message:
    cdef Entry entry
    cdef uint32_t index


cdef class Cursor:
    cdef readonly uint64_t position
    cdef Entry entry
    cdef list queue
    cdef Py_ssize_t queued
    cdef object watched         # the journal into whose words the next two point
    cdef uint64_t* removals     # the version of the topic is the larger one of both; see
    cdef uint64_t* everything   # `Journal.watch`
    cdef uint64_t seen          # that version when `queue` was read
    cdef bint advance(self) except -1
    cdef bint look_again(self) except -1
    cdef Message take(self)
    cdef Entry _sound_part(self, Entry entry, uint32_t index)


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
    cdef public uint64_t retry_waiter
    cdef public uint64_t retry_at
    cdef public uint32_t flags
    cdef public str name
