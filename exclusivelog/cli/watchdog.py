"""What `run` starts beside its command: a process that kills the command's process group if `run`
has died. `leading.Watchdog` starts it, and ends it before its standard input, a pipe, ends.

It uses SIGKILL, because the lock is free at that moment: another process may lead already.
"""

import os
import signal


def main() -> None:
    """Read the group's id; kill the group at the end of the pipe."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a service manager sends it to all processes
    group = b""
    while data := os.read(0, 100):
        group += data
    if group:  # else no command was started
        os.killpg(int(group), signal.SIGKILL)


if __name__ == "__main__":
    main()
