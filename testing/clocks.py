"""A wall clock that is wrong, for the processes that a test starts (LD_PRELOAD)."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

from testing.processes import PATIENCE

DAY = 86400
YEAR = 365 * DAY

CLOCK = r"""
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <fcntl.h>
    #include <stdlib.h>
    #include <sys/mman.h>
    #include <sys/time.h>
    #include <time.h>
    #include <unistd.h>

    static volatile long long *shift;    /* seconds, in a file */

    __attribute__((constructor)) static void begin(void) {
        int fd = open(getenv("WALL_CLOCK_SHIFT"), O_RDONLY);
        void *p = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
        if (p != MAP_FAILED) shift = p;
        close(fd);
    }

    int clock_gettime(clockid_t id, struct timespec *t) {
        static int (*real)(clockid_t, struct timespec *);
        if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
        int r = real(id, t);
        if (r == 0 && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
            t->tv_sec += *shift;
        return r;
    }

    int gettimeofday(struct timeval *t, void *zone) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        t->tv_sec = now.tv_sec;
        t->tv_usec = now.tv_nsec / 1000;
        return 0;
    }

    time_t time(time_t *t) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        if (t) *t = now.tv_sec;
        return now.tv_sec;
    }
"""

# A clock of the whole process that is moved by CLOCK_SHIFT seconds, or stands still at "=" and a
# time: all clocks, as libfaketime does it.
FAKE_CLOCK = """
    #define _GNU_SOURCE
    #include <errno.h>
    #include <stdlib.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    int clock_gettime(clockid_t id, struct timespec *t) {
        const char *shift = getenv("CLOCK_SHIFT");
        long r = syscall(SYS_clock_gettime, id, t);
        if (shift[0] == '=') t->tv_sec = atol(shift + 1);
        else t->tv_sec += atol(shift);
        return (int)r;
    }

    /* time.sleep: until a time of the clock above, and libfaketime makes it right, too */
    int clock_nanosleep(clockid_t id, int flags, const struct timespec *t, struct timespec *left) {
        struct timespec now = {0, 0}, rest = *t;
        if (flags & TIMER_ABSTIME) clock_gettime(id, &now);
        rest.tv_sec -= now.tv_sec;
        rest.tv_nsec -= now.tv_nsec;
        if (rest.tv_nsec < 0) { rest.tv_nsec += 1000000000; rest.tv_sec--; }
        if (rest.tv_sec < 0) return 0;
        return syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &rest, left) ? EINTR : 0;
    }
"""


class WallClock:
    """The wall clock of the processes that are started from now on."""

    def __init__(self, shift: Path) -> None:
        self._shift = shift
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """Set it so many seconds ahead of this process's clock."""
        fd = os.open(self._shift, os.O_WRONLY | os.O_CREAT)
        os.pwrite(fd, struct.pack("q", seconds), 0)
        os.close(fd)


def build(where: Path) -> Path | None:
    """A library that stands between a process and its wall clock; None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source, library = where / "clock.c", where / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"],
        check=True,
        timeout=PATIENCE,
    )
    return library
