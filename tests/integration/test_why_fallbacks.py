"""`why` names the delta that was lost or damaged, who took what in its place, and what it cost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.config.load import dump_toml
from dora_pipe.store.files import LocalFiles
from dora_pipe.store.names import delta_name, weights_name
from dora_pipe.store.store import PolicyStore
from tests.integration.test_delta_runs import digests_of
from tests.support.cluster import TRAINER, Cluster, make_config
from tests.support.command_line import Call

STEPS = 4
WHOLE_EVERY = 2
Case = Literal["lost", "damaged"]


class BadWay(LocalFiles):
    def __init__(self, root: Path, case: Case) -> None:
        super().__init__(root)
        self.case = case

    def exists(self, name: str) -> bool:
        return super().exists(name) and not (self.case == "lost" and self._bad(name))

    def get(self, name: str, target: Path) -> bool:
        if not self.exists(name) or not super().get(name, target):
            return False
        if self._bad(name):
            target.write_bytes(target.read_bytes()[:-1])
        return True

    def _bad(self, name: str) -> bool:
        digest = Path(name).stem
        return name == delta_name(digest) and super().exists(weights_name(digest))


class TwoMachines(Cluster):
    case: Case = "lost"

    def store_of(self, worker: str) -> PolicyStore:
        if worker != "w0":
            return self.store
        way = BadWay(self.store.root, self.case)
        return PolicyStore(self.directory / worker, way, clock=self.clock, with_deltas=True)


@pytest.fixture(scope="module", params=["lost", "damaged"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoMachines]:
    config = make_config(run__name="patched", run__steps=STEPS, policies__full_every=WHOLE_EVERY)
    directory = tmp_path_factory.mktemp("fallbacks") / "patched"

    class Made(TwoMachines):
        case = request.param

    with Made(directory, config) as created:
        (directory / "config.toml").write_text(dump_toml(config))
        created.run()
        yield created


def test_a_delta_that_did_not_arrive_is_named_with_the_whole_file_that_was_taken(
    call: Call, cluster: TwoMachines
) -> None:
    code, out, err = call("why", str(cluster.directory))
    assert code == 0, err
    over = re.findall(r"^w[0-9] took .*$", out, re.MULTILINE)
    assert over
    for line in over:
        (version,) = map(int, re.findall(r"^w0 took version ([0-9]+) in full \(", line))
        assert version > 0, "there never was a delta of version 0"
        digest = digests_of(cluster)[version]
        size = (cluster.store.root / weights_name(digest)).stat().st_size
        assert f"({weights_name(digest)}, {size:,} bytes): " in line
        assert delta_name(digest) in line and str(cluster.store.root) in line
        wrong = "does not match its name" if cluster.case == "damaged" else ": no deltas/"
        assert wrong in line


def test_json_sql_and_audit_have_it_too(call: Call, cluster: TwoMachines) -> None:
    asked = "select * from fallbacks order by at_ns limit 1"
    code, out, err = call("sql", str(cluster.directory), asked, "--json")
    assert code == 0, err
    row = json.loads(out)
    digest = digests_of(cluster)[row["version"]]
    size = (cluster.store.root / weights_name(digest)).stat().st_size
    assert (row["worker"], row["taken"], row["bytes"]) == ("w0", weights_name(digest), size)
    lines = json.loads(call("why", str(cluster.directory), "--json")[1])["fallbacks"]
    assert lines[0].endswith(row["reason"]) and delta_name(digest) in lines[0]
    assert not audit(cluster.bus, cluster.topics, cluster.store).violations


def test_a_whole_file_that_a_restarted_trainer_found_damaged_is_named_in_its_next_commit(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(
        cluster: Cluster, worker: str
    ) -> PolicyStore:  # It remembers what was wrong with files.
        return PolicyStore(cluster.store.root, clock=cluster.clock)

    monkeypatch.setattr(Cluster, "store_of", own)
    config = make_config(
        run__name="altered", run__steps=5, policies__full_every=8, trainer__checkpoint_every=3
    )
    with Cluster(tmp_path / "altered", config) as cluster:
        (cluster.directory / "config.toml").write_text(dump_toml(config))
        cluster.until(lambda: cluster.version >= 3)
        digest = digests_of(cluster)[3]
        path = cluster.store.root / weights_name(digest)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        cluster.restart(TRAINER)
        cluster.run()
        code, out, err = call("why", str(cluster.directory))
        assert code == 0, err
        (line,) = re.findall(r"^trainer took .*$", out, re.MULTILINE)
        assert line.startswith(f"trainer took version 3 from deltas ({delta_name(digest)}, ")
        assert line.endswith(f"{path} does not match its name")
