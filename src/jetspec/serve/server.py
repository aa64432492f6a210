"""Runs an app on a port until a signal: a socket, uvicorn, and the way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from jetspec.errors import OptionError

_BACKLOG = 512
_AFTERWARDS = 5.0  # seconds for the last chunks of requests that were ended


def bind(host: str, port: int) -> socket.socket:
    """A socket on host and port; port 0 takes a free one. Raises OptionError if it cannot be had."""
    if not 0 <= port <= 65535:
        raise OptionError(f"port must be from 0, which takes a free one, to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(_BACKLOG)  # now, as two may bind one address, but only one listens
        except BaseException:
            found.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"cannot listen on {host} port {port} ({reason}); choose others with --host and --port, port 0 "
            "takes a free one"
        ) from error
    return found


def run(app: FastAPI, listener: socket.socket, grace: float, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then let what is running go on for `grace` seconds.

    A second signal ends the process at once.
    """
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what matters is logged by `jetspec.serve`
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=int(grace + _AFTERWARDS) + 1,
    )
    _Server(config, app, grace, say).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, app: FastAPI, grace: float, say: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._desk, self._grace, self._say = app.state.service.desk, grace, say
        self._signalled = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals ask for a quiet end; uvicorn would raise them once more behind it."""
        if threading.current_thread() is not threading.main_thread():  # which alone is told of signals
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the intake, the second one the process."""
        if self._signalled:
            os._exit(128 + sig)
        self._signalled = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what is running, but not longer than the grace time."""
        self._desk.stop_intake()
        if self._desk.live:
            what = "1 answer is" if self._desk.live == 1 else f"{self._desk.live} answers are"
            self._say(f"stopping: {what} given {self._grace:g} s to end; Ctrl-C ends at once")
        timer = asyncio.get_running_loop().call_later(self._grace, self._desk.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
