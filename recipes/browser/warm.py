import base64
import json
import time
import urllib.request

import websocket


class Page:
    """The browser's first page, over the DevTools protocol."""

    def __init__(self, port=9222):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as reply:
            target = next(t for t in json.load(reply) if t["type"] == "page")
        self._ws = websocket.create_connection(target["webSocketDebuggerUrl"], timeout=600)
        self._last = 0
        self.call("Page.enable")

    def call(self, method, **params):
        """One call of the protocol; events that arrive meanwhile are dropped."""
        self._last += 1
        self._ws.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            said = json.loads(self._ws.recv())
            if said.get("id") == self._last:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']['message']}")
                return said["result"]

    def js(self, expression):
        """What a JavaScript expression comes to; a promise is awaited."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"].get("exception", {}).get("description", said["result"]))
        return said["result"].get("value")

    def open(self, url):
        """Goes to a page and waits until it is loaded."""
        said = self.call("Page.navigate", url=url)
        if said.get("errorText"):
            raise RuntimeError(f"{url}: {said['errorText']}")
        while self.js("document.readyState") != "complete" or self.js("location.href") == "about:blank":
            time.sleep(0.05)

    def screenshot(self):
        """The page as it looks, a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


page = Page()
page.open("file:///srv/page.html")
# The first picture starts what draws.
page.screenshot()
