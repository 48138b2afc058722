# One message of an entry, decoded when it is asked for.

cdef object VALUE_NAME = "value"


cdef inline object _value(Entry entry, uint32_t index):
    value = _raw_value(entry, index)
    if entry.loads is None or value is None:
        return value
    return entry.loads(value)


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Message:
    """One message. Its parts are decoded when they are asked for.

    `offset` is its place in the topic; `epoch` the reign it was written in (rule B8);
    `value` bytes, or None for a tombstone; `key` bytes or None; `properties` a dict of
    strings; `publish_time` and `event_time` ms since 1970 UTC (`event_time` may be None);
    `producer_name` and `sequence_id` say which producer sent it, and under which number (rules
    G1, G2).
    """

    def __init__(self):
        raise TypeError("a Message is made by a Reader")

    def __getattribute__(self, name):
        # The attribute that every reader asks for is found without a look-up in the type.
        if name is VALUE_NAME:
            return _value(self.entry, self.index)
        return PyObject_GenericGetAttr(self, name)

    @property
    def offset(self):
        return _offset_at(self.entry, self.index)

    @property
    def epoch(self):
        return self.entry.laid.epoch

    @property
    def session(self):
        return self.entry.laid.session

    @property
    def publish_time(self):
        if self.entry.laid.times == NULL:
            return self.entry.laid.publish_time
        return self.entry.laid.publish_time + self.entry.laid.times[self.index]

    @property
    def producer_name(self):
        return self.entry.producer_name

    @property
    def raw_value(self):
        return _raw_value(self.entry, self.index)

    @property
    def value(self):
        return _value(self.entry, self.index)

    @property
    def key(self):
        cdef const Laid* laid = &self.entry.laid
        cdef uint32_t at
        if laid.keys == NULL or not _bit(laid.key_valid, self.index):
            return None
        at = laid.key_offsets[self.index]
        return PyBytes_FromStringAndSize(laid.keys + at, laid.key_offsets[self.index + 1] - at)

    @property
    def properties(self):
        cdef Entry entry = self.entry
        cdef uint32_t at
        if entry.laid.properties == NULL:
            return {}
        at = entry.laid.property_offsets[self.index]
        if entry.laid.property_offsets[self.index + 1] == at:
            return {}
        return _msgpack.unpackb(
            entry.laid.properties[at:entry.laid.property_offsets[self.index + 1]])

    @property
    def event_time(self):
        cdef Entry entry = self.entry
        if entry.laid.events == NULL or not _bit(entry.laid.event_valid, self.index):
            return None
        return entry.laid.events[self.index]

    @property
    def sequence_id(self):
        cdef Entry entry = self.entry
        if entry.laid.sequences != NULL:
            return entry.laid.sequences[self.index]
        return entry.laid.base_sequence + self.index

    def __repr__(self):
        return (f"<Message offset={self.offset} epoch={self.epoch} key={self.key!r} "
                f"value={self.value!r} producer={self.producer_name!r}>")
