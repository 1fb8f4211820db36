"""Independent pieces of work on a pool of Ray Data actors: of this machine, or of the machines of a cluster."""

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from rlxjax._chunks import worker_count

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Processors that a worker asks for: a pool of as many workers as processors leaves some for what else Ray does.
WORKER_CPUS = 0.8
#: Seconds within which a cluster has to answer, and to have room for one worker.
ANSWER_S, ROOM_S = 20.0, 30.0
#: Tries of an item whose worker dies, as of one that takes more memory than there is.
TRIES = 3


def on_ray(
    make_worker: Callable[[], Callable[[Item], Result]],
    items: Sequence[Item],
    address: str | None = None,
    room_s: float = ROOM_S,
    lost: Callable[[Item, str], Result] | None = None,
) -> Iterator[Result]:
    """Call a worker for each item, on as many Ray actors as there are processors or GPUs, and yield what it returns.

    The results come in the order in which they are done. What a worker raises is raised here, and ends all of them.
    An actor that dies is started anew, and its item is done again, a few times: doing an item twice has to do no harm.

    Args:
        make_worker: called once in each actor; travels there by cloudpickle, as items and results do.
        items: the pieces of work.
        address: of the cluster, as of `connected`.
        room_s: seconds within which one worker has to find room.
        lost: called once all others are done, with an item whose worker died each time and a sentence; what it returns
            is yielded.

    Raises:
        ImportError: Ray is not installed.
        OSError: no cluster answers, or it ends; or items whose worker died each time, unless `lost` is given; one line.
        ValueError: no worker finds room, or the cluster cannot be used, as `connected` says; one line.

    Examples:
        >>> list(on_ray(lambda: abs, []))
        []
    """
    if not items:
        return
    with connected(address) as ray:
        share, most = _share_of(ray, room_s)
        dumped = [{"number": number, "item": _dumps(item)} for number, item in enumerate(items)]
        pool = ray.data.ActorPoolStrategy(
            min_size=1,
            max_size=min(most, len(items)),
            initial_size=min(most, len(items)),
            max_tasks_in_flight_per_actor=1,
        )
        blocks = ray.data.from_items(dumped, override_num_blocks=len(dumped))
        made = (_dumps(make_worker), os.getcwd(), sys.path)
        options = share | {"max_restarts": -1, "max_task_retries": TRIES - 1}
        results, left = blocks.map(_Actor, fn_constructor_args=made, compute=pool, **options), dict(enumerate(items))
        with _ended_cluster(ray):
            for batch in results.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
                for number, dumped_result in zip(batch["number"].tolist(), batch["result"], strict=True):
                    result, error = _loads(dumped_result)
                    if error is not None:
                        raise error
                    del left[number]
                    yield result
        why = f"its worker died {TRIES} times: it was killed, or ran out of memory"
        if left and lost is None:
            raise OSError(
                f"{len(left)} of {len(items)} pieces of work are not done, the first {[*left.values()][0]}: {why}"
            )
        yield from (lost(item, why) for item in left.values() if lost is not None)


