"""What is promised of a trajectory that may mix versions: the run has declared C1 off.

Its versions never decrease, from that of its dispatch to at most that of the step that trained it;
each was hosted, with the published weights, by the worker that sampled under it, before the
trajectory was logged. That is told by order in control, not by clocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from dora_pipe.audit.entries import GroupEntry, Logged
from dora_pipe.audit.evidence import Content
from dora_pipe.audit.ledger import Ledger
from dora_pipe.schemas.trajectory import Segment, mixing_error

Wrong = tuple[str, object, object]
"""(message, expected, found)."""


def wrong_mixture(
    content: Content, group: GroupEntry, logged: Logged, ledger: Ledger
) -> Iterator[Wrong]:
    """Everything that a mixed trajectory must not be."""
    newest = ledger.version if group.step is None else group.step
    if why := mixing_error(content, newest):
        yield f"its versions are not in order: {why}", "", ""
    for one in content.weights:
        published = ledger.versions.get(one.version)
        digest = "nothing" if published is None else published.digest
        if one.digest != digest:
            yield f"names other weights than version {one.version} has", digest, one.digest
    named = {one.version for one in content.weights} | {content.version}
    for segment in content.sampled:
        if segment.version not in named:
            yield f"names no weights for version {segment.version}", "", ""
        if why := _not_hosted(segment, logged, ledger):
            yield why, "", ""


def _not_hosted(segment: Segment, logged: Logged, ledger: Ledger) -> str:
    worker = ledger.accounts.workers.get(segment.epoch)
    of = f"{segment.worker} of incarnation {segment.epoch}"
    who = f"tokens {segment.start} to {segment.end} name {of}"
    if worker is None or worker.joined.worker != segment.worker:
        return f"{who}, which never joined"
    ready = worker.hosted.get(segment.version)
    if ready is None or ready > logged.at.offset:
        return f"{who}, which did not host version {segment.version} then"
    return ""
