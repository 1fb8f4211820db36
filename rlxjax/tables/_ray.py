"""Run independent work items on the workers of a Ray cluster, which has one or more machines."""

import collections
import contextlib
import functools
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
from rlxjax.extras import require

Item = TypeVar("Item")
Result = TypeVar("Result")

#: The share of a processor that each worker reserves. The rest is left for Ray itself.
WORKER_CPUS = 0.8
#: Seconds to wait until a cluster answers, and seconds to wait until the resources for one worker are free.
ANSWER_S, WAIT_S = 20.0, 30.0
#: The number of times that an item is tried if its worker dies, for example because the worker runs out of memory.
TRIES = 3


def on_ray(
    make_worker: Callable[[], Callable[[Item], Result]],
    items: Sequence[Item],
    address: str | None = None,
    wait_s: float = WAIT_S,
    lost: Callable[[Item, str], Result] | None = None,
) -> Iterator[Result]:
    """Call a worker function for each item in Ray processes, one for each processor or GPU; yield results when ready.

    An error in a worker is raised here, and ends all workers. If a process dies, another process repeats its item, so
    the work on an item must be repeatable.

    Args:
        make_worker: a function that returns the worker. Each process calls it once. All data are sent by cloudpickle.
        items: the items. The worker is called with one item at a time.
        address: the address of the cluster, with the same meaning as in `connected`.
        wait_s: seconds to wait until the resources for one worker are free.
        lost: a function that returns the result of an item whose worker died at each try. After all other items are
            done, it is called with the item and the reason.

    Raises:
        ImportError: Ray is not installed.
        OSError: no cluster answers; the cluster ends; or the worker of an item died at each try, and `lost` is None.
        ValueError: no resources are free for a worker, or `connected` raises a ValueError.

    Examples:
        >>> list(on_ray(lambda: abs, []))
        []
    """
    if not items:
        return
    with connected(address) as ray:
        died = ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError
        waiting, dead, running = collections.deque((number, 1) for number in range(len(items))), [], {}
        try:
            share, most = _share_of(ray, wait_s)
            made = ray.put((_dumps(make_worker), os.getcwd(), sys.path))
            # By default, Ray repeats without end an item that takes too much memory.
            call = ray.remote(max_retries=0, max_calls=0, **share)(_call)
            while waiting or running:
                while waiting and len(running) < 2 * most:  # a second item waits at each worker
                    number, tried = waiting.popleft()
                    running[call.remote(made, _dumps(items[number]))] = number, tried
                (done, *_), _ = ray.wait([*running])
                number, tried = running.pop(done)
                try:
                    result, error = _loads(ray.get(done))
                except died:
                    (waiting if tried < TRIES else dead).append((number, tried + 1))
                    continue
                if error is not None:
                    raise error
                yield result
        except ray.exceptions.RayError as reason:
            raise OSError(f"Ray ended before the work was done ({said(reason)})") from reason
        finally:
            with contextlib.suppress(ray.exceptions.RayError):
                for one in running:  # empty unless an error ended the work
                    ray.cancel(one, force=True)
    dead = [items[number] for number, _ in sorted(dead)]
    why = f"its worker died {TRIES} times: it was killed, or ran out of memory"
    if dead and lost is None:
        raise OSError(f"{len(dead)} of {len(items)} items are not done, the first {dead[0]}: {why}")
    yield from (lost(item, why) for item in dead if lost is not None)


