"""`python -m headrace_coordinator`: parse, wire, serve."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

SWITCH_S = 0.0005
"""How long a thread that computes, such as one that reads data, keeps the others waiting; Python's own 5 ms, by several
threads and for each step of an answer, are seconds.
"""
TASK_ENDED = 70
"""Exit code when a lasting task ended: the software's own fault (EX_SOFTWARE)."""


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags, with HEADRACE_* as defaults."""
    parser = argparse.ArgumentParser(prog="headrace_coordinator", description=__doc__)
    env = os.environ.get
    parser.add_argument(
        "--listen", default=env("HEADRACE_LISTEN", "127.0.0.1:8471"), help="host:port for gRPC"
    )
    parser.add_argument(
        "--http", default=env("HEADRACE_HTTP", "127.0.0.1:8470"), help="host:port for the HTTP API"
    )
    parser.add_argument(
        "--sessions-grpc",
        default=env("HEADRACE_SESSIONS_GRPC", ""),
        help="host:port at which users' own loops speak gRPC (docs/own-loop.md); default: by HTTP alone",
    )
    parser.add_argument(
        "--redis", default=env("HEADRACE_REDIS_URL", "redis://127.0.0.1:6379/0"), help="Redis URL"
    )
    parser.add_argument(
        "--redis-password-file",
        type=Path,
        default=env("HEADRACE_REDIS_PASSWORD_FILE") or None,
        help="store's secret",
    )
    parser.add_argument("--data-dir", type=Path, default=Path(env("HEADRACE_DATA_DIR", ".headrace")))
    parser.add_argument(
        "--token-file", type=Path, default=env("HEADRACE_TOKEN_FILE") or None, help="secret of the fleet"
    )
    parser.add_argument(
        "--http-token-file",
        type=Path,
        default=env("HEADRACE_HTTP_TOKEN_FILE") or None,
        help="secret that every HTTP request must bear; default: http-token in the data directory, made if missing",
    )
    parser.add_argument(
        "--trust",
        default=env("HEADRACE_TRUST", "open"),
        help="open, or contained: specs of those who are no admins hold no code, command, path, address or secret but "
        "those of --trust-allow (docs/security.md)",
    )
    parser.add_argument(
        "--trust-allow",
        type=Path,
        default=env("HEADRACE_TRUST_ALLOW") or None,
        help="YAML file of what specs of a contained fleet may hold all the same; default: nothing",
    )
    parser.add_argument(
        "--oidc",
        type=Path,
        default=env("HEADRACE_OIDC") or None,
        help="YAML file of an OpenID Connect issuer whose tokens are taken too (docs/security.md); default: none",
    )
    parser.add_argument(
        "--authority-dir",
        type=Path,
        help="folder with ca.pem and ca-key.pem, by which hosts that join are certified; default: they are not",
    )
    parser.add_argument(
        "--join-token-file", type=Path, help="secret of those who may join a host, which services do not have"
    )
    parser.add_argument(
        "--no-token",
        action="store_true",
        help="answer HTTP without a token: every user of this machine can then run code as this user; loopback only",
    )
    parser.add_argument(
        "--lease-ttl", type=float, default=float(env("HEADRACE_LEASE_TTL_S", "30")), help="seconds"
    )
    parser.add_argument(
        "--heartbeat", type=float, default=float(env("HEADRACE_HEARTBEAT_S", "5")), help="seconds"
    )
    parser.add_argument("--log-level", default=env("HEADRACE_LOG_LEVEL", "info"))
    parser.add_argument(
        "--otlp-endpoint",
        default=env("HEADRACE_OTLP_ENDPOINT", ""),
        help="OTLP collector of traces, http://HOST:PORT; default: none",
    )
    parser.add_argument(
        "--autoscale",
        default=env("HEADRACE_AUTOSCALE", ""),
        help="KIND=LEAST:MOST,…: follow what runs want within these bounds; default: never",
    )
    parser.add_argument(
        "--autoscale-cooldown",
        type=float,
        default=float(env("HEADRACE_AUTOSCALE_COOLDOWN_S", "300")),
        help="seconds for which fewer must be wanted before there are fewer",
    )
    parser.add_argument(
        "--tinker-models",
        type=Path,
        default=env("HEADRACE_TINKER_MODELS") or None,
        help="YAML file of the models that clients of Tinker ask for by name, as NAME: {model: {path: …}}",
    )
    parser.add_argument("--reflection", action="store_true", help="answer gRPC reflection")
    return parser.parse_args(argv)


def main() -> None:
    """Entry point; a refusal to start is one sentence and exit code 2, a task that ended is exit code 70."""
    arguments = parse(sys.argv[1:])
    from headrace_coordinator.serving import Refusal, serve
    from headrace_coordinator.vitals import TaskEnded

    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(serve(arguments))
    except Refusal as refusal:
        print(f"headrace_coordinator: {refusal}", file=sys.stderr)
        raise SystemExit(2) from refusal
    except TaskEnded as ended:
        print(f"headrace_coordinator: {ended}; a restart is safe", file=sys.stderr)
        raise SystemExit(TASK_ENDED) from ended


if __name__ == "__main__":
    main()
