"""Fold control and decisions: records that count, and outcomes of groups.

See "Reading rules" in reference/records.md. Methods are named after kinds of records.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from bound import Bound
from digests import chain_of, config_digest, derive, prompt_of
from findings import Findings
from log import Json, Record, key_of

Placement = tuple[int, str, int]  # attempt, worker, incarnation
Place = tuple[int, int]  # partition, offset


TAKEN = ("attempt", "incarnation", "partition", "offset", "sha256")

RUN_STOPPED = "the run stopped"
"""Prefix of a worker's reason after `stop-run`."""

ASLEEP = -1
"""Version of a sleeping worker."""


@dataclass
class Request:
    """A trajectory of a group; `counts` is the entry that counts."""

    placement: Placement | None = None
    placements: list[Placement] = field(default_factory=list)
    faults: int = 0
    moving: bool = False
    over: bool = False
    cancelled: bool = False
    counts: Json | None = None


@dataclass
class Group:
    spec: Json
    requests: dict[str, Request]
    at_ns: int = 0
    outcome: str = ""
    together: bool = False
    asked: list[Placement] = field(default_factory=list)
    asking: Placement | None = None
    faults: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    unscored: bool = False  # scoring failed for good
    expired: bool = False  # timed out, by a round

    @property
    def closed(self) -> str:
        """Return the outcome of open trajectories that it does not wait for."""
        valid = sum(result["reward"] is not None for result in self.results)
        full = self.spec.get("redundancy", 0) and valid >= self.spec["size"]
        return "expired" if self.expired else "redundant" if full else ""

    @property
    def results(self) -> list[Json]:
        return [request.counts for request in self.requests.values() if request.counts is not None]

    @property
    def rewards(self) -> dict[str, float | None]:
        own = {result["trajectory"]: result["reward"] for result in self.results}
        return dict.fromkeys(own) if self.unscored else own | self.scores

    @property
    def waits(self) -> bool:
        """Report whether group scores are missing."""
        valid = any(reward is not None for reward in self.rewards.values())
        return self.together and valid and not self.scores


@dataclass
class Logged:
    """An entry of `trajectories-logged`: counts, superseded or fenced."""

    entry: Json
    standing: str


