"""Which groups of a step stand out, and in which words."""

from __future__ import annotations

from dataclasses import replace

from dora_pipe.audit.suspects import Loop, TrainedRow, loop_of, siblings_of, suspects_of

LOOP = tuple(range(100, 140))
"""40 tokens."""


def row(group: int, sibling: int, **changes: object) -> TrainedRow:
    one = TrainedRow(
        step=9,
        group=f"g{group:010}",
        trajectory=f"g{group:010}-{sibling:03}",
        reward=float(sibling % 2),
        advantage=1.0 if sibling % 2 else -1.0,
        tokens=40 + group % 7,
        ratio_max=1.0 + 0.01 * ((group * 7 + sibling) % 5),
        loss_share=0.001 * (1 + (group + sibling) % 3),
        answer=tuple(range(group, group + 20 + sibling)),
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def step(**odd: object) -> list[TrainedRow]:
    """32 groups of 8; what is odd is so of all siblings of group 5 but the last."""
    return [
        row(group, sibling, **(odd if group == 5 and sibling < 7 else {}))
        for group in range(32)
        for sibling in range(8)
    ]


def test_a_loop_at_the_end_is_found_wherever_it_is_cut_off() -> None:
    assert loop_of((1, 2, 3, *LOOP * 3)) == Loop(period=40, rounds=3)
    assert loop_of((1, 2, *LOOP * 3, *LOOP[:11])) == Loop(period=40, rounds=3)
    assert loop_of((7,) * 30) == Loop(period=1, rounds=30)


def test_what_only_looks_like_a_loop_is_none() -> None:
    assert loop_of(LOOP * 2) is None
    assert loop_of((5, 1, 1, 1)) is None
    assert loop_of((*LOOP * 3, 1)) is None
    assert loop_of(()) is None


def test_siblings_that_end_in_the_same_rewarded_loop_are_said_so() -> None:
    found = suspects_of(step(answer=(9, *LOOP * 4), reward=1.0, tokens=161), 4)
    assert found[0].name == "g0000000005"
    assert "7 of 8 end in the same 40-token loop, reward 1" in found[0].reasons


def test_loops_that_differ_are_not_called_the_same() -> None:
    rows = step()
    for at, one in enumerate(rows):
        if one.group == "g0000000005":
            rows[at] = replace(one, answer=(at, at + 1) * 10)
    assert suspects_of(rows, 1)[0].reasons[0].startswith("8 of 8 end in a 2-token loop")


def test_a_poisoned_reward_stands_out_most_and_by_far() -> None:
    found = suspects_of(step(reward=-1000.0, advantage=-875.0, loss_share=40.0), 16)
    assert len(found) == 16
    assert found[0].name == "g0000000005"
    assert "rewards -1000 to 1, the step's median is 0" in found[0].reasons
    assert found[0].weight > sum(one.weight for one in found) / 2


def test_ratio_length_and_share_of_the_loss_are_measures_too() -> None:
    for odd, words in (
        ({"ratio_max": 60.0}, "ratios up to 60"),
        ({"tokens": 4000}, "3506 tokens, the step's median is 43"),
        ({"loss_share": 0.9}, "93% of the step's loss"),
        ({"answer": (1, 2, 3)}, "7 of 8 say the same"),
    ):
        found = suspects_of(step(**odd), 1)[0]
        assert (found.name, words in found.reasons) == ("g0000000005", True), found


def test_a_step_like_any_other_names_no_reasons() -> None:
    alike = [replace(one, ratio_max=1.0, loss_share=0.001, tokens=40) for one in step()]
    assert all(not one.reasons and one.deviations > 0 for one in suspects_of(alike, 40))


def test_one_group_of_every_step_is_never_a_suspect() -> None:
    rows = [*step(), *(replace(one, step=10) for one in step())]
    found = suspects_of(rows, 1000)
    assert {at: sum(one.step == at for one in found) for at in (9, 10)} == {9: 31, 10: 31}


def test_each_group_is_held_against_its_own_step() -> None:
    later = [replace(one, step=10, group=f"h{one.group}", loss_share=9.0) for one in step()]
    found = suspects_of([*step(reward=50.0), *later], 1)
    assert (found[0].name, found[0].step) == ("g0000000005", 9)


def test_trajectories_of_a_group_are_held_against_all_of_the_step() -> None:
    rows = [
        replace(one, reward=900.0) if one.trajectory == "g0000000005-003" else one for one in step()
    ]
    found = max(siblings_of(rows, "g0000000005"), key=lambda one: one.deviations)
    assert found.name == "g0000000005-003"
    assert len(siblings_of(rows, "g0000000005")) == 8
    assert siblings_of(rows, "g9") == []


def test_rows_without_rewards_and_figures_are_no_trouble() -> None:
    rows = [
        replace(one, reward=None, advantage=None, ratio_max=None, loss_share=None) for one in step()
    ]
    assert len(suspects_of(rows, 8)) == 8
