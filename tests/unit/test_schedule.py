import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petra.schedule import (
    Action,
    AsyncSchedule,
    Deadlock,
    DecoupledSchedule,
    FlushEverySchedule,
    GPipeSchedule,
    InterleavedSchedule,
    Kind,
    LockedForwardSchedule,
    OneFOneBSchedule,
    ScheduleError,
    ScheduleTable,
    SequentialSchedule,
    check_schedule,
    draw,
    draw_svg,
    lay_out,
    least_in_flight,
    lock_step,
    low_staleness,
)

small = st.integers(1, 6)
schedules = st.one_of(
    *(st.builds(make, small, small) for make in (lock_step, low_staleness, SequentialSchedule, GPipeSchedule)),
    *(st.builds(make, small, small) for make in (LockedForwardSchedule, DecoupledSchedule)),
    st.builds(low_staleness, small, small, st.floats(0, 2)),
    st.builds(  # any numbers in flight that decrease from stage to stage
        lambda steps, k: AsyncSchedule([sum(steps[i:]) for i in range(len(steps) + 1)], k),
        st.lists(st.integers(1, 4), max_size=5),
        small,
    ),
)


constant = schedules  # between forward and backward are as many ticks as `staleness` says
schedules |= st.one_of(
    st.builds(OneFOneBSchedule, small, small),
    st.builds(InterleavedSchedule, st.integers(1, 3).map(lambda ranks: 2 * ranks), small),
    st.builds(InterleavedSchedule, st.integers(1, 3).map(lambda ranks: 3 * ranks), small, st.just(3)),
    st.builds(
        FlushEverySchedule,
        st.one_of(st.builds(lock_step, small, small), st.builds(low_staleness, small, small)),
        st.one_of(st.none(), st.integers(1, 3)),
        st.integers(0, 3),
    ),
)


@given(schedules, st.integers(1, 14))
def test_every_schedule_is_valid_and_loses_nothing(schedule, microbatches):
    table = ScheduleTable.of(schedule, microbatches)
    check_schedule(table)
    for program in table.programs:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [a.microbatch for a in program if a.kind is kind] == list(range(microbatches))
        updates = [a.microbatch for a in program if a.kind is Kind.UPDATE and a.microbatch >= 0]
        assert len(updates) == -(-microbatches // schedule.accumulate)
        assert updates[-1] == microbatches - 1


@given(constant, st.integers(1, 14))
def test_staleness_is_what_the_schedule_says(schedule, microbatches):
    for stage, found in enumerate(ScheduleTable.of(schedule, microbatches).staleness()):
        assert set(found) == {schedule.staleness(stage)}


def test_another_staleness_than_expected_raises():
    table = ScheduleTable.of(low_staleness(3), 4)
    check_schedule(table, [2, 1, 0])
    with pytest.raises(ScheduleError, match="0B0 comes 2 ticks after its forward instead of 4"):
        check_schedule(table, [4, 2, 0])


@given(st.integers(1, 9))
def test_the_staleness_of_lock_step_and_low_staleness(stages):
    assert [lock_step(stages).staleness(s) for s in range(stages)] == [2 * (stages - 1 - s) for s in range(stages)]
    assert [low_staleness(stages).staleness(s) for s in range(stages)] == [stages - 1 - s for s in range(stages)]
    # lock-step is the case c = T/2
    assert low_staleness(stages, latency=0.5).in_flight == lock_step(stages).in_flight


def test_rounding_errors_add_nothing_in_flight():
    assert low_staleness(4, latency=1.1 / 2.2).in_flight == (6, 4, 2, 0)
    assert low_staleness(2, latency=2.3 - 0.8).in_flight == (4, 0)  # 2.3 - 0.8 is a little more than 1.5 in floats


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([1.0, 1.0], [], 1.0), "there are 0 round trips for 1 boundaries"),
        (([1.0, 1.0], [1.0], 1.0, [1, 1]), "round trips for 1 boundaries"),
        (([1.0, -1.0], [1.0], 1.0), "seconds is"),
        (([1.0, 1.0], [float("nan")], 1.0), "round_trips is"),
        (([1.0, 2.0], [1.0], 1.5), "period is 1.5, but a stage takes 2.0"),
    ],
)
def test_impossible_times_are_rejected(given, words):
    with pytest.raises(ValueError, match=words):
        least_in_flight(*given)


