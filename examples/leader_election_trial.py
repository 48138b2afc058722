"""A trial of leader_election.py: leaders are killed and stopped, and the log is judged.

    $ python examples/leader_election_trial.py

The parent makes two leaders fail:

1. SIGKILL. The kernel notifies the others at once, and the first in the queue leads.
2. SIGSTOP, as an example of any long pause. The leader sends no heartbeat for longer than its
   `keepalive`, and the next worker leads. When the former leader resumes, it does not know this
   until its next send is refused. The refused decision is not in the log.

In the end the parent reads the log, and checks that there were never two leaders at a time.
"""

from __future__ import annotations

import argparse
import os
import signal
import textwrap
import time
from collections import defaultdict
from multiprocessing.context import SpawnProcess
from typing import Any

from leader_election import DECISIONS, LOSSES, work
from processes import PATIENCE, directory, never_interleaved, processes, run, until, verdict

import exclusivelog as xl

REIGN = 0.3  # seconds until a leader is killed or stopped


class Story:
    """What happens to the leaders, printed as it happens."""

    def __init__(self, engine: xl.Engine, workers: dict[str, SpawnProcess]) -> None:
        self.topic = engine.topic(DECISIONS)
        self.epoch = self.topic.epoch
        self._engine, self._workers = engine, workers
        self._decisions = self.topic.reader("latest")
        self._losses = engine.topic(LOSSES).reader("latest", deserializer="json")
        self._begun = time.monotonic()

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begun:6.3f} s  {what}", flush=True)

    def await_leader(self, patience: float = PATIENCE) -> str:
        """Wait for the first decision under a new epoch, and a little longer; return the leader."""
        for message in self._decisions.follow(patience):
            if message.epoch > self.epoch:
                break
        else:
            raise TimeoutError(f"no worker led after epoch {self.epoch} within {patience:g} s")
        self.epoch = message.epoch
        self._say(f"{message.producer_name} leads, epoch {self.epoch}")
        time.sleep(REIGN)
        return message.producer_name

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._workers[name].kill()
        self._say(f"{name} is killed")

    def stop(self, name: str) -> None:
        """SIGSTOP, but not inside the ledger's critical section: a process that is stopped in these
        microseconds blocks all writers until it resumes or `kill_stalled` ends it."""
        pid = self._workers[name].pid or 0

        def stopped_outside() -> bool:
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED)
            inside = self._engine.inside()
            if inside is not None and inside.pid == pid:
                os.kill(pid, signal.SIGCONT)
                return False
            return True

        until(f"{name} is stopped", stopped_outside)
        self._say(f"{name} is stopped")

    def go_on(self, name: str) -> dict[str, Any]:
        """SIGCONT; return what the worker reports about its loss."""
        os.kill(self._workers[name].pid or 0, signal.SIGCONT)
        self._say(f"{name} resumes")
        loss: dict[str, Any] = self._losses.read_next(PATIENCE).value
        self._say(f"{name} could not send {loss['decision']!r}:")
        print(textwrap.indent(textwrap.fill(loss["error"], 88), " " * 10))
        return loss


def judge(
    engine: xl.Engine, before: int, killed: str, zombie: str, loss: dict[str, Any]
) -> dict[str, bool]:
    """Check the claims against the log."""
    messages = list(engine.topic(DECISIONS).reader())
    reigns = defaultdict[int, list[xl.Message]](list)
    for message in messages:
        reigns[message.epoch].append(message)
    ends = {e.epoch: e for e in engine.history(DECISIONS) if e.kind == "evict" and e.epoch > before}
    print("\nepoch  leader     decisions  offsets    end")
    for epoch, said in reigns.items():
        if epoch > before:
            offsets = f"{said[0].offset}-{said[-1].offset}"
            end = f"found {ends[epoch].reason}" if epoch in ends else "leads"
            print(f"{epoch:5}  {said[0].producer_name:9}  {len(said):9}  {offsets:9}  {end}")
    print()
    lost = [(e.reason, e.source["engine_name"]) for e in ends.values() if e.source is not None]
    return {
        "the epochs never interleave, and each has one writer": never_interleaved(messages),
        f"{killed} was found dead, and {zombie} hung": lost == [("dead", killed), ("hung", zombie)],
        f"{zombie} learned its loss: lost, state, error": loss["told"]
        and loss["state"] == "fenced",
        "the decision that was refused is not in the log": loss["decision"].encode()
        not in {message.value for message in messages},
    }


def main() -> int:
    """Run the example, and check the log."""
    parser = argparse.ArgumentParser(description="Leader election among processes.")
    parser.add_argument("--workers", type=int, default=3, help="how many, at least 3 (default: 3)")
    parser.add_argument(
        "--keepalive",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="of silence until a waiter takes over (default: 1)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        metavar="SECONDS",
        help="to wait for the third leader (default: %(default)g)",
    )
    parser.add_argument("--path", help="the ledger's directory, kept (default: a temporary one)")
    options = parser.parse_args()
    if options.workers < 3:
        parser.error("--workers: at least 3, because one is killed and one is stopped")
    names = [f"worker-{number}" for number in range(1, options.workers + 1)]
    with directory(options.path) as path, xl.open(path, "parent") as engine, processes() as start:
        before = engine.topic(DECISIONS).epoch
        workers = {name: start(name, work, path, name, options.keepalive) for name in names}
        story = Story(engine, workers)
        killed = story.await_leader()
        until("the others wait", lambda: len(story.topic.waiters) == options.workers - 1)
        story.kill(killed)
        zombie = story.await_leader()
        story.stop(zombie)
        story.await_leader(options.patience)
        loss = story.go_on(zombie)
        return verdict(judge(engine, before, killed, zombie, loss))


if __name__ == "__main__":
    run(main)
