"""A page in a real browser, driven through its debugging protocol: what a reader sees, hovers, taps and types."""

import base64
import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator

#: What Debian, Ubuntu and others call it.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60.0
_FLAGS = "headless=new no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-background-networking"
_FLAGS += " hide-scrollbars remote-debugging-port=0"


def browser_path() -> str | None:
    """Return where a browser of the Chromium family is, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """An open page, and what the browser told since it was opened: `events`, by method and parameters."""

    def __init__(self, socket):
        self._socket, self._numbers = socket, itertools.count(1)
        self._session: str | None = None
        self.events: list[tuple[str, dict]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        self._socket.send(json.dumps({"id": number, "method": method, "params": params, **session}))
        while True:
            message = self._receive()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def open(self, path):
        """Load a file and wait until it is whole."""
        self.events.clear()
        self.send("Page.navigate", url=pathlib.Path(path).resolve().as_uri())
        ends_at = time.monotonic() + START_S
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._receive(ends_at - time.monotonic())

    def run(self, script):
        """Return the value of an expression of JavaScript."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def size(self, width, height, is_phone=False):
        """Set the size of the window, in pixels of CSS."""
        scale = 2 if is_phone else 1
        of = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone}
        self.send("Emulation.setDeviceMetricsOverride", **of)
        self.send("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    def media(self, medium="", scheme="light"):
        """Choose screen or print, light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=medium, features=features)

    def move(self, x, y):
        """Move the mouse."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x, y):
        """Touch a place with a finger, and let go."""
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key):
        """Press a key by its name."""
        codes = {"Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def pdf(self):
        """Return the page as it is printed."""
        printed = self.send("Page.printToPDF", printBackground=True, preferCSSPageSize=False)
        return base64.b64decode(printed["data"])

    def requests(self):
        """Return the addresses of all that the page asked for."""
        return [told["request"]["url"] for method, told in self.events if method == "Network.requestWillBeSent"]

    def complaints(self):
        """Return what the browser's console holds: errors, warnings, exceptions."""
        found = [told["entry"]["text"] for method, told in self.events if method == "Log.entryAdded"]
        others = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return found + [str(told) for method, told in self.events if method in others]

    def _receive(self, timeout=START_S):
        message = json.loads(self._socket.recv(timeout=timeout))
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message


@contextlib.contextmanager
def browser_page(path: str) -> Iterator[Page]:
    """Start a browser that keeps nothing, yield a page of it, and end it."""
    from websockets.sync.client import connect

    # What the browser still writes while it ends is in nobody's way.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started = subprocess.Popen(
            [path, *(f"--{flag}" for flag in _FLAGS.split()), f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port, address = _address(pathlib.Path(folder), started)
            with connect(f"ws://127.0.0.1:{port}{address}", max_size=None, proxy=None) as socket:
                yield Page(socket)
        finally:
            started.terminate()
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def _address(folder: pathlib.Path, started: subprocess.Popen) -> list[str]:
    """Return the port and the path at which a browser listens, once it does."""
    told, ends_at = folder / "DevToolsActivePort", time.monotonic() + START_S
    while time.monotonic() < ends_at:
        if started.poll() is not None:
            raise RuntimeError(f"the browser ended with status {started.returncode}")
        if told.exists() and len(lines := told.read_text().splitlines()) == 2:
            return lines
        time.sleep(0.05)
    raise RuntimeError(f"the browser did not start within {START_S:g} s")
