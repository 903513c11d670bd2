import pytest
from hypothesis import given
from hypothesis import strategies as st

from petra.schedule import (
    Action,
    Deadlock,
    Decoupled,
    GPipe,
    Kind,
    LockedForward,
    OneForwardOneBackward,
    Pipelined,
    Schedule,
    ScheduleError,
    Sequential,
    check,
    draw,
    lay_out,
    lock_step,
    low_staleness,
)

small = st.integers(1, 6)
orders = st.one_of(
    *(st.builds(make, small, small) for make in (lock_step, low_staleness, Sequential, GPipe, OneForwardOneBackward)),
    *(st.builds(make, small, small) for make in (LockedForward, Decoupled)),
    st.builds(low_staleness, small, small, st.floats(0, 2)),
    st.builds(  # any numbers in flight that fall from stage to stage
        lambda steps, k: Pipelined([sum(steps[i:]) for i in range(len(steps) + 1)], k),
        st.lists(st.integers(1, 4), max_size=5),
        small,
    ),
)


@given(orders, st.integers(1, 14))
def test_every_order_is_sound_and_loses_nothing(order, microbatches):
    schedule = Schedule.of(order, microbatches)
    check(schedule)
    for program in schedule.programs:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [a.microbatch for a in program if a.kind is kind] == list(range(microbatches))
        updates = [a.microbatch for a in program if a.kind is Kind.UPDATE and a.microbatch >= 0]
        assert len(updates) == -(-microbatches // order.accumulate)
        assert updates[-1] == microbatches - 1


@given(orders, st.integers(1, 14))
def test_staleness_is_what_the_order_says(order, microbatches):
    for stage, found in enumerate(Schedule.of(order, microbatches).staleness()):
        assert set(found) == {order.staleness(stage)}


def test_another_staleness_than_expected_is_refused():
    schedule = Schedule.of(low_staleness(3), 4)
    check(schedule, [2, 1, 0])
    with pytest.raises(ScheduleError, match="0B0 comes 2 ticks after its forward, not 4"):
        check(schedule, [4, 2, 0])


@given(st.integers(1, 9))
def test_the_two_orders_of_the_paper_and_the_design(stages):
    assert [lock_step(stages).staleness(s) for s in range(stages)] == [2 * (stages - 1 - s) for s in range(stages)]
    assert [low_staleness(stages).staleness(s) for s in range(stages)] == [stages - 1 - s for s in range(stages)]
    # lock-step is the case c = T/2
    assert low_staleness(stages, latency=0.5).in_flight == lock_step(stages).in_flight


def test_rounding_errors_bring_nothing_more_in_flight():
    assert low_staleness(4, latency=5 / 3).in_flight == (13, 9, 5, 0)  # 3 (1 + 10/3) is a little more in floats


@given(orders, st.integers(1, 10))
def test_a_stream_of_unknown_length_gives_the_same_schedule(order, microbatches):
    """Ticks are decided before it is known how many micro-batches follow."""
    longer, shorter = Schedule.of(order, microbatches + 5), Schedule.of(order, microbatches)
    assert longer.ticks[:microbatches] == shorter.ticks[:microbatches]


@given(orders, st.integers(1, 8))
def test_text_reads_back(order, microbatches):
    schedule = Schedule.of(order, microbatches)
    assert Schedule.parse(str(schedule)) == schedule


@given(orders, st.integers(1, 8))
def test_workers_that_follow_their_own_programs_never_wait_for_ever(order, microbatches):
    programs = Schedule.of(order, microbatches).programs
    done = [action for phase in lay_out(programs) for action in phase]
    assert sorted(map(str, done)) == sorted(str(action) for program in programs for action in program)


def test_every_stage_is_busy_in_steady_state():
    for order in (lock_step(4), low_staleness(4)):
        steady = Schedule.of(order, 20).ticks[8]
        assert sorted(str(a.kind) + str(a.stage) for phase in steady for a in phase) == sorted(
            f"{kind}{stage}" for stage in range(4) for kind in "FBU"
        )


def test_lock_step_literally():
    assert draw(Schedule.of(lock_step(3), 3)) == (
        "tick     0   1   2        3        4        5     6\n"
        "stage 0  F0  F1  F2       .        B0 U     B1 U  B2 U\n"
        "stage 1  .   F0  F1       F2 B0 U  B1 U     B2 U  .\n"
        "stage 2  .   .   F0 B0 U  F1 B1 U  F2 B2 U  .     ."
    )


def test_low_staleness_literally():
    assert str(Schedule.of(low_staleness(3, accumulate=2), 3)) == (
        "stages 3\n0: 0F0 | 1F0\n1: 0F1 2F0 2B0 | 1F1 1B0\n2: 0F2 0B0 2F1 2B1 2U1 | 1F2 1B1 1U1\n"
        "3: 0B1 0U1 2F2 2B2 | 1B2\n4: 0B2\n5: 0U2 1U2 2U2"
    )


def test_one_forward_one_backward_literally():
    programs = Schedule.of(OneForwardOneBackward(2, 3), 3).programs
    assert [" ".join(map(str, program)) for program in programs] == [
        "0F0 0F1 0B0 0F2 0B1 0B2 0U2",
        "1F0 1B0 1F1 1B1 1F2 1B2 1U2",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stages 2\n0: 0F0 1F0 | 1B0 1U0 | 0B0 0U0", "1F0 uses the message of 0F0 before it is sent"),
        ("stages 2\n0: 0F0 | 1F0 1B0 1U0 0B0 | 0U0", "0B0 uses the message of 1B0 before it is sent"),
        ("stages 1\n0: 0F0 0B0", "stage 0 never updates with micro-batches [0]"),
        ("stages 1\n0: 0B0 0F0 0U0", "0B0 comes before its forward"),
        ("stages 1\n0: 0F0 0F0 0B0 0U0", "0F0 is done twice"),
        ("stages 1\n0: 0F0 0F1 0B1 0B0 0U0", "0B1 should be 0B0"),
        ("stages 1\n0: 0F1 0F0 0B0 0B1 0U1", "0F1 should be 0F0"),
        ("stages 1\n0: 0F0 0F1 0B0 0U0", "stage 0 does 2 forwards and 1 backwards of 2 micro-batches"),
        ("stages 1\n0: 0F0 0U0 0B0 0U0", "0U0 is done twice"),
        ("stages 1\n0: 0F0 0F1 0B0 0B1 0U0", "0U0 has no gradient of micro-batch 0"),
        ("stages 1\n0: 1F0", "1F0 names a stage beyond the 1"),
        ("stages 1\n0: 0F0 0B0 0U-1", "0U-1 is of zero features, but comes after a backward"),
        ("stages 2\n0: 0F0 0B0 0U0 0L0 | 1F0 1B0 1U0", "0L0 uses the message of 1B0 before it is sent"),
        ("stages 2\n0: 0F0 0B0 0U0 | 1F0 1B0 1U0 1L0", "stage 0 learns from 0 of 1 micro-batches"),
        (
            "stages 2\n0: 0F0 0B0 0U0 | 0F1 0B1 0U1 1F0 1B0 1U0 | 1F1 1B1 1U1 | 0L1 0L0",
            "0L1 should be 0L0, after its forward",
        ),
    ],
)
def test_broken_schedules_are_refused_with_the_cell_marked(text, problem):
    with pytest.raises(ScheduleError) as found:
        check(Schedule.parse(text))
    assert found.value.problem == problem
    assert "stage 0" in str(found.value)
    if found.value.action is not None and found.value.action.stage == 0 and found.value.action.kind is not Kind.UPDATE:
        assert f">{found.value.action.kind}{found.value.action.microbatch}<" in str(found.value)