class Ledger:
    def __init__(self, findings: Findings, buried: Collection[tuple[str, int, int]] = ()) -> None:
        """`buried`: places of dead letters."""
        self.findings = findings
        self.buried = buried
        self.started: Json = {}
        self.rounds = 0
        self.at = -1  # offset of the current round
        self.chain = "0" * 64
        self.now_ns = 0
        self.incarnations = {"orchestrator": -1, "trainer": -1}
        self.announced: set[int] = set()  # incarnations of orchestrators
        self.wrote: set[int] = set()  # incarnations of rounds
        self.workers: dict[int, str] = {}  # incarnations that are in
        self.joined: dict[int, str] = {}  # all incarnations
        self.colocated: set[int] = set()  # sleep during a step
        self.assigned: set[tuple[int, int]] = set()  # incarnation, version
        self.fenced: set[int] = set()
        self.groups: dict[str, Group] = {}
        self.ordinals = {"train": 0, "eval": 0}
        self.of_task: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()  # rows, by task
        self.running: dict[str, Request] = {}  # open requests that have a placement
        self.asking: dict[str, Group] = {}  # groups that a worker scores
        self.logged: dict[Place, Logged] = {}
        self.bound = Bound()
        self.takes: dict[tuple[int, int], Json] = {}
        self.commits: dict[int, Json] = {}  # by step
        self.versions: dict[int, Json] = {}  # manifests
        self.dropped: set[int] = set()
        self.stopped = False

    @property
    def newest(self) -> int:
        """Number of committed steps, unless one is missing."""
        return max(self.versions)

    def take(self, record: Record, control: Sequence[Record]) -> None:
        """Apply a round with its control records."""
        round_, self.at = json.loads(record.value), record.offset
        for fact_record in control:
            self.fact(fact_record)
        who, findings = f"round {round_['ordinal']}", self.findings
        findings.same("rounds", who, "ordinal", self.rounds, round_["ordinal"])
        newest = self.incarnations["orchestrator"]
        if round_.get("decisions"):
            findings.same("rounds", who, "incarnation", newest, round_["incarnation"])
        findings.holds("rounds", who, "incarnation is over", round_["incarnation"] >= newest)
        findings.same("rounds", who, "key", b"", record.key)
        self.wrote.add(round_["incarnation"])
        findings.holds("rounds", who, "time goes back", round_["now_ns"] >= self.now_ns)
        chain = chain_of(self.chain, control, record.value)
        findings.same("rounds", who, "chain", chain, round_.get("chain"))
        self.rounds, self.now_ns = round_["ordinal"] + 1, round_["now_ns"]
        self.chain = round_.get("chain", chain)
        for observation in round_.get("observations", []):
            self._tell(observation)
        for decision in round_.get("decisions", []):
            findings.holds("rounds", who, "decides after the run was stopped", not self.stopped)
            self._tell(decision)

    def fact(self, record: Record) -> None:
        """Apply a control record."""
        try:
            fact = json.loads(record.value)
            kind = str(fact["kind"])
        except (ValueError, KeyError, TypeError):
            where = f"{self.started.get('run')}.control", record.partition, record.offset
            buried = where in self.buried
            self.findings.holds("control", f"control:{record.offset}", "cannot be read", buried)
            return
        if record.key:
            where, actual = f"control:{record.offset}", record.key.decode(errors="replace")
            self.findings.same("control", where, "key", key_of(fact), actual)
        if kind == "run-started":
            digest = config_digest(record.value)
            self.findings.same("control", "config", "digest", digest, fact["config_digest"])
            config, actual = fact["config"]["run"], [fact["run"], fact["seed"]]
            expected = [config["name"], config["seed"]]
            self.findings.same("control", "run-started", "run and seed", expected, actual)
        self._tell(fact | {"at": record.offset})

    def _tell(self, record: Json) -> None:
        name = f"_{record['kind'].replace('-', '_')}"
        handler: Callable[[Json], None] | None = getattr(self, name, None)
        if handler is None:
            return
        try:
            handler(record)
        except (KeyError, TypeError) as error:
            self.findings.add("control", record["kind"], f"does not fit what came before: {error}")

    # Incarnations

    def _run_started(self, fact: Json) -> None:
        self.started, self.versions = fact, {0: fact["policy"]}
        self.bound.start(fact["config"])

    def _role_started(self, fact: Json) -> None:
        self.incarnations[fact["role"]] = fact["incarnation"]
        if fact["role"] == "orchestrator":
            self.announced.add(fact["incarnation"])

    def _worker_joined(self, fact: Json) -> None:
        if fact["assets_digest"] != self.started["assets_digest"]:
            return
        for incarnation in [
            incarnation for incarnation, name in self.workers.items() if name == fact["worker"]
        ]:
            self._out(incarnation, fault=True)
        self.workers[fact["at"]] = self.joined[fact["at"]] = fact["worker"]
        if fact.get("colocated"):
            self.colocated.add(fact["at"])

    def _worker_left(self, fact: Json) -> None:
        stopped = self.stopped or not fact["reason"].startswith(RUN_STOPPED)
        joined = self.joined.get(fact["incarnation"])
        self.findings.same("control", f"control:{fact['at']}", "who joined", joined, fact["worker"])
        why = "left because the run stopped, but no decision stopped it"
        self.findings.holds("control", fact["worker"], why, stopped)
        self._out(fact["incarnation"], fault=False)

    def _fence(self, decision: Json) -> None:
        self._out(decision["incarnation"], fault=True)

    def _out(self, incarnation: int, *, fault: bool) -> None:
        if self.workers.pop(incarnation, None) is None:
            return
        if fault:
            self.fenced.add(incarnation)
        for name, request in list(self.running.items()):
            if request.placement is not None and request.placement[2] == incarnation:
                self._lose(name, fault=fault)
        for group in list(self.asking.values()):
            if group.asking is not None and group.asking[2] == incarnation:
                self._not_scored(group, fault=fault)

    # Versions of workers

    def _assign(self, decision: Json) -> None:
        self.assigned.add((decision["incarnation"], decision["version"]))
        self._published(decision, f"assign to {decision['worker']}")

    def _worker_ready(self, fact: Json) -> None:
        who = f"{fact['worker']} at control:{fact['at']}"
        self.findings.same(
            "control", who, "joined", self.joined.get(fact["incarnation"]), fact["worker"]
        )
        assigned = (fact["incarnation"], fact["version"]) in self.assigned
        self.findings.holds("control", who, "has what no decision assigned", assigned)
        self._published(fact, who)

    def _published(self, record: Json, who: str) -> None:
        if record["version"] == ASLEEP:
            self.findings.holds(
                "C1", who, "sleeps, not being colocated", record["incarnation"] in self.colocated
            )
            self.findings.same("C1", who, "weights of one asleep", "", record["digest"])
            return
        digest = self.versions.get(record["version"], {}).get("digest", "no such version")
        what = f"weights of version {record['version']}"
        self.findings.same("C1", who, what, digest, record["digest"])

    # Groups

    def _dispatch(self, decision: Json) -> None:
        spec = decision["spec"]
        name, train = spec["group"], spec["purpose"] == "train"
        if name in self.groups:
            self.findings.add("C2", name, "is dispatched a second time")
            return
        for what, expected in self._stamp(spec, decision.get("skipped", ())).items():
            actual = spec.get(what, {"task": "", "redundancy": 0}.get(what))
            self.findings.same("decisions", name, what, expected, actual)
        self.ordinals[spec["purpose"]] += 1
        ids = [f"{name}-{sample:03d}" for sample in range(spec["size"] + spec.get("redundancy", 0))]
        own = spec.get("task" if train else "evaluation")
        source = f"{spec['purpose']}/{own}" if own else spec["purpose"]
        together = source in self.started.get("scored_together", ())
        requests = {name: Request() for name in ids}
        self.groups[name] = Group(spec, requests, self.now_ns, together=together)
        if train:
            for why in self.bound.dispatch(spec, self.newest):
                self.findings.add("decisions", name, why)

    def _stamp(self, spec: Json, skipped: Sequence[int]) -> Json:
        train, version = spec["purpose"] == "train", self.newest
        ordinal = self.ordinals[spec["purpose"]]
        started, config = self.started, self.started["config"]
        expected = {
            "ordinal": ordinal,
            "group": f"{'g' if train else 'e'}{ordinal:010d}",
            "partition": ordinal % config["bus"]["partitions"],
            "version": version,
            "digest": self.versions[version]["digest"],
        }
        more = started.get("datasets", {})
        if not train:
            several = [config["evaluation"], *config.get("more_evaluations", ())]
            of_name = {task.get("name", ""): task for task in several}
            name = spec.get("evaluation", "")
            its = of_name.get(name, {})
            data = more.get(f"eval/{name}", {"digest": started["eval_digest"]})
            return expected | {
                "deadline": -1,
                "seed": derive("group", started["seed"], "eval", spec["index"]),
                "size": its.get("group_size"),
                "redundancy": 0,
                "dataset_digest": data["digest"],
                "task": its.get("task") or config["task"].get("name", ""),
            }
        task = self._task()
        own = {"digest": started["dataset_digest"], "rows": started["dataset_rows"]}
        data = more.get(f"train/{task}", own)
        self.skipped[task] += len(skipped)
        position = self.of_task[task] + self.skipped[task]
        data_epoch, index = prompt_of(started["seed"], position, data["rows"])
        if self._tasks()[task].get("sampler"):  # needs the user's function
            data_epoch, index = position // data["rows"], spec["index"] % data["rows"]
        self.of_task[task] += 1
        return expected | {
            "data_epoch": data_epoch,
            "index": index,
            "seed": derive("group", started["seed"], "train", ordinal),
            "size": config["rollout"]["group_size"],
            "redundancy": config["rollout"].get("group_redundancy", 0),
            "dataset_digest": data["digest"],
            "task": task,
        }

    def _task(self) -> str:
        """Return the next task: the first due one below its share."""
        tasks = list(self._tasks().values())
        ratios = [Fraction(str(task.get("ratio", 1))) for task in tasks]
        number, due = sum(self.of_task.values()) + 1, []
        for index, (task, ratio) in enumerate(zip(tasks, ratios, strict=True)):
            had = self.of_task[task.get("name", "")]
            if had < number * ratio / sum(ratios):
                due.append(((had + 1) / ratio, index))
        return str(tasks[min(due)[1]].get("name", ""))

    def _tasks(self) -> dict[str, Json]:
        config = self.started["config"]
        tasks = [config["task"], *config.get("more_tasks", ())]
        return {task.get("name", ""): task for task in tasks}

    def _end(self, decision: Json) -> None:
        name = decision["group"]
        self.outcome(name, decision["outcome"])
        for trajectory in self.groups[name].requests if name in self.groups else ():
            self._ended(trajectory)
        self.bound.leave(name)

    def outcome(self, name: str, outcome: str) -> None:
        group = self.groups.get(name)
        if group is None:
            self.findings.add("C2", name, f"is {outcome} but was never dispatched")
            return
        once = f"has two outcomes: {group.outcome} and {outcome}"
        self.findings.holds("C2", name, once, not group.outcome)
        group.outcome = outcome

    # Requests

    def _schedule(self, decision: Json) -> None:
        name, incarnation, worker = (
            decision["spec"]["group"],
            decision["incarnation"],
            decision["worker"],
        )
        in_ = self.workers.get(incarnation) == worker
        for sample, attempt, *_ in decision["samples"]:
            who = f"{name}-{sample:03d}"
            request = self.groups[name].requests[who]
            free = not request.over and request.placement is None
            self.findings.same("decisions", who, "attempt", len(request.placements) + 1, attempt)
            self.findings.holds("decisions", who, "is placed while it runs or has ended", free)
            self.findings.holds("decisions", who, f"is placed on {worker}, which is out", in_)
            request.placement = attempt, worker, incarnation
            request.placements.append(request.placement)
            self.running[who] = request

    def _migrate(self, decision: Json) -> None:
        if decision["trajectory"] in self.running:
            self.running[decision["trajectory"]].moving = True

    def _request_released(self, fact: Json) -> None:
        request = self._placed(fact, fact)
        if request is not None and request.moving:
            self._lose(fact["trajectory"], fault=False)

    def _request_failed(self, fact: Json) -> None:
        if self._placed(fact, fact) is None:
            return
        if fact["retryable"]:
            self._lose(fact["trajectory"], fault=True)
        else:
            self._ended(fact["trajectory"])

    def _cancel(self, decision: Json) -> None:
        name = decision["trajectory"]
        self.groups[name.rpartition("-")[0]].requests[name].cancelled = True
        self._ended(name)

    def _group_expired(self, observation: Json) -> None:
        group, most = (
            self.groups[observation["group"]],
            self.started["config"]["rollout"]["group_timeout_s"],
        )
        generates = not (group.outcome or group.closed) and not all(
            request.over for request in group.requests.values()
        )
        early = self.now_ns - group.at_ns < int(most * 1e9)
        self.findings.holds("decisions", observation["group"], "expires early", not early)
        self.findings.holds("decisions", observation["group"], "expires without need", generates)
        group.expired = True
        self._settle(group)

    def _end_samples(self, decision: Json) -> None:
        name, group = decision["group"], self.groups[decision["group"]]
        requests = list(enumerate(group.requests.items()))
        remaining = [
            index for index, (_, request) in requests if request.cancelled or not request.over
        ]
        self.findings.same("decisions", name, "trajectories left", remaining, decision["samples"])
        self.findings.same("decisions", name, "their outcome", group.closed, decision["outcome"])
        for index, (trajectory, request) in requests:
            if index in remaining:
                cancelled = f"{trajectory} runs and was not cancelled"
                self.findings.holds(
                    "decisions", name, cancelled, request.placement is None or request.over
                )
                self._ended(trajectory)

    def _trajectories_logged(self, fact: Json) -> None:
        common = {name: fact[name] for name in ("worker", "incarnation", "version", "digest")}
        for trajectory in fact["trajectories"]:
            self._entry(trajectory | common)

    def _entry(self, entry: Json) -> None:
        name, location = entry["trajectory"], (entry["partition"], entry["offset"])
        if location in self.logged:
            earlier = self.logged[location].entry
            self.findings.same("control", name, f"logged again at {location}", earlier, entry)
            return
        group = self.groups.get(name.rpartition("-")[0])
        if group is None or name not in group.requests:
            self.findings.add("control", name, "is logged but was never dispatched")
            return
        named = (entry["attempt"], entry["worker"], entry["incarnation"])
        placed = named in group.requests[name].placements
        self.findings.holds("control", name, f"is logged by {named}, placed by nobody", placed)
        standing = "fenced" if entry["incarnation"] in self.fenced else "superseded"
        request = self._placed(entry, entry)
        if request is not None:
            standing, request.counts = "counts", entry
            for what in ("version", "digest", "partition"):
                self.findings.same("C1", name, f"{what} logged", group.spec[what], entry[what])
            self._ended(name)
        self.logged[location] = Logged(entry, standing)

    def _placed(self, writer: Json, what: Json) -> Request | None:
        request = self.running.get(what["trajectory"])
        named = (what["attempt"], writer["worker"], writer["incarnation"])
        if request is None or request.placement != named:
            return None
        return None if self.groups[what["trajectory"].rpartition("-")[0]].closed else request

    def _lose(self, trajectory: str, *, fault: bool) -> None:
        request = self.running.pop(trajectory)
        request.placement, request.moving = None, False
        request.faults += fault
        most = self.started["config"]["rollout"]["max_attempts"]
        if request.faults >= most and not self.groups[trajectory.rpartition("-")[0]].closed:
            self._ended(trajectory)

    def _ended(self, trajectory: str) -> None:
        self.running.pop(trajectory, None)
        group = self.groups[trajectory.rpartition("-")[0]]
        group.requests[trajectory].over = True
        self._settle(group)

    def _settle(self, group: Group) -> None:
        requests, rewards = group.requests.values(), list(group.rewards.values())
        over = bool(group.closed) or all(request.over for request in requests)
        remaining = 0 if over else sum(not request.over for request in requests)
        self.bound.settle(group.spec, remaining, rewards, waits=group.waits)

    # Groups that are scored together

    def _score_group(self, decision: Json) -> None:
        name, findings = decision["spec"]["group"], self.findings
        group, names = self.groups[name], ("trajectory", *TAKEN)
        asked = decision["attempt"], decision["worker"], decision["incarnation"]
        free = group.waits and group.asking is None and not group.outcome
        findings.holds("decisions", name, "is scored without need", free)
        over = bool(group.closed) or all(request.over for request in group.requests.values())
        findings.holds("decisions", name, "is scored before its trajectories have ended", over)
        in_ = self.workers.get(decision["incarnation"]) == decision["worker"]
        findings.holds("decisions", name, "is scored by who is out", in_)
        findings.same("decisions", name, "attempt", len(group.asked) + 1, decision["attempt"])
        valid = [result for result in group.results if result["reward"] is not None]
        expected = [[result[what] for what in names] for result in valid]
        actual = [row[:6] for row in decision["trajectories"]]
        findings.same("decisions", name, "records that are scored", expected, actual)
        group.asking = asked
        group.asked.append(asked)
        self.asking[name] = group

    def _group_scored(self, fact: Json) -> None:
        group = self.groups[fact["group"]]
        named = fact["attempt"], fact["worker"], fact["incarnation"]
        asked = f"is scored by {named}, asked by nobody"
        self.findings.holds("control", fact["group"], asked, named in group.asked)
        if group.asking != named or group.outcome:
            return
        if fact.get("error"):
            self._not_scored(group, fault=True, final=not fact.get("retryable", False))
            return
        group.asking = None
        del self.asking[fact["group"]]
        group.scores = {sample["trajectory"]: sample["reward"] for sample in fact["samples"]}
        self._settle(group)

    def _not_scored(self, group: Group, *, fault: bool, final: bool = False) -> None:
        group.asking = None
        del self.asking[group.spec["group"]]
        group.faults += fault
        most = self.started["config"]["rollout"]["max_attempts"]
        if final or (fault and group.faults >= most):
            group.unscored = True
            self._settle(group)

    # Steps

    def _take_batch(self, decision: Json) -> None:
        for why in self.bound.take(decision, self.newest):
            self.findings.add("batches", f"step {decision['step']}", why)
        self.takes[decision["step"], decision["attempt"]] = decision | {"at": self.at}

    def _take_part(self, decision: Json) -> None:
        for why in self.bound.take_part(decision, self.newest):
            self.findings.add("batches", f"step {decision['step']}", why)

    def _batch_refused(self, fact: Json) -> None:
        if self.bound.training == (fact["step"], fact["attempt"]):
            offenders = {offender["group"] for offender in fact["offenders"]}
            self.bound.give_back(
                [
                    self.groups[take["group"]].spec
                    for take in self.takes[self.bound.training]["groups"]
                    if take["group"] not in offenders
                ]
            )

    def _command(self, fact: Json) -> None:
        self.bound.command(fact["verb"], fact.get("args", {}))

    def _step_committed(self, fact: Json) -> None:
        step, key = fact["step"], (fact["step"], fact["attempt"])
        if self.bound.training != key:  # it lost the race against `fail-batch`
            once = step not in self.commits
            self.findings.holds("steps", f"step {step}", "is committed twice", once)
            was_taken = key in self.takes
            self.findings.holds("batches", f"step {step}", "was never taken", was_taken)
            return
        self.bound.training = None
        taken, trained = self.takes[key].get("parts", []), fact.get("parts", [])
        self.findings.same("batches", f"step {step}", "was trained in parts", taken, trained)
        for group in fact["groups"]:
            self.outcome(group["group"], "trained")
        self.commits[step] = fact | {"trainer": self.incarnations["trainer"]}
        self.versions[step + 1] = fact["policy"]
        self.dropped.update(fact.get("dropped", []))

    def _versions_dropped(self, fact: Json) -> None:
        self.dropped.update(fact["versions"])

    def _early_stop(self, decision: Json) -> None:
        self.bound.command("stop", {})

    def _stop_run(self, decision: Json) -> None:
        self.stopped = True
        for name, group in self.groups.items():
            self.findings.holds("C2", name, "is open although the run stopped", bool(group.outcome))
