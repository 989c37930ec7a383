"""Find the mode of W&B on this machine, once, before data are read: online, offline or disabled."""

import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import chdir, suppress
from dataclasses import replace
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from dyad.data.base.errors import ConfigError, first_line
from dyad.data.base.secrets import netrc_hosts, without_credentials
from dyad.train.config import TrackingConfig, Wandb

PROBE = 5.0  # seconds to wait for an answer of the server
# Values of WANDB_MODE; dryrun and run are older names of W&B, shared is for several processes that write to one run
MODES = {"online": Wandb.online, "offline": Wandb.offline, "disabled": Wandb.disabled}
MODES |= {"run": Wandb.online, "shared": Wandb.online, "dryrun": Wandb.offline}
CLOUD = {"api.wandb.ai", "api.forge.coreweave.com"}  # one service under two names: a key for either will do


def wandb_mode(config: TrackingConfig) -> Wandb:
    """Return the W&B mode that tracking.wandb means on this machine: online, offline or disabled.

    auto means what the environment variable WANDB_MODE says (see MODES); without it, online if there is a key
    (`_has_key`), else disabled. Reads the environment, W&B's settings and netrc, never the network. Raises ConfigError
    for online without a key, and with auto for an unknown value of WANDB_MODE.
    """
    named = os.environ.get("WANDB_MODE") if config.wandb is Wandb.auto else None
    if named and named not in MODES:  # W&B would refuse it later
        raise ConfigError(f"WANDB_MODE={named}: must be online, offline or disabled. Change it, or set tracking.wandb")
    wanted = MODES[named] if named else config.wandb
    if wanted in (Wandb.offline, Wandb.disabled):
        return wanted
    if _has_key():
        return Wandb.online
    if wanted is Wandb.online:
        raise ConfigError("tracking.wandb=online needs an API key: `wandb login`, set WANDB_API_KEY, or choose offline")
    return Wandb.disabled


def resolve_wandb_mode(config: TrackingConfig, run_dir: Path, log: Callable[[str], None]) -> TrackingConfig:
    """Return a copy of `config` with tracking.wandb resolved to online, offline or disabled, and log one line about it.

    Nothing is logged if `wandb_mode` gives disabled. Else the mode becomes offline if the W&B server does not answer,
    and disabled if the wandb package cannot be imported. Call it before data are read. log: prints the line. run_dir:
    the run folder, shown in the line. Raises as `wandb_mode` does.
    """
    mode, where = wandb_mode(config), ""
    reason = " (WANDB_MODE)" if config.wandb is Wandb.auto and os.environ.get("WANDB_MODE") else ""
    if wanted := mode is not Wandb.disabled:
        try:
            wandb_package()
        except Exception as error:  # usually versions that do not fit together
            mode, reason = Wandb.disabled, f" (the package does not load: {first_line(error)})"
    if mode is Wandb.online:
        address = without_credentials(server())
        where = f" at {address}, project {config.project}"
        if not answers(server(), PROBE):
            mode, reason = Wandb.offline, f" ({address} does not answer within {PROBE:.0f} s)"
    if mode is Wandb.offline:
        where = f"; later: wandb sync {run_dir}/wandb/offline-run-*"
    if wanted:
        log(f"W&B: {mode.name}{reason}{where}")
    return replace(config, wandb=mode)


def wandb_package() -> Any:
    """Import and return the package wandb, with its error reports switched off.

    These reports would use the network even offline, and wait 10 s at exit. Any error of the import is let through.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return import_module("wandb")


def set_up_wandb() -> Any:
    """Return the package wandb after wandb.setup, in which it reads the user's settings.

    A settings file in the working folder (wandb/settings) is not read: it could name another server, to which W&B would
    then send the API key. So the working folder of the process is / during the call.
    """
    wandb = wandb_package()
    with chdir("/"):
        wandb.setup(wandb.Settings(silent=True))
    return wandb


def server() -> str:
    """Return the address of the W&B server, from WANDB_BASE_URL or the settings that `wandb login --host` wrote.

    Without WANDB_BASE_URL the package wandb is imported, whose errors are let through; the default is W&B's cloud.
    """
    wanted = os.environ.get("WANDB_BASE_URL")
    return wanted or set_up_wandb().setup().settings.base_url


def _has_key() -> bool:
    """Whether the environment has WANDB_API_KEY or WANDB_IDENTITY_TOKEN_FILE, or netrc has a key for the W&B server.

    Without WANDB_BASE_URL, and if the package wandb does not load, the server is taken to be W&B's cloud. W&B's own
    check is private, and differs between its versions.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts, accepted = netrc_hosts().keys(), CLOUD
    with suppress(Exception):  # wandb does not load: resolve_wandb_mode says so where there is a key
        if hosts and (host := urlparse(server()).netloc) not in CLOUD:
            accepted = {host}
    return bool(hosts & accepted)


def answers(url: str, seconds: float) -> bool:
    """Whether the server at `url` answers within `seconds`, with any HTTP status or a certificate that fails the check.

    The request runs in a thread, because name look-ups have no time limit.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
        except (urllib.error.HTTPError, HTTPException):
            pass
        except OSError as error:
            # A certificate that Python does not know is an answer: W&B has its own certificates.
            if not isinstance(getattr(error, "reason", error), ssl.SSLError):
                return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()
