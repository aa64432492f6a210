"""An OpenAI-compatible HTTP server over one engine, with continuous batching; needs the extra `serve`.

    app = jetspec.serve.create_app(jetspec.load())

The way of a request: `app` has its route, `service` reads it, `prepare` checks it and makes token ids of it,
`desk` gives it a place, `worker` decodes it among the others, `streaming` or `service` send what comes back.
"""

from jetspec.serve.app import create_app

__all__ = ["create_app"]
