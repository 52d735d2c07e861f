"""Route × scope × rule of ownership: all that the HTTP API lets anybody do. A route without a row answers nobody.

To add a route is to add a row under its name. `docs/security.md` has this table as a page; `enforcement` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from headrace_coordinator.domain.access import ADMIN, OPERATE, READ, SUBMIT


class Rule(Enum):
    """Which runs a request may be about. The value says it for people."""

    NONE = "is about no run"
    LISTED = "lists what the caller may know of"
    KNOWN = "whoever sees the run, and `operate`"
    SEEN = "whoever sees the run"
    STOPPED = "the run's owner, and `operate`"
    OWNED = "the run's owner"


@dataclass(frozen=True)
class Row:
    """What a route asks of its caller. `of` names the parameter of the path that holds the run's id."""

    scope: str
    """Empty: nothing, not even a token."""
    rule: Rule = Rule.NONE
    audited: bool = True
    """Whether a request that succeeded is written down; one that was refused always is."""
    of: str = "run_id"
    gone: bool = False
    """Whether the route answers for a run that is gone: a deletion that is repeated under its key."""


def _read(rule: Rule, of: str = "run_id") -> Row:
    return Row(READ, rule, audited=False, of=of)


OPEN = Row("", audited=False)
LISTED, KNOWN, SEEN = (_read(rule) for rule in (Rule.LISTED, Rule.KNOWN, Rule.SEEN))
DOWNLOAD = Row(READ, Rule.SEEN)
FLEET = _read(Rule.NONE)
STEERED, OWNED = Row(SUBMIT, Rule.STOPPED), Row(SUBMIT, Rule.OWNED)

TABLE: Mapping[str, Row] = {
    # Nobody's: health, the authority's certificate, hosts that prove their secret, the page's files, and links that
    # carry a code.
    "get_health": OPEN,
    "get_authority": OPEN,
    "join_host": OPEN,
    "open_link": OPEN,
    "begin_login": OPEN,
    "end_login": OPEN,
    "get_dashboard": OPEN,
    "get_dashboard_file": OPEN,
    "get_docs": OPEN,
    "get_docs_file": OPEN,
    # A run's own key, in place of a token: see `relay`.
    "relay": Row("", audited=False),
    # What everybody with a token may read.
    "openapi": FLEET,
    "get_spec_schema": FLEET,
    "get_me": FLEET,
    "list_services": FLEET,
    "list_instances": _read(Rule.LISTED),
    "list_leases": _read(Rule.LISTED),
    "create_link": FLEET,
    # Runs: lists.
    "list_runs": LISTED,
    "list_run_summaries": LISTED,
    "list_suite_evaluations": LISTED,
    "compare_evaluations": LISTED,
    # Runs: how one stands.
    "get_run": KNOWN,
    "get_evaluation": _read(Rule.KNOWN, of="evaluation_id"),
    "get_flow": KNOWN,
    "get_plan": KNOWN,
    "get_timeline": KNOWN,
    "list_newest_events": KNOWN,
    # Runs: what is in one.
    "stream_events": SEEN,
    "list_steps": SEEN,
    "list_evaluations": SEEN,
    "get_curves": SEEN,
    "get_rewards": SEEN,
    "list_trajectories": SEEN,
    "list_checkpoints": SEEN,
    "list_certificates": SEEN,
    "list_recordings": SEEN,
    "list_run_videos": SEEN,
    "list_evaluation_videos": SEEN,
    "get_run_steps": SEEN,
    "get_evaluation_steps": SEEN,
    "list_demonstrations": SEEN,
    "get_demonstration_steps": SEEN,
    "get_demonstration_picture": SEEN,
    "get_demonstration_film": DOWNLOAD,
    "get_run_video": DOWNLOAD,
    "get_evaluation_video": DOWNLOAD,
    "get_run_episode": DOWNLOAD,
    "get_evaluation_episode": DOWNLOAD,
    "get_checkpoint": DOWNLOAD,
    "get_export": DOWNLOAD,
    "get_recording": DOWNLOAD,
    "get_recorded_checkpoint": DOWNLOAD,
    # Runs: what begins and steers one.
    "submit_run": Row(SUBMIT),
    "submit_evaluation": Row(SUBMIT),
    "replay_start": Row(SUBMIT),
    "predict_plan": Row(SUBMIT),
    "pause_run": STEERED,
    "resume_run": STEERED,
    "cancel_run": STEERED,
    "set_run": OWNED,
    "label_run": OWNED,
    "share_run": OWNED,
    "delete_run": Row(SUBMIT, Rule.OWNED, gone=True),
    "record_step": OWNED,
    "get_endpoint": OWNED,
    # Sessions, which are runs: `session` is the run's id. Calls are too many to be written down.
    "open_session": Row(SUBMIT),
    "list_sessions": LISTED,
    "get_session": _read(Rule.KNOWN, of="session"),
    "get_results": _read(Rule.SEEN, of="session"),
    "list_session_checkpoints": _read(Rule.SEEN, of="session"),
    "call_session": Row(SUBMIT, Rule.OWNED, audited=False, of="session"),
    "sample_session": Row(SUBMIT, Rule.OWNED, audited=False, of="session"),
    "delete_session_checkpoint": Row(SUBMIT, Rule.OWNED, of="session"),
    "close_session": Row(SUBMIT, Rule.OWNED, of="session"),
    # Tinker's protocol, whose bodies name the models: their owner alone calls them, and who sees them reads.
    "tinker_read": _read(Rule.LISTED),
    "tinker_call": Row(SUBMIT, audited=False),
    "tinker_change": Row(SUBMIT),
    # The fleet.
    "get_instance_logs": Row(OPERATE),
    "get_metrics": Row(OPERATE, audited=False),
    "drain_instance": Row(OPERATE),
    "release_device": Row(OPERATE),
    "scale_service": Row(OPERATE),
    # Tokens, quotas and what was done.
    "list_usage": FLEET,
    "list_quotas": Row(ADMIN, audited=False),
    "set_quota": Row(ADMIN),
    "list_tokens": Row(ADMIN, audited=False),
    "create_token": Row(ADMIN),
    "revoke_token": Row(ADMIN),
}
"""By the name of the route's function, which the API's description has as `operationId`."""