def test_deadlock_is_found_and_explained():
    # stage 0 waits for a backward before its second forward; stage 1 wants two forwards first
    programs = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(Deadlock, match="stage 0 waits with 0B0 for 1B0; stage 1 waits with 1F1 for 0F1"):
        lay_out([[Action.parse(text) for text in program] for program in programs])


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "-1F0", "0F-1", "0L-1"])
def test_bad_actions(text):
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


@pytest.mark.parametrize("text", ["0: 0F0", "stages x\n", "stages 1\n1: 0F0", "stages 1\n0F0"])
def test_bad_schedules(text):
    with pytest.raises(ValueError, match=r"expected|begins"):
        Schedule.parse(text)


@pytest.mark.parametrize("in_flight", [[0, 0], [1, 1, 0], [2, 1], [0, 1, 0], [1], [1.5, 0], [1.0, 0.0]])
def test_numbers_in_flight_must_fall_to_zero(in_flight):
    with pytest.raises(ValueError, match="must fall from stage to stage"):
        Pipelined(in_flight)


def test_bad_sizes():
    with pytest.raises(ValueError, match="stages is 0"):
        Sequential(0)
    with pytest.raises(ValueError, match="accumulate is 0"):
        lock_step(2, 0)
    for latency in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"latency is {latency}"):
            low_staleness(2, latency=latency)


def test_locked_forward_literally():
    """Features Replay, Alg. 1; the updates without a backward are those with gradients of zero."""
    assert draw(Schedule.of(LockedForward(3), 2)) == (
        "tick     0                 1                 2     3\n"
        "stage 0  F0  .   .   U     F1  .   .   U     B0 U  B1 U\n"
        "stage 1  .   F0  .   U     .   F1  .   B0 U  B1 U  .\n"
        "stage 2  .   .   F0  B0 U  .   .   F1  B1 U  .     ."
    )


def test_decoupled_literally():
    text = str(Schedule.of(Decoupled(3, accumulate=2), 2))
    assert text == (
        "stages 3\n0: 0F0 0B0 | 1F0 1B0 | 0L0 2F0 2B0 | 1L0\n1: 0F1 0B1 0U1 | 1F1 1B1 1U1 | 0L1 2F1 2B1 2U1 | 1L1"
    )


@given(small, small, st.integers(1, 12))
def test_locked_forward_is_low_staleness_but_for_when_and_for_zero_features(stages, k, microbatches):
    """Stage by stage the same actions in the same order: they train alike."""
    ours, theirs = (Schedule.of(make(stages, k), microbatches) for make in (LockedForward, low_staleness))
    blank = [[a.microbatch for a in program if a.microbatch < 0] for program in ours.programs]
    assert [[a for a in program if a.microbatch >= 0] for program in ours.programs] == theirs.programs
    assert blank == [[m for m in range(-n, 0) if (m + 1) % k == 0] for n in range(stages - 1, -1, -1)]
