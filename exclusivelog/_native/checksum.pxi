# CRC-32C, by which entries, frames and rows are checked. (_native/crc32c.h computes it.)
#
# A CRC is linear: crc(a ^ b) = crc(a) ^ sum(b), where sum() is the CRC without its initial and
# final inversion, and leading zeros add nothing to sum(). So the checksum of an entry is the one
# taken while its footer was still zero, XOR the sum of the footer alone.

cdef extern from "_native/crc32c.h":
    int XC_TABLES
    int XC_SSE42
    int XC_ARMV8
    int XC_AVX512
    int xl_crc_start() noexcept nogil
    uint32_t xl_crc_fold(uint32_t, const void*, size_t) noexcept nogil
    uint32_t xl_crc32c(const void*, size_t) noexcept nogil

cdef extern from "_native/prefetch.h":
    void xl_prefetch(const char*, size_t) noexcept nogil

cdef enum:
    MAPPED_END = 4096           # bytes: what follows the blocks of an entry of some MB
    READ_AHEAD = 64 << 10       # bytes that are verified at once while an entry is read in order
    WITHOUT_GIL = 128 << 10     # bytes; to release the GIL costs more than the sum of fewer

# How checksums are computed on this machine.
CRC_KIND = {
    XC_AVX512: "avx512", XC_SSE42: "sse4.2", XC_ARMV8: "armv8", XC_TABLES: "tables",
}[xl_crc_start()]


def _warn_if_slow():
    if CRC_KIND == "tables":
        import logging
        logging.getLogger("exclusivelog").warning(
            "this processor has no CRC-32C instruction: checksums take about ten times as long")


_warn_if_slow()


def crc32c(data not None):
    """The CRC-32C of bytes or of a buffer like them.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return _sum_all(<const char*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef inline uint32_t _crc(const char* data, Py_ssize_t size) noexcept nogil:
    return xl_crc32c(data, size)


cdef inline uint32_t _sum(const char* data, Py_ssize_t size) noexcept nogil:
    return xl_crc_fold(0, data, size)


cdef uint32_t _sum_all(const char* start, Py_ssize_t size) noexcept:
    cdef uint32_t crc
    if size < WITHOUT_GIL:
        return _crc(start, size)
    with nogil:
        crc = _crc(start, size)
    return crc
