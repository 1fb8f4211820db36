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

#: What Debian, Ubuntu and others call it.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60.0
_FLAGS = "headless=new no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-background-networking"
_FLAGS += " hide-scrollbars remote-debugging-port=0"
_KEYS = {"Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36}


def browser_path():
    """Return where a browser of the Chromium family is, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """An open page, and what the browser told since it was opened: `events`, by method and parameters."""

    def __init__(self, socket):
        self._socket, self._numbers, self._session, self.events = socket, itertools.count(1), {}, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params, **self._session}))
        while (message := self._receive()).get("id") != number:
            pass
        assert "error" not in message, (method, message)
        return message["result"]

    def open(self, path):
        """Load a file and wait until it is whole."""
        self.events.clear()
        self.send("Page.navigate", url=pathlib.Path(path).resolve().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._receive()

    def run(self, script):
        """Return the value of an expression of JavaScript."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def size(self, width, height, is_phone=False):
        """Set the size of the window, in pixels of CSS."""
        of = {"width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone}
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
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def press(self, key):
        """Press a key by its name."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key])

    def pdf(self):
        """Return the page as it is printed."""
        printed = self.send("Page.printToPDF", printBackground=True, preferCSSPageSize=False)
        return base64.b64decode(printed["data"])

    def told(self, *methods):
        """Return what the browser told by some methods: what was asked for, the console's errors and warnings."""
        return [parameters for method, parameters in self.events if method in methods]

    def _receive(self):
        message = json.loads(self._socket.recv(timeout=START_S))
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message


@contextlib.contextmanager
def browser_page(path):
    """Start a browser that keeps nothing, yield a page of it, and end it."""
    from websockets.sync.client import connect

    # What the browser still writes while it ends is in nobody's way.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [path, *(f"--{flag}" for flag in _FLAGS.split()), f"--user-data-dir={folder}", "about:blank"]
        started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        told, ends_at = pathlib.Path(folder) / "DevToolsActivePort", time.monotonic() + START_S
        try:
            while not told.exists() or len(lines := told.read_text().splitlines()) < 2:
                assert started.poll() is None, f"the browser ended with status {started.returncode}"
                assert time.monotonic() < ends_at, f"the browser did not start within {START_S:g} s"
                time.sleep(0.05)
            with connect(f"ws://127.0.0.1:{lines[0]}{lines[1]}", max_size=None, proxy=None) as socket:
                yield Page(socket)
        finally:
            started.terminate()
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
