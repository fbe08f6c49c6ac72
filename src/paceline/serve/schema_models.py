"""What all request bodies are built on."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Types are not coerced: "5" is not 5."""

    model_config = ConfigDict(extra="forbid", strict=True)


class LenientModel(StrictModel):
    """Clients send fields here that other servers know."""

    model_config = ConfigDict(extra="allow")
