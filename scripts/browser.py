"""A headless Chromium, told what to do over a pipe: nothing but Python's own library is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ["chromium", "chromium-browser", "google-chrome"]
PATIENCE = 60.0


class BrowserError(Exception):
    """The browser does not do what it is told, or the page does what it must not."""


def installed():
    """The path of a Chromium, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of one browser. What the page complains of is in `errors`, what it asked for in `asked`."""

    def __init__(self, program):
        self.errors = []
        self.asked = []
        self._number = 0
        self._instead = b""
        self._buffer = b""
        self._profile = tempfile.TemporaryDirectory(prefix="shoal-browser-", ignore_cleanup_errors=True)
        from_us, self._out = os.pipe()
        self._in, to_us = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}", "about:blank",
        ]
        # The browser reads from descriptor 3 and writes to descriptor 4.
        line = f'exec "$@" 3<&{from_us} 4>&{to_us}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", program, *flags],
            pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._session = None
        target = self._page_target()
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network"]:
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def _page_target(self):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            targets = self.call("Target.getTargets")["targetInfos"]
            pages = [target["targetId"] for target in targets if target["type"] == "page"]
            if pages:
                return pages[0]
        raise BrowserError("the browser opens no page")

    def call(self, method, **parameters):
        """Has the browser do something and returns what it answers."""
        number = self._send(method, **parameters)
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]

    def _send(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._number

    def _next(self, deadline):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._in, 1 << 16) if ready else b""
            if not chunk:
                raise BrowserError("the browser does not answer")
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method, said):
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(value.get("value")) for value in said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(said["request"]["url"])
        elif method == "Fetch.requestPaused":
            body = base64.b64encode(self._instead).decode()
            self._send("Fetch.fulfillRequest", requestId=said["requestId"], responseCode=200, body=body)

    def answer(self, pattern, body):
        """From now on gives this, instead of what would come, to who asks for addresses like the pattern."""
        self._instead = body
        self.call("Fetch.enable", patterns=[{"urlPattern": pattern}])

    def size(self, width, height, scale=1.0, dark=False):
        """Gives the page a screen."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=width < 500)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url):
        """Goes to a page."""
        answer = self.call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise BrowserError(f"{url}: {answer['errorText']}")

    def value(self, expression):
        """What an expression comes to in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    def until(self, expression):
        """Waits until an expression is true in the page."""
        deadline = time.monotonic() + PATIENCE
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise BrowserError(f"it never came to this: {expression}")
            time.sleep(0.1)

    def press(self, key, code, text=""):
        """Presses a key."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        if text:
            about["text"] = text
        self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def accessible(self):
        """Role and name of everything that a screen reader is told of."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        told = [node for node in nodes if not node.get("ignored")]
        value = lambda node, field: node.get(field, {}).get("value", "")
        return [(value(node, "role"), value(node, "name")) for node in told]

    def picture(self, path, whole=False):
        """Writes what the page looks like as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole,
                           optimizeForSpeed=False, **({"clip": self._whole()} if whole else {}))
        with open(path, "wb") as file:
            file.write(base64.b64decode(answer["data"]))

    def _whole(self):
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("document.documentElement.clientWidth")
        return {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
