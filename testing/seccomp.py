"""System calls that are refused to a process, and all that it starts: seccomp(2)."""

from __future__ import annotations

import ctypes
import platform
import struct

NUMBERS = {
    "x86_64": {
        "close_range": 436,
        "fallocate": 285,
        "fcntl": 72,
        "fdatasync": 75,
        "futex_waitv": 449,
        "set_robust_list": 273,
    },
    "aarch64": {
        "close_range": 436,
        "fallocate": 47,
        "fcntl": 25,
        "fdatasync": 83,
        "futex_waitv": 449,
        "set_robust_list": 99,
    },
}.get(platform.machine(), {})
NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2  # of prctl(2)
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, SECOND_ARGUMENT = 0, 24  # offsets in struct seccomp_data
SETLK = 37  # F_OFD_SETLK


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def refuse(call: str, number: int) -> None:
    """Answer this call with an errno from now on; "F_OFD_SETLK" is that command of fcntl."""
    steps = [(LOAD, 0, 0, NUMBER), (EQUALS, 0, 1, NUMBERS.get(call, NUMBERS["fcntl"]))]
    if call == "F_OFD_SETLK":
        steps[1] = (EQUALS, 0, 3, NUMBERS["fcntl"])
        steps += [(LOAD, 0, 0, SECOND_ARGUMENT), (EQUALS, 0, 1, SETLK)]
    steps += [(RETURN, 0, 0, ERRNO | number), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filters here")