@given(schedules, st.integers(1, 10))
def test_a_training_of_unknown_length_gives_the_same_schedule(schedule, microbatches):
    """Ticks are decided before it is known how many micro-batches follow."""
    longer, shorter = ScheduleTable.of(schedule, microbatches + 5), ScheduleTable.of(schedule, microbatches)
    assert longer.ticks[:microbatches] == shorter.ticks[:microbatches]


@given(schedules, st.integers(1, 8))
def test_text_reads_back(schedule, microbatches):
    table = ScheduleTable.of(schedule, microbatches)
    assert ScheduleTable.parse(str(table)) == table


@given(schedules, st.integers(1, 8))
def test_workers_that_follow_their_programs_never_wait_forever(schedule, microbatches):
    programs = ScheduleTable.of(schedule, microbatches).programs
    done = [action for phase in lay_out(programs) for action in phase]
    assert sorted(map(str, done)) == sorted(str(action) for program in programs for action in program)


def test_every_stage_is_busy_in_steady_state():
    for schedule in (lock_step(4), low_staleness(4)):
        steady = ScheduleTable.of(schedule, 20).ticks[8]
        assert sorted(str(a.kind) + str(a.stage) for phase in steady for a in phase) == sorted(
            f"{kind}{stage}" for stage in range(4) for kind in "FBU"
        )


def test_lock_step_literally():
    assert draw(ScheduleTable.of(lock_step(3), 3)) == (
        "tick     0   1   2        3        4        5     6\n"
        "stage 0  F0  F1  F2       .        B0 U     B1 U  B2 U\n"
        "stage 1  .   F0  F1       F2 B0 U  B1 U     B2 U  .\n"
        "stage 2  .   .   F0 B0 U  F1 B1 U  F2 B2 U  .     ."
    )


def test_low_staleness_literally():
    assert str(ScheduleTable.of(low_staleness(3, accumulate=2), 3)) == (
        "stages 3\n0: 0F0 | 1F0\n1: 0F1 2F0 2B0 | 1F1 1B0\n2: 0F2 0B0 2F1 2B1 2U1 | 1F2 1B1 1U1\n"
        "3: 0B1 0U1 2F2 2B2 | 1B2\n4: 0B2\n5: 0U2 1U2 2U2"
    )


def test_one_forward_one_backward_literally():
    programs = ScheduleTable.of(OneFOneBSchedule(2, 3), 3).programs
    assert [" ".join(map(str, program)) for program in programs] == [
        "0F0 0F1 0B0 0F2 0B1 0B2 0U2",
        "1F0 1B0 1F1 1B1 1F2 1B2 1U2",
    ]


@given(small, small, st.integers(1, 20))
def test_a_flush_after_every_update_is_1f1b(stages, k, microbatches):
    """The actions of each stage, compared with the definition: J-1-s forwards, then forward and backward in turn."""
    for stage, program in enumerate(ScheduleTable.of(OneFOneBSchedule(stages, k), microbatches).programs):
        expected = []
        for start in range(0, microbatches, k):
            group = range(start, min(start + k, microbatches))
            warmup = min(len(group), stages - 1 - stage)
            expected += [f"{stage}F{m}" for m in group[:warmup]]
            for m in group:
                expected += [f"{stage}F{m + warmup}"] if m + warmup in group else []
                expected.append(f"{stage}B{m}")
            expected.append(f"{stage}U{group[-1]}")
        assert [str(action) for action in program] == expected


@given(small, small, st.integers(1, 3), st.integers(0, 3), st.integers(1, 14))
def test_exact_schedules_never_update_between_forward_and_backward(stages, k, every, until, microbatches):
    schedules = [OneFOneBSchedule(stages, k), GPipeSchedule(stages, k), InterleavedSchedule(2 * stages, k)]
    schedules += [SequentialSchedule(stages, k), FlushEverySchedule(low_staleness(stages, k), every, until)]
    for schedule in schedules:
        for stage, program in enumerate(ScheduleTable.of(schedule, microbatches).programs):
            updates, before = 0, {}
            for action in program:
                if action.kind is Kind.FORWARD:
                    before[action.microbatch] = updates
                elif action.kind is Kind.UPDATE:
                    updates += 1
                else:
                    delay = updates - before[action.microbatch]
                    assert delay <= schedule.staleness(stage)
                    if schedule.exact or updates < until:
                        assert delay == 0
                        assert schedule.delay(stage, updates) == 0


