"""Calls of a user's programs, which may never end, and the processes of one job that choose together.

All processes run the same programs, in the same order, as often.
"""

import functools
import json
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlxjax._chunks import with_callers_settings

R = TypeVar("R")

#: Bytes that each process says at once.
BLOCK_BYTES = 4096
#: Seconds that a process waits for what the others say: one may compile meanwhile.
ANSWER_S = 600.0


class FailedError(Exception):
    """A call gave no result; the text says why, and goes on from the name of what was called."""


class Caller:
    """Makes calls one after another on a thread of its own, under the caller's settings for JAX.

    There nothing is traced, and the process goes on where a call does not end: the thread is left to it.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] | None = None
        self._answers: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked is not None:
            self._asked.put(None)
        self._asked = None

    def __call__(self, call: Callable[[], R], limit_s: float) -> R:
        """Return what a call gives; a call that raises, exits, or does not end in time is a `FailedError`."""
        if self._asked is None:
            self._asked, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            serve = with_callers_settings(_serve)
            threading.Thread(target=serve, args=(self._asked, self._answers), daemon=True).start()
        self._asked.put(call)
        try:
            result, failed = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self.__exit__()
            raise FailedError(f"did not end within {limit_s:g} s") from None
        if failed:
            raise FailedError(failed)
        return result


def _serve(asked: "queue.SimpleQueue[Any]", answers: "queue.SimpleQueue[tuple[Any, str]]") -> None:
    while (call := asked.get()) is not None:
        try:
            answers.put((call(), ""))
        except BaseException as error:  # noqa: BLE001 - a user's program may raise anything, and may exit
            reason = str(error).strip().partition("\n")[0]
            answers.put((None, f"raised {type(error).__name__}{f': {reason}' if reason else ''}"))
        del call


class Party(NamedTuple):
    """The processes whose devices hold the arguments of a choice.

    Attributes:
        devices: one of each process, in the order of the processes; none where this process chooses alone.
    """

    devices: tuple[Any, ...] = ()

    @classmethod
    def of(cls, devices: Iterable[Any]) -> "Party":
        """Return the processes that some devices belong to."""
        firsts: dict[int, Any] = {}
        for device in sorted(devices, key=lambda own: (own.process_index, own.id)):
            firsts.setdefault(device.process_index, device)
        return cls(tuple(firsts.values())) if len(firsts) > 1 else ALONE

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that decides."""
        return not self.devices or self.devices[0].process_index == jax.process_index()

    def of_first(self, ask: Callable[[], Any]) -> Any:
        """Return what the first process answers, in words of JSON; all raise the `ValueError` that it raises."""
        if not self.devices:
            return ask()
        said = None
        if self.is_first:
            try:
                said = [True, ask()]
            except ValueError as error:
                said = [False, str(error)]
        is_answer, answer = self.gathered(said)[0]
        if not is_answer:
            raise ValueError(answer)
        return answer

    def first_text(self, said: str) -> str:
        """Return the first text that a process says which is not empty."""
        return next(filter(None, self.gathered(said)), "")

    def gathered(self, said: Any) -> list[Any]:
        """Return what each process says, in words of JSON; a process that has ended is a `ValueError`."""
        if not self.devices:
            return [said]
        content = json.dumps(said).encode()
        framed = len(content).to_bytes(8, "big") + content
        framed += bytes(-len(framed) % BLOCK_BYTES)
        found = [b""] * len(self.devices)
        try:
            with Caller() as caller:
                while not all(own and len(own) >= 8 + int.from_bytes(own[:8], "big") for own in found):
                    start = len(found[0])
                    block = framed[start : start + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
                    blocks = caller(functools.partial(_exchanged, self.devices, block), ANSWER_S)
                    found = [own + more for own, more in zip(found, blocks, strict=True)]
        except FailedError as reason:
            said = f"has ended, or does not answer: exchanging {reason}"
            raise ValueError(f"args: another process of this job, which holds a part of them, {said}") from None
        return [json.loads(own[8 : 8 + int.from_bytes(own[:8], "big")]) for own in found]


#: A process that chooses by itself.
ALONE = Party()


def _exchanged(devices: tuple[Any, ...], block: bytes) -> list[bytes]:
    """Return the blocks of all processes."""
    split, everywhere = _shardings(devices)
    own = np.frombuffer(block, np.uint8)[None]
    given = jax.make_array_from_process_local_data(split, own, (len(devices), len(block)))
    found = jax.device_put(given, everywhere)
    return [one.tobytes() for one in np.asarray(found.addressable_data(0))]


@functools.lru_cache(maxsize=8)
def _shardings(devices: tuple[Any, ...]) -> tuple[NamedSharding, NamedSharding]:
    mesh = Mesh(np.array(devices), ("process",))
    return NamedSharding(mesh, PartitionSpec("process")), NamedSharding(mesh, PartitionSpec())
