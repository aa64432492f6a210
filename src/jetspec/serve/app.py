"""The routes: what may be asked, in which form, and by whom."""

from __future__ import annotations

import logging
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jetspec.api import LanguageModel
from jetspec.serve.errors import ApiError
from jetspec.serve.service import Service, json_response

MAX_BATCH, MAX_QUEUE = 32, 128
STALL_SECONDS = 60.0  # after which a client that reads nothing has left
_PAGE_HEADERS = {  # it loads nothing from elsewhere, and nobody puts it into a frame
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

log = logging.getLogger("jetspec.serve")


def create_app(
    model: LanguageModel,
    *,
    served_name: str | None = None,
    max_batch: int = MAX_BATCH,
    max_queue: int = MAX_QUEUE,
    api_key: str | None = None,
    max_body: int | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> FastAPI:
    """An app that serves `model`, to be run by any ASGI server with one worker process.

    served_name: what clients call the model; None takes its own name, of a path the last part.
    max_batch, max_queue: answers that are decoded at once, and that may wait; more are refused (429).
    api_key: if set, all but /health and the page at / ask for it.
    max_body: bytes of a request's body; None is 4 MiB, more for contexts above 128k tokens.
    stall_seconds: after which a client that takes nothing of its stream is given up.
    Raises OptionError if a value is out of range.
    """
    service = Service(
        model,
        served_name,
        max_batch=max_batch,
        max_queue=max_queue,
        api_key=api_key,
        max_body=max_body,
        stall=stall_seconds,
    )
    app = FastAPI(title="jetspec", lifespan=service.running, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_routes(app, service)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    keyed = [Depends(service.check_key)]

    @app.get("/health", response_model=None)
    async def health() -> Response:
        service.desk.check()
        return json_response({"status": "ok"})

    page = (Path(__file__).parent / "page" / "index.html").read_bytes()

    @app.get("/", response_model=None)
    async def live_page() -> Response:
        return Response(page, headers=_PAGE_HEADERS, media_type="text/html")

    @app.get("/live", dependencies=keyed, response_model=None)
    async def live() -> Response:
        return json_response({"model": service.name, **service.desk.live_view()})

    @app.get("/metrics", dependencies=keyed, response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/v1/models", dependencies=keyed, response_model=None)
    async def models() -> Response:
        return json_response({"object": "list", "data": [service.about()]})

    @app.get("/v1/models/{name:path}", dependencies=keyed, response_model=None)
    async def one_model(name: str) -> Response:
        service.preparer.check_model(name)
        return json_response(service.about())

    @app.post("/v1/completions", dependencies=keyed, response_model=None)
    async def completions(request: Request) -> Response:
        return await service.complete(request, chat=False)

    @app.post("/v1/chat/completions", dependencies=keyed, response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await service.complete(request, chat=True)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return json_response(error.body, error.status, error.headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """An unknown path or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path:.80}: {error.detail}"
    if error.status_code in (404, 405):
        what += "; valid: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, /health, /metrics"
    return json_response(ApiError(error.status_code, what).body, error.status_code, dict(error.headers or {}))


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    body = ApiError(500, "the server failed at this request; its log says why", code="internal_error").body
    return json_response(body, 500)