@given(schedules, st.integers(0, 30), st.integers(0, 30))
def test_ticks_at_the_same_position_are_the_same(schedule, one, other):
    def relative(index):
        return [[(a.stage, a.kind, a.microbatch - index) for a in phase] for phase in schedule.tick(index, index + 1)]

    if schedule.position(one) == schedule.position(other):
        assert relative(one) == relative(other)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble(ranks, per_rank, rounds):
    """With forward and backward of equal length, ranks wait for 2(R-1) actions of a stage, which is 1/V as long."""
    schedule = InterleavedSchedule(ranks * per_rank, ranks * rounds, per_rank)
    programs = schedule._programs(ranks * rounds)
    phases = lay_out(programs, schedule.stages)
    assert len(phases) == 2 * per_rank * ranks * rounds + 2 * (ranks - 1)
    for rank, program in enumerate(programs):
        assert {action.stage for action in program} == {s for s, r in enumerate(schedule.placement) if r == rank}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stages 2\n0: 0F0 1F0 | 1B0 1U0 | 0B0 0U0", "1F0 uses the message of 0F0 before it is sent"),
        ("stages 2\n0: 0F0 | 1F0 1B0 1U0 0B0 | 0U0", "0B0 uses the message of 1B0 before it is sent"),
        ("stages 1\n0: 0F0 0B0", "stage 0 never updates with micro-batches [0]"),
        ("stages 1\n0: 0B0 0F0 0U0", "0B0 comes before its forward"),
        ("stages 1\n0: 0F0 0F0 0B0 0U0", "0F0 happens twice"),
        ("stages 1\n0: 0F0 0F1 0B1 0B0 0U0", "0B1 should be 0B0"),
        ("stages 1\n0: 0F1 0F0 0B0 0B1 0U1", "0F1 should be 0F0"),
        ("stages 1\n0: 0F0 0F1 0B0 0U0", "stage 0 has 2 forwards and 1 backwards for 2 micro-batches"),
        ("stages 1\n0: 0F0 0U0 0B0 0U0", "0U0 happens twice"),
        ("stages 1\n0: 0F0 0F1 0B0 0B1 0U0", "0U0 follows no new gradient of micro-batch 0"),
        ("stages 1\n0: 1F0", "1F0 names stage 1, but the schedule has only 1"),
        ("stages 1\n0: 0F0 0B0 0U-1", "0U-1 has zero gradients, but comes after a backward"),
        ("stages 2\n0: 0F0 0B0 0U0 0L0 | 1F0 1B0 1U0", "0L0 uses the message of 1B0 before it is sent"),
        ("stages 2\n0: 0F0 0B0 0U0 | 1F0 1B0 1U0 1L0", "stage 0 learns from 0 of 1 micro-batches"),
        (
            "stages 2\n0: 0F0 0B0 0U0 | 0F1 0B1 0U1 1F0 1B0 1U0 | 1F1 1B1 1U1 | 0L1 0L0",
            "0L1 should be 0L0, after its forward",
        ),
    ],
)
def test_invalid_schedules_raise_with_the_action_marked(text, problem):
    with pytest.raises(ScheduleError) as found:
        check_schedule(ScheduleTable.parse(text))
    assert found.value.problem == problem
    assert "stage 0" in str(found.value)
    if found.value.action is not None and found.value.action.stage == 0 and found.value.action.kind is not Kind.UPDATE:
        assert f">{found.value.action.kind}{found.value.action.microbatch}<" in str(found.value)


def test_deadlock_is_detected_and_explained():
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
    with pytest.raises(ValueError, match=r"begin a schedule with|write it like"):
        ScheduleTable.parse(text)


@pytest.mark.parametrize("in_flight", [[0, 0], [1, 1, 0], [2, 1], [0, 1, 0], [1], [1.5, 0], [1.0, 0.0]])
def test_numbers_in_flight_must_decrease_to_zero(in_flight):
    with pytest.raises(ValueError, match="must decrease from stage to stage"):
        AsyncSchedule(in_flight)


def test_bad_sizes():
    with pytest.raises(ValueError, match="stages is 0"):
        SequentialSchedule(0)
    with pytest.raises(ValueError, match="accumulate is 0"):
        lock_step(2, 0)
    for latency in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"latency is {latency}"):
            low_staleness(2, latency=latency)


