"""What every package uses: errors and exit codes, files written whole, secrets, JSON, the command line."""
