# `Message`: one message of an entry, decoded on demand.

cdef object VALUE_NAME = "value"
cdef object _EPOCH = _datetime.datetime(1970, 1, 1, tzinfo=_datetime.timezone.utc)
cdef int REPR_BYTES = 40


@cython.final
cdef class Deserializer:
    """The deserializers of a reader of this topic, for values and keys: functions of bytes, or
    None."""

    def __init__(self, str topic not None, object value, object key):
        self.topic, self.value, self.key = topic, value, key

    def __reduce__(self):
        return Deserializer, (self.topic, self.value, self.key)


cdef object _load(object function, Entry entry, uint32_t index, str part, object raw):
    try:
        return function(raw)
    except Exception as error:
        raised = _undeserialised(entry.loads.topic, _offset_at(entry, index), part, raw, error)
        if raised is error:
            raise
        raise raised from error


cdef inline object _value(Entry entry, uint32_t index):
    value = _raw_value(entry, index)
    if entry.loads is None or entry.loads.value is None or value is None:
        return value
    return _load(entry.loads.value, entry, index, "value", value)


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Message:
    """One message. Its parts are decoded when they are accessed.

    - `offset`: its number in the topic. `epoch`: the topic's epoch when it was written (rule B8).
    - `value`: bytes, or what the reader's deserializer returns for them; None for a tombstone.
      `key`: the same with the key deserializer; None if the message has no key. Each raises
      DeserializationError if its deserializer fails.
    - `raw_value`, `raw_key`: their bytes as stored in the log.
    - `properties`: a dict of str to str.
    - `publish_time`, `event_time`: ms since 1970 UTC; `event_time` may be None. `published_at`,
      `event_at`: the same as datetimes in UTC; OverflowError for an event time outside of the years
      1 to 9999.
    - `producer_name`, `sequence_id`: the name of the producer that sent it, and its sequence id
      under that name (rule G2).

    Messages are immutable, and equal if all of the above are equal; values and keys are compared as
    bytes. They can be pickled if their deserializers can: a lambda cannot.

    >>> _ = producer.send(b"3", key="apples", properties={"unit": "kg"}, event_time=1_000)
    >>> message = next(topic.reader(deserializer="json"))
    >>> message.offset, message.key, message.value, message.raw_value, message.properties
    (0, b'apples', 3, b'3', {'unit': 'kg'})
    >>> message.event_at.isoformat(), message == next(topic.reader())
    ('1970-01-01T00:00:01+00:00', True)
    """

    def __init__(self):
        raise TypeError("a Message is made by a Reader")

    def __getattribute__(self, name):
        # Check the most frequent attribute first, without a lookup in the type.
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
    def published_at(self):
        return _moment(self.publish_time)

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
    def raw_key(self):
        return _raw_key(self.entry, self.index)

    @property
    def key(self):
        key = _raw_key(self.entry, self.index)
        if self.entry.loads is None or self.entry.loads.key is None or key is None:
            return key
        return _load(self.entry.loads.key, self.entry, self.index, "key", key)

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
    def event_at(self):
        time = self.event_time
        return None if time is None else _moment(time)

    @property
    def sequence_id(self):
        cdef Entry entry = self.entry
        if entry.laid.sequences != NULL:
            return entry.laid.sequences[self.index]
        return entry.laid.base_sequence + self.index

    def __eq__(self, other):
        if type(other) is not Message:
            return NotImplemented
        return _parts(self) == _parts(other)

    def __hash__(self):
        return hash((self.offset, self.epoch, self.publish_time, self.sequence_id))

    def __reduce__(self):
        # Pickle it as an entry with one message: that has all of its fields, and a checksum.
        _, data = keep(self.entry, [self.index], self.entry.laid.topic)
        return _restored, (data, self.entry.loads)

    def _repr_html_(self):
        return _as_html(self)

    def __repr__(self):
        return (f"<Message offset={self.offset} epoch={self.epoch} key={_short(self.raw_key)} "
                f"value={_short(self.raw_value)} producer_name={self.producer_name!r}>")


# Python's part of the library gives the core this function (see notebook.py).
cdef object _as_html = repr


def show_messages_by(function):
    """Let a notebook show what `function(message)` returns."""
    global _as_html
    _as_html = function


def _restored(bytes data not None, Deserializer loads):
    """The message of a pickle."""
    return Entry(data, loads).message(0)


cdef tuple _parts(Message message):
    # The parts that are most likely to differ come first.
    return (
        message.offset, message.publish_time, message.sequence_id, message.epoch,
        message.producer_name, message.event_time, message.raw_key, message.raw_value,
        message.properties,
    )


cdef object _moment(int64_t ms):
    return _EPOCH + _datetime.timedelta(milliseconds=ms)


cdef str _short(object data):
    """The repr of bytes or None; of many bytes only the first ones, and the number of bytes."""
    if data is None or len(data) <= REPR_BYTES:
        return repr(data)
    return f"{data[:REPR_BYTES]!r}... ({len(data)} bytes)"
