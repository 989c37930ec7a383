"""Basics that every package uses: errors and exit codes, atomic file writes, secrets, JSON, the command line."""