def test_locked_forward_literally():
    """Features Replay, Alg. 1; updates without a backward have zero gradients."""
    assert draw(ScheduleTable.of(LockedForwardSchedule(3), 2)) == (
        "tick     0                 1                 2     3\n"
        "stage 0  F0  .   .   U     F1  .   .   U     B0 U  B1 U\n"
        "stage 1  .   F0  .   U     .   F1  .   B0 U  B1 U  .\n"
        "stage 2  .   .   F0  B0 U  .   .   F1  B1 U  .     ."
    )


def test_decoupled_literally():
    text = str(ScheduleTable.of(DecoupledSchedule(3, accumulate=2), 2))
    assert text == (
        "stages 3\n0: 0F0 0B0 | 1F0 1B0 | 0L0 2F0 2B0 | 1L0\n1: 0F1 0B1 0U1 | 1F1 1B1 1U1 | 0L1 2F1 2B1 2U1 | 1L1"
    )


@given(small, small, st.integers(1, 12))
def test_locked_forward_has_the_programs_of_low_staleness_and_updates_with_zero_gradients(stages, k, microbatches):
    """Stage by stage the same actions in the same order: they compute the same."""
    ours, theirs = (ScheduleTable.of(make(stages, k), microbatches) for make in (LockedForwardSchedule, low_staleness))
    zero_gradient = [[a.microbatch for a in program if a.microbatch < 0] for program in ours.programs]
    assert [[a for a in program if a.microbatch >= 0] for program in ours.programs] == theirs.programs
    assert zero_gradient == [[m for m in range(-n, 0) if (m + 1) % k == 0] for n in range(stages - 1, -1, -1)]


SVG = "{http://www.w3.org/2000/svg}"


@given(schedules, st.integers(1, 6))
def test_a_picture_has_one_rectangle_per_action(schedule, microbatches):
    table = ScheduleTable.of(schedule, microbatches)
    root = ElementTree.fromstring(draw_svg(table, "<title> & more"))
    drawn = Counter(rect.get("class") for rect in root.iter(f"{SVG}rect"))
    for kind in Kind:
        assert drawn[kind.name.lower()] == sum(action.kind is kind for action in table.actions)
    assert "<title> & more" in [text.text for text in root.iter(f"{SVG}text")]


def test_a_picture_has_a_background_labels_numbers_and_a_legend():
    root = ElementTree.fromstring(draw_svg(ScheduleTable.of(DecoupledSchedule(3), 12)))
    background = root.find(f"{SVG}rect")
    assert background.get("fill") == "#ffffff"
    assert [background.get(side) for side in ("width", "height")] == [root.get(side) for side in ("width", "height")]
    texts = Counter(text.text for text in root.iter(f"{SVG}text"))
    assert {"tick", "stage 0", "stage 1", "stage 2"} <= texts.keys()
    assert {"forward", "backward", "update", "synthesizer learns", "number: micro-batch"} <= texts.keys()
    assert texts["11"] == 1 + 3 + 3 + 2  # the tick, forwards, backwards and two synthesizers


def test_actions_in_a_picture_lie_inside_it_and_do_not_overlap():
    """Also with two actions of a kind in a cell, and with numbers of three digits."""
    root = ElementTree.fromstring(draw_svg(ScheduleTable.parse("stages 1\n0: 0F0 0F100 0B0 0U0 0B100 0U100 | 0U0")))
    boxes = [
        [float(rect.get(side)) for side in ("x", "y", "width", "height")]
        for rect in root.iter(f"{SVG}rect")
        if rect.get("class")
    ]
    assert len(boxes) == 7
    for i, (x, y, width, height) in enumerate(boxes):
        assert 0 <= x <= x + width <= float(root.get("width"))
        assert 0 <= y <= y + height <= float(root.get("height"))
        for other_x, other_y, other_width, other_height in boxes[:i]:
            across = x + 1e-3 < other_x + other_width and other_x + 1e-3 < x + width
            down = y < other_y + other_height and other_y < y + height
            assert not (across and down)


def test_a_picture_fits_a_page_if_its_columns_do():
    width = ElementTree.fromstring(draw_svg(ScheduleTable.of(low_staleness(4), 6))).get("width")
    assert float(width) <= 700
