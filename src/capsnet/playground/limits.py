"""What keeps the playground's server up: a bounded queue, known hosts, small bodies, headers."""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Answer = TypeVar("Answer")

MAX_QUEUE = 64
"""Requests that may wait for the networks; more are told to come back."""
MAX_BODY = 4 * 2**20
"""Bytes in the body of a request."""


class ModelQueue:
    """One thread for the networks, and a bounded number of requests waiting for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="networks")
        self._waiting = 0

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """Returns what the work returns; its ValueError becomes the caller's mistake."""
        if self._waiting >= MAX_QUEUE:
            raise HTTPException(429, "too many requests are waiting; try again in a second")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        finally:
            self._waiting -= 1


class BodyLimit:
    """Refuses a body larger than `MAX_BODY`, whether or not it says so in advance."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, if its body is small enough."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = JSONResponse(
            {"error": f"a request must have at most {MAX_BODY // 2**20} MiB"}, 413
        )
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > MAX_BODY:
            await refusal(scope, receive, send)
            return
        body = bytearray()
        is_whole = False
        while not is_whole:  # bodies are small enough to be read before the work starts
            try:
                message = await receive()
            except asyncio.CancelledError:  # Ctrl-C, and the rest of the body never came
                await JSONResponse({"error": "the server ends"}, 503)(scope, receive, send)
                return
            if message["type"] != "http.request":  # who asked has gone
                return
            body += message.get("body", b"")
            if len(body) > MAX_BODY:
                await refusal(scope, receive, send)
                return
            is_whole = not message.get("more_body", False)
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send)


class KnownHosts:
    """Refuses requests to other names, as a page elsewhere may point a name of its own at us."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app = app
        self.hosts = tuple(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, if it is to one of the names."""
        if scope["type"] != "lifespan" and "*" not in self.hosts:
            given = Headers(scope=scope).get("host", "")
            parts = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:\d*)?", given)
            if parts is None or parts[1].lower() not in self.hosts:
                sentence = f"the host must be {' or '.join(self.hosts)}"
                await JSONResponse({"error": sentence}, 400)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class SecurityHeaders:
    """Tells the browser to load nothing from elsewhere and to show the page in no other's frame."""

    HEADERS: ClassVar = {
        "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Adds the headers to every answer, which is never a part of a file."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.HEADERS.items():
                    headers[name] = value
            await send(message)

        if scope["type"] == "http":  # the files are small: whatever the range, all is sent
            scope["headers"] = [each for each in scope["headers"] if each[0] != b"range"]
        await self.app(scope, receive, send_with_headers)
