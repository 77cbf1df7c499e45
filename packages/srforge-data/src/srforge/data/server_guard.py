"""Imported by the fork server before anything else of the package: from here on it ends with its rank."""

from srforge.data.lifetime import guard_fork_server

guard_fork_server()
