"""Prints docs/reference/catalogue.md from the code: the tables, and questions that people ask.

python -m tests.support.catalogue_page > docs/reference/catalogue.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from dora_pipe.catalogue.database import VIEWS
from dora_pipe.catalogue.tables import CALLS, FORM, TABLES, Table, columns_of

HEAD: Final = f"""# The catalogue: a run's log as tables

`dora-pipe sql RUN "select ..."` asks the log of a run, live or finished and wherever it lies, in
the SQL of [DuckDB](https://duckdb.org/docs/stable/sql/introduction); `--json` prints an object a
line.
The tables are made from control and decisions alone, so they have what was decided and what became
of it; tokens and texts are in the trajectories (`dora-pipe show`, `dora-pipe export parquet`).
The table of agents' calls is read from the records when a statement names it.

Of a run that is over they are kept beside it, in `catalogue.duckdb`, and opened from there the next
time; the file may be deleted. In a notebook:

```python
import duckdb

duckdb.connect("runs/demo/catalogue.duckdb", read_only=True).sql("from steps").df()
```

Which record of a trajectory counts is decided as everywhere: the first one that was logged for its
present attempt, by a worker that was not out. `audit` proves a run; it shares no code with these
tables beyond the shapes of the records, and a test holds the two accounts against each other.

Columns whose name ends in `_ns` are ns since 1970; null is what did not happen. This page is
printed from the code (`python -m tests.support.catalogue_page > docs/reference/catalogue.md`); the
form of the tables is {FORM}.
"""

QUESTIONS: Final = (
    (
        "Which rows of the data never get a reward?",
        """select row, count(*) as groups, sum(valid) as valid, max(reward) as best
from groups where purpose = 'train' and results > 0
group by row having coalesce(max(reward), 0) = 0 order by groups desc""",
    ),
    (
        "Which rows are always solved, so that they teach nothing?",
        """select row, count(*) as groups, min(reward) as worst
from groups where purpose = 'train' and results > 0
group by row having min(reward) = 1 and count(*) > 1 order by groups desc""",
    ),
    (
        "How often did each row come, what was its reward, how often was it skipped as solved?",
        """with skipped as (
    select subject, count(*) as times from events where kind = 'row-skipped' group by subject)
select task, row, count(*) as groups, avg(reward) as reward, max(coalesce(times, 0)) as skipped
from groups left join skipped on subject = concat_ws('/', 'train', nullif(task, '')) || '#' || row
where purpose = 'train' and results > 0 group by all order by skipped desc, reward""",
    ),
    (
        "What is the reward by length and staleness?",
        """select g.staleness, 2 ** ceil(log2(greatest(t.tokens, 1))) as tokens_up_to,
       count(*) as trajectories, avg(t.reward) as reward
from trajectories t join groups g using (group_id)
where g.fate = 'trained' group by all order by all""",
    ),
    (
        "What did the trainer wait for, and whom?",
        """select kind, worker, count(distinct step) as steps, sum(seconds) as seconds
from waits group by all order by seconds desc""",
    ),
    (
        "Which parts of batches went ahead, and what did each wait for?",
        """select part, count(*) as steps, count(seconds) as ahead, avg(waited_s) as waited_s,
       avg(seconds) as seconds, avg(tokens) as tokens
from parts group by part order by part""",
    ),
    (
        "Where does the time of a trained trajectory go?",
        """select avg(t.placed_ns - g.dispatched_ns) / 1e9 as queued_s,
       avg(t.logged_ns - t.placed_ns) / 1e9 as on_a_worker_s,
       avg(g.complete_ns - t.logged_ns) / 1e9 as for_siblings_s,
       avg(g.taken_ns - g.complete_ns) / 1e9 as for_its_batch_s,
       avg(g.ended_ns - g.taken_ns) / 1e9 as training_s
from trajectories t join groups g using (group_id) where g.fate = 'trained'""",
    ),
    (
        "What was sampled and not trained?",
        """select fate, why, count(*) as groups, sum(tokens) as tokens
from groups where purpose = 'train' and fate not in ('trained', 'open')
group by all order by tokens desc""",
    ),
    (
        "Which worker is slow?",
        """select worker, count(*) as trajectories, sum(tokens) as tokens,
       median((ended_ns - a.placed_ns) / 1e9) as median_s
from attempts a join trajectories using (trajectory_id, worker, incarnation, attempt)
where outcome = 'logged' group by worker order by median_s desc""",
    ),
    (
        "What did lost workers cost?",
        """select w.worker, w.incarnation, w.departure, w.why, count(a.attempt) as attempts_lost
from workers w left join attempts a
  on a.incarnation = w.incarnation and a.outcome in ('left', 'fenced')
where w.departure is not null group by all order by attempts_lost desc""",
    ),
    (
        "How long does a version live?",
        """select version, count(*) as groups, max(step) - version as oldest_staleness,
       (max(ended_ns) - min(dispatched_ns)) / 1e9 as seconds
from groups where purpose = 'train' group by version order by version""",
    ),
    (
        "How long does an agent think between two calls, and how long does it wait for answers?",
        """select caller, count(*) as calls, avg(answered_ns - asked_ns) / 1e9 as answered_s,
       avg(idle_ns) / 1e9 as thinking_s, avg(prompt_tokens) as prompt, avg(tokens) as tokens
from calls group by caller order by calls desc""",
    ),
    (
        "Which groups come first where batches are taken in parts: shorter ones, better ones?",
        """select part, count(*) as siblings, avg(t.tokens) as tokens, avg(t.reward) as reward
from trajectories t join groups g using (group_id)
where fate = 'trained' and part is not null and t.reward is not null
group by part order by part""",
    ),
    (
        "Which errors do requests end with?",
        """select error, any_value(message) as an_example, count(*) as requests
from failures group by error order by requests desc""",
    ),
)
"""What people ask, with the statement that answers it; each runs in the tests."""


def page() -> str:
    parts = [HEAD, "## Questions that people ask\n"]
    for question, sql in QUESTIONS:
        parts.append(f"{question}\n\n```sql\n{sql}\n```\n")
    parts.append("## Tables\n")
    parts += [line for table in (*TABLES, CALLS) for line in _section(table)]
    parts.append("## Views\n")
    for name, body in VIEWS.items():
        parts.append(f"### {name}\n\n```sql\n{_dedented(body)}\n```\n")
    return "\n".join(parts).rstrip("\n") + "\n"


def _section(table: Table) -> Iterator[str]:
    yield f"### {table.name}\n"
    yield f"{table.words}\n"
    yield "| column | type | what it is |"
    yield "| --- | --- | --- |"
    for one in columns_of(table.row):
        kind = one.sql.lower() + (", or null" if one.null else "")
        yield f"| `{one.name}` | {kind} | {one.words} |"
    yield ""


def _dedented(sql: str) -> str:
    return "\n".join(line.strip() for line in sql.strip().splitlines())


if __name__ == "__main__":
    sys.stdout.write(page())
