"""Logs as lines of JSON on stderr: one for every request, and what uvicorn logs. No text of prompts or answers."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

LOGGER = "specdecpp.serving"


class JsonLines(logging.Formatter):
    """A log record as one line: time, level, logger, event, its facts, and a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def config() -> dict[str, Any]:
    """A configuration for `logging.config.dictConfig`: everything through one handler, in this form."""
    quiet = {"handlers": ["stderr"], "level": "WARNING", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "specdecpp.serving.logs.JsonLines"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}},
        "loggers": {LOGGER: {**quiet, "level": "INFO"}, "specdecpp": quiet, "uvicorn": quiet, "asyncio": quiet},
    }


def log_event(event: str, *, level: int = logging.INFO, **facts: Any) -> None:
    """Log one event with its facts."""
    logging.getLogger(LOGGER).log(level, event, extra={"facts": facts})
