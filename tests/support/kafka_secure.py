"""Kafka broker with TLS certificates, users and ACLs.

Listeners: `SECURE` (SASL_SSL with SCRAM-SHA-256, SCRAM-SHA-512 and PLAIN, ACLs), `EXPIRED` (expired
certificate), `ELSEWHERE` (another host's certificate), `MUTUAL` (client certificate), `CLEAR`
(SASL_PLAINTEXT), `PLAINTEXT` (anonymous, all rights).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourceType,
)

from dora_pipe.bus.kafka.security import KafkaSecurity
from tests.support.kafka_broker import ROOT, KafkaBroker

ROLES = ("orchestrator", "worker", "trainer", "auditor")
USERS = ("admin", *ROLES, "stranger")
OPENSSL_LIMIT_S = 60
_PREFIXED = {"prefixed": ACLResourcePatternType.PREFIXED, "literal": ACLResourcePatternType.LITERAL}


def password_of(user: str) -> str:
    return f"secret-of-{user}-7f3a"


class Certificates:
    """PEM files of an authority, a broker, an expired broker, a client and another authority."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        (folder / "other").write_text("subjectAltName=DNS:elsewhere.example\n")
        self._authority("ca")
        self._authority("stranger-ca")
        self._signed("broker", "ca", "hosts")
        self._signed("expired", "ca", "hosts", days=-1)
        self._signed("elsewhere", "ca", "other")
        self._signed("client", "ca", "hosts")
        self._signed("stranger", "stranger-ca", "hosts")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def encrypt(self, key: str, target: str, password: str) -> None:
        self._openssl(
            *("pkey", "-in", key, "-aes256", "-passout", f"pass:{password}", "-out", target)
        )

    def _authority(self, name: str) -> None:
        self._openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30"),
            *("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"),
        )

    def _signed(self, name: str, authority: str, extensions: str, *, days: int = 30) -> None:
        self._openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key"),
            *("-out", f"{name}.csr", "-subj", f"/CN={name}"),
        )
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem"),
            *("-CAkey", f"{authority}.key", "-CAcreateserial", "-days", str(days)),
            *("-extfile", extensions, "-out", f"{name}.crt"),
        )
        both = self.folder / f"{name}.pem"
        key = (self.folder / f"{name}.key").read_text()
        both.write_text(key + (self.folder / f"{name}.crt").read_text())

    def _openssl(self, *words: str) -> None:
        subprocess.run(
            ["openssl", *words],
            cwd=self.folder,
            capture_output=True,
            timeout=OPENSSL_LIMIT_S,
            check=True,
        )


def secure_broker(folder: Path, certificates: Certificates) -> KafkaBroker:
    scram = [
        word
        for user in USERS
        for kind in ("SCRAM-SHA-256", "SCRAM-SHA-512")
        for word in ("--add-scram", f"{kind}=[name={user},password={password_of(user)}]")
    ]
    broker = KafkaBroker(
        folder,
        listeners={
            "SECURE": "SASL_SSL",
            "EXPIRED": "SASL_SSL",
            "ELSEWHERE": "SASL_SSL",
            "MUTUAL": "SSL",
            "CLEAR": "SASL_PLAINTEXT",
        },
        settings=_settings(certificates),
    )
    broker.format(*scram)
    return broker


def _settings(certificates: Certificates) -> dict[str, str]:
    plain = " ".join(f'user_{user}="{password_of(user)}"' for user in USERS)
    security = "org.apache.kafka.common.security"
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:admin",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": certificates.path("ca.pem"),
    }
    names = {"secure": "broker", "expired": "expired", "elsewhere": "elsewhere", "mutual": "broker"}
    for listener, file in names.items():
        settings[f"listener.name.{listener}.ssl.keystore.type"] = "PEM"
        settings[f"listener.name.{listener}.ssl.keystore.location"] = certificates.path(
            f"{file}.pem"
        )
    settings["listener.name.mutual.ssl.client.auth"] = "required"
    for listener in ("secure", "expired", "elsewhere", "clear"):
        name = f"listener.name.{listener}"
        settings[f"{name}.sasl.enabled.mechanisms"] = "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN"
        for kind in ("scram-sha-256", "scram-sha-512"):
            settings[f"{name}.{kind}.sasl.jaas.config"] = (
                f"{security}.scram.ScramLoginModule required;"
            )
        settings[f"{name}.plain.sasl.jaas.config"] = (
            f"{security}.plain.PlainLoginModule required {plain};"
        )
    return settings


def security_of(
    user: str, certificates: Certificates, folder: Path, *, mechanism: str = "SCRAM-SHA-512"
) -> KafkaSecurity:
    file = folder / f"{user}.password"
    file.write_text(password_of(user) + "\n")
    return KafkaSecurity(
        protocol="SASL_SSL",
        mechanism=mechanism,
        username=user,
        password_file=str(file),
        ca_file=certificates.path("ca.pem"),
    )


def allow(broker: KafkaBroker, rights: Sequence[Mapping[str, str]]) -> None:
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    try:
        done = admin.create_acls([_acl(right) for right in rights])
    finally:
        admin.close()
    assert not done["failed"], done


def _acl(right: Mapping[str, str]) -> ACL:
    return ACL(
        principal=f"User:{right['user']}",
        host="*",
        operation=ACLOperation[right["operation"]],
        permission_type=ACLPermissionType.ALLOW,
        resource_pattern=ResourcePattern(
            ResourceType[right["kind"]], right["name"], _PREFIXED[right["pattern"]]
        ),
    )


def documented_rights(run: str) -> list[dict[str, str]]:
    page = (ROOT / "docs" / "clusters.md").read_text().partition("### Rights of each role")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith(tuple(f"| {role} |" for role in ROLES))
    ]
    return [
        {
            "user": user,
            "operation": re.sub("(?<=[a-z])(?=[A-Z])", "_", operation).upper(),
            "kind": kind.upper().replace("-", "_"),
            "name": f"{run}{name.strip('`').removeprefix('run').removesuffix('*')}",
            "pattern": "prefixed" if name.endswith("*`") else "literal",
        }
        for user, operations, kind, names in rows
        for operation in operations.split(", ")
        for name in names.split(", ")
    ]
