"""The processes of one job that choose together: all run the same programs, in the same order, as often."""

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._caller import Caller, FailedError

#: Bytes that each process says at once.
BLOCK_BYTES = 4096
#: Seconds that a process waits for what the others say: one may compile meanwhile.
ANSWER_S = 600.0


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