@contextlib.contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Connect to a Ray cluster without log output, and yield the module `ray`.

    Without an `address`, the cluster is the cluster of this process, else the cluster at `RAY_ADDRESS`, else a new
    cluster on this machine. If the context opened the connection, the end of the context closes the connection.

    Raises:
        ImportError: Ray is not installed.
        OSError: no cluster answers. The message is one line.
        ValueError: the process is connected to another cluster, or the address is for Ray Client.
    """
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    os.environ.update({name: value for name, value in quiet.items() if name not in os.environ})
    require("ray", "scale")
    import ray
    from ray.util.client import ray as client

    asked = address or ("" if ray.is_initialized() else os.environ.get("RAY_ADDRESS", ""))
    if "://" in asked or client.is_connected():
        head = "on a machine of the cluster, give the host:port of its head"
        raise ValueError(f"{asked or 'ray://'}: an address for Ray Client, which rlxjax cannot use; {head}")
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", own):
            raise ValueError(f"{address}: this process is connected to the Ray cluster at {own} already")
        yield ray
        return
    address, options = asked or "local", {}
    if address == "local":
        options: dict[str, Any] = {"num_cpus": worker_count(), "include_dashboard": False}
    else:
        _check_answer(address)
    error_output = os.dup(2)
    try:  # the compiled code of Ray writes its log level to standard error
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except (ConnectionError, RuntimeError, ValueError) as reason:
        raise OSError(f"{address}: Ray cannot be started or joined ({said(reason)})") from None
    finally:
        os.dup2(error_output, 2)
        os.close(error_output)
    try:
        yield ray
    finally:
        ray.shutdown()


def _call(made: tuple[bytes, str, Sequence[str]], item: bytes) -> bytes:
    """Return the worker's result and error for an item, pickled. One of the two is None. Ray processes call this."""
    try:
        return _dumps((_worker(*made[:2], tuple(made[2]))(_loads(item)), None))
    except Exception as error:  # noqa: BLE001
        error.add_note(f"In a process of Ray on {socket.gethostname()}:\n{traceback.format_exc()}")
        return _dumps((None, error))


@functools.lru_cache(maxsize=1)
def _worker(made: bytes, folder: str, modules: tuple[str, ...]) -> Callable[[Any], Any]:
    """Return the worker of this process. The call for the first item makes the worker."""
    with contextlib.suppress(OSError):
        os.chdir(folder)  # the start of relative paths
    sys.path += [folder for folder in modules if folder not in sys.path]
    return _loads(made)()


def _dumps(value: Any) -> bytes:
    from ray import cloudpickle

    return cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]


def _loads(dumped: bytes) -> Any:
    with jax.enable_x64(True):  # so that float64 stays float64
        return pickle.loads(dumped)


def _check_answer(address: str) -> None:
    """Check that a cluster answers at an address. The check has a time limit, because Ray itself waits many minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-c", "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)", address]
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except subprocess.TimeoutExpired:
        raise OSError(f"{address}: no Ray cluster answers there within {ANSWER_S:.0f} s") from None
    except subprocess.CalledProcessError as reason:
        last = reason.stderr.strip().splitlines()[-1:]
        raise OSError(f"{address}: no Ray cluster can be joined there ({' '.join(last)[:160]})") from None
    except (OSError, ValueError) as reason:
        raise OSError(f"{address}: no Ray cluster answers there ({said(reason)})") from None


def _share_of(ray: Any, wait_s: float) -> tuple[dict[str, float], int]:
    """Wait until the resources for one worker are free. Return these resources and the largest number of workers."""
    resources = ray.cluster_resources()
    cpus, gpus = (int(resources.get(name, 0)) for name in ("CPU", "GPU"))
    gpus = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else gpus
    asked = {"CPU": WORKER_CPUS} | ({"GPU": 1.0} if gpus else {})
    group = ray.util.placement_group([asked])
    is_free = group.wait(wait_s)
    ray.util.remove_placement_group(group)
    if not is_free:
        free = {n: f"{ray.available_resources().get(n, 0):g} of {resources.get(n, 0):g} free" for n in asked}
        each = " and ".join(f"{amount:g} {name} ({free[name]})" for name, amount in asked.items())
        raise ValueError(f"Ray has no free resources for a worker, which needs {each} on one machine")
    return {f"num_{name.lower()}s": amount for name, amount in asked.items()}, max(1, gpus or cpus)


def said(reason: BaseException) -> str:
    """Return the message of an error from Ray or pyarrow, shortened to one line."""
    return " ".join(str(reason).split())[:160].rstrip(".")
