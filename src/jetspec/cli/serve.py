"""`jetspec serve`: the model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import gc
import importlib.util
import logging
import math
import os
from typing import Annotated

import typer

from jetspec.cli import options
from jetspec.cli.loading import budget_of, open_model
from jetspec.cli.screen import Screen, printable
from jetspec.errors import OptionError

_KEY = "JETSPEC_API_KEY"

Host = Annotated[
    str, typer.Option("--host", metavar="NAME", help="The address to listen on; 0.0.0.0 is all of them.")
]
Port = Annotated[int, typer.Option("--port", metavar="N", help="The port; 0 takes a free one.")]
MaxBatch = Annotated[int, typer.Option("--max-batch", metavar="N", help="Answers decoded at once.")]
MaxQueue = Annotated[
    int,
    typer.Option(
        "--max-queue", metavar="N", help="Answers that may wait; further requests are refused (429)."
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help=f"Clients must send this key. Better set {_KEY}: arguments are seen by all users of a machine.",
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option(
        "--served-name", metavar="NAME", help="What clients call the model; by default its own name."
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace", metavar="SECONDS", help="How long running answers go on after Ctrl-C or SIGTERM."
    ),
]


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    head: options.Head = "auto",
    budget: options.AutoBudget = options.AUTO_BUDGET,
    grow: options.Grow = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    max_batch: MaxBatch = 32,
    max_queue: MaxQueue = 128,
    api_key: ApiKey = None,
    served_name: ServedName = None,
    grace: Grace = 10.0,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    shared_noise: options.SharedNoise = True,
    confidence_threshold: options.ConfidenceThreshold = 0.0,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API, many requests at once.

    Requests join and leave between rounds; each has the text that it has alone.
    """
    _check_extra()
    from jetspec.api import check_growth
    from jetspec.serve.app import create_app
    from jetspec.serve.server import bind, run

    if not 0 <= grace < math.inf:
        raise OptionError(f"grace must be a number of seconds from 0, got {grace:g}")
    nodes = budget_of(budget)
    check_growth(nodes, grow)
    key = api_key if api_key is not None else os.environ.get(_KEY)
    screen = Screen(no_color=no_color, quiet=quiet)
    with bind(host, port) as listener:  # before the model is loaded: a port in use shows at once
        loaded = open_model(
            screen,
            model,
            head,
            budget=nodes,
            grow=grow,
            dtype=dtype,
            device=device,
            threads=threads,
            shared_noise=shared_noise,
            confidence_threshold=confidence_threshold,
        )
        app = create_app(
            loaded, served_name=served_name, max_batch=max_batch, max_queue=max_queue, api_key=key
        )
        place = f"[{host}]" if ":" in host else host
        name = app.state.service.name
        _log_to(screen)
        # What was imported and loaded stays to the end. Python would look through all of it now and then,
        # and stop every answer for 70 ms.
        gc.collect()
        gc.freeze()
        screen.line(f"jetspec: {name} is served on http://{place}:{listener.getsockname()[1]}/v1")
        run(app, listener, grace, lambda text: screen.note(f"jetspec: {text}"))
        screen.note("jetspec: stopped")


def _check_extra() -> None:
    """Raise OptionError if what the extra `serve` installs is missing."""
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise OptionError(
                f'the server needs {name}, which is not installed; run: pip install "jetspec[serve]"'
            )


def _log_to(screen: Screen) -> None:
    """What goes wrong with the server's own work, on standard error, also with --quiet."""

    class _Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            screen.err.print(printable(f"jetspec: {self.format(record)}"), crop=False, style="red")

    logging.getLogger("jetspec.serve").addHandler(_Lines())
