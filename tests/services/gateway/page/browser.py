"""Headless Chromium, driven over a pipe by its DevTools protocol: no port is opened and no library is needed."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tests.programs import require
from tests.waiting import WAIT_SECONDS

READ_BYTES = 1 << 26
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-pipe",
    "about:blank",
)


class Browser:
    """One page of a browser. `faults` are what its console and its network reported as errors."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._session = ""
        self.faults: list[str] = []
        self.requested: list[str] = []

    async def attach(self) -> None:
        """Attach to the first page."""
        targets = (await self.call("Target.getTargets"))["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        told: asyncio.Future[dict[str, Any]]
        told = self._asked[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": number, "method": method, "params": parameters, **session}
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(WAIT_SECONDS):
            return await told

    async def read(self) -> None:
        """Read answers and events until the browser ends."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                self._take(json.loads((await self._reader.readuntil(b"\0"))[:-1]))
        for told in self._asked.values():
            told.set_exception(EOFError("the browser ended"))

    def _take(self, message: dict[str, Any]) -> None:
        told = self._asked.pop(message.get("id", 0), None)
        if told is not None and not told.done():
            if "error" in message:
                told.set_exception(RuntimeError(message["error"]["message"]))
            else:
                told.set_result(message["result"])
        method, values = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requested.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(values["exceptionDetails"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.faults.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")

    async def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a page in a window of that size, and return when it is loaded."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(WAIT_SECONDS):
            await self._loaded.wait()

    async def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, condition: str, seconds: float = WAIT_SECONDS) -> None:
        """Return when an expression is true; it is looked at after each change of the page."""
        await self.value(
            f"""new Promise((resolve, reject) => {{
                const holds = () => Boolean({condition});
                if (holds()) return resolve(true);
                const late = setTimeout(() => {{
                    watch.disconnect();
                    reject(new Error("it did not become true on: " + document.body.innerText));
                }}, {1000 * seconds});
                const watch = new MutationObserver(() => {{
                    if (!holds()) return;
                    watch.disconnect();
                    clearTimeout(late);
                    resolve(true);
                }});
                watch.observe(document.body, {{subtree: true, childList: true, characterData: true, attributes: true}});
            }})"""
        )

    async def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Start Chromium, and end it."""
    program = require("chromium", "chromium-browser", "google-chrome")
    loop = asyncio.get_running_loop()
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The browser reads its descriptor 3 and writes its descriptor 4.
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash"),
            *(program, *FLAGS, f"--user-data-dir={folder}"),
            pass_fds=(to_browser, from_browser),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "HOME": folder},
        )
        os.close(to_browser)
        os.close(from_browser)
        reader = asyncio.StreamReader(limit=READ_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(to_us, "rb"))
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(from_us, "wb"))
        page = Browser(reader, asyncio.StreamWriter(transport, protocol, None, loop))
        reading = asyncio.create_task(page.read())
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await page.attach()
            yield page
            with suppress(EOFError):
                await page.call("Browser.close")
        finally:
            transport.close()
            with suppress(ProcessLookupError):
                if process.returncode is None:
                    try:
                        await asyncio.wait_for(process.wait(), WAIT_SECONDS)
                    except TimeoutError:
                        process.kill()
            await process.wait()
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
