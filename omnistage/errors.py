"""Every error Omnistage raises, in one tree.

    OmnistageError
    ├── PipelineError          a pipeline file or graph is wrong (CLI: exit 2)
    ├── FetchError             weights could not be downloaded or verified
    ├── WeightsError           a checkpoint is missing, truncated or of the wrong shape
    ├── InvalidRequest         the request is wrong (HTTP 400)
    │   ├── MediaError         an image or audio file cannot be used (400)
    │   ├── MediaTooLarge      a file is over a size limit (413)
    │   ├── NotFound           unknown model, voice or audio id (404)
    │   └── ContextOverflow    prompt and answer do not fit the context (400)
    ├── Overloaded             the queue is full (429, with retry_after)
    ├── Draining               the server is stopping (503)
    ├── NotReady               the pipeline is still loading (503, with retry_after)
    ├── RequestFailed          a stage failed while it served the request (500)
    │   ├── StreamError        a stream had a gap, a repeat or an unknown key
    │   └── ReplayExhausted    workers died more often than the replay budget allows
    └── TransportError         a message cannot be encoded, decoded or delivered

A message names the value, the limit and the remedy.  `code` is the machine-readable word that
goes into OpenAI's error object; `param` names the request field where one is to blame.
"""

from __future__ import annotations


class OmnistageError(Exception):
    """Base of all errors.  code: a stable word for programs."""

    code = "internal_error"
    status = 500

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class PipelineError(OmnistageError):
    code = "invalid_pipeline"
    status = 400


class FetchError(OmnistageError):
    code = "fetch_failed"


class WeightsError(OmnistageError):
    code = "invalid_weights"


class InvalidRequest(OmnistageError):
    code = "invalid_request"
    status = 400


class MediaError(InvalidRequest):
    code = "invalid_media"


class MediaTooLarge(InvalidRequest):
    code = "media_too_large"
    status = 413


class NotFound(InvalidRequest):
    code = "not_found"
    status = 404


class ContextOverflow(InvalidRequest):
    code = "context_length_exceeded"


class Overloaded(OmnistageError):
    """The admission queue is full.  retry_after: seconds."""

    code = "overloaded"
    status = 429

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(OmnistageError):
    code = "draining"
    status = 503


class NotReady(OmnistageError):
    """The stages are still loading.  retry_after: seconds."""

    code = "not_ready"
    status = 503
    retry_after = 1.0


class RequestFailed(OmnistageError):
    code = "stage_failed"


class StreamError(RequestFailed):
    code = "stream_broken"


class ReplayExhausted(RequestFailed):
    code = "replay_exhausted"


class TransportError(OmnistageError):
    code = "transport_error"


def _tree(base: type[OmnistageError]) -> list[type[OmnistageError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in _tree(child))]


def error_from_wire(*, kind: str, message: str, code: str, param: str | None) -> OmnistageError:
    """Rebuild an error that a worker sent by class name; an unknown kind becomes RequestFailed."""
    known = {cls.__name__: cls for cls in _tree(OmnistageError)}
    cls = known.get(kind, RequestFailed)
    error = cls(message)
    error.code, error.param = code, param
    return error
