"""Processes, clusters, exit codes; the version of the whole distribution."""

from __future__ import annotations

VERSION = "0.1.0"
