"""Homes of one cluster without the ceremony of codes. For tests that are not about pairing."""

from __future__ import annotations

from pathlib import Path

from exo_train.cluster.home import Home
from exo_train.identity import Identity, issue_certificate, new_key, node_id_of, public_key_of


def ensure_member(home: Home, *, root: Path, cluster: str) -> None:
    """Make the home a member of the cluster that has this label under `root`.

    Its first home founds it. A founder that runs already learns of the others when they call.
    """
    if home.identity() is not None:
        return
    marker = root / f"{cluster}.founder"
    if marker.exists():
        admit(home, Home(Path(marker.read_text("utf-8"))))
    else:
        home.found()
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(str(home.path), "utf-8")


def admit(home: Home, inviter_home: Home) -> Identity:
    """Give the home a new key, and a certificate by the inviter."""
    inviter = inviter_home.paired_identity()
    key_pem = new_key()
    public_key = public_key_of(key_pem)
    identity = Identity(
        node_id=node_id_of(public_key),
        cluster=inviter.cluster,
        key_pem=key_pem,
        certificate=issue_certificate(inviter, public_key),
        authority_certificate=inviter.authority_certificate,
        authority_key=inviter.authority_key,
    )
    roster = inviter_home.roster(inviter)
    roster.admit(identity.certificate)
    if inviter_home.agent() is None:
        inviter_home.save_roster(roster)
    home.store_membership(identity, roster.state())
    return identity