@contextlib.contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Give Ray, connected to a cluster and quiet.

    That is what this process is connected to, the cluster at an address, that of `RAY_ADDRESS`, or one that is started
    on this machine, which alone is shut down at the end.

    Raises:
        ImportError: Ray is not installed.
        OSError: no cluster answers; one line.
        ValueError: the process is connected to another cluster, or the address is of Ray's client; one line.
    """
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    os.environ.update({name: value for name, value in quiet.items() if name not in os.environ})
    try:
        import ray
        import ray.data
    except ImportError:
        raise ImportError("ray is not installed; get it with `pip install 'rlxjax[scale]'`") from None
    asked = address or ("" if ray.is_initialized() else os.environ.get("RAY_ADDRESS", ""))
    if "://" in asked or ray.util.client.ray.is_connected():
        raise ValueError(
            f"{asked or 'ray://'}: Ray Data does not run over Ray's client; give the host:port of the cluster's head, "
            "from a machine of the cluster"
        )
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", own):
            raise ValueError(f"{address}: this process is connected to the Ray cluster at {own} already")
        with _quiet(ray):
            yield ray
        return
    address = asked or "local"
    options: dict[str, Any] = {}
    if address == "local":
        options = {"num_cpus": worker_count(), "include_dashboard": False}
    else:
        _check_answer(address)
    try:
        with _mute_stderr():
            ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except (ConnectionError, RuntimeError, ValueError) as reason:
        raise OSError(f"{address}: Ray cannot be started or joined ({_line(reason)})") from None
    try:
        with _quiet(ray):
            yield ray
    finally:
        ray.shutdown()


class _Actor:
    """What runs in an actor: a worker, made at its first item, whose errors travel as results."""

    def __init__(self, made: bytes, folder: str, modules: Sequence[str]) -> None:
        self._made, self._folder, self._modules, self._worker = made, folder, modules, None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._worker is None:
                with contextlib.suppress(OSError):
                    os.chdir(self._folder)  # of which relative paths are
                sys.path += [folder for folder in self._modules if folder not in sys.path]
                self._worker = _loads(self._made)()
            return {"number": row["number"], "result": _dumps((self._worker(_loads(row["item"])), None))}
        except Exception as error:  # noqa: BLE001
            error.add_note(f"In a Ray actor on {socket.gethostname()}:\n{traceback.format_exc()}")
            return {"number": row["number"], "result": _dumps((None, error))}


def _dumps(value: Any) -> bytes:
    from ray import cloudpickle

    return cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]


def _loads(dumped: bytes) -> Any:
    with jax.enable_x64(True):  # so that arrays of float64 stay what they are
        return pickle.loads(dumped)


def _check_answer(address: str) -> None:
    """Check that a cluster can be joined at an address, in a process that can be ended: Ray asks for many minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError) as reason:
        raise OSError(f"{address}: no Ray cluster answers there ({_line(reason)})") from None
    join = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)"
    try:
        command = [sys.executable, "-c", join, address]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"{address}: no Ray cluster answers there within {ANSWER_S:.0f} s") from None
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1:]
        raise OSError(f"{address}: no Ray cluster can be joined there ({' '.join(reason)[:160]})")


def _share_of(ray: Any, room_s: float) -> tuple[dict[str, float], int]:
    """Return what a worker asks for and how many workers there may be, once there is room for one.

    Raises:
        ValueError: there is none; one line.
    """
    resources = ray.cluster_resources()
    cpus, gpus = resources.get("CPU", 0), int(resources.get("GPU", 0))
    share = {"num_cpus": WORKER_CPUS}
    if gpus and os.environ.get("JAX_PLATFORMS") != "cpu":
        share["num_gpus"] = 1.0
    else:
        gpus = 0
    asked = {name.removeprefix("num_").removesuffix("s").upper(): amount for name, amount in share.items()}
    room = ray.util.placement_group([asked])
    has_room = room.wait(room_s)
    ray.util.remove_placement_group(room)
    if not has_room:
        free = ray.available_resources()
        each = " and ".join(
            f"{amount:g} {name} ({free.get(name, 0):g} of {resources.get(name, 0):g} free)"
            for name, amount in asked.items()
        )
        raise ValueError(f"Ray has no room for a worker, which needs {each} on one machine")
    return share, max(1, gpus or int(cpus))


@contextlib.contextmanager
def _ended_cluster(ray: Any) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as reason:
        raise OSError(f"Ray ended before the work did ({_line(reason)})") from reason


@contextlib.contextmanager
def _mute_stderr() -> Iterator[None]:
    """Drop what compiled code of this process writes to standard error: Ray says there what log level it has."""
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@contextlib.contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Let Ray Data print nothing, neither progress nor log, and go on where a worker dies each time."""
    context, log = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    before = context.enable_progress_bars, context.max_errored_blocks, log.level
    context.enable_progress_bars, context.max_errored_blocks = False, -1
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        context.enable_progress_bars, context.max_errored_blocks, level = before
        log.setLevel(level)


def _line(reason: BaseException) -> str:
    return " ".join(str(reason).split())[:160].rstrip(".")
